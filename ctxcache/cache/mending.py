"""Mending: what is done about bytes in DRAM that are not what their writers said.

Where SSD has the rows they are read, verified and put over the bad ones, in place: leases, reservations and other
readers of the slot go on, and none of them sees a byte change that was right. Where SSD has them not, the sessions
end before them. Nobody is believed: a reader that complains has the rows verified here. Worst case: bad bytes
behind what SSD has of a segment, which cost its sessions these tokens and all after them.
"""

import asyncio
import logging
import mmap
from collections.abc import Collection, Sequence

from ctxcache.cache.departures import Departures
from ctxcache.cache.moves import Moves
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core import ranges
from ctxcache.core.history import Event
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import CorruptSegment
from ctxcache.format.sums import Sums

FAILED = "a segment failed verification"
TRIES = 3
"""How often bytes may turn out to be bad right after they were found to be right."""
log = logging.getLogger(__name__)


class Mending:
    """Verifies what DRAM has, and mends it. Segments are held by who asks. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, departures: Departures, moves: Moves) -> None:
        self._state, self._io, self._ledger = state, io, state.ledger
        self._departures, self._moves = departures, moves
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def settle(self, segment: Segment, row_count: int) -> None:
        """Have so many committed rows of a segment in DRAM, or more, covered by one sum per stream. Raises as `mend`."""
        for _ in range(TRIES):
            if segment.memory is None or segment.is_settled(row_count):
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
        """Put right what DRAM has of a segment. Once, whoever asks for it.

        Raises CorruptSegment when that cannot be done, and its sessions end before it then; TierFailure.
        """
        task = self._tasks.get(segment.segment_id)
        if task is None:
            task = self._tasks[segment.segment_id] = self._moves.start(self._mend(segment, problem))
        await asyncio.shield(task)

    async def quarantine(self, bad: Collection[Segment]) -> None:
        """End every session that lists a segment found bad before that segment's tokens.

        The state behind a gap is of no use to a reader; what is before it stays. The bad slots are kept
        from use. Raises TierFailure; the sessions have ended there all the same.
        """
        self._state.counters.corrupt_segment_count += len(bad)
        cut, dead = self.cut(bad, Event.CORRUPT, FAILED)
        # Not its own any more: when the last hold of the segment ends, the slot may be another's.
        slots = [slot for segment in bad if (slot := self._ledger.corrupt(segment))]
        await self._departures.write_down(cut, dead=dead, bad=slots)

    def cut(
        self, bad: Collection[Segment], event: Event, why: str
    ) -> tuple[Sequence[Session], Sequence[Segment]]:
        """End sessions before these segments' tokens; returns the sessions, and the segments that no session lists now."""
        cut: list[Session] = []
        dead: list[Segment] = []
        for session in {s.uid: s for segment in bad for s in self._ledger.listers(segment)}.values():
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
        self._state.accesses.happened(
            session, event, detail=why, token_count=before_count - session.token_count
        )
        return dead

    async def _mend(self, segment: Segment, problem: str) -> None:
        self._ledger.held(segment)
        try:
            found, restored = problem, None
            for _ in range(TRIES):
                restored = await self._restore(segment)
                found = await self._io.verify(segment) if segment.memory else ""
                if not found or restored is None or segment.row_count > restored.row_end:
                    break
            if not found:
                self._mended(segment, problem)
            elif restored is None:
                log.error("dram_rows_lost segment=%d problem=%r", segment.segment_id, found)
                await self.quarantine({segment})
                raise CorruptSegment(segment_id=segment.segment_id, problem=found)
            elif segment.row_count > restored.row_end:
                log.error("dram_rows_lost segment=%d problem=%r", segment.segment_id, found)
                await self._shorten(segment, restored)
                raise CorruptSegment(segment_id=segment.segment_id, problem=found)
            else:
                # What SSD has is right, and served as soon as this slot is out of use.
                self._ledger.spoiled(segment)
                problem = f"{found}, and memory does not keep it"
                raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
        finally:
            del self._tasks[segment.segment_id]
            self._ledger.released(segment)

    async def _restore(self, segment: Segment) -> Sums | None:
        """Put what SSD has in the place of what DRAM has; which rows that were. None where SSD has none."""
        image = memoryview(mmap.mmap(-1, segment.layout.size_bytes))
        while segment.memory and segment.durable:
            slot, row_count = segment.durable, segment.durable_row_count
            try:
                values = await self._io.check(segment, image)
            except CorruptSegment:
                # A flush may have moved it meanwhile.
                if segment.durable is slot:
                    return None
                continue
            if segment.durable is slot:
                await self._io.restore_rows(segment, image, row_count)
                return Sums(0, row_count, values)
        return None

    def _mended(self, segment: Segment, problem: str) -> None:
        self._state.counters.mended_segment_count += 1
        log.error("dram_rows_mended segment=%d problem=%r", segment.segment_id, problem)
        for session in self._ledger.listers(segment):
            detail = "memory had other bytes than were written; what SSD has took their place"
            self._state.accesses.happened(session, Event.MENDED, detail=detail)

    async def _shorten(self, segment: Segment, durable: Sums) -> None:
        """End a segment's sessions behind the rows that SSD has of it."""
        self._state.counters.corrupt_segment_count += 1
        sessions = self._ledger.shortened(segment, durable)
        dead = []
        for session in sessions:
            dead += self._end_at(session, segment.begin + durable.row_end, Event.CORRUPT, FAILED)
        await self._departures.write_down(sessions, dead=dead)
