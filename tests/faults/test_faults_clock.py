"""The clock harness finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.clock import HARNESS


def test_sessions_live_as_long_as_they_were_to_whoever_sets_the_clock() -> None:
    """Hours forwards and back, while the server runs and over a kill."""
    report = HARNESS.execute([])

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(["--control", control])

    assert report.is_good, report
