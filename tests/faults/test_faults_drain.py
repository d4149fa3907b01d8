"""The drain harness finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.drain import HARNESS


def test_nothing_begun_or_acknowledged_is_lost_by_a_drain() -> None:
    """A few drains under load."""
    report = HARNESS.execute(["--cycles", "2"])

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(["--cycles", "1", "--control", control])

    assert report.is_good, report
