"""`kv_projection` by Triton and cuBLAS: the norm, a product for K and one for V, and one pass over both.

    hidden [T, D] ──► norm ──► rows [T, D] ──► cuBLAS ──► [T, H * C + H_v * C_v] ──► rope_scatter ──► pages

Each step rounds where an engine's own does, so that K and V differ from the engine's by the order of a
product's sums alone. Pieces of PIECE_BYTES bound the product's memory. Worst case: few tokens, whose four
kernels take longer to launch than to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.device import AS_ROUNDED, load_rows, rounded
from gpu_worker.kernels.kv_projection.reference import LayerWeights, check
from gpu_worker.kernels.operands import (
    Norm,
    NormKind,
    Pages,
    ProjectionWeights,
    Quantized,
    Rotation,
    Rows,
)
from gpu_worker.kernels.rope_scatter.fused import parts_of, rope_scatter

PIECE_BYTES = 128 << 20
"""Most bytes of the product: a batch of 64 MiB of rows in one piece, where all heads have K and V. Shorter
pieces are no faster on the device, and each takes a processor half a millisecond to issue
(lab/notes/gpu.md)."""
_MANY_COLUMNS = 2048


def kv_projection(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """See the reference. Hidden states and weights have contiguous columns."""
    check(hidden, layer, rotation, pages)
    weight = layer.key.weight
    key_size = weight.shape[0]
    size, count = key_size + layer.value.weight.shape[0], len(hidden)
    tokens = min(max(1, PIECE_BYTES // (size * weight.element_size())), count)
    # One buffer for all pieces. Kernels of one stream run in order, so no piece writes over one that is read.
    product = torch.empty(tokens, size, dtype=weight.dtype, device=weight.device)
    for begin in range(0, count, max(1, tokens)):
        end = min(begin + tokens, count)
        rows, out = _normed(_part(hidden, begin, end), layer.norm, weight.dtype), product[: end - begin]
        _multiply(rows, layer.key, out[:, :key_size])
        _multiply(rows, layer.value, out[:, key_size:])
        own = None if rotation is None else _turned(rotation, begin, end)
        rope_scatter(out, own, Pages(pages.keys, pages.values, pages.slots[begin:end]), layer.key_norm)


def _multiply(rows: Tensor, projection: ProjectionWeights, out: Tensor) -> None:
    if projection.bias is None:
        torch.mm(rows, projection.weight.T, out=out)
    else:
        torch.addmm(projection.bias, rows, projection.weight.T, out=out)


def _part(rows: Rows, begin: int, end: int) -> Rows:
    if not isinstance(rows, Quantized):
        return rows[begin:end]
    at = slice(begin, end)
    return Quantized(
        rows.values[at],
        rows.scales[at],
        rows.zeros[at],
        rows.outliers[at],
        rows.places[at],
        rows.group_size,
        rows.bits,
    )


def _turned(rotation: Rotation, begin: int, end: int) -> Rotation:
    return Rotation(rotation.cos[begin:end], rotation.sin[begin:end], rotation.pairing)


def _normed(rows: Rows, norm: Norm, dtype: torch.dtype) -> Tensor:
    """Rows as the product takes them, [T, D] of the weights' type."""
    if isinstance(rows, Tensor) and norm.kind is NormKind.NONE:
        return rows.to(dtype)
    values, scales, zeros, outliers, places, bits, group, outlier_count = parts_of(rows)
    size = rows.row_size if isinstance(rows, Quantized) else rows.shape[1]
    count = values.shape[0]
    normed = torch.empty(count, size, dtype=dtype, device=values.device)
    # A program has a whole row in its registers. Tiles are powers of two; columns beyond D are masked.
    block = triton.next_power_of_2(size)
    _norm_rows[(count,)](
        values,
        scales,
        zeros,
        outliers,
        places,
        # Pointers that a flag keeps from being read have to point somewhere all the same.
        normed if norm.weight is None else norm.weight,
        normed if norm.bias is None else norm.bias,
        normed,
        norm.epsilon,
        values.stride(0),
        scales.stride(0),
        outliers.stride(0),
        places.stride(0),
        SIZE=size,
        IS_RMS=norm.kind is NormKind.RMS,
        IS_LAYER=norm.kind is NormKind.LAYER,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        BITS=bits,
        GROUP=group,
        OUTLIERS=outlier_count,
        BLOCK=block,
        num_warps=8 if block >= _MANY_COLUMNS else 4,
        **AS_ROUNDED,
    )
    return normed


@triton.jit
def _norm_rows(
    values_at,
    scales_at,
    zeros_at,
    outliers_at,
    places_at,
    weight_at,
    bias_at,
    normed_at,
    epsilon,
    value_stride,
    scale_stride,
    outlier_stride,
    place_stride,
    SIZE: tl.constexpr,
    IS_RMS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: wide, normed, and as the product takes it."""
    token = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    mask = (token >= 0)[:, None] & is_column[None, :]
    x = load_rows(
        values_at, scales_at, zeros_at, outliers_at, places_at, token, column, mask,
        value_stride, scale_stride, outlier_stride, place_stride, BITS, GROUP, OUTLIERS,
    )  # fmt: skip
    # Rows are of the weights' type before the norm, as the engine's rows were; masked columns stay 0.
    x = tl.where(mask, rounded(x, normed_at), 0.0)
    if IS_LAYER:
        x = tl.where(mask, x - tl.sum(x, 1)[:, None] / SIZE, 0.0)
    if IS_RMS or IS_LAYER:
        x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + epsilon)[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_at + column, mask=is_column, other=0.0).to(tl.float32)
        # A layer norm rounds once, behind its bias.
        if IS_RMS:
            x = rounded(x, weight_at)
        x *= weight[None, :]
    if HAS_BIAS:
        x += tl.load(bias_at + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = normed_at + token.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(to, x.to(normed_at.dtype.element_ty), mask=mask)
