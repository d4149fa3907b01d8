"""The soak finds nothing in the product."""

from tests.faults.soak import HARNESS


def test_nothing_is_left_of_what_clients_did() -> None:
    """Some thousand operations by clients that come and go."""
    report = HARNESS.execute(["--operations", "1600", "--rounds", "4"])

    assert report.findings == []
