"""Packed rows: elements in 8 or 4 bits, and where in the row lies what brings them back.

Knows sizes and offsets. The store does not look into rows; who saves and who restores do, by the kind
alone. Worst case: none here, what cannot be packed is refused by who packs (docs/chunk_format.md).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ctxcache.format.streams import StateKind

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


def unpacked(kind: StateKind) -> StateKind:
    """What rows of `kind` are once their elements are wide again."""
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
