"""Residency: which segments are in DRAM, which on SSD, and the moves between.

Order that everything here rests on: bytes are durable before the record that points at them, and
a record is gone before its bytes are given back. A held segment keeps its slots. Moves run to
their end even when the caller that wanted them is cancelled, so that no slot is given back under
a device's hands. Worst case: making room waits for a flush, and a flush for an eviction.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from ctxcache.cache.admission import Admission
from ctxcache.cache.departures import Departures
from ctxcache.cache.dirty_bound import DirtyBound
from ctxcache.cache.mending import Mending
from ctxcache.cache.moves import Moves
from ctxcache.cache.promotions import Promotions
from ctxcache.cache.quotas import Quotas
from ctxcache.cache.segment_io import SegmentIO, Written
from ctxcache.cache.ssd_room import SsdRoom
from ctxcache.cache.state import State
from ctxcache.cache.victims import Victims
from ctxcache.cache.write_back import WriteBack
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.residence import Residence
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.core.watermarks import Watermarks
from ctxcache.errors import CapacityExceeded, CorruptSegment, SessionNotFound
from ctxcache.format.slot import Slot
from ctxcache.metadata.base import MetadataStore

WINDOW_BYTES = 32 << 20
"""Bytes that one move has in flight, on its session's path mostly: enough for the device never to wait, few enough for
moves of several sessions to take turns. Two segments at least: one is verified while the next is read."""
DROPS_PER_SLICE = 256
"""Segments dropped before others get their turn of the event loop."""
DROPS_PER_LOOK = 8
"""Segments dropped before it is looked again whose are to leave."""
FLUSHES_WAITED_FOR = 64
"""Flushes that one request for room waits for: others may take what they free."""


class Residency:
    """Moves segments between the tiers. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, metadata: MetadataStore, dram: SlotAllocator,
        ssd: SlotAllocator, watermarks: Watermarks,
    ) -> None:  # fmt: skip
        self._state = state
        self._io = io
        self._metadata = metadata
        self.dram = dram
        self.ssd = ssd
        self.watermarks = watermarks
        self.is_short = asyncio.Event()
        """Set when less is free than shall be."""
        self.is_pressed = asyncio.Event()
        """Set when more is dirty than shall be."""
        self.stranded: set[Slot] = set()
        """SSD slots of records that may or may not be gone: a commit failed. Taken until changes are taken again."""
        self.quarantined: set[Slot] = set()
        """SSD slots that gave back other bytes than were written there. Taken until they are released."""
        self.spoiled: set[Slot] = set()
        """DRAM slots that do not keep what is written there. Taken until a restart."""
        self._spoiling: set[Segment] = set()
        """Those that leave such a slot as soon as nobody uses it."""
        self._held_past: Counter[Segment] = Counter()
        """Of the holds on segments, those that may do without DRAM."""
        self._moves = Moves()
        self.quotas = Quotas(state.usage, ssd, lambda: self.watermarks.filled_bytes(dram.capacity_bytes))
        self._victims = Victims(state, io, self.quotas)
        self.admission = Admission(state, io, ssd, self._victims)
        self._write_back = WriteBack(state, io, metadata, self, self._moves)
        self.promotions = Promotions(state, io, self, self._moves)
        self.dirty_bound = DirtyBound(state, io, self)
        self.departures = Departures(state, metadata, self, self._moves)
        self.mending = Mending(state, io, self, self.departures, self._moves)
        unstage = self._write_back.unstage_something
        self.ssd_room = SsdRoom(state, io, metadata, ssd, self._victims, self.departures, unstage)

    @property
    def staged(self) -> Iterator[Written]:
        """What has a slot on SSD that no record names yet; exact while no move is under way."""
        return self._write_back.staged

    @property
    def flush_count(self) -> int:
        """Flushes under way."""
        return self._write_back.flush_count

    def window(self, size_bytes: int) -> int:
        """How many segments of that size one move has in flight."""
        return max(2, WINDOW_BYTES // size_bytes)

    # -- holds -----------------------------------------------------------------------------------

    def hold(self, segment: Segment, *, is_past: bool = False) -> None:
        """Keep the segment's slots until `release`; `is_past`: its bytes wherever they lie, DRAM may be left."""
        segment.hold_count += 1
        if is_past:
            self._held_past[segment] += 1

    def release(self, segment: Segment, *, is_past: bool = False) -> None:
        """End one hold; the last one frees a discarded segment."""
        segment.hold_count -= 1
        if is_past:
            self._held_past[segment] -= 1
            if not self._held_past[segment]:
                del self._held_past[segment]
        if segment in self._spoiling:
            self.spoil(segment)
        if segment.is_discarded:
            self.free(segment)
        elif self._is_clean(segment) or self._is_spared(segment):
            self._state.resident.add(segment)
        if not segment.hold_count and isinstance(segment.home, Residence):
            self._state.evictable.add(segment.home.uid)

    def free(self, segment: Segment) -> None:
        """Give a segment's slots back as soon as nothing holds it. Its record is gone."""
        segment.is_discarded = True
        if segment.hold_count:
            if self._is_clean(segment):
                self._drop(segment)
            return
        if segment.dram:
            self.dram.give(segment.dram)
            self._state.placement.dropped(segment)
        if segment.ssd and segment.ssd not in self.stranded:
            self.ssd.give(segment.ssd)
        segment.dram = segment.ssd = None
        self._write_back.unstage(segment)

    # -- DRAM ------------------------------------------------------------------------------------

    async def place(self, size_bytes: int, tenant: str) -> Slot:
        """A DRAM slot for a segment of that tenant, made free if need be. Raises CapacityExceeded, TierFailure."""
        slot = self._take(size_bytes, tenant)
        if slot is None:
            # A caller may have been begun without a task of its own; what waits needs one.
            await asyncio.sleep(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.watermarks.writer_wait_s):
                    slot = await self._take_what_is_cleaned(size_bytes, tenant)
        if slot is None:
            raise CapacityExceeded(
                tier="DRAM", needed_bytes=size_bytes, free_bytes=self.dram.free_bytes,
                limit_bytes=self.dram.capacity_bytes,
            )  # fmt: skip
        return slot

    async def _take_what_is_cleaned(self, size_bytes: int, tenant: str) -> Slot | None:
        for _ in range(FLUSHES_WAITED_FOR):
            slot = self._take(size_bytes, tenant)
            among = self.quotas.in_dram(tenant, size_bytes)
            if slot is not None or not await self._clean_something(self._may_leave, among):
                return slot
        return None

    def _take(self, size_bytes: int, tenant: str) -> Slot | None:
        """A slot that is free, or clean."""
        while (slot := self.dram.take(size_bytes)) is None and self._drop_clean(size_bytes, tenant):
            continue
        if self.watermarks.is_low(self.dram.free_bytes, self.dram.capacity_bytes):
            self.is_short.set()
        return slot

    async def clean_until(self, is_enough: Callable[[], bool]) -> None:
        """Flush the coldest dirty sessions until that is so, as far as that goes. Raises CapacityExceeded, TierFailure."""
        for _ in range(FLUSHES_WAITED_FOR):
            if is_enough() or not await self._clean_something(self._is_any_dirty, None):
                return

    async def _clean_something(self, accepts: Callable[[bytes], bool], among: Sequence[str] | None) -> bool:
        """Flush the coldest dirty session of those, or wait for a flush under way; False when there is neither."""
        victim = self._state.unwritten.ranking.first(accepts, among)
        if victim is not None:
            # What is found to be bad then is cut, which makes room as well.
            with suppress(SessionNotFound, CorruptSegment):
                await self._clean(self._state.by_uid[victim], among)
            return True
        return await self._write_back.wait_for_one()

    async def _clean(self, victim: Session, among: Sequence[str] | None) -> None:
        """Flush a session, or spare it: then it may leave as it is.

        Where SSD takes nothing of it memory is all there is: one goes, as from a full SSD. That is while no
        path takes writes, or where its tenant has all that its share gives it.
        """
        if not self._io.has_open_path and await self.ssd_room.evict(partial(self._victims.in_memory, among)):
            return
        if self.spares(victim):
            return
        try:
            await self.flush(victim)
        except CapacityExceeded as error:
            choose = partial(self._victims.over_share, victim)
            if error.facts.get("tier") != "SSD" or not await self.ssd_room.evict(choose):
                raise

    def excess_dirty_bytes(self, dirty_bytes: int) -> int:
        """How much of that is more than shall be; not positive when nothing is."""
        return self.watermarks.excess_dirty_bytes(dirty_bytes, self.dram.capacity_bytes)

    def committed(self, session: Session, segment: Segment) -> None:
        """Rows of the segment were committed: only DRAM has them."""
        unwritten = self._state.unwritten
        unwritten.add(session, segment, self._state.clock.monotonic_ns())
        if self.excess_dirty_bytes(unwritten.due_bytes) > 0:
            self.is_pressed.set()

    def spares(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Leave an unwritten session as it is if it is not worth its place on SSD; whether it is spared.

        `ahead_bytes` of what is free there are somebody's already.
        """
        unwritten = self._state.unwritten
        if not self.admission.refuses(session, ahead_bytes):
            unwritten.unspare(session.uid)
            return False
        for segment in unwritten.segments(session.uid):
            self._write_back.unstage(segment)
            self._state.resident.add(segment)
        unwritten.spare(session.uid, self._state.clock.monotonic_ns())
        return True

    async def keep_free(self) -> None:
        """Once little DRAM is free, drop the coldest clean segments until enough is, as far as that goes."""
        self.is_short.clear()
        capacity_bytes = self.dram.capacity_bytes
        if not self.watermarks.is_low(self.dram.free_bytes, capacity_bytes):
            return
        while (missing := self.watermarks.missing_bytes(self.dram.free_bytes, capacity_bytes)) > 0:
            if not self._drop_clean(missing, None, at_most=DROPS_PER_SLICE):
                return
            await asyncio.sleep(0)

    def _drop_clean(self, size_bytes: int, tenant: str | None, *, at_most: int = DROPS_PER_SLICE) -> bool:
        """Drop DRAM copies that SSD has too, coldest session and newest tokens first, until `size_bytes` went.

        Of spared sessions, the whole. `tenant`: who needs the room; None is nobody in particular.
        """
        dropped_bytes = dropped_count = look_count = 0
        among: Sequence[str] | None = None
        while dropped_bytes < size_bytes and dropped_count < at_most:
            # Whose turn it is takes a look at each tenant, and hardly changes by a few segments.
            if look_count % DROPS_PER_LOOK == 0:
                among = self.quotas.in_dram(tenant, size_bytes)
            look_count += 1
            segment = self._state.resident.take(self._is_droppable, among=among)
            if segment is None:
                break
            freed = self._let_go(segment)
            dropped_bytes += freed * segment.layout.size_bytes
            dropped_count += freed
        return dropped_bytes > 0

    def _is_droppable(self, segment: Segment) -> bool:
        if self._is_clean(segment):
            return True
        if not self._is_spared(segment):
            return False
        may_leave = self.admission.may_leave(segment, self._may_leave)
        if not self._is_spared(segment):
            # It is worth writing by now.
            self.is_pressed.set()
        return may_leave

    def _is_spared(self, segment: Segment) -> bool:
        return segment.home is not None and self._state.unwritten.is_spared(segment.home.uid)

    def _let_go(self, segment: Segment) -> int:
        """Drop a segment, or give up its whole session where only DRAM has that; returns how many went."""
        if not segment.is_dirty or segment.home is None:
            self._drop(segment)
            return 1
        return self.ssd_room.give_up(self._state.by_uid[segment.home.uid])

    def _is_clean(self, segment: Segment) -> bool:
        if segment.dram is None or segment.is_dirty or self._hold_count_in_dram(segment):
            return False
        # What lies on a lost path goes from DRAM where there is nowhere else to write it.
        return not self._state.is_on_lost_path(segment) or not self._io.has_open_path

    def _hold_count_in_dram(self, segment: Segment) -> int:
        return segment.hold_count and segment.hold_count - self._held_past.get(segment, 0)

    def _drop(self, segment: Segment) -> None:
        # Closed: what was appended later would have to be read back first.
        segment.is_open = False
        slot, segment.dram = segment.dram, None
        if slot:
            self.dram.give(slot)
        self._state.placement.dropped(segment)
        if self._state.is_on_lost_path(segment):
            self._state.reckon_again(segment)

    def spoil(self, segment: Segment) -> None:
        """See Mending."""
        segment.is_open = False
        if segment.is_dirty or self._hold_count_in_dram(segment):
            self._spoiling.add(segment)
            return
        self._spoiling.discard(segment)
        if segment.dram:
            self.spoiled.add(segment.dram)
            segment.dram = None
            self._state.placement.dropped(segment)

    def _is_any_dirty(self, uid: bytes) -> bool:
        return bool(self._state.unwritten.segments(uid))

    def _may_leave(self, uid: bytes) -> bool:
        """Whether a flush would let something leave."""
        return any(self._may_go(segment) for segment in self._state.unwritten.segments(uid))

    def _may_go(self, segment: Segment) -> bool:
        """Whether nobody but its own write holds it."""
        return self._hold_count_in_dram(segment) == self._write_back.is_under_way(segment)

    def take_ahead(self, segment: Segment, may_give: Callable[[bytes], bool]) -> Slot | None:
        """A slot that leaves as much free as shall be, and costs nobody but whom `may_give` takes. None when there is none."""
        size_bytes = segment.layout.size_bytes
        for _ in range(DROPS_PER_SLICE):
            free_bytes = self.dram.free_bytes - size_bytes
            if self.watermarks.missing_bytes(free_bytes, self.dram.capacity_bytes) <= 0:
                slot = self.dram.take(size_bytes)
                if slot is not None:
                    return slot
            among = self.quotas.in_dram(segment.tenant, size_bytes)
            cold = self._state.resident.take(self._is_droppable, may_give, among)
            if cold is None:
                return None
            self._let_go(cold)
        return None

    async def demote(self, session: Session) -> None:
        """Flush a session and drop its segments from DRAM, held ones excepted."""
        await self.flush(session)
        for segment in session.segments:
            if self._is_clean(segment):
                self._drop(segment)

    # -- SSD -------------------------------------------------------------------------------------

    async def flush(self, session: Session, *, is_tail_left: bool = False, is_last: bool = False) -> None:
        """Make every token committed so far durable; `is_tail_left`: but those of a growing segment.

        `is_last`: the server ends, and may use up the room for records. Raises CapacityExceeded,
        TierFailure, SessionNotFound.
        """
        self._metadata.check(is_growing=not is_last)
        await self._write_back.flush(session, is_tail_left=is_tail_left)

    async def reopen_metadata(self) -> None:
        """Where changes are taken again, give back the slots whose records are gone for certain. Raises TierFailure."""
        if not await self._metadata.reopen():
            return
        stranded = set(self.stranded)
        for slot in stranded - await self._metadata.recorded_slots():
            self.stranded.discard(slot)
            self.ssd.give(slot)

    def flush_lock(self, session: Session) -> asyncio.Lock:
        """Who holds it keeps flushes of the session from beginning."""
        return self._write_back.lock(session)

    def stage(self, session: Session, segments: Iterable[Segment]) -> None:
        """Begin to write these full segments, ahead of a flush. See WriteBack."""
        self._write_back.stage(session, segments)

    def unstage(self, segment: Segment) -> None:
        """Forget what is staged of a segment that turned out not to be full."""
        self._write_back.unstage(segment)

    def take_on_ssd(self, size_bytes: int, for_session: Session) -> Slot | None:
        """An SSD slot that is free."""
        return self.ssd_room.take(size_bytes, for_session)

    async def place_on_ssd(self, size_bytes: int, for_session: Session) -> Slot:
        """An SSD slot, made free if need be. Raises CapacityExceeded, TierFailure."""
        return await self.ssd_room.place(size_bytes, for_session)

    @property
    def takes_writes(self) -> bool:
        """Whether an SSD path takes writes."""
        return self._io.has_open_path

    async def write_elsewhere(self, session: Session, segments: Sequence[Segment]) -> bool:
        """Write clean segments of a session to other SSD paths. See WriteBack."""
        return await self._write_back.write_elsewhere(session, segments)

    async def drain(self) -> None:
        """Wait for every move under way."""
        await self._moves.drain()
