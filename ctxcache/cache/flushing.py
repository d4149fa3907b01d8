"""Flushing: what makes rows durable, asked for or not.

    ledger's unwritten ──► staged: written to a slot that no record names
                               │ flush: waits for what is staged, writes the rest
                               ▼
                           synced, once for each path ──► one record committed ──► durable

A full segment never changes. So it is staged before a caller asks for durability, and before its rows are
visible. Bytes are durable before the record that points at them. Write-behind flushes unasked: what was
committed since the last look, what has become old and, above the watermark, what is oldest. Worst case: a
session is written whole, however large it is. A segment that is staged and never recorded gives its slot back
when the segment goes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ctxcache.cache.eviction import SsdRoom, record_moved, record_of, segment_record_of
from ctxcache.cache.scrubbing import Mending
from ctxcache.cache.segments import SegmentIO, Written
from ctxcache.cache.state import Background, State
from ctxcache.core.ledger.places import Place, Use
from ctxcache.core.ledger.segment import LISTED, Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.work import current_work
from ctxcache.core.limits import Allowance
from ctxcache.errors import CorruptSegment, SessionNotFound, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata.base import Changes, MetadataStore

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20
"""Bytes that one move has in flight, mostly on one path: enough that the device never waits, few enough for
moves of several sessions to take turns. Two segments at least: one is verified while the next is read."""


def window(size_bytes: int) -> int:
    """How many segments of that size one move has in flight."""
    return max(2, WINDOW_BYTES // size_bytes)


# The life of a staged copy. A flush that took it records it; every other end gives its slot back.
#
#    start ──► under way ──────► done ──────► taken by a flush ──► synced ──► recorded
#                  │               │                  │
#                  │ given up      │ given up         │ a write or sync failed, or the segment was cut
#                  ▼               ▼                  ▼
#              slot back once   slot back now     slot back; the next flush starts anew
#              the device is done
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


# Three sets of staged work, and who looks at each:
#
#     _staged     may be taken by a flush, or given up       by segment: one each
#     _in_place   full segments whose header is being made in the arena, wanted or not
#     _windows    per session: at most WINDOW_BYTES in flight
#
# A staged segment is held until its write ends, and the slot below is nobody else's until it is recorded or
# given up. `Staged.written` without a record is the only owner of its slots.
class Staging:
    """Writes segments to slots that no record names. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        background: Background,
        ssd_room: SsdRoom,
    ) -> None:
        self._ledger = state.ledger
        self._io, self._background = io, background
        self._ssd_room = ssd_room
        self._staged: dict[Segment, Staged] = {}
        self._in_place: dict[Segment, Staged] = {}
        """Full segments under way, wanted or not: their headers are made where their rows lie."""
        self._windows: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()
        state.unstage = self.unstage

    @property
    def written(self) -> Iterator[Written]:
        """Segments with a slot on SSD that no record names; exact while no move is under way."""
        return (item.written for item in self._staged.values() if item.written)

    def stage(self, session: Session, segments: Iterable[Segment]) -> None:
        """Begin to write these segments: every row of theirs is in place and will not change.

        Nothing makes way for them: where no slot is free they wait for a flush.
        """
        for segment in segments:
            row_count = segment.layout.segment_tokens
            # A held segment without a record is on its way out: a slot for it would only be given back.
            is_wanted = segment.durable_row_count < row_count and segment.place is not Place.HELD
            if segment not in self._staged and is_wanted:
                self._staged[segment] = self.start(session, segment, row_count, is_urgent=False)

    def unstage(self, segment: Segment) -> None:
        """Forget what is staged of a segment: it is gone, spared, or turned out not to be full."""
        staged = self._staged.pop(segment, None)
        if staged is not None:
            self.give_up(staged)

    def spares(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Leave an unwritten session as it is if it is not worth its place on SSD; whether it is spared.

        `ahead_bytes` of what is free there are taken already.
        """
        if not self._ledger.spares(session, ahead_bytes):
            return False
        for segment in self._ledger.unwritten.segments(session):
            self.unstage(segment)
        return True

    async def unstage_something(self) -> bool:
        """Give back the slot of something that no flush waits for, or wait until that may be done.

        False when nothing is staged.
        """
        # A read that has ended is given up at once. One under way is not: a device may still write there.
        for segment, staged in self._staged.items():
            if staged.is_done:
                self.unstage(segment)
                return True
        # A device may still write to the other slots: they come back when it is done.
        under_way = [staged.task for staged in self._staged.values() if staged.written]
        if under_way:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        return bool(under_way)

    def is_under_way(self, segment: Segment) -> bool:
        """Whether a staged segment is held for its write."""
        staged = self._staged.get(segment)
        return staged is not None and not staged.is_done

    def take(self, session: Session, segment: Segment, row_count: int) -> Staged:
        """The staged copy of a segment, from now on the caller's own; begun now if need be."""
        staged = self._staged.get(segment)
        # Rows came since: the staged copy has fewer, and a record of more would name padding.
        if staged is None or staged.row_count != row_count:
            return self.start(session, segment, row_count, is_urgent=True)
        return self._staged.pop(segment)

    def start(self, session: Session, segment: Segment, row_count: int, *, is_urgent: bool) -> Staged:
        """Begin to write a segment's first rows."""
        staged = Staged(segment, row_count, is_urgent)
        # Held until the write ends: its place in memory must not be used again under the device.
        self._ledger.held(segment)
        before = self._in_place.get(segment)
        # The task is made in the same step as the hold: no await between, so that none is without the other.
        staged.task = self._background.start(self._put(session, staged, before))
        # Only the header of a full segment is made where its rows lie: two such writes must not overlap.
        if row_count == segment.layout.segment_tokens:
            self._in_place[segment] = staged
        return staged

    def give_up(self, staged: Staged) -> None:
        """Give the slot back, now or when the device is done with it."""
        staged.is_wanted = False
        # A newer one may stand there already.
        if self._staged.get(staged.segment) is staged:
            del self._staged[staged.segment]
        # Otherwise the device may still write to the slot, and `_put` gives it back at its end.
        if staged.is_done and staged.written:
            self.give_back(staged.written)
            staged.written = None

    def give_back(self, written: Written) -> None:
        """Give back the slots of something that was written and will not be recorded."""
        # All places: the copy's slot as well.
        for slot in written.places:
            self._ledger.staged(written.segment, slot, is_there=False)
            self._ledger.below.give(slot)

    async def write(self, session: Session, segment: Segment, row_count: int) -> Written:
        """Write a segment's first rows to a slot that is made free.

        Raises CapacityExceeded, CorruptSegment, TierFailure.
        """
        # On every end but a normal one the slots go back: no record names them, and nobody else knows of
        # them.
        slot = await self._ssd_room.place(segment.size_bytes, session)
        written = self._taken(segment, slot, row_count)
        try:
            await self._write(session, written, is_urgent=True)
        except BaseException:
            # On cancellation too: a slot without a record that is not given back is lost until a restart.
            self.give_back(written)
            raise
        return written

    async def write_taken(self, session: Session, segment: Segment, slot: Slot) -> Written | None:
        """Write a full segment to a slot that was taken for it. None where there is no room for its copy.

        Raises CorruptSegment, TierFailure; the slots are given back then.
        """
        written = self._taken(segment, slot, segment.layout.segment_tokens)
        try:
            if await self._write(session, written, is_urgent=False):
                return written
        except BaseException:
            self.give_back(written)
            raise
        self.give_back(written)
        return None

    # -- parts -------------------------------------------------------------------------------------

    async def _put(self, session: Session, staged: Staged, before: Staged | None) -> None:
        # The semaphore is the session's, not the device's: one long session leaves turns to others.
        turns = self._windows.setdefault(
            session.uid, asyncio.Semaphore(window(staged.segment.layout.size_bytes))
        )
        try:
            if before is not None:
                # That write is of rows that were given up; its header must not land over this one's.
                await asyncio.wait([before.task])
            # At most a window of one session is in flight, so that a long session leaves the device to others
            # too.
            async with turns:
                # It may have been given up while it waited for its turn.
                slot = await self._slot(session, staged) if staged.is_wanted else None
                if slot is not None:
                    written = staged.written = self._taken(staged.segment, slot, staged.row_count)
                    if not await self._write(session, written, is_urgent=staged.is_urgent):
                        self.give_back(written)
                        staged.written = None
        except BaseException:
            # A write that failed must not be taken by a flush as if it had been written.
            staged.is_wanted = False
            raise
        finally:
            # Done comes first: a slot is given back only when no device writes to it any more.
            staged.is_done = True
            if self._in_place.get(staged.segment) is staged:
                del self._in_place[staged.segment]
            # The result has no taker, or is empty: its slots go back here, behind the device.
            if not staged.is_wanted or staged.written is None:
                self.give_up(staged)
            self._ledger.released(staged.segment)

    async def _slot(self, session: Session, staged: Staged) -> Slot | None:
        size_bytes = staged.segment.layout.size_bytes
        if staged.is_urgent:
            return await self._ssd_room.place(size_bytes, session)
        # An unasked write evicts nothing: it takes only a slot that is free.
        return self._ssd_room.take(size_bytes, session)

    def _taken(self, segment: Segment, slot: Slot, row_count: int) -> Written:
        self._ledger.staged(segment, slot, is_there=True)
        return Written(segment, slot, row_count)

    async def _write(self, session: Session, written: Written, *, is_urgent: bool) -> bool:
        """Write rows, and the copy that the session shall have. False where there is no room for that.

        An urgent write goes on without its copy then, or where the copy's path refuses it.
        """
        segment = written.segment
        if session.copies > 1:
            if is_urgent:
                written.copy = await self._ssd_room.place_copy(segment.size_bytes, session, written.slot)
            else:
                written.copy = self._ssd_room.take_copy(segment.size_bytes, session, written.slot)
            if written.copy is not None:
                self._ledger.staged(segment, written.copy, is_there=True)
            elif not is_urgent:
                # Unasked, a copy too few is no success: the flush that somebody asks for decides.
                return False
        refusal = await self._io.write(written)
        # The rows are safe with one copy; the second one is made when a path has a place for it.
        if refusal is not None and written.copy is not None:
            copy, written.copy = written.copy, None
            self._ledger.staged(segment, copy, is_there=False)
            self._ledger.below.give(copy)
            log.warning("copy_not_written segment=%d problem=%s", segment.segment_id, refusal)
        return True


# The promises of a flush, step by step. A crash between any two lines leaves the line above:
#
#     rows in memory            gone
#     bytes in new slots        not named by any record; old slots still are
#     fdatasync, once per path  the same
#     record in the log, synced the session ends at the recorded end; old slots are free
#     old slots given back      the same
#
# The old slots go last: until the new record is on disk, a restart reads the old one.
BAD_PER_FLUSH = 64
"""Segments that one flush mends or cuts: there are more only where memory fails as a whole."""
PARALLEL_FLUSHES = 8
"""Sessions written behind at a time: they share syncs."""
FAILURES_PER_TURN = 16
"""Failures after which the rest waits for the next turn."""
LOOKS_PER_SLICE = 256
"""Sessions looked at before others get their turn of the event loop."""


class Flushing:
    """Flushes sessions. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        staging: Staging,
        mending: Mending,
        background: Background,
    ) -> None:
        self._state, self._io, self._metadata = state, io, metadata
        self._ledger = state.ledger
        self._staging, self._mending, self._background = staging, mending, background
        self._flushes: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[bytes, bool], asyncio.Task[None]] = {}
        """Flushes that have not begun yet.

        Rows committed until then are theirs too, whoever asks for them.
        """
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @property
    def flush_count(self) -> int:
        """Flushes under way."""
        return len(self._flushes)

    async def flush(self, session: Session, *, is_tail_left: bool = False, is_last: bool = False) -> None:
        """Make every token committed so far durable; `is_tail_left`: but those of a growing segment.

        A tail in which a commit goes on is not left: no record ends inside a commit, so that a crash
        leaves all of it or nothing. `is_last`: the server ends, and may use up the room for records.
        Raises CapacityExceeded, TierFailure, SessionNotFound.
        """
        # First: a flush that could not be recorded would write its rows for nothing.
        self._metadata.check(is_growing=not is_last)
        key = session.uid, is_tail_left
        # A flush that has not begun covers these rows too: callers share it, and its syncs.
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = self._background.start(
                self._flush(session, is_tail_left=is_tail_left)
            )
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)
        # One caller that gives up must not end the flush of others, nor leave a device writing to a free
        # slot.
        await asyncio.shield(task)

    # For an operator, and for tests: the same as eviction from memory, asked for.
    async def demote(self, session: Session) -> None:
        """Flush a session and drop its segments from memory, held ones excepted. Raises as `flush`."""
        await self.flush(session)
        # Rows or readers may have come since the flush: their segments stay.
        for segment in session.segments:
            if self._ledger.is_clean(segment):
                self._ledger.dropped(segment)

    # Weak: a lock that no flush holds or waits for is forgotten with it.
    def lock(self, session: Session) -> asyncio.Lock:
        """The lock that every flush of a session holds."""
        return self._locks.setdefault(session.uid, asyncio.Lock())

    async def wait_for_one(self) -> bool:
        """Wait until one of the flushes under way has ended; False when there is none."""
        # Its failure is for those who asked for it; whoever tries next will see it too.
        if self._flushes:
            await asyncio.wait(self._flushes, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def _flush(self, session: Session, *, is_tail_left: bool) -> None:
        """Flush; what memory did not keep is mended or cut first.

        Raises CorruptSegment at the end when something was cut.
        """
        lost: CorruptSegment | None = None
        async with self.lock(session):
            # From here on new rows are not this flush's: the next caller begins another one.
            del self._waiting[session.uid, is_tail_left]
            for tries_left in reversed(range(BAD_PER_FLUSH)):
                try:
                    await self._flush_once(session, is_tail_left=is_tail_left)
                    break
                except CorruptSegment as error:
                    segment = self._ledger.segment(int(error.facts["segment_id"]))
                    # Each try deals with one bad segment. Without a bound, failing memory would keep the lock
                    # for ever.
                    if segment is None or not tries_left:
                        raise
                    try:
                        await self._mending.mend(segment, str(error.facts["problem"]))
                    except CorruptSegment as gone:
                        # The rows before the cut are made durable all the same; the caller hears of the loss
                        # at the end.
                        lost = gone
        if lost is not None:
            raise lost

    async def _flush_once(self, session: Session, *, is_tail_left: bool) -> None:
        # Deleted while it waited for the lock.
        if session.use is Use.GONE:
            raise SessionNotFound(session=session.name)
        # One moment for the log's end and every segment's rows: rows that come during the
        # write are beyond the recorded end, and would stand where later ones are put.
        # A tail in which a commit goes on is written with the rest: no record may end inside a commit.
        tail = session.growing_tail if is_tail_left and session.is_tail_apart else None
        # `recorded_end`: an earlier flush may have recorded part of this tail already, and ends never go
        # back.
        end = max(session.recorded_end, tail.begin) if tail else session.log_end
        now_ns = self._state.clock.monotonic_ns()
        dirty: dict[Segment, int] = {}
        # The ledger's own order is that of positions: `dirty` keeps it, and records name segments in order.
        for segment in self._ledger.unwritten.segments(session):
            if segment is not tail:
                dirty[segment] = segment.row_count
        # Durable already: another flush was quicker, or nothing was committed.
        if not dirty and session.durable_end >= end:
            return
        with self._state.span("flush", segment_count=len(dirty)):
            # No segment that is written may leave memory, or lose its slot, before its record is there.
            for segment in dirty:
                self._ledger.held(segment)
            try:
                written = await self._written_somewhere(session, dirty)
                await self._record(session, written, end, now_ns)
            finally:
                for segment in dirty:
                    self._ledger.released(segment)
        took_ns = self._state.clock.monotonic_ns() - now_ns
        self._state.seen.flush_s.observe(took_ns / 10**9)

    def _written_somewhere(
        self, session: Session, row_counts: Mapping[Segment, int]
    ) -> Awaitable[list[Written]]:
        """Write and sync; what was on a path that failed meanwhile once more, on the others."""
        # With one path there is nowhere else to go: no second try, and no frame for it.
        if self._ledger.below.path_count == 1:
            return self._write(session, row_counts)
        return self._write_round_paths(session, row_counts)

    async def _write_round_paths(self, session: Session, row_counts: Mapping[Segment, int]) -> list[Written]:
        # Each failure closes a path, so that there are as many tries as paths.
        for _ in range(self._ledger.below.path_count):
            try:
                return await self._write(session, row_counts)
            except TierFailure as failure:
                # Another path helps only where this one takes no writes any more.
                if not self._io.is_path_closed(failure):
                    raise
        return await self._write(session, row_counts)

    async def _write(self, session: Session, row_counts: Mapping[Segment, int]) -> list[Written]:
        """Write and sync.

        Raises CapacityExceeded, CorruptSegment, TierFailure when nothing is under way any more.
        """
        taken: list[Staged] = []
        for segment, count in row_counts.items():
            taken.append(self._staging.take(session, segment, count))
        try:
            written = await self._ended(session, taken)
            # One sync for each path, however many segments: a flush waits for syncs more than for bytes.
            await self._io.sync({slot.path_index for item in written for slot in item.places})
        except BaseException:
            # The next flush writes from the start again: the device may have lost any of these rows.
            # Any failure, cancellation too: writes under way end by themselves and give their slots back
            # then.
            for staged in taken:
                self._staging.give_up(staged)
            raise
        return written

    async def _ended(self, session: Session, taken: list[Staged]) -> list[Written]:
        """Wait until all have ended, then raise the first failure: none is left running behind an error."""
        failure: BaseException | None = None
        for i, staged in enumerate(taken):
            # `wait`, not `await`: the failure of one must not leave the others running behind an error.
            await asyncio.wait([staged.task])
            # Staged unasked, and nothing was free. A flush may make room, which unasked staging may not.
            if staged.written is None and not staged.is_urgent and failure is None:
                # There was no slot, or no luck: now it is asked for.
                taken[i] = self._staging.start(session, staged.segment, staged.row_count, is_urgent=True)
                await asyncio.wait([taken[i].task])
            failure = failure or taken[i].task.exception()
            if failure:
                # A write that has not begun need not begin; one under way is waited for all the same.
                for later in taken[i + 1 :]:
                    later.is_wanted = False
        if failure:
            raise failure
        return [staged.written for staged in taken if staged.written]

    async def _record(self, session: Session, written: Sequence[Written], end: int, begun_ns: int) -> None:
        kept: list[Written] = []
        for item in written:
            # A segment that lost rows meanwhile has been cut: what is written of it is more than it has.
            is_wanted = item.segment.place in LISTED and item.row_count <= item.segment.row_count
            if is_wanted and session.use is not Use.GONE:
                kept.append(item)
            else:
                self._staging.give_back(item)
        # Deleted while its rows were written: a record now would bring the session back at a restart.
        if session.use is Use.GONE:
            raise SessionNotFound(session=session.name)
        replaced = self._ledger.flushed(session, [item.flushed for item in kept], end, begun_ns)
        # In this order: the ledger moves every segment to its new slot first. A record that another call
        # makes during the commit then names the new slots as well, and its arrival before or after this one
        # is the same.
        # No await from there to here: the record says what the ledger says at one moment.
        records = [segment_record_of(self._ledger, item.segment) for item in kept]
        changes = Changes(sessions=[record_of(session)], segments=records)
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            # Whether the record arrived is not known: the old slots may be named by it, and stay taken.
            self._ledger.stranded(replaced)
            raise
        self._ledger.recorded(session, end, begun_ns)
        self._state.counters.flushed_segment_count += len(kept)
        single = [item for item in kept if item.segment.copies > 1 and item.copy is None]
        self._state.counters.uncopied_segment_count += len(single)
        for slot in replaced:
            # Only now: before the commit a restart would still read the old slots.
            self._ledger.below.give(slot)

    # -- away from paths that are lost ---------------------------------------------------------------

    async def write_elsewhere(self, session: Session, segments: Sequence[Segment]) -> bool:
        """Write clean segments from DRAM to SSD again, and record them there. False when nothing moved.

        Raises CapacityExceeded, TierFailure.
        """
        # Shielded: a caller that goes away must not leave slots that nobody records.
        return await asyncio.shield(self._background.start(self._write_elsewhere(session, segments)))

    async def _write_elsewhere(self, session: Session, segments: Sequence[Segment]) -> bool:
        async with self.lock(session):
            chosen = [s for s in segments if s.place is Place.BOTH]
            # Rows appended to a segment now would be missing in its new copy.
            self._ledger.closed(chosen)
            for segment in chosen:
                self._ledger.held(segment)
            copies: list[Written] = []
            try:
                for segment in chosen:
                    # One after the other: this is a rescue, and its reads and writes share a machine that has
                    # lost a device.
                    copy = await self._staging.write(session, segment, segment.durable_row_count)
                    copies.append(copy)
                await self._io.sync({slot.path_index for item in copies for slot in item.places})
                return await self._record_elsewhere(copies)
            finally:
                # `_record_elsewhere` takes the recorded ones out of the list; the others go back whatever
                # happened.
                for item in copies:
                    self._staging.give_back(item)
                for segment in chosen:
                    self._ledger.released(segment)

    async def _record_elsewhere(self, copies: list[Written]) -> bool:
        """Record what is still wanted there; what is not stays in the list."""
        moved = [w for w in copies if w.segment.is_listed and w.row_count == w.segment.durable_row_count]
        # A slot that was recorded is no longer the caller's to give back.
        for item in moved:
            copies.remove(item)
        replaced = self._ledger.moved([item.flushed for item in moved])
        await record_moved(self._ledger, self._metadata, [item.segment for item in moved], replaced)
        # Rows that were shown from memory, or withheld, can be had now.
        self._ledger.lost.reckon_again([item.segment for item in moved])
        return bool(moved)


@dataclass(frozen=True, slots=True, eq=False)
class DueFlush:
    """A session to be written now; `is_tail_left`: without what still grows."""

    session: Session
    is_tail_left: bool
    size_bytes: int


Attempt = Callable[[Callable[[DueFlush], Awaitable[None]], DueFlush], Awaitable[bool]]
"""Does a step with something and says whether it went well; raises nothing."""


class WriteBehind:
    """Writes what is due. Owned by the event loop."""

    # Which sessions a turn writes, in this order:
    #
    #     changed    a segment became full since the last look     without the growing tail
    #     old        rows older than tail_age_ns                   tail too
    #     oldest     while dirty bytes are above the watermark     tail too
    #
    # Each is bounded by the allowance, and what is under way counts as written.
    def __init__(self, state: State, flushing: Flushing, staging: Staging) -> None:
        self._state, self._ledger = state, state.ledger
        self._flushing, self._staging = flushing, staging
        bytes_per_s = self._ledger.watermarks.write_behind_bytes_per_s
        self.allowance = Allowance(bytes_per_s, state.clock.monotonic_ns())
        """The allowance for all writes that no caller asked for."""
        self._under_way_bytes = 0
        self.looked_at_count = 0
        """Sessions looked at since the start."""

    async def turn(self, attempt: Attempt) -> bool:
        """Write all that is due, as far as the allowance goes; returns whether all went well."""
        # First: pressure that comes from here on wants another turn.
        self._state.is_pressed.clear()
        self.allowance.bytes_per_s = self._ledger.watermarks.write_behind_bytes_per_s
        taken: list[DueFlush] = []
        failure_count = 0
        due = self._due()
        try:
            while failure_count < FAILURES_PER_TURN and (batch := await _some(due)):
                taken += batch
                # Several at once share the syncs of a path and of the log.
                results = await asyncio.gather(*(attempt(self.write, item) for item in batch))
                failure_count += results.count(False)
        finally:
            await due.aclose()
            # At the end only: what fails is not tried again in the same turn.
            for item in taken:
                self._ledger.unwritten.put_back(item.session)
        return not failure_count

    async def write(self, due: DueFlush) -> None:
        """Flush a session. Raises CapacityExceeded, TierFailure, SessionNotFound."""
        try:
            await self._flushing.flush(due.session, is_tail_left=due.is_tail_left)
        finally:
            self._under_way_bytes -= due.size_bytes

    async def _due(self) -> AsyncGenerator[DueFlush]:
        begun_ns = self._state.clock.monotonic_ns()
        for uid in list(self._ledger.unwritten.changed):
            await self._look()
            session = self._ledger.unwritten.changed.get(uid)
            if session is None:
                continue
            # The moment the turn began: an allowance that refills during a long turn would make it endless.
            if not self.allowance.is_left(begun_ns):
                return
            # A session still in use is looked at again, until it rests or has become old.
            if self._ledger.take_changed(session) and not self._spares(session):
                yield self._take(session, is_tail_left=True)
        # Full segments came first, for they change no more. Now rows by age, growing tails among them.
        passed: list[Session] = []
        try:
            while self.allowance.is_left(begun_ns) and (found := self._oldest(begun_ns)):
                session, is_old = found
                # A tail that a writer has room in is dirty again with the next token, and keeps its slot: to
                # write it makes no room. It is written for its age alone.
                is_tail_left = session.is_writing and not is_old
                if is_tail_left and not self._ledger.unwritten.has_full(session):
                    passed.append(session)
                elif not self._spares(session):
                    yield self._take(session, is_tail_left=is_tail_left)
                await self._look()
        finally:
            # At the end only: else the same ones would be found again.
            for session in passed:
                self._ledger.unwritten.put_back(session)

    async def _look(self) -> None:
        self.looked_at_count += 1
        if self.looked_at_count % LOOKS_PER_SLICE == 0:
            await asyncio.sleep(0)

    def _oldest(self, now_ns: int) -> tuple[Session, bool] | None:
        """The session whose rows are too old; above the watermark the one whose rows are oldest.

        And whether its rows are too old.
        """
        age_ns = self._ledger.watermarks.tail_age_ns
        # 0 switches ages off.
        if age_ns and (old := self._ledger.unwritten.take_old(now_ns - age_ns)) is not None:
            return old, True
        # Bytes under way are clean soon: counted as dirty they would make each turn write too much.
        due_bytes = self._ledger.unwritten.due_bytes - self._under_way_bytes
        capacity_bytes = self._ledger.memory.capacity_bytes
        if self._ledger.watermarks.excess_dirty_bytes(due_bytes, capacity_bytes) > 0:
            oldest = self._ledger.unwritten.take_oldest(now_ns)
            return None if oldest is None else (oldest, False)
        return None

    def _spares(self, session: Session) -> bool:
        return self._staging.spares(session, self._under_way_bytes)

    def _take(self, session: Session, *, is_tail_left: bool) -> DueFlush:
        current_work().on(session)
        self._ledger.unwritten.taken(session)
        segments = self._ledger.unwritten.segments(session)
        tail = session.growing_tail if is_tail_left else None
        size_bytes = sum(s.size_bytes for s in segments if s is not tail)
        self._under_way_bytes += size_bytes
        # Spent before it is written: the next one is chosen by what is left.
        self.allowance.spend(size_bytes)
        return DueFlush(session, is_tail_left, size_bytes)


async def _some(due: AsyncGenerator[DueFlush]) -> list[DueFlush]:
    """The next few."""
    batch: list[DueFlush] = []
    async for item in due:
        batch.append(item)
        if len(batch) == PARALLEL_FLUSHES:
            break
    return batch
