"""Dirty bound: how much of the arena writers may fill before SSD has more of it.

Worst case: a writer waits `writer_wait_s` for flushes, and is refused then.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.watermarks import Watermarks
from ctxcache.errors import CapacityExceeded


class Places(Protocol):
    """Who has the arena, and makes what is dirty in it clean."""

    dram: SlotAllocator
    watermarks: Watermarks
    is_pressed: asyncio.Event

    async def clean_until(self, is_enough: Callable[[], bool]) -> None:
        """Flush until that is so, as far as that goes. Raises CapacityExceeded, TierFailure."""


class DirtyBound:
    """Promises room to writers. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, places: Places) -> None:
        self._state, self._io, self._places = state, io, places

    async def admit(self, needed_bytes: Callable[[], int], own_bytes: Callable[[], int]) -> int:
        """Wait until a writer may claim so much more, promise it, and return how much it is.

        `own_bytes` are claimed by the writer already.

        Both are asked for again after each wait. Raises CapacityExceeded, TierFailure.
        """
        if not self._admits(needed_bytes(), own_bytes()):
            self._state.counters.delayed_write_count += 1
            self._places.is_pressed.set()
            # A caller may have been begun without a task of its own; what waits needs one.
            await asyncio.sleep(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._places.watermarks.writer_wait_s):
                    await self._places.clean_until(lambda: self._admits(needed_bytes(), own_bytes()))
            self._check_admitted(needed_bytes(), own_bytes())
        promised_bytes = needed_bytes()
        self._state.unwritten.promise(promised_bytes)
        return promised_bytes

    def _admits(self, needed_bytes: int, own_bytes: int) -> bool:
        # While no path takes writes memory is a cache of its own, and waiting would not make it less so.
        if not self._io.has_open_path:
            return True
        claimed_bytes = self._state.unwritten.claimed_bytes
        return self._places.watermarks.admits(
            needed_bytes, claimed_bytes, own_bytes, self._places.dram.capacity_bytes
        )

    def _check_admitted(self, needed_bytes: int, own_bytes: int) -> None:
        if not self._admits(needed_bytes, own_bytes):
            limit_bytes = self._places.watermarks.limit_bytes(self._places.dram.capacity_bytes)
            free_bytes = max(limit_bytes - self._state.unwritten.claimed_bytes, 0)
            raise CapacityExceeded(
                f"DRAM: {needed_bytes} B needed, {free_bytes} B may be written before SSD has more of it",
                tier="DRAM", needed_bytes=needed_bytes, free_bytes=free_bytes,
                # What is larger goes when it is alone.
                limit_bytes=limit_bytes if needed_bytes <= limit_bytes else self._places.dram.capacity_bytes,
            )  # fmt: skip
