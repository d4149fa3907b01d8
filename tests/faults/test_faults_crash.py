"""Nothing acknowledged is lost by a kill."""

from tests.faults.crash import HARNESS
from tests.faults.sizes import sized


@sized(short=["--cycles", "15", "--aborts", "100"], long=["--cycles", "200", "--aborts", "3000"])
def test_kills_lose_nothing_that_was_acknowledged(size: list[str]) -> None:
    """Cycles with kills at random moments and at durable steps, and aborted saves."""
    report = HARNESS.execute(size)

    assert report.findings == []
    assert report.figures["step_kill_count"]
    assert report.figures["verified_token_count"]
    assert report.figures["verified_block_count"]
    assert report.figures["asleep_count"]
