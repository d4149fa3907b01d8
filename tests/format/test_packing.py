"""Packed rows: how large they are, what kinds there are, and what no row can be."""

import pytest

from ctxcache.format.packing import PACKINGS, unpacked
from ctxcache.format.streams import StateKind


@pytest.mark.parametrize(
    ("kind", "element_count", "row_bytes"),
    [
        (StateKind.HIDDEN_INT8, 4096, 4096 + 16 + 2 * 256 + 8 + 8),
        (StateKind.KV_INT8, 2048, 2048 + 16 + 2 * 64 + 8 + 8),
        (StateKind.HIDDEN_INT4, 4096, 2048 + 16 + 2 * 256 + 8 + 8),
        (StateKind.KV_INT4, 70, 36 + 16 + 2 * 6 + 8 + 8),
        (StateKind.KV_INT4, 2, 4 + 8 + 2 * 2 + 4 + 12),
    ],
)
def test_a_row_is_codes_outliers_scales_zeros_places_and_padding(
    kind: StateKind, element_count: int, row_bytes: int
) -> None:
    """By the table of docs/chunk_format.md."""
    assert PACKINGS[kind].row_bytes(element_count) == row_bytes


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("element_count", [2, 70, 96, 576, 32768])
def test_parts_follow_each_other_where_readers_may_load_them(kind: StateKind, element_count: int) -> None:
    """No part lies in another, and each begins at a multiple of its elements' size in every row."""
    packing = PACKINGS[kind]
    at = packing.layout(element_count)
    parts = [
        (0, 1, element_count * packing.bits // 8),
        (at.outliers, 4, 4 * at.outlier_count),
        (at.scales, 2, 2 * at.group_count),
        (at.zeros, 2, 2 * at.group_count),
        (at.places, 2, 2 * at.outlier_count),
    ]

    ends = [begin + size for begin, _, size in parts]
    assert all(end <= begin for end, (begin, _, _) in zip(ends, parts[1:], strict=False))
    assert all(begin % align == 0 for begin, align, _ in parts)
    assert ends[-1] <= at.row_bytes < ends[-1] + 16
    assert at.row_bytes % 16 == 0


@pytest.mark.parametrize("element_count", [0, -2, 71, 32770])
def test_sizes_that_are_not_packed_are_refused(element_count: int) -> None:
    """None, less than none, an odd number, and more than a place can say."""
    with pytest.raises(ValueError, match=f"rows of {element_count} elements are not packed"):
        PACKINGS[StateKind.HIDDEN_INT8].row_bytes(element_count)


def test_every_kind_says_what_it_is_unpacked() -> None:
    """A packed kind names another one, every other kind itself."""
    assert {kind.name: unpacked(kind).name for kind in StateKind} == {
        "TOKENS": "TOKENS",
        "HIDDEN": "HIDDEN",
        "KV": "KV",
        "LATENT": "LATENT",
        "HIDDEN_INT8": "HIDDEN",
        "KV_INT8": "KV",
        "HIDDEN_INT4": "HIDDEN",
        "KV_INT4": "KV",
        "ENGINE_BLOCK": "ENGINE_BLOCK",
        "KV_AS_CACHED": "KV_AS_CACHED",
        "HIDDEN_DELTA_INT4": "HIDDEN",
        "HIDDEN_DELTA_INT3": "HIDDEN",
        "HIDDEN_DELTA_INT2": "HIDDEN",
    }
