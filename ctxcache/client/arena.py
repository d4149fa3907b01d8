"""The arena as this process sees it: shared memory, mapped after it proved to be the one.

A mapping lives as long as any view of it, so that a server's restart never takes memory away under a reader.
Worst case: the memory is not the server's, and bytes travel by stream.

Slots: where in the arena the rows of a lease or reservation lie, views of them, and their verification. Runs
at equal distances are viewed at once, so that a long session costs a few views per stream. Copied rows are
verified in the copy: later changes in the arena do not matter. Views are verified where they lie, whole
chunks, each stream once. Rows that differ are shown to the server, which verifies and repairs them; then they
are read once more. Worst case: a location outside the arena, or rows that no tier has, raise CorruptSegment
before a row is returned.
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from ctxcache.client.convert import stream_from_wire
from ctxcache.client.process_forks import end_in_children
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CorruptSegment, InvalidArgument
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import SEGMENT_TOKENS, SegmentIdentity, align, is_segment_length
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.runtime.memory import Populate
from ctxcache.v1 import arena_pb2
from ctxcache.v1.arena_pb2 import ChunkLayout, Runs, SegmentLocation

Bytes = npt.NDArray[np.uint8]
_Open = Callable[[int], AbstractContextManager[int]]

LAYOUTS_KEPT = 64
"""Layouts of sessions that are kept decoded."""
RUN_BYTES = 1 << 19
"""Bytes that are copied before they are summed, while the processor has them at hand."""

# The first page of the file begins with the arena's id: 16 random bytes that each server's start makes anew.
_ID_BYTES = 16


class MappedArena:
    """A mapped arena. `readable` is a read-only [size_bytes] array of its bytes.

    Both mappings are populated in the background: a first touch costs up to three times a later one.
    """

    def __init__(self, arena: arena_pb2.Arena, readable: Bytes, opened: _Open) -> None:
        self._arena = arena
        self.readable = readable
        self._opened = opened
        self._lock = threading.Lock()
        self._writable: Bytes | None = None
        self._ssd_files: SsdReader | None = None
        # Another thread goes on from here: a server's arena may be hundreds of GiB, and the first read does
        # not wait.
        self._populating = [_populate(readable, arena, is_for_writing=False)]

    @property
    def arena_id(self) -> bytes:
        """The arena's identity among other servers and earlier runs."""
        return self._arena.arena_id

    def writable(self) -> Bytes | None:
        """Map the arena for writing on first use; None where we may only read."""
        # One lock serves two threads that write first at the same moment: two mappings would double what is
        # populated.
        with self._lock:
            if self._writable is None and self._arena.may_write:
                self._writable = _map(self._arena, self._opened, os.O_RDWR)
                if self._writable is not None:
                    self._populating.append(_populate(self._writable, self._arena, is_for_writing=True))
            return self._writable

    def wait_populated(self, timeout_s: float) -> None:
        """Wait until the mappings are populated, at most so long."""
        with self._lock:
            populating = list(self._populating)
        end_s = time.monotonic() + timeout_s
        for one in populating:
            one.wait(max(end_s - time.monotonic(), 0))

    def ssd_files(self) -> SsdReader:
        """The files of the same server's SSD tier, opened on first use."""
        with self._lock:
            if self._ssd_files is None:
                self._ssd_files = SsdReader([(file.path, file.size_bytes) for file in self._arena.ssd_files])
            return self._ssd_files


# The two ways to the same file:
#
#     control socket   descriptors, handed over by the server: works without any right to the path
#     gRPC             the path, opened here: works only where this user may open it
def map_arena(arena: arena_pb2.Arena) -> MappedArena | None:
    """Map the server's arena by its path; None when that is not, on this host, that very arena."""
    if not arena.path:
        return None
    return _mapped(arena, lambda access: _open_path(arena.path, access))


def map_descriptors(arena: arena_pb2.Arena, fds: Sequence[int]) -> MappedArena | None:
    """Map the arena that descriptors lead to, for reading and maybe for writing; None when they do not.

    Keeps duplicates of them for `writable`.
    """
    return _mapped(arena, _Kept(fds).open)


