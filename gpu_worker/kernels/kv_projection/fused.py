"""`kv_projection` in Triton: one program per block of tokens and head, one pass over the hidden states.

The norm is folded in: with weight w, mean m and spread s of a row, norm(x) @ W' = (x @ (w W)' - m sum(w W))
/ s + b W', so that x is loaded once, as it is, while its sums for m and s are taken beside the product.
Sums are of x - x[0], which keeps a large mean from drowning the spread. Heads lie side by side in the grid:
a block of x is in L2 for all. Worst case: a hidden size that is no multiple of BLOCK_SIZE wastes the rest
of the last block.
"""

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.device import (
    IS_INTERPRETED,
    destinations,
    dimensions,
    load_rows,
    norm_head,
    store_head,
    turn,
)
from gpu_worker.kernels.kv_projection.reference import LayerWeights, check
from gpu_worker.kernels.operands import Norm, NormKind, Pages, Pairing, ProjectionWeights, Rotation, Rows
from gpu_worker.kernels.rope_scatter.fused import parts_of, tables_of

# The grid is [heads, T / TOKENS]; one program makes one head of TOKENS tokens, for HALF = C / 2 pairs:
#
#                  D, BLOCK columns at a time ──►
#                ┌──────┬──────┬─────
#     TOKENS     │  x   │      │          each tile of x is loaded once per head, and summed for the norm
#                └──────┴──────┴─────
#                ┌──────┬──────┬─────
#     HALF       │  w1  │      │          first dimension of each pair  ──► first  [TOKENS, HALF] float32
#     HALF       │  w2  │      │          second dimension              ──► second [TOKENS, HALF] float32
#                └──────┴──────┴─────
#
# `first` and `second` stay in registers to the end. Both dimensions of a pair lie at the same place of their
# tile, so that the rotation and the head norm are arithmetic by element, without a shuffle between threads.
FEW_TOKENS = 64
MANY_TOKENS = 128
"""Tokens of a tile. With heads of 128 a tile of many is 128 x 128: smaller ones wait for L2."""
BLOCK_SIZE = 64
LEAST_HALF = 16
"""Columns that a tensor core wants at least."""


