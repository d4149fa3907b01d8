"""A harness ends in a verdict, whatever happens inside it."""

import argparse

import pytest

from tests.faults.harness import NOT_GOOD, Harness, Report


def _breaks(_: argparse.Namespace, report: Report) -> None:
    report.find("something")
    raise KeyError("missing")


BREAKING = Harness("breaking", "Breaks.", _breaks, {"planted": "a bug"})


@pytest.mark.parametrize("arguments", [[], ["--control", "planted"]], ids=["plain", "control"])
def test_a_harness_that_breaks_is_not_good(arguments: list[str]) -> None:
    """Its own error is a finding with a place, and what it found before proves no control."""
    report = BREAKING.execute(arguments)

    assert not report.is_good
    assert report.findings[0] == "something"
    assert report.findings[1].startswith("the harness broke: KeyError: 'missing' (test_harness.py:")


def test_a_broken_harness_says_so_and_ends_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines are a verdict, not a traceback."""
    monkeypatch.setattr("sys.argv", ["breaking"])

    assert BREAKING.main() == NOT_GOOD
    assert capsys.readouterr().out.startswith("breaking: BROKEN in ")
