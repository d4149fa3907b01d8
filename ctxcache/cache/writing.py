"""Writing: reservations. Room first, then rows in place, then a commit that makes them visible.

A session has one reservation at a time. Rows beyond what was committed are never read, whatever
lies there. When a writer disappears, its slots are kept for a while before others get them: it
may still be writing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ctxcache.cache.residency import Residency
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session, SessionView
from ctxcache.errors import (
    CapacityExceeded,
    InvalidArgument,
    ReservationNotFound,
    WriteInProgress,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import Stream

RESERVATION_LIFETIME_NS = 300 * 10**9
GRACE_NS = 60 * 10**9
"""How long slots of a writer that disappeared are kept from others."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row_begin, row_end)` of a segment to be written; the first one's token has index `token_begin`."""

    segment: Segment
    row_begin: int
    row_end: int
    token_begin: int

    @property
    def token_end(self) -> int:
        """One past the index of the last row's token."""
        return self.token_begin + self.row_end - self.row_begin


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the tokens `[write_offset, end)`; those below `committed` are visible. Owned by the event loop.

    `runs` in token order, one per segment, each segment held once; those committed in full are let go.
    """

    reservation_id: int
    session: Session
    committed: int
    end: int
    deadline_ns: int
    runs: list[Run] = field(default_factory=list)

    def runs_of(self, token_begin: int, token_end: int) -> list[Run]:
        """The runs that hold tokens of `[token_begin, token_end)`."""
        first = bisect_right(self.runs, token_begin, key=lambda run: run.token_begin) - 1
        last = bisect_left(self.runs, token_end, key=lambda run: run.token_begin)
        return self.runs[max(first, 0) : last]


class Writing:
    """The use cases of a writer."""

    def __init__(self, state: State, residency: Residency, io: SegmentIO) -> None:
        self._state = state
        self._residency = residency
        self._io = io
        self._open: dict[int, Reservation] = {}
        self._last_id = 0
        self._quarantine: list[tuple[int, Segment]] = []

    @property
    def reservation_count(self) -> int:
        """Reservations open now."""
        return len(self._open)

    @property
    def held_count(self) -> int:
        """Segments kept from others for writers, present and disappeared."""
        return sum(1 for _ in self.held())

    def held(self) -> Iterator[Segment]:
        """Segments held by reservations, and by writers that disappeared, once per hold."""
        for reservation in self._open.values():
            yield from (run.segment for run in reservation.runs)
        for _, segment in self._quarantine:
            yield segment

    async def reserve(
        self, tenant: str, session_id: str, *, fingerprint: bytes, write_offset: int,
        generation: int | None, token_count: int,
    ) -> Reservation:  # fmt: skip
        """Open the session's reservation with room for `token_count` tokens; 0 is allowed, see `extend`.

        Raises SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, WriteInProgress,
        WriteOffsetMismatch, CapacityExceeded, TierFailure.
        """
        session = self._state.session(tenant, session_id)
        session.check_fingerprint(fingerprint)
        session.check_generation(generation)
        if session.is_writing:
            raise WriteInProgress(session=session.name)
        if write_offset != session.token_count:
            raise WriteOffsetMismatch(
                session=session.name, token_count=session.token_count, write_offset=write_offset
            )
        self._state.touch(session)
        reservation = self._begin(session, write_offset)
        try:
            await self.extend(reservation, token_count)
        except BaseException:
            self.release(reservation)
            raise
        return reservation

    async def extend(self, reservation: Reservation, token_count: int) -> None:
        """Make room for `token_count` more tokens.

        Raises ReservationNotFound, CapacityExceeded, TierFailure; what came before that is kept.
        """
        self._check_room(reservation, token_count)
        end = reservation.end + token_count
        while reservation.end < end:
            last = reservation.runs[-1] if reservation.runs else None
            segment, row = (last.segment, last.row_end) if last else self._tail(reservation.session)
            if segment is None or row == segment.layout.segment_tokens:
                segment, row = await self._new_segment(reservation), 0
            self._add_run(reservation, segment, row, end)

    def renew(self, reservation: Reservation) -> None:
        """Let a reservation live on: its writer is there. Raises ReservationNotFound."""
        self._check_open(reservation)
        reservation.deadline_ns = self._state.clock.monotonic_ns() + RESERVATION_LIFETIME_NS

    async def commit(
        self, reservation: Reservation, token_count: int, *, is_durable: bool, keep_open: bool
    ) -> SessionView:
        """Make tokens visible up to the session's `token_count` afterwards.

        Raises ReservationNotFound, InvalidArgument, and with `is_durable` CapacityExceeded and
        TierFailure: the tokens are then committed in memory all the same.
        """
        session = reservation.session
        self._check_open(reservation)
        if session.is_gone or session.token_count != reservation.committed:
            # A segment before it was found bad, or all of it has expired: there is nothing to follow.
            self.release(reservation, is_abandoned=True)
            raise ReservationNotFound(reservation_id=reservation.reservation_id)
        if not reservation.committed <= token_count <= reservation.end:
            problem = f"{token_count} is not within [{reservation.committed}, {reservation.end}]"
            raise InvalidArgument(field="token_count", problem=problem)
        self._attach(reservation, token_count)
        if not keep_open:
            self.release(reservation)
        if is_durable:
            await self._residency.flush(session)
        return session.view()

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
        """Give back what was not committed. `is_abandoned`: nobody can say that the writer has stopped."""
        if self._open.pop(reservation.reservation_id, None) is None:
            return
        reservation.session.is_writing = False
        for segment in (run.segment for run in reservation.runs):
            # No row of it was ever committed, so no record was ever made of it.
            if not segment.row_count:
                segment.is_discarded = True
            if is_abandoned:
                segment.is_open = False
                self._quarantine.append((self._state.clock.monotonic_ns() + GRACE_NS, segment))
            else:
                self._residency.release(segment)

    def expire_due(self) -> None:
        """End reservations past their deadline, and give back slots whose grace has passed."""
        now_ns = self._state.clock.monotonic_ns()
        for reservation in [r for r in self._open.values() if r.deadline_ns <= now_ns]:
            self.release(reservation, is_abandoned=True)
        ready = [segment for deadline_ns, segment in self._quarantine if deadline_ns <= now_ns]
        self._quarantine = [item for item in self._quarantine if item[0] > now_ns]
        for segment in ready:
            self._residency.release(segment)

    def place(self, reservation: Reservation, stream: Stream, token_begin: int, data: memoryview) -> None:
        """Put rows of one stream where they belong: all of them lie within the reservation."""
        row_bytes = reservation.session.layout.row_bytes(stream)
        token_end = token_begin + len(data) // row_bytes
        for run in reservation.runs_of(token_begin, token_end):
            first = max(token_begin, run.token_begin)
            last = min(token_end, run.token_end)
            row = run.row_begin + first - run.token_begin
            target = self._io.view(run.segment)[run.segment.layout.rows(stream, row, row + last - first)]
            source = data[(first - token_begin) * row_bytes : (last - token_begin) * row_bytes]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    # -- parts -----------------------------------------------------------------------------------------

    def _begin(self, session: Session, write_offset: int) -> Reservation:
        session.is_writing = True
        self._last_id += 1
        deadline_ns = self._state.clock.monotonic_ns() + RESERVATION_LIFETIME_NS
        reservation = Reservation(self._last_id, session, write_offset, write_offset, deadline_ns)
        self._open[self._last_id] = reservation
        return reservation

    def _tail(self, session: Session) -> tuple[Segment | None, int]:
        tail = session.segments[-1] if session.segments else None
        # Dropped newest tokens leave the log's end behind the tail's: rows are never used twice.
        if tail is None or not tail.is_open or not tail.dram or tail.end != session.log_end:
            return None, 0
        return tail, tail.row_count

    async def _new_segment(self, reservation: Reservation) -> Segment:
        session = reservation.session
        offset = reservation.end - reservation.committed
        segment = Segment(
            segment_id=self._state.new_segment_id(), tenant=session.tenant, writer_uid=session.uid,
            generation=session.generation, begin=session.log_end + offset,
            model_fingerprint=session.model_fingerprint, layout=session.layout,
        )  # fmt: skip
        segment.dram = await self._residency.place(session.layout.size_bytes)
        if reservation.reservation_id not in self._open:
            # Its time came while room was made.
            self._residency.free(segment)
            raise ReservationNotFound(reservation_id=reservation.reservation_id)
        return segment

    def _check_open(self, reservation: Reservation) -> None:
        if reservation.reservation_id not in self._open:
            raise ReservationNotFound(reservation_id=reservation.reservation_id)

    def _check_room(self, reservation: Reservation, token_count: int) -> None:
        """Raise before anything makes way for what can never fit."""
        self._check_open(reservation)
        layout, dram = reservation.session.layout, self._residency.dram
        needed_bytes = token_count // layout.segment_tokens * layout.size_bytes
        if needed_bytes > dram.capacity_bytes:
            raise CapacityExceeded(
                tier="DRAM", needed_bytes=needed_bytes, free_bytes=dram.free_bytes,
                limit_bytes=dram.capacity_bytes,
            )  # fmt: skip

    def _add_run(self, reservation: Reservation, segment: Segment, row: int, end: int) -> None:
        row_end = min(row + end - reservation.end, segment.layout.segment_tokens)
        last = reservation.runs[-1] if reservation.runs else None
        if last and last.segment is segment:
            reservation.runs[-1] = replace(last, row_end=row_end)
        else:
            self._residency.hold(segment)
            reservation.runs.append(Run(segment, row, row_end, reservation.end))
        reservation.end += row_end - row

    def _attach(self, reservation: Reservation, token_count: int) -> None:
        session = reservation.session
        added = token_count - reservation.committed
        for run in reservation.runs_of(reservation.committed, token_count):
            if not run.segment.reference_count:
                self._state.attach(session, run.segment)
            run.segment.row_count = min(run.row_end, run.row_begin + token_count - run.token_begin)
        if added:
            session.append_rows(session.log_end + added)
        reservation.committed = token_count
        self._let_go(reservation)
        self._state.counters.appended_token_count += added
        self._state.touch(session)

    def _let_go(self, reservation: Reservation) -> None:
        """End the holds on segments that are written in full; the last one may be continued."""
        done = bisect_right(reservation.runs[:-1], reservation.committed, key=lambda run: run.token_end)
        for run in reservation.runs[:done]:
            self._residency.release(run.segment)
        del reservation.runs[:done]
