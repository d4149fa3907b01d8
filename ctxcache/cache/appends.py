"""Appends: room first, then rows in place, then a commit that makes them visible.

A session has one reservation at a time. Rows beyond its committed tokens are never read, whatever lies there.
When a writer disappears its slots are kept from others for a while, because it may still be writing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

import numpy as np

from ctxcache.cache.budgets import DirtyBound, MemoryRoom, Pins
from ctxcache.cache.eviction import Departures, SsdRoom
from ctxcache.cache.flushing import Flushing, Staging
from ctxcache.cache.reservations import Cut, Reservation, Room, Run
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Call, State
from ctxcache.core.ledger.places import Use
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, Session, SessionView
from ctxcache.core.ledger.work import current_work
from ctxcache.core.limits import Pinner
from ctxcache.core.prefix.keys import BLOCK_TOKENS
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    ReservationNotFound,
    SessionNotFound,
    WriteInProgress,
    WriteOffsetMismatch,
)
from ctxcache.format.checksums import Sums, covers
from ctxcache.format.layout import SegmentLayout, Slot
from ctxcache.format.streams import CONTENTS_LIMIT, TOKENS, Content, Stream

SECOND_NS = 10**9
RESERVATION_LIFETIME_NS = 300 * SECOND_NS
# Shared memory has no fence: a writer whose process hangs may write to its slot when it wakes up. After a
# minute without its connection the slot is given to others.
GRACE_NS = 60 * SECOND_NS
"""How long slots of a writer that disappeared are kept from others."""
_CUT_BEGIN = itemgetter(1)


# A writer's calls, and what readers and crashes see between them:
#
#     reserve         slots held, nothing visible                a crash leaves nothing
#     rows in place   by the client, in the arena                a crash leaves nothing
#     mark_written    full segments are written ahead            a crash leaves nothing: no record names them
#     commit          visible, sums noted                        a crash takes it back
#     flush           written, synced, recorded                  survives
#     release         room behind `committed` goes back
class Appends:
    """The use cases of a writer."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        departures: Departures,
        ssd_room: SsdRoom,
        staging: Staging,
        flushing: Flushing,
        memory_room: MemoryRoom,
        dirty_bound: DirtyBound,
        pins: Pins,
    ) -> None:
        self._state = state
        self._ledger = state.ledger
        self._departures, self._ssd_room = departures, ssd_room
        self._staging, self._flushing = staging, flushing
        self._memory_room, self._dirty_bound = memory_room, dirty_bound
        self._io = io
        self.pins = pins
        self._open: dict[int, Reservation] = {}
        self._last_id = 0
        self._quarantine: list[tuple[int, Segment, Pinner]] = []
        self.abandoned: Callable[[Session], None] = lambda _: None
        """Called with a block that has no committed row when its reservation ends; `Blocks` sets it."""

    @property
    def reservation_count(self) -> int:
        """Reservations open now."""
        return len(self._open)

    @property
    def held_count(self) -> int:
        """How many segments `held` names."""
        return sum(1 for _ in self.held())

    def reservations(self) -> Iterable[Reservation]:
        """The reservations that are open now."""
        return self._open.values()

    def held(self) -> Iterator[Segment]:
        """Segments held by reservations, and by writers that disappeared, once per hold."""
        for reservation in self._open.values():
            yield from (run.segment for run in reservation.runs)
        for _, segment, _ in self._quarantine:
            yield segment

    async def reserve(
        self,
        tenant: str,
        session_id: str,
        *,
        fingerprint: bytes,
        write_offset: int,
        generation: int | None,
        token_count: int,
        coming_count: int = 0,
        contents: Sequence[Content] = (),
        client: int | None = None,
    ) -> Reservation:
        """Open the session's reservation with room for `token_count` tokens; 0 is allowed, see `extend`.

        `coming_count`: tokens that its writer is known to append, which may then lie in long segments.
        `contents`: the content behind the coming tokens, in order.

        Raises SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, WriteInProgress,
        WriteOffsetMismatch, InvalidArgument (a session of too many contents), CapacityExceeded,
        TooManyRequests, TierFailure.
        """
        # The quick way first: it needs no task, no lock and no await, and is what nearly every append takes.
        reservation = self.reserve_at_once(
            tenant,
            session_id,
            fingerprint=fingerprint,
            write_offset=write_offset,
            generation=generation,
            token_count=token_count,
            coming_count=coming_count,
            contents=contents,
            client=client,
        )
        if reservation is not None:
            return reservation
        session, now_ns = self._writable(tenant, session_id, fingerprint, write_offset, generation)
        reservation = self._made(session, write_offset, coming_count, contents, client)
        # Open before anything is awaited: the session has one writer, and a second one is refused meanwhile.
        self._begin(reservation, now_ns)
        try:
            await self._give_up_withheld(session)
            await self.extend(reservation, token_count)
        except BaseException:
            self.release(reservation)
            raise
        self._state.journal.did(Call.RESERVE, session, tokens=token_count)
        return reservation

    def reserve_at_once(
        self,
        tenant: str,
        session_id: str,
        *,
        fingerprint: bytes,
        write_offset: int,
        generation: int | None,
        token_count: int,
        coming_count: int = 0,
        contents: Sequence[Content] = (),
        client: int | None = None,
    ) -> Reservation | None:
        """Reserve without waiting: there is room within every bound, and slots are free or clean.

        None where the caller has to wait; nothing is changed then. Raises as `reserve`, but for TierFailure.
        """
        session, now_ns = self._writable(tenant, session_id, fingerprint, write_offset, generation)
        # Withheld tokens are given up first, and that waits for a record.
        if session.withheld:
            return None
        reservation = self._made(session, write_offset, coming_count, contents, client)
        try:
            room = self._room_at_once(reservation, token_count)
        except CacheError as error:
            self._state.journal.write_failed(session, error)
            raise
        if room is None:
            return None
        last, row, slots = room
        # Every check has passed: from here on nothing can fail or wait.
        self._begin(reservation, now_ns)
        end = write_offset + token_count
        if last is not None:
            # The continued tail is the first run, for it holds the first tokens.
            self._add_run(reservation, last, row, end)
        for layout, slot in slots:
            segment_id, position = self._ledger.new_segment_id(), reservation.next_position
            segment = self._ledger.reserved(session, segment_id, position, layout, slot)
            self._add_run(reservation, segment, 0, end)
        if self._state.journal.listening is not None:
            self._state.journal.did(Call.RESERVE, session, tokens=token_count)
        return reservation

    def _made(
        self,
        session: Session,
        begin: int,
        coming_count: int,
        contents: Sequence[Content],
        client: int | None,
    ) -> Reservation:
        """A reservation that is not open yet. Raises InvalidArgument."""
        if contents and (count := len(session.contents) + len(contents)) > CONTENTS_LIMIT:
            problem = f"{session.name} would have {count}, and {CONTENTS_LIMIT} are allowed"
            raise InvalidArgument(field="contents", problem=problem)
        return Reservation(
            0,
            session,
            begin,
            begin,
            0,
            Pinner(session.tenant, client),
            coming_end=begin + coming_count,
            longest_bytes=self._ledger.longest_bytes if coming_count else 0,
            contents=contents,
        )

    def _writable(
        self, tenant: str, session_id: str, fingerprint: bytes, write_offset: int, generation: int | None
    ) -> tuple[Session, int]:
        """The session that a writer asks for, and the store's time now. Raises as `reserve`."""
        now_ns = self._state.clock.now_ns()
        session = self._ledger.find_at(tenant, session_id, now_ns)
        # A session has one writer at a time, for two would fill the same rows. Readers go on.
        # Rows are computed behind `write_offset` tokens. Where the session has another token count, that
        # count is the better error: the generation differs as well.
        expected = generation if write_offset == session.token_count else None
        session.check_caller(fingerprint, expected)
        if session.use is Use.WRITTEN:
            raise WriteInProgress(session=session.name)
        if write_offset != session.token_count:
            raise WriteOffsetMismatch(
                session=session.name, token_count=session.token_count, write_offset=write_offset
            )
        return session, now_ns

    def _room_at_once(
        self, reservation: Reservation, token_count: int
    ) -> tuple[Segment | None, int, list[tuple[SegmentLayout, Slot]]] | None:
        """Room for so many more tokens: the segment that goes on and its next row, and slots for new ones.

        Each slot comes with its segment's layout. None where the caller has to wait for a bound or a slot.
        """
        if not token_count:
            return None, 0, []
        session, (last, row) = reservation.session, reservation.last()
        layouts = reservation.new_layouts(token_count, last, row)
        needed, own_bytes = reservation.held_with(last, layouts), reservation.size_bytes
        sizes_bytes = [layout.size_bytes for layout in layouts]
        new_bytes = sum(sizes_bytes)
        # A tenant's limit on SSD may make sessions of it leave.
        is_limited = self._ledger.quotas.is_limited(session.tenant)
        if is_limited or not self.pins.has_room(reservation.client, needed):
            return None
        if last is not None:
            new_bytes += self._ledger.unwritten.new_bytes(last)
        if new_bytes and not self._dirty_bound.admits_at_once(new_bytes, own_bytes):
            return None
        # Taken last: slots are the only thing here that has to be given back.
        slots = self._memory_room.take_all(session, sizes_bytes)
        return None if slots is None else (last, row, list(zip(layouts, slots, strict=True)))

    async def extend(self, reservation: Reservation, token_count: int) -> None:
        """Make room for `token_count` more tokens.

        Raises ReservationNotFound, SessionNotFound, CapacityExceeded, TooManyRequests, TierFailure. Room that
        was made before the error is kept.
        """
        self._check_open(reservation)
        self._ledger.check_expiry(reservation.session)
        try:
            await self._admit(reservation, token_count)
            await self._extend(reservation, token_count)
        except CacheError as error:
            self._state.journal.write_failed(reservation.session, error)
            raise
        finally:
            # The bytes promised during the wait are claimed by now, or are not needed.
            if reservation.promised_bytes:
                self._ledger.unwritten.promise(reservation.session.tenant, -reservation.promised_bytes)
                reservation.promised_bytes = 0

    def renew(self, reservation: Reservation) -> None:
        """Move a reservation's deadline on, for its writer is there. Raises ReservationNotFound."""
        self._check_open(reservation)
        reservation.deadline_ns = self._state.clock.monotonic_ns() + RESERVATION_LIFETIME_NS

    async def commit(
        self,
        reservation: Reservation,
        token_count: int,
        *,
        is_durable: bool,
        keep_open: bool,
        checksums: Sequence[int] | None = None,
    ) -> SessionView:
        """Make the session's tokens below `token_count` visible.

        `checksums`: those of the writer, one per run and stream; None for rows that came by `place`. Raises
        ReservationNotFound, SessionNotFound, InvalidArgument, ChecksumMismatch, and with `is_durable`
        CapacityExceeded and TierFailure: the tokens are then committed in memory all the same. Also
        CorruptSegment: then the session ends before them.
        """
        self.commit_in_memory(reservation, token_count, keep_open=keep_open, checksums=checksums)
        if is_durable:
            await self.flush(reservation)
        return reservation.session.view()

    def commit_in_memory(
        self,
        reservation: Reservation,
        token_count: int,
        *,
        keep_open: bool,
        checksums: Sequence[int] | None = None,
        is_joint: bool = False,
    ) -> None:
        """Make tokens visible. `checksums` as in `commit`; `is_joint`: one for each token.

        Raises ReservationNotFound, SessionNotFound, InvalidArgument, ChecksumMismatch. An expired session is
        not there for its writer either: a commit would bring back what others were told is gone.
        """
        # Order of the checks: open, then whole, then in time, then in range. A writer that is told "not
        # found" starts anew, which is right in each of the first three.
        session = reservation.session
        self._check_open(reservation)
        if session.use is Use.GONE or session.token_count != reservation.committed:
            # The session lost segments before these tokens, or expired: nothing can follow them.
            self.release(reservation, is_abandoned=True)
            raise ReservationNotFound(reservation_id=reservation.reservation_id)
        now_ns = self._state.clock.now_ns()
        # Others were told that the session is gone. A commit must not bring it back.
        if session.has_expired(now_ns):
            self.release(reservation, is_abandoned=True)
            raise SessionNotFound(session=session.name)
        reservation.check(token_count)
        cuts = reservation.cuts(reservation.committed, token_count)
        # The checksums are noted before the rows are visible, since a reader must find them.
        for segment, sums in self._said(reservation, cuts, checksums, is_joint=is_joint):
            segment.note(sums)
        if keep_open:
            # Full segments never change, so their writes begin before anybody asks for durability.
            full = reservation.mark(token_count)
            if full:
                self._staging.stage(session, full)
        # From here on the rows are visible. Everything that may be refused was refused before.
        self._attach(reservation, cuts, token_count, now_ns, keep_open=keep_open)
        if not keep_open:
            self.release(reservation)
        self._state.committed(session)

    async def flush(self, reservation: Reservation) -> None:
        """Make the committed tokens durable. Raises CapacityExceeded, TierFailure, SessionNotFound."""
        if self._state.journal.listening is not None:
            self._state.journal.did(Call.FLUSH, reservation.session)
        # Its writer may be done, and kept it until then.
        current_work().on(reservation.session)
        await self._flushing.flush(reservation.session)

    def mark_written(
        self, reservation: Reservation, token_count: int, checksums: Sequence[int] | None = None
    ) -> None:
        """Tokens below `token_count` are written and will not change: full segments may go to SSD.

        `checksums` as in `commit`, from the last mark on. Raises ReservationNotFound, InvalidArgument.
        """
        self._check_open(reservation)
        reservation.check(token_count)
        begin = max(reservation.marked, reservation.committed)
        cuts = reservation.cuts(begin, token_count)
        for segment, sums in self._said(reservation, cuts, checksums, is_joint=False):
            segment.note(sums)
        if not reservation.session.is_gone:
            full = reservation.mark(token_count)
            # A commit that took back marked tokens leaves a gap in the sums. The next commit fills it.
            full = [s for s in full if covers(s.sums, s.layout.segment_tokens)]
            self._staging.stage(reservation.session, full)

    def is_open(self, reservation_id: int) -> bool:
        """Whether a reservation has not ended yet."""
        return reservation_id in self._open

    def get(self, reservation_id: int) -> Reservation:
        """An open reservation. Raises ReservationNotFound."""
        try:
            return self._open[reservation_id]
        except KeyError:
            raise ReservationNotFound(reservation_id=reservation_id) from None

    def release(self, reservation: Reservation, *, is_abandoned: bool = False) -> None:
        """End a reservation and give back its room. `is_abandoned`: its writer may still be writing."""
        # The client, its end and upkeep may each release a reservation. The first one counts.
        if self._open.pop(reservation.reservation_id, None) is None:
            return
        session, client = reservation.session, reservation.client
        if self._state.journal.listening is not None:
            self._state.journal.did(Call.FINISH, session)
        now_ns = self._state.clock.monotonic_ns()
        for run in reservation.runs:
            segment = run.segment
            # Rows that were marked and never committed leave their checksums behind.
            if segment.sums and segment.sums[-1].row_begin >= segment.row_count:
                segment.forget_sums(segment.row_count)
            if not segment.row_count:
                # No row of this segment was committed: no session lists it, and its slot waits for the hold
                # alone.
                self._ledger.abandoned(segment)
            is_short = segment.row_count < segment.layout.segment_tokens
            # The segment was staged as full, and is not.
            if is_short:
                self._staging.unstage(segment)
            if is_short and segment.layout is not session.layout:
                # A segment that grows token by token is written many times, so it is never a long one.
                self._ledger.closed([segment])
            # The writer may be alive and still write: for a while no other session may have the slot. The
            # claim ends now, for no commit will come. The slot and its pin stay for the grace.
            if is_abandoned:
                self._ledger.unwritten.release(segment)
                self._ledger.closed([segment])
                self._quarantine.append((now_ns + GRACE_NS, segment, client))
            else:
                self._release(segment, client)
        # A second writer may come only after the segments are released.
        self._ledger.write_ended(session, now_ns / SECOND_NS)
        if session.is_block and not session.log_end:
            self.abandoned(session)

    def end_overdue(self) -> None:
        """End reservations past their deadline, and give back slots whose grace has passed."""
        now_ns = self._state.clock.monotonic_ns()
        for reservation in [r for r in self._open.values() if r.deadline_ns <= now_ns]:
            self.release(reservation, is_abandoned=True)
        ready = [item for item in self._quarantine if item[0] <= now_ns]
        self._quarantine = [item for item in self._quarantine if item[0] > now_ns]
        for _, segment, client in ready:
            self._release(segment, client)

    def place(self, reservation: Reservation, stream: Stream, token_begin: int, data: memoryview) -> None:
        """Copy rows of one stream to their places. All of them lie within the reservation.

        The rows are summed before they are copied. The receiving service verifies them after that.
        """
        row_bytes = reservation.session.layout.row_bytes(stream)
        token_end = token_begin + len(data) // row_bytes
        for run, first, last in reservation.cuts(token_begin, token_end):
            source = data[(first - token_begin) * row_bytes : (last - token_begin) * row_bytes]
            # The sum is of the bytes as they came, so that a fault of the copy or of memory is found later.
            reservation.tallied().grow(stream, first, last, is_first=first == run.token_begin).update(source)
            target = self._rows(run, stream, first, last)
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def place_in_row(self, reservation: Reservation, stream: int, begin: int, data: memoryview) -> None:
        """Copy bytes into a block's only row of stream number `stream`, from the row's byte `begin` on.

        The bytes are neither checked nor summed.
        """
        [run] = reservation.runs
        offset_bytes = run.segment.layout.offsets[stream] + begin
        target = self._io.view(run.segment)[offset_bytes : offset_bytes + len(data)]
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))

    @contextmanager
    def lend(self, reservation: Reservation) -> Iterator[Room]:
        """Hold a reservation's slots for another thread, even past the reservation's end."""
        runs = tuple(reservation.runs)
        # Each run's segment is held once more: the reservation may be released, or expire, while the thread
        # copies.
        for run in runs:
            self._ledger.held(run.segment)
        try:
            views = tuple((run, self._io.view(run.segment)) for run in runs)
            yield Room(views, reservation.tallied())
        finally:
            for run in runs:
                self._ledger.released(run.segment)

    # -- parts -----------------------------------------------------------------------------------------

    async def _give_up_withheld(self, session: Session) -> None:
        """Drop the tokens that a session withholds: they must not come back behind the new rows."""
        if session.withheld:
            dead = self._ledger.truncated(session, session.live)
            # The drop is durable before any new row: a crash between would show withheld rows behind new
            # ones.
            await self._departures.write_down([session], dead=dead)

    def _said(
        self,
        reservation: Reservation,
        cuts: Sequence[Cut],
        checksums: Sequence[int] | None,
        *,
        is_joint: bool,
    ) -> list[tuple[Segment, Sums]]:
        """The tokens' checksums: the writer's, or those that `place` added up.

        Raises InvalidArgument, ChecksumMismatch.
        """
        # Three sources of sums: one per token from a decode batch, one per run and stream from a writer in
        # the arena, and those that were added up while the server copied rows in.
        if is_joint:
            return reservation.joint_sums(cuts, checksums or ())
        if checksums is not None:
            return reservation.sums(cuts, checksums)
        tally, ranges = reservation.tallied(), [(begin, end) for _, begin, end in cuts]
        # Rows came run by run, so that each stream is one comparison.
        columns = [
            tally.values(spec.stream, ranges, partial(self._rows_in, cuts, spec.stream))
            for spec in reservation.session.layout.specs
        ]
        return [
            (run.segment, Sums(run.row_of(begin), run.row_of(end), values))
            for (run, begin, end), values in zip(cuts, zip(*columns, strict=True), strict=True)
        ]

    def _rows_in(self, cuts: Sequence[Cut], stream: Stream, begin: int, end: int) -> memoryview:
        run, _, _ = cuts[bisect_right(cuts, begin, key=_CUT_BEGIN) - 1]
        return self._rows(run, stream, begin, end)

    def _rows(self, run: Run, stream: Stream, begin: int, end: int) -> memoryview:
        rows = run.segment.layout.rows(stream, run.row_of(begin), run.row_of(end))
        return self._io.view(run.segment)[rows]

    def _begin(self, reservation: Reservation, now_ns: int) -> None:
        """Open a reservation without room, at `now_ns` of the store's time."""
        session, monotonic_ns = reservation.session, self._state.clock.monotonic_ns()
        self._ledger.touched(session, now_ns)
        # A number never used before in this run: an old answer of a client cannot meet a new reservation.
        self._ledger.write_began(session, monotonic_ns / SECOND_NS)
        self._last_id += 1
        reservation.reservation_id = self._last_id
        reservation.deadline_ns = monotonic_ns + RESERVATION_LIFETIME_NS
        self._open[self._last_id] = reservation

    def _new_bytes(self, reservation: Reservation, token_count: int) -> int:
        """The bytes that room for this many more tokens adds to the dirty bound.

        Raises ReservationNotFound.
        """
        self._check_open(reservation)
        last, _ = reservation.last()
        tail_bytes = self._ledger.unwritten.new_bytes(last) if last and token_count else 0
        return tail_bytes + reservation.new_segment_bytes(token_count)

    async def _admit(self, reservation: Reservation, token_count: int) -> None:
        """Wait until the budgets have room for so many more tokens, and promise them the dirty bytes.

        No await follows the last look at the budgets.
        """

        def missing_bytes() -> int:
            return self._new_bytes(reservation, token_count) - reservation.promised_bytes

        def own_bytes() -> int:
            return reservation.size_bytes + reservation.promised_bytes

        # The quota comes first: tokens that can never fit must make nothing leave.
        if self._ledger.quotas.is_limited(reservation.session.tenant):
            # New segments take their size times the copies. A session that is over its limit for ever must
            # not evict others.
            session = reservation.session
            size_bytes = session.size_bytes + reservation.new_segment_bytes(token_count)
            self._ledger.quotas.check(session.tenant, session.copies * size_bytes)
        # Two budgets, taken in one order by all: bytes that may be pinned, then bytes that may be dirty.
        # After each wait the first is looked at again, so that both hold at the same moment.
        await self._wait_for_room(reservation, token_count)
        # The promise may be too small by now, for instance if the tail that was to grow has left memory.
        while missing_bytes() > 0:
            reservation.promised_bytes += await self._dirty_bound.admit(
                reservation.session.tenant, missing_bytes, own_bytes
            )
            # Other writers may have come during the wait, or the tail that was to grow has left memory.
            await self._wait_for_room(reservation, token_count)

    async def _wait_for_room(self, reservation: Reservation, token_count: int) -> None:
        await self.pins.wait_for_room(reservation.client, lambda: reservation.needed(token_count))
        self._check_open(reservation)

    async def _extend(self, reservation: Reservation, token_count: int) -> None:
        end = reservation.end + token_count
        while reservation.end < end:
            segment, row = reservation.last()
            if segment is not None:
                self._add_run(reservation, segment, row, end)
            else:
                await self._add_segments(reservation, end)

    async def _add_segments(self, reservation: Reservation, end: int) -> None:
        """Make segments up to token `end`, or up to a long one for which there is no room in one piece."""
        layouts = reservation.new_layouts(end - reservation.end, None, 0)
        # Numbers come before slots: the pins are counted by number while others make room.
        new = {self._ledger.new_segment_id(): layout for layout in layouts}
        sizes_bytes = {segment_id: layout.size_bytes for segment_id, layout in new.items()}
        # All segments are pinned at once. Pinned one by one, two writers could stop half way and wait for
        # each other.
        self.pins.pin(reservation.client, sizes_bytes)
        try:
            for segment_id, layout in new.items():
                segment = await self._new_segment(reservation, segment_id, layout)
                if segment is None:
                    # No piece of memory is long enough. `_extend` asks for plain segments next.
                    reservation.longest_bytes = 0
                    return
                self._add_run(reservation, segment, 0, end)
        finally:
            # `_add_run` has pinned what was made; this takes back the pin of the whole plan.
            self.pins.unpin(reservation.client, sizes_bytes)

    # A segment's hold stands in three books: the claimed bytes, the ledger's hold, the client's pin.
    def _release(self, segment: Segment, client: Pinner) -> None:
        self._ledger.unwritten.release(segment)
        self._ledger.released(segment)
        self.pins.unpin(client, {segment.segment_id: segment.layout.size_bytes})

    async def _new_segment(
        self, reservation: Reservation, segment_id: int, layout: SegmentLayout
    ) -> Segment | None:
        """A new segment with a slot; None where no piece of memory is large enough for a long one."""
        session, size_bytes = reservation.session, layout.size_bytes
        if layout is session.layout:
            slot = await self._memory_room.place(size_bytes, session.tenant)
        elif (long_slot := self._memory_room.take_long(size_bytes, session.tenant)) is None:
            return None
        else:
            slot = long_slot
        try:
            await self._ssd_room.keep_within_limit(session, session.copies * size_bytes)
            # The reservation may have expired while room was made.
            self._check_open(reservation)
        except BaseException:
            # The slot was taken and not reserved: nobody else gives it back.
            self._ledger.memory.give(slot)
            raise
        return self._ledger.reserved(session, segment_id, reservation.next_position, layout, slot)

    def _check_open(self, reservation: Reservation) -> None:
        if reservation.reservation_id not in self._open:
            raise ReservationNotFound(reservation_id=reservation.reservation_id)

    def _add_run(self, reservation: Reservation, segment: Segment, row: int, end: int) -> None:
        if not reservation.grow(segment, row, end):
            # The tail was extended before in this reservation: its hold and pin are counted already.
            return
        self._ledger.held(segment)
        taken_bytes = self._ledger.unwritten.reserve(segment)
        self.pins.pin(reservation.client, {segment.segment_id: segment.layout.size_bytes})
        # Promised bytes become claimed bytes: counted twice, the bound would be reached at half of its value.
        if reservation.promised_bytes:
            self._ledger.unwritten.promise(reservation.session.tenant, -taken_bytes)
            reservation.promised_bytes -= taken_bytes

    def _attach(
        self,
        reservation: Reservation,
        cuts: Sequence[Cut],
        token_count: int,
        now_ns: int,
        *,
        keep_open: bool,
    ) -> None:
        session = reservation.session
        added = token_count - reservation.committed
        monotonic_ns = self._state.clock.monotonic_ns()
        # The ledger hears of each segment first, then the log's end moves over all of them at once.
        is_news = False
        for run, _, end in cuts:
            row_count = run.row_begin + end - run.token_begin
            is_news |= self._ledger.committed(session, run.segment, row_count, monotonic_ns)
        # When the writer does not stay, its end is news as well, and follows.
        self._ledger.appended(session, added, now_ns, is_news=is_news and keep_open)
        if reservation.contents:
            session.describe(reservation.contents, reservation.committed)
        # Only a commit that passes a multiple of 64 makes a key.
        if reservation.committed // BLOCK_TOKENS < token_count // BLOCK_TOKENS:
            self._ledger.keyed.appended(session, reservation.committed, self._token_ids)
        for run in reservation.advance(token_count):
            self._release(run.segment, reservation.client)
        self._state.counters.appended_token_count += added
        self._state.appended_tokens[session.tenant] += added
        if self._state.journal.listening is not None:
            self._state.journal.did(Call.APPEND, session, tokens=added)

    def _token_ids(self, piece: Piece) -> memoryview | None:
        # Without the token ids in memory no key can be made, and reading them back is not worth it.
        segment = piece.segment
        if segment.memory is None:
            return None
        return self._io.view(segment)[segment.layout.rows(TOKENS, piece.row_begin, piece.row_end)]
