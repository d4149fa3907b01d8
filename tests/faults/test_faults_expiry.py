"""The expiry harness finds nothing in the product."""

from tests.faults.expiry import HARNESS
from tests.faults.sizes import sized


@sized(short=["--sessions", "400", "--rate", "200", "--untimed"], long=["--sessions", "5000", "--untimed"])
def test_sessions_that_end_together_are_gone_at_once_with_their_space(size: list[str]) -> None:
    """From their instant on nobody sees them, and soon nothing is left of them."""
    report = HARNESS.execute(size)

    assert report.findings == []
