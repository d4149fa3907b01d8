"""Staging: segments on their way to SSD, in slots that no record names.

A full segment never changes, so its bytes may go to SSD before a caller asks for durability, and before its rows
are visible. A flush waits for what is staged, writes the rest, and records all of it. Worst case: a staged segment
that is never recorded, whose slot goes back when the segment does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ctxcache.cache.moves import Moves
from ctxcache.cache.segment_io import SegmentIO, Written
from ctxcache.cache.state import State
from ctxcache.core.ledger.places import Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.format.slot import Slot

WINDOW_BYTES = 32 << 20
"""Bytes that one move has in flight, mostly on its session's path: enough for the device never to wait, few enough for
moves of several sessions to take turns. Two segments at least: one is verified while the next is read."""


def window(size_bytes: int) -> int:
    """How many segments of that size one move has in flight."""
    return max(2, WINDOW_BYTES // size_bytes)


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


class Staging:
    """Writes segments to slots that no record names. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        moves: Moves,
        take: Callable[[int, Session], Slot | None],
        place: Callable[[int, Session], Awaitable[Slot]],
    ) -> None:
        """`take` and `place`: an SSD slot for a session that is free, or is made free."""
        self._ledger = state.ledger
        self._io, self._moves = io, moves
        self._take_slot, self._place_slot = take, place
        self._staged: dict[Segment, Staged] = {}
        self._in_place: dict[Segment, Staged] = {}
        """Full segments under way, wanted or not: their headers are made where their rows lie."""
        self._windows: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()
        state.unstage = self.unstage

    @property
    def written(self) -> Iterator[Written]:
        """What has a slot on SSD that no record names; exact while no move is under way."""
        return (item.written for item in self._staged.values() if item.written)

    def stage(self, session: Session, segments: Iterable[Segment]) -> None:
        """Begin to write these segments: every row of theirs is in place and will not change.

        Nothing makes way for them: where no slot is free they wait for a flush.
        """
        for segment in segments:
            row_count = segment.layout.segment_tokens
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
        for segment in self._ledger.unwritten_segments(session):
            self.unstage(segment)
        return True

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

    def take(self, session: Session, segment: Segment, row_count: int) -> Staged:
        """What is staged of a segment, from now on the caller's own; begun now if need be."""
        staged = self._staged.get(segment)
        if staged is None or staged.row_count != row_count:
            return self.start(session, segment, row_count, is_urgent=True)
        return self._staged.pop(segment)

    def start(self, session: Session, segment: Segment, row_count: int, *, is_urgent: bool) -> Staged:
        """Begin to write a segment's first rows."""
        staged = Staged(segment, row_count, is_urgent)
        self._ledger.held(segment)
        before = self._in_place.get(segment)
        staged.task = self._moves.start(self._put(session, staged, before))
        if row_count == segment.layout.segment_tokens:
            self._in_place[segment] = staged
        return staged

    def give_up(self, staged: Staged) -> None:
        """Give the slot back, now or when the device is done with it."""
        staged.is_wanted = False
        if self._staged.get(staged.segment) is staged:
            del self._staged[staged.segment]
        if staged.is_done and staged.written:
            self.give_back(staged.written)
            staged.written = None

    def give_back(self, written: Written) -> None:
        """Give back the slot of something that was written and will not be recorded."""
        self._ledger.staged(written.segment, written.slot, is_there=False)
        self._ledger.below.give(written.slot)

    async def write(self, session: Session, segment: Segment, row_count: int) -> Written:
        """Write a segment's first rows to a slot that is made free. Raises CapacityExceeded, CorruptSegment, TierFailure."""
        slot = await self._place_slot(segment.size_bytes, session)
        self._ledger.staged(segment, slot, is_there=True)
        written = Written(segment, slot, row_count)
        try:
            await self._io.write(written)
        except BaseException:
            self.give_back(written)
            raise
        return written

    # -- parts -------------------------------------------------------------------------------------

    async def _put(self, session: Session, staged: Staged, before: Staged | None) -> None:
        turns = self._windows.setdefault(session.uid, asyncio.Semaphore(window(session.layout.size_bytes)))
        try:
            if before is not None:
                # Of rows that were given up: its header would land over this one's.
                await asyncio.wait([before.task])
            async with turns:
                slot = await self._slot(session, staged) if staged.is_wanted else None
                if slot is not None:
                    staged.written = Written(staged.segment, slot, staged.row_count)
                    self._ledger.staged(staged.segment, slot, is_there=True)
                    await self._io.write(staged.written)
        except BaseException:
            staged.is_wanted = False
            raise
        finally:
            staged.is_done = True
            if self._in_place.get(staged.segment) is staged:
                del self._in_place[staged.segment]
            if not staged.is_wanted or staged.written is None:
                self.give_up(staged)
            self._ledger.released(staged.segment)

    async def _slot(self, session: Session, staged: Staged) -> Slot | None:
        size_bytes = session.layout.size_bytes
        if staged.is_urgent:
            return await self._place_slot(size_bytes, session)
        return self._take_slot(size_bytes, session)
