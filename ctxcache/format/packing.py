"""Packed rows: elements in 8 or 4 bits, and where in the row lies what brings them back.

Knows sizes and offsets. The store does not look into rows; who saves and who restores do, by the kind
alone. Worst case: none here, what cannot be packed is refused by who packs (docs/chunk_format.md).
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from ctxcache.format.streams import TOKENS, StateKind, Stream

ROW_ALIGN_BYTES = 16
MOST_ELEMENTS = 1 << 15
"""Most elements of one row: some readers take places of outliers for signed 16-bit numbers."""
_OUTLIER_ALIGN_BYTES = 4
_BITS_PER_BYTE = 8


class PackedLayout(NamedTuple):
    """Where the parts of one row begin, in bytes; codes begin at 0. Counts are of elements."""

    element_count: int
    group_count: int
    outlier_count: int
    outliers: int
    """float32 [outlier_count]."""
    scales: int
    """float16 [group_count]."""
    zeros: int
    """float16 [group_count]."""
    places: int
    """uint16 [outlier_count]."""
    row_bytes: int
    """Padded with zeros to a multiple of 16."""


class Packing(NamedTuple):
    """How rows of `unpacked` are put into few bits.

    X = zero + code * scale per group, but for a row's outliers.
    """

    unpacked: StateKind
    bits: int
    group_size: int
    outlier_count: int

    def layout(self, element_count: int) -> PackedLayout:
        """Lay out rows of so many elements.

        Raises ValueError for none, an odd number, or more than 32,768.
        """
        return _layout(element_count, self.bits, self.group_size, self.outlier_count)

    def row_bytes(self, element_count: int) -> int:
        """Bytes of one token's row of so many elements. Raises ValueError, as `layout` does."""
        return self.layout(element_count).row_bytes


PACKINGS: Mapping[StateKind, Packing] = {
    StateKind.HIDDEN_INT8: Packing(StateKind.HIDDEN, 8, 32, 4),
    StateKind.KV_INT8: Packing(StateKind.KV, 8, 64, 4),
    StateKind.HIDDEN_INT4: Packing(StateKind.HIDDEN, 4, 32, 4),
    StateKind.KV_INT4: Packing(StateKind.KV, 4, 32, 4),
}
"""The packing of each packed kind. It never changes: another packing is another kind."""


class DeltaLayout(NamedTuple):
    """Where the parts of one row of a delta begin, in bytes; codes begin at 0."""

    element_count: int
    group_count: int
    outlier_count: int
    base: int
    """uint32: the mark of the row below that this one is added to."""
    outliers: int
    """float16 [outlier_count]: differences."""
    places: int
    """uint16 [outlier_count]; the highest bit: the outlier counts FAR_OUTLIER times."""
    step: int
    """float16: the largest scale of the row."""
    shares: int
    """uint8 [group_count]: scales, in 255ths of it."""
    zeros: int
    """uint8 [group_count], in sixteenths of a scale."""
    row_bytes: int
    """Padded with zeros to a multiple of 4."""


FAR_OUTLIER = 256
"""Differences beyond what float16 holds are stored in so many parts."""
_ELEMENTS_OF_AN_OUTLIER = 144
"""Narrow rows have fewer outliers: four take a fifth of a row of 288 elements in 3 bits."""


