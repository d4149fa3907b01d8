"""`rope_scatter` in Triton: one program per block of tokens and head, one pass over the rows."""

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.device import (
    AS_ROUNDED,
    destinations,
    dimensions,
    load_rows,
    norm_head,
    rounded,
    store_head,
    turn,
)
from gpu_worker.kernels.operands import HeadNorm, Pages, Pairing, Quantized, Rotation, Rows
from gpu_worker.kernels.rope_scatter.reference import check

# The grid is [T / 32, H + H_v]: a program moves one head of 32 tokens.
#
#     columns of a row   0                       H * C                          H * C + H_v * C_v
#                        │ K of head 0, 1, ...   │ V of head 0, 1, ...          │
#     program_id(1)        0  ...  H - 1           H  ...  H + H_v - 1
#
# Each row is read once and written once: memory bounds the kernel, not arithmetic.
BLOCK_TOKENS = 32


def rope_scatter(
    rows: Rows, rotation: Rotation | None, pages: Pages, head_norm: HeadNorm | None = None
) -> None:
    """See the reference. Rows have contiguous columns. `head_norm`: of K's heads, before they turn."""
    check(rows, rotation, pages)
    values, scales, zeros, outliers, places, bits, group, outlier_count = parts_of(rows)
    (_, _, key_heads, key_size), (_, _, value_heads, value_size) = pages.keys.shape, pages.values.shape
    cos, sin, pairs, pairing = tables_of(rotation, values)
    token_count = values.shape[0]
    if not token_count:
        return
    # One program serves key heads and value heads, whichever are wider.
    widest = max(key_size, value_size)
    _rope_scatter[triton.cdiv(token_count, BLOCK_TOKENS), key_heads + value_heads](
        values,
        scales,
        zeros,
        outliers,
        places,
        cos,
        sin,
        pages.slots,
        pages.keys,
        pages.values,
        # Pointers that a flag keeps from being read have to point somewhere all the same.
        head_norm.weight if head_norm else values,
        head_norm.epsilon if head_norm else 0.0,
        token_count,
        values.stride(0),
        scales.stride(0),
        outliers.stride(0),
        places.stride(0),
        *pages.keys.stride(),
        *pages.values.stride(),
        KEY_HEADS=key_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAIRS=pairs,
        HAS_HEAD_NORM=head_norm is not None,
        ARE_NEIGHBOURS=pairing is not Pairing.HALVES,
        TO_HALVES=pairing is Pairing.NEIGHBOURS_TO_HALVES,
        PAGE=pages.page_tokens,
        BITS=bits,
        GROUP=group,
        OUTLIERS=outlier_count,
        TOKENS=BLOCK_TOKENS,
        HALF=triton.next_power_of_2(triton.cdiv(widest, 2)),
        **AS_ROUNDED,
    )


def parts_of(
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Parts of rows, bits, group and outliers per token.

    Rows that are not quantized have 0 bits and no outliers.
    """
    if isinstance(rows, Quantized):
        return (
            rows.values,
            rows.scales,
            rows.zeros,
            rows.outliers,
            rows.places,
            rows.bits,
            rows.group_size,
            rows.places.shape[1],
        )
    # Pointers must point somewhere; with 0 bits and no outliers the kernels read the first alone.
    return rows, rows, rows, rows, rows, 0, 1, 0


def tables_of(
    rotation: Rotation | None, stand_in: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, Pairing]:
    """Contiguous tables, pairs and pairing; without a rotation no pair turns, and `stand_in` is not read."""
    if rotation is None:
        return stand_in, stand_in, 0, Pairing.HALVES
    # Kernels reckon PAIRS columns to a table's row. A slice
    # of tokens is contiguous already, and is not copied.
    return rotation.cos.contiguous(), rotation.sin.contiguous(), rotation.pair_count, rotation.pairing


@triton.jit
def _rope_scatter(
    values_at,
    scales_at,
    zeros_at,
    outliers_at,
    places_at,
    cos_at,
    sin_at,
    slots_at,
    keys,
    caches,
    head_norm_at,
    head_epsilon,
    token_count,
    value_stride,
    scale_stride,
    outlier_stride,
    place_stride,
    k_page,
    k_row,
    k_head,
    k_size,
    v_page,
    v_row,
    v_head,
    v_size,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    TO_HALVES: tl.constexpr,
    PAGE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTLIERS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF)
    is_token = token < token_count
    slot = tl.load(slots_at + token, mask=is_token, other=-1)
    # Rows of tokens without a slot are read all the same, and written nowhere.
    is_put = slot >= 0
    # Key heads are turned; the heads behind them are values, which have no positions and are only copied.
    if head < KEY_HEADS:
        first, second = dimensions(pair, PAIRS, KEY_SIZE, ARE_NEIGHBOURS)
        mask_1 = is_token[:, None] & (pair < (KEY_SIZE + 1) // 2)[None, :]
        mask_2 = is_token[:, None] & (pair < KEY_SIZE // 2)[None, :]
        begin = head * KEY_SIZE
        a = load_rows(
            values_at,
            scales_at,
            zeros_at,
            outliers_at,
            places_at,
            token,
            begin + first,
            mask_1,
            value_stride,
            scale_stride,
            outlier_stride,
            place_stride,
            BITS,
            GROUP,
            OUTLIERS,
        )
        b = load_rows(
            values_at,
            scales_at,
            zeros_at,
            outliers_at,
            places_at,
            token,
            begin + second,
            mask_2,
            value_stride,
            scale_stride,
            outlier_stride,
            place_stride,
            BITS,
            GROUP,
            OUTLIERS,
        )
        # Quantized rows are of the cache's type before they turn, as the engine's were.
        if BITS:
            a, b = rounded(a, keys), rounded(b, keys)
        if HAS_HEAD_NORM:
            is_1, is_2 = pair < (KEY_SIZE + 1) // 2, pair < KEY_SIZE // 2
            a, b = norm_head(a, b, head_norm_at, first, second, is_1, is_2, head_epsilon, KEY_SIZE)
            a, b = rounded(a, keys), rounded(b, keys)
        if PAIRS:
            a, b = turn(a, b, cos_at, sin_at, token, pair, is_token, PAIRS)
        first, second = destinations(pair, PAIRS, KEY_SIZE, ARE_NEIGHBOURS, TO_HALVES)
        put_1, put_2 = mask_1 & is_put[:, None], mask_2 & is_put[:, None]
        store_head(keys, a, head, first, slot, put_1, k_page, k_row, k_head, k_size, PAGE)
        store_head(keys, b, head, second, slot, put_2, k_page, k_row, k_head, k_size, PAGE)
    else:
        head -= KEY_HEADS
        # HALF is made for the wider of both heads: twice of it covers a head of values.
        dimension = tl.arange(0, 2 * HALF)
        mask = is_token[:, None] & (dimension < VALUE_SIZE)[None, :]
        # Values lie behind all keys of a row.
        column = KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + dimension
        rows = load_rows(
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
        mask &= is_put[:, None]
        store_head(caches, rows, head, dimension, slot, mask, v_page, v_row, v_head, v_size, PAGE)
