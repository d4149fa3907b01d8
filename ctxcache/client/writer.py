"""Writing rows: their shapes are checked, rows are counted, and a writer in the arena fills reserved slots.

A commit never makes a row visible that nobody wrote. Not thread-safe. Worst case: a writer that ends without
a commit leaves the session as it was; rows of a wrong shape raise InvalidArgument before anything is copied.
"""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt

from ctxcache.client.access import AccessStream, ArenaAttachment, ClockPair, Hold, acquire
from ctxcache.client.arena import Bytes, SlotRows, copied, slot_layout, spans_of_runs
from ctxcache.client.convert import durability_to_wire
from ctxcache.client.messages import read_session_info
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing
from ctxcache.errors import CacheError, IncompleteAppend, InvalidArgument, ReservationNotFound
from ctxcache.format.checksums import Tally
from ctxcache.format.streams import DType, Stream, StreamSpec
from ctxcache.v1.arena_pb2 import (
    CommitReservation,
    MarkWritten,
    Operation,
    OperationResult,
    ReleaseReservation,
    Reserve,
)

_ELEMENTS = {
    DType.INT32: "int32",
    DType.FLOAT32: "float32",
    DType.FLOAT16: "float16",
    DType.BFLOAT16: "bfloat16",
    DType.INT8: "int8",
    DType.FLOAT8_E4M3: "float8_e4m3fn",
    DType.PACKED: "uint8",
}
"""Names of the arrays' types, numpy's own and those that ml_dtypes adds."""


def view_rows(stream: Stream, array: npt.NDArray[np.generic], specs: Mapping[Stream, StreamSpec]) -> Bytes:
    """View a C-contiguous array of T rows as uint8 [T, row_bytes]. Raises InvalidArgument.

    Its elements are the stream's, or unsigned integers, which are raw bytes.
    """
    spec = specs.get(stream)
    if spec is None:
        raise InvalidArgument(field="rows", problem=f"{stream} is not part of the session's layout")
    if array.ndim == 0 or not array.flags.c_contiguous or array.dtype.hasobject:
        raise InvalidArgument(field="rows", problem=f"{stream} is not a C-contiguous array of numbers")
    if array.dtype.kind != "u" and array.dtype.name != _ELEMENTS[spec.dtype]:
        problem = f"{stream} is of {array.dtype.name}; the model has {_ELEMENTS[spec.dtype]} there"
        raise InvalidArgument(field="rows", problem=problem)
    shape = (array.shape[0], spec.row_bytes)
    if array.nbytes != shape[0] * shape[1]:
        problem = f"{stream}: {array.nbytes} B are not {shape[0]} rows of {shape[1]} B"
        raise InvalidArgument(field="rows", problem=problem)
    return array.reshape(-1).view(np.uint8).reshape(shape)


def check_append(
    rows: Mapping[Stream, npt.NDArray[np.generic]], specs: Mapping[Stream, StreamSpec]
) -> dict[Stream, Bytes]:
    """View the rows of an append, in storage order: every stream of the layout, equally many rows.

    Raises InvalidArgument, and IncompleteAppend for a stream that is missing or short.
    """
    views = {stream: view_rows(stream, array, specs) for stream, array in rows.items()}
    row_counts = {stream: len(view) for stream, view in views.items()}
    token_count = max(row_counts.values(), default=0)
    if token_count == 0:
        raise InvalidArgument(field="rows", problem="there are none")
    check_complete(row_counts, specs, token_count)
    return {stream: views[stream] for stream in specs}


def check_complete(
    row_counts: Mapping[Stream, int], specs: Mapping[Stream, StreamSpec], token_count: int
) -> None:
    """Raise IncompleteAppend unless every stream of the layout has `token_count` rows."""
    for stream in specs:
        row_count = row_counts.get(stream, 0)
        if row_count < token_count:
            raise IncompleteAppend(stream=str(stream), row_count=row_count, token_count=token_count)


class SessionWriter(Closing):
    """Room for `token_count` tokens after the session's end. Rows are numbered from 0 at `write_offset`."""

    is_local: bool
    """Whether rows are written in place in the arena."""

    def __init__(self, session: SessionInfo, token_count: int, specs: Mapping[Stream, StreamSpec]) -> None:
        self.session = session
        self.write_offset = session.token_count
        self.token_count = token_count
        self._specs = specs
        self._written = dict.fromkeys(specs, 0)
        self._committed_count = 0
        self._is_open = True

    def write(self, stream: Stream, row_begin: int, rows: npt.NDArray[np.generic]) -> None:
        """Write rows of one stream, [n, row_bytes] or any C-contiguous array of n rows.

        Rows of a stream follow one another; those not yet committed may be written again.
        Raises InvalidArgument, and ReservationNotFound when the room was taken back.
        """
        view = view_rows(stream, rows, self._specs)
        row_end = row_begin + len(view)
        self._check_open()
        if not self._committed_count <= row_begin <= self._written[stream] or row_end > self.token_count:
            problem = f"rows [{row_begin}, {row_end}) of {stream} do not follow row {self._written[stream]}"
            raise InvalidArgument(field="row_begin", problem=problem)
        self._write(stream, row_begin, view)
        self._written[stream] = max(self._written[stream], row_end)

    def commit(
        self,
        token_count: int | None = None,
        durability: Durability = Durability.MEMORY,
        *,
        keep_open: bool = False,
    ) -> SessionInfo:
        """Make rows visible: `token_count` is the session's afterwards, by default all there is room for.

        Returns the session. `keep_open` keeps the rest of the room. Raises IncompleteAppend,
        CapacityExceeded, TierFailure, ReservationNotFound.
        """
        self._check_open()
        row_count = self.token_count if token_count is None else token_count - self.write_offset
        if not self._committed_count < row_count <= self.token_count:
            raise InvalidArgument(field="token_count", problem=f"{token_count} is not within the room")
        check_complete(self._written, self._specs, row_count)
        # Room that is full is nobody's to keep: the session could not be written again.
        keep_open = keep_open and row_count < self.token_count
        self.session = self._commit(row_count, durability, keep_open=keep_open)
        self._committed_count = row_count
        self._is_open = keep_open
        return self.session

    def close(self) -> None:
        """Give back the room that was not committed."""
        if self._is_open:
            self._is_open = False
            self._release()

    @abstractmethod
    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        """Take rows that fit, uint8 [n, row_bytes]."""

    @abstractmethod
    def _commit(self, row_count: int, durability: Durability, *, keep_open: bool) -> SessionInfo:
        """Make the first `row_count` rows visible; all of them are written."""

    @abstractmethod
    def _release(self) -> None:
        """Give the room back; whatever is wrong with it, it is gone afterwards."""

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidArgument(field="writer", problem="is closed")


