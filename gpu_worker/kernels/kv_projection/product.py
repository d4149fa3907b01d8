"""`kv_projection` for long runs: one product for K and V together, and one pass over the product.

    x [T, D] ──► sums of each row (and wide rows, of few bits) ──► x @ Wg' by cuBLAS ──► spread, bias, head
                                                                   [T, N]                norm, rotation, slots

Rows are multiplied as they are by weights that have the norm's gain in them (see `fold`), and normed behind
the product. Where weights are not folded, rows are normed before it, as an engine does.

Pieces of PIECE_TOKENS bound the product, and keep it in the device's L2 between cuBLAS and the pass behind
it. float16 has a float32 product: rows that are not normed overflow it. Short runs go to the fused kernel,
float32 never does. Worst case: rows of few bits, which are written wide once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.device import destinations, dimensions, load_rows, norm_head, store_head, turn
from gpu_worker.kernels.kv_projection import fused
from gpu_worker.kernels.kv_projection.reference import LayerWeights, check
from gpu_worker.kernels.operands import Norm, NormKind, Pages, Pairing, Quantized, Rotation, Rows
from gpu_worker.kernels.rope_scatter.fused import parts_of, tables_of

LEAST_TOKENS = 1024
"""Tokens from which on the product is faster; `python -m lab.studies.kernels` measures it."""
PIECE_TOKENS = 2048
_ROWS, _COLUMNS, _TOKENS = 4, 1024, 32


# One piece of at most PIECE_TOKENS tokens, N = H * C + H_v * C_v:
#
#     _rows_and_sums    grid [t / 4]: a program has 4 rows, 1,024 columns at a time in registers
#         x [t, D] ──► means [t], spreads [t]; rows [t, D] of the weights' type where x is not
#     _multiply         cuBLAS: rows [t, D] @ weight [N, D]' ──► product [t, N]
#     _embed            grid [t / 32, H + H_v]: a program has one head of 32 tokens
#         product [32, C] ──► * spread, + bias ──► head norm, rotation ──► 32 slots of the pages
#
# Columns of the product, and rows of `Folded.weight`, `bias` and `sums`:
#
#     0                      H * C                    N
#     │ key heads, C each    │ value heads, C_v each  │
def kv_projection(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """See the reference. By the fused kernel where the run is short."""
    if len(hidden) < LEAST_TOKENS and layer.key.weight.dtype is not torch.float32:
        fused.kv_projection(hidden, layer, rotation, pages)
    else:
        by_product(hidden, layer, rotation, pages)


def by_product(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """See the reference."""
    check(hidden, layer, rotation, pages)
    dtype, device = layer.key.weight.dtype, layer.key.weight.device
    key_count, value_count = len(layer.key.weight), len(layer.value.weight)
    # Llama-2-7B has N = 8,192: 2,048 tokens in 16 bits are 32 MiB, within the 40 MB of an A100's L2.
    most = min(PIECE_TOKENS, len(hidden))
    wide = torch.float32 if dtype is torch.float16 else dtype
    # One buffer for all pieces. Kernels of one stream run in order, so no piece writes over one that is read.
    product = torch.empty(most, key_count + value_count, dtype=wide, device=device)
    for begin in range(0, len(hidden), PIECE_TOKENS):
        end = min(begin + PIECE_TOKENS, len(hidden))
        piece, out = _part(hidden, begin, end), product[: end - begin]
        folded = layer.folded
        rows, means, scales = _prepare(piece, layer.norm, dtype, is_normed=folded is None)
        own = None if rotation is None else _turned(rotation, begin, end)
        to = Pages(pages.keys, pages.values, pages.slots[begin:end])
        # Two products, since K's and V's weights are two tensors here, each into its columns of one buffer.
        if folded is None:
            _multiply(rows, layer.key.weight, out[:, :key_count])
            _multiply(rows, layer.value.weight, out[:, key_count:])
            _embed_all(out, layer, _biases(layer), None, None, own, to)
        else:
            _multiply(rows, folded.weight, out)
            # An RMS norm takes no mean away: its rows' means are not used.
            sums = (folded.sums, means) if layer.norm.kind is NormKind.LAYER and means is not None else None
            _embed_all(out, layer, folded.bias, sums, scales, own, to)


def _biases(layer: LayerWeights) -> Tensor:
    """Those of the projections, float32 [N]: rows were normed before."""
    biases = []
    for each in (layer.key, layer.value):
        nothing = each.weight.new_zeros(len(each.weight), dtype=torch.float32)
        biases.append(nothing if each.bias is None else each.bias.float())
    return torch.cat(biases)


def _multiply(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    if rows.dtype is out.dtype:
        torch.mm(rows, weight.T, out=out)
    elif rows.is_cuda:
        torch.mm(rows, weight.T, out_dtype=out.dtype, out=out)
    else:
        # A CPU has no product that is wider than its factors.
        torch.mm(rows.to(out.dtype), weight.T.to(out.dtype), out=out)


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


def _prepare(
    rows: Rows, norm: Norm, dtype: torch.dtype, *, is_normed: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows to be multiplied, wide and maybe normed, and the mean and 1 / spread of each row, float32 [T]."""
    values, scales, zeros, outliers, places, bits, group, outlier_count = parts_of(rows)
    has_norm = norm.kind is not NormKind.NONE
    # cuBLAS needs rows of the weights' type. Rows that have
    # it already, and are normed behind, are not copied.
    is_written = bool(bits) or values.dtype is not dtype or (has_norm and is_normed)
    # Without a norm there is nothing to sum up, and the rows are multiplied where they lie.
    if isinstance(rows, Tensor) and not has_norm and not is_written:
        return rows, None, None
    size = rows.row_size if isinstance(rows, Quantized) else rows.shape[1]
    means = torch.empty(len(rows), device=values.device)
    spreads = torch.empty_like(means)
    written = torch.empty(len(rows), size, dtype=dtype, device=values.device) if is_written else values
    _rows_and_sums[(triton.cdiv(len(rows), _ROWS),)](
        values,
        scales,
        zeros,
        outliers,
        places,
        values if norm.weight is None else norm.weight,
        values if norm.bias is None else norm.bias,
        written,
        means,
        spreads,
        len(rows),
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
        IS_WRITTEN=is_written and not (has_norm and is_normed),
        IS_NORMED=has_norm and is_normed,
        BITS=bits,
        GROUP=group,
        OUTLIERS=outlier_count,
        ROWS=_ROWS,
        # Triton's tiles are powers of two; columns beyond D are masked.
        BLOCK=min(_COLUMNS, triton.next_power_of_2(size)),
    )
    if isinstance(rows, Tensor) and not is_written:
        written = rows
    return written, means if has_norm else None, spreads if has_norm else None


