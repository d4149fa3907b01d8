"""The blocks of Python in the documents that need the store alone: pasted as they stand, they run."""

import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, aimed_at, blocks
from server_process import ServerProcess

TIMEOUT_S = 60
README = blocks(ROOT / "README.md", "python")[0]
CLIENT = "".join(blocks(ROOT / "docs" / "python.md", "python"))


@pytest.mark.parametrize(
    ("source", "printed"), [(README, "(100, 1024)\n"), (CLIENT, "")], ids=["README.md", "docs/python.md"]
)
def test_the_blocks_run(source: str, printed: str, tmp_path: Path) -> None:
    """In order, in one process that knows nothing else, against an empty server; no torch is imported."""
    with ServerProcess(tmp_path / "data") as server:
        checked = f"{source}\nimport sys\nassert 'torch' not in sys.modules\n"
        ran = subprocess.run(
            [sys.executable, "-c", aimed_at(checked, server.target)],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed
