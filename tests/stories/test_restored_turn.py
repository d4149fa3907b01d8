"""A restored turn runs as docs/architecture.md tells it."""

import re

import pytest

from tests.stories.tracer import ROOT, Told
from tests.stories.turn import tell

SECTION = "A request, end to end"
PACKAGES = ("ctxcache", "gpu_worker")
NAMED = re.compile(r"`((?:\w+/)*\w+(?:\.py|/))`")
"""A file or a folder in backticks: `service/control_socket.py`, `core/ledger/`."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A restored turn of an engine on a store, traced."""
    return tell(tmp_path_factory.mktemp("turn"))


def test_every_file_of_the_told_request_runs(told: Told) -> None:
    """A file or a folder that the document names in its request is part of the traced turn."""
    names = _named((ROOT / "docs" / "architecture.md").read_text())
    silent = [name for name in names if not any(_is_of(file, name) for file in told.walk.files)]

    assert len(names) >= 5, "the section names too few files to be checked"
    assert silent == []


def test_a_file_that_does_not_run_is_found() -> None:
    """A name stands for the file at its end, and for nothing else."""
    files = {"ctxcache/service/control_socket.py", "ctxcache/core/ledger/segments.py"}
    document = (
        f"## {SECTION}: one turn\n`service/control_socket.py`, `core/ledger/`, `service/local_client.py`,"
        " `trol.py`\n## B\n`x.py`"
    )

    silent = [name for name in _named(document) if not any(_is_of(file, name) for file in files)]
    assert silent == ["service/local_client.py", "trol.py"]


def _named(document: str) -> list[str]:
    """Files and folders in backticks of the section."""
    sections = re.split(r"^## ", document, flags=re.MULTILINE)
    (section,) = (each for each in sections if each.startswith(SECTION))
    return NAMED.findall(section)


def _is_of(file: str, name: str) -> bool:
    """Whether the file is the named one, or lies in the named folder; packages may be left out of a name."""
    candidates = (file, *(file.removeprefix(f"{package}/") for package in PACKAGES))
    return any(each.startswith(name) if name.endswith("/") else each == name for each in candidates)
