"""The documents for tests of documents: their blocks of code, their headings, and the links between them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "lab/**/*.md", "helm/*/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "README.template.md"
)
"""All that people read: of the root, the documents, the lab's notes and the chart."""
_FENCED = re.compile(r"^ {0,3}```.*?^ {0,3}```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Link(NamedTuple):
    """A link of a document: the file that it leads to, and a heading's anchor there or nothing."""

    text: str
    path: Path
    anchor: str


def blocks(document: Path, language: str) -> list[str]:
    """The blocks of code in one language, in order."""
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    """The document without its blocks of code."""
    return _FENCED.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> Iterator[Link]:
    """Links into the repository; those to other hosts are not looked at."""
    for target in _LINK.findall(prose(document)):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            yield Link(target, (document.parent / name).resolve() if name else document, anchor)


def anchors(document: Path) -> set[str]:
    """Names by which headings can be linked to, here as on sites that show Markdown."""
    headings = re.findall(r"^#+ (.+?)\s*$", prose(document), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


def aimed_at(source: str, target: str) -> str:
    """Return an example's source with `target` in place of the default one, named or left out."""
    return source.replace("127.0.0.1:7420", target).replace("connect()", f'connect("{target}")')


def printed(source: str, directory: Path, *, timeout_s: float, **environment: str) -> str:
    """Run Python as it stands in a new process, in a directory; what it printed. Fails where it fails."""
    ran = subprocess.run(
        [sys.executable, "-c", source],
        cwd=directory,
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
