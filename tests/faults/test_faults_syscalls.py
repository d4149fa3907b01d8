"""The short run of `tests.faults.syscalls`, and the bugs that it must find."""

import pytest

from tests.faults.harness import Report, Unsupported
from tests.faults.syscalls import HARNESS


def test_nothing_is_lost_whatever_call_fails() -> None:
    """A sample of all points, `fdatasync` and ENOSPC too, a device that hangs and a full filesystem."""
    assert _run().findings == []


@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_the_harness_finds(control: str) -> None:
    """A planted bug is found."""
    report = _run("--control", control)

    assert report.is_good, report


def _run(*arguments: str) -> Report:
    try:
        return HARNESS.execute(arguments)
    except Unsupported as reason:
        pytest.skip(str(reason))
