"""Time, injected: the machine's clocks here, a movable one in `tests/fakes.py`.

A store has a time of its own: wall-clock time when it was new, and from then on as much later as the machine's
CLOCK_BOOTTIME says, which counts while the machine sleeps and never jumps. Sessions live by it. What callers
are told, and say, is the wall clock's time, however far that is ahead by now. Leases and other deadlines are of
CLOCK_MONOTONIC, as those of the readers beside the server, who sleep when it does. `store_clock` carries the
store's time over restarts.
"""

import logging
import time
from typing import Protocol

STEP_NS = 10**7
"""The wall clock is not taken to be elsewhere for less: reading two clocks takes a moment."""
TOLD_STEP_NS = 10**9
"""Smaller steps are not logged: time servers make them."""
READS = 4
log = logging.getLogger(__name__)


class Clock(Protocol):
    """Where time comes from."""

    def now_ns(self) -> int:
        """The store's time, nanoseconds since the epoch. Never jumps, and goes on over restarts."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment. Never goes back; for deadlines."""

    def wall_ahead_ns(self) -> int:
        """How far the wall clock is ahead of the store's time now, in steps of STEP_NS; negative when behind."""

    def wall_ns(self) -> int:
        """The wall clock's time, nanoseconds since the epoch. May jump."""


class SystemClock:
    """The machine's clocks. The store's time begins as the wall clock's, unless it is told otherwise."""

    def __init__(self, *, offset_ns: int | None = None) -> None:
        """`offset_ns`: from CLOCK_BOOTTIME to the store's time."""
        self._wall_offset_ns = _wall_offset_ns() or time.time_ns() - boot_ns()
        self._offset_ns = self._wall_offset_ns if offset_ns is None else offset_ns
        self.step_count = 0
        """How often the wall clock was set since the start."""

    def now_ns(self) -> int:
        """See Clock."""
        return boot_ns() + self._offset_ns

    def monotonic_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()

    def wall_ahead_ns(self) -> int:
        """See Clock. The same as before as long as nobody sets the wall clock.

        Reading two clocks differs by nanoseconds each time; times that are told must not, over restarts too.
        """
        return round(self._look_ns() / STEP_NS) * STEP_NS

    def wall_ns(self) -> int:
        """See Clock."""
        return self.now_ns() + self._look_ns()

    def _look_ns(self) -> int:
        """How far the wall clock is ahead, and whether it was set meanwhile."""
        found_ns = _wall_offset_ns()
        step_ns = 0 if found_ns is None else found_ns - self._wall_offset_ns
        if abs(step_ns) >= STEP_NS:
            self._wall_offset_ns += step_ns
            if abs(step_ns) >= TOLD_STEP_NS:
                self.step_count += 1
                log.warning("clock_stepped by_s=%.3f ahead_s=%.3f", step_ns / 1e9, self._ahead_ns() / 1e9)
        return self._ahead_ns()

    def _ahead_ns(self) -> int:
        return self._wall_offset_ns - self._offset_ns


def boot_ns() -> int:
    """Nanoseconds since the machine's boot, those included in which it slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _wall_offset_ns() -> int | None:
    """From CLOCK_BOOTTIME to the wall clock; None when this thread was held up between the two each time."""
    for _ in range(READS):
        before_ns, wall, after_ns = boot_ns(), time.time_ns(), boot_ns()
        if after_ns - before_ns < STEP_NS // 10:
            return wall - before_ns
    return None
