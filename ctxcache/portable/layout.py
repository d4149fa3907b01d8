"""What an export file consists of, docs/export_format.md: numbers, tags and bounds, for both who write and who read.

Knows no session and does no I/O.
"""

import struct

from xxhash import xxh3_64, xxh3_64_intdigest

MAGIC, VERSION = b"CTXCEXP\0", 1
FILE_ID_BYTES = 16
FILE_HEADER = struct.Struct("<8sII16sq")
"""Magic, version, zero, the file's id, when it was begun (Unix time, ns); its checksum follows."""
FRAME_HEAD = struct.Struct("<4sI")
"""Tag, and bytes of the payload; that and a checksum follow."""
CHECKSUM = struct.Struct("<Q")
BLOCK_HEAD = struct.Struct("<qq")
"""First token and count; the rows follow, stream by stream."""
TOTALS = struct.Struct("<qq")
"""Sessions and tokens in the file."""
SESSION, BLOCK, VOID, END = b"SESS", b"ROWS", b"VOID", b"END "
PAYLOAD_LIMIT_BYTES = 1 << 28
"""Of any frame. The widest token that a store takes, and the head of its block, fit."""
DESCRIPTION_LIMIT_BYTES = 4 << 20
"""Of every frame but a block: 65,536 streams of a model and of a layout, and its texts, fit."""
SESSION_LIMIT = 1 << 20
"""Sessions of one file: readers keep their names."""


def header_checksum(header: bytes) -> bytes:
    """Of the file's header, 8 bytes."""
    return CHECKSUM.pack(xxh3_64_intdigest(header))


def frame_checksum(file_id: bytes, number: int, head: bytes, *payload: bytes | memoryview) -> bytes:
    """Of frame `number` of the file, 8 bytes: its head and its payload, for this place in this file."""
    hasher = xxh3_64(head, seed=xxh3_64_intdigest(file_id + CHECKSUM.pack(number)))
    for part in payload:
        hasher.update(part)
    return CHECKSUM.pack(hasher.intdigest())
