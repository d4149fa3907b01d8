"""Examples of hypothesis are the same in every run, whatever was imported before."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def _drawn() -> list[list[int]]:
    """The examples of one test."""
    drawn: list[list[int]] = []

    @given(st.lists(st.integers(0, 1 << 40), max_size=40))
    def note(numbers: list[int]) -> None:
        drawn.append(numbers)

    note()
    return drawn


def test_a_module_that_is_imported_changes_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the numbers that are written in it is drawn."""
    before = _drawn()
    (tmp_path / "numbers_of_a_module.py").write_text(f"NUMBERS = {[1_000_003 * n for n in range(1, 400)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("numbers_of_a_module")

    assert _drawn() == before
