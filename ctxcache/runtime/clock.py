"""Time, injected: the machine's clocks here, a movable one in `tests/fakes.py`.

Three times, each with one use:

    store's time     now_ns          expiry of sessions          never jumps, goes on over restarts
    wall clock       wall_ns         what callers say and hear   may jump
    CLOCK_MONOTONIC  monotonic_ns    leases and deadlines        stands still while the machine sleeps

A store's time is the wall clock's at the moment the store was new, plus what CLOCK_BOOTTIME has counted
since. CLOCK_BOOTTIME counts while the machine sleeps. Leases use CLOCK_MONOTONIC because readers beside the
server do.

`StoreClock` carries the store's time over restarts in the file CLOCK, written every minute:

    {"boot_id": "...", "boot_ns": 0, "time_ns": 0, "wall_ns": 0, "checksum": "..."}

On the same boot the time goes on exactly. On another boot the wall clock says how long the stop was: no step
back is believed, and no more than a day forward. Worst case: a machine loses power and its wall clock;
sessions then live up to a minute longer than they should.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol, Self

from ctxcache.errors import CorruptMetadata
from ctxcache.runtime.files import read_facts, write_facts

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
        """How far the wall clock is ahead of the store's time, in steps of STEP_NS; negative when behind."""

    def wall_ns(self) -> int:
        """The wall clock's time, nanoseconds since the epoch. May jump."""


class SystemClock:
    """The machine's clocks. The store's time begins as the wall clock's, unless it is told otherwise."""

    def __init__(self, *, offset_ns: int | None = None) -> None:
        """`offset_ns`: from CLOCK_BOOTTIME to the store's time."""
        # This thread was held up at each of the readings: one plain reading then, a little off.
        self._wall_offset_ns = _wall_offset_ns() or time.time_ns() - boot_ns()
        self._offset_ns = self._wall_offset_ns if offset_ns is None else offset_ns
        self.step_count = 0
        """How often the wall clock was set since the start."""

    def now_ns(self) -> int:
        """See Clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._offset_ns

    # Bound to the function itself: each lease reads it, and a method between costs more than the reading.
    monotonic_ns = staticmethod(time.monotonic_ns)
    """See Clock."""

    def wall_ahead_ns(self) -> int:
        """See Clock. The same as before as long as nobody sets the wall clock.

        Reading two clocks differs by nanoseconds each time; times that are told must not, over restarts too.
        """
        # Rounded, and the same until somebody sets the clock: two answers about one session tell the same
        # times.
        return round(self._look_ns() / STEP_NS) * STEP_NS

    def wall_ns(self) -> int:
        """See Clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._offset_ns + self._look_ns()

    def _look_ns(self) -> int:
        """How far the wall clock is ahead, and whether it was set meanwhile."""
        # Written out: each answer asks for the time, and a call costs more than the two clocks.
        before_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall_ns = time.time_ns()
        # The two readings belong together only where this thread was not held up between them.
        if time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before_ns < STEP_NS // 10:
            step_ns = wall_ns - before_ns - self._wall_offset_ns
        else:
            found_ns = _wall_offset_ns()
            step_ns = 0 if found_ns is None else found_ns - self._wall_offset_ns
        # A clock that a time server slows or hastens drifts a little at a time: each step is followed, few
        # are told.
        if not -STEP_NS < step_ns < STEP_NS:
            self._wall_offset_ns += step_ns
            if abs(step_ns) >= TOLD_STEP_NS:
                self.step_count += 1
                ahead_s = (self._wall_offset_ns - self._offset_ns) / 1e9
                log.warning("clock_stepped by_s=%.3f ahead_s=%.3f", step_ns / 1e9, ahead_s)
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


# -- the clock of a data directory -------------------------------------------------------------------

CLOCK = "CLOCK"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEEP_INTERVAL_S = 60.0
LONGEST_STOP_NS = 86_400 * 10**9
"""A stop over another boot counts as this at most: a wall clock that is far ahead ends nobody who lives
longer."""


# How a time is found again at a start. The file says what both clocks were when it was written:
#
#     same boot      time_ns + (boot now - boot then)                exact: it counts through sleep
#     another boot   time_ns + clamp(wall now - wall then, 0, 1 d)   the wall clock may be anything
#     no file        the wall clock                                   a new store, or a lost file
class StoreClock(SystemClock):
    """The clock of a data directory, carried over restarts. `run` and `keep` write it down."""

    def __init__(self, directory: Path, *, offset_ns: int | None) -> None:
        """Use `open`."""
        super().__init__(offset_ns=offset_ns)
        self._path = directory / CLOCK

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Go on from what the directory says; what cannot be read is logged, and time is the wall clock's."""
        try:
            facts = read_facts(directory / CLOCK)
            boot_id, boot_then_ns, then_ns, wall_then_ns = (
                str(facts["boot_id"]),
                int(facts["boot_ns"]),
                int(facts["time_ns"]),
                int(facts["wall_ns"]),
            )
        except FileNotFoundError:
            return cls(directory, offset_ns=None)
        except (OSError, CorruptMetadata, KeyError, ValueError, TypeError) as error:
            log.warning("clock_unreadable path=%s error=%r", directory / CLOCK, error)
            return cls(directory, offset_ns=None)
        # A boot time that went back is another boot, whatever the id says: a restored snapshot of a machine
        # has the old id.
        if boot_id == _boot_id() and boot_ns() >= boot_then_ns:
            return cls(directory, offset_ns=then_ns - boot_then_ns)
        stop_ns = time.time_ns() - wall_then_ns
        believed_ns = min(max(stop_ns, 0), LONGEST_STOP_NS)
        if believed_ns != stop_ns:
            log.warning("clock_clamped stop_s=%.3f believed_s=%.3f", stop_ns / 1e9, believed_ns / 1e9)
        return cls(directory, offset_ns=then_ns + believed_ns - boot_ns())

    async def run(self) -> None:
        """Keep it, until it is cancelled."""
        while True:
            await self.keep()
            await asyncio.sleep(KEEP_INTERVAL_S)

    async def keep(self) -> None:
        """Write down what time it is; a refusal is logged."""
        # Both clocks are read here, on the loop; only the writing is another thread's.
        at_ns, ahead_ns = boot_ns(), self.wall_ahead_ns()
        now_ns = at_ns + self._offset_ns
        facts = {"boot_id": _boot_id(), "boot_ns": at_ns, "time_ns": now_ns, "wall_ns": now_ns + ahead_ns}
        try:
            await asyncio.to_thread(write_facts, self._path, facts)
        except OSError as error:
            log.warning("clock_not_kept path=%s error=%s", self._path, error.strerror)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        # Another one each time: nothing is known to be the same boot.
        return f"unknown since {boot_ns()}"
