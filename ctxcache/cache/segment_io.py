"""Segment I/O: one segment from the arena to SSD and back, checksums made and verified on the way.

Knows tiers and the format; knows no session, no free space and no policy. Checksums are computed in
threads, XXH3 releases the GIL: those of a read in the tier's own, piece by piece as the bytes arrive.
Of a segment that is short only pages with rows are moved. Worst case: one segment's checksums, 1 ms
per 8 MiB, behind the writes of others.
"""

import asyncio
import mmap
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from ctxcache.core.segment import Segment
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.header import SegmentHeader, decode_header, header_checksum
from ctxcache.format.identity import chunk_checksum
from ctxcache.format.layout import ALIGN_BYTES, SegmentLayout, align
from ctxcache.format.slot import Slot
from ctxcache.format.streams import Stream
from ctxcache.pools import started_pool
from ctxcache.tiers.base import MappedTier, Range, Refusal, Tier

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
    checksums: tuple[int, ...] = ()
    header_checksum: int = 0

    def adopt(self) -> None:
        """Make the slot the segment's place on SSD."""
        segment = self.segment
        segment.stage(-self.slot.size_bytes)
        segment.ssd, segment.ssd_row_count = self.slot, self.row_count
        segment.checksums, segment.header_checksum = self.checksums, self.header_checksum


class SegmentIO:
    """Moves segments' bytes. A segment must be held while one of these runs."""

    def __init__(self, arena: MappedTier, ssd: Tier) -> None:
        self._arena = arena
        self._ssd = ssd
        # Ours alone: what else runs in asyncio's shared threads must not delay a flush.
        self._sealers = started_pool(SEALING_THREADS, "segment-seal")

    def close(self) -> None:
        """End the threads. Nothing may be in flight."""
        self._sealers.shutdown()

    @property
    def refusals(self) -> Mapping[int, Refusal]:
        """SSD paths that take no writes now, each with why."""
        return self._ssd.refusals

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
        if segment.dram is None:
            raise RuntimeError(f"segment {segment.segment_id} is not in DRAM")
        return self._arena.view(segment.dram)

    async def write(self, item: Written) -> None:
        """Write a segment with its header to the slot; not durable before `sync`. Raises TierFailure."""
        view = self.view(item.segment)
        image = await asyncio.get_running_loop().run_in_executor(self._sealers, _seal, item, view)
        await self._ssd.write(item.slot, 0, image, pieces=_pieces(item.segment.layout, item.row_count))

    async def sync(self, path_indexes: Collection[int]) -> None:
        """Make writes to these paths durable. Raises TierFailure."""
        await self._ssd.sync(path_indexes)

    async def read(self, segment: Segment, slot: Slot) -> tuple[int, ...]:
        """Fill a DRAM slot from SSD; returns the chunks' checksums, verified.

        Raises CorruptSegment when the bytes are not those of this segment, TierFailure.
        """
        arrival = _Arrival(segment, self._arena.view(slot))
        pieces = _pieces(segment.layout, segment.ssd_row_count)
        await self._ssd.read(_on_ssd(segment), 0, arrival.view, pieces=pieces, then=arrival.take)
        return arrival.verified()

    async def check(self, segment: Segment, bounce: memoryview) -> None:
        """Read what SSD has of a segment into `bounce` (page-aligned, a slot's size) and verify all of it.

        Raises CorruptSegment, TierFailure.
        """
        arrival = _Arrival(segment, bounce[: segment.layout.size_bytes])
        pieces = _pieces(segment.layout, segment.ssd_row_count)
        await self._ssd.read(_on_ssd(segment), 0, arrival.view, pieces=pieces, then=arrival.take)
        arrival.verified()

    async def keeps_bytes(self, slot: Slot) -> bool:
        """Whether a slot that nobody uses gives back what is written to it. Raises TierFailure."""
        written, found = (memoryview(mmap.mmap(-1, slot.size_bytes)) for _ in range(2))
        written[:] = os.urandom(slot.size_bytes)
        await self._ssd.write(slot, 0, written)
        await self._ssd.sync({slot.path_index})
        await self._ssd.read(slot, 0, found)
        return written == found

    def path_of(self, slot: Slot) -> str:
        """The file that an SSD slot is in."""
        return self._ssd.paths[slot.path_index]

    async def read_chunk(self, segment: Segment, stream: Stream, bounce: memoryview) -> memoryview:
        """One stream's rows straight from SSD into `bounce` (page-aligned, a slot's size), verified.

        For readers of what does not fit into DRAM. Raises CorruptSegment, TierFailure.
        """
        layout, slot = segment.layout, _on_ssd(segment)
        if not segment.checksums:
            head = bounce[: layout.header_bytes]
            await self._ssd.read(slot, 0, head)
            segment.checksums = _checked_header(segment, head).checksums
        rows = layout.rows(stream, 0, segment.ssd_row_count)
        chunk = bounce[: align(rows.stop - rows.start)]
        await self._ssd.read(slot, rows.start, chunk)
        data = chunk[: rows.stop - rows.start]
        seed = segment.identity(segment.ssd_row_count).seed()
        loop = asyncio.get_running_loop()
        checksum = await loop.run_in_executor(self._sealers, chunk_checksum, seed, stream, data)
        if checksum != segment.checksums[layout.index[stream]]:
            raise CorruptSegment(segment_id=segment.segment_id, problem=f"{stream}: checksum does not match")
        return data


