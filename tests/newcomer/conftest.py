"""What a newcomer has: a clone, and a home in which README's lines have installed a store."""

import shutil
import subprocess
from pathlib import Path

import pytest
from documents import ROOT, blocks
from newcomers_home import SAID, typed


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git would put into a clone, as they are in this tree, after README's lines ran in it."""
    place = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place / name)
    return place


@pytest.fixture(scope="session")
def home(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory in which README's installation was made."""
    place = tmp_path_factory.mktemp("home")
    [install] = [block for block in blocks(ROOT / "README.md", "sh") if "pip install" in block]
    assert typed(install, clone, place).endswith(SAID)
    return place
