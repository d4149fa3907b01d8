"""Segment I/O: one segment from the arena to SSD and back, checksums made and verified on the way.

Knows tiers and the format; knows no session, no free space and no policy. Checksums are computed in threads,
XXH3 releases the GIL: those of a read in the tier's own, piece by piece as the bytes arrive. Only the pages
with rows of a short segment are moved. Worst case: one segment's checksums, 1 ms per 8 MiB, behind the writes
of others.
"""

import asyncio
import mmap
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctxcache.core.ledger.ledger import Flushed
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.checksums import (
    Sums,
    bound_checksum,
    bound_checksums,
    covers,
    difference,
    rows_checksum,
    settled,
)
from ctxcache.format.layout import (
    ALIGN_BYTES,
    SegmentHeader,
    SegmentLayout,
    Slot,
    align,
    decode_header,
    header_checksum,
)
from ctxcache.format.streams import Stream
from ctxcache.runtime.threads import started_pool
from ctxcache.storage.tiers.base import MappedTier, Range, Tier, TierRefusal

# A slot, and how it is moved. Ranges are cut between chunks, and each is at most one piece, so that a
# thread's checksum never needs bytes that another thread reads:
#
#     | header | chunk 0 |pad| chunk 1 |pad| chunk 2 ............ |pad| ...
#     |<------- piece ------------------>|<------ piece -------->|
PIECE_BYTES = 1 << 20
"""Whole chunks up to this size, or one larger chunk, are moved by one device operation."""
GAP_BYTES = 16 << 10
"""Up to this many bytes without rows are moved along: one more operation costs a device more than they do."""
SEALING_THREADS = 2


@dataclass(slots=True, eq=False)
class Written:
    """A segment's first `row_count` rows on their way to an SSD slot."""

    segment: Segment
    slot: Slot
    row_count: int
    copy: Slot | None = None
    """The slot on another path that gets the same bytes."""
    known: tuple[Sums, ...] = ()
    """The writers' checksums of the rows."""
    values: tuple[int, ...] = ()
    header_checksum: int = 0

    @property
    def flushed(self) -> Flushed:
        """The event for the ledger, once the rows are written."""
        return Flushed(self.segment, self.slot, self.row_count, self.header_checksum, self.values, self.copy)

    @property
    def places(self) -> tuple[Slot, ...]:
        """All its slots."""
        return (self.slot,) if self.copy is None else (self.slot, self.copy)


