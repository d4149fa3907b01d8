"""Blocks that a lease left on SSD, read from the server's files beside the server.

    file ──► this thread's own pages ──► verified there ──► copied to where they are wanted

Nothing but verified bytes is written to a caller's memory, and never for longer than a copy takes, whatever
the device does. Thread-safe. Worst case: a device that does not answer, which holds up the thread that reads.
"""

import threading

import numpy as np

from ctxcache.client.block_bytes import PartMemory, Writing
from ctxcache.client.ssd_files import SsdReader, aligned
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    HEADER_FIXED_BYTES,
    HEADER_STREAM_BYTES,
    align,
    decode_header,
    header_checksum,
)
from ctxcache.v1.block_pb2 import BlockLocation


class BlockFiles:
    """Reads of such blocks."""

    def __init__(self) -> None:
        self._pages = threading.local()
        """Of each thread that reads, as many as its largest block so far took."""

    def read(self, files: SsdReader, block: BlockLocation, into: list[PartMemory], writing: Writing) -> bool:
        """Copy a block's parts to memory of their sizes; False, and nothing is written, for bad ones."""
        parts = list(zip(block.offset_bytes, block.part_bytes, strict=True))
        # The header lies right before the parts, so that one read brings both.
        begin = parts[0][0] - align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(parts))
        end = align(sum(parts[-1]))
        pages = self._pages_of(end - begin)
        try:
            files.read(block.path_index, begin, pages)
            header = decode_header(pages)
        except (CorruptSegment, TierFailure):
            return False
        # An older copy of the block has a valid header too; only the recorded sum tells it from this one.
        if header_checksum(bytes(pages[:HEADER_FIXED_BYTES])) != block.header_checksum:
            return False
        seed, rows = header.identity.seed(), [pages[at - begin :][:size] for at, size in parts]
        for spec, checksum, data in zip(header.layout.specs, header.checksums, rows, strict=True):
            if chunk_checksum(seed, spec.stream, data) != checksum:
                return False
        with writing():
            for place, data in zip(into, rows, strict=True):
                place.copy_out(np.frombuffer(data, np.uint8), is_summed=False)
        return True

    def _pages_of(self, size_bytes: int) -> memoryview:
        held: memoryview | None = getattr(self._pages, "memory", None)
        if held is None or held.nbytes < size_bytes:
            held = self._pages.memory = aligned(size_bytes)
        return held[:size_bytes]
