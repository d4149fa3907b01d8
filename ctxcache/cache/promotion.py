"""Promotion: segments on their way from SSD into DRAM, for callers that wait and ahead of need.

A segment is promoted once, whoever wants it, and its promotion runs to its end although callers stop waiting.
Promotion ahead of need takes what is free, or clean and not needed soon. It flushes nothing and gives way to
callers that wait. Worst case: a device that does not answer, for which a slot is kept until it does.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ctxcache.cache.budgets import MemoryRoom
from ctxcache.cache.flushing import window
from ctxcache.cache.scrubbing import Mending
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Background, State, in_window
from ctxcache.core.ledger.places import Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.observations import Throughput
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.layout import Slot

SECOND_NS = 10**9
MayGive = Callable[[bytes], bool]


# One promotion of a segment, however many want it:
#
#     reader a ──┐
#     reader b ──┼──► _tasks[segment] ──► place a slot ──► read, verify ──► ledger.promoted
#     prefetch ──┘         │
#                          └── held by the task itself: every caller may go away
#
# Callers that wait come first. Prefetching begins no segment while `awaited_count` is above 0; what it has
# begun goes on.
class Promotions:
    """Promotions under way. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, mending: Mending, room: MemoryRoom, background: Background
    ) -> None:
        self._state, self._io, self._ledger = state, io, state.ledger
        self._mending, self._room, self._background = mending, room, background
        self.throughput = Throughput()
        """How fast segments come from SSD."""
        self.owed: set[Slot] = set()
        """DRAM slots that belong to nobody and that a device may still write to: reads that were given up."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.awaited_count = 0
        """Promotions of several segments that callers wait for."""
        self._is_none_awaited = asyncio.Event()
        self._is_none_awaited.set()

    @property
    def running_count(self) -> int:
        """Segments on their way into DRAM."""
        return len(self._tasks)

    async def promote(self, segments: Sequence[Segment]) -> None:
        """Bring a session's held segments into DRAM, verified.

        Raises CorruptSegment, CapacityExceeded, TierFailure.
        """
        missing = [s for s in segments if not s.memory]
        if missing:
            # Enough in flight for the device, few enough for several sessions to take turns.
            count = window(max(segment.size_bytes for segment in missing))
            self.awaited_count += 1
            # Promotion ahead of need stops here: the device is for callers that wait.
            self._is_none_awaited.clear()
            try:
                with self._state.span("promotion", segment_count=len(missing)):
                    await in_window((partial(self._promotion, s) for s in missing), count)
            finally:
                self.awaited_count -= 1
                if not self.awaited_count:
                    self._is_none_awaited.set()

    async def wait_for_others(self) -> None:
        """Wait until no caller waits for a promotion."""
        await self._is_none_awaited.wait()

    async def promote_ahead(
        self, segments: deque[Segment], *, may_give: MayGive, is_wanted: Callable[[], bool]
    ) -> bool:
        """Promote one session's segments into room above the watermark, or of sessions that `may_give` takes.

        Each is taken off the left when it begins; none begins while a caller waits for others, or it is
        wanted no more. False when there was no room. Raises CorruptSegment, TierFailure.
        """
        has_room = True

        def moves() -> Iterator[Callable[[], asyncio.Task[None]]]:
            nonlocal has_room
            while segments and not self.awaited_count and is_wanted():
                segment = segments.popleft()
                # In memory by now, or gone: nothing to do.
                if segment.place is not Place.BELOW:
                    continue
                slot = None
                # Somebody promotes it already: its slot is that one's, and the wait is shared.
                if segment.segment_id not in self._tasks:
                    slot = self._room.take_ahead(segment, may_give)
                    if slot is None:
                        has_room = False
                        return
                    self._ledger.placement.promoting(segment)
                yield partial(self._promotion, segment, slot)

        if segments:
            await in_window(moves(), window(max(segment.size_bytes for segment in segments)))
        return has_room

    def _promotion(self, segment: Segment, slot: Slot | None = None) -> "asyncio.Task[None]":
        """The promotion of a segment, begun now if need be: into that slot, or one that is made free."""
        task = self._tasks.get(segment.segment_id)
        if task is None:
            # Held until it ends, also when every caller went away: a device may write to its slot.
            self._ledger.held(segment)
            task = self._background.start(self._promote(segment, slot))
            self._tasks[segment.segment_id] = task
        return task

    async def _promote(self, segment: Segment, slot: Slot | None) -> None:
        # Room that came from `take_ahead` is counted as promoted ahead of need, whatever comes of it.
        is_ahead = slot is not None

        async def fill(place: Slot) -> tuple[int, ...]:
            nonlocal slot
            # A slot for the first attempt. A second one, from another copy, needs a new slot only if the
            # first is owed.
            slot = slot or await self._room.place(segment.size_bytes, segment.tenant)
            try:
                with self._measured(segment.size_bytes), self._kept(slot):
                    return await self._io.read(segment, place, slot)
            finally:
                if slot in self.owed:
                    # The device may still write to it: another copy goes to another slot.
                    slot = None

        try:
            # Two readers may have found it missing, one after the other.
            if not segment.memory:
                values = await self._mending.read(segment, fill)
                assert slot is not None  # noqa: S101  # it has just been filled
                # No await between: the slot is the segment's, or goes back below.
                self._ledger.promoted(segment, slot, values)
                slot = None
                self._state.counters.promoted_segment_count += 1
        finally:
            # Now, not when the loop calls back: what comes to DRAM now may leave it in this very turn.
            del self._tasks[segment.segment_id]
            if slot:
                self._ledger.memory.give(slot)
            if is_ahead:
                self._ledger.placement.promoted(segment)
            self._ledger.released(segment)

    @contextmanager
    def _kept(self, slot: Slot) -> Iterator[None]:
        """Keep a slot that a device may still write to, until the device has let go of it."""
        try:
            yield
        except TierFailure as failure:
            # The device gave no answer in time. It may still write into the slot, seconds or hours later.
            if failure.returned is not None and not failure.returned.done():
                self.owed.add(slot)
                # Until then the slot belongs to nobody: a late read would fall on the next segment's rows.
                failure.returned.add_done_callback(lambda _: self._give_owed(slot))
            raise

    def _give_owed(self, slot: Slot) -> None:
        self.owed.remove(slot)
        self._ledger.memory.give(slot)

    @contextmanager
    def _measured(self, size_bytes: int) -> Iterator[None]:
        begun_s = self._state.clock.monotonic_ns() / SECOND_NS
        self.throughput.begun(begun_s)
        arrived_bytes = 0
        try:
            # Only what arrived counts as arrived: a failed read is time without bytes.
            yield
            arrived_bytes = size_bytes
            self._state.seen.promotion_s.observe(self._state.clock.monotonic_ns() / SECOND_NS - begun_s)
        finally:
            self.throughput.ended(self._state.clock.monotonic_ns() / SECOND_NS, arrived_bytes)


SESSIONS_AT_A_TIME = 2


class PromotionOutcome(enum.Enum):
    """How a promotion ahead of need ended."""

    DONE = enum.auto()
    NO_ROOM = enum.auto()
    NOT_WANTED = enum.auto()


# Two sessions at a time: while one is verified the device reads for the other, and a hint that comes is not
# behind a queue of guesses.
class Prefetching:
    """Promotes ahead of need. Owned by the event loop."""

    def __init__(self, state: State, promotions: Promotions, mending: Mending) -> None:
        self._ledger, self._placement = state.ledger, state.ledger.placement
        self._state, self._promotions, self._mending = state, promotions, mending
        self.turns = asyncio.Semaphore(SESSIONS_AT_A_TIME)

    async def prefetch(self) -> None:
        """Promote whom the policy wants in DRAM, until there is nobody, or no room for the first of them.

        Raises the first failure at the end; who failed is left aside until its next hint or rest.
        """
        # Cleared first: what is wished for during the turn is another turn.
        self._state.is_prefetch_wanted.clear()
        under_way: dict[asyncio.Task[PromotionOutcome], Session] = {}
        is_going_on, failure = True, None
        try:
            while True:
                # Looked up one by one: what the policy wants next may change with each.
                while is_going_on and len(under_way) < SESSIONS_AT_A_TIME and (session := self._next()):
                    under_way[self._begin(session)] = session
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    is_going_on &= self._end(task, under_way.pop(task))
                    failure = failure or task.exception()
        finally:
            for task, session in under_way.items():
                # Only the turns end: a promotion under way goes on to its end by itself.
                task.cancel()
                self._placement.came(session)
            await asyncio.gather(*under_way, return_exceptions=True)
        if failure is not None:
            raise failure

    async def promote_ahead(self, session: Session, budget_bytes: int) -> int:
        """Promote the session's first missing segments, so many bytes at most; how many bytes came.

        Less where there is no room, or the session is used or goes meanwhile. Raises CorruptSegment,
        TierFailure.
        """
        # The first missing ones: of a session its beginning is of use first.
        missing: list[Segment] = []
        for segment in session.shown:
            if not segment.memory:
                budget_bytes -= segment.size_bytes
                if budget_bytes < 0:
                    break
                missing.append(segment)
        if missing and session.is_idle:
            self._placement.coming(session)
            try:
                await self._promote(session, missing)
            finally:
                self._placement.came(session)
        return sum(segment.size_bytes for segment in missing if segment.memory)

    def _next(self) -> Session | None:
        session = self._placement.next_ahead()
        if session is not None:
            self._placement.coming(session)
        return session

    def _begin(self, session: Session) -> "asyncio.Task[PromotionOutcome]":
        missing = [segment for segment in session.shown if not segment.memory]
        return asyncio.get_running_loop().create_task(self._promote(session, missing))

    def _end(self, task: "asyncio.Task[PromotionOutcome]", session: Session) -> bool:
        """True if the next candidate is worth a try."""
        has_failed = task.exception() is not None
        self._placement.came(session, is_set_aside=has_failed)
        # Without room for the first there is none for those that the policy wants less.
        if has_failed or task.result() is PromotionOutcome.NO_ROOM:
            return False
        # Some of it may have had to leave meanwhile, for what is needed sooner.
        return task.result() is PromotionOutcome.NOT_WANTED or self._placement.is_in_memory(session)

    async def _promote(self, session: Session, segments: Iterable[Segment]) -> PromotionOutcome:
        try:
            async with self.turns:
                return await self._promote_in_turn(session, deque(segments))
        except CorruptSegment as error:
            # The session is cut before anybody asks for it.
            await self._mending.quarantine_named(error)
            raise

    async def _promote_in_turn(self, session: Session, segments: deque[Segment]) -> PromotionOutcome:
        while segments:
            # Looked at after each wait: the session may be in use by now, and its reader promotes by itself.
            await self._promotions.wait_for_others()
            if not session.is_idle:
                return PromotionOutcome.NOT_WANTED
            has_room = await self._promotions.promote_ahead(
                segments,
                may_give=lambda uid: not self._placement.is_needed_soon(uid, session.uid),
                is_wanted=lambda: session.is_idle,
            )
            if not has_room:
                return PromotionOutcome.NO_ROOM
        return PromotionOutcome.DONE