class _Kept:
    """Duplicates of descriptors, closed with the last reference."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = [os.fdopen(os.dup(fd), "rb", buffering=0, closefd=True) for fd in fds]

    def open(self, access: int) -> AbstractContextManager[int]:
        """The last one is good for all that this process may. Raises OSError where it may only read."""
        if access == os.O_RDWR and len(self._files) == 1:
            raise PermissionError(errno.EACCES, "the arena was given to be read")
        return contextlib.nullcontext(self._files[-1 if access == os.O_RDWR else 0].fileno())


# Clients of one process with the same rights have one mapping: an engine's scheduler and its worker are two.
class _Arenas:
    """The arenas that this process has mapped. Thread-safe."""

    def __init__(self) -> None:
        self.forked()
        end_in_children(self)

    def forked(self) -> None:
        """See Shared: in a child nobody populates what its parent mapped."""
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, MappedArena] = WeakValueDictionary()

    def mapped(self, arena: arena_pb2.Arena, opened: _Open) -> MappedArena | None:
        """The arena, which is mapped unless it is; None when it is not, on this host, that very arena."""
        # All that a server says of it, rights included.
        key = arena.SerializeToString(deterministic=True)
        with self._lock:
            arena_mapped = self._known.get(key)
            if arena_mapped is not None and arena_mapped.readable[:_ID_BYTES].tobytes() != arena.arena_id:
                arena_mapped = None
            if arena_mapped is None and (readable := _map(arena, opened, os.O_RDONLY)) is not None:
                arena_mapped = self._known[key] = MappedArena(arena, readable, opened)
            return arena_mapped


def _mapped(arena: arena_pb2.Arena, opened: _Open) -> MappedArena | None:
    return _ARENAS.mapped(arena, opened)


_ARENAS = _Arenas()


@contextlib.contextmanager
def _open_path(path: str, access: int) -> Iterator[int]:
    # Without O_NONBLOCK a FIFO under that name would block us for ever.
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _map(arena: arena_pb2.Arena, opened: _Open, access: int) -> Bytes | None:
    if len(arena.arena_id) != _ID_BYTES:
        return None
    try:
        with opened(access) as fd:
            return _map_file(fd, arena, access)
    except OSError:
        return None


def _map_file(fd: int, arena: arena_pb2.Arena, access: int) -> Bytes | None:
    # Everything is asked of the open file, never of its path, under which another one may lie a moment later.
    status = os.fstat(fd)
    # A size that differs is another run's file, and reading behind the end of a mapped file is SIGBUS, not an
    # error.
    if not _is_trusted(status) or status.st_size != arena.size_bytes or status.st_size < _ID_BYTES:
        return None
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == os.O_RDWR else 0)
    try:
        mapping = mmap.mmap(fd, arena.size_bytes, mmap.MAP_SHARED, protection)
    except ValueError:
        return None
    # Compared in the mapping itself: these are the bytes that will be read.
    return np.frombuffer(mapping, np.uint8) if mapping[:_ID_BYTES] == arena.arena_id else None


def _is_trusted(status: os.stat_result) -> bool:
    # Ours, the system's, or meant for everyone: a file that someone else shares with us alone is not
    # what a server of this host creates.
    is_known_owner = status.st_uid in (0, os.geteuid())
    return stat.S_ISREG(status.st_mode) and (is_known_owner or bool(status.st_mode & stat.S_IROTH))


def _populate(mapping: Bytes, arena: arena_pb2.Arena, *, is_for_writing: bool) -> Populate:
    populate = Populate(
        mapping.ctypes.data,
        mapping.size,
        is_for_writing=is_for_writing,
        keeps=mapping,
        page_bytes=arena.page_bytes,
    )
    populate.start()
    return populate


# -- slots of a lease --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stream's place inside every slot of a session."""

    index: int
    offset_bytes: int
    row_bytes: int


