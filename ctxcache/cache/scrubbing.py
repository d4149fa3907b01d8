"""Scrubbing: bytes that are not what their writers said, found by a pass over everything, and mended.

    bad in DRAM, SSD has the rows   SSD's rows are verified and copied over the bad ones, in place
    bad in DRAM, SSD has fewer      the sessions end behind the rows that SSD has
    bad in DRAM alone, or on SSD    the sessions end before the segment; its slot on SSD is kept from use
    bad on one SSD path of two      the other one is read; the slot is kept from use, and a new copy made

Leases, reservations and other readers of a mended slot go on: none of them sees a right byte change. A
reader's complaint is never believed: its rows are verified here. A pass takes one slot's memory and no room
in the arena. It takes segments with the last positions first, so that no cut hides a bad segment that is
still to come. A pass is asked for, or begins by itself, at a bounded rate and not before PASS_NS after the
one before it; a pass that is asked for ends the other. Worst case: a segment that moves meanwhile is checked
twice in a pass.
"""

import asyncio
import logging
import mmap
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

from ctxcache.cache.eviction import Departures
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Background, State
from ctxcache.core import ranges
from ctxcache.core.history import Event
from ctxcache.core.ledger.places import Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.errors import CorruptSegment, TierFailure, TooManyRequests
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata.base import Changes, MetadataStore

