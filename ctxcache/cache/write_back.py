"""Write-back: segments on their way to SSD, and the flush that makes a session's rows durable.

A full segment never changes, so its bytes may go to SSD before anybody asks for durability, and before
its rows are visible: it is *staged*, in a slot that no record names. A flush waits for what is staged,
writes the rest, syncs each path once and commits one record. Order that this rests on: bytes are durable
before the record that points at them. Worst case: a staged segment that is never recorded, whose slot
goes back when the segment does.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from ctxcache.cache.mending import Mending
from ctxcache.cache.moves import Moves
from ctxcache.cache.segment_io import SegmentIO, Written
from ctxcache.cache.state import State, record_of
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import CorruptSegment, SessionNotFound, TierFailure
from ctxcache.format.slot import Slot
from ctxcache.metadata.base import Changes, MetadataStore, SegmentRecord

BAD_PER_FLUSH = 64
"""Segments that one flush mends or cuts: there are more only where memory fails as a whole."""


class Places(Protocol):
    """Who has the slots."""

    ssd: SlotAllocator
    stranded: set[Slot]
    mending: Mending

    def hold(self, segment: Segment) -> None:
        """Keep the segment's slots until `release`."""

    def release(self, segment: Segment) -> None:
        """End one hold."""

    def window(self, size_bytes: int) -> int:
        """How many segments of that size one move has in flight."""

    def take_on_ssd(self, size_bytes: int, for_session: Session) -> Slot | None:
        """A slot that is free."""

    async def place_on_ssd(self, size_bytes: int, for_session: Session) -> Slot:
        """A slot, made free if need be. Raises CapacityExceeded, TierFailure."""


@dataclass(slots=True, eq=False)
class Staged:
    """Rows of a segment on their way to a slot that no record names.

    `is_urgent`: a flush waits for it, so that others make way. `is_wanted` off: its slot goes back.
    """

    segment: Segment
    row_count: int
    is_urgent: bool
    written: Written | None = None
    is_done: bool = False
    is_wanted: bool = True
    task: "asyncio.Task[None]" = field(init=False)


