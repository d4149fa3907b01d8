"""Residency: the parts that move segments between the tiers, put together.

Moves run to their end even when the caller that wanted them is cancelled, so that no slot is given back under a
device's hands.
"""

from ctxcache.cache.departures import Departures
from ctxcache.cache.dirty_bound import DirtyBound
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.memory_room import MemoryRoom
from ctxcache.cache.mending import Mending
from ctxcache.cache.moves import Moves
from ctxcache.cache.promotions import Promotions
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.ssd_room import SsdRoom
from ctxcache.cache.staging import Staging
from ctxcache.cache.state import State
from ctxcache.storage.metadata.base import MetadataStore


class Residency:
    """What moves segments. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, metadata: MetadataStore) -> None:
        self._ledger, self._metadata = state.ledger, metadata
        moves = self._moves = Moves()
        self.departures = Departures(state, metadata, moves)
        self.mending = Mending(state, io, self.departures, moves)
        self.staging = Staging(
            state,
            io,
            moves,
            # Room on SSD is made by unstaging, and staging takes room: the first is looked up when it is needed.
            take=lambda size_bytes, session: self.ssd_room.take(size_bytes, session),  # noqa: PLW0108
            place=lambda size_bytes, session: self.ssd_room.place(size_bytes, session),  # noqa: PLW0108
        )
        self.ssd_room = SsdRoom(state, io, metadata, self.departures, self.staging.unstage_something)
        self.flushing = Flushing(state, io, metadata, self.staging, self.mending, moves)
        self.flush = self.flushing.flush
        self.demote = self.flushing.demote
        self.memory_room = MemoryRoom(state, io, self.staging, self.flushing, self.ssd_room)
        self.promotions = Promotions(state, io, self.memory_room, moves)
        self.dirty_bound = DirtyBound(state, io, self.memory_room)

    async def reopen_metadata(self) -> None:
        """Where changes are taken again, give back the slots whose records are gone for certain. Raises TierFailure."""
        if not await self._metadata.reopen():
            return
        stranded = set(self._ledger.below.stranded)
        self._ledger.unstranded(stranded - await self._metadata.recorded_slots())

    async def drain(self) -> None:
        """Wait for every move under way."""
        await self._moves.drain()