FAILED = "a segment failed verification"
TRIES = 3
"""How often bytes may turn out to be bad right after they were found to be right."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class Mending:
    """Verifies what DRAM has, and mends it. Segments are held by who asks. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, departures: Departures, background: Background) -> None:
        self._state, self._io, self._ledger = state, io, state.ledger
        self._departures, self._background = departures, background
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def settle(self, segment: Segment, row_count: int) -> None:
        """Have at least so many committed rows of a segment in DRAM covered by one sum per stream.

        Raises as `mend`.
        """
        for _ in range(TRIES):
            if segment.memory is None or segment.is_settled(row_count):
                # One attempt is enough, unless memory changes again while it is looked at.
                return
            problem = await self._io.settle(segment)
            if problem:
                await self.mend(segment, problem)
        if segment.memory and not segment.is_settled(row_count):
            raise CorruptSegment(segment_id=segment.segment_id, problem="memory does not keep its rows")

    async def verify(self, segment: Segment) -> str:
        """Verify what DRAM has of a segment, and mend it; what was wrong, or nothing. Raises as `mend`."""
        if segment.memory is None or not segment.row_count:
            return ""
        problem = await self._io.verify(segment)
        if problem:
            await self.mend(segment, problem)
        return problem

    async def mend(self, segment: Segment, problem: str) -> None:
        """Put right what DRAM has of a segment. Calls for one segment share one mending.

        Raises CorruptSegment when that cannot be done, after its sessions end before the segment;
        TierFailure.
        """
        task = self._tasks.get(segment.segment_id)
        if task is None:
            # One mending of a segment at a time: two would copy over each other, and report twice.
            task = self._tasks[segment.segment_id] = self._background.start(self._mend(segment, problem))
        await asyncio.shield(task)

    async def read(self, segment: Segment, attempt: Callable[[Slot], Awaitable[T]]) -> T:
        """Read a held segment from one of its slots on SSD, or from the other where that is bad or lost.

        `attempt` reads from the slot that it is given, and verifies. After a failed attempt the device may
        still write to its memory. Raises CorruptSegment where no slot has the rows, TierFailure.
        """
        tried: set[Slot] = set()
        failed: tuple[Slot, TierFailure] | None = None
        # The best place comes first. Places on lost paths come last: their reads take the device's time-out.
        while True:
            best = self._ledger.best_place(segment)
            left = [place for place in (best, *segment.places) if place and place not in tried]
            if not left and failed is not None:
                raise failed[1]
            if not left:
                raise CorruptSegment(segment_id=segment.segment_id, problem="neither in DRAM nor on SSD")
            tried.add(left[0])
            try:
                result = await attempt(left[0])
            except CorruptSegment as error:
                # The segment has no other slot: the caller ends its sessions there.
                if segment.places == (left[0],):
                    raise
                self.drop_place(segment, left[0], str(error.facts["problem"]))
            except TierFailure as failure:
                failed = failed or (left[0], failure)
            else:
                # A slot on a working path that cannot be read is bad. A lost path may come back as it was.
                if failed is not None and failed[0].path_index not in self._ledger.lost.paths:
                    self.drop_place(segment, failed[0], str(failed[1]))
                return result

    async def image(
        self, segment: Segment, memory: memoryview | None = None
    ) -> tuple[memoryview, tuple[int, ...]]:
        """Read and verify SSD's rows of a held segment, in `memory` (page-aligned, a slot's size) or other.

        Returns the memory, and one checksum of rows per stream. Raises as `read`.
        """
        unused = [] if memory is None else [memory]

        async def checked(place: Slot) -> tuple[memoryview, tuple[int, ...]]:
            # A device that gave no answer may still write to the memory of an earlier attempt.
            into = unused.pop() if unused else memoryview(mmap.mmap(-1, segment.layout.size_bytes))
            return into, await self._io.check(segment, place, into)

        return await self.read(segment, checked)

    def drop_place(self, segment: Segment, place: Slot, problem: str) -> None:
        """Keep a bad copy's slot from use, and leave the segment its other copy.

        The record follows later: until then it names a place that is found bad again.
        """
        if place not in segment.places or len(segment.places) == 1:
            return
        log.error(
            "copy_dropped segment=%d path=%s problem=%r", segment.segment_id, self._io.path_of(place), problem
        )
        self._state.counters.mended_copy_count += 1
        # The ledger hears before the record: from here on no reader is sent to the bad copy.
        self._ledger.place_lost(segment, place, is_bad=True)
        self._background.start(self._departures.write_down(moved=[segment], bad=[place]))

    async def quarantine(self, bad: Collection[Segment]) -> None:
        """End every session that lists a segment found bad before that segment's tokens.

        The state behind a gap is of no use to a reader; what is before it stays. The bad slots are kept
        from use. Raises TierFailure; the sessions have ended there all the same.
        """
        self._state.counters.corrupt_segment_count += len(bad)
        # The cut comes first, in memory and at once: from here on no reader is sent to the bad bytes.
        cut, dead = self.cut(bad, Event.CORRUPT, FAILED)
        # The slot leaves the segment now: when the last hold ends, the slot may be another's.
        slots = [slot for segment in bad for slot in self._ledger.disowned(segment, is_bad=True)]
        # One commit has the shorter sessions, the dead segments, and the slots that are kept from use.
        await self._departures.write_down(cut, dead=dead, bad=slots)

    async def quarantine_named(self, error: CorruptSegment) -> None:
        """As `quarantine`, of the segment that an error names."""
        # It may be gone, where another reader met the same error.
        segment = self._ledger.segment(int(error.facts["segment_id"]))
        if segment is not None:
            await self.quarantine({segment})

    def cut(
        self, bad: Collection[Segment], event: Event, why: str
    ) -> tuple[Sequence[Session], Sequence[Segment]]:
        """End sessions before these segments' tokens.

        Returns the sessions, and the segments that no session lists now.
        """
        cut: list[Session] = []
        dead: list[Segment] = []
        # Each session that lists a bad segment is cut once: a fork has the same bad segment.
        for session in {s.uid: s for segment in bad for s in self._ledger.names.listers(segment)}.values():
            # The cut is at the first of several bad segments: behind it no token is of use.
            begin = min((s.begin for s in session.segments if s in bad), default=session.log_end)
            if begin < session.log_end:
                cut.append(session)
                dead += self._end_at(session, begin, event, why)
        return cut, dead

    def _end_at(self, session: Session, position: int, event: Event, why: str) -> list[Segment]:
        """Drop a session's tokens from there on; returns the segments that no session lists any more."""
        before_count = session.token_count
        live = ranges.subtract(session.live, ((position, session.log_end),))
        dead = self._ledger.truncated(session, live)
        self._state.journal.happened(
            session, event, detail=why, token_count=before_count - session.token_count
        )
        return dead

    async def _mend(self, segment: Segment, problem: str) -> None:
        self._ledger.held(segment)
        try:
            damage, restored = problem, None
            # Restored rows may turn bad again at once, where memory does not keep its bytes.
            for _ in range(TRIES):
                restored = await self._restore(segment)
                damage = await self._io.verify(segment) if segment.memory else ""
                # The rows are right by now, or SSD has none to restore, or rows are bad that SSD never had.
                if not damage or restored is None or segment.row_count > restored.row_end:
                    break
            if not damage:
                self._mended(segment, problem)
            elif restored is None:
                # Three outcomes that lose something, from worst to least:
                #
                #     nothing below       the sessions end before the segment
                #     fewer rows below    they end behind those rows
                #     all rows below      nothing is lost; this slot of memory is left once it is out of use
                log.error("dram_rows_lost segment=%d problem=%r", segment.segment_id, damage)
                await self.quarantine({segment})
                raise CorruptSegment(segment_id=segment.segment_id, problem=damage)
            elif segment.row_count > restored.row_end:
                log.error("dram_rows_lost segment=%d problem=%r", segment.segment_id, damage)
                await self._shorten(segment, restored)
                raise CorruptSegment(segment_id=segment.segment_id, problem=damage)
            else:
                # SSD has the right bytes, and they are served as soon as this slot is out of use.
                self._ledger.spoiled(segment)
                problem = f"{damage}, and memory does not keep it"
                raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
        finally:
            del self._tasks[segment.segment_id]
            self._ledger.released(segment)

    async def _restore(self, segment: Segment) -> Sums | None:
        """Copy SSD's rows over DRAM's. Returns the sums of those rows; None where SSD has none."""
        while segment.memory and segment.durable:
            places, row_count = segment.places, segment.durable_row_count
            try:
                image, values = await self.image(segment)
            except CorruptSegment:
                # A flush may have moved the segment meanwhile.
                if segment.places == places:
                    return None
                continue
            # The rows must be those that were read. A flush in between has a new image, which the next turn
            # reads.
            if segment.durable_row_count == row_count:
                await self._io.restore_rows(segment, image, row_count)
                return Sums(0, row_count, values)
        return None

    def _mended(self, segment: Segment, problem: str) -> None:
        self._state.counters.mended_segment_count += 1
        log.error("dram_rows_mended segment=%d problem=%r", segment.segment_id, problem)
        for session in self._ledger.names.listers(segment):
            detail = "memory had other bytes than were written; what SSD has took their place"
            self._state.journal.happened(session, Event.MENDED, detail=detail)

    async def _shorten(self, segment: Segment, durable: Sums) -> None:
        """End a segment's sessions behind the rows that SSD has of it."""
        self._state.counters.corrupt_segment_count += 1
        # The ledger hears first: from here on no reader is sent behind those rows.
        sessions = self._ledger.shortened(segment, durable)
        dead = []
        for session in sessions:
            dead += self._end_at(session, segment.begin + durable.row_end, Event.CORRUPT, FAILED)
        await self._departures.write_down(sessions, dead=dead)