class WriteBack:
    """Stages segments and flushes sessions. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, metadata: MetadataStore, places: Places, moves: Moves
    ) -> None:
        self._state, self._io, self._metadata = state, io, metadata
        self._places, self._moves = places, moves
        self._staged: dict[Segment, Staged] = {}
        self._in_place: dict[Segment, Staged] = {}
        """Full segments under way, wanted or not: their headers are made where their rows lie."""
        self._flushes: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[bytes, bool], asyncio.Task[None]] = {}
        """Flushes that have not begun yet: what is committed until they do is theirs too, whoever asks for it."""
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._windows: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()

    @property
    def staged(self) -> Iterator[Written]:
        """What has a slot on SSD that no record names; exact while no move is under way."""
        return (item.written for item in self._staged.values() if item.written)

    # -- staging -----------------------------------------------------------------------------------

    def stage(self, session: Session, segments: Iterable[Segment]) -> None:
        """Begin to write these segments: every row of theirs is in place and will not change.

        Nothing makes way for them: where no slot is free they wait for a flush.
        """
        for segment in segments:
            row_count = segment.layout.segment_tokens
            if segment not in self._staged and segment.ssd_row_count < row_count and not segment.is_discarded:
                self._staged[segment] = self._start(session, segment, row_count, is_urgent=False)

    def unstage(self, segment: Segment) -> None:
        """Forget what is staged of a segment: it is discarded, or turned out not to be full."""
        staged = self._staged.pop(segment, None)
        if staged is not None:
            self._give_up(staged)

    async def unstage_something(self) -> bool:
        """Give back the slot of something that no flush waits for, or wait until that may be done.

        False when nothing is staged.
        """
        for segment, staged in self._staged.items():
            if staged.is_done:
                self.unstage(segment)
                return True
        under_way = [staged.task for staged in self._staged.values() if staged.written]
        if under_way:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        return bool(under_way)

    def is_under_way(self, segment: Segment) -> bool:
        """Whether a staged segment is held for its write."""
        staged = self._staged.get(segment)
        return staged is not None and not staged.is_done

    def _start(self, session: Session, segment: Segment, row_count: int, *, is_urgent: bool) -> Staged:
        staged = Staged(segment, row_count, is_urgent)
        self._places.hold(segment)
        before = self._in_place.get(segment)
        staged.task = self._moves.start(self._put(session, staged, before))
        if row_count == segment.layout.segment_tokens:
            self._in_place[segment] = staged
        return staged

    async def _put(self, session: Session, staged: Staged, before: Staged | None) -> None:
        window = self._window(session)
        try:
            if before is not None:
                # Of rows that were given up, and would put its header over this one's.
                await asyncio.wait([before.task])
            async with window:
                slot = await self._slot(session, staged) if staged.is_wanted else None
                if slot is not None:
                    staged.written = Written(staged.segment, slot, staged.row_count)
                    staged.segment.stage(slot.size_bytes)
                    await self._io.write(staged.written)
        except BaseException:
            staged.is_wanted = False
            raise
        finally:
            staged.is_done = True
            if self._in_place.get(staged.segment) is staged:
                del self._in_place[staged.segment]
            if not staged.is_wanted or staged.written is None:
                self._give_up(staged)
            self._places.release(staged.segment)

    def _window(self, session: Session) -> asyncio.Semaphore:
        count = self._places.window(session.layout.size_bytes)
        return self._windows.setdefault(session.uid, asyncio.Semaphore(count))

    async def _slot(self, session: Session, staged: Staged) -> Slot | None:
        size_bytes = session.layout.size_bytes
        if staged.is_urgent:
            return await self._places.place_on_ssd(size_bytes, session)
        return self._places.take_on_ssd(size_bytes, session)

    def _give_up(self, staged: Staged) -> None:
        """Give the slot back, now or when the device is done with it."""
        staged.is_wanted = False
        if self._staged.get(staged.segment) is staged:
            del self._staged[staged.segment]
        if staged.is_done and staged.written:
            self._give(staged.written)
            staged.written = None

    def _give(self, written: Written) -> None:
        written.segment.stage(-written.slot.size_bytes)
        self._places.ssd.give(written.slot)

    # -- away from paths that are lost ---------------------------------------------------------------

    async def write_elsewhere(self, session: Session, segments: Sequence[Segment]) -> bool:
        """Write clean segments that DRAM has to SSD once more, and record them there; False when nothing moved.

        Raises CapacityExceeded, TierFailure.
        """
        return await asyncio.shield(self._moves.start(self._write_elsewhere(session, segments)))

    async def _write_elsewhere(self, session: Session, segments: Sequence[Segment]) -> bool:
        async with self.lock(session):
            chosen = [s for s in segments if s.dram and not s.is_dirty and not s.is_discarded]
            for segment in chosen:
                # What was appended to it would make the copy that is on its way another one's.
                segment.is_open = False
                self._places.hold(segment)
            copies: list[Written] = []
            try:
                for segment in chosen:
                    slot = await self._places.place_on_ssd(segment.layout.size_bytes, session)
                    segment.stage(slot.size_bytes)
                    copies.append(Written(segment, slot, segment.ssd_row_count))
                    await self._io.write(copies[-1])
                await self._io.sync({item.slot.path_index for item in copies})
                return await self._record_elsewhere(copies)
            finally:
                for item in copies:
                    self._give(item)
                for segment in chosen:
                    self._places.release(segment)

    async def _record_elsewhere(self, copies: list[Written]) -> bool:
        """Record what is still wanted there; what is not stays in the list."""
        moved = [w for w in copies if w.segment.session_count and w.row_count == w.segment.ssd_row_count]
        replaced = {w.segment.ssd for w in moved if w.segment.ssd}
        for item in moved:
            copies.remove(item)
            item.adopt()
        changes = Changes(segments=[_segment_record(item.segment) for item in moved])
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self._places.stranded |= replaced
            raise
        for slot in replaced:
            self._places.ssd.give(slot)
        for item in moved:
            self._state.reckon_again(item.segment)
        return bool(moved)

    # -- flushing ----------------------------------------------------------------------------------

    @property
    def flush_count(self) -> int:
        """Flushes under way."""
        return len(self._flushes)

    async def flush(self, session: Session, *, is_tail_left: bool = False) -> None:
        """Make every token committed so far durable; `is_tail_left`: but those of a growing segment.

        A tail in which a commit goes on is not left: no record ends inside a commit, so that a crash
        leaves all of it or nothing. Raises CapacityExceeded, TierFailure, SessionNotFound.
        """
        key = session.uid, is_tail_left
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = self._moves.start(self._flush(session, is_tail_left=is_tail_left))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)
        await asyncio.shield(task)

    def lock(self, session: Session) -> asyncio.Lock:
        """What every flush of a session holds."""
        return self._locks.setdefault(session.uid, asyncio.Lock())

    async def wait_for_one(self) -> bool:
        """Wait until one of the flushes under way has ended; False when there is none."""
        # Its failure is for those who asked for it; whoever tries next will see it too.
        if self._flushes:
            await asyncio.wait(self._flushes, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def _flush(self, session: Session, *, is_tail_left: bool) -> None:
        async with self.lock(session):
            del self._waiting[session.uid, is_tail_left]
            await self._flush_what_is_right(session, is_tail_left=is_tail_left)

    async def _flush_what_is_right(self, session: Session, *, is_tail_left: bool) -> None:
        """Flush; what memory did not keep is mended or cut first. Raises CorruptSegment at the end when something was cut."""
        lost: CorruptSegment | None = None
        for tries_left in reversed(range(BAD_PER_FLUSH)):
            try:
                await self._flush_once(session, is_tail_left=is_tail_left)
                break
            except CorruptSegment as error:
                segment = self._state.segments.get(int(error.facts["segment_id"]))
                if segment is None or not tries_left:
                    raise
                try:
                    await self._places.mending.mend(segment, str(error.facts["problem"]))
                except CorruptSegment as gone:
                    lost = gone
        if lost is not None:
            raise lost

    async def _flush_once(self, session: Session, *, is_tail_left: bool) -> None:
        if session.is_gone:
            raise SessionNotFound(session=session.name)
        # One moment for the log's end and every segment's rows: rows that come during the
        # write are beyond the recorded end, and would stand where later ones are put.
        tail = session.growing_tail if is_tail_left and session.is_tail_apart else None
        end = max(session.recorded_end, tail.begin) if tail else session.log_end
        unwritten, now_ns = self._state.unwritten, self._state.clock.monotonic_ns()
        dirty = {s: s.row_count for s in unwritten.segments(session.uid) if s is not tail}
        if dirty or session.durable_end < end:
            with self._state.spans.span("flush", segment_count=len(dirty)):
                await self._flush_rows(session, dirty, end, now_ns)
            took_ns = self._state.clock.monotonic_ns() - now_ns
            self._state.seen.flush_s.observe(took_ns / 10**9)

    async def _flush_rows(
        self, session: Session, dirty: Mapping[Segment, int], end: int, now_ns: int
    ) -> None:
        for segment in dirty:
            self._places.hold(segment)
        try:
            written = await self._write_somewhere(session, dirty)
            await self._record(session, written, end, now_ns)
        finally:
            for segment in dirty:
                self._places.release(segment)

    async def _write_somewhere(self, session: Session, row_counts: Mapping[Segment, int]) -> list[Written]:
        """Write and sync; what was on a path that failed meanwhile once more, on the others."""
        for _ in range(self._places.ssd.path_count):
            try:
                return await self._write(session, row_counts)
            except TierFailure as failure:
                if not self._io.is_path_closed(failure):
                    raise
        return await self._write(session, row_counts)

    async def _write(self, session: Session, row_counts: Mapping[Segment, int]) -> list[Written]:
        taken = [self._take(session, segment, count) for segment, count in row_counts.items()]
        try:
            written = await self._wait(session, taken)
            await self._io.sync({item.slot.path_index for item in written})
        except BaseException:
            # What a device may have lost is written again, from the start, by the next flush.
            for staged in taken:
                self._give_up(staged)
            raise
        return written

    def _take(self, session: Session, segment: Segment, row_count: int) -> Staged:
        """What is staged of a segment, from now on this flush's own; begun now if need be."""
        staged = self._staged.get(segment)
        if staged is None or staged.row_count != row_count:
            return self._start(session, segment, row_count, is_urgent=True)
        return self._staged.pop(segment)

    async def _wait(self, session: Session, taken: list[Staged]) -> list[Written]:
        """Wait until all have ended, then raise the first failure: none is left running behind an error."""
        failure = None
        for i, staged in enumerate(taken):
            await asyncio.wait([staged.task])
            if staged.written is None and not staged.is_urgent and failure is None:
                # There was no slot, or no luck: now it is asked for.
                taken[i] = self._start(session, staged.segment, staged.row_count, is_urgent=True)
                await asyncio.wait([taken[i].task])
            failure = failure or taken[i].task.exception()
            if failure:
                for later in taken[i + 1 :]:
                    later.is_wanted = False
        if failure:
            raise failure
        return [staged.written for staged in taken if staged.written]

    async def _record(self, session: Session, written: Sequence[Written], end: int, begun_ns: int) -> None:
        kept: list[Written] = []
        for item in written:
            if item.segment.session_count and not session.is_gone:
                kept.append(item)
            else:
                self._give(item)
        if session.is_gone:
            raise SessionNotFound(session=session.name)
        replaced = {w.segment.ssd for w in kept if w.segment.ssd}
        for item in kept:
            item.adopt()
        self._state.evictable.add(session.uid)
        self._state.unwritten.settle(session, [item.segment for item in kept], begun_ns)
        # Before the commit: a record written meanwhile must not fall back behind this one.
        session.recorded_end = end
        changes = Changes(sessions=[record_of(session)], segments=[_segment_record(w.segment) for w in kept])
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self._places.stranded |= replaced
            raise
        session.durable_end = max(session.durable_end, end)
        self._state.unwritten.settle(session, (), begun_ns)
        self._state.counters.flushed_segment_count += len(kept)
        for slot in replaced:
            self._places.ssd.give(slot)


def _segment_record(segment: Segment) -> SegmentRecord:
    assert segment.ssd is not None  # noqa: S101  # adopt() has just set it
    identity = segment.identity(segment.ssd_row_count)
    return SegmentRecord(segment.segment_id, identity, segment.ssd, segment.header_checksum)
