"""Quantization: rows in 8 or 4 bits with a least value and a step per token and group of neighbours, and back.

Plain torch: saving is off the critical path, and restoring dequantizes inside the kernels. Single dimensions of a
residual stream are a thousand times the others and would drown their group: the few largest of each token are
kept beside the steps, in 16 bits, which on SmolLM2 makes the divergence 16 times smaller (docs/kernels.md). Steps
begin at the group's least value, for its values seldom lie around 0. Worst case: rows with an infinity, refused.
"""

import torch
from torch import Tensor

from gpu_worker.kernels.operands import MOST_BITS, NIBBLE, Quantized

OUTLIERS = 4
"""Of each token; more hardly make the divergence smaller."""
MARGIN = 2.0**-10
"""How far below the least value a group begins, relative to it: no rounding to 16 bits puts it above."""


def quantize(
    rows: Tensor, *, bits: int, group_size: int = 32, outlier_count: int = OUTLIERS,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantized:  # fmt: skip
    """Rows [T, D] -> the nearest of 2^bits steps per group, and each token's outliers. D even for 4 bits.

    A step below the least of `scale_dtype` makes one value of its group: for float16, of what spans less than 1e-5.
    Raises ValueError for rows that are not finite, or too large for it.
    """
    most = (1 << bits) - 1
    token_count, size = rows.shape
    places = rows.abs().topk(min(outlier_count, size), dim=1).indices
    outliers = rows.gather(1, places).to(scale_dtype)
    rows = rows.scatter(1, places, 0.0)
    # The last group is filled up with what is in it already.
    filled = torch.cat((rows, rows[:, -1:].expand(-1, -size % group_size)), dim=1).float()
    groups = filled.reshape(token_count, -1, group_size)
    least = groups.amin(-1)
    zeros = (least - least.abs() * MARGIN).to(scale_dtype)
    scales = ((groups.amax(-1) - zeros.float()) / most).to(scale_dtype)
    if not all(bool(torch.isfinite(part).all()) for part in (outliers, scales, zeros)):
        raise ValueError(f"values are too large for {scale_dtype}, or none")
    steps = torch.where(scales > 0, scales.float(), torch.inf).unsqueeze(-1)
    values = ((groups - zeros.float().unsqueeze(-1)) / steps).round().clamp(0, most).to(torch.uint8)
    values = values.view(token_count, -1)[:, :size]
    return Quantized(
        _pack(values) if bits == NIBBLE else values.contiguous(), scales, zeros,
        outliers.contiguous(), places.to(torch.int16), group_size, bits,
    )  # fmt: skip


def dequantize(rows: Quantized) -> Tensor:
    """The rows [T, D] in float32."""
    values = rows.values if rows.bits == MOST_BITS else _unpack(rows.values)
    scales, zeros = (
        part.float().repeat_interleave(rows.group_size, dim=1)[:, : rows.row_size]
        for part in (rows.scales, rows.zeros)
    )
    return (values.float() * scales + zeros).scatter(1, rows.places.long(), rows.outliers.float())


def _pack(values: Tensor) -> Tensor:
    return (values[:, 0::2] | (values[:, 1::2] << NIBBLE)).contiguous()


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> NIBBLE), dim=-1).flatten(1)
