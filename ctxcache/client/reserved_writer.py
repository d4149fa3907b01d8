"""Writing in place: a reservation in the arena, filled where its bytes will stay.

Copies each row once, and adds it up in the same pass: the checksums go with the commit, and stay with the
rows. Worst
case: the reservation ends while rows are copied; the commit then finds no reservation, and nothing of them
becomes
visible.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.attach import ArenaAttachment
from ctxcache.client.convert import durability_to_wire, session_from_wire
from ctxcache.client.hold import Hold, acquire
from ctxcache.client.slots import SlotLayout, SlotRows, spans_of_runs
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, ReservationNotFound
from ctxcache.format.identity import rows_checksum
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.format.sums import Tally
from ctxcache.v1.arena_pb2 import CommitReservation, MarkWritten, Operation, ReleaseReservation, Reserve

FIRST_BATCH_TOKENS = 64
"""Rows written before the server is told of them for the first time: a segment, so that the disk begins early."""
BATCH_BYTES = 8 << 20
"""Rows written between one such message and the next, later on."""


class ReservedWriter(SessionWriter):
    """Writes into a reservation."""

    is_local = True

    def __init__(
        self,
        session: SessionInfo,
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
        self._tally = Tally()
        self._runs = list(slots.runs())
        self._marked = self.write_offset

    def write_all(self, rows: Mapping[Stream, Bytes], *, is_marked: bool) -> None:
        """Write all rows of every stream, [T, row_bytes] each.

        `is_marked`: some tokens at a time, and the server may take them to disk while the next ones are
        copied.
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
        # Whole runs: what is marked in parts has to be added up again.
        ends = [end - self.write_offset for _, end in self._runs]
        begin, row_count = 0, FIRST_BATCH_TOKENS
        while begin < self.token_count:
            end = ends[min(bisect_left(ends, begin + row_count), len(ends) - 1)]
            yield begin, end
            begin, row_count = end, min(2 * row_count, limit)

    def _mark(self, row_count: int) -> Operation:
        token_count = self.write_offset + row_count
        mark = MarkWritten(
            reservation_id=self._reservation_id,
            token_count=token_count,
            checksums=self._checksums(self._marked, token_count),
        )
        self._marked = token_count
        return Operation(mark_written=mark)

    def _checksums(self, token_begin: int, token_end: int) -> list[int]:
        """What is said of tokens: run by run, one checksum per stream. Raises ChecksumMismatch."""
        first = bisect_right(self._runs, token_begin, key=lambda run: run[1])
        return [
            self._tally.value(
                stream, max(begin, token_begin), min(end, token_end), partial(self._slots.rows, stream)
            )
            for begin, end in self._runs[first:]
            if begin < token_end
            for stream in self._slots.layout.streams
        ]

    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        begin = self.write_offset + row_begin
        # After its end the room may be another session's. What ends during the copy, the commit will say.
        self._hold.check()
        if row_begin < self._written[stream]:
            self._tally.drop(stream, begin, begin + len(rows), partial(self._slots.rows, stream))
        for block_begin, room in self._slots.blocks(stream, begin, begin + len(rows)):
            run_tokens = room.shape[1]
            for i, place in enumerate(room):
                token = block_begin + i * run_tokens
                part = rows[token - begin : token - begin + run_tokens]
                # Of what the caller has, before it is copied: the copy then finds it at hand.
                self._tally.note(stream, token, token + run_tokens, rows_checksum(part.data))
                np.copyto(place, part)

    def _commit(self, row_count: int, durability: Durability, *, keep_open: bool) -> SessionInfo:
        begin, end = self.write_offset + self._committed_count, self.write_offset + row_count
        commit = CommitReservation(
            reservation_id=self._reservation_id,
            token_count=end,
            durability=durability_to_wire(durability),
            keep_open=keep_open,
            checksums=self._checksums(begin, end),
        )
        session = session_from_wire(self._hold.stream.carry_out(Operation(commit=commit)).committed)
        self._tally.forget(end)
        return session

    def _release(self) -> None:
        # Gone already, or with its stream: either way nobody holds it any more.
        with suppress(CacheError):
            self._hold.release()


def reserve(
    attachment: ArenaAttachment,
    arena: Bytes,
    session: SessionInfo,
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
