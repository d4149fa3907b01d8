"""Nothing that is acknowledged is lost whatever system call fails."""

import pytest

from tests.faults.harness import Report, Unsupported
from tests.faults.sizes import sized
from tests.faults.syscalls import HARNESS


@sized(short=["--points", "2"], long=["--points", "60"])
def test_nothing_is_lost_whatever_call_fails(size: list[str]) -> None:
    """A sample of all points, `fdatasync` and ENOSPC too, a device that hangs and a full filesystem."""
    assert _run(size).findings == []


def _run(arguments: list[str]) -> Report:
    try:
        return HARNESS.execute(arguments)
    except Unsupported as reason:
        pytest.skip(str(reason))
