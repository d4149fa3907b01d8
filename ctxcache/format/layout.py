"""Segment layout: where each stream's chunk lies inside a segment's slot.

A slot is the header, then one chunk per stream in storage order, every piece on a 4 KiB
boundary, so that a slot can be read and written with O_DIRECT and a chunk by itself too:

    | header | token ids | layer 0 | layer 1 | ... |      each chunk: 64 rows, zero padded

The same layout is used in the arena and on SSD: a flush is one copy-free write. A segment that is filled by
one append may be longer: it has a power of two times 64 rows, at most 4,096, and lies in its slot in the same
way, with more rows in each chunk. So the books of a long session have one entry for many tokens.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ctxcache.format.streams import DType, StateKind, Stream, StreamRange, StreamSpec, ranges_of

ALIGN_BYTES = 4096
SEGMENT_TOKENS = 64
"""Rows of a segment that may grow token by token."""
LONGEST_SEGMENT_TOKENS = 4096
LONG_CHUNK_BYTES = 2 << 20
"""Largest chunk of a segment with more than 64 rows: a chunk is read, hashed and sent as a whole."""
LONG_SLOT_BYTES = 32 << 20
"""Largest slot of such a segment: a segment is moved as a whole."""
BLOCK_ROWS = 1
"""Rows of a slot that holds one block: each part is a stream of one row."""
BLOCK_LAYOUTS_KEPT = 256
"""Layouts of blocks that are not made anew each time: an engine has one or two."""
HEADER_FIXED_BYTES = 256
HEADER_STREAM_BYTES = struct.calcsize("<iiiiQ")


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
    _outline: Outline | None = field(init=False, compare=False, repr=False, default=None)
    _longer: dict[int, "SegmentLayout"] = field(init=False, compare=False, repr=False, default_factory=dict)
    _most_tokens: int = field(init=False, compare=False, repr=False)
    """Rows of the longest segment whose chunks are not too large."""

    def __post_init__(self) -> None:
        header_bytes = align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(self.specs))
        sizes = [align(spec.row_bytes * self.segment_tokens) for spec in self.specs]
        ends = list(accumulate(sizes, initial=header_bytes))
        object.__setattr__(self, "header_bytes", header_bytes)
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "size_bytes", ends[-1])
        widest_bytes = max((spec.row_bytes for spec in self.specs), default=1)
        object.__setattr__(
            self, "_most_tokens", min(LONGEST_SEGMENT_TOKENS, LONG_CHUNK_BYTES // widest_bytes)
        )
        object.__setattr__(self, "index", {spec.stream: i for i, spec in enumerate(self.specs)})

    @property
    def is_block(self) -> bool:
        """Whether a slot holds one block, and not tokens of a session."""
        return self.segment_tokens == BLOCK_ROWS

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all streams, padding not counted."""
        return sum(spec.row_bytes for spec in self.specs)

    @property
    def outline(self) -> Outline:
        """The layout in short, made when first needed."""
        if self._outline is None:
            kind_bytes: dict[StateKind, int] = {}
            for stream, row_bytes, _ in self.specs:
                kind_bytes[stream.kind] = kind_bytes.get(stream.kind, 0) + row_bytes
            object.__setattr__(self, "_outline", Outline(tuple(ranges_of(self.index)), kind_bytes))
        return self._outline  # type: ignore[return-value]  # it was just made

    def of(self, segment_tokens: int) -> "SegmentLayout":
        """The layout of a slot with the same streams and so many rows: one object for each number.

        Asked of a layout of 64 rows. Raises ValueError for a number of rows that no segment has.
        """
        if segment_tokens == self.segment_tokens:
            return self
        found = self._longer.get(segment_tokens)
        if found is None:
            if not is_segment_length(segment_tokens):
                raise ValueError(f"no segment has {segment_tokens} rows")
            found = self._longer[segment_tokens] = SegmentLayout(self.specs, segment_tokens)
        return found

    def filled_by(self, token_count: int, most_bytes: int) -> "SegmentLayout":
        """The longest segment that so many tokens fill, in a slot of at most `most_bytes`.

        64 rows where there is no longer one.
        """
        most_tokens = min(token_count, self._most_tokens)
        if self.is_block or most_tokens < 2 * SEGMENT_TOKENS:
            return self
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
