"""Segment header: makes a slot self-describing, and binds its chunks' checksums.

Layout (little endian), zero padded to a multiple of 4 KiB:

    magic 8 | format version u32 | segment tokens u32 | segment id u64 | generation i64
    begin i64 | token count i64 | session uid 16 | fingerprint 32 | stream count u32
    tenant length u16 | tenant (up to 128 bytes) | zeros to byte 248 | header checksum u64
    then per stream: layer i32 | kind i32 | row bytes i32 | dtype i32 | bound checksum u64

A bound checksum has the digest of `SegmentIdentity` in it: right bytes in the wrong place (another tenant's,
an older generation's, a neighbour's layer) fail like flipped bits do. It detects accidents and misplacement;
it is no defence against someone who can forge bytes.

The header checksum is XXH3-64 of the fixed part (its own field zero) and the stream table.
Golden vectors: tests/golden/segments.json.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptSegment
from ctxcache.format.layout import HEADER_FIXED_BYTES, HEADER_STREAM_BYTES, SegmentLayout
from ctxcache.format.model import FINGERPRINT_BYTES
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

MAGIC = b"CTXCSEG\0"
SEGMENT_FORMAT = 2
TENANT_BYTES = 128
UID_BYTES = 16
_DOMAIN = b"ctxcache.chunk.v2"
_FIXED = struct.Struct(f"<8sIIQqqq16s32sIH{TENANT_BYTES}s")
_CHECKSUM_OFFSET = HEADER_FIXED_BYTES - 8
_STREAM = struct.Struct("<iiiiQ")
_STREAM_COUNT_LIMIT = 65536


class SegmentIdentity(NamedTuple):
    """The identity that a segment's checksums are bound to.

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


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a slot: which segment, whose, its streams and one bound checksum per chunk."""

    segment_id: int
    identity: SegmentIdentity
    layout: SegmentLayout
    checksums: tuple[int, ...]

    def encode(self) -> bytes:
        """The header's bytes without padding.

        Raises ValueError for a tenant of over 128 bytes, and as `check` does.
        """
        identity, layout = self.identity, self.layout
        identity.check()
        tenant = identity.tenant.encode()
        if len(tenant) > TENANT_BYTES:
            raise ValueError(f"a tenant's name takes up to {TENANT_BYTES} bytes, not {len(tenant)}")
        fixed = _FIXED.pack(
            MAGIC,
            SEGMENT_FORMAT,
            layout.segment_tokens,
            self.segment_id,
            identity.generation,
            identity.begin,
            identity.token_count,
            identity.session_uid,
            identity.model_fingerprint,
            len(layout.specs),
            len(tenant),
            tenant,
        ).ljust(HEADER_FIXED_BYTES, b"\0")
        table = b"".join(
            _STREAM.pack(spec.stream.layer, spec.stream.kind, spec.row_bytes, spec.dtype, checksum)
            for spec, checksum in zip(layout.specs, self.checksums, strict=True)
        )
        checksum = xxh3_64_intdigest(fixed + table)
        return fixed[:_CHECKSUM_OFFSET] + struct.pack("<Q", checksum) + table


def header_checksum(encoded: bytes) -> int:
    """The checksum an encoded header carries; the segment's record keeps it too."""
    return int(struct.unpack_from("<Q", encoded, _CHECKSUM_OFFSET)[0])


def decode_header(data: Buffer) -> SegmentHeader:
    """Read a header back. Raises CorruptSegment when it is not one, or not whole."""
    raw = bytes(memoryview(data)[:HEADER_FIXED_BYTES])
    if len(raw) < HEADER_FIXED_BYTES or raw[:8] != MAGIC:
        raise CorruptSegment(segment_id="?", problem="no segment header")
    (
        _,
        version,
        segment_tokens,
        segment_id,
        generation,
        begin,
        token_count,
        uid,
        fingerprint,
        stream_count,
        tenant_bytes,
        tenant,
    ) = _FIXED.unpack_from(raw)
    if version != SEGMENT_FORMAT:
        raise CorruptSegment(segment_id=segment_id, problem=f"unknown segment format {version}")
    table = bytes(memoryview(data)[HEADER_FIXED_BYTES:][: stream_count * HEADER_STREAM_BYTES])
    _verify(raw, table, segment_id, stream_count)
    try:
        specs, checksums = _decode_table(table)
        identity = SegmentIdentity(
            tenant[:tenant_bytes].decode(), uid, generation, begin, token_count, fingerprint
        )
    except ValueError as error:
        raise CorruptSegment(segment_id=segment_id, problem=f"header does not parse: {error}") from error
    return SegmentHeader(segment_id, identity, SegmentLayout(specs, segment_tokens), checksums)


def _verify(raw: bytes, table: bytes, segment_id: int, stream_count: int) -> None:
    if stream_count > _STREAM_COUNT_LIMIT or len(table) != stream_count * HEADER_STREAM_BYTES:
        raise CorruptSegment(segment_id=segment_id, problem="header is cut short")
    blank = raw[:_CHECKSUM_OFFSET] + bytes(8)
    if xxh3_64_intdigest(blank + table) != header_checksum(raw):
        raise CorruptSegment(segment_id=segment_id, problem="header checksum does not match")


def _decode_table(table: bytes) -> tuple[tuple[StreamSpec, ...], tuple[int, ...]]:
    specs, checksums = [], []
    for layer, kind, row_bytes, dtype, checksum in _STREAM.iter_unpack(table):
        specs.append(StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype)))
        checksums.append(checksum)
    return tuple(specs), tuple(checksums)
