"""Streams: the append-only runs of fixed-size rows that make up a session.

A stream is one state kind of one layer. The store treats rows as opaque bytes; this file knows
their size and element type, and nothing of what the numbers mean.
"""

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TOKENS_LAYER = -1
TOKEN_ROW_BYTES = 4


class StateKind(enum.IntEnum):
    """The meaning of a row's bytes. Values are those of the wire and of the chunk format."""

    TOKENS = 1
    """Token ids, int32 little endian; one stream per session, layer -1, always stored."""
    HIDDEN = 2
    """The input of a decoder layer, before its norm: [D] elements."""
    KV = 3
    """K then V before positional encoding, after biases and norms: [H*C] + [H*C_v] elements."""
    LATENT = 4
    """A model's own compressed state (MLA): [kv_lora_rank] + [rope_dim] elements, not rotated."""
    HIDDEN_INT8 = 5
    """HIDDEN in 8 bits, groups of 32, 4 outliers a row: close to it, never equal. See packing.py."""
    KV_INT8 = 6
    """KV in 8 bits, groups of 64, 4 outliers a row, likewise."""
    HIDDEN_INT4 = 7
    """HIDDEN in 4 bits, groups of 32, 4 outliers a row, likewise."""
    KV_INT4 = 8
    """KV in 4 bits, groups of 32, 4 outliers a row, likewise."""
    ENGINE_BLOCK = 9
    """An engine's own blocks of K/V, opaque: a row is an equal share of its block's bytes."""
    KV_AS_CACHED = 10
    """K then V as the engine caches them, positions and all: [H*C] + [H*C_v] elements. Rows do not move."""
    HIDDEN_DELTA_INT4 = 11
    """HIDDEN less the layer below's, as that comes back, in 4 bits, groups of 32. See packing.py."""
    HIDDEN_DELTA_INT3 = 12
    """Likewise, in 3 bits, groups of 64."""
    HIDDEN_DELTA_INT2 = 13
    """Likewise, in 2 bits, groups of 32."""


class DType(enum.IntEnum):
    """Element type of a row. Values are those of the wire and of the chunk format."""

    INT32 = 1
    FLOAT32 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    FLOAT8_E4M3 = 6
    PACKED = 7
    """No elements but bytes, whose layout the kind gives."""

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self]


_DTYPE_BYTES = {
    DType.INT32: 4,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT8: 1,
    DType.FLOAT8_E4M3: 1,
    DType.PACKED: 1,
}


class Stream(NamedTuple):
    """Names a stream within a session: layer number (-1 for token ids) and state kind."""

    layer: int
    kind: StateKind

    def __str__(self) -> str:
        return "tokens" if self.kind is StateKind.TOKENS else f"layer {self.layer} {self.kind.name.lower()}"


class StreamRange(NamedTuple):
    """Streams of one kind, of layers `[layer_begin, layer_end)`."""

    kind: StateKind
    layer_begin: int
    layer_end: int

    def streams(self) -> Iterator[Stream]:
        """Each of the range's streams, by layer."""
        return (Stream(layer, self.kind) for layer in range(self.layer_begin, self.layer_end))


def ranges_of(streams: Iterable[Stream]) -> list[StreamRange]:
    """Streams, each named once, as few ranges by kind and layer."""
    layers: dict[StateKind, list[int]] = {}
    for layer, kind in streams:
        layers.setdefault(kind, []).append(layer)
    ranges: list[StreamRange] = []
    for kind in sorted(layers):
        begin = end = None
        for layer in sorted(layers[kind]):
            if begin is None or layer != end:
                if begin is not None and end is not None:
                    ranges.append(StreamRange(kind, begin, end))
                begin = layer
            end = layer + 1
        if begin is not None and end is not None:
            ranges.append(StreamRange(kind, begin, end))
    return ranges


class StreamSpec(NamedTuple):
    """A stream a model can save: its name, the bytes of one token's row, and the element type."""

    stream: Stream
    row_bytes: int
    dtype: DType


TOKENS = Stream(TOKENS_LAYER, StateKind.TOKENS)
TOKENS_RANGE = StreamRange(StateKind.TOKENS, TOKENS_LAYER, TOKENS_LAYER + 1)
TOKENS_SPEC = StreamSpec(TOKENS, TOKEN_ROW_BYTES, DType.INT32)
OPAQUE = Stream(0, StateKind.ENGINE_BLOCK)
"""The one stream of `ModelSpec.opaque`: a row of the caller's own bytes for each token."""


# A digest names a content, whose bytes never come to the store.
DIGEST_BYTES = 32
SALT_LIMIT_BYTES = 64
CONTENTS_LIMIT = 1024
"""Digests that one session has at most: some 50 bytes each, in every record of it."""


class Content(NamedTuple):
    """The content behind the tokens `[begin, end)`, such as a picture: its digest, 32 bytes."""

    begin: int
    end: int
    digest: bytes


def contents_within(contents: Iterable[Content], begin: int, end: int) -> tuple[Content, ...]:
    """The parts of contents, which are in order, within `[begin, end)`.

    Parts that touch and have one digest become one.
    """
    within: list[Content] = []
    for content in contents:
        first, last = max(content.begin, begin), min(content.end, end)
        if first >= last:
            continue
        # Commits may have cut a content into parts, which are joined here.
        if within and within[-1].end == first and within[-1].digest == content.digest:
            first = within.pop().begin
        within.append(Content(first, last, content.digest))
    return tuple(within)
