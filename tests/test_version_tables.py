"""The tables of versions: what is called tried has a row in which all passed, and a run changes its own."""

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gpu_worker.engines import tried

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that writes them."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("engine_versions")


def rows_of(page: Path) -> dict[str, list[str]]:
    """The cells of each version's row."""
    part = page.read_text().partition("<!-- versions -->")[2].partition("<!-- end of versions -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    return {name: cells for name, *cells in rows[2:]}


def test_each_version_that_is_tried_has_a_row_in_which_all_passed(script: ModuleType) -> None:
    """A version that is called tried was run, and no other is in the table."""
    assert {engine.name for engine in script.ENGINES.values()} == set(tried.TRIED)
    for engine in script.ENGINES.values():
        rows = rows_of(engine.page)
        assert list(rows) == [engine.row(version) for version in tried.TRIED[engine.name]]
        for name, (*cells, _) in rows.items():
            assert len(cells) == len(engine.columns), name
            assert all(script._is_whole(cell) for cell in cells), name


def test_a_run_changes_the_row_of_its_version_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that could not be run says so; what is around the table stays."""
    page = tmp_path / "docs" / "vllm.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- versions -->\n<!-- end of versions -->\nbehind\n")
    monkeypatch.setattr(script.setup, "ROOT", tmp_path)
    engine = script.ENGINES["vllm"]
    passed = ["1 of 1"] * len(engine.columns)
    script.write(engine, "0.9", passed, [[[0, 9], "it hears nothing"]])
    script.write(engine, "0.10", [*passed[1:], "0 of 1"], [])
    script.write(engine, "0.9", ["its environment could not be made"], [])
    rows = rows_of(page)
    assert list(rows) == ["0.9.x", "0.10.x"]
    assert rows["0.9.x"][:2] == ["its environment could not be made", ""]
    assert rows["0.10.x"][:-1] == [*passed[1:], "0 of 1"]
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")
    assert lines[-3:-1] == ["- before 0.9: it hears nothing", "<!-- end of versions -->"]
    script.write(replace(engine, requirement="vllm=={}"), "2026.9.1", passed, [])
    assert list(rows_of(page)) == ["0.9.x", "0.10.x", "2026.9.1"]


def test_a_cell_is_whole_where_some_ran_and_all_passed(script: ModuleType) -> None:
    """Nothing that was not run counts as passed."""
    cells = ("2 of 2", "1 of 2", "0 of 0", "", "its environment could not be made")
    assert [script._is_whole(cell) for cell in cells] == [True, False, False, False, False]


def test_versions_are_read_by_their_leading_numbers() -> None:
    """Releases, builds of a platform, and builds of a day; a build without a number was not run."""
    known = {"0.32.0": (0, 32, 0), "0.28.0+cpu": (0, 28, 0), "0.33.1.dev12+g0a1b2c3": (0, 33, 1), "dev": ()}
    assert {version: tried.numbers_of(version) for version in known} == known
    assert tried.is_tried("vLLM", "0.28.0+cpu")
    assert not tried.is_tried("vLLM", "0.2.8")
    assert not tried.is_tried("LMCache", "0.5.60")
    assert not tried.is_tried("LMCache", "dev")


def test_a_version_that_was_not_run_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With those that were; a version of the table is not told."""
    monkeypatch.setitem(tried.TRIED, "LMCache", ("1.2", "1.3"))
    tried.warn_if_untried.cache_clear()
    with caplog.at_level(logging.WARNING):
        for version in ("1.3.1", "1.4.0", "1.4.0"):
            tried.warn_if_untried("LMCache", version)
    said = "LMCache 1.4.0 was not tried with ctxcache, 1.2, 1.3 were: compare replies first"
    assert [record.message for record in caplog.records] == [said]
