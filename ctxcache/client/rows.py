"""A session's rows as a reader gets them: what all routes share, and rows read where they lie.

A route is a transport of rows, or the arena under a lease, or files of the SSD tier beside it. Leased rows
are views of the arena. Every row is verified before or while it is copied out. Not thread-safe. Worst case:
rows that fail their checksum, or whose lease has ended, are never returned; where a lease ends during a
copy, the check after the copy raises LeaseNotFound. A transport that breaks raises Unavailable.
"""

import threading
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from typing import NamedTuple, Protocol, overload

import numpy as np

from ctxcache.client.access import AccessStream, ArenaAttachment, ClockPair, Hold, acquire
from ctxcache.client.arena import (
    Bytes,
    PlacedSpan,
    SlotLayout,
    SlotRows,
    Span,
    Verifier,
    identity_of,
    slot_layout,
    spans_of_runs,
    spans_of_segments,
)
from ctxcache.client.messages import read_session_info
from ctxcache.client.ssd_files import SsdReader, aligned, is_aligned
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing
from ctxcache.errors import CorruptSegment, InvalidArgument, LeaseNotFound
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    HEADER_FIXED_BYTES,
    HEADER_STREAM_BYTES,
    SegmentHeader,
    SegmentIdentity,
    SegmentLayout,
    align,
    decode_header,
    header_checksum,
)
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.v1 import session_pb2
from ctxcache.v1.arena_pb2 import (
    AcquireLease,
    Lease,
    Operation,
    OperationResult,
    RecheckLease,
    ReleaseLease,
    SegmentLocation,
)
from ctxcache.v1.session_pb2 import AppendHeader, ReadHeader, ReadSessionRequest


class RowPiece(NamedTuple):
    """Consecutive rows of one stream: `rows` [n, row_bytes], the first of them of token `token_begin`."""

    stream: Stream
    token_begin: int
    rows: Bytes


class SessionRows(Closing):
    """Rows of tokens `[begin, end)`. A context manager: leaving it ends the lease or the stream."""

    is_local: bool
    """Whether the rows are views of the arena, valid until close, instead of copies."""
    streams: tuple[Stream, ...]
    """Streams that can be read, in layer order."""
    begin: int
    end: int

    _told: session_pb2.Session
    """The session as the server described it."""

    @cached_property
    def session(self) -> SessionInfo:
        """The session as it is read."""
        # The facts are made when asked for: most readers want the rows alone.
        return read_session_info(self._told)

    @property
    def token_count(self) -> int:
        """How many tokens there are rows of."""
        return self.end - self.begin

    @abstractmethod
    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""

    @abstractmethod
    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Return a stream's rows in token order as read-only arrays [n, row_bytes], copying nothing.

        Streamed rows are verified as they arrive, local rows when their stream is first asked for; a view
        shows what memory has later as well, `array` does not. Raises CorruptSegment (local), ChecksumMismatch
        (remote), InvalidArgument for a stream that is not read.
        """

    @abstractmethod
    def chunks(self) -> Iterator[RowPiece]:
        """Iterate over all rows, stream by stream in layer order, as they become available.

        A remote read keeps none of them and can be iterated once. Raises as `pieces` does.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise LeaseNotFound if local views no longer show the session's rows.

        A caller that copies out of `pieces` or `chunks` calls it after the copy; `array` does so itself.
        """

    @abstractmethod
    def close(self) -> None:
        """End the lease or the stream; local views must not be used any more."""

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """Copy a stream's rows into one array [T, row_bytes]: `out`, or a fresh one (4x slower to fill).

        A remote read receives them right into `out`, and has them no more: ask for a stream once then.
        Raises as `pieces` does, and LeaseNotFound when the lease ended before the copy did.
        """
        pieces = self.pieces(stream)
        shape = (self.token_count, self.row_bytes(stream))
        whole = np.empty(shape, np.uint8) if out is None else out
        self._check_out(whole, stream)
        begin = 0
        for rows in pieces:
            # A slice assignment of memoryviews would hold the GIL.
            np.copyto(whole[begin : begin + len(rows)], rows)
            begin += len(rows)
        self.check()
        return whole

    def token_ids(self) -> list[int]:
        """The ids of the tokens, of a read whose streams have TOKENS. Raises as `array` does."""
        return self.array(TOKENS).reshape(-1).view("<i4").tolist()

    def _check_out(self, out: Bytes, stream: Stream) -> None:
        shape = (self.token_count, self.row_bytes(stream))
        if out.shape != shape or out.dtype != np.uint8:
            raise InvalidArgument(field="out", problem=f"{out.dtype}{out.shape} is not uint8{shape}")

    def _check_stream(self, stream: Stream) -> None:
        if stream not in self.streams:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")


class Landing(Protocol):
    """Says where rows that arrive belong."""

    def __call__(self, stream: Stream, token_begin: int, size_bytes: int) -> Bytes | None:
        """Return the place for the rows, [n, row_bytes]; None: wherever they lie.

        Raises for rows out of order.
        """


class OpenRead(Protocol):
    """A read under way. Not thread-safe."""

    header: ReadHeader

    def next(self, landing: Landing) -> RowPiece | None:
        """Return the next rows, verified; None at the end.

        Raises ChecksumMismatch, Unavailable, the server's.
        """

    def close(self) -> None:
        """Stop the server's sending."""


