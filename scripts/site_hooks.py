"""What the documentation site does with links that leave docs/.

Files of the repository that are no page of it.

The site is built without a known address of the repository. A link such as
`[notes](../lab/notes/truncation.md)` therefore becomes its text and the path. Everything else is left to
mkdocs, which refuses links that lead nowhere.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with each link out of docs/ as its text and a path of the repository."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def path_of(link: re.Match[str]) -> str:
        target = (folder / link[2].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        return f"{link[1]} (`{path}`)" if path not in link[1] else f"`{path}`"

    return LINK.sub(path_of, markdown)
