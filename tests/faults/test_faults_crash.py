"""Nothing acknowledged is lost by a kill, and every planted bug is found."""

import pytest

from tests.faults.controls import arguments
from tests.faults.crash import HARNESS


def test_kills_lose_nothing_that_was_acknowledged() -> None:
    """Thirty cycles with kills at random moments and at durable steps, and some hundred aborted saves."""
    report = HARNESS.execute(["--cycles", "30", "--aborts", "300"])

    assert report.findings == []
    assert report.figures["step_kill_count"]
    assert report.figures["verified_token_count"]
    assert report.figures["verified_block_count"]
    assert report.figures["asleep_count"]


@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_a_bug_that_a_kill_shows_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(arguments("crash", control))

    assert report.is_good, report
