"""Memory room: slots in the arena, made free by dropping what SSD has, and by flushing what it has not.

The ledger says what leaves next; this carries it out. Worst case: making room waits for a flush, and a flush for
an eviction on SSD.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ctxcache.cache.flushing import Flushing
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.ssd_room import SsdRoom
from ctxcache.cache.staging import Staging
from ctxcache.cache.state import State
from ctxcache.core.ledger.ledger import Drop, GiveUp
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import CapacityExceeded, CorruptSegment, SessionNotFound
from ctxcache.format.slot import Slot

DROPS_PER_SLICE = 256
"""Segments dropped before others get their turn of the event loop."""
DROPS_PER_LOOK = 8
"""Segments dropped before the tenants' shares are looked at again."""
FLUSHES_WAITED_FOR = 64
"""Flushes that one request for room waits for: others may take what they free."""


class MemoryRoom:
    """Makes room in the arena. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, staging: Staging, flushing: Flushing, ssd_room: SsdRoom
    ) -> None:
        self._io, self._ledger = io, state.ledger
        self._staging, self._flushing, self._ssd_room = staging, flushing, ssd_room
        self.is_short = asyncio.Event()
        """Set when less is free than shall be."""

    async def place(self, size_bytes: int, tenant: str) -> Slot:
        """A slot for a segment of that tenant, made free if need be. Raises CapacityExceeded, TierFailure."""
        slot = self._take(size_bytes, tenant)
        if slot is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ledger.watermarks.writer_wait_s):
                    slot = await self._take_what_is_cleaned(size_bytes, tenant)
        if slot is None:
            memory = self._ledger.memory
            raise CapacityExceeded(
                tier="DRAM",
                needed_bytes=size_bytes,
                free_bytes=memory.free_bytes,
                limit_bytes=memory.capacity_bytes,
            )
        return slot

    def take_ahead(self, segment: Segment, may_give: Callable[[bytes], bool]) -> Slot | None:
        """A slot that leaves as much free as shall be, and is taken only from sessions that `may_give` takes.

        None when there is none.
        """
        memory, size_bytes = self._ledger.memory, segment.size_bytes
        for _ in range(DROPS_PER_SLICE):
            free_bytes = memory.free_bytes - size_bytes
            if self._ledger.watermarks.missing_bytes(free_bytes, memory.capacity_bytes) <= 0:
                slot = memory.take(size_bytes)
                if slot is not None:
                    return slot
            among = self._ledger.quotas.in_memory(segment.tenant, size_bytes)
            if self._drop_one(among, may_give) is None:
                return None
        return None

    async def keep_free(self) -> None:
        """Once little is free, drop the coldest clean segments until enough is, as far as that goes."""
        self.is_short.clear()
        memory, watermarks = self._ledger.memory, self._ledger.watermarks
        if not watermarks.is_low(memory.free_bytes, memory.capacity_bytes):
            return
        while (missing := watermarks.missing_bytes(memory.free_bytes, memory.capacity_bytes)) > 0:
            if not self._drop_clean(missing, None):
                return
            await asyncio.sleep(0)

    async def clean_until(self, is_enough: Callable[[], bool]) -> None:
        """Flush the coldest dirty sessions until that is so, as far as that goes. Raises CapacityExceeded, TierFailure."""
        for _ in range(FLUSHES_WAITED_FOR):
            if is_enough() or not await self._clean_something(self._is_any_dirty, None):
                return

    # -- parts -------------------------------------------------------------------------------------

    def _take(self, size_bytes: int, tenant: str) -> Slot | None:
        """A slot that is free, or clean."""
        memory = self._ledger.memory
        while (slot := memory.take(size_bytes)) is None and self._drop_clean(size_bytes, tenant):
            continue
        if self._ledger.watermarks.is_low(memory.free_bytes, memory.capacity_bytes):
            self.is_short.set()
        return slot

    async def _take_what_is_cleaned(self, size_bytes: int, tenant: str) -> Slot | None:
        for _ in range(FLUSHES_WAITED_FOR):
            slot = self._take(size_bytes, tenant)
            among = self._ledger.quotas.in_memory(tenant, size_bytes)
            if slot is not None or not await self._clean_something(self._may_leave, among):
                return slot
        return None

    async def _clean_something(self, accepts: Callable[[Session], bool], among: Sequence[str] | None) -> bool:
        """Flush the coldest dirty session of those, or wait for a flush under way; False when there is neither."""
        victim = self._ledger.coldest_to_write(accepts, among)
        if victim is not None:
            # A flush cuts rows that it finds to be bad, and a cut makes room as well.
            with suppress(SessionNotFound, CorruptSegment):
                await self._clean(victim, among)
            return True
        return await self._flushing.wait_for_one()

    async def _clean(self, victim: Session, among: Sequence[str] | None) -> None:
        """Flush a session, or spare it: then it may leave as it is.

        Where SSD takes nothing of it memory is all there is, and one session goes, as from a full SSD. That is
        while no path takes writes, or where its tenant has all that its share gives it.
        """
        from_memory = partial(self._ledger.next_from_memory, among)
        if not self._io.has_open_path and await self._ssd_room.evict(from_memory):
            return
        if self._staging.spares(victim):
            return
        try:
            await self._flushing.flush(victim)
        except CapacityExceeded as error:
            choose = partial(self._ledger.next_over_share, victim)
            if error.facts.get("tier") != "SSD" or not await self._ssd_room.evict(choose):
                raise

    def _drop_clean(self, size_bytes: int, tenant: str | None) -> bool:
        """Drop copies that SSD has too, and spared sessions, until `size_bytes` went; whether anything did.

        `tenant`: which one needs the room; None: it is to be kept free.
        """
        dropped_bytes = dropped_count = look_count = 0
        among: Sequence[str] | None = None
        while dropped_bytes < size_bytes and dropped_count < DROPS_PER_SLICE:
            # The shares take a look at each tenant, and hardly change by a few segments.
            if look_count % DROPS_PER_LOOK == 0:
                among = self._ledger.quotas.in_memory(tenant, size_bytes)
            look_count += 1
            dropped = self._drop_one(among)
            if dropped is None:
                break
            dropped_count += dropped[0]
            dropped_bytes += dropped[1]
        return dropped_bytes > 0

    def _drop_one(
        self, among: Sequence[str] | None, may_give: Callable[[bytes], bool] = lambda _: True
    ) -> tuple[int, int] | None:
        """Carry out the ledger's next move out of memory; how many segments and bytes went, None when nothing may."""
        match self._ledger.next_out_of_memory(among, self._may_leave, may_give):
            case Drop(segment):
                self._ledger.dropped(segment)
                return 1, segment.size_bytes
            case GiveUp(session):
                count = self._ssd_room.give_up(session)
                return count, count * session.layout.size_bytes
        return None

    def _is_any_dirty(self, session: Session) -> bool:
        return bool(self._ledger.unwritten_segments(session))

    def _may_leave(self, session: Session) -> bool:
        """Whether a flush would let something leave: a segment that only its own write holds."""
        return any(
            segment.memory_hold_count == self._staging.is_under_way(segment)
            for segment in self._ledger.unwritten_segments(session)
        )
