"""Bugs that the clock harness must find."""

import time

from ctxcache.runtime import clock
from ctxcache.runtime.clock import SystemClock
from tests.faults.planted import plant


@plant
def wall_clock(_: int) -> None:
    """Sessions live by the wall clock."""
    setattr(SystemClock, "now_ns", lambda _: time.time_ns())  # noqa: B010  mypy would have it typed
    setattr(SystemClock, "wall_ahead_ns", lambda _: 0)  # noqa: B010


@plant
def forgets_time(_: int) -> None:
    """Each start begins with the wall clock's time."""
    clock.CLOCK = "CLOCK.nowhere"

    async def keep(_: object) -> None:
        pass

    setattr(clock.StoreClock, "keep", keep)  # noqa: B010


@plant
def deadlines_by_wall_clock(_: int) -> None:
    """Leases and reservations end by the wall clock."""
    setattr(SystemClock, "monotonic_ns", staticmethod(time.time_ns))  # noqa: B010
