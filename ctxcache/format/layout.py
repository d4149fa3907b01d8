"""A segment's slot: where each stream's chunk lies in it, and the header that says whose bytes they are.

A slot is the header, then one chunk per stream in storage order, every piece on a 4 KiB boundary, so that a
slot can be read and written with O_DIRECT and a chunk by itself too:

    | header | token ids | layer 0 | layer 1 | ... |      each chunk: 64 rows, zero padded

The same layout is used in the arena and on SSD: a flush is one copy-free write. A segment that is filled by
one append may be longer: it has a power of two times 64 rows, at most 4,096, and lies in its slot in the
same way, with more rows in each chunk. So the books of a long session have one entry for many tokens.

The header makes a slot self-describing, and binds its chunks' checksums. Little endian, zero padded to a
multiple of 4 KiB:

    magic 8 | format version u32 | segment tokens u32 | segment id u64 | generation i64
    begin i64 | token count i64 | session uid 16 | fingerprint 32 | stream count u32
    tenant length u16 | tenant (up to 128 bytes) | zeros to byte 248 | header checksum u64
    then per stream: layer i32 | kind i32 | row bytes i32 | dtype i32 | bound checksum u64

A bound checksum has the digest of `SegmentIdentity` in it: right bytes in the wrong place (another
tenant's, an older generation's, a neighbour's layer) fail like flipped bits do. It detects accidents and
misplacement; it is no defence against someone who can forge bytes.

The header checksum is XXH3-64 of the fixed part (its own field zero) and the stream table. Golden vectors:
tests/golden/segments.json.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptSegment
from ctxcache.format.model import FINGERPRINT_BYTES
from ctxcache.format.streams import DType, StateKind, Stream, StreamRange, StreamSpec, ranges_of

SEGMENTS_FILE = "segments.dat"
"""The file of an SSD directory in which slots lie."""
ALIGN_BYTES = 4096
SEGMENT_TOKENS = 64
"""Rows of a segment that may grow token by token."""
LONGEST_SEGMENT_TOKENS = 4096
# Two bounds keep what is moved whole small, whatever a row's size is:
#
#     row of 8 KiB     2 MiB / 8 KiB = 256 rows per chunk     the slot then is bounded by 32 MiB
#     row of 256 B     4,096 rows, 1 MiB per chunk
LONG_CHUNK_BYTES = 2 << 20
"""Largest chunk of a segment with more than 64 rows: a chunk is read, hashed and sent as a whole."""
LONG_SLOT_BYTES = 32 << 20
"""Largest slot of such a segment: a segment is moved as a whole."""
BLOCK_ROWS = 1
"""Rows of a slot that holds one block: each part is a stream of one row."""
BLOCK_LAYOUTS_KEPT = 256
"""Layouts of blocks that are kept ready: an engine has one or two."""
HEADER_FIXED_BYTES = 256
_STREAM = struct.Struct("<iiiiQ")
HEADER_STREAM_BYTES = _STREAM.size


def align(size_bytes: int) -> int:
    """The next multiple of 4 KiB at or above `size_bytes`."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def is_segment_length(segment_tokens: int) -> bool:
    """Whether a segment of a session may have so many rows: 64, 128 and so on up to 4,096."""
    is_power = segment_tokens & (segment_tokens - 1) == 0
    return SEGMENT_TOKENS <= segment_tokens <= LONGEST_SEGMENT_TOKENS and is_power


def slot_bytes(specs: Sequence[StreamSpec], segment_tokens: int = SEGMENT_TOKENS) -> int:
    """The size of a slot that holds these streams: `SegmentLayout.size_bytes`, without the layout."""
    header_bytes = align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(specs))
    return header_bytes + sum([align(spec.row_bytes * segment_tokens) for spec in specs])


