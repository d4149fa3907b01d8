"""The devices harness finds nothing in the product."""

from tests.faults.devices import HARNESS

SHORT = ["--sessions", "6"]


def test_one_of_two_devices_takes_its_sessions_and_no_other() -> None:
    """Gone at a start, at run time, and moved away.

    Claimed tokens are there, and all tokens when the device is back.
    """
    report = HARNESS.execute(SHORT)

    assert report.findings == []
