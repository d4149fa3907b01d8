"""Writing in place: a reservation in the arena, filled where its bytes will stay.

Copies each row once. Worst case: the reservation ends while rows are copied; the commit then finds
no reservation, and nothing of them becomes visible.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.attach import Attachment
from ctxcache.client.hold import Hold, acquire
from ctxcache.client.slots import SlotLayout, SlotRows, spans_of_runs
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, ReservationNotFound
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.v1.arena_pb2 import CommitReservation, MarkWritten, Operation, ReleaseReservation, Reserve
from ctxcache.v1.session_pb2 import Durability, Session

FIRST_BATCH_TOKENS = 64
"""Rows written before the server is told of them for the first time: a segment, so that the disk begins early."""
BATCH_BYTES = 8 << 20
"""Rows written between one such message and the next, later on."""


class ReservedWriter(SessionWriter):
    """Writes into a reservation."""

    is_local = True

    def __init__(
        self,
        session: Session,
        slots: SlotRows,
        hold: Hold,
        reservation_id: int,
        *,
        token_count: int,
        specs: Mapping[Stream, StreamSpec],
    ) -> None:
        super().__init__(session, token_count, specs)
        self._slots, self._hold = slots, hold
        self._reservation_id = reservation_id
        slots.layout.check(session.name, specs)

    def write_all(self, rows: Mapping[Stream, Bytes], *, is_marked: bool) -> None:
        """Write all rows of every stream, [T, row_bytes] each.

        `is_marked`: some tokens at a time, and the server may take them to disk while the next ones are copied.
        """
        for begin, end in self._batches() if is_marked else [(0, self.token_count)]:
            for stream, view in rows.items():
                self._write(stream, begin, view[begin:end])
                self._written[stream] = end
            if is_marked and end < self.token_count:
                # Not waited for: what is wrong with the reservation, the commit will say.
                self._hold.stream.send([self._mark(end)])

    def _batches(self) -> Iterator[tuple[int, int]]:
        limit = max(BATCH_BYTES // sum(spec.row_bytes for spec in self._specs.values()), FIRST_BATCH_TOKENS)
        begin, row_count = 0, FIRST_BATCH_TOKENS
        while begin < self.token_count:
            end = min(begin + row_count, self.token_count)
            yield begin, end
            begin, row_count = end, min(2 * row_count, limit)

    def _mark(self, row_count: int) -> Operation:
        token_count = self.write_offset + row_count
        mark = MarkWritten(reservation_id=self._reservation_id, token_count=token_count)
        return Operation(mark_written=mark)

    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        begin = self.write_offset + row_begin
        # After its end the room may be another session's. What ends during the copy, the commit will say.
        self._hold.check()
        for token_begin, room in self._slots.blocks(stream, begin, begin + len(rows)):
            first = token_begin - begin
            last = first + room.shape[0] * room.shape[1]
            np.copyto(room, rows[first:last].reshape(room.shape))

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
    specs: Mapping[Stream, StreamSpec],
) -> ReservedWriter:
    """Reserve room (the request is made a brief one) and return its writer. Raises what an append raises before its first row."""
    request.is_brief = True
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
        layout = attachment.layouts.get_or_make(
            reservation.session_uid, lambda: SlotLayout(reservation.layout)
        )
        end = request.write_offset + request.token_count
        slots = SlotRows(arena, layout, spans_of_runs(reservation.runs, request.write_offset, end))
        return ReservedWriter(
            session,
            slots,
            hold,
            reservation.reservation_id,
            token_count=request.token_count,
            specs=specs,
        )
    except BaseException:
        hold.release_soon()
        raise
