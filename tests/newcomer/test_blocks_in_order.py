"""The Python of the documents that need the store alone: pasted as it stands, it runs, and runs again."""

import re
from pathlib import Path

from documents import ROOT, aimed_at, blocks, printed
from server_process import ServerProcess

README = blocks(ROOT / "README.md", "python")[0]
BLOCKS = blocks(ROOT / "docs" / "coming_from.md", "python")[0]
CLIENT = "".join(blocks(ROOT / "docs" / "python.md", "python"))
TUTORIAL = dict(
    re.findall(
        r"^cat > (\w+\.py) <<'PY'\n(.*?)^PY$",
        (ROOT / "docs" / "tutorials" / "operator.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
"""Files that the tutorial writes, by name."""


def test_the_blocks_run_in_order_and_again(tmp_path: Path) -> None:
    """On one store, each in a process that knows nothing else; no torch is imported."""
    with ServerProcess(tmp_path / "data") as server:
        for name, source in TUTORIAL.items():
            (tmp_path / name).write_text(aimed_at(source, server.target))
        said = [
            _said(aimed_at(source, server.target), tmp_path)
            for _ in range(2)
            for source in (README, TUTORIAL["engine.py"], CLIENT, BLOCKS)
        ]

    first, again = (
        "100 tokens; the last row is [7 7 7 ... 7 7 7]\n",
        "200 tokens; the last row is [7 7 7 ... 7 7 7]\n",
    )
    assert said == [first, "", "", "HIT True\n", again, "", "", "HIT True\n"]


def _said(source: str, directory: Path) -> str:
    return printed(f"{source}\nimport sys\nassert 'torch' not in sys.modules\n", directory, timeout_s=60)