def _embed_all(
    product: Tensor,
    layer: LayerWeights,
    bias: Tensor,
    sums: tuple[Tensor, Tensor] | None,
    scales: Tensor | None,
    rotation: Rotation | None,
    pages: Pages,
) -> None:
    """`sums`: of the weights' rows, and the means that they are taken off by; `scales`: 1 / spread."""
    (_, _, key_heads, key_size), (_, _, value_heads, value_size) = pages.keys.shape, pages.values.shape
    cos, sin, pairs, pairing = tables_of(rotation, product)
    head_norm = layer.key_norm
    _embed[triton.cdiv(len(product), _TOKENS), key_heads + value_heads](
        product,
        # Pointers that a flag keeps from being read have to point somewhere all the same.
        product if sums is None else sums[1],
        product if scales is None else scales,
        product if sums is None else sums[0],
        bias,
        head_norm.weight if head_norm else product,
        cos,
        sin,
        pages.slots,
        pages.keys,
        pages.values,
        len(product),
        head_norm.epsilon if head_norm else 0.0,
        product.stride(0),
        *pages.keys.stride(),
        *pages.values.stride(),
        KEY_HEADS=key_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAIRS=pairs,
        IS_SCALED=scales is not None,
        HAS_SUMS=sums is not None,
        HAS_HEAD_NORM=head_norm is not None,
        ARE_NEIGHBOURS=pairing is not Pairing.HALVES,
        TO_HALVES=pairing is Pairing.NEIGHBOURS_TO_HALVES,
        PAGE=pages.page_tokens,
        TOKENS=_TOKENS,
        HALF=triton.next_power_of_2(triton.cdiv(max(key_size, value_size), 2)),
    )


