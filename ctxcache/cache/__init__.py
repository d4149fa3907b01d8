"""The cache: the use cases over sessions, and the state they share. Owned by the event loop.

Policy is decided in `core/`; bytes move through `tiers/` and records through `metadata/`; nothing
here knows gRPC. A request is served by one of the parts of `Cache`.
"""

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
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.metadata.base import MetadataStore
from ctxcache.tiers.base import MappedTier, Tier


class Cache:
    """The parts, put together over one arena, one SSD tier and one metadata store."""

    def __init__(
        self, *, arena: MappedTier, ssd: Tier, metadata: MetadataStore, clock: Clock,
        policy: EvictionPolicy, default_expiration: Expiration,
    ) -> None:  # fmt: skip
        self.arena, self.ssd, self._metadata = arena, ssd, metadata
        self.state = State(clock, policy)
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
        for segment in list(self.state.segments.values()):
            if segment.ssd and not self.residency.ssd.adopt(segment.ssd):
                segment.ssd = None
                await self.sessions.quarantine(segment)
        if repairs:
            await self._metadata.commit(repairs, is_durable=True)
        await self.sessions.expire_due()

    async def close(self) -> None:
        """Flush every session and wait for all moves. What cannot be flushed is lost, as its durability says."""
        for session in list(self.state.by_uid.values()):
            if session.durable_end < session.log_end:
                await self.residency.flush(session)
        await self.sessions.save_access_times()
        await self.residency.drain()
