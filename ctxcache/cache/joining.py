"""Joining: short segments of a long session become one long one, so that the session's books stay short.

    64 | 64 | 64 | ... | tail
      copied and verified in memory ──► written below, synced ──► one record: 4,096 | ... | tail
                                                                      └──► the short ones' slots given back

A session that grows token by token lies in segments of 64 tokens; many short appends make segments of a few
hundred. A lease, a fork and a record take a step for each. Only sessions of many segments are joined: the
others cost little, and a row of a joined segment is written twice, within the bound of all that is written
unasked. Readers keep what they hold. Where memory or SSD has no room in one piece all stays as it is.

Segments that several sessions list are joined for all of them, in the same record: so for a session and its
forks, not for a prompt of hundreds, whose records would hold the event loop up. Nor where one of them shows a
part of the rows.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from ctxcache.cache.budgets import MemoryRoom
from ctxcache.cache.eviction import FREED_PER_SLICE, Departures, SsdRoom, record_of, segment_record_of
from ctxcache.cache.flushing import Staging, WriteBehind
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Background, State
from ctxcache.core import ranges
from ctxcache.core.ledger.places import Place
from ctxcache.core.ledger.residence import Kin
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import TierFailure
from ctxcache.format.layout import LONGEST_SEGMENT_TOKENS
from ctxcache.storage.metadata.base import Changes, MetadataStore

LISTINGS_LIMIT = 3072
"""Segments of all the sessions whose records are written at once because they list what is joined, when they
are several: less than a millisecond of the event loop."""
KIN_LIMIT = 1024
"""Sessions among which those that list a segment are looked for."""
LOOKED_AT = 1024
"""Segments at a session's end among which those to be joined are looked for, at a time."""