# Which thread does what to one segment:
#
#     event loop      looks at the segment, takes views, changes the ledger
#     segment-seal    sums, headers, copies of short segments; two threads
#     tier's own      reads and writes; sums of what arrives, in the thread that read it
#
# The views cross between them. The hold that the caller has keeps the slots as they are meanwhile.
class SegmentIO:
    """Moves segments' bytes. A segment must be held while one of these runs."""

    def __init__(self, arena: MappedTier, ssd: Tier) -> None:
        self._arena = arena
        self._ssd = ssd
        # The pool is for flushes alone: work in asyncio's shared threads must not delay them.
        self._sealers = started_pool(SEALING_THREADS, "segment-seal")

    def close(self) -> None:
        """End the threads. Nothing may be in flight."""
        self._sealers.shutdown()

    @property
    def refusals(self) -> Mapping[int, TierRefusal]:
        """SSD paths that take no writes now, each with why."""
        return self._ssd.refusals

    @property
    def closed_paths(self) -> Collection[int]:
        """SSD paths that take no writes now."""
        return self._ssd.refusals.keys()

    @property
    def has_open_path(self) -> bool:
        """Whether an SSD path takes writes."""
        return len(self.refusals) < len(self._ssd.paths)

    def check_any_path(self) -> None:
        """Raise TierFailure when no SSD path takes writes."""
        if not self.has_open_path:
            refusals = self.refusals
            path, problem = next((self._ssd.paths[i], refusals[i]) for i in refusals)
            raise TierFailure(path=path, problem=f"no SSD path takes writes: {problem}")

    def is_path_closed(self, failure: TierFailure) -> bool:
        """Whether the failure is that of an SSD path that takes no more writes."""
        return failure.facts.get("path") in {self._ssd.paths[i] for i in self.refusals}

    def view(self, segment: Segment) -> memoryview:
        """The bytes of a segment that is in DRAM."""
        if segment.memory is None:
            raise RuntimeError(f"segment {segment.segment_id} is not in DRAM")
        return self._arena.view(segment.memory)

    async def write(self, item: Written) -> TierFailure | None:
        """Write a segment with its header to the slot, and to the copy's; not durable before `sync`.

        Returns why the copy was not written. Raises CorruptSegment when its rows are not what their writers
        said, TierFailure.
        """
        view = self.view(item.segment)
        item.known = sums_of(item.segment, item.row_count)
        image = await asyncio.get_running_loop().run_in_executor(self._sealers, _seal, item, view)
        pieces = _pieces(item.segment.layout, item.row_count)
        if item.copy is None:
            await self._ssd.write(item.slot, 0, image, pieces=pieces)
            return None
        # Both writes run to their ends: no slot is given back while a device writes to it.
        first, second = await asyncio.gather(
            *(self._ssd.write(slot, 0, image, pieces=pieces) for slot in item.places), return_exceptions=True
        )
        # The first slot decides: without it nothing is recorded. The second write may fail alone.
        if first is not None:
            raise first
        if second is not None and not isinstance(second, TierFailure):
            raise second
        return second

    async def copy(self, segment: Segment, source: Slot, *, target: Slot) -> None:
        """Copy what is below of a segment to another slot, verified on the way; not durable before `sync`.

        Raises as `check`.
        """
        # The image has memory of its own: rows in the arena may be newer than those below.
        image = memoryview(mmap.mmap(-1, segment.layout.size_bytes))
        row_count = segment.durable_row_count
        await self.check(segment, source, image)
        await self._ssd.write(target, 0, image, pieces=_pieces(segment.layout, row_count))

    async def join(self, parts: Sequence[Segment], whole: Segment) -> str:
        """Copy the rows of full segments in DRAM, one behind the other, into the slot of one that has none.

        The damage found, empty if there is none.
        """
        # Parts are full segments that are below: each has one sum per stream, and its rows never change.
        sources = [(part.layout, self.view(part), part.settled.values) for part in parts]
        loop = asyncio.get_running_loop()
        values, problem = await loop.run_in_executor(
            self._sealers, _joined, whole.layout, self.view(whole), sources
        )
        if not problem:
            whole.note(Sums(0, whole.layout.segment_tokens, values))
        return problem

    async def sync(self, path_indexes: Collection[int]) -> None:
        """Make writes to these paths durable. Raises TierFailure."""
        await self._ssd.sync(path_indexes)

    async def read(self, segment: Segment, place: Slot, slot: Slot) -> tuple[int, ...]:
        """Fill a DRAM slot from one of a segment's on SSD; returns one checksum of rows per stream, verified.

        Raises CorruptSegment when the bytes are not those of this segment, TierFailure.
        """
        return await self.check(segment, place, self._arena.view(slot))

    async def settle(self, segment: Segment) -> str:
        """Make one sum per stream of all committed rows of a segment in DRAM.

        The damage found, empty if there is none.
        """
        # The row count is taken once: rows that are committed while the sums are made are not among them.
        view, row_count = self.view(segment), segment.row_count
        known = sums_of(segment, row_count)
        loop = asyncio.get_running_loop()
        values, problem = await loop.run_in_executor(
            self._sealers, settled, segment.layout, view, known, row_count
        )
        if not problem:
            segment.settle(row_count, values)
        return problem

    async def verify(self, segment: Segment) -> str:
        """Verify the committed rows of a segment in DRAM; what is wrong with them, empty if nothing is."""
        view, known = self.view(segment), sums_of(segment, segment.row_count)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._sealers, difference, segment.layout, view, known)

    async def restore_rows(self, segment: Segment, image: memoryview, row_count: int) -> None:
        """Put a slot's first rows in the place of those that DRAM has. Others may read these meanwhile."""
        view = self.view(segment)
        await asyncio.get_running_loop().run_in_executor(
            self._sealers, _copy_rows, segment.layout, row_count, image, view
        )

    async def check(self, segment: Segment, place: Slot, bounce: memoryview) -> tuple[int, ...]:
        """Read what a slot on SSD has of a segment into `bounce` (page-aligned, a slot's size); verify it.

        Returns one checksum of rows per stream. Raises CorruptSegment, TierFailure.
        """
        arrival = _Arrival(segment, bounce[: segment.layout.size_bytes])
        pieces = _pieces(segment.layout, segment.durable_row_count)
        await self._ssd.read(place, 0, arrival.view, pieces=pieces, then=arrival.take)
        return arrival.verified()

    async def keeps_bytes(self, slot: Slot) -> bool:
        """Whether a slot that nobody uses gives back what is written to it. Raises TierFailure."""
        # The bytes are random: a device that returns zeros, or what was there before, does not pass.
        written, read_back = (memoryview(mmap.mmap(-1, slot.size_bytes)) for _ in range(2))
        written[:] = os.urandom(slot.size_bytes)
        await self._ssd.write(slot, 0, written)
        await self._ssd.sync({slot.path_index})
        await self._ssd.read(slot, 0, read_back)
        return written == read_back

    @property
    def arena_path(self) -> str:
        """The arena's path."""
        return self._arena.paths[0]

    def path_of(self, slot: Slot) -> str:
        """The file that an SSD slot is in."""
        return self._ssd.paths[slot.path_index]

    async def read_chunk(
        self, segment: Segment, slot: Slot, stream: Stream, wanted: tuple[int, int], bounce: memoryview
    ) -> tuple[memoryview, int]:
        """Rows `[begin, end)` of one stream from a slot on SSD, and their checksum; the chunk is verified.

        They lie in `bounce` (page-aligned, a slot's size). For readers of what does not fit into DRAM. Raises
        CorruptSegment, TierFailure.
        """
        layout = segment.layout
        # The header is read once, and then known: a reader past memory reads one chunk, not a header and a
        # chunk.
        if not segment.bound_checksums:
            head = bounce[: layout.header_bytes]
            await self._ssd.read(slot, 0, head)
            segment.bound_checksums = _checked_header(segment, head).checksums
        row_count, row_bytes = segment.durable_row_count, layout.row_bytes(stream)
        rows = layout.rows(stream, 0, row_count)
        # Direct reads move whole pages.
        chunk = bounce[: align(rows.stop - rows.start)]
        await self._ssd.read(slot, rows.start, chunk)
        part = chunk[wanted[0] * row_bytes : wanted[1] * row_bytes]
        loop = asyncio.get_running_loop()
        checksum, whole = await loop.run_in_executor(
            self._sealers, _sums_of_part, part, chunk[: rows.stop - rows.start]
        )
        # The checksum is bound to the segment's identity: a right chunk of another segment or generation is
        # refused.
        seed = segment.identity(row_count).seed()
        if bound_checksum(seed, stream, whole) != segment.bound_checksums[layout.index[stream]]:
            raise CorruptSegment(segment_id=segment.segment_id, problem=f"{stream}: checksum does not match")
        return part, checksum


