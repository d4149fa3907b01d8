"""Slots: where in the arena the rows lie that a lease or a reservation names, and views of them.

Knows offsets and nothing of who may use them. Runs at equal distances are viewed at once, so that a
long session costs a few views per stream. Worst case: a location that does not lie within the arena
raises CorruptSegment before a byte is touched.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import stream_from_wire
from ctxcache.errors import CorruptSegment, InvalidArgument
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.v1.arena_pb2 import ChunkLayout, Runs, SegmentLocation


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stream's place inside every slot of a session."""

    index: int
    offset_bytes: int
    row_bytes: int


class SlotLayout:
    """Chunks lie alike in each slot of a session. `chunks` in layout order."""

    def __init__(self, layout: Iterable[ChunkLayout]) -> None:
        self.chunks: dict[Stream, Chunk] = {
            stream_from_wire(one.stream): Chunk(index, one.offset_bytes, one.row_bytes)
            for index, one in enumerate(layout)
        }
        self.streams: tuple[Stream, ...] = tuple(self.chunks)
        if any(c.offset_bytes < 0 or c.row_bytes <= 0 for c in self.chunks.values()):
            raise CorruptSegment(segment_id="?", problem="a chunk lies before its slot")

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self.chunks[stream].row_bytes

    def check(self, session: str, specs: Mapping[Stream, StreamSpec]) -> None:
        """Raise InvalidArgument unless the slots hold just these streams, in rows of their sizes."""
        row_sizes = {stream: chunk.row_bytes for stream, chunk in self.chunks.items()}
        if row_sizes != {stream: spec.row_bytes for stream, spec in specs.items()}:
            raise InvalidArgument(field="session", problem=f"{session} has another layout by now")

    def end_bytes(self, row_end: int) -> int:
        """How far rows below `row_end` of any stream reach into a slot."""
        return max((c.offset_bytes + row_end * c.row_bytes for c in self.chunks.values()), default=0)


class Span(NamedTuple):
    """`run_count` runs of rows `[row_begin, row_end)`, the first in the slot at `offset_bytes`, each `stride_bytes` on.

    The first row is token `token_begin`, and tokens follow one another through the runs.
    """

    offset_bytes: int
    stride_bytes: int
    run_count: int
    row_begin: int
    row_end: int
    token_begin: int

    @property
    def token_end(self) -> int:
        """One past the last token."""
        return self.token_begin + self.run_count * (self.row_end - self.row_begin)


class Block(NamedTuple):
    """A view of consecutive rows, [runs, rows, row_bytes]; the first is token `token_begin`."""

    token_begin: int
    rows: Bytes


class SlotRows:
    """Rows of tokens `[begin, end)` in the arena, as views of it."""

    def __init__(self, arena: Bytes, layout: SlotLayout, spans: Sequence[Span]) -> None:
        self.layout = layout
        self._arena = arena
        self._spans = spans
        for span in spans:
            last = span.offset_bytes + (span.run_count - 1) * span.stride_bytes
            if span.offset_bytes < 0 or last + layout.end_bytes(span.row_end) > arena.size:
                raise CorruptSegment(segment_id="?", problem="lies outside the arena")

    def views(self, chunk: Chunk) -> list[Bytes]:
        """All rows of a stream, as views [runs, rows, row_bytes] in order."""
        return [self._view(chunk, span) for span in self._spans]

    def blocks(self, stream: Stream, begin: int, end: int) -> Iterator[Block]:
        """Iterate over a stream's rows of tokens `[begin, end)`, in order."""
        chunk = self.layout.chunks[stream]
        for span in self._spans:
            low, high = max(begin, span.token_begin), min(end, span.token_end)
            if low == span.token_begin and high == span.token_end:
                yield Block(low, self._view(chunk, span))
            elif low < high:
                for part in _cut(span, low, high):
                    yield Block(part.token_begin, self._view(chunk, part))

    def runs(self) -> Iterator[tuple[int, int]]:
        """The first token of each run, and one past its last, in order."""
        for span in self._spans:
            run_tokens = span.row_end - span.row_begin
            for run in range(span.run_count):
                token_begin = span.token_begin + run * run_tokens
                yield token_begin, token_begin + run_tokens

    def rows(self, stream: Stream, begin: int, end: int) -> memoryview:
        """A stream's rows of tokens `[begin, end)`, all of one run, as bytes."""
        (block,) = self.blocks(stream, begin, end)
        return block.rows.reshape(-1).data

    def _view(self, chunk: Chunk, span: Span) -> Bytes:
        row_bytes = chunk.row_bytes
        return np.ndarray(
            (span.run_count, span.row_end - span.row_begin, row_bytes),
            np.uint8,
            self._arena,
            span.offset_bytes + chunk.offset_bytes + span.row_begin * row_bytes,
            (span.stride_bytes, row_bytes, 1),
        )


def _cut(span: Span, low: int, high: int) -> Iterator[Span]:
    """The part of a span that holds tokens `[low, high)`: what is left of a run, whole runs, a begun one."""
    run_tokens = span.row_end - span.row_begin
    while low < high:
        run, row = divmod(low - span.token_begin, run_tokens)
        whole = (high - low) // run_tokens if row == 0 else 0
        row_begin = span.row_begin + row
        row_end = span.row_end if whole else min(span.row_end, row_begin + high - low)
        part = Span(
            span.offset_bytes + run * span.stride_bytes,
            span.stride_bytes,
            max(whole, 1),
            row_begin,
            row_end,
            low,
        )
        yield part
        low = part.token_end


def spans_of_runs(runs: Runs, begin: int, end: int) -> list[Span]:
    """Read a brief answer's runs of tokens `[begin, end)`. Raises CorruptSegment when they do not add up."""
    if not len(runs.offset_bytes) == len(runs.row_begin) == len(runs.row_end):
        raise CorruptSegment(segment_id="?", problem="its runs do not fit together")
    return _spans(zip(runs.offset_bytes, runs.row_begin, runs.row_end, strict=True), begin, end)


def spans_of_segments(segments: Iterable[SegmentLocation], begin: int, end: int) -> list[Span]:
    """Read segments' runs of tokens `[begin, end)`. Raises CorruptSegment when they leave a gap."""
    token = begin
    runs = []
    for segment in segments:
        for rows in segment.rows:
            if rows.token_begin != token:
                raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
            token += rows.row_end - rows.row_begin
            runs.append((segment.offset_bytes, rows.row_begin, rows.row_end))
    return _spans(runs, begin, end)


def _spans(runs: Iterable[tuple[int, int, int]], begin: int, end: int) -> list[Span]:
    spans: list[Span] = []
    last = Span(0, 0, 0, 0, 0, begin)
    token = begin
    for offset, row_begin, row_end in runs:
        if not 0 <= row_begin < row_end:
            raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
        stride = offset - last.offset_bytes if last.run_count == 1 else last.stride_bytes
        if (
            last.run_count
            and stride > 0
            and (row_begin, row_end) == (last.row_begin, last.row_end)
            and offset == last.offset_bytes + last.run_count * stride
        ):
            last = spans[-1] = last._replace(stride_bytes=stride, run_count=last.run_count + 1)
        else:
            last = Span(offset, 0, 1, row_begin, row_end, token)
            spans.append(last)
        token += row_end - row_begin
    if token != end:
        raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
    return spans
