"""Hidden states to pages by one product: the reference's, folded and not, and the cost of rounding."""

import dataclasses

import layers
import pytest
import torch

from gpu_worker.kernels.kv_projection import fused, product, reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import Norm, NormKind, Pages, Pairing, ProjectionWeights, Rows

SIZE = 96


def _layer(
    kind: NormKind, dtype: torch.dtype, *, heads: tuple[int, int] = (2, 24), has_head_norm: bool = False
) -> LayerWeights:
    return layers.layer_of(
        kind, dtype, size=SIZE, heads=heads, value_heads=(3, 20), has_head_norm=has_head_norm
    )


def _folded(layer: LayerWeights) -> LayerWeights:
    folded = reference.fold(layer)
    assert folded is not None
    return dataclasses.replace(layer, folded=folded)


def _both(hidden: Rows, layer: LayerWeights, pairing: Pairing, heads: tuple[int, int]) -> tuple[Pages, Pages]:
    rotation = layers.rotation_of(len(hidden), heads[1] // 4, pairing)
    expected = layers.poisoned(len(hidden), heads, (3, 20), layer.key.weight.dtype)
    found = layers.like(expected)
    reference.kv_projection(hidden, layer, rotation, expected)
    product.by_product(hidden, layer, rotation, found)
    return found, expected


@pytest.mark.parametrize("is_folded", [True, False], ids=["folded", "normed"])
@pytest.mark.parametrize(
    ("kind", "dtype", "bits", "pairing", "heads", "has_head_norm"),
    [
        (NormKind.RMS, torch.bfloat16, 0, Pairing.HALVES, (2, 24), True),
        (NormKind.RMS, torch.bfloat16, 8, Pairing.NEIGHBOURS, (1, 17), False),
        (NormKind.LAYER, torch.float16, 0, Pairing.HALVES, (2, 24), False),
        (NormKind.LAYER, torch.float32, 4, Pairing.NEIGHBOURS_TO_HALVES, (2, 24), False),
        (NormKind.NONE, torch.float32, 0, Pairing.HALVES, (2, 80), False),
        (NormKind.NONE, torch.bfloat16, 8, Pairing.HALVES, (2, 24), False),
    ],
)
def test_it_is_the_reference(
    kind: NormKind,
    dtype: torch.dtype,
    bits: int,
    pairing: Pairing,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_head_norm: bool,
    is_folded: bool,
) -> None:
    """Norms, types, few bits, partial rotation, odd heads, biases, permuted slots, ragged pieces."""
    monkeypatch.setattr(product, "PIECE_TOKENS", 12)
    layer = _layer(kind, dtype, heads=heads, has_head_norm=has_head_norm)
    hidden = layers.rows_of(3 * layers.normal(21, SIZE) + 5, bits, dtype)

    layers.assert_same(*_both(hidden, _folded(layer) if is_folded else layer, pairing, heads))


def test_the_control_is_seen() -> None:
    """The keys differ where the gain is left out of one column of the weights."""
    layer = _folded(_layer(NormKind.RMS, torch.bfloat16))
    assert layer.folded is not None
    layer.folded.weight[:, 7] = torch.cat((layer.key.weight, layer.value.weight))[:, 7]
    found, expected = _both(3 * layers.normal(21, SIZE).bfloat16(), layer, Pairing.HALVES, (2, 24))

    with pytest.raises(AssertionError):
        layers.assert_same(found, expected)


def _error(rows: Pages, right: Pages) -> float:
    """The error of K and V in root mean square, relative to their own."""
    pairs = ((rows.keys, right.keys), (rows.values, right.values))
    off, whole = (
        sum(float(each.double().nan_to_num().square().sum()) for each in part)
        for part in zip(*((one.double() - other.double(), other) for one, other in pairs), strict=True)
    )
    return float((off / whole) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.LAYER], ids=lambda kind: kind.name)