def _sums_of_part(part: memoryview, whole: memoryview) -> tuple[int, int]:
    """Checksums of a part, and then of the whole, so that a change in between is found by the second."""
    checksum = rows_checksum(part)
    return checksum, checksum if len(part) == len(whole) else rows_checksum(whole)


def sums_of(segment: Segment, row_count: int) -> tuple[Sums, ...]:
    """The known checksums of a segment's first rows, and of the rows behind them.

    Raises CorruptSegment for a gap.
    """
    known = tuple(segment.sums)
    # Sums behind the rows asked for are of rows that were marked and are not committed.
    if len(known) > 1:
        known = tuple(sums for sums in known if sums.row_begin < row_count)
    if not covers(known, row_count):
        raise CorruptSegment(
            segment_id=segment.segment_id, problem="its writers did not say what its rows are"
        )
    return known


class _Arrival:
    """A segment coming from SSD: chunks' checksums as they arrive, in the threads that read them."""

    def __init__(self, segment: Segment, view: memoryview) -> None:
        self.view = view
        self._segment = segment
        self._row_count = segment.durable_row_count
        self._values = [0] * len(segment.layout.specs)

    def take(self, begin: int, end: int) -> None:
        """Bytes `[begin, end)` of the slot are there: whole chunks. No two calls share a chunk."""
        layout = self._segment.layout
        offsets = layout.offsets
        for i in range(bisect_left(offsets, begin), bisect_left(offsets, end)):
            spec = layout.specs[i]
            rows = self.view[offsets[i] : offsets[i] + spec.row_bytes * self._row_count]
            # Each thread writes the values of its own chunks, so that no lock is needed.
            self._values[i] = rows_checksum(rows)

    def verified(self) -> tuple[int, ...]:
        """One checksum of rows per stream, when all is here. Raises CorruptSegment."""
        segment, values = self._segment, tuple(self._values)
        # Usually one comparison is enough: these bytes' header is the one read, and the one recorded. Only
        # where they differ it is found out what is wrong.
        actual = _bound(segment, self._row_count, values)
        expected = _encoded(segment, self._row_count, actual)
        if header_checksum(expected) == segment.header_checksum and self.view[: len(expected)] == expected:
            return values
        header = _checked_header(segment, self.view[: segment.layout.header_bytes])
        for spec, wanted, found in zip(segment.layout.specs, header.checksums, actual, strict=True):
            if wanted != found:
                problem = f"{spec.stream}: checksum does not match"
                raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
        return values


