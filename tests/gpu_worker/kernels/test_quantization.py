"""Rows in few bits: how far off they may be, and what they may not do to their neighbours."""

import layers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.kernels.operands import Quantized
from gpu_worker.kernels.quantization import dequantize, quantize


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
    bound = bound.scatter(1, quantized.places.long(), quantized.outliers.float().abs() * 2.0**-10 + 2.0**-25)
    assert ((dequantize(quantized) - rows).abs() <= bound * 1.001).all()


def test_outliers_are_kept_and_cost_nobody_anything() -> None:
    """Four dimensions of a thousand times the others are kept, and the others are as near as without them."""
    rows = layers.normal(4, 96)
    quiet = (dequantize(quantize(rows, bits=8, outlier_count=0)) - rows).abs().amax()
    rows[:, [5, 40, 41, 90]] = 23_737
    loud = dequantize(quantize(rows, bits=8))
    assert ((loud - rows)[:, [5, 40, 41, 90]].abs() <= 8).all()
    others = [i for i in range(96) if i not in (5, 40, 41, 90)]
    assert (loud - rows)[:, others].abs().amax() <= 1.5 * quiet
    drowned = dequantize(quantize(rows, bits=8, outlier_count=0))
    assert (drowned - rows)[:, others].abs().amax() > 100 * quiet


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_and_what_is_tiny_becomes_zero(bits: int) -> None:
    """No division by a scale of 0."""
    rows = torch.zeros(2, 64)
    rows[1] = 1e-30
    assert torch.equal(dequantize(quantize(rows, bits=bits)), torch.zeros(2, 64))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e9])
def test_what_no_scale_holds_is_refused(value: float) -> None:
    """Infinite, no number, or too large for the scale."""
    rows = layers.normal(2, 64)
    rows[1, 3] = value
    with pytest.raises(ValueError, match="too large for"):
        quantize(rows, bits=8)


def test_bytes_per_element() -> None:
    """8 bits, and 1/32 of a step and a least value of 16 each; or 4 and the same; four outliers."""
    rows = layers.normal(10, 4096)
    taken = {bits: quantize(rows, bits=bits) for bits in (8, 4)}
    sizes = {bits: rows.size_bytes // 10 for bits, rows in taken.items()}
    assert sizes == {8: 4096 * 36 // 32 + 4 * 4, 4: 4096 * 20 // 32 + 4 * 4}


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
    with pytest.raises(ValueError, match="outliers and places"):
        Quantized(values, scales, scales, few[0], few[1][:1], 32, 8)
