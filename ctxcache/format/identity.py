"""Identity: who and what a chunk is, bound into its checksum.

The checksum of a chunk is XXH3-64 seeded with its identity, so that right bytes in the wrong
place (another tenant's, an older generation's, a neighbour's layer) fail like flipped bits do.
It detects accidents and misplacement; it is no defence against someone who can forge bytes.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from typing_extensions import Buffer
from xxhash import xxh3_64, xxh3_64_intdigest

from ctxcache.format.model import FINGERPRINT_BYTES
from ctxcache.format.streams import Stream

UID_BYTES = 16
_DOMAIN = b"ctxcache.chunk.v1"


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


def chunk_checksum(identity_seed: int, stream: Stream, data: Buffer) -> int:
    """XXH3-64 of a chunk's rows (without padding), seeded with its segment's identity and its stream."""
    return xxh3_64_intdigest(data, seed=chunk_seed(identity_seed, stream))


def chunk_seed(identity_seed: int, stream: Stream) -> int:
    """The seed of a chunk's checksum."""
    return xxh3_64_intdigest(struct.pack("<ii", stream.layer, stream.kind), seed=identity_seed)


def wire_checksum(data: Buffer) -> int:
    """XXH3-64 with seed 0: what a message of the streaming rpcs carries for its own bytes."""
    return xxh3_64_intdigest(data)


def joint_checksum(parts: Iterable[Buffer]) -> int:
    """The wire checksum of bytes that lie in several places."""
    hasher = xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()
