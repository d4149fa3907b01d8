"""Reading in place: a lease on the arena, and verified views of the rows under it.

Copies nothing unless asked to. Worst case: bytes that do not match their identity raise
CorruptSegment, and a lease that ended raises LeaseNotFound, before rows are returned as good.
"""

from collections.abc import Iterable, Iterator, Sequence

from ctxcache.client.arena import Bytes
from ctxcache.client.attach import Attachment
from ctxcache.client.convert import stream_from_wire
from ctxcache.client.hold import Hold, acquire
from ctxcache.client.rows import Piece, SessionRows
from ctxcache.client.slots import Slots, runs_of
from ctxcache.errors import CorruptSegment, InvalidArgument, LeaseNotFound
from ctxcache.format.identity import SegmentIdentity, chunk_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import AcquireLease, Lease, Operation, ReleaseLease, SegmentLocation
from ctxcache.v1.session_pb2 import ReadSessionRequest, Session


class LeasedRows(SessionRows):
    """Rows in the arena under a lease."""

    is_local = True

    def __init__(self, slots: Slots, hold: Hold, lease: Lease, streams: Iterable[Stream]) -> None:
        wanted = frozenset(streams) or frozenset(slots.streams)
        if not wanted <= frozenset(slots.streams):
            raise InvalidArgument(field="streams", problem="one is not part of the session's layout")
        self.session = lease.session
        self.streams = tuple(stream for stream in slots.streams if stream in wanted)
        self.begin, self.end = lease.range.begin, lease.range.end
        self._slots, self._hold = slots, hold
        self._runs = runs_of(lease.segments, self.begin, self.end)
        self._seeds: dict[int, int] = {}
        self._verified: set[tuple[int, Stream]] = set()

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._slots.row_bytes(stream)

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Return a stream's rows as views of the arena, one per run of live rows."""
        return [piece.rows for piece in self._pieces(stream)]

    def chunks(self) -> Iterator[Piece]:
        """Iterate over views of all rows, stream by stream in layer order."""
        for stream in self.streams:
            yield from self._pieces(stream)

    def check(self) -> None:
        """Raise LeaseNotFound when the lease has ended."""
        self._hold.check()

    def close(self) -> None:
        """Release the lease, without waiting for the answer."""
        self._hold.release_soon()

    def _pieces(self, stream: Stream) -> Iterator[Piece]:
        self._check_stream(stream)
        for run in self._runs:
            self._verify(run.segment, stream)
            rows = self._slots.rows(run.segment, stream, run.row_begin, run.row_end)
            yield Piece(stream, run.token_begin, rows)
        self.check()

    def _verify(self, segment: SegmentLocation, stream: Stream) -> None:
        expected = self._slots.checksum(segment, stream)
        if expected is None or (segment.segment_id, stream) in self._verified:
            return
        rows = self._slots.rows(segment, stream, 0, segment.token_count)
        if chunk_checksum(self._seed(segment), stream, rows.data) != expected:
            # A slot that was handed on under us differs too; that is no damage to the session.
            self.check()
            raise CorruptSegment(
                segment_id=segment.segment_id, problem=f"{stream} does not match its checksum"
            )
        self._verified.add((segment.segment_id, stream))

    def _seed(self, segment: SegmentLocation) -> int:
        if segment.segment_id not in self._seeds:
            self._seeds[segment.segment_id] = _identity(self.session, segment).seed()
        return self._seeds[segment.segment_id]


def _identity(session: Session, segment: SegmentLocation) -> SegmentIdentity:
    try:
        session_uid = bytes.fromhex(segment.session_uid)
    except ValueError as error:
        raise CorruptSegment(segment_id=segment.segment_id, problem="has no session uid") from error
    return SegmentIdentity(
        tenant=session.tenant,
        session_uid=session_uid,
        generation=segment.generation,
        begin=segment.position_begin,
        token_count=segment.token_count,
        model_fingerprint=session.model_fingerprint,
    )


def lease_rows(attachment: Attachment, request: ReadSessionRequest) -> LeasedRows:
    """Acquire a lease on what a read asks for, and return the rows under it; no streams means all.

    Raises CapacityExceeded when the rows do not fit into the arena, and what a read raises.
    """
    sent, result = acquire(attachment.stream, Operation(acquire_lease=_acquire_lease(request)))
    lease = result.lease
    hold = Hold(
        stream=attachment.stream,
        deadline_ns=sent.deadline_ns(lease.expire_time),
        release_operation=Operation(release_lease=ReleaseLease(lease_id=lease.lease_id)),
        ended=LeaseNotFound(lease_id=lease.lease_id),
    )
    try:
        slots = Slots(attachment.arena.readable, lease.layout)
        return LeasedRows(slots, hold, lease, map(stream_from_wire, request.streams))
    except BaseException:
        hold.release_soon()
        raise


def _acquire_lease(request: ReadSessionRequest) -> AcquireLease:
    has_generation, has_range = request.HasField("if_generation_match"), request.HasField("range")
    return AcquireLease(
        session=request.name,
        model_fingerprint=request.model_fingerprint,
        if_generation_match=request.if_generation_match if has_generation else None,
        range=request.range if has_range else None,
    )
