"""Scanning: what segments an SSD file holds, found without metadata.

The file is read once, in order, holes left out. A segment may begin at every 4 KiB. The scan knows no session
and no record. Worst case: bytes that are no segment, which are passed over.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxcache.errors import CorruptSegment
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    ALIGN_BYTES,
    HEADER_FIXED_BYTES,
    HEADER_STREAM_BYTES,
    MAGIC,
    SegmentHeader,
    decode_header,
    header_checksum,
)

# Blocks are eight megabytes. The first eight bytes of each page are compared, as one vector.
BLOCK_BYTES = 8 << 20
_STREAM_COUNT_OFFSET = 96
_MAGIC_WORD = int.from_bytes(MAGIC, "little")
_WORDS_PER_PAGE = ALIGN_BYTES // 8


@dataclass(frozen=True, slots=True)
class ScannedSegment:
    """A segment with a whole header. Its chunks are not verified yet."""

    offset_bytes: int
    header: SegmentHeader
    header_checksum: int


def scan(path: Path) -> Iterator[ScannedSegment]:
    """Every whole header of a file, ascending. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = memoryview(bytearray(BLOCK_BYTES))
        # Holes were never written: a large file that is nearly empty is scanned in seconds.
        for begin, end in _extents(fd):
            for offset in range(begin, end, BLOCK_BYTES):
                count = os.preadv(fd, [block[: min(BLOCK_BYTES, end - offset)]], offset)
                yield from _headers(fd, offset, block[: count // 8 * 8])
    finally:
        os.close(fd)


def header_at(path: Path, offset_bytes: int) -> ScannedSegment | None:
    """The segment at that offset; None when none begins there, or there is no file. Raises OSError."""
    try:
        with path.open("rb", buffering=0) as file:
            return _header(file.fileno(), offset_bytes)
    except FileNotFoundError:
        return None


def is_whole(path: Path, segment: ScannedSegment) -> bool:
    """Whether every chunk of a found segment is what its header says. Raises OSError."""
    layout, identity = segment.header.layout, segment.header.identity
    with path.open("rb", buffering=0) as file:
        data = memoryview(os.pread(file.fileno(), layout.size_bytes, segment.offset_bytes))
    seed = identity.seed()
    return all(
        chunk_checksum(seed, spec.stream, data[offset : offset + spec.row_bytes * identity.token_count])
        == checksum
        for spec, offset, checksum in zip(layout.specs, layout.offsets, segment.header.checksums, strict=True)
    )


def _extents(fd: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that were ever written, page-aligned."""
    size_bytes, offset = os.fstat(fd).st_size, 0
    while offset < size_bytes:
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            # Only holes are left.
            return
        offset = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin // ALIGN_BYTES * ALIGN_BYTES, offset


def _headers(fd: int, offset: int, block: memoryview) -> Iterator[ScannedSegment]:
    # One word of each page.
    words = np.frombuffer(block, "<u8")[::_WORDS_PER_PAGE]
    for page in np.flatnonzero(words == _MAGIC_WORD):
        if found := _header(fd, offset + int(page) * ALIGN_BYTES):
            yield found


def _header(fd: int, begin: int) -> ScannedSegment | None:
    fixed = os.pread(fd, HEADER_FIXED_BYTES, begin)
    # The count is bounded before the checksum is known: a damaged one must not ask for gigabytes.
    stream_count = int.from_bytes(fixed[_STREAM_COUNT_OFFSET : _STREAM_COUNT_OFFSET + 4], "little")
    raw = os.pread(fd, HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * min(stream_count, 1 << 16), begin)
    try:
        return ScannedSegment(begin, decode_header(raw), header_checksum(raw))
    except CorruptSegment:
        return None
