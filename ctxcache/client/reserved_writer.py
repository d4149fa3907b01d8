"""Writing in place: a reservation in the arena, filled where its bytes will stay.

Copies each row once. Worst case: the reservation ends while rows are copied; the commit then finds
no reservation, and nothing of them becomes visible.
"""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.attach import Attachment
from ctxcache.client.hold import Hold, acquire
from ctxcache.client.slots import Run, Slots, runs_of
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, CorruptSegment, ReservationNotFound
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import CommitReservation, Operation, ReleaseReservation, Reservation, Reserve
from ctxcache.v1.session_pb2 import Durability, Session


class ReservedWriter(SessionWriter):
    """Writes into a reservation."""

    is_local = True

    def __init__(
        self,
        session: Session,
        slots: Slots,
        hold: Hold,
        reservation: Reservation,
        *,
        token_count: int,
        row_sizes: Mapping[Stream, int],
    ) -> None:
        super().__init__(session, token_count, row_sizes)
        self._slots, self._hold = slots, hold
        self._reservation_id = reservation.reservation_id
        end = self.write_offset + token_count
        self._runs = runs_of(reservation.segments, self.write_offset, end)
        if {stream: slots.row_bytes(stream) for stream in slots.streams} != row_sizes:
            raise CorruptSegment(segment_id="?", problem="its layout is not the session's")

    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        begin = self.write_offset + row_begin
        # Before the copy: after its end the room may be another session's.
        self._hold.check()
        for run in self._runs:
            first, last = max(begin, run.token_begin), min(begin + len(rows), run.token_end)
            if first < last:
                np.copyto(self._room(run, stream, first, last), rows[first - begin : last - begin])
        self._hold.check()

    def _room(self, run: Run, stream: Stream, begin: int, end: int) -> Bytes:
        shift = run.row_begin - run.token_begin
        return self._slots.rows(run.segment, stream, begin + shift, end + shift)

    def _commit(self, row_count: int, durability: Durability.ValueType, *, keep_open: bool) -> Session:
        commit = CommitReservation(
            reservation_id=self._reservation_id,
            token_count=self.write_offset + row_count,
            durability=durability,
            keep_open=keep_open,
        )
        return self._hold.stream.carry_out(Operation(commit=commit)).committed

    def _release(self) -> None:
        # Gone already, or with its stream: either way nobody holds it any more.
        with suppress(CacheError):
            self._hold.release()


def reserve(
    attachment: Attachment,
    arena: Bytes,
    session: Session,
    request: Reserve,
    row_sizes: Mapping[Stream, int],
) -> ReservedWriter:
    """Reserve room and return its writer. Raises what an append raises before its first row."""
    sent, result = acquire(attachment.stream, Operation(reserve=request))
    reservation = result.reservation
    release = ReleaseReservation(reservation_id=reservation.reservation_id)
    hold = Hold(
        stream=attachment.stream,
        deadline_ns=sent.deadline_ns(reservation.expire_time),
        release_operation=Operation(release_reservation=release),
        ended=ReservationNotFound(reservation_id=reservation.reservation_id),
    )
    try:
        slots = Slots(arena, reservation.layout)
        return ReservedWriter(
            session, slots, hold, reservation, token_count=request.token_count, row_sizes=row_sizes
        )
    except BaseException:
        hold.release_soon()
        raise
