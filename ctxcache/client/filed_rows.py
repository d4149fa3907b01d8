"""Reading beside the server: a lease that leaves on SSD what lies only there, and its rows out of the tier's files.

Each file's rows are verified against their segment's identity when they are read, in the memory they are
returned in or
copied from. Worst case: a lease that ended raises LeaseNotFound, and bytes that are not the session's
CorruptSegment, before
rows are returned as good.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import session_from_wire
from ctxcache.client.hold import Hold
from ctxcache.client.rows import RowPiece, SessionRows
from ctxcache.client.slots import SlotLayout, spans_of_segments
from ctxcache.client.ssd_files import SsdReader, aligned, is_aligned
from ctxcache.client.ssd_slot import SsdSlot
from ctxcache.client.verifier import Verifier, identity_of
from ctxcache.errors import CorruptSegment, InvalidArgument
from ctxcache.format.identity import chunk_checksum
from ctxcache.format.layout import align
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import Lease


class FileRun(NamedTuple):
    """Consecutive live rows of one segment. `slot`: where on SSD; None: in the arena, whose slot begins at `offset_bytes`."""

    slot: SsdSlot | None
    offset_bytes: int
    row_begin: int
    row_end: int
    token_begin: int

    @property
    def token_end(self) -> int:
        """One past its last token."""
        return self.token_begin + self.row_end - self.row_begin

    @property
    def is_whole(self) -> bool:
        """Whether it has all the rows of a chunk on SSD."""
        return self.slot is not None and (self.row_begin, self.row_end) == (0, self.slot.token_count)

    def cut(self, begin: int, end: int) -> "FileRun":
        """The part of it that is tokens [begin, end)."""
        low, high = max(begin, self.token_begin), min(end, self.token_end)
        row = self.row_begin - self.token_begin
        return self._replace(row_begin=row + low, row_end=row + high, token_begin=low)


class FiledRows(SessionRows):
    """Rows under a lease, some or all of which were left on SSD. `runs` and `copy` may be used by several threads."""

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
        self.session, self.files = session_from_wire(lease.session), files
        self.streams = tuple(stream for stream in layout.chunks if not wanted or stream in wanted)
        self.begin, self.end = lease.range.begin, lease.range.end
        self._arena, self._layout, self._hold, self._verifier = arena, layout, hold, verifier
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

        Straight into it where it begins on a page, and is a whole chunk of whole pages. Raises
        CorruptSegment, TierFailure,
        LeaseNotFound, InvalidArgument for a stream that is not read.
        """
        self._check_stream(stream)
        if run.slot is None:
            self._hold.check_known()
            if self._verifier is not None:
                self._verifier.copy(stream, run.token_begin, run.token_end, into)
            else:
                np.copyto(into, self._view(stream, run))
            return
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
        """Copy the rows of tokens [begin, end) into [end - begin, row_bytes], contiguous; see `copy`. Reads side by side."""
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
        self._hold.check()

    def close(self) -> None:
        """Release the lease, without waiting for the answer."""
        self._hold.release_soon()

    def _all_runs(self, lease: Lease) -> list[FileRun]:
        # What leaves a gap, or is no range, is refused as it is in the arena.
        spans_of_segments(lease.segments, self.begin, self.end)
        runs = []
        for segment in lease.segments:
            slot, row_count = None, segment.token_count
            if segment.HasField("path_index"):
                identity = identity_of(self.session, segment)
                slot = SsdSlot(self.files, self._layout, identity, segment, self._hold.check)
            else:
                row_count = max((rows.row_end for rows in segment.rows), default=0)
                if (
                    segment.offset_bytes < 0
                    or segment.offset_bytes + self._layout.end_bytes(row_count) > self._arena.size
                ):
                    raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")
            for rows in segment.rows:
                if rows.row_end > row_count:
                    raise CorruptSegment(
                        segment_id=segment.segment_id, problem="has fewer rows than it should"
                    )
                runs.append(
                    FileRun(slot, segment.offset_bytes, rows.row_begin, rows.row_end, rows.token_begin)
                )
        return runs

    def _view(self, stream: Stream, run: FileRun) -> Bytes:
        chunk = self._layout.chunks[stream]
        begin = run.offset_bytes + chunk.offset_bytes + run.row_begin * chunk.row_bytes
        size_bytes = (run.row_end - run.row_begin) * chunk.row_bytes
        return self._arena[begin : begin + size_bytes].reshape(-1, chunk.row_bytes)

    def _bounce(self, size_bytes: int) -> memoryview:
        """This thread's own memory."""
        held: memoryview | None = getattr(self._bounces, "memory", None)
        if held is None or held.nbytes < size_bytes:
            held = self._bounces.memory = aligned(size_bytes)
        return held[:size_bytes]
