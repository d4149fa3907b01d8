"""Reading in place: a lease on the arena, and views of the rows under it.

Copies nothing unless asked to. Rows are verified against what their writer said of them: copies in the copy,
views
before they are handed out. Worst case: a lease that ended raises LeaseNotFound before rows are returned as
good.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ctxcache.client.access import AccessStream
from ctxcache.client.arena import Bytes
from ctxcache.client.attach import ArenaAttachment
from ctxcache.client.convert import session_from_wire
from ctxcache.client.filed_rows import FiledRows
from ctxcache.client.hold import Hold, acquire
from ctxcache.client.rows import RowPiece, SessionRows
from ctxcache.client.slots import Chunk, SlotLayout, SlotRows, spans_of_runs, spans_of_segments
from ctxcache.client.verifier import Verifier
from ctxcache.errors import InvalidArgument, LeaseNotFound
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import AcquireLease, Lease, Operation, RecheckLease, ReleaseLease


class LeasedRows(SessionRows):
    """Rows in the arena under a lease."""

    is_local = True

    def __init__(
        self, slots: SlotRows, hold: Hold, lease: Lease, streams: Iterable[Stream], verifier: Verifier | None
    ) -> None:
        stored = slots.layout.chunks
        wanted = frozenset(streams)
        if not wanted <= stored.keys():
            raise InvalidArgument(field="streams", problem="one is not part of the session's layout")
        self.session = session_from_wire(lease.session)
        self.streams = tuple(s for s in stored if s in wanted) if wanted else slots.layout.streams
        self.begin, self.end = lease.range.begin, lease.range.end
        self._chunks = stored if not wanted else {stream: stored[stream] for stream in self.streams}
        self._slots, self._hold, self._verifier = slots, hold, verifier

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._slots.layout.row_bytes(stream)

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Return a stream's rows as views of the arena, one per run of live rows."""
        return [rows for view in self.blocks(stream) for rows in view]

    def blocks(self, stream: Stream) -> list[Bytes]:
        """Return a stream's rows as views [runs, rows, row_bytes], fewer and larger ones than `pieces`."""
        return self._slots.views(self._open(stream))

    def chunks(self) -> Iterator[RowPiece]:
        """Iterate over views of all rows, stream by stream in layer order."""
        for stream in self.streams:
            token_begin = self.begin
            for rows in self.pieces(stream):
                yield RowPiece(stream, token_begin, rows)
                token_begin += len(rows)
        self.check()

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """See SessionRows."""
        if out is not None and not out.flags.c_contiguous:
            return super().array(stream, out=out)
        whole = np.empty((self.token_count, self.row_bytes(stream)), np.uint8) if out is None else out
        self._check_out(whole, stream)
        if self._verifier is not None:
            self.copy_verified(stream, self.begin, self.end, whole)
            self.check()
            return whole
        begin = 0
        for rows in self.blocks(stream):
            end = begin + rows.shape[0] * rows.shape[1]
            np.copyto(whole[begin:end].reshape(rows.shape), rows)
            begin = end
        self.check()
        return whole

    @property
    def is_verified(self) -> bool:
        """Whether rows are verified; see `copy_verified`."""
        return self._verifier is not None

    def copy_verified(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy the rows of tokens [begin, end) into [end - begin, row_bytes], contiguous, and verify the copy.

        Costs less than verifying first and copying then. Raises as `pieces` does, InvalidArgument where
        nothing is.
        """
        if stream not in self._chunks:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")
        if self._verifier is None:
            raise InvalidArgument(field="verify", problem="this client verifies nothing")
        self._verifier.copy(stream, begin, end, into)
        self._hold.check_known()

    def check(self) -> None:
        """Raise LeaseNotFound when the lease has ended."""
        self._hold.check()

    def close(self) -> None:
        """Release the lease, without waiting for the answer."""
        self._hold.release_soon()

    def _open(self, stream: Stream) -> Chunk:
        """Where a stream's rows lie, verified if that is wanted. Raises as `pieces` does."""
        chunk = self._chunks.get(stream)
        if chunk is None:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")
        if self._verifier is not None:
            self._verifier.verify(stream)
        self._hold.check_known()
        return chunk


def lease_rows(
    attachment: ArenaAttachment, request: AcquireLease, streams: Sequence[Stream], *, is_verified: bool
) -> LeasedRows | FiledRows:
    """Acquire a lease on what a read asks for, and return the rows under it; no streams means all.

    Raises CapacityExceeded when the rows do not fit into the arena, and what a read raises.
    """
    request.is_brief = not (is_verified or request.leave_on_ssd)
    sent, result = acquire(attachment.stream, Operation(acquire_lease=request))
    lease = result.lease
    hold = Hold(
        stream=attachment.stream,
        deadline_ns=sent.deadline_ns(lease.expire_time),
        release_operation=Operation(release_lease=ReleaseLease(lease_id=lease.lease_id)),
        ended=LeaseNotFound(lease_id=lease.lease_id),
    )
    try:
        arena, begin, end = attachment.arena.readable, lease.range.begin, lease.range.end
        layout = attachment.layouts.get_or_make(lease.session.uid, lambda: SlotLayout(lease.layout))
        verifier = None
        if is_verified:
            recheck = Operation(recheck_lease=RecheckLease(lease_id=lease.lease_id))
            verifier = Verifier(
                arena, layout, lease.segments, hold.check, lambda: _carry_out(attachment.stream, recheck)
            )
        if any(segment.HasField("path_index") for segment in lease.segments):
            return FiledRows(arena, attachment.arena.ssd_files(), layout, hold, lease, streams, verifier)
        if lease.segments:
            spans = spans_of_segments(lease.segments, begin, end)
        else:
            spans = spans_of_runs(lease.runs, begin, end)
        slots = SlotRows(arena, layout, spans)
        return LeasedRows(slots, hold, lease, streams, verifier)
    except BaseException:
        hold.release_soon()
        raise


def _carry_out(stream: AccessStream, operation: Operation) -> None:
    stream.carry_out(operation)
