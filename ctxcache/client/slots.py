"""Slots: where in the arena the rows lie that a lease or a reservation names.

Knows offsets and nothing of who may use them. Worst case: a location that does not lie within the
arena raises CorruptSegment before a byte is touched.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import stream_from_wire
from ctxcache.errors import CorruptSegment
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import ChunkLayout, SegmentLocation


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row_begin, row_end)` of one segment; the first is token `token_begin` of the session."""

    segment: SegmentLocation
    row_begin: int
    row_end: int
    token_begin: int

    @property
    def token_end(self) -> int:
        """One past the last token."""
        return self.token_begin + self.row_end - self.row_begin


class Slots:
    """Rows of segments as views of the arena, [T, row_bytes]. Chunks lie alike in each slot."""

    def __init__(self, arena: Bytes, layout: Iterable[ChunkLayout]) -> None:
        self._arena = arena
        self._chunks = {stream_from_wire(chunk.stream): chunk for chunk in layout}
        self._index = {stream: index for index, stream in enumerate(self._chunks)}

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Streams in layout order."""
        return tuple(self._chunks)

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._chunks[stream].row_bytes

    def checksum(self, segment: SegmentLocation, stream: Stream) -> int | None:
        """Return the checksum of a segment's chunk; None while the segment grows."""
        if not segment.checksums:
            return None
        if len(segment.checksums) != len(self._index):
            raise CorruptSegment(segment_id=segment.segment_id, problem="checksums do not fit its streams")
        return segment.checksums[self._index[stream]]

    def rows(self, segment: SegmentLocation, stream: Stream, row_begin: int, row_end: int) -> Bytes:
        """Return a view of rows `[row_begin, row_end)`, [n, row_bytes]. Raises CorruptSegment."""
        chunk = self._chunks[stream]
        base = segment.offset_bytes + chunk.offset_bytes
        begin, end = base + row_begin * chunk.row_bytes, base + row_end * chunk.row_bytes
        if not 0 <= begin <= end <= self._arena.size:
            raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")
        return self._arena[begin:end].reshape(row_end - row_begin, chunk.row_bytes)


def runs_of(segments: Iterable[SegmentLocation], begin: int, end: int) -> tuple[Run, ...]:
    """List the runs of tokens `[begin, end)`. Raises CorruptSegment when they leave a gap."""
    runs = tuple(_runs(segments))
    for run in runs:
        if run.token_begin != begin or run.row_end <= run.row_begin:
            break
        begin = run.token_end
    if begin != end or (runs and runs[-1].token_end != end):
        raise CorruptSegment(segment_id="?", problem=f"no location for token {begin}")
    return runs


def _runs(segments: Iterable[SegmentLocation]) -> Iterator[Run]:
    for segment in segments:
        for rows in segment.rows:
            yield Run(segment, rows.row_begin, rows.row_end, rows.token_begin)