# A session's slot, and two of them in the arena. Only the offsets of chunks differ between 64 rows and more:
#
#     slot    | header | chunk of stream 0 | chunk of stream 1 | …      each chunk begins on a page
#     chunk   | row 0 | row 1 | … | row row_capacity - 1 | padding |
class SlotLayout:
    """Chunks lie alike in each slot of a session that has as many rows. `chunks` in layout order.

    `row_capacity`: rows that each chunk has room for.
    """

    row_capacity = SEGMENT_TOKENS

    def __init__(self, layout: Iterable[ChunkLayout]) -> None:
        self.chunks: dict[Stream, Chunk] = {
            stream_from_wire(one.stream): Chunk(index, one.offset_bytes, one.row_bytes)
            for index, one in enumerate(layout)
        }
        self.streams: tuple[Stream, ...] = tuple(self.chunks)
        if any(c.offset_bytes < 0 or c.row_bytes <= 0 for c in self.chunks.values()):
            raise CorruptSegment(segment_id="?", problem="a chunk lies before its slot")
        self._longer: dict[int, SlotLayout] = {}
        self._ends_bytes: dict[int, int] = {}

    def of(self, row_capacity: int) -> "SlotLayout":
        """How chunks lie in a slot with room for so many rows, of a layout for 64.

        Raises CorruptSegment for a number that no segment has.
        """
        if row_capacity == SEGMENT_TOKENS:
            return self
        layout = self._longer.get(row_capacity)
        if layout is None:
            if not is_segment_length(row_capacity):
                raise CorruptSegment(segment_id="?", problem=f"no segment has {row_capacity} rows")
            layout = self._longer[row_capacity] = SlotLayout(())
            # The first chunk lies behind the header, whose size does not depend on rows.
            at = next((chunk.offset_bytes for chunk in self.chunks.values()), 0)
            for stream, chunk in self.chunks.items():
                layout.chunks[stream] = Chunk(chunk.index, at, chunk.row_bytes)
                at += align(row_capacity * chunk.row_bytes)
            layout.streams, layout.row_capacity = self.streams, row_capacity
        return layout

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
        end = self._ends_bytes.get(row_end)
        if end is None:
            # Each segment of each lease asks for this: there are no more answers than rows in a slot.
            ends = (c.offset_bytes + row_end * c.row_bytes for c in self.chunks.values())
            end = max(ends, default=0)
            if row_end <= self.row_capacity:
                self._ends_bytes[row_end] = end
        return end


def slot_layout(layout: Iterable[ChunkLayout]) -> SlotLayout:
    """How chunks lie in the slots of a session, as the server tells it. Raises CorruptSegment."""
    # Sessions of a model are laid out alike, so that the same bytes are read once.
    return _slot_layout(tuple([one.SerializeToString() for one in layout]))


@lru_cache(LAYOUTS_KEPT)
def _slot_layout(encoded: tuple[bytes, ...]) -> SlotLayout:
    return SlotLayout(map(ChunkLayout.FromString, encoded))


# A span is what one numpy array with a stride can view. Three slots, rows 0 to 63 of one chunk:
#
#                 offset            + stride          + 2 stride
#     arena   ────| slot |──────────| slot |──────────| slot |────────
#                  ▓▓▓▓ chunk        ▓▓▓▓              ▓▓▓▓
#     view    [run_count = 3, rows = 64, row_bytes], strides (stride, row_bytes, 1)
class Span(NamedTuple):
    """`run_count` runs of rows `[row_begin, row_end)`: the first at `offset_bytes`, each `stride_bytes` on.

    The first row is token `token_begin`, and tokens follow one another through the runs.
    """

    offset_bytes: int
    stride_bytes: int
    run_count: int
    row_begin: int
    row_end: int
    token_begin: int
    row_capacity: int = SEGMENT_TOKENS
    """Rows that each run's slot has room for."""

    @property
    def token_end(self) -> int:
        """One past the last token."""
        return self.token_begin + self.run_count * (self.row_end - self.row_begin)

    def runs(self) -> Iterator["Span"]:
        """Each run by itself, in order."""
        run_tokens = self.row_end - self.row_begin
        for run in range(self.run_count):
            yield self._replace(
                offset_bytes=self.offset_bytes + run * self.stride_bytes,
                run_count=1,
                token_begin=self.token_begin + run * run_tokens,
            )


class Block(NamedTuple):
    """A view of consecutive rows, [runs, rows, row_bytes]; the first is token `token_begin`."""

    token_begin: int
    rows: Bytes