def _on_ssd(segment: Segment) -> Slot:
    if segment.ssd is None:
        raise CorruptSegment(segment_id=segment.segment_id, problem="neither in DRAM nor on SSD")
    return segment.ssd


class _Arrival:
    """A segment coming from SSD: chunks' checksums as they arrive, in the threads that read them."""

    def __init__(self, segment: Segment, view: memoryview) -> None:
        self.view = view
        self._segment = segment
        self._seed = segment.identity(segment.ssd_row_count).seed()
        self._checksums = [0] * len(segment.layout.specs)

    def take(self, begin: int, end: int) -> None:
        """Bytes `[begin, end)` of the slot are there: whole chunks. No two calls share a chunk."""
        layout, row_count = self._segment.layout, self._segment.ssd_row_count
        offsets = layout.offsets
        for i in range(bisect_left(offsets, begin), bisect_left(offsets, end)):
            spec = layout.specs[i]
            rows = self.view[offsets[i] : offsets[i] + spec.row_bytes * row_count]
            self._checksums[i] = chunk_checksum(self._seed, spec.stream, rows)

    def verified(self) -> tuple[int, ...]:
        """The chunks' checksums, when all is here. Raises CorruptSegment."""
        segment, actual = self._segment, tuple(self._checksums)
        expected = _encoded(segment, segment.ssd_row_count, actual)
        if header_checksum(expected) == segment.header_checksum and self.view[: len(expected)] == expected:
            return actual
        header = _checked_header(segment, self.view[: segment.layout.header_bytes])
        for spec, wanted, found in zip(segment.layout.specs, header.checksums, actual, strict=True):
            if wanted != found:
                problem = f"{spec.stream}: checksum does not match"
                raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
        return actual


def _pieces(layout: SegmentLayout, row_count: int) -> list[Range]:
    """The ranges of a slot that hold the header or the first `row_count` rows, cut between chunks."""
    pieces = [(0, layout.header_bytes)]
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        begin, last = pieces[-1]
        end = offset + align(spec.row_bytes * row_count)
        if end - begin <= PIECE_BYTES and offset - last <= GAP_BYTES:
            pieces[-1] = (begin, end)
        else:
            pieces.append((offset, end))
    return pieces


def _seal(item: Written, view: memoryview) -> memoryview:
    """The slot as it is to be written: header, rows, and zeros in the rest of their pages.

    What else lies in the arena's slot is another session's past, or a writer's rows to come. Only a
    segment that is still short is copied to leave it out, and of the copy only what is copied takes memory.
    """
    segment, layout = item.segment, item.segment.layout
    seed = segment.identity(item.row_count).seed()
    item.checksums = tuple(
        chunk_checksum(seed, spec.stream, view[offset : offset + spec.row_bytes * item.row_count])
        for offset, spec in zip(layout.offsets, layout.specs, strict=True)
    )
    encoded = _encoded(segment, item.row_count, item.checksums)
    item.header_checksum = header_checksum(encoded)
    image = view if item.row_count == layout.segment_tokens else _copy_of_rows(layout, item.row_count, view)
    image[: layout.header_bytes] = encoded.ljust(layout.header_bytes, b"\0")
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        end = offset + spec.row_bytes * item.row_count
        if end % ALIGN_BYTES:
            image[end : align(end)] = bytes(align(end) - end)
    return image


def _copy_of_rows(layout: SegmentLayout, row_count: int, view: memoryview) -> memoryview:
    image = memoryview(mmap.mmap(-1, layout.size_bytes))
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        rows = slice(offset, offset + spec.row_bytes * row_count)
        np.copyto(np.frombuffer(image[rows], np.uint8), np.frombuffer(view[rows], np.uint8))
    return image


def _encoded(segment: Segment, row_count: int, checksums: tuple[int, ...]) -> bytes:
    identity = segment.identity(row_count)
    return SegmentHeader(segment.segment_id, identity, segment.layout, checksums).encode()


def _checked_header(segment: Segment, data: memoryview) -> SegmentHeader:
    try:
        header = decode_header(data)
    except CorruptSegment as error:
        # What damaged bytes say of themselves names anybody: the one at fault is the one asked for.
        raise CorruptSegment(segment_id=segment.segment_id, problem=error.facts["problem"]) from error
    if header_checksum(bytes(data)) != segment.header_checksum:
        problem = "its header is not the one recorded"
    elif header.segment_id != segment.segment_id or header.identity != segment.identity(
        segment.ssd_row_count
    ):
        problem = "its header names another segment"
    elif header.layout != segment.layout:
        problem = "its header has another layout"
    else:
        return header
    raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