class RowTransport(Protocol):
    """A way to a server. Thread-safe."""

    target: str

    def read(self, request: ReadSessionRequest, *, size_bytes: int) -> OpenRead:
        """Begin a read of about `size_bytes`. Raises what ReadSession raises."""

    def append(
        self, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
    ) -> SessionInfo:
        """Append rows, uint8 [T, row_bytes] per stream of the layout, and commit them all.

        Returns the session. Raises what AppendSession raises.
        """


# -- under a lease: in the arena, and in files of the SSD tier ----------------------------------------


# A slot in a file of the SSD tier, and what vouches for what:
#
#     recorded checksum of the header ──► | header | chunk 0 | chunk 1 | … |
#                                             └ checksums of the chunks, each bound to the identity (seed)
#
# The lease tells the first and the place; all else is read here, past the server.
class StoredChunk(NamedTuple):
    """A stream's rows in a file as one piece: `size_bytes` at `offset_bytes`, and their bound checksum.

    `seed` is that of the segment's identity, to which it is bound.
    """

    path_index: int
    offset_bytes: int
    size_bytes: int
    seed: int
    checksum: int


class SsdSlot:
    """One segment that was left on SSD."""

    def __init__(
        self,
        files: SsdReader,
        layout: SlotLayout,
        identity: SegmentIdentity,
        location: SegmentLocation,
        check: Callable[[], None],
    ) -> None:
        """`check` raises when the lease has ended. Raises TierFailure for a place that no file has."""
        self._files, self._location, self._check = files, location, check
        self._layout = layout = layout.of(location.row_capacity)
        self.token_count = location.token_count
        """Rows that its checksums cover."""
        self._identity = identity
        self._header_bytes = align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(layout.chunks))
        self._seed = identity.seed()
        self._checksums: Sequence[int] = ()
        size_bytes = max(self._header_bytes, layout.end_bytes(self.token_count))
        files.check_place(location.path_index, location.offset_bytes, align(size_bytes))

    def chunk(self, stream: Stream) -> StoredChunk:
        """Where a stream's rows lie, and their checksum.

        Raises CorruptSegment, TierFailure, KeyError, what `check` raises.
        """
        # The header is read with the first chunk: a lease on many segments of which few are read costs no
        # reads.
        if not self._checksums:
            self._checksums = self._read_header()
        chunk = self._layout.chunks[stream]
        return StoredChunk(
            self._location.path_index,
            self._location.offset_bytes + chunk.offset_bytes,
            self.token_count * chunk.row_bytes,
            self._seed,
            self._checksums[chunk.index],
        )

    def differs(self, stream: Stream) -> CorruptSegment:
        """The error to raise for rows that fail their checksum.

        Raises what `check` raises: that is no damage.
        """
        return self._bad(f"{stream} does not match its checksum")

    def _bad(self, problem: str) -> CorruptSegment:
        # A slot that was handed on to another segment differs too.
        self._check()
        return CorruptSegment(segment_id=self._location.segment_id, problem=problem)

    def _read_header(self) -> Sequence[int]:
        # Page-aligned, as reads past the page cache (O_DIRECT) demand.
        data = aligned(self._header_bytes)
        self._files.read(self._location.path_index, self._location.offset_bytes, data)
        try:
            header = decode_header(data)
        except CorruptSegment as error:
            raise self._bad(str(error.facts["problem"])) from error
        # An older copy of the same segment has a valid header too; only the recorded sum tells it from the
        # present one.
        if header_checksum(bytes(data)) != self._location.header_checksum:
            raise self._bad("its header is not the one recorded")
        if header.segment_id != self._location.segment_id or header.identity != self._identity:
            raise self._bad("its header names another segment")
        if not self._is_laid_out(header):
            raise self._bad("its header has another layout")
        return header.checksums

    # Both sides compute offsets. A header that was written under another layout shows it here.
    def _is_laid_out(self, header: SegmentHeader) -> bool:
        layout: SegmentLayout = header.layout
        laid_out = [
            (spec.stream, offset, spec.row_bytes)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ]
        known = [(stream, one.offset_bytes, one.row_bytes) for stream, one in self._layout.chunks.items()]
        is_as_long = layout.segment_tokens == self._layout.row_capacity
        return laid_out == known and is_as_long and self.token_count <= layout.segment_tokens