# The disk at each step of a join:
#
#     long segment written, synced    short ones recorded; the long slot is named by nothing
#     one record, synced              the long one recorded, the short ones' records gone
#     short slots given back          the same
#
# Readers that hold a short one keep it: `forgotten` frees its slots when the last hold ends.
class Joining:
    """Joins segments. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        departures: Departures,
        ssd_room: SsdRoom,
        staging: Staging,
        write_behind: WriteBehind,
        memory_room: MemoryRoom,
        background: Background,
    ) -> None:
        self._state, self._ledger = state, state.ledger
        self._io, self._metadata, self._departures = io, metadata, departures
        self._ssd_room, self._staging = ssd_room, staging
        self._write_behind = write_behind
        self._memory_room, self._background = memory_room, background

    async def turn(self) -> None:
        """Join what can be joined of sessions that have become longer.

        Raises CapacityExceeded, TierFailure.
        """
        for session in self._ledger.take_lengthened():
            await self.join(session)

    async def join(self, session: Session) -> None:
        """Join what can be joined of one session. Raises CapacityExceeded, TierFailure."""
        # A join runs to its end: no slot is given back while a device writes to it.
        while await asyncio.shield(self._background.start(self._join_some(session))):
            pass

    async def _join_some(self, session: Session) -> bool:
        """Join one run of segments; False where there is none, or no room."""
        # The watermark `longest` bounds the long segment, so that its slot can be had in one piece.
        longest = session.layout.filled_by(LONGEST_SEGMENT_TOKENS, self._ledger.longest_bytes)
        # The allowance of write-behind bounds joins as well: a join writes rows for a second time.
        parts = self._run_of(session, longest.segment_tokens)
        if not parts or not self._write_behind.allowance.is_left(self._state.clock.monotonic_ns()):
            return False
        self._metadata.check()
        # The parts are held: none may leave memory while it is copied.
        for part in parts:
            self._ledger.held(part)
        # Room for a long piece may drop clean segments. The parts are held, so they are not among them.
        try:
            # A join waits for no room: no held slot is freed for it.
            slot = self._memory_room.take_long(longest.size_bytes, session.tenant)
            if slot is None:
                return False
            segment_id = self._ledger.new_segment_id()
            whole = self._ledger.reserved(session, segment_id, parts[0].begin, longest, slot)
            self._ledger.held(whole)
            try:
                return await self._join(session, parts, whole)
            finally:
                # A place other than RESERVED means that the record is written, or that its fate is not known.
                # The segments were not joined: the slot in memory goes back.
                if whole.place is Place.RESERVED:
                    self._ledger.abandoned(whole)
                self._ledger.released(whole)
        finally:
            for part in parts:
                self._ledger.released(part)

    async def _join(self, session: Session, parts: Sequence[Segment], whole: Segment) -> bool:
        # The copy is verified against the writers' sums: a joint checksum of a bad byte would make it right.
        if await self._io.join(parts, whole):
            # A row in memory has changed. Reads and scrubbing repair it.
            return False
        slot = self._ssd_room.take(whole.size_bytes, session)
        if slot is None:
            return False
        # The allowance is spent before the write: a flush beside it must not spend the same.
        self._write_behind.allowance.spend(session.copies * slot.size_bytes)
        written = await self._staging.write_taken(session, whole, slot)
        if written is None or len(written.places) < whole.copies:
            # Segments on two paths are not joined into one that lies on one path.
            if written is not None:
                self._staging.give_back(written)
            return False
        try:
            # Bytes become durable before the record that points at them.
            await self._io.sync({place.path_index for place in written.places})
        except BaseException:
            self._staging.give_back(written)
            raise
        # A cut, a fork or a deletion may have come during the write; from here to the commit nothing awaits.
        sessions = self._sessions_of(session, parts)
        if not sessions:
            self._staging.give_back(written)
            return False
        dead = self._ledger.joined(sessions, parts, written.flushed)
        changes = Changes(
            sessions=list(map(record_of, sessions)),
            segments=[segment_record_of(self._ledger, whole)],
            deleted_segment_ids=[part.segment_id for part in dead],
        )
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            # The record may have arrived or not. The short ones' slots stay taken until the metadata is read
            # again.
            self._departures.strand(dead)
            raise
        self._state.counters.joined_segment_count += len(dead)
        # Each part's slots and keys take some microseconds.
        for i, part in enumerate(dead, 1):
            self._ledger.forgotten(part)
            # Many parts may go at once: other callers get their turns of the event loop.
            if i % FREED_PER_SLICE == 0:
                await asyncio.sleep(0)
        return True

    def _run_of(self, session: Session, token_count: int) -> list[Segment]:
        """Segments that follow one another and have so many tokens in all; empty where there are none."""
        run: deque[Segment] = deque()
        run_count = 0
        # The search begins at the end: new full segments are there, and long sessions have been joined
        # before.
        for segment in session.segments[-LOOKED_AT:]:
            # A gap in positions, or another number of listers, begins a new run.
            if run and (run[-1].end != segment.begin or run[-1].reference_count != segment.reference_count):
                run.clear()
                run_count = 0
            is_short = segment.place is Place.BOTH and segment.row_count < token_count
            # A held segment has readers with pointers into it. A segment that is unwritten, or has several
            # sums for a stream, gives nothing to verify the copy by.
            if segment.hold_count or not is_short or not _is_whole(segment):
                run.clear()
                run_count = 0
                continue
            run.append(segment)
            run_count += segment.row_count
            # Only runs that fill the long segment to its last row: a shorter one would be joined again.
            while run_count > token_count:
                run_count -= run.popleft().row_count
            if run_count == token_count:
                found = list(run)
                if self._sessions_of(session, found):
                    return found
                if segment.reference_count > 1:
                    # The same sessions list the next segments: the search among them is not repeated for
                    # each.
                    run.clear()
                    run_count = 0
        return []

    def _sessions_of(self, session: Session, parts: Sequence[Segment]) -> list[Session]:
        """The sessions that list these segments, this one among them.

        Empty unless each session lists the segments in a row and shows every row of them.
        """
        home = parts[0].home
        # While a path is lost sessions withhold tokens, and a part may be unreadable.
        if session.is_gone or self._ledger.lost.paths:
            return []
        if isinstance(home, Kin) and len(home.uids) > KIN_LIMIT:
            return []
        sessions = self._ledger.names.listers(parts[0])
        if len(sessions) > 1 and sum(len(lister.segments) for lister in sessions) > LISTINGS_LIMIT:
            return []
        # `reference_count` tells quickly whether others list a part; `listers` would walk the kin for each.
        if session not in sessions or any(part.reference_count != len(sessions) for part in parts):
            return []
        is_same = all(map(_is_whole, parts)) and all(
            _shows(lister, parts, session.copies) for lister in sessions
        )
        return sessions if is_same else []


def _shows(session: Session, parts: Sequence[Segment], copies: int) -> bool:
    """Whether the session lists these parts in a row, shows all their rows, and wants so many copies."""
    begin, end = parts[0].begin, parts[-1].end
    if session.is_block or session.withheld or session.copies != copies:
        return False
    is_shown = ranges.clip(session.live, begin, end) == ((begin, end),)
    return is_shown and session.segments_of(((begin, end),)) == parts


def _is_whole(part: Segment) -> bool:
    """Whether all rows of the segment are below, with one sum for each stream."""
    return part.is_full and not part.is_unwritten and part.is_settled(part.row_count)