class SlotRows:
    """Rows of tokens `[begin, end)` in the arena, as views of it."""

    def __init__(self, arena: Bytes, layout: SlotLayout, spans: Sequence[Span]) -> None:
        self.layout, self.arena = layout, arena
        self._spans = spans
        for span in spans:
            last = span.offset_bytes + (span.run_count - 1) * span.stride_bytes
            slot = layout.of(span.row_capacity)
            is_outside = span.offset_bytes < 0 or last + slot.end_bytes(span.row_end) > arena.size
            if is_outside or span.row_end > slot.row_capacity:
                raise CorruptSegment(segment_id="?", problem="lies outside the arena, or its slot")

    def views(self, stream: Stream) -> list[Bytes]:
        """All rows of a stream, as views [runs, rows, row_bytes] in order."""
        return [self.view(stream, span) for span in self._spans]

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Iterate over the rows of tokens `[begin, end)`, in order: where those of any stream lie."""
        for span in self._spans:
            low, high = max(begin, span.token_begin), min(end, span.token_end)
            # A range that begins or ends within a span cuts it. All others take it whole.
            if low == span.token_begin and high == span.token_end:
                yield span
            elif low < high:
                yield from _cut(span, low, high)

    def blocks(self, stream: Stream, begin: int, end: int) -> Iterator[Block]:
        """Iterate over a stream's rows of tokens `[begin, end)`, in order."""
        for span in self.spans(begin, end):
            yield Block(span.token_begin, self.view(stream, span))

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

    def view(self, stream: Stream, span: Span) -> Bytes:
        """A stream's rows of a span, [runs, rows, row_bytes]."""
        chunk = self.layout.of(span.row_capacity).chunks[stream]
        row_bytes = chunk.row_bytes
        return np.ndarray(
            (span.run_count, span.row_end - span.row_begin, row_bytes),
            np.uint8,
            self.arena,
            span.offset_bytes + chunk.offset_bytes + span.row_begin * row_bytes,
            (span.stride_bytes, row_bytes, 1),
        )


#     runs     | 0 1 2 3 | 4 5 6 7 | 8 9 … | … |        tokens [2, 9) of runs of four
#     parts        ▓▓▓     ▓▓▓▓▓▓▓   ▓                  rest of a run, whole runs as one span, a begun one
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
            span.row_capacity,
        )
        yield part
        low = part.token_end


def spans_of_runs(runs: Runs, begin: int, end: int) -> list[Span]:
    """Read a brief answer's runs of tokens `[begin, end)`. Raises CorruptSegment when they do not add up."""
    capacities = runs.row_capacity or [SEGMENT_TOKENS] * len(runs.offset_bytes)
    if not len(runs.offset_bytes) == len(runs.row_begin) == len(runs.row_end) == len(capacities):
        raise CorruptSegment(segment_id="?", problem="its runs do not fit together")
    return _spans(zip(runs.offset_bytes, runs.row_begin, runs.row_end, capacities, strict=True), begin, end)


def spans_of_segments(segments: Iterable[SegmentLocation], begin: int, end: int) -> list[Span]:
    """Read segments' runs of tokens `[begin, end)`. Raises CorruptSegment when they leave a gap."""
    token = begin
    runs = []
    for segment in segments:
        for rows in segment.rows:
            if rows.token_begin != token:
                raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
            token += rows.row_end - rows.row_begin
            runs.append((segment.offset_bytes, rows.row_begin, rows.row_end, segment.row_capacity))
    return _spans(runs, begin, end)


def _spans(runs: Iterable[tuple[int, int, int, int]], begin: int, end: int) -> list[Span]:
    spans: list[Span] = []
    token = begin
    # The growing span: where its first run lies, how far the next run is, and how many there are.
    first, stride, count, rows, token_begin = 0, 0, 0, (0, 0, 0), begin
    for offset, row_begin, row_end, row_capacity in runs:
        if not 0 <= row_begin < row_end:
            raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
        # Slots at equal distances are one span, which one array with a stride can view.
        if count == 1:
            stride = offset - first
        if (
            count
            and stride > 0
            and rows == (row_begin, row_end, row_capacity)
            and offset == first + count * stride
        ):
            count += 1
        else:
            if count:
                spans.append(_span(first, stride, count, rows, token_begin))
            first, stride, count, token_begin = offset, 0, 1, token
            rows = row_begin, row_end, row_capacity
        token += row_end - row_begin
    if count:
        spans.append(_span(first, stride, count, rows, token_begin))
    # This is the only check that a brief answer's runs are as many tokens as were asked for.
    if token != end:
        raise CorruptSegment(segment_id="?", problem=f"no location for token {token}")
    return spans


def _span(first: int, stride: int, count: int, rows: tuple[int, int, int], token_begin: int) -> Span:
    return Span(first, stride if count > 1 else 0, count, rows[0], rows[1], token_begin, rows[2])


class PlacedSegment(NamedTuple):
    """A segment all of whose rows belong to the session, and its writer's checksums, one per chunk."""

    segment_id: int
    token_begin: int
    token_end: int
    checksums: Sequence[int]


class PlacedSpan(NamedTuple):
    """Consecutive rows where they lie in the arena, in each stream's chunks alike.

    `segments`: the segment of each run; None where only some of its rows belong to the session. Empty where
    nothing is verified.
    """

    span: Span
    segments: tuple[PlacedSegment | None, ...]


