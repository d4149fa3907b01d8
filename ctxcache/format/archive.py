"""The archive that a backup is: frames, each bound to all before it. docs/backup_format.md has the bytes.

Knows no record and no segment but a segment's image. Worst case: bytes that are not those that were written,
which is a FileDamaged that says where.
"""

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from ctxcache.errors import FileDamaged, FormatTooNew
from ctxcache.format.layout import SegmentLayout

MAGIC, ARCHIVE_VERSION = b"CTXCBAK\0", 1
FRAME_BYTES = 1 << 20
"""Rows that one frame takes; a record may be longer."""
FRAME_LIMIT_BYTES = 64 << 20
_PREAMBLE = struct.Struct("<8sII")
_HEAD = struct.Struct("<II")
_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct("<H")


class Kind(enum.IntEnum):
    """What a frame holds. Numbers are never given to another meaning."""

    FACTS = 1
    MODEL = 2
    SEGMENT = 3
    ROWS = 4
    SESSION = 5
    END = 6


class Frame(NamedTuple):
    """One frame, and where in the file it begins."""

    kind: Kind
    offset: int
    payload: bytes


class FrameMaker:
    """Makes an archive's bytes, in order."""

    def __init__(self) -> None:
        self.preamble = _PREAMBLE.pack(MAGIC, ARCHIVE_VERSION, 0)
        self._seed = xxh3_64_intdigest(self.preamble)

    def frame(self, kind: Kind, parts: Sequence[bytes | memoryview]) -> bytes:
        """The next frame; its payload is the parts behind one another."""
        head = _HEAD.pack(kind, sum(map(len, parts)))
        hasher = xxh3_64(head, seed=self._seed)
        for part in parts:
            hasher.update(part)
        self._seed = hasher.intdigest()
        return b"".join((head, *parts, _CHECKSUM.pack(self._seed)))


def read_frames(file: BinaryIO, name: str) -> Iterator[Frame]:
    """Every frame of an archive, each verified, END the last. Raises FileDamaged, FormatTooNew, OSError.

    All of it is known to be whole only when the iteration has ended.
    """
    preamble = _take(file, _PREAMBLE.size, name)
    magic, version, _ = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise FileDamaged(path=name, problem="it is no backup of ctxcache")
    if version > ARCHIVE_VERSION:
        raise FormatTooNew(
            f"{name} has format {version}; this version reads up to {ARCHIVE_VERSION}",
            path=name, found=version, supported=ARCHIVE_VERSION,
        )  # fmt: skip
    seed, offset, kind = xxh3_64_intdigest(preamble), len(preamble), 0
    while kind != Kind.END:
        head = _take(file, _HEAD.size, name)
        kind, size_bytes = _HEAD.unpack(head)
        if size_bytes > FRAME_LIMIT_BYTES:
            raise FileDamaged(path=name, problem=f"the frame at byte {offset} is too long")
        payload = _take(file, size_bytes, name)
        hasher = xxh3_64(head, seed=seed)
        hasher.update(payload)
        seed = hasher.intdigest()
        if _take(file, _CHECKSUM.size, name) != _CHECKSUM.pack(seed):
            raise FileDamaged(path=name, problem=f"the frame at byte {offset} is not what was written")
        yield Frame(_kind(kind, offset, name), offset, payload)
        offset += _HEAD.size + size_bytes + _CHECKSUM.size
    if file.read(1):
        raise FileDamaged(path=name, problem=f"it goes on after its end at byte {offset}")


def pack_record(key: bytes, value: bytes) -> list[bytes]:
    """A record as a payload's parts."""
    return [_RECORD.pack(len(key)), key, value]


def unpack_record(payload: bytes) -> tuple[bytes, bytes]:
    """Key and value. Raises struct.error."""
    (key_bytes,) = _RECORD.unpack_from(payload)
    return payload[_RECORD.size : _RECORD.size + key_bytes], payload[_RECORD.size + key_bytes :]


def image_ranges(layout: SegmentLayout, row_count: int) -> list[tuple[int, int]]:
    """What of a slot an image has, in its order: the header, and the rows of each stream without padding."""
    chunks = zip(layout.offsets, layout.specs, strict=True)
    rows = [(offset, offset + spec.row_bytes * row_count) for offset, spec in chunks]
    return [(0, layout.header_bytes), *rows]


def cut(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Gather views, and cut them, into lists of FRAME_BYTES; the last one may have less."""
    parts: list[memoryview] = []
    free_bytes = FRAME_BYTES
    for whole in views:
        view = whole
        while view:
            parts.append(view[:free_bytes])
            view = view[free_bytes:]
            free_bytes -= len(parts[-1])
            if not free_bytes:
                yield parts
                parts, free_bytes = [], FRAME_BYTES
    if parts:
        yield parts


def _take(file: BinaryIO, size_bytes: int, name: str) -> bytes:
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise FileDamaged(path=name, problem=f"it is cut short at byte {file.tell()}")
    return data


def _kind(number: int, offset: int, name: str) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FileDamaged(path=name, problem=f"the frame at byte {offset} is of no kind") from None