SEGMENTS_PER_REPORT = 32
LOGGED_LOSSES = 100
"""Losses of a start that its log names. A file that is gone may have held a million segments."""
RECORDS_PER_TURN = 256
SORTED_PER_TURN = 1024
RECORDS_PAUSE_S = 0.01
"""The rest after so many records, in a pass that begins by itself."""
LONGEST_PAUSE_S = 1.0
"""The longest rest before a pass looks whether it goes on."""
PASS_NS = 600 * 10**9
"""How long after one pass began the next one may begin by itself."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A copy of a segment that is not what was written: tokens at positions `[begin, end)` of these sessions.

    `sessions`: names of resources, a block's own for a block. `is_mended`: nothing is lost, since SSD's rows
    were copied to DRAM, or another SSD path has a good copy.
    """

    segment_id: int
    tenant: str
    sessions: tuple[str, ...]
    begin: int
    end: int
    path: str
    offset_bytes: int
    problem: str
    is_in_dram: bool = False
    is_mended: bool = False


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a pass has come; `bad` are those found since the last report."""

    segment_count: int
    checked_segment_count: int
    checked_bytes: int
    record_count: int
    bad: tuple[Bad, ...]


# One pass, and its bounds:
#
#     records, 256 at a time ──► segments, last positions first ──► for each: memory, then SSD
#                                                                   └── pause: bytes so far / rate
#
# Last positions first, because a cut at a bad segment unlists what is behind it: found the other way round,
# bad segments behind the first would never be reported.
class Scrubbing:
    """The scrubber. Owned by the event loop; one pass at a time."""

    def __init__(self, state: State, mending: Mending, io: SegmentIO, metadata: MetadataStore) -> None:
        self._state, self._mending = state, mending
        self._ledger = state.ledger
        self._io, self._metadata = io, metadata
        self._is_running = self._is_releasing = False
        self._lost_at_start: deque[Bad] = deque()
        """Losses that no pass has told yet."""
        self._asked_count = 0
        """Passes that were asked for."""
        self._next_ns = state.clock.monotonic_ns() + PASS_NS
        """When a pass may begin by itself."""

    async def run(self, *, bytes_per_second: int = 0) -> AsyncGenerator[Scrubbed, None]:
        """Verify every record and every segment; 0 bytes per second is as fast as it goes.

        Raises TooManyRequests (a pass is under way), CorruptMetadata, TierFailure.
        """
        # Two passes would read everything twice, and mend the same segments.
        if self._is_running:
            raise TooManyRequests(what="verifications", limit=1)
        self._is_running = True
        self._asked_count += 1
        try:
            while self._lost_at_start:
                part_count = min(SEGMENTS_PER_REPORT, len(self._lost_at_start))
                losses = [self._lost_at_start.popleft() for _ in range(part_count)]
                yield Scrubbed(0, 0, 0, 0, tuple(losses))
            async with aclosing(self._pass(bytes_per_second)) as reports:
                async for report in reports:
                    yield report
        finally:
            self._is_running = False

    def lost_at_start(self, losses: Iterable[Bad]) -> None:
        """Keep losses of a start, for the first pass that is asked for to tell of.

        The log has the first losses, and how many more there are.
        """
        self._lost_at_start.extend(losses)
        for loss in islice(self._lost_at_start, LOGGED_LOSSES):
            log.error(
                "lost_at_start sessions=%s begin=%d end=%d path=%s problem=%r",
                ",".join(loss.sessions),
                loss.begin,
                loss.end,
                loss.path,
                loss.problem,
            )
        if len(self._lost_at_start) > LOGGED_LOSSES:
            log.error("lost_at_start more=%d", len(self._lost_at_start) - LOGGED_LOSSES)

    def described(self, segment: Segment, place: Slot, problem: str, *, is_mended: bool = False) -> Bad:
        """Describe a segment's bad slot on SSD. The sessions still list the segment."""
        names = sorted(session.name for session in self._ledger.names.listers(segment))
        return Bad(
            segment.segment_id,
            segment.tenant,
            tuple(names),
            segment.begin,
            segment.begin + segment.durable_row_count,
            self._io.path_of(place),
            place.offset_bytes,
            problem,
            is_mended=is_mended,
        )

    async def verify_unasked(self) -> None:
        """Make a whole pass at the rate that the limits say, if it is time for one; 0 is never.

        A pass that is asked for, or another rate, ends this one. Raises CorruptMetadata, TierFailure.
        """
        now_ns, rate = self._state.clock.monotonic_ns(), self._state.limits.scrub_bytes_per_s
        if not rate or now_ns < self._next_ns or self._is_running:
            return
        # The time counts from the beginning of the pass: a pass that takes longer than PASS_NS is followed by
        # the next at once.
        self._next_ns, asked_count = now_ns + PASS_NS, self._asked_count

        def is_over() -> bool:
            return self._asked_count != asked_count or self._state.limits.scrub_bytes_per_s != rate

        bad_count = checked_count = 0
        async with aclosing(self._pass(rate, RECORDS_PAUSE_S, is_over)) as reports:
            async for report in reports:
                bad_count += len(report.bad)
                checked_count = report.checked_segment_count
        log.info("scrubbed segments=%d bad=%d is_whole=%s", checked_count, bad_count, not is_over())

    async def _pass(
        self, bytes_per_second: int, records_pause_s: float = 0, is_over: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Scrubbed, None]:
        record_count = await self._records(records_pause_s)
        segment_ids = await self._last_first()
        began_ns, done_bytes = self._state.clock.monotonic_ns(), 0
        bad: list[Bad] = []
        count = len(segment_ids) + self._ledger.sleep.dormant.segment_count
        # One slot's memory for the whole pass. A failed read past this ends the pass, so that no late write
        # of a device meets the next segment.
        bounce = memoryview(mmap.mmap(-1, 4096))
        # Each segment is asked for when its turn comes: its session may have fallen asleep, or be known
        # again.
        for i, segment in enumerate(chain(map(self._ledger.glance_at, segment_ids), self._dormant())):
            if i % SEGMENTS_PER_REPORT == 0:
                yield Scrubbed(count, min(i, count), done_bytes, record_count, tuple(bad))
                bad.clear()
            if segment is None:
                continue
            if len(bounce) < segment.layout.size_bytes:
                bounce = memoryview(mmap.mmap(-1, segment.layout.size_bytes))
            if self._ledger.sleep.dormant.lister(segment.segment_id) is not None:
                done_bytes += segment.durable_bytes
                bad += await self._check_dormant(segment, bounce)
                await self._pause(began_ns, done_bytes, bytes_per_second, is_over)
                if is_over():
                    return
                continue
            if segment.memory and segment.place is not Place.HELD:
                done_bytes += segment.memory.size_bytes
                bad += await self._check_dram(segment)
            # A slot on a lost path cannot be verified.
            if segment.durable and segment.is_listed and not self._ledger.lost.has(segment):
                done_bytes += segment.durable_bytes
                bad += await self._check(segment, bounce)
            await self._pause(began_ns, done_bytes, bytes_per_second, is_over)
            if is_over():
                return
        yield Scrubbed(count, count, done_bytes, record_count, tuple(bad))

    def _dormant(self) -> Iterator[Segment]:
        """Segments of dormant sessions, made for this look. Sessions may come to be known meanwhile."""
        dormant, nowhere = self._ledger.sleep.dormant, Usage(NO_SHARES)
        for number in dormant:
            session = dormant.revived(number, nowhere.of(dormant.tenant(number)))
            yield from reversed(session.segments)

    async def _check_dormant(self, segment: Segment, bounce: memoryview) -> list[Bad]:
        """Verify the slot of a dormant segment. A bad segment comes to be known."""
        if segment.durable is None or not await self._problem(segment, segment.durable, bounce):
            return []
        known = self._ledger.segment(segment.segment_id)
        return [] if known is None else await self._check(known, bounce)

    async def _last_first(self) -> list[int]:
        """Ids of known segments, in no order within a position. Sorting a million at once takes a second."""
        by_begin: defaultdict[int, list[int]] = defaultdict(list)
        segments = list(self._ledger.segments())
        for i in range(1, len(segments) + 1):
            # No reference is kept over the rest: a held segment keeps its session awake.
            segment = segments.pop()
            by_begin[segment.begin].append(segment.segment_id)
            if i % SORTED_PER_TURN == 0:
                await asyncio.sleep(0)
        return [each for begin in sorted(by_begin, reverse=True) for each in by_begin[begin]]

    async def release(self) -> tuple[int, int]:
        """Test quarantined slots by writing, and let those be used again that keep what they are given.

        Returns how many do, and how many do not. Raises TooManyRequests (a release is under way),
        TierFailure.
        """
        # One release at a time: a slot that another one has released holds somebody's rows by now.
        if self._is_releasing:
            raise TooManyRequests(what="releases", limit=1)
        self._is_releasing = True
        try:
            slots = sorted(self._ledger.below.quarantined)
            released = [await self._release(slot) for slot in slots].count(True)
            return released, len(slots) - released
        finally:
            self._is_releasing = False

    async def _release(self, slot: Slot) -> bool:
        if not await self._io.keeps_bytes(slot):
            return False
        # The record comes before the use: else a restart would keep a slot from use with somebody's rows in
        # it.
        await self._metadata.commit(Changes(released=[slot]), is_durable=True)
        self._ledger.unquarantined(slot)
        return True

    async def _records(self, pause_s: float) -> int:
        """Read every record, a few at a time."""
        count = 0
        tables: Iterable[Iterable[object]] = (
            self._metadata.models(),
            self._metadata.sessions(),
            self._metadata.segments(),
        )
        for table in tables:
            for _ in table:
                count += 1
                if count % RECORDS_PER_TURN == 0:
                    await asyncio.sleep(pause_s)
        return count

    async def _check_dram(self, segment: Segment) -> list[Bad]:
        """Verify a segment's rows in DRAM. This comes before SSD's copy, by which bad rows are mended."""
        slot, end = segment.memory, segment.end
        if slot is None:
            return []
        # The names are taken before the verification, which may cut the sessions.
        names = sorted(session.name for session in self._ledger.names.listers(segment))
        self._ledger.held(segment)
        is_mended = True
        try:
            problem = await self._mending.verify(segment)
        except CorruptSegment as error:
            problem, is_mended = str(error.facts["problem"]), False
        finally:
            self._ledger.released(segment)
        if not problem:
            return []
        return [
            Bad(
                segment.segment_id,
                segment.tenant,
                tuple(names),
                segment.begin,
                end,
                self._io.arena_path,
                slot.offset_bytes,
                problem,
                is_in_dram=True,
                is_mended=is_mended,
            )
        ]

    async def _check(self, segment: Segment, bounce: memoryview) -> list[Bad]:
        """Verify every slot that the segment has on SSD, those on lost paths left out."""
        # A segment that moved during the read is read again: its old slot belongs to nobody.
        while segment.durable and segment.is_listed:
            places, row_count = segment.places, segment.durable_row_count
            self._ledger.held(segment)
            try:
                there = [place for place in places if place.path_index not in self._ledger.lost.paths]
                problems = {place: await self._problem(segment, place, bounce) for place in there}
                if segment.durable_row_count != row_count or segment.places != places:
                    # The segment was written elsewhere meanwhile, and perhaps back again, or another reader
                    # found it bad.
                    continue
                is_mended = "" in problems.values()
                bad = [
                    self.described(segment, place, problem, is_mended=is_mended)
                    for place, problem in problems.items()
                    if problem
                ]
                # With one good copy the bad ones are dropped, and made anew from it.
                if is_mended:
                    for place, problem in problems.items():
                        if problem:
                            self._mending.drop_place(segment, place, problem)
                # Every copy was looked at, and all are bad.
                elif len(there) == len(places):
                    await self._mending.quarantine({segment})
                elif there:
                    self._mending.drop_place(segment, there[0], problems[there[0]])
                return bad
            finally:
                self._ledger.released(segment)
        return []

    async def _problem(self, segment: Segment, place: Slot, bounce: memoryview) -> str:
        """The damage of one of a segment's slots on SSD; empty if there is none."""
        try:
            await self._io.check(segment, place, bounce)
        except CorruptSegment as error:
            return str(error.facts["problem"])
        return ""

    async def _pause(
        self, began_ns: int, done_bytes: int, bytes_per_second: int, is_over: Callable[[], bool]
    ) -> None:
        due_ns = done_bytes * 10**9 // bytes_per_second if bytes_per_second else 0
        left_s = max(due_ns - (self._state.clock.monotonic_ns() - began_ns), 0) / 10**9
        while True:
            await asyncio.sleep(min(left_s, LONGEST_PAUSE_S))
            left_s -= LONGEST_PAUSE_S
            if left_s <= 0 or is_over():
                return
