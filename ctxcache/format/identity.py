"""Identity: who and what a chunk is, bound into its checksum.

A chunk's rows have a checksum that their writer makes: XXH3-64 of the bytes. The header of a slot has it
bound to the chunk's identity, so that right bytes in the wrong place (another tenant's, an older
generation's, a neighbour's layer) fail like flipped bits do. Binding needs the writer's checksum and not the
rows. It detects accidents and misplacement; it is no defence against someone who can forge bytes.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from typing_extensions import Buffer
from xxhash import xxh3_64, xxh3_64_intdigest

from ctxcache.format.model import FINGERPRINT_BYTES
from ctxcache.format.streams import Stream

UID_BYTES = 16
_STREAM, _CHECKSUM = struct.Struct("<ii"), struct.Struct("<Q")
_DOMAIN = b"ctxcache.chunk.v2"


class SegmentIdentity(NamedTuple):
    """What a segment's bytes are bound to.

    `session_uid` is the session that wrote it (a fork keeps its parent's), `generation` that
    session's when the segment was opened; `[begin, begin + token_count)` are positions in the
    writer's log; `model_fingerprint` is 32 bytes.
    """

    tenant: str
    session_uid: bytes
    generation: int
    begin: int
    token_count: int
    model_fingerprint: bytes

    def check(self) -> None:
        """Raise ValueError for a length that packing would pad or cut: two would look alike."""
        if len(self.session_uid) != UID_BYTES or len(self.model_fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a session uid is {UID_BYTES} bytes, a fingerprint {FINGERPRINT_BYTES}")

    def seed(self) -> int:
        """64-bit digest of every field, length-prefixed. Raises as `check` does."""
        self.check()
        tenant = self.tenant.encode()
        packed = struct.pack(
            f"<{len(_DOMAIN)}sH{len(tenant)}s16sqqq32s",
            _DOMAIN,
            len(tenant),
            tenant,
            self.session_uid,
            self.generation,
            self.begin,
            self.token_count,
            self.model_fingerprint,
        )
        return xxh3_64_intdigest(packed)


def rows_checksum(data: Buffer) -> int:
    """XXH3-64 of rows: what their writer says of them."""
    return xxh3_64_intdigest(data)


def bound_checksum(identity_seed: int, stream: Stream, checksum: int) -> int:
    """What a header has of a chunk: its rows' checksum, bound to its segment's identity and its stream."""
    stream_seed = xxh3_64_intdigest(_STREAM.pack(stream.layer, stream.kind), seed=identity_seed)
    return xxh3_64_intdigest(_CHECKSUM.pack(checksum), seed=stream_seed)


def chunk_checksum(identity_seed: int, stream: Stream, data: Buffer) -> int:
    """The bound checksum of a chunk's rows (without padding)."""
    return bound_checksum(identity_seed, stream, rows_checksum(data))


def wire_checksum(data: Buffer) -> int:
    """XXH3-64 with seed 0: what a message of the streaming rpcs carries for its own bytes."""
    return xxh3_64_intdigest(data)


def joint_checksum(parts: Iterable[Buffer]) -> int:
    """The wire checksum of bytes that lie in several places."""
    hasher = xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()