class DeltaPacking(NamedTuple):
    """How a layer's input less that of the layer below is put into few bits.

    X = below + (code - zero / 16) * share / 255 * step, but for a row's outliers, which are differences.
    """

    bits: int
    group_size: int
    most_outliers: int = 4

    def layout(self, element_count: int) -> DeltaLayout:
        """Lay out rows of so many elements. Raises ValueError unless a multiple of 8 up to 32,768."""
        if not 0 < element_count <= MOST_ELEMENTS or element_count % _BITS_PER_BYTE:
            raise ValueError(
                f"rows of {element_count} elements are not packed as deltas: a multiple of 8 up to"
                f" {MOST_ELEMENTS}"
            )
        groups = -(-element_count // self.group_size)
        kept = min(self.most_outliers, max(1, element_count // _ELEMENTS_OF_AN_OUTLIER))
        base = _align(element_count * self.bits // _BITS_PER_BYTE, _OUTLIER_ALIGN_BYTES)
        outliers = base + 4
        places = outliers + 2 * kept
        step = places + 2 * kept
        shares = step + 2
        zeros = shares + groups
        end = _align(zeros + groups, _OUTLIER_ALIGN_BYTES)
        return DeltaLayout(element_count, groups, kept, base, outliers, places, step, shares, zeros, end)

    def row_bytes(self, element_count: int) -> int:
        """Bytes of one token's row of so many elements. Raises ValueError, as `layout` does."""
        return self.layout(element_count).row_bytes


DELTAS: Mapping[StateKind, DeltaPacking] = {
    StateKind.HIDDEN_DELTA_INT4: DeltaPacking(4, 32),
    StateKind.HIDDEN_DELTA_INT3: DeltaPacking(3, 96),
    StateKind.HIDDEN_DELTA_INT2: DeltaPacking(2, 32),
}
"""The kinds that are deltas between layers, with the facts of each. Likewise, none ever changes."""
LOSSY_KINDS = (*PACKINGS, *DELTAS)
# lab/notes/quantization.md has the measurements: the worst of thirty passages, and half as much again.
LOSSES_NATS: Mapping[StateKind, float] = {
    StateKind.HIDDEN_INT8: 1e-4,
    StateKind.KV_INT8: 1e-4,
    StateKind.HIDDEN_INT4: 3e-2,
    StateKind.KV_INT4: 3e-2,
    StateKind.HIDDEN_DELTA_INT4: 2e-3,
    StateKind.HIDDEN_DELTA_INT3: 1.2e-2,
    StateKind.HIDDEN_DELTA_INT2: 7e-2,
}
"""KL divergence of predictions, all layers packed: the mean of a passage; one token may be far beyond it."""
CHAIN_KINDS = (StateKind.HIDDEN, StateKind.HIDDEN_INT8, StateKind.HIDDEN_INT4, *DELTAS)
"""Kinds that a delta may be added to: the layer below's input, exact, packed, or itself a delta."""


def packing_of(kind: StateKind) -> Packing | DeltaPacking:
    """How rows of a packed kind are laid out. Raises KeyError."""
    return DELTAS[kind] if kind in DELTAS else PACKINGS[kind]


def loss_nats(kinds: Iterable[StateKind]) -> float:
    """What saving by these kinds may cost, the mean of a passage's tokens; 0 where none is packed."""
    return max((LOSSES_NATS.get(kind, 0.0) for kind in kinds), default=0.0)


def is_on_tokens(streams: Collection[Stream]) -> bool:
    """Whether layer 1 is a delta to what token ids give: of layer 0 nothing is stored."""
    layers = {stream.layer for stream in streams if stream != TOKENS}
    return 0 not in layers and any(stream.layer == 1 and stream.kind in DELTAS for stream in streams)


def unpacked(kind: StateKind) -> StateKind:
    """The kind of `kind`'s rows once their elements are wide again."""
    if kind in DELTAS:
        return StateKind.HIDDEN
    return PACKINGS[kind].unpacked if kind in PACKINGS else kind


@lru_cache(maxsize=256)
def _layout(element_count: int, bits: int, group_size: int, outlier_count: int) -> PackedLayout:
    if not 0 < element_count <= MOST_ELEMENTS or element_count % 2:
        raise ValueError(
            f"rows of {element_count} elements are not packed: an even number up to {MOST_ELEMENTS}"
        )
    groups, kept = -(-element_count // group_size), min(outlier_count, element_count)
    outliers = _align(element_count * bits // _BITS_PER_BYTE, _OUTLIER_ALIGN_BYTES)
    scales = outliers + 4 * kept
    zeros = scales + 2 * groups
    places = zeros + 2 * groups
    end = _align(places + 2 * kept, ROW_ALIGN_BYTES)
    return PackedLayout(element_count, groups, kept, outliers, scales, zeros, places, end)


def _align(size_bytes: int, align_bytes: int) -> int:
    return -(-size_bytes // align_bytes) * align_bytes