class _Placed(NamedTuple):
    """A segment in the arena: its slot, how chunks lie in it, and its writer's checksums, one per chunk."""

    segment_id: int
    offset_bytes: int
    token_count: int
    chunks: Mapping[Stream, Chunk]
    checksums: Sequence[int]


class _Run(NamedTuple):
    """Rows `[row_begin, row_end)` of a segment in the arena, the first of them of token `token_begin`."""

    token_begin: int
    row_begin: int
    row_end: int
    segment: _Placed


# The reader's beliefs, and their sources. The sum is the writer's, and the server gave it with the lease:
#
#     compare ── same ──► done
#        │ differs
#        ▼
#     does the lease hold? ── no ──► LeaseNotFound: the slot is another segment's by now, nothing is damaged
#        │ yes
#        ▼
#     the server verifies, and mends from another tier ──► compare once more ── differs ──► CorruptSegment
class Verifier:
    """Verifies chunks of one lease. Used by several threads, `verify` by one.

    `check` raises when the lease has ended. `recheck` has the server verify the lease's segments, and raises
    what the server finds.
    """

    def __init__(
        self,
        arena: Bytes,
        layout: SlotLayout,
        segments: Sequence[SegmentLocation],
        check: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        """Raises CorruptSegment where checksums do not fit their rows."""
        self._arena, self._layout = arena, layout
        self._memory = arena.data
        """The same bytes: a slice of it is made in a third of the time."""
        self._check, self._recheck = check, recheck
        self._verified: set[Stream] = set()
        self._segments: list[_Placed] = []
        self._runs: list[_Run] = []
        for segment in segments:
            # Rows left on SSD are read from files, and verified there against their slot's header.
            if segment.HasField("path_index"):
                continue
            slot = layout.of(segment.row_capacity)
            _check_sums(segment, slot, arena.size)
            facts = segment.segment_id, segment.offset_bytes, segment.token_count
            placed = _Placed(*facts, slot.chunks, segment.checksums)
            self._segments.append(placed)
            for rows in segment.rows:
                self._runs.append(_Run(rows.token_begin, rows.row_begin, rows.row_end, placed))

    def verify(self, stream: Stream) -> None:
        """Verify a stream's chunks where they lie.

        Raises CorruptSegment, what `check` and `recheck` raise.
        """
        if stream not in self._verified:
            memory = self._memory
            for segment in self._segments:
                chunk = segment.chunks[stream]
                begin = segment.offset_bytes + chunk.offset_bytes
                rows = memory[begin : begin + segment.token_count * chunk.row_bytes]
                # The comparison is here, since there are hundreds of chunks: a chunk that differs goes to the
                # method.
                if rows_checksum(rows) != segment.checksums[chunk.index]:
                    self._match(segment, stream, self._sum)
            # Each stream is verified once. A view shows later changes, and callers that must not see them
            # copy.
            self._verified.add(stream)

    def copy(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy rows of tokens [begin, end) into a contiguous [end - begin, row_bytes]; verify the copy.

        Raises as `verify`.
        """
        row_bytes, flat = self._layout.row_bytes(stream), into.reshape(-1)
        for token, row_begin, row_end, run in self._parts(begin, end):
            at = (token - begin) * row_bytes
            target, segment = flat[at : at + (row_end - row_begin) * row_bytes], run.segment
            # Most parts are whole chunks that are right. The method treats all others.
            if row_begin or row_end < segment.token_count or not self._is_copied(segment, stream, target):
                self._copy(segment, stream, row_begin, row_end, target)

    def segments(self, begin: int, end: int) -> Iterator[PlacedSegment | None]:
        """Iterate over the runs of tokens [begin, end), in order: the segment of each, see PlacedSpan."""
        for _, _, _, run in self._parts(begin, end):
            # Only a whole chunk has a sum with which a copy can be compared.
            if (run.row_begin, run.row_end) == (0, run.segment.token_count):
                tokens = run.token_begin, run.token_begin + run.row_end
                yield PlacedSegment(run.segment.segment_id, *tokens, run.segment.checksums)
            else:
                yield None

    def look_again(self, stream: Stream, segment_id: int) -> None:
        """Compare a chunk where it lies: a copy of it differed. Raises as `verify`."""
        for segment in self._segments:
            if segment.segment_id == segment_id:
                self._match(segment, stream, self._sum)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, _Run]]:
        """The parts of runs that are tokens [begin, end): first token, rows, and the run."""
        # The run that holds `begin` begins at it or before it.
        first = bisect_right(self._runs, begin, key=_token_begin) - 1
        for run in self._runs[max(first, 0) :]:
            if run.token_begin >= end:
                break
            # Rows before and behind the requested tokens are cut off.
            row_begin = run.row_begin + max(begin - run.token_begin, 0)
            row_end = min(run.row_end, run.row_begin + end - run.token_begin)
            if row_begin < row_end:
                yield max(run.token_begin, begin), row_begin, row_end, run

    def _is_copied(self, segment: _Placed, stream: Stream, target: Bytes) -> bool:
        """Copy a whole chunk; whether the copy has the right checksum."""
        chunk = segment.chunks[stream]
        begin = segment.offset_bytes + chunk.offset_bytes
        rows = self._arena[begin : begin + target.size]
        return copied(target, rows, of_target=True) == segment.checksums[chunk.index]

    def _copy(self, segment: _Placed, stream: Stream, row_begin: int, row_end: int, target: Bytes) -> None:
        is_whole = (row_begin, row_end) == (0, segment.token_count)
        row_bytes = segment.chunks[stream].row_bytes
        # A part has no sum of its own: the whole chunk is copied, and the part taken from what was verified.
        place = target if is_whole else np.empty(segment.token_count * row_bytes, np.uint8)

        def copied_sum(segment: _Placed, stream: Stream) -> int:
            return copied(place, self._rows(segment, stream), of_target=True)

        self._match(segment, stream, copied_sum)
        if not is_whole:
            np.copyto(target, place[row_begin * row_bytes : row_end * row_bytes])

    def _match(self, segment: _Placed, stream: Stream, take: Callable[[_Placed, Stream], int]) -> None:
        """Compare a whole chunk's sum with its writer's, and once more after the server mended the chunk."""
        expected = segment.checksums[segment.chunks[stream].index]
        if take(segment, stream) == expected:
            return
        # A slot that was handed on to another segment differs too. That is no damage to the session.
        self._check()
        # The server verifies the segment itself, and mends what it finds: a reader is not believed.
        self._recheck()
        if take(segment, stream) != expected:
            self._check()
            problem = f"{stream} does not match its checksum"
            raise CorruptSegment(segment_id=segment.segment_id, problem=problem)

    def _sum(self, segment: _Placed, stream: Stream) -> int:
        return rows_checksum(self._rows(segment, stream).data)

    def _rows(self, segment: _Placed, stream: Stream) -> Bytes:
        chunk = segment.chunks[stream]
        begin = segment.offset_bytes + chunk.offset_bytes
        return self._arena[begin : begin + segment.token_count * chunk.row_bytes]


def _check_sums(segment: SegmentLocation, slot: SlotLayout, arena_bytes: int) -> None:
    """Raise CorruptSegment unless a segment's sums cover all of its rows in use, in the arena."""
    row_end = max([rows.row_end for rows in segment.rows], default=0)
    if len(segment.checksums) != len(slot.chunks) or segment.token_count < row_end:
        raise CorruptSegment(segment_id=segment.segment_id, problem="its checksums are not those of its rows")
    end = segment.offset_bytes + slot.end_bytes(segment.token_count)
    if segment.offset_bytes < 0 or end > arena_bytes or segment.token_count > slot.row_capacity:
        raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")


def identity_of(session: SessionInfo, segment: SegmentLocation) -> SegmentIdentity:
    """The identity that a segment's header is bound to. Raises CorruptSegment."""
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


def _token_begin(run: _Run) -> int:
    return run.token_begin


# Memory is not trusted: every copy is compared with its writer's sum, or gets one. Summing a run right after
# its copy costs a sixth of the copy, and half of it when the sum comes first.
def copied(target: Bytes, source: Bytes, *, of_target: bool = False) -> int:
    """Copy contiguous bytes, [n]; returns the XXH3-64 of those read, or, `of_target`, of those written."""
    if source.size <= RUN_BYTES:
        # The copy comes first: what it read from memory, and wrote, is in the cache when it is summed.
        np.copyto(target, source)
        return rows_checksum((target if of_target else source).data)
    hasher = xxh3_64()
    for begin in range(0, source.size, RUN_BYTES):
        run, place = source[begin : begin + RUN_BYTES], target[begin : begin + RUN_BYTES]
        np.copyto(place, run)
        hasher.update((place if of_target else run).data)
    return hasher.intdigest()
