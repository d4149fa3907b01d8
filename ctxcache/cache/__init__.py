"""The cache: the use cases over sessions, and the state they share. Owned by the event loop.

Policy is decided in `core/`; bytes move through `tiers/` and records through `metadata/`; nothing
here knows gRPC. A request is served by one of the parts of `Cache`.
"""

import asyncio
from collections.abc import Sequence

from ctxcache.cache.models import Models
from ctxcache.cache.reading import Reading
from ctxcache.cache.residency import Residency
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import State
from ctxcache.cache.writing import Writing
from ctxcache.clock import Clock
from ctxcache.core.eviction import EvictionPolicy
from ctxcache.core.expiry import Expiration
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import CapacityExceeded, SessionNotFound
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.metadata.base import MetadataStore
from ctxcache.tiers.base import MappedTier, Tier

PARALLEL_FLUSHES = 8
"""Sessions that are flushed at a time when the cache is closed: they share syncs."""


class Cache:
    """The parts, put together over one arena, one SSD tier and one metadata store."""

    def __init__(
        self, *, arena: MappedTier, ssd: Tier, metadata: MetadataStore, clock: Clock,
        policy: EvictionPolicy, default_expiration: Expiration, crash_count: int = 0,
    ) -> None:  # fmt: skip
        self.arena, self.ssd, self._metadata = arena, ssd, metadata
        self.state = State(clock, policy, crash_count=crash_count)
        # The arena's first page says which arena it is.
        dram_slots = SlotAllocator(arena.capacities_bytes, first_offset=ALIGN_BYTES)
        io = SegmentIO(arena, ssd)
        ssd_slots = SlotAllocator(ssd.capacities_bytes)
        self.residency = Residency(self.state, io, metadata, dram_slots, ssd_slots)
        self.models = Models(self.state, metadata)
        self.sessions = Sessions(self.state, self.residency, metadata, default_expiration)
        self.writing = Writing(self.state, self.residency, io)
        self.reading = Reading(self.state, self.residency, self.sessions, io)

    async def open(self) -> None:
        """Load every record; what does not fit together is cut or removed, logged and committed.

        Raises CorruptMetadata.
        """
        repairs = self.state.load(self._metadata)
        # Every slot is taken before any is given back.
        misplaced = {s for s in self.state.segments.values() if not self._adopt(s)}
        if repairs:
            await self._metadata.commit(repairs, is_durable=True)
        if misplaced:
            await self.sessions.quarantine(misplaced)
        await self.sessions.expire_due()

    async def close(self) -> None:
        """Flush every session and wait for all moves. What cannot be flushed is lost, as its durability says.

        Raises the first failure when everything else is done.
        """
        dirty = [s for s in self.state.by_uid.values() if s.durable_end < s.log_end]
        results = await self._flush_all(dirty, at_a_time=PARALLEL_FLUSHES)
        # What is being flushed makes no room for others: those that found none go one by one.
        again = [s for s, result in results.items() if isinstance(result, CapacityExceeded)]
        results |= await self._flush_all(again, at_a_time=1)
        saved = await asyncio.gather(self.sessions.save_access_times(), return_exceptions=True)
        await self.residency.drain()
        for result in (*results.values(), *saved):
            # A session that is gone was deleted, or evicted to make room for another one's flush.
            if result is not None and not isinstance(result, SessionNotFound):
                raise result

    async def _flush_all(
        self, sessions: Sequence[Session], *, at_a_time: int
    ) -> dict[Session, BaseException | None]:
        results: list[BaseException | None] = []
        for begin in range(0, len(sessions), at_a_time):
            flushes = [self.residency.flush(s) for s in sessions[begin : begin + at_a_time]]
            results += await asyncio.gather(*flushes, return_exceptions=True)
        return dict(zip(sessions, results, strict=True))

    def _adopt(self, segment: Segment) -> bool:
        slot = segment.ssd
        if slot and slot.size_bytes == segment.layout.size_bytes and self.residency.ssd.adopt(slot):
            return True
        segment.ssd = None
        return False
