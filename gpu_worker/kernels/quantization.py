"""Quantization: rows in 8 or 4 bits with a scale per token and group of neighbours, and back.

Plain torch: saving is off the critical path, and restoring dequantizes inside the kernels. A scale per token and
group is what the residual stream needs: single dimensions of it are a thousand times the others, and a scale per
token or per channel drowns the rest. Worst case: rows with an infinity, which are refused.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.kernels.operands import MOST_BITS, NIBBLE, Quantized

_OFFSET = 8


def quantize(
    rows: Tensor, *, bits: int, group_size: int = 32, scale_dtype: torch.dtype = torch.float16
) -> Quantized:
    """Rows [T, D] -> the nearest of 2^bits - 1 symmetric steps per group. D even for 4 bits.

    A scale below the least of `scale_dtype` makes zeros of its group: for float16, of what is below 4e-6.
    Raises ValueError for rows that are not finite, or too large for it.
    """
    most = (1 << (bits - 1)) - 1
    token_count, size = rows.shape
    groups = functional.pad(rows.float(), (0, -size % group_size)).view(token_count, -1, group_size)
    scales = groups.abs().amax(-1) / most
    stored = scales.to(scale_dtype)
    if not torch.isfinite(stored).all():
        raise ValueError(f"a scale of {float(scales.amax()):g} is none that {scale_dtype} holds")
    steps = torch.where(stored > 0, stored.float(), 1.0).unsqueeze(-1)
    values = (groups / steps).round().clamp(-most, most).to(torch.int8).view(token_count, -1)[:, :size]
    return Quantized(_pack(values) if bits == NIBBLE else values.contiguous(), stored, group_size, bits)


def dequantize(rows: Quantized) -> Tensor:
    """The rows [T, D] in float32."""
    values = rows.values if rows.bits == MOST_BITS else _unpack(rows.values)
    scales = rows.scales.float().repeat_interleave(rows.group_size, dim=1)
    return values.float() * scales[:, : rows.row_size]


def _pack(values: Tensor) -> Tensor:
    nibbles = (values + _OFFSET).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << NIBBLE)).contiguous()


def _unpack(packed: Tensor) -> Tensor:
    low, high = packed & 0xF, packed >> NIBBLE
    return torch.stack((low, high), dim=-1).flatten(1).to(torch.int8) - _OFFSET