class FileRun(NamedTuple):
    """Consecutive live rows of one segment.

    `slot`: where on SSD; None: in the arena, whose slot begins at `offset_bytes`.
    """

    slot: SsdSlot | None
    offset_bytes: int
    row_begin: int
    row_end: int
    token_begin: int
    row_capacity: int
    is_of_whole: bool = False
    """Whether all rows of its chunk on SSD are the session's."""

    @property
    def token_end(self) -> int:
        """One past the run's last token."""
        return self.token_begin + self.row_end - self.row_begin

    @property
    def is_whole(self) -> bool:
        """Whether the run has all rows of a chunk on SSD."""
        return self.slot is not None and (self.row_begin, self.row_end) == (0, self.slot.token_count)

    def cut(self, begin: int, end: int) -> "FileRun":
        """The part of the run that is tokens [begin, end)."""
        low, high = max(begin, self.token_begin), min(end, self.token_end)
        row = self.row_begin - self.token_begin
        return self._replace(row_begin=row + low, row_end=row + high, token_begin=low)


class FiledRows(SessionRows):
    """Rows under a lease, some or all of which were left on SSD.

    `runs` and `copy` may be used by several threads.
    """

    is_local = True

    def __init__(
        self,
        arena: Bytes,
        files: SsdReader,
        layout: SlotLayout,
        hold: Hold,
        lease: Lease,
        streams: Iterable[Stream],
        verifier: Verifier | None,
    ) -> None:
        """`verifier` for what is in the arena. Raises InvalidArgument, CorruptSegment, TierFailure."""
        wanted = frozenset(streams)
        if not wanted <= layout.chunks.keys():
            raise InvalidArgument(field="streams", problem="one is not part of the session's layout")
        self._told, self.files = lease.session, files
        self.streams = tuple(stream for stream in layout.chunks if not wanted or stream in wanted)
        self.begin, self.end = lease.range.begin, lease.range.end
        self._arena, self._layout, self.hold, self._verifier = arena, layout, hold, verifier
        self._runs = self._all_runs(lease)
        self._bounces = threading.local()

    @property
    def ssd_token_count(self) -> int:
        """How many of the tokens were left on SSD."""
        return sum(run.row_end - run.row_begin for run in self._runs if run.slot is not None)

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._layout.row_bytes(stream)

    def runs(self, begin: int, end: int) -> list[FileRun]:
        """Where tokens [begin, end) lie, in order."""
        first = bisect_right(self._runs, begin, key=lambda run: run.token_end)
        last = bisect_left(self._runs, end, key=lambda run: run.token_begin)
        return [run.cut(begin, end) for run in self._runs[first:last]]

    def copy(self, stream: Stream, run: FileRun, into: Bytes) -> None:
        """Copy a run's rows into [n, row_bytes], contiguous, and verify those that come from a file.

        The rows go straight into a place that begins on a page, and is a whole chunk of whole pages. Raises
        CorruptSegment, TierFailure, LeaseNotFound, InvalidArgument for a stream that is not read.
        """
        self._check_stream(stream)
        if run.slot is None:
            self.hold.check_known()
            if self._verifier is not None:
                self._verifier.copy(stream, run.token_begin, run.token_end, into)
            else:
                np.copyto(into, self._view(stream, run))
            return
        # Where the bytes go. A file is read in whole pages, a chunk at a time:
        #
        #     whole chunk, whole pages, aligned place   file ──────────────► place    verified there
        #     all else                                  file ──► bounce ───► place    verified in the bounce
        chunk = run.slot.chunk(stream)
        place, size_bytes = into.reshape(-1).data, align(chunk.size_bytes)
        is_in_place = run.is_whole and size_bytes == chunk.size_bytes and is_aligned(place)
        target = place if is_in_place else self._bounce(size_bytes)
        self.files.read(chunk.path_index, chunk.offset_bytes, target)
        rows = target[: chunk.size_bytes]
        if chunk_checksum(chunk.seed, stream, rows) != chunk.checksum:
            raise run.slot.differs(stream)
        if not is_in_place:
            found = np.frombuffer(rows, np.uint8).reshape(-1, into.shape[1])
            np.copyto(into, found[run.row_begin : run.row_end])

    def copy_rows(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy the rows of tokens [begin, end) into [end - begin, row_bytes], contiguous; see `copy`.

        Reads side by side.
        """
        self.files.spread(
            [
                partial(self.copy, stream, run, into[run.token_begin - begin : run.token_end - begin])
                for run in self.runs(begin, end)
            ]
        )

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """See SessionRows."""
        whole = np.empty((self.token_count, self.row_bytes(stream)), np.uint8) if out is None else out
        self._check_out(whole, stream)
        if not whole.flags.c_contiguous:
            np.copyto(whole, self.array(stream))
            return whole
        self._check_stream(stream)
        self.copy_rows(stream, self.begin, self.end, whole)
        self.check()
        return whole

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """See SessionRows; a copy."""
        return [self.array(stream)]

    def chunks(self) -> Iterator[RowPiece]:
        """See SessionRows; copies."""
        for stream in self.streams:
            yield RowPiece(stream, self.begin, self.array(stream))

    def check(self) -> None:
        """Raise LeaseNotFound when the lease has ended."""
        self.hold.check()

    def close(self) -> None:
        """Release the lease, without waiting for the answer."""
        self.hold.release_soon()

    def _all_runs(self, lease: Lease) -> list[FileRun]:
        # A gap, or an invalid range, is refused as it is in the arena.
        spans_of_segments(lease.segments, self.begin, self.end)
        runs = []
        for segment in lease.segments:
            slot, row_count = None, segment.token_count
            if segment.HasField("path_index"):
                identity = identity_of(self.session, segment)
                slot = SsdSlot(self.files, self._layout, identity, segment, self.hold.check)
            else:
                row_count = max((rows.row_end for rows in segment.rows), default=0)
                if (
                    segment.offset_bytes < 0
                    or row_count > segment.row_capacity
                    or segment.offset_bytes + self._layout.of(segment.row_capacity).end_bytes(row_count)
                    > self._arena.size
                ):
                    raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")
            for rows in segment.rows:
                if rows.row_end > row_count:
                    raise CorruptSegment(
                        segment_id=segment.segment_id, problem="has fewer rows than it should"
                    )
                place = slot, segment.offset_bytes
                run = FileRun(*place, rows.row_begin, rows.row_end, rows.token_begin, segment.row_capacity)
                runs.append(run._replace(is_of_whole=run.is_whole))
        return runs

    def _view(self, stream: Stream, run: FileRun) -> Bytes:
        chunk = self._layout.of(run.row_capacity).chunks[stream]
        begin = run.offset_bytes + chunk.offset_bytes + run.row_begin * chunk.row_bytes
        size_bytes = (run.row_end - run.row_begin) * chunk.row_bytes
        return self._arena[begin : begin + size_bytes].reshape(-1, chunk.row_bytes)

    def _bounce(self, size_bytes: int) -> memoryview:
        """This thread's own memory."""
        # The memory is kept from copy to copy, as large as the largest chunk so far: fresh memory costs a
        # page fault per page.
        held: memoryview | None = getattr(self._bounces, "memory", None)
        if held is None or held.nbytes < size_bytes:
            held = self._bounces.memory = aligned(size_bytes)
        return held[:size_bytes]


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
        self._told = lease.session
        self.streams = tuple(s for s in stored if s in wanted) if wanted else slots.layout.streams
        self.begin, self.end = lease.range.begin, lease.range.end
        self._chunks = stored if not wanted else {stream: stored[stream] for stream in self.streams}
        self._slots, self.hold, self._verifier = slots, hold, verifier

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._slots.layout.row_bytes(stream)

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Return a stream's rows as views of the arena, each made when asked for."""
        return _Pieces(self.blocks(stream))

    def blocks(self, stream: Stream) -> list[Bytes]:
        """Return a stream's rows as views [runs, rows, row_bytes], fewer and larger ones than `pieces`."""
        self._open(stream)
        return self._slots.views(stream)

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
        """Copy rows of tokens [begin, end) into a contiguous [end - begin, row_bytes]; verify the copy.

        Costs less than verifying first and copying then. Raises as `pieces` does, InvalidArgument where
        nothing is.
        """
        if stream not in self._chunks:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")
        if self._verifier is None:
            raise InvalidArgument(field="verify", problem="this client verifies nothing")
        self._verifier.copy(stream, begin, end, into)
        self.hold.check_known()

    @property
    def arena(self) -> Bytes:
        """The whole arena as it is mapped here, to be read."""
        return self._slots.arena

    def placed(self, begin: int, end: int) -> list[PlacedSpan]:
        """Where rows of tokens [begin, end) lie, for a caller that copies and verifies them itself."""
        spans = list(self._slots.spans(begin, end))
        if self._verifier is None:
            return [PlacedSpan(span, ()) for span in spans]
        segments = self._verifier.segments(begin, end)
        return [PlacedSpan(span, tuple(islice(segments, span.run_count))) for span in spans]

    def views(self, stream: Stream, spans: Iterable[Span]) -> list[Bytes]:
        """A stream's rows of each span, [runs, rows, row_bytes], not verified: that is the caller's.

        Raises InvalidArgument for a stream that is not read, LeaseNotFound.
        """
        if stream not in self._chunks:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")
        self.hold.check_known()
        return [self._slots.view(stream, span) for span in spans]

    def chunk_index(self, stream: Stream) -> int:
        """The place of a stream's checksum among those of a segment. Raises KeyError(stream)."""
        return self._chunks[stream].index

    def look_again(self, stream: Stream, segment_id: int) -> None:
        """Look at a chunk whose copy differed from its checksum: the server mends what is wrong in memory.

        Raises CorruptSegment where no tier has it, LeaseNotFound.
        """
        if self._verifier is not None:
            self._verifier.look_again(stream, segment_id)

    def check(self) -> None:
        """Raise LeaseNotFound when the lease has ended."""
        self.hold.check()

    def close(self) -> None:
        """Release the lease, without waiting for the answer."""
        self.hold.release_soon()

    def _open(self, stream: Stream) -> None:
        """Verify a stream's rows, if that is wanted. Raises as `pieces` does."""
        if stream not in self._chunks:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")
        if self._verifier is not None:
            self._verifier.verify(stream)
        self.hold.check_known()


class _Pieces(Sequence[Bytes]):
    """The runs of a stream's views [runs, rows, row_bytes], in order: each [rows, row_bytes]."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Bytes]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return sum([len(block) for block in self._blocks])

    def __iter__(self) -> Iterator[Bytes]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[Bytes]: ...

    def __getitem__(self, index: int | slice) -> Bytes | list[Bytes]:
        return list(self)[index]


def lease_rows(
    attachment: ArenaAttachment, request: AcquireLease, streams: Sequence[Stream], *, is_verified: bool
) -> LeasedRows | FiledRows:
    """Acquire a lease on what a read asks for, and return the rows under it; no streams means all.

    Raises CapacityExceeded when the rows do not fit into the arena, and what a read raises.
    """
    # A brief answer has runs of rows alone. Checksums and places on SSD come only with whole segments.
    request.is_brief = not (is_verified or request.leave_on_ssd)
    stream = attachment.stream
    result, hold = acquire(stream, Operation(acquire_lease=request), partial(_hold, stream))
    try:
        lease = result.lease
        arena, begin, end = attachment.arena.readable, lease.range.begin, lease.range.end
        # The layout of a session never changes, so a layout once read serves every later lease.
        layout = attachment.layouts.get_or_make(lease.session.uid, lambda: slot_layout(lease.layout))
        verifier = None
        if is_verified:
            recheck = partial(_recheck, stream, lease.lease_id)
            verifier = Verifier(arena, layout, lease.segments, hold.check, recheck)
        # Leases that lie wholly in the arena have a class of their own, whose long runs are few views.
        if any(segment.HasField("path_index") for segment in lease.segments):
            return FiledRows(arena, attachment.arena.ssd_files(), layout, hold, lease, streams, verifier)
        if lease.segments:
            spans = spans_of_segments(lease.segments, begin, end)
        else:
            spans = spans_of_runs(lease.runs, begin, end)
        slots = SlotRows(arena, layout, spans)
        return LeasedRows(slots, hold, lease, streams, verifier)
    except BaseException:
        # The release is not waited for: the error that is on its way says more.
        hold.release_soon()
        raise


def _hold(stream: AccessStream, sent: ClockPair, result: OperationResult) -> Hold:
    return Hold(
        stream,
        sent.deadline_ns(result.lease.expire_time),
        Operation(release_lease=ReleaseLease(lease_id=result.lease.lease_id)),
        partial(LeaseNotFound, lease_id=result.lease.lease_id),
    )


def _recheck(stream: AccessStream, lease_id: int) -> None:
    stream.carry_out(Operation(recheck_lease=RecheckLease(lease_id=lease_id)))
