"""The table of docs/vllm.md: each version of vLLM that is served has a row, and a run changes its own row."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that writes it."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("vllm_versions")


def rows_of(page: Path) -> dict[str, list[str]]:
    """The cells of each version's row."""
    part = page.read_text().partition("<!-- versions -->")[2].partition("<!-- end of versions -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    return {name: cells for name, *cells in rows[2:]}


def test_each_version_that_is_served_has_a_row_in_which_all_passed(table: ModuleType) -> None:
    """A version that is called tried was run, and no other is in the table."""
    rows = rows_of(table.PAGE)
    assert list(rows) == [f"{version}.x" for version in table._tried()]
    for name, (*cells, _) in rows.items():
        assert len(cells) == len(table.COLUMNS), name
        assert all(table._is_whole(cell) for cell in cells), name


def test_a_run_changes_the_row_of_its_version_alone(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that could not be run says so; what is around the table stays."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- versions -->\n<!-- end of versions -->\nbehind\n")
    monkeypatch.setattr(table, "PAGE", page)
    passed = ["1 of 1"] * len(table.COLUMNS)
    table.write("0.9.x", passed, [[[0, 9], "it hears nothing"]])
    table.write("0.10.x", [*passed[1:], "0 of 1"], [])
    table.write("0.9.x", ["its environment could not be made"], [])
    rows = rows_of(page)
    assert list(rows) == ["0.9.x", "0.10.x"]
    assert rows["0.9.x"][:2] == ["its environment could not be made", ""]
    assert rows["0.10.x"][:-1] == [*passed[1:], "0 of 1"]
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")
    assert lines[-3:-1] == ["- before 0.9: it hears nothing", "<!-- end of versions -->"]


def test_a_cell_is_whole_where_some_ran_and_all_passed(table: ModuleType) -> None:
    """Nothing that was not run counts as passed."""
    cells = ("2 of 2", "1 of 2", "0 of 0", "", "its environment could not be made")
    assert [table._is_whole(cell) for cell in cells] == [True, False, False, False, False]
