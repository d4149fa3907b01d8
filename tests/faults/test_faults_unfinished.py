"""Unfinished messages of callers without a token leave a server's memory as it was."""

from tests.faults.sizes import sized
from tests.faults.unfinished import HARNESS


@sized(short=["--connections", "40", "--seconds", "1"], long=["--connections", "200", "--seconds", "5"])
def test_unfinished_messages_cost_no_memory(size: list[str]) -> None:
    """The bugs that it finds are planted by hand: memory that stays takes a minute to be sure of."""
    report = HARNESS.execute(size)

    assert report.findings == []
