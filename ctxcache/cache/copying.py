"""Copying: second copies on another SSD path, for segments that shall have two and have one.

    flush: room and both paths there ──► both written and synced ──► one record names both
    flush: no room, or one path ───────► one copy, counted ──┐
    a copy is bad, or its path is lost or new ───────────────┤
    a session is marked later ───────────────────────────────┴──► copied here, synced, recorded

A copy is made from the one that is there, verified on the way, and never from what DRAM has. It makes room as
a flush does, within the bound of all that is written unasked. A segment that shall have one copy again gives
back the other. Worst case: no other path has room, and everything is looked at again at the next turn.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import islice

from ctxcache.cache.eviction import Departures, SsdRoom, record_moved
from ctxcache.cache.flushing import WriteBehind
from ctxcache.cache.scrubbing import Mending
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Background, State
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata.base import MetadataStore

SEGMENTS_PER_COMMIT = 8
"""Copied with one sync of each path and one commit."""
RELEASED_PER_COMMIT = 512


# A second copy, and what a crash leaves at each step:
#
#     slot taken, bytes written, synced    one copy recorded; the new slot is free after a restart
#     record commits both places           two copies
#     a failed commit                      both slots stay taken until the records are read again
class Copying:
    """Makes second copies, and gives them back. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        departures: Departures,
        ssd_room: SsdRoom,
        mending: Mending,
        write_behind: WriteBehind,
        background: Background,
    ) -> None:
        self._state, self._ledger = state, state.ledger
        self._io, self._metadata, self._departures = io, metadata, departures
        self._ssd_room, self._mending = ssd_room, mending
        self._write_behind, self._background = write_behind, background

    async def turn(self) -> None:
        """Make the copies that are lacking, as far as there is room, and give back those that are too many.

        Raises TierFailure.
        """
        is_more = True
        # Surplus copies first: they give room to those that are lacking.
        while is_more and self._ledger.copies.surplus:
            is_more = await self._release(list(islice(self._ledger.copies.surplus, RELEASED_PER_COMMIT)))
        lacking = list(self._ledger.copies.single)
        for begin in range(0, len(lacking), SEGMENTS_PER_COMMIT):
            await asyncio.sleep(0)
            if not self._write_behind.allowance.is_left(self._state.clock.monotonic_ns()):
                return
            # One that lacks none by now may be of a session that sleeps.
            some = [
                s for s in lacking[begin : begin + SEGMENTS_PER_COMMIT] if s in self._ledger.copies.single
            ]
            # It runs to its end: no slot is given back while a device writes to it.
            if not await asyncio.shield(self._background.start(self._copy_some(some))):
                return

    async def _release(self, surplus: Sequence[Segment]) -> bool:
        """Give back the second copies of segments that nobody reads; whether there were any."""
        freed: dict[Segment, Slot] = {}
        for segment in surplus:
            best = self._ledger.best_place(segment)
            # The copy that would be read stays.
            if not segment.hold_count and best is not None:
                freed[segment] = next(place for place in segment.places if place != best)
        for segment, slot in freed.items():
            # Taken from the segment before the record: no new reader is sent there. The slot itself is free
            # only behind the commit.
            self._ledger.place_lost(segment, slot, is_bad=False)
        if freed:
            await self._departures.write_down(moved=list(freed), left=list(freed.values()))
        return bool(freed)

    async def _copy_some(self, segments: Sequence[Segment]) -> bool:
        """Copy these; whether there was room for all of them."""
        self._metadata.check()
        copies: dict[Segment, Slot] = {}
        headers: dict[Segment, int] = {}
        has_room, failure = True, None
        try:
            for segment in segments:
                if not self._ledger.recount_copies(segment):
                    continue
                # The header that is copied: a flush in between makes another one, and the copy worthless.
                headers[segment] = segment.header_checksum
                try:
                    slot = await self._copy(segment)
                except TierFailure as error:
                    failure = error
                    # The others have their turn first.
                    self._ledger.copies.put_last(segment)
                    break
                if slot is None:
                    has_room = False
                    break
                copies[segment] = slot
            if copies:
                await self._io.sync({slot.path_index for slot in copies.values()})
                await self._record(copies, headers)
        finally:
            for segment, slot in copies.items():
                self._give_back(segment, slot)
        if failure is not None:
            raise failure
        return has_room

    async def _copy(self, segment: Segment) -> Slot | None:
        """Write a segment's copy; the slot it is in, None where there is none. Raises TierFailure."""
        listers = self._ledger.names.listers(segment)
        source = self._ledger.best_place(segment)
        if not listers or source is None:
            return None
        self._ledger.held(segment)
        try:
            slot = await self._ssd_room.place_copy(segment.size_bytes, listers[0], source)
            if slot is None:
                return None
            # Counted as the tenant's while it is under way.
            self._ledger.staged(segment, slot, is_there=True)
            # Copies are unasked writes: the same bound.
            self._write_behind.allowance.spend(slot.size_bytes)
            try:
                await self._mending.read(segment, partial(self._io.copy, segment, target=slot))
            except BaseException:
                self._give_back(segment, slot)
                raise
        except CorruptSegment:
            # Both copies bad, or the only one: nothing to copy from.
            await self._mending.quarantine({segment})
            return None
        else:
            return slot
        finally:
            self._ledger.released(segment)

    async def _record(self, copies: dict[Segment, Slot], headers: dict[Segment, int]) -> None:
        """Record the copies that are still wanted and still true; the others stay among `copies`."""
        replaced: list[Slot] = []
        recorded: list[Segment] = []
        for segment, slot in list(copies.items()):
            # Looked at without an await before the record: the same bytes, still lacking, still on another
            # path.
            is_true = segment.header_checksum == headers[segment] and self._ledger.recount_copies(segment)
            best = self._ledger.best_place(segment)
            if is_true and best is not None and best.path_index != slot.path_index:
                replaced += self._ledger.copied(segment, copies.pop(segment))
                recorded.append(segment)
        await record_moved(self._ledger, self._metadata, recorded, replaced)

    def _give_back(self, segment: Segment, slot: Slot) -> None:
        self._ledger.staged(segment, slot, is_there=False)
        self._ledger.below.give(slot)