@dataclass(frozen=True, slots=True)
class Outline:
    """A layout in short: its streams as ranges, and the bytes of a token by kind, padding not counted."""

    ranges: tuple[StreamRange, ...]
    kind_bytes: Mapping[StateKind, int]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SegmentLayout:
    """Offsets of every chunk in a slot. `specs` in storage order; `segment_tokens` rows per chunk."""

    specs: tuple[StreamSpec, ...]
    segment_tokens: int = SEGMENT_TOKENS
    header_bytes: int = field(init=False)
    size_bytes: int = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    index: dict[Stream, int] = field(init=False, compare=False, repr=False)
    outline: Outline = field(init=False, compare=False, repr=False)
    """The layout in short."""
    _longer: dict[int, "SegmentLayout"] = field(init=False, compare=False, repr=False, default_factory=dict)
    _most_tokens: int = field(init=False, compare=False, repr=False)
    """Rows of the longest segment whose chunks are not too large."""

    def __post_init__(self) -> None:
        header_bytes = align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(self.specs))
        sizes = [align(spec.row_bytes * self.segment_tokens) for spec in self.specs]
        ends = list(accumulate(sizes, initial=header_bytes))
        object.__setattr__(self, "header_bytes", header_bytes)
        # Frozen for callers: the fields are computed once, here.
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "size_bytes", ends[-1])
        widest_bytes = max((spec.row_bytes for spec in self.specs), default=1)
        object.__setattr__(
            self, "_most_tokens", min(LONGEST_SEGMENT_TOKENS, LONG_CHUNK_BYTES // widest_bytes)
        )
        object.__setattr__(self, "index", {spec.stream: i for i, spec in enumerate(self.specs)})
        kind_bytes: dict[StateKind, int] = {}
        # Answers describe a layout: this is made once per layout, not once per answer.
        for stream, row_bytes, _ in self.specs:
            kind_bytes[stream.kind] = kind_bytes.get(stream.kind, 0) + row_bytes
        object.__setattr__(self, "outline", Outline(tuple(ranges_of(self.index)), kind_bytes))

    @property
    def is_block(self) -> bool:
        """Whether a slot holds one block, and not tokens of a session."""
        return self.segment_tokens == BLOCK_ROWS

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all streams, padding not counted."""
        return sum(spec.row_bytes for spec in self.specs)

    def of(self, segment_tokens: int) -> "SegmentLayout":
        """The layout of a slot with the same streams and so many rows: one object for each number.

        Only a layout of 64 rows has this. Raises ValueError for a number of rows that no segment has.
        """
        if segment_tokens == self.segment_tokens:
            return self
        layout = self._longer.get(segment_tokens)
        if layout is None:
            if not is_segment_length(segment_tokens):
                raise ValueError(f"no segment has {segment_tokens} rows")
            layout = self._longer[segment_tokens] = SegmentLayout(self.specs, segment_tokens)
        return layout

    def filled_by(self, token_count: int, most_bytes: int) -> "SegmentLayout":
        """The longest segment that so many tokens fill, in a slot of at most `most_bytes`.

        It has 64 rows where there is no longer one.
        """
        most_tokens = min(token_count, self._most_tokens)
        if self.is_block or most_tokens < 2 * SEGMENT_TOKENS:
            return self
        # The largest power of two that they fill.
        segment_tokens = 1 << most_tokens.bit_length() - 1
        while segment_tokens > SEGMENT_TOKENS and self.of(segment_tokens).size_bytes > most_bytes:
            segment_tokens //= 2
        return self.of(segment_tokens)

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row of `stream`. Raises KeyError(stream)."""
        return self.specs[self.index[stream]].row_bytes

    def rows(self, stream: Stream, row_begin: int, row_end: int) -> slice:
        """Where rows `[row_begin, row_end)` of `stream` lie in the slot. Raises KeyError(stream)."""
        i = self.index[stream]
        row_bytes = self.specs[i].row_bytes
        return slice(self.offsets[i] + row_begin * row_bytes, self.offsets[i] + row_end * row_bytes)


@lru_cache(BLOCK_LAYOUTS_KEPT)
def block_layout(part_bytes: tuple[int, ...]) -> SegmentLayout:
    """Where the parts of a block, of these sizes in bytes, lie in its slot: one stream of one row each."""
    specs = (
        StreamSpec(Stream(number, StateKind.ENGINE_BLOCK), size_bytes, DType.PACKED)
        for number, size_bytes in enumerate(part_bytes)
    )
    return SegmentLayout(tuple(specs), BLOCK_ROWS)


class Slot(NamedTuple):
    """`[offset_bytes, offset_bytes + size_bytes)` of a tier's path number `path_index`. 4 KiB-aligned."""

    path_index: int
    offset_bytes: int
    size_bytes: int


# -- the header --------------------------------------------------------------------------------------

MAGIC = b"CTXCSEG\0"
SEGMENT_FORMAT = 2
TENANT_BYTES = 128
UID_BYTES = 16
_DOMAIN = b"ctxcache.chunk.v2"
_FIXED = struct.Struct(f"<8sIIQqqq16s32sIH{TENANT_BYTES}s")
_CHECKSUM_OFFSET = HEADER_FIXED_BYTES - 8
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
        # A field that is too short would be padded, and look like another one.
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
    # The magic is checked first: a slot that was never written has other bytes there.
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
    # The checksum is verified before the contents: damaged numbers must not be used as sizes.
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
    # The field of the checksum counts as zeros.
    blank = raw[:_CHECKSUM_OFFSET] + bytes(8)
    if xxh3_64_intdigest(blank + table) != header_checksum(raw):
        raise CorruptSegment(segment_id=segment_id, problem="header checksum does not match")


def _decode_table(table: bytes) -> tuple[tuple[StreamSpec, ...], tuple[int, ...]]:
    specs, checksums = [], []
    for layer, kind, row_bytes, dtype, checksum in _STREAM.iter_unpack(table):
        specs.append(StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype)))
        checksums.append(checksum)
    return tuple(specs), tuple(checksums)
