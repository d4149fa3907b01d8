"""The tables of mutants apply to what there is now, and a mutant that survives is told."""

import gc
from pathlib import Path

import pytest

from tests.mutants.run import SURVIVED, UNUSABLE, main
from tests.mutants.table import check, load

STALE = """
[[mutant]]
name = "stale"
file = "ctxcache/settings/sizes.py"
old = "a line that is not there"
new = ""
why = "-"
tests = ["tests/test_sizes.py", "tests/no_such_test.py"]
"""
NOTICED = """
[[mutant]]
name = "noticed"
file = "ctxcache/core/extents.py"
old = "self.free_bytes += size_bytes"
new = "self.free_bytes += size_bytes + 1"
why = "-"
tests = ["tests/core/test_ranges_properties.py"]
"""


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """CPython 3.11 fails to parse where other tests' garbage runs code in the middle of it (SystemError)."""
    gc.collect()


def test_every_mutant_applies() -> None:
    """Each one's text is there once, what it makes of it compiles, and its tests exist."""
    mutants = load()

    assert check(mutants) == []
    assert len(mutants) >= 100


def test_a_line_that_is_gone_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mutant that cannot be made is not left out."""
    table = tmp_path / "table.toml"
    table.write_text(STALE)

    assert main(["--table", str(table)]) == UNUSABLE
    assert capsys.readouterr().err.splitlines() == [
        "stale: no longer applies: 'a line that is not there' occurs 0 times in ctxcache/settings/sizes.py",
        "stale: there is no tests/no_such_test.py",
    ]


def test_a_mutant_that_survives_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that its tests notice is good; the same one beside tests of something else is not."""
    table = tmp_path / "table.toml"
    table.write_text(
        NOTICED + NOTICED.replace("test_ranges_properties", "test_identity").replace('"noticed"', '"left"')
    )

    assert main(["--table", str(table), "--jobs", "1", "--first-only"]) == SURVIVED
    assert "2 mutants: 1 first, 0 wider, 0 time-out, 1 survived" in capsys.readouterr().out