def kv_projection(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """See the reference.

    Hidden states and weights have contiguous columns; products are of the weights' type.
    """
    check(hidden, layer, rotation, pages)
    if not len(hidden):
        return
    # Two launches, since K and V may differ in heads and sizes; the second one finds x in L2 where it fits.
    _launch(hidden, layer, layer.key, rotation, pages, pages.keys, is_key=True)
    _launch(hidden, layer, layer.value, None, pages, pages.values, is_key=False)


def _launch(
    hidden: Rows,
    layer: LayerWeights,
    projection: ProjectionWeights,
    rotation: Rotation | None,
    pages: Pages,
    cache: torch.Tensor,
    *,
    is_key: bool,
) -> None:
    values, scales, zeros, outliers, places, bits, group, outlier_count = parts_of(hidden)
    # Any tensor does as a stand-in for tables: without pairs the kernel has no load of them.
    cos, sin, pairs, pairing = tables_of(rotation, values)
    norm, weight = layer.norm, projection.weight
    head_norm = layer.key_norm if is_key else None
    size = weight.shape[1]
    # float32 has no registers for the larger tile.
    is_many = len(hidden) > FEW_TOKENS and weight.dtype is not torch.float32
    block_tokens = MANY_TOKENS if is_many else FEW_TOKENS
    # Heads are the faster axis: those of one block of tokens run together and find it in L2.
    _kv_projection[projection.head_count, triton.cdiv(len(hidden), block_tokens)](
        values,
        scales,
        zeros,
        outliers,
        places,
        weight,
        # Pointers that a flag keeps from being read have to point somewhere all the same.
        _or(projection.bias, weight),
        _or(norm.weight, weight),
        _or(norm.bias, weight),
        head_norm.weight if head_norm else weight,
        cos,
        sin,
        pages.slots,
        cache,
        len(hidden),
        norm.epsilon,
        head_norm.epsilon if head_norm else 0.0,
        values.stride(0),
        scales.stride(0),
        outliers.stride(0),
        places.stride(0),
        weight.stride(0),
        *cache.stride(),
        SIZE=size,
        HEAD_SIZE=projection.head_size,
        PAIRS=pairs,
        **_norm_of(norm),
        HAS_BIAS=projection.bias is not None,
        HAS_HEAD_NORM=head_norm is not None,
        ARE_NEIGHBOURS=pairing is not Pairing.HALVES,
        TO_HALVES=pairing is Pairing.NEIGHBOURS_TO_HALVES,
        PAGE=pages.page_tokens,
        BITS=bits,
        GROUP=group,
        OUTLIERS=outlier_count,
        TOKENS=block_tokens,
        # A dot's sides are 16 at least: narrower weights and heads are padded with masked zeros.
        BLOCK=min(BLOCK_SIZE, triton.next_power_of_2(max(size, LEAST_HALF))),
        WIDEN=IS_INTERPRETED,
        HALF=max(triton.next_power_of_2(triton.cdiv(projection.head_size, 2)), LEAST_HALF),
        num_warps=8 if is_many else 4,
    )


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in if tensor is None else tensor


def _norm_of(norm: Norm) -> dict[str, bool]:
    return {
        "IS_RMS": norm.kind is NormKind.RMS,
        "IS_LAYER": norm.kind is NormKind.LAYER,
        "HAS_NORM_WEIGHT": norm.weight is not None,
        "HAS_NORM_BIAS": norm.bias is not None,
    }


@triton.jit
def _product(x, weights, WIDEN: tl.constexpr):
    # The interpreter multiplies in float32, where narrow products would overflow or round.
    if WIDEN:
        return tl.dot(x.to(tl.float32), tl.trans(weights.to(tl.float32)), input_precision="ieee")
    # "ieee" keeps float32 factors whole; by default Triton
    # rounds them to TF32, which has 10 bits behind the point.
    return tl.dot(x.to(weights.dtype), tl.trans(weights), input_precision="ieee")


@triton.jit
def _row_sums(x, shift, mask, total, squares, IS_LAYER: tl.constexpr, IS_RMS: tl.constexpr):
    """Add a tile's part to the sums of its rows and of their squares, about `shift`."""
    if IS_LAYER:
        x = tl.where(mask, x - shift[:, None], 0.0)
        total += tl.sum(x, 1)
    if IS_LAYER or IS_RMS:
        # The RMS norm takes no mean away: its squares are about zero, as x is here.
        squares += tl.sum(x * x, 1)
    return total, squares


@triton.jit
def _add(
    x,
    product,
    weight_sum,
    norm_sum,
    weight_at,
    row,
    row_mask,
    column,
    column_mask,
    stride,
    scale,
    norm_bias,
    IS_LAYER: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add what a tile of x gives one half of a head.

    The product, and the sums that the norm needs beside it.
    """
    # 64 bits wide, for a weight of more than 2^31 elements.
    place = row.to(tl.int64)[:, None] * stride + column[None, :]
    raw = tl.load(weight_at + place, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    # Rounded as the weights are before both uses: what the mean takes away is what the product put in.
    weights = (raw.to(tl.float32) * scale[None, :]).to(raw.dtype)
    product += _product(x, weights, WIDEN)
    if IS_LAYER:
        weight_sum += tl.sum(weights.to(tl.float32), 1)
    if HAS_NORM_BIAS:
        # From the weights as they are, without the gain: the norm adds its bias behind its gain.
        norm_sum += tl.sum(raw.to(tl.float32) * norm_bias[None, :], 1)
    return product, weight_sum, norm_sum


@triton.jit
def _finish(
    product,
    weight_sum,
    norm_sum,
    mean,
    spread,
    bias_at,
    row,
    row_mask,
    IS_RMS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Apply the norm, and the projection's bias, to one half of a head."""
    if IS_LAYER:
        # x @ W' of a row of means alone: what the norm would have taken away before the product.
        product -= mean[:, None] * weight_sum[None, :]
    if IS_LAYER or IS_RMS:
        product *= spread[:, None]
    # The norm adds its bias behind the division, so that its part is not divided by the spread.
    if HAS_NORM_BIAS:
        product += norm_sum[None, :]
    if HAS_BIAS:
        product += tl.load(bias_at + row, mask=row_mask, other=0.0).to(tl.float32)[None, :]
    return product


@triton.jit
def _kv_projection(
    values_at,
    scales_at,
    zeros_at,
    outliers_at,
    places_at,
    weight_at,
    bias_at,
    norm_weight_at,
    norm_bias_at,
    head_norm_at,
    cos_at,
    sin_at,
    slots_at,
    cache,
    token_count,
    epsilon,
    head_epsilon,
    value_stride,
    scale_stride,
    outlier_stride,
    place_stride,
    weight_stride,
    page_stride,
    row_stride,
    head_stride,
    size_stride,
    SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_RMS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    TO_HALVES: tl.constexpr,
    PAGE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTLIERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
    HALF: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Every load is masked by it: the last block of tokens may be short, and no padding is asked of callers.
    is_token = token < token_count
    pair = tl.arange(0, HALF)
    # A head of odd size has one dimension more in its first half.
    is_1, is_2 = pair < (HEAD_SIZE + 1) // 2, pair < HEAD_SIZE // 2
    dimension_1, dimension_2 = dimensions(pair, PAIRS, HEAD_SIZE, ARE_NEIGHBOURS)
    row_1, row_2 = head * HEAD_SIZE + dimension_1, head * HEAD_SIZE + dimension_2
    first, second = tl.zeros((TOKENS, HALF), tl.float32), tl.zeros((TOKENS, HALF), tl.float32)
    sum_1, sum_2 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    norm_1, norm_2 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    total, squares = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    shift = tl.zeros((TOKENS,), tl.float32)
    # Sums are taken about the row's first element: about zero, a row far from it would lose its spread to
    # rounding.
    if IS_LAYER:
        # Names of their own: a variable of the loop below keeps its shape.
        first_column = tl.zeros((1,), tl.int32)
        first_elements = load_rows(
            values_at,
            scales_at,
            zeros_at,
            outliers_at,
            places_at,
            token,
            first_column,
            is_token[:, None],
            value_stride,
            scale_stride,
            outlier_stride,
            place_stride,
            BITS,
            GROUP,
            OUTLIERS,
        )
        shift += tl.sum(first_elements, 1)
    # Each tile of x is loaded once, for both halves of the head and for the sums of the norm.
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_column = column < SIZE
        mask = is_token[:, None] & is_column[None, :]
        x = load_rows(
            values_at,
            scales_at,
            zeros_at,
            outliers_at,
            places_at,
            token,
            column,
            mask,
            value_stride,
            scale_stride,
            outlier_stride,
            place_stride,
            BITS,
            GROUP,
            OUTLIERS,
        )
        total, squares = _row_sums(x, shift, mask, total, squares, IS_LAYER, IS_RMS)
        # Gain and bias of the norm are read by every program; D elements of each, which stay in L2.
        scale, norm_bias = tl.full((BLOCK,), 1.0, tl.float32), tl.zeros((BLOCK,), tl.float32)
        if HAS_NORM_WEIGHT:
            scale = tl.load(norm_weight_at + column, mask=is_column, other=0.0).to(tl.float32)
        if HAS_NORM_BIAS:
            norm_bias = tl.load(norm_bias_at + column, mask=is_column, other=0.0).to(tl.float32)
        first, sum_1, norm_1 = _add(
            x,
            first,
            sum_1,
            norm_1,
            weight_at,
            row_1,
            is_1,
            column,
            is_column,
            weight_stride,
            scale,
            norm_bias,
            IS_LAYER,
            HAS_NORM_BIAS,
            WIDEN,
        )
        second, sum_2, norm_2 = _add(
            x,
            second,
            sum_2,
            norm_2,
            weight_at,
            row_2,
            is_2,
            column,
            is_column,
            weight_stride,
            scale,
            norm_bias,
            IS_LAYER,
            HAS_NORM_BIAS,
            WIDEN,
        )
    mean, spread = total / SIZE, tl.full((TOKENS,), 1.0, tl.float32)
    if IS_RMS or IS_LAYER:
        # Both sums are still about the shift here, so that the difference is the variance.
        spread = tl.rsqrt(squares / SIZE - mean * mean + epsilon)
    # From here on the row's own mean, which the weights' sums are multiplied by.
    mean += shift
    first = _finish(
        first, sum_1, norm_1, mean, spread, bias_at, row_1, is_1, IS_RMS, IS_LAYER, HAS_NORM_BIAS, HAS_BIAS
    )
    second = _finish(
        second, sum_2, norm_2, mean, spread, bias_at, row_2, is_2, IS_RMS, IS_LAYER, HAS_NORM_BIAS, HAS_BIAS
    )
    # Behind the projection's bias and before the rotation, as the model does it.
    if HAS_HEAD_NORM:
        first, second = norm_head(
            first, second, head_norm_at, dimension_1, dimension_2, is_1, is_2, head_epsilon, HEAD_SIZE
        )
    if PAIRS:
        first, second = turn(first, second, cos_at, sin_at, token, pair, is_token, PAIRS)
    # Rows behind the last token, and tokens without a slot, are written nowhere.
    slot = tl.load(slots_at + token, mask=is_token, other=-1)
    to_1, to_2 = destinations(pair, PAIRS, HEAD_SIZE, ARE_NEIGHBOURS, TO_HALVES)
    put_1, put_2 = (slot >= 0)[:, None] & is_1[None, :], (slot >= 0)[:, None] & is_2[None, :]
    store_head(cache, first, head, to_1, slot, put_1, page_stride, row_stride, head_stride, size_stride, PAGE)
    store_head(
        cache, second, head, to_2, slot, put_2, page_stride, row_stride, head_stride, size_stride, PAGE
    )
