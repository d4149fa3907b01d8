"""Nothing acknowledged is lost by a kill."""

from tests.faults.crash import HARNESS


def test_kills_lose_nothing_that_was_acknowledged() -> None:
    """Thirty cycles with kills at random moments and at durable steps, and some hundred aborted saves."""
    report = HARNESS.execute(["--cycles", "30", "--aborts", "300"])

    assert report.findings == []
    assert report.figures["step_kill_count"]
    assert report.figures["verified_token_count"]
    assert report.figures["verified_block_count"]
    assert report.figures["asleep_count"]
