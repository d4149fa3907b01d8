"""The short run of `tests.faults.syscalls`, and the bugs that it must find."""

import pytest

from tests.faults.harness import Unsupported
from tests.faults.syscalls import HARNESS


def test_nothing_is_lost_whatever_call_fails() -> None:
    """A sample of all points, `fdatasync` and ENOSPC too, a device that hangs and a full filesystem."""
    assert _run() == []


@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_the_harness_finds(control: str) -> None:
    """A planted bug is found."""
    assert _run("--control", control) != []


def _run(*arguments: str) -> list[str]:
    try:
        return HARNESS.execute(arguments).findings
    except Unsupported as reason:
        pytest.skip(str(reason))
