"""The devices harness finds nothing in the product."""

from tests.faults.devices import HARNESS
from tests.faults.sizes import sized


@sized(short=["--sessions", "6"], long=["--sessions", "40"])
def test_one_of_two_devices_takes_its_sessions_and_no_other(size: list[str]) -> None:
    """Gone at a start, at run time, and moved away.

    Claimed tokens are there, and all tokens when the device is back.
    """
    report = HARNESS.execute(size)

    assert report.findings == []
