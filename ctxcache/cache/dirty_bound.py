"""Dirty bound: how much of the arena writers may fill before SSD has more of it.

When the bound is reached writers wait in a line that tenants divide by their shares. The first in it flushes what is
dirty until there is room. Worst case: a writer waits `writer_wait_s`, and is refused then.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ctxcache.cache.memory_room import MemoryRoom
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.waiting_line import Request, WaitingLine
from ctxcache.errors import CapacityExceeded


class DirtyBound:
    """Promises room to writers, one after the other. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, room: MemoryRoom) -> None:
        self._state, self._io, self._room = state, io, room
        ledger = self._ledger = state.ledger
        self._line = WaitingLine("room for unwritten rows", ledger.usage.shares, ledger.claimed_by)
        self._turns: dict[Request, asyncio.Event] = {}
        """Set when the request may be the first one. Only the first one makes room."""

    @property
    def waiting_count(self) -> int:
        """Writers that wait for room."""
        return len(self._line)

    async def admit(self, tenant: str, needed_bytes: Callable[[], int], own_bytes: Callable[[], int]) -> int:
        """Wait until a writer of that tenant may claim so much more, promise it, and return how much it is.

        `own_bytes` are claimed by the writer already. Both are asked for again after each wait.

        Raises CapacityExceeded, TooManyRequests, TierFailure.
        """
        if self._line or not self._fits(needed_bytes(), own_bytes()):
            await self._wait_in_line(tenant, needed_bytes, own_bytes)
        promised_bytes = needed_bytes()
        self._ledger.promised(tenant, promised_bytes)
        return promised_bytes

    async def _wait_in_line(
        self, tenant: str, needed_bytes: Callable[[], int], own_bytes: Callable[[], int]
    ) -> None:
        request = self._line.join(tenant, needed_bytes())
        self._turns[request] = asyncio.Event()

        def fits() -> bool:
            request.needed_bytes = needed_bytes()
            return self._fits(request.needed_bytes, own_bytes())

        try:
            if not (fits() and self._is_first(request)):
                self._state.counters.delayed_write_count += 1
                self._state.is_pressed.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ledger.watermarks.writer_wait_s):
                        await self._wait(request, fits)
                if not (fits() and self._is_first(request)):
                    raise self._refusal(request)
        finally:
            del self._turns[request]
            self._line.leave(request)
            self._wake_first()

    async def _wait(self, request: Request, fits: Callable[[], bool]) -> None:
        """Return when the request may be granted, or when it is the first one and nothing is left to be written."""
        turn = self._turns[request]
        while True:
            if self._is_first(request):
                await self._room.clean_until(lambda: fits() or not self._is_first(request))
                if self._is_first(request):
                    return
            turn.clear()
            # Another request may have become the first one because this one came, or because its tenant has more.
            self._wake_first()
            await turn.wait()

    def _is_first(self, request: Request) -> bool:
        return self._line.first(self._limit_bytes()) is request

    def _wake_first(self) -> None:
        first = self._line.first(self._limit_bytes())
        if first is not None:
            self._turns[first].set()

    def _limit_bytes(self) -> int:
        return self._ledger.watermarks.limit_bytes(self._ledger.memory.capacity_bytes)

    def _fits(self, needed_bytes: int, own_bytes: int) -> bool:
        # While no path takes writes memory is a cache of its own, and waiting would not make it less so.
        if not self._io.has_open_path:
            return True
        claimed_bytes = self._ledger.claimed_bytes
        return self._ledger.watermarks.admits(
            needed_bytes, claimed_bytes, own_bytes, self._ledger.memory.capacity_bytes
        )

    def _refusal(self, request: Request) -> CapacityExceeded:
        limit_bytes, needed_bytes = self._limit_bytes(), request.needed_bytes
        free_bytes = max(limit_bytes - self._ledger.claimed_bytes, 0)
        if not self._is_first(request):
            # What is free is for those that come first.
            free_bytes = 0
        return CapacityExceeded(
            f"DRAM: {needed_bytes} B needed, {free_bytes} B may be written before SSD has more of it",
            tier="DRAM",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            # What is larger goes when it is alone.
            limit_bytes=limit_bytes if needed_bytes <= limit_bytes else self._ledger.memory.capacity_bytes,
        )
