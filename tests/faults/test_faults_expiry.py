"""The expiry harness finds nothing in the product."""

from tests.faults.expiry import HARNESS

SHORT = ["--sessions", "400", "--rate", "200", "--untimed"]
# Slowness is found in the long run alone.
UNTIMED = [name for name in HARNESS.controls if name != "all_at_once"]


def test_sessions_that_end_together_are_gone_at_once_with_their_space() -> None:
    """From their instant on nobody sees them, and soon nothing is left of them."""
    report = HARNESS.execute(SHORT)

    assert report.findings == []
