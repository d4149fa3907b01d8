"""The devices harness finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.controls import arguments
from tests.faults.devices import HARNESS
from tests.faults.harness import Unsupported

SHORT = ["--sessions", "6"]


def test_one_of_two_devices_takes_its_sessions_and_no_other() -> None:
    """Gone at a start, at run time, and moved away.

    Claimed tokens are there, and all tokens when the device is back.
    """
    report = HARNESS.execute(SHORT)

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    try:
        report = HARNESS.execute(arguments("devices", control))
    except Unsupported as reason:
        pytest.skip(f"NOTICE: a device that hangs is not tested here: {reason}")

    assert report.is_good, report