def _pieces(layout: SegmentLayout, row_count: int) -> list[Range]:
    """The ranges of a slot that hold the header or the first `row_count` rows, cut between chunks."""
    pieces = [(0, layout.header_bytes)]
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        begin, last = pieces[-1]
        # A short segment is moved by its pages: reading 40 of 64 rows moves 40 rows.
        end = offset + align(spec.row_bytes * row_count)
        if end - begin <= PIECE_BYTES and offset - last <= GAP_BYTES:
            pieces[-1] = (begin, end)
        else:
            pieces.append((offset, end))
    return pieces


def _seal(item: Written, view: memoryview) -> memoryview:
    """The slot as it is to be written: header, rows, and zeros in the rest of their pages.

    The rest of the arena's slot holds another session's past, or a writer's rows to come. Only a
    segment that is still short is copied to leave it out, and of the copy only what is copied takes memory.
    Raises CorruptSegment: what changed since it was received is never made durable as right.
    """
    segment, layout = item.segment, item.segment.layout
    item.values, problem = settled(layout, view, item.known, item.row_count)
    if problem:
        raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
    encoded = _encoded(segment, item.row_count, _bound(segment, item.row_count, item.values))
    item.header_checksum = header_checksum(encoded)
    # A full segment goes out as it lies: no writer has room in it any more.
    image = view if item.row_count == layout.segment_tokens else _copy_of_rows(layout, item.row_count, view)
    # Zeros behind the header: the page would have what another session left in the arena.
    image[: layout.header_bytes] = encoded.ljust(layout.header_bytes, b"\0")
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        end = offset + spec.row_bytes * item.row_count
        # The rest of each chunk's last page is zeroed, in full segments too: rows seldom fill a page.
        if end % ALIGN_BYTES:
            image[end : align(end)] = bytes(align(end) - end)
    return image


def _copy_of_rows(layout: SegmentLayout, row_count: int, view: memoryview) -> memoryview:
    image = memoryview(mmap.mmap(-1, layout.size_bytes))
    _copy_rows(layout, row_count, view, image)
    return image


def _copy_rows(layout: SegmentLayout, row_count: int, source: memoryview, target: memoryview) -> None:
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        rows = slice(offset, offset + spec.row_bytes * row_count)
        np.copyto(np.frombuffer(target[rows], np.uint8), np.frombuffer(source[rows], np.uint8))


def _joined(
    layout: SegmentLayout,
    target: memoryview,
    sources: Sequence[tuple[SegmentLayout, memoryview, tuple[int, ...]]],
) -> tuple[tuple[int, ...], str]:
    """One checksum per stream of the sources' rows in the target, and which are not what their sums say."""
    values: list[int] = []
    for i, (offset, spec) in enumerate(zip(layout.offsets, layout.specs, strict=True)):
        end = offset
        for part, view, sums in sources:
            size_bytes = spec.row_bytes * part.segment_tokens
            rows, end = target[end : end + size_bytes], end + size_bytes
            source = view[part.offsets[i] : part.offsets[i] + size_bytes]
            # The rows are copied first and verified then: the copy is what will be written.
            np.copyto(np.frombuffer(rows, np.uint8), np.frombuffer(source, np.uint8))
            if rows_checksum(rows) != sums[i]:
                return (), f"{spec.stream}: checksum does not match"
        values.append(rows_checksum(target[offset:end]))
    return tuple(values), ""


def _bound(segment: Segment, row_count: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """The checksums that a header has of each chunk, for a segment's first rows."""
    return bound_checksums(segment.identity(row_count).seed(), segment.layout, values)


def _encoded(segment: Segment, row_count: int, checksums: tuple[int, ...]) -> bytes:
    identity = segment.identity(row_count)
    return SegmentHeader(segment.segment_id, identity, segment.layout, checksums).encode()


def _checked_header(segment: Segment, data: memoryview) -> SegmentHeader:
    try:
        header = decode_header(data)
    except CorruptSegment as error:
        # Damaged bytes may name any segment. The segment at fault is the one asked for.
        raise CorruptSegment(segment_id=segment.segment_id, problem=error.facts["problem"]) from error
    # Two copies of one segment with other rows are both whole. Only the record says which one is meant.
    if header_checksum(bytes(data)) != segment.header_checksum:
        problem = "its header is not the one recorded"
    elif header.segment_id != segment.segment_id or header.identity != segment.identity(
        segment.durable_row_count
    ):
        problem = "its header names another segment"
    elif header.layout != segment.layout:
        problem = "its header has another layout"
    else:
        return header
    raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