# Calls under way while a large append is copied into its room (is_marked):
#
#     this thread    copy 64 ──► copy 128 ──► copy 256 ──► … ──► commit(all)
#                           └ mark(64)  └ mark(192) └ …           │
#     server's SSD          write ───── write ───── write ─────── │ ► the rest, and the record
#
# Rows that are marked are not visible: a writer that ends here leaves the session as it was.
FIRST_BATCH_TOKENS = 64
"""Rows written before the server first hears of them: one segment, so that the disk begins early."""
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
        # Batch by batch through all streams: only a segment whose streams are all there can go to disk.
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
        """The checksums of tokens: run by run, one checksum per stream. Raises ChecksumMismatch."""
        first = bisect_right(self._runs, token_begin, key=lambda run: run[1])
        last = bisect_left(self._runs, token_end, key=_begin_of)
        ranges = [(max(begin, token_begin), min(end, token_end)) for begin, end in self._runs[first:last]]
        columns = [
            self._tally.values(stream, ranges, partial(self._slots.rows, stream))
            for stream in self._slots.layout.streams
        ]
        # In the order of the reservation's runs: the server joins them to its segments by position alone.
        return [value for run in zip(*columns, strict=True) for value in run]

    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        begin = self.write_offset + row_begin
        # After its end the room may be another session's. If the reservation ends during the copy, the commit
        # says so.
        self._hold.check()
        # Rows written a second time: sums of what they cover are dropped, what is left of a run is added up
        # anew.
        if row_begin < self._written[stream]:
            self._tally.drop(stream, begin, begin + len(rows), partial(self._slots.rows, stream))
        flat, at = rows.reshape(-1), 0
        for token, room in self._slots.blocks(stream, begin, begin + len(rows)):
            run_tokens, run_bytes = room.shape[1], room.shape[1] * room.shape[2]
            # Of the caller's rows, and not of what was put in place: a copy that went wrong is found.
            values = [
                copied(place, flat[run_begin : run_begin + run_bytes])
                for place, run_begin in zip(room.reshape(-1, run_bytes), count(at, run_bytes), strict=False)
            ]
            self._tally.note(stream, token, run_tokens, values)
            at += len(values) * run_bytes

    def _commit(self, row_count: int, durability: Durability, *, keep_open: bool) -> SessionInfo:
        begin, end = self.write_offset + self._committed_count, self.write_offset + row_count
        commit = CommitReservation(
            reservation_id=self._reservation_id,
            token_count=end,
            durability=durability_to_wire(durability),
            keep_open=keep_open,
            checksums=self._checksums(begin, end),
        )
        # A lost answer does not say whether the rows are visible; the session's token count does.
        session = read_session_info(self._hold.stream.carry_out(Operation(commit=commit)).committed)
        # Room that is full is nobody's any more, and there is nothing to give back.
        self._hold.is_released = not keep_open
        # Committed rows are written no more, and their sums are the server's now.
        self._tally.forget(end)
        return session

    def _release(self) -> None:
        # Gone already, or with its stream: either way nobody holds it any more.
        with suppress(CacheError):
            self._hold.release()


def _begin_of(run: tuple[int, int]) -> int:
    return run[0]


def reserve(
    attachment: ArenaAttachment,
    arena: Bytes,
    session: SessionInfo,
    request: Reserve,
    specs: Mapping[Stream, StreamSpec],
) -> ReservedWriter:
    """Reserve room (the request is made a brief one) and return its writer.

    Raises what an append raises before its first row.
    """
    request.is_brief = True
    stream = attachment.stream
    result, hold = acquire(stream, Operation(reserve=request), partial(_hold, stream))
    try:
        reservation = result.reservation
        layout = attachment.layouts.get_or_make(
            reservation.session_uid, lambda: slot_layout(reservation.layout)
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
        # Not waited for: the error that is on its way says more.
        hold.release_soon()
        raise


def _hold(stream: AccessStream, sent: ClockPair, result: OperationResult) -> Hold:
    reservation_id = result.reservation.reservation_id
    return Hold(
        stream,
        sent.deadline_ns(result.reservation.expire_time),
        Operation(release_reservation=ReleaseReservation(reservation_id=reservation_id)),
        partial(ReservationNotFound, reservation_id=reservation_id),
    )
