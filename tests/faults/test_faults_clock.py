"""The clock harness finds nothing in the product."""

from tests.faults.clock import HARNESS


def test_sessions_live_as_long_as_they_were_to_whoever_sets_the_clock() -> None:
    """Hours forwards and back, while the server runs and over a kill."""
    report = HARNESS.execute([])

    assert report.findings == []
