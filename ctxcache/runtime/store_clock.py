"""The clock of a data directory: the store's time, carried over restarts.

On the same boot it goes on exactly. Over another boot it goes on by the wall clock, of which no step back and
no more than a day forward is believed. Worst case: a machine that loses power and its wall clock, after which
sessions live up to a minute longer than they should.

    CLOCK   {"boot_id": "...", "boot_ns": 0, "time_ns": 0, "wall_ns": 0, "checksum": "..."}, written every minute
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Self

from ctxcache.errors import CorruptMetadata
from ctxcache.runtime.clock import SystemClock, boot_ns
from ctxcache.runtime.facts_file import read_facts, write_facts

CLOCK = "CLOCK"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEEP_INTERVAL_S = 60.0
LONGEST_STOP_NS = 86_400 * 10**9
"""A stop over another boot counts as this at most: a wall clock that is far ahead ends nobody who lives longer."""
log = logging.getLogger(__name__)


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
                str(facts["boot_id"]), int(facts["boot_ns"]), int(facts["time_ns"]), int(facts["wall_ns"]),
            )  # fmt: skip
        except FileNotFoundError:
            return cls(directory, offset_ns=None)
        except (OSError, CorruptMetadata, KeyError, ValueError, TypeError) as error:
            log.warning("clock_unreadable path=%s error=%r", directory / CLOCK, error)
            return cls(directory, offset_ns=None)
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