@triton.jit
def _rows_and_sums(
    values_at,
    scales_at,
    zeros_at,
    outliers_at,
    places_at,
    weight_at,
    bias_at,
    written_at,
    means_at,
    spreads_at,
    token_count,
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
    IS_WRITTEN: tl.constexpr,
    IS_NORMED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTLIERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of ROWS rows in one pass; the rows wide in it, or normed in a second one, where wanted."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < token_count
    total, squares = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    # About the row's first element: about zero, a row far from it would lose its spread to rounding.
    if IS_LAYER:
        # Names of their own: a variable of the loop below keeps its shape.
        first_column = tl.zeros((1,), tl.int32)
        first_elements = load_rows(
            values_at, scales_at, zeros_at, outliers_at, places_at, token, first_column, is_token[:, None],
            value_stride, scale_stride, outlier_stride, place_stride, BITS, GROUP, OUTLIERS,
        )  # fmt: skip
        shift += tl.sum(first_elements, 1)
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = is_token[:, None] & (column < SIZE)[None, :]
        x = load_rows(
            values_at, scales_at, zeros_at, outliers_at, places_at, token, column, mask,
            value_stride, scale_stride, outlier_stride, place_stride, BITS, GROUP, OUTLIERS,
        )  # fmt: skip
        if IS_WRITTEN:
            to = written_at + token.to(tl.int64)[:, None] * SIZE + column[None, :]
            tl.store(to, x.to(written_at.dtype.element_ty), mask=mask)
            # The sums are those of the rows that are multiplied.
            x = tl.where(mask, x.to(written_at.dtype.element_ty).to(tl.float32), 0.0)
        if IS_LAYER:
            x = tl.where(mask, x - shift[:, None], 0.0)
            total += tl.sum(x, 1)
        squares += tl.sum(x * x, 1)
    # var(x) = mean((x - first)^2) - mean(x - first)^2: one pass, and both sums are about the same shift.
    mean, spread = total / SIZE, tl.full((ROWS,), 1.0, tl.float32)
    if IS_RMS or IS_LAYER:
        spread = tl.rsqrt(squares / SIZE - mean * mean + epsilon)
    mean += shift
    tl.store(means_at + token, mean, mask=is_token)
    tl.store(spreads_at + token, spread, mask=is_token)
    # The second pass over a row. A program has read its 4 rows a moment ago: they come from the cache.
    if IS_NORMED:
        for begin in range(0, SIZE, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            is_column = column < SIZE
            mask = is_token[:, None] & is_column[None, :]
            x = load_rows(
                values_at, scales_at, zeros_at, outliers_at, places_at, token, column, mask,
                value_stride, scale_stride, outlier_stride, place_stride, BITS, GROUP, OUTLIERS,
            )  # fmt: skip
            if IS_LAYER:
                x -= mean[:, None]
            x *= spread[:, None]
            if HAS_WEIGHT:
                x *= tl.load(weight_at + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if HAS_BIAS:
                x += tl.load(bias_at + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            to = written_at + token.to(tl.int64)[:, None] * SIZE + column[None, :]
            tl.store(to, x.to(written_at.dtype.element_ty), mask=mask)


@triton.jit
def _load_product(
    product_at,
    sums_at,
    bias_at,
    mean,
    scale,
    token,
    column,
    mask,
    stride,
    IS_SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):
    """A tile [tokens, columns] of normed projections, float32."""
    # Columns that no token of the tile uses are beyond the head, and their bias is not read.
    is_column = tl.max(mask.to(tl.int32), 0) > 0
    x = tl.load(product_at + token.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if HAS_SUMS:
        # Before the scale: the mean belongs to the row as it is, the spread divides both.
        x -= mean[:, None] * tl.load(sums_at + column, mask=is_column, other=0.0)[None, :]
    if IS_SCALED:
        x *= scale[:, None]
    # The head's norm sums all columns of the tile, so that masked ones must be 0 and not the bias.
    return tl.where(mask, x + tl.load(bias_at + column, mask=is_column, other=0.0)[None, :], 0.0)


@triton.jit
def _embed(
    product_at,
    means_at,
    scales_at,
    sums_at,
    bias_at,
    head_norm_at,
    cos_at,
    sin_at,
    slots_at,
    keys,
    caches,
    token_count,
    head_epsilon,
    stride,
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
    IS_SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    TO_HALVES: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One head of TOKENS tokens from the product into its slots: bound by memory."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    is_token = token < token_count
    slot = tl.load(slots_at + token, mask=is_token, other=-1)
    is_put = (slot >= 0)[:, None]
    mean, scale = tl.zeros((TOKENS,), tl.float32), tl.full((TOKENS,), 1.0, tl.float32)
    if HAS_SUMS:
        mean = tl.load(means_at + token, mask=is_token, other=0.0)
    if IS_SCALED:
        scale = tl.load(scales_at + token, mask=is_token, other=1.0)
    # Key heads are normed and turned; the heads behind them are values, which are only put.
    if head < KEY_HEADS:
        pair = tl.arange(0, HALF)
        is_1, is_2 = pair < (KEY_SIZE + 1) // 2, pair < KEY_SIZE // 2
        mask_1, mask_2 = is_token[:, None] & is_1[None, :], is_token[:, None] & is_2[None, :]
        at_1, at_2 = dimensions(pair, PAIRS, KEY_SIZE, ARE_NEIGHBOURS)
        begin = head * KEY_SIZE
        first = _load_product(
            product_at, sums_at, bias_at, mean, scale, token, begin + at_1, mask_1, stride,
            IS_SCALED, HAS_SUMS,
        )  # fmt: skip
        second = _load_product(
            product_at, sums_at, bias_at, mean, scale, token, begin + at_2, mask_2, stride,
            IS_SCALED, HAS_SUMS,
        )  # fmt: skip
        if HAS_HEAD_NORM:
            first, second = norm_head(
                first, second, head_norm_at, at_1, at_2, is_1, is_2, head_epsilon, KEY_SIZE
            )
        if PAIRS:
            first, second = turn(first, second, cos_at, sin_at, token, pair, is_token, PAIRS)
        to_1, to_2 = destinations(pair, PAIRS, KEY_SIZE, ARE_NEIGHBOURS, TO_HALVES)
        store_head(keys, first, head, to_1, slot, mask_1 & is_put, k_page, k_row, k_head, k_size, PAGE)
        store_head(keys, second, head, to_2, slot, mask_2 & is_put, k_page, k_row, k_head, k_size, PAGE)
    else:
        head -= KEY_HEADS
        # HALF is made for the wider of both heads: twice of it covers a head of values.
        dimension = tl.arange(0, 2 * HALF)
        mask = is_token[:, None] & (dimension < VALUE_SIZE)[None, :]
        # Values lie behind all keys.
        column = KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + dimension
        rows = _load_product(
            product_at, sums_at, bias_at, mean, scale, token, column, mask, stride, IS_SCALED, HAS_SUMS
        )  # fmt: skip
        store_head(
            caches, rows, head, dimension, slot, mask & is_put, v_page, v_row, v_head, v_size, PAGE
        )  # fmt: skip
