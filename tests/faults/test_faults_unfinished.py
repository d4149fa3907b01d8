"""Unfinished messages of callers without a token leave a server's memory as it was."""

from tests.faults.unfinished import HARNESS


def test_unfinished_messages_cost_no_memory() -> None:
    """The bugs that it finds are planted by hand: memory that stays takes a minute to be sure of."""
    report = HARNESS.execute(["--connections", "40", "--seconds", "1"])

    assert report.findings == []
