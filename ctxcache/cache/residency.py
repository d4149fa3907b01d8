"""Residency: which segments are in DRAM, which on SSD, and the moves between.

Order that everything here rests on: bytes are durable before the record that points at them, and
a record is gone before its bytes are given back. A held segment keeps its slots. Moves run to
their end even when the caller that wanted them is cancelled, so that no slot is given back under
a device's hands. Worst case: making room waits for a flush, and a flush for an eviction.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ctxcache.cache.segment_io import SegmentIO, Written
from ctxcache.cache.state import State, record_of
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import CapacityExceeded, SessionNotFound, TierFailure
from ctxcache.format.slot import Slot
from ctxcache.metadata.base import Changes, MetadataStore, SegmentRecord

PARALLEL_SEGMENTS = 8
"""Segments in flight per move: enough to keep several paths busy, few enough to bound memory."""
FLUSHES_WAITED_FOR = 64
"""Flushes that one request for room waits for: others may take what they free."""

T = TypeVar("T")


class Residency:
    """Moves segments between the tiers, and sessions out of the cache. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, metadata: MetadataStore, dram: SlotAllocator, ssd: SlotAllocator
    ) -> None:
        self._state = state
        self._io = io
        self._metadata = metadata
        self.dram = dram
        self.ssd = ssd
        self.stranded: set[Slot] = set()
        """SSD slots of records that may or may not be gone: a commit failed. Taken until a restart."""
        self._flush_locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._flushes: set[asyncio.Task[None]] = set()
        self._promotions: dict[int, asyncio.Task[None]] = {}
        self._moves: set[asyncio.Task[Any]] = set()

    # -- holds -----------------------------------------------------------------------------------

    def hold(self, segment: Segment) -> None:
        """Keep the segment's slots until `release`."""
        segment.hold_count += 1

    def release(self, segment: Segment) -> None:
        """End one hold; the last one frees a discarded segment."""
        segment.hold_count -= 1
        if segment.is_discarded:
            self.free(segment)

    def free(self, segment: Segment) -> None:
        """Give a segment's slots back as soon as nothing holds it. Its record is gone."""
        segment.is_discarded = True
        if segment.hold_count:
            return
        if segment.dram:
            self.dram.give(segment.dram)
        if segment.ssd and segment.ssd not in self.stranded:
            self.ssd.give(segment.ssd)
        segment.dram = segment.ssd = None

    # -- DRAM ------------------------------------------------------------------------------------

    async def place(self, size_bytes: int) -> Slot:
        """A DRAM slot, made free if need be. Raises CapacityExceeded, TierFailure."""
        for _ in range(FLUSHES_WAITED_FOR):
            while (slot := self.dram.take(size_bytes)) is None and self._drop_clean(size_bytes):
                continue
            if slot is not None:
                return slot
            if not await self._clean_something():
                break
        raise CapacityExceeded(
            tier="DRAM", needed_bytes=size_bytes, free_bytes=self.dram.free_bytes,
            limit_bytes=self.dram.capacity_bytes,
        )  # fmt: skip

    async def _clean_something(self) -> bool:
        """Flush the coldest session that is dirty, or wait for a flush under way; False when there is neither."""
        victim = self._coldest_dirty()
        if victim is not None:
            with suppress(SessionNotFound):
                await self.flush(victim)
            return True
        # Its failure is for those who asked for it; whoever tries next will see it too.
        if self._flushes:
            await asyncio.wait(self._flushes, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    def keep_free(self, free_bytes: int) -> None:
        """Drop the coldest clean segments until that much DRAM is free, as far as that goes."""
        missing = free_bytes - self.dram.free_bytes
        if missing > 0:
            self._drop_clean(missing)

    def _drop_clean(self, size_bytes: int) -> bool:
        """Drop DRAM copies that SSD has too, coldest session and newest tokens first, until `size_bytes` went."""
        dropped_bytes = 0
        for session in self._residents():
            has_any = False
            for segment in reversed(session.segments):
                if dropped_bytes >= size_bytes:
                    return True
                if segment.dram and not segment.hold_count and not segment.is_dirty:
                    dropped_bytes += segment.dram.size_bytes
                    self._drop(segment, segment.dram)
                has_any = has_any or segment.dram is not None
            if not has_any:
                self._state.resident.discard(session.uid)
        return dropped_bytes > 0

    def _residents(self) -> Iterator[Session]:
        """Sessions that may have something in DRAM, coldest first."""
        candidates = self._state.policy.candidates(self._state.resident)
        return (self._state.by_uid[uid] for uid in candidates)

    def _drop(self, segment: Segment, slot: Slot) -> None:
        # Closed: what was appended later would have to be read back first.
        segment.is_open = False
        segment.dram = None
        self.dram.give(slot)

    def _coldest_dirty(self) -> Session | None:
        for session in self._residents():
            if any(s.is_dirty and not s.hold_count for s in session.segments):
                return session
        return None

    async def promote(self, segments: Sequence[Segment], uid: bytes) -> None:
        """Bring a session's held segments into DRAM, verified. Raises CorruptSegment, CapacityExceeded, TierFailure."""
        missing = [s for s in segments if not s.dram]
        for begin in range(0, len(missing), PARALLEL_SEGMENTS):
            await _all(self._promotion(s, uid) for s in missing[begin : begin + PARALLEL_SEGMENTS])

    def _promotion(self, segment: Segment, uid: bytes) -> "asyncio.Future[None]":
        task = self._promotions.get(segment.segment_id)
        if task is None:
            task = self._start(self._promote(segment, uid))
            self._promotions[segment.segment_id] = task
            task.add_done_callback(lambda _: self._promotions.pop(segment.segment_id, None))
        return asyncio.shield(task)

    async def _promote(self, segment: Segment, uid: bytes) -> None:
        # Two readers may have found it missing, one after the other.
        if segment.dram:
            return
        self.hold(segment)
        slot = None
        try:
            slot = await self.place(segment.layout.size_bytes)
            segment.checksums = await self._io.read(segment, slot)
            segment.dram, slot = slot, None
            self._state.promoted(segment, uid)
            self._state.counters.promoted_segment_count += 1
        finally:
            if slot:
                self.dram.give(slot)
            self.release(segment)

    async def demote(self, session: Session) -> None:
        """Flush a session and drop its segments from DRAM, held ones excepted."""
        await self.flush(session)
        for segment in session.segments:
            if segment.dram and not segment.hold_count and not segment.is_dirty:
                self._drop(segment, segment.dram)

    # -- SSD -------------------------------------------------------------------------------------

    async def flush(self, session: Session) -> None:
        """Make every token committed so far durable. Raises CapacityExceeded, TierFailure, SessionNotFound."""
        task = self._start(self._flush(session))
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)
        await asyncio.shield(task)

    async def _flush(self, session: Session) -> None:
        async with self._flush_locks.setdefault(session.uid, asyncio.Lock()):
            if session.is_gone:
                raise SessionNotFound(session=session.name)
            # One moment for the log's end and every segment's rows: rows that come during the
            # write are beyond the recorded end, and would stand where later ones are put.
            end = session.log_end
            dirty = {s: s.row_count for s in session.segments if s.is_dirty}
            if dirty or session.durable_end < end:
                await self._flush_rows(session, dirty, end)

    async def _flush_rows(self, session: Session, dirty: Mapping[Segment, int], end: int) -> None:
        for segment in dirty:
            self.hold(segment)
        try:
            await self._record(session, await self._write(session, dirty), end)
        finally:
            for segment in dirty:
                self.release(segment)

    async def _write(self, session: Session, row_counts: Mapping[Segment, int]) -> list[Written]:
        written: list[Written] = []
        segments = list(row_counts)
        try:
            for begin in range(0, len(segments), PARALLEL_SEGMENTS):
                for segment in segments[begin : begin + PARALLEL_SEGMENTS]:
                    slot = await self._ssd_slot(segment.layout.size_bytes, session)
                    written.append(Written(segment, slot, row_counts[segment]))
                await _all(self._io.write(w) for w in written[begin:])
            await self._io.sync({w.slot.path_index for w in written})
        except BaseException:
            for item in written:
                self.ssd.give(item.slot)
            raise
        return written

    async def _record(self, session: Session, written: Sequence[Written], end: int) -> None:
        kept = [w for w in written if w.segment.reference_count and not session.is_gone]
        for item in written:
            if item not in kept:
                self.ssd.give(item.slot)
        if session.is_gone:
            raise SessionNotFound(session=session.name)
        replaced = {w.segment.ssd for w in kept if w.segment.ssd}
        for item in kept:
            item.adopt()
        # Before the commit: a record written meanwhile must not fall back behind this one.
        session.recorded_end = end
        changes = Changes(sessions=[record_of(session)], segments=[_segment_record(w.segment) for w in kept])
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self.stranded |= replaced
            raise
        session.durable_end = max(session.durable_end, end)
        self._state.counters.flushed_segment_count += len(kept)
        for slot in replaced:
            self.ssd.give(slot)

    async def _ssd_slot(self, size_bytes: int, for_session: Session) -> Slot:
        while (slot := self.ssd.take(size_bytes)) is None:
            victim = self._coldest_removable(for_session)
            if victim is None:
                raise CapacityExceeded(
                    tier="SSD", needed_bytes=size_bytes, free_bytes=self.ssd.free_bytes,
                    limit_bytes=self.ssd.capacity_bytes,
                )  # fmt: skip
            self._state.counters.evicted_session_count += 1
            await self.remove([victim])
        return slot

    def _coldest_removable(self, for_session: Session) -> Session | None:
        for uid in self._state.policy.candidates():
            session = self._state.by_uid[uid]
            if session.is_pinned or session.is_writing or session is for_session:
                continue
            if any(s.ssd for s in session.segments) and not any(s.hold_count for s in session.segments):
                return session
        return None

    # -- out of the cache --------------------------------------------------------------------------

    async def remove(self, sessions: Iterable[Session]) -> None:
        """Make sessions unreachable at once, and give their bytes back when their records are gone."""
        gone = [session for session in sessions if not session.is_gone]
        dead = [segment for session in gone for segment in self._state.forget(session)]
        await self.write_down(gone=gone, dead=dead)

    async def write_down(
        self, changed: Sequence[Session] = (), *, gone: Sequence[Session] = (), dead: Sequence[Segment] = ()
    ) -> None:
        """Record sessions as they are, remove the records of others and of segments that nobody lists.

        Durable when it returns; only then are the dead segments' slots given back. Raises TierFailure.
        """
        await asyncio.shield(self._start(self._write_down(changed, gone, dead)))

    async def _write_down(
        self, changed: Sequence[Session], gone: Sequence[Session], dead: Sequence[Segment]
    ) -> None:
        # Records are made when they are written: those of an earlier moment could undo another's.
        changes = Changes(
            sessions=[record_of(session) for session in changed if not session.is_gone],
            deleted_session_uids=[session.uid for session in gone],
            deleted_segment_ids=[segment.segment_id for segment in dead],
        )
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self.strand(dead)
            raise
        for segment in dead:
            self.free(segment)

    def strand(self, dead: Sequence[Segment]) -> None:
        """Give back what segments have in DRAM; their records may still be there and name their slots."""
        self.stranded |= {segment.ssd for segment in dead if segment.ssd}
        for segment in dead:
            self.free(segment)

    # -- tasks -------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait for every move under way."""
        while self._moves:
            await asyncio.gather(*self._moves, return_exceptions=True)

    def _start(self, move: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(move)
        self._moves.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, move: "asyncio.Task[Any]") -> None:
        self._moves.discard(move)
        # Looked at, so that asyncio does not complain when whoever wanted it has stopped waiting.
        if not move.cancelled():
            move.exception()


async def _all(moves: Iterable[Any]) -> None:
    """Wait for all of them, then raise the first failure: none is left running behind an error."""
    for result in await asyncio.gather(*moves, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _segment_record(segment: Segment) -> SegmentRecord:
    assert segment.ssd is not None  # noqa: S101  # adopt() has just set it
    identity = segment.identity(segment.ssd_row_count)
    return SegmentRecord(segment.segment_id, identity, segment.ssd, segment.header_checksum)