def test_folding_costs_no_more_than_an_engines_own_rounding(kind: NormKind, dtype: torch.dtype) -> None:
    """Gains from a hundredth to a hundred, and rows with an outlier that is a thousand times the others.

    The exact result is the reference's on the same numbers in float32; normed rows round as an engine does.
    """
    gain = 10 ** (2 * layers.normal(SIZE, seed=11).clamp(-1, 1))
    layer = _layer(kind, dtype)
    layer = dataclasses.replace(layer, norm=dataclasses.replace(layer.norm, weight=gain.to(dtype)))
    hidden = layers.normal(21, SIZE)
    hidden[:, 5] *= 1000
    hidden = hidden.to(dtype)
    right = layers.poisoned(21, (2, 24), (3, 20), torch.float32)
    reference.kv_projection(hidden, layer, None, right)
    errors = []
    for each in (_folded(layer), layer):
        empty = [torch.full_like(cache, torch.nan, dtype=dtype) for cache in (right.keys, right.values)]
        found = Pages(empty[0], empty[1], right.slots)
        product.by_product(hidden, each, None, found)
        errors.append(_error(found, right))

    half = torch.finfo(dtype).eps / 2
    assert errors[0] <= 1.5 * half
    assert errors[0] <= 1.25 * errors[1]


def test_weights_that_do_not_round_are_not_folded() -> None:
    """In float16 a small gain makes numbers that the type has few digits for."""
    weight = layers.normal(48, SIZE, seed=3).half() * 1e-3
    layer = LayerWeights(
        Norm(NormKind.RMS, 1e-5, torch.full((SIZE,), 1e-3, device=layers.DEVICE).half()),
        ProjectionWeights(weight, 2),
        ProjectionWeights(layers.normal(60, SIZE, seed=4).half(), 3),
    )
    assert reference.fold(layer) is None
    huge = dataclasses.replace(
        layer, norm=Norm(NormKind.RMS, 1e-5, torch.full((SIZE,), 6e4, device=layers.DEVICE).half())
    )
    assert reference.fold(huge) is None

    # Few digits are left of the result too: what counts is that it is rounded once.
    scaled = dataclasses.replace(layer, key=ProjectionWeights(weight * 1000, 2))
    found, expected = _both(layers.normal(20, SIZE).half(), scaled, Pairing.HALVES, (2, 24))
    layers.assert_same(found, expected)


def test_rows_that_overflow_a_float16_product_do_not() -> None:
    """A stream whose outliers are near the type's end: the product before the norm is beyond it."""
    layer = _folded(_layer(NormKind.RMS, torch.float16))
    hidden = layers.normal(20, SIZE)
    hidden[:, 7] = 60_000
    hidden[:, 8] = -60_000

    layers.assert_same(*_both(hidden.half(), layer, Pairing.HALVES, (2, 24)))


@pytest.mark.parametrize(
    ("count", "dtype", "is_short"),
    [(19, torch.bfloat16, True), (20, torch.bfloat16, False), (1, torch.float32, False)],
)
def test_the_run_decides(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, is_short: bool
) -> None:
    """Short runs go to the fused kernel, float32 never does; no token is no work."""
    used: list[str] = []
    monkeypatch.setattr(product, "LEAST_TOKENS", 20)
    monkeypatch.setattr(fused, "kv_projection", lambda *_: used.append("fused"))
    monkeypatch.setattr(product, "by_product", lambda *_: used.append("product"))
    layer = _layer(NormKind.RMS, dtype)
    product.kv_projection(
        layers.normal(count, SIZE).to(dtype), layer, None, layers.poisoned(count, (2, 24), (3, 20), dtype)
    )
    assert used == ["fused" if is_short else "product"]
    monkeypatch.undo()
    pages = layers.poisoned(0, (2, 24), (3, 20), dtype)
    product.by_product(layers.normal(0, SIZE).to(dtype), layer, None, pages)
    assert pages.keys.isnan().all()
