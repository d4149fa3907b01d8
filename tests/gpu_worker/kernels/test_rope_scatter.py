"""Rows saved before positions to pages: fused against reference, in every layout of pages."""

import itertools

import layers
import pytest
import torch

from gpu_worker.kernels.operands import Pages, Pairing
from gpu_worker.kernels.rope_scatter import fused, reference

HEADS = [((2, 16), 8), ((2, 24), 6), ((2, 17), 4), ((1, 2), 1)]
"""Heads and their size, and how many pairs are rotated: whole, half and odd sizes."""
BITS = [0, 8, 4]
CHOICES = [
    (list(layers.TOLERANCES)[(i + j) % 3], list(Pairing)[(i + 2 * j) % 3], *heads, bits)
    for i, heads in enumerate(HEADS)
    for j, bits in enumerate(BITS)
]
"""Types, pairings, heads and widths, so that every two choices meet."""


def test_every_two_choices_meet() -> None:
    """Twelve cases stand for the 108 of the whole product."""
    facts = [
        (dtype, pairing, (heads, pair_count), bits) for dtype, pairing, heads, pair_count, bits in CHOICES
    ]
    values: list[list[object]] = [[*layers.TOLERANCES], [*Pairing], [*HEADS], [*BITS]]

    for one, other in itertools.combinations(range(4), 2):
        met = {(fact[one], fact[other]) for fact in facts}
        assert met == set(itertools.product(values[one], values[other]))


@pytest.mark.parametrize(("dtype", "pairing", "heads", "pair_count", "bits"), CHOICES, ids=str)
def test_fused_is_as_the_reference(
    dtype: torch.dtype, pairing: Pairing, heads: tuple[int, int], pair_count: int, bits: int
) -> None:
    """In every type, pairing and width."""
    size = heads[0] * heads[1] + 3 * 20
    rows = layers.rows_of(layers.normal(37, size), bits, dtype)
    rotation = layers.rotation_of(37, pair_count, pairing)
    expected = layers.poisoned(37, heads, (3, 20), dtype)
    found = layers.like(expected)
    reference.rope_scatter(rows, rotation, expected)
    fused.rope_scatter(rows, rotation, found)
    layers.assert_same(found, expected)


def test_values_and_keys_without_positions_are_copied_bit_by_bit() -> None:
    """Nothing is rounded on the way."""
    rows = layers.normal(20, 2 * 16 + 3 * 20).bfloat16()
    pages = layers.poisoned(20, (2, 16), (3, 20), torch.bfloat16)
    fused.rope_scatter(rows, None, pages)
    kept = pages.slots >= 0
    assert torch.equal(pages.keys.flatten(0, 1)[pages.slots[kept]].flatten(1), rows[kept, :32])
    assert torch.equal(pages.values.flatten(0, 1)[pages.slots[kept]].flatten(1), rows[kept, 32:])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 2, 3, 1)], ids=str)
def test_any_order_of_the_engines_axes(order: tuple[int, ...]) -> None:
    """Tokens or heads first, pages first or last, dimensions before tokens."""
    rows, rotation = layers.normal(20, 2 * 16 + 2 * 16), layers.rotation_of(20, 8, Pairing.HALVES)
    expected = layers.poisoned(20, (2, 16), (2, 16), torch.float32)
    reference.rope_scatter(rows, rotation, expected)
    back = tuple(order.index(axis) for axis in range(4))
    engine = [torch.full_like(expected.keys.permute(order).contiguous(), torch.nan) for _ in range(2)]
    fused.rope_scatter(
        rows, rotation, Pages(engine[0].permute(back), engine[1].permute(back), expected.slots)
    )
    layers.assert_same(Pages(engine[0].permute(back), engine[1].permute(back), expected.slots), expected)


def test_a_contiguous_cache_is_one_page() -> None:
    """As transformers has it, heads before tokens."""
    rows, rotation = layers.normal(20, 2 * 16 + 2 * 16), layers.rotation_of(20, 8, Pairing.HALVES)
    keys, values = (torch.full((1, 2, 24, 16), torch.nan, device=layers.DEVICE) for _ in range(2))
    pages = Pages(keys.transpose(1, 2), values.transpose(1, 2), torch.arange(4, 24, device=layers.DEVICE))
    fused.rope_scatter(rows, rotation, pages)
    assert torch.isnan(keys[:, :, :4]).all()
    expected = reference.rotate(rows[:, :32].reshape(-1, 2, 16), rotation)
    assert torch.allclose(keys[0, :, 4:].transpose(0, 1), expected, atol=1e-6)


def test_places_beyond_two_to_the_31_elements() -> None:
    """4 GiB of address space of which three pages are touched."""
    page_count = (1 << 31) // (16 * 1 * 16) + 2
    keys = torch.empty(page_count, 16, 1, 16, dtype=torch.int8)
    values = torch.empty(page_count, 16, 1, 16, dtype=torch.int8)
    slots = torch.tensor([page_count * 16 - 1, (page_count - 1) * 16])
    rows = torch.tensor([[7] * 32, [9] * 32], dtype=torch.float32)
    if layers.DEVICE == "cuda":
        keys, values, slots, rows = (tensor.cuda() for tensor in (keys, values, slots, rows))
    fused.rope_scatter(rows, None, Pages(keys, values, slots))
    assert (keys[-1, -1] == 7).all()
    assert (values[-1, 0] == 9).all()


def test_rows_of_another_size_are_refused() -> None:
    """With a sentence, and before anything is written."""
    pages = layers.poisoned(20, (2, 16), (3, 20), torch.float32)
    with pytest.raises(ValueError, match="rows of 91 elements, the pages hold 92"):
        fused.rope_scatter(layers.normal(20, 91), None, pages)
    assert torch.isnan(pages.keys).all()
