"""Segment I/O: one segment from the arena to SSD and back, checksums made and verified on the way.

Knows tiers and the format; knows no session, no free space and no policy. Checksums are computed
in a thread: XXH3 releases the GIL.
"""

import asyncio
import mmap
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ctxcache.core.segment import Segment
from ctxcache.errors import CorruptSegment
from ctxcache.format.header import SegmentHeader, decode_header, header_checksum
from ctxcache.format.identity import chunk_checksum
from ctxcache.format.layout import align
from ctxcache.format.slot import Slot
from ctxcache.format.streams import Stream
from ctxcache.tiers.base import MappedTier, Tier


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
        segment.ssd, segment.ssd_row_count = self.slot, self.row_count
        segment.checksums, segment.header_checksum = self.checksums, self.header_checksum


class SegmentIO:
    """Moves segments' bytes. A segment must be held while one of these runs."""

    def __init__(self, arena: MappedTier, ssd: Tier) -> None:
        self._arena = arena
        self._ssd = ssd

    def view(self, segment: Segment) -> memoryview:
        """The bytes of a segment that is in DRAM."""
        if segment.dram is None:
            raise RuntimeError(f"segment {segment.segment_id} is not in DRAM")
        return self._arena.view(segment.dram)

    async def write(self, item: Written) -> None:
        """Write a segment with its header to the slot; not durable before `sync`. Raises TierFailure."""
        image = await asyncio.to_thread(_seal, item, self.view(item.segment))
        await self._ssd.write(item.slot, 0, image)

    async def sync(self, path_indexes: Collection[int]) -> None:
        """Make writes to these paths durable. Raises TierFailure."""
        await self._ssd.sync(path_indexes)

    async def read(self, segment: Segment, slot: Slot) -> tuple[int, ...]:
        """Fill a DRAM slot from SSD; returns the chunks' checksums, verified.

        Raises CorruptSegment when the bytes are not those of this segment, TierFailure.
        """
        view = self._arena.view(slot)
        await self._ssd.read(_on_ssd(segment), 0, view)
        return await asyncio.to_thread(_verify, segment, view)

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
        if (
            await asyncio.to_thread(chunk_checksum, seed, stream, data)
            != segment.checksums[layout.index[stream]]
        ):
            raise CorruptSegment(segment_id=segment.segment_id, problem=f"{stream}: checksum does not match")
        return data


def _on_ssd(segment: Segment) -> Slot:
    if segment.ssd is None:
        raise CorruptSegment(segment_id=segment.segment_id, problem="neither in DRAM nor on SSD")
    return segment.ssd


def _seal(item: Written, view: memoryview) -> memoryview:
    """The slot as it is to be written: header, rows, and zeros wherever there are none.

    What else lies in the arena's slot is another session's past, or a writer's rows to come. Only a
    segment that is still short is copied to leave it out.
    """
    segment, layout = item.segment, item.segment.layout
    item.checksums = _checksums(segment, item.row_count, view)
    identity = segment.identity(item.row_count)
    encoded = SegmentHeader(segment.segment_id, identity, layout, item.checksums).encode()
    item.header_checksum = header_checksum(encoded)
    image = view if item.row_count == layout.segment_tokens else _copy_of_rows(segment, item.row_count, view)
    image[: layout.header_bytes] = encoded.ljust(layout.header_bytes, b"\0")
    for spec, end in zip(layout.specs, (*layout.offsets[1:], layout.size_bytes), strict=True):
        begin = layout.rows(spec.stream, 0, layout.segment_tokens).stop
        image[begin:end] = bytes(end - begin)
    return image


def _copy_of_rows(segment: Segment, row_count: int, view: memoryview) -> memoryview:
    image = memoryview(mmap.mmap(-1, segment.layout.size_bytes))
    for spec in segment.layout.specs:
        rows = segment.layout.rows(spec.stream, 0, row_count)
        np.copyto(np.frombuffer(image[rows], np.uint8), np.frombuffer(view[rows], np.uint8))
    return image


def _checksums(segment: Segment, row_count: int, view: memoryview) -> tuple[int, ...]:
    seed = segment.identity(row_count).seed()
    streams = (spec.stream for spec in segment.layout.specs)
    return tuple(chunk_checksum(seed, s, view[segment.layout.rows(s, 0, row_count)]) for s in streams)


def _verify(segment: Segment, view: memoryview) -> tuple[int, ...]:
    header = _checked_header(segment, view[: segment.layout.header_bytes])
    actual = _checksums(segment, segment.ssd_row_count, view)
    for spec, expected, found in zip(segment.layout.specs, header.checksums, actual, strict=True):
        if expected != found:
            problem = f"{spec.stream}: checksum does not match"
            raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
    return header.checksums


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
