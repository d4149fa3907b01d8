"""Rows in few bits: how far off they may be, and what they may not do to their neighbours."""

import layers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.kernels.operands import Quantized
from gpu_worker.kernels.quantization import NotRepresentable, dequantize, quantize


@given(
    st.integers(1, 5), st.integers(1, 40), st.sampled_from([8, 4]), st.integers(-30, 10), st.integers(0, 999)
)
def test_no_element_is_off_by_more_than_half_a_step(
    token_count: int, half_size: int, bits: int, exponent: int, seed: int
) -> None:
    """Whatever the size of the numbers."""
    rows = layers.normal(token_count, 2 * half_size, seed=seed) * 2.0**exponent
    quantized = quantize(rows, bits=bits)
    steps = quantized.scales.float().repeat_interleave(32, dim=1)[:, : 2 * half_size]
    # Half a step, and what the rounding of the step itself, to float16, takes from the largest.
    most = (1 << bits) - 1
    bound = steps * (0.5 + most * 2.0**-11) + most * 2.0**-25
    # Outliers are exact.
    bound = bound.scatter(1, quantized.places.long(), 0.0)
    assert ((dequantize(quantized) - rows).abs() <= bound * 1.001).all()


def test_outliers_are_kept_and_cost_nobody_anything() -> None:
    """Four dimensions of a thousand times the others are kept, and the others are as near as without them."""
    rows = layers.normal(4, 96)
    quiet = (dequantize(quantize(rows, bits=8, outlier_count=0)) - rows).abs().amax()
    rows[:, [5, 40, 41, 90]] = 23_737
    loud = dequantize(quantize(rows, bits=8))
    assert ((loud - rows)[:, [5, 40, 41, 90]] == 0).all()
    others = [i for i in range(96) if i not in (5, 40, 41, 90)]
    assert (loud - rows)[:, others].abs().amax() <= 1.5 * quiet
    drowned = dequantize(quantize(rows, bits=8, outlier_count=0))
    assert (drowned - rows)[:, others].abs().amax() > 100 * quiet


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_and_what_is_tiny_becomes_zero(bits: int) -> None:
    """No division by a scale of 0; outliers stay whatever their size."""
    rows = torch.zeros(2, 64)
    rows[1] = 1e-30
    found = dequantize(quantize(rows, bits=bits))
    assert torch.equal(found[0], rows[0])
    assert sorted(found[1].tolist()) == [0.0] * 60 + rows[1, :4].tolist()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("count", [1, 4, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_no_number_is_refused_by_its_row(value: float, count: int, dtype: torch.dtype) -> None:
    """Among the outliers or beside them, in one group or in all, in every type."""
    rows = layers.normal(4, 70).to(dtype)
    rows[2, 70 - count :] = value
    with pytest.raises(NotRepresentable, match="row 2 has an infinity, or what is no number") as caught:
        quantize(rows, bits=8)
    assert caught.value.row == 2


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_four_huge_elements_are_exact_and_a_fifth_is_refused(bits: int, sign: int) -> None:
    """No value comes back smaller than it was because float16 cannot hold it."""
    rows = layers.normal(3, 70)
    rows[1, [0, 31, 32, 69]] = sign * 3e38
    rows[2, :5] = sign * 65_000.0
    found = dequantize(quantize(rows, bits=bits))
    assert torch.equal(found[1, [0, 31, 32, 69]], rows[1, [0, 31, 32, 69]])
    assert (found[2, :5] == rows[2, :5]).sum() >= 4
    assert ((found[2, :5] - rows[2, :5]).abs() <= 64).all()
    rows[1, 40] = sign * 65_010.0
    with pytest.raises(NotRepresentable, match="row 1 has more than 4 values beyond 65,000"):
        quantize(rows, bits=bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_rows_stay_within_float16(bits: int) -> None:
    """A model of float16 gets no infinity from the step above its largest value."""
    rows = torch.linspace(-65_000.0, 65_000.0, 64).repeat(3, 1)
    rows[1] = 65_000.0
    rows[2] = -65_000.0
    found = dequantize(quantize(rows, bits=bits), torch.float16)
    assert torch.isfinite(found).all()
    assert ((found.float() - rows).abs() <= 130_000 / ((1 << bits) - 1)).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 31, 33, 65, 577])
@pytest.mark.parametrize("outlier_count", [0, 1, 4, 9])
def test_outliers_at_every_size(size: int, outlier_count: int) -> None:
    """Rows with fewer elements than outliers, and groups that are not full.

    Every outlier is exact, and the largest.
    """
    rows = layers.normal(5, size, seed=size)
    quantized = quantize(rows, bits=8, outlier_count=outlier_count)
    kept = min(outlier_count, size)
    assert quantized.places.shape == (5, kept)
    found = dequantize(quantized)
    largest = rows.abs().topk(kept, dim=1).indices
    assert torch.equal(found.gather(1, largest), rows.gather(1, largest))
    assert ((found - rows).abs() <= 0.03).all()


def test_a_row_that_places_cannot_count_is_refused() -> None:
    """Places are signed 16-bit numbers: a longer row would put an outlier elsewhere."""
    with pytest.raises(ValueError, match="rows of 32769 elements are longer than 32768"):
        quantize(torch.ones(1, 32_769), bits=8)


def test_many_rows_are_made_wide_as_few_are() -> None:
    """More elements than are made wide at once, in the type that is asked for."""
    rows = layers.normal(300, 4096)
    quantized = quantize(rows, bits=8)
    wide = dequantize(quantized, torch.bfloat16)
    assert wide.dtype is torch.bfloat16
    assert torch.equal(wide, dequantize(quantized).bfloat16())
    assert torch.equal(wide[-3:], dequantize(quantize(rows[-3:], bits=8), torch.bfloat16))


def test_bytes_per_element() -> None:
    """8 bits, and 1/32 of a step and a least value of 16 each; or 4 and the same; four outliers."""
    rows = layers.normal(10, 4096)
    taken = {bits: quantize(rows, bits=bits) for bits in (8, 4)}
    sizes = {bits: rows.size_bytes // 10 for bits, rows in taken.items()}
    assert sizes == {8: 4096 * 36 // 32 + 4 * 6, 4: 4096 * 20 // 32 + 4 * 6}


def test_what_does_not_belong_together_is_refused() -> None:
    """With a sentence."""
    values, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2)
    few = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int16)
    with pytest.raises(ValueError, match="5 bits are neither"):
        Quantized(values, scales, scales, *few, 32, 5)
    with pytest.raises(ValueError, match="group of 24"):
        Quantized(values, scales, scales, *few, 24, 8)
    with pytest.raises(ValueError, match="do not belong together"):
        Quantized(values, scales[:1], scales, *few, 32, 8)
    with pytest.raises(ValueError, match="do not lie equally far apart"):
        Quantized(values, scales, torch.zeros(2, 4)[:, ::2], *few, 32, 8)
    with pytest.raises(ValueError, match="outliers and places"):
        Quantized(values, scales, scales, few[0], few[1][:1], 32, 8)
