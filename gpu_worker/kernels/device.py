"""Device functions that several kernels share: tiles of rows, pairs of dimensions, and their rotation.

A head is worked on as two tiles [tokens, pairs]: `first` and `second` dimension of each pair. Dimensions
that do not rotate are paired too, with angle 0. Arithmetic is float32; what is loaded is widened at once, and
rounded between two steps where an engine rounds, so that what is restored is the engine's own.
"""

import triton
import triton.language as tl

AS_ROUNDED = {"enable_fp_fusion": False}
"""For a launch: a product and a sum behind it are not made one multiply-add, which rounds once."""


# A head of C = 6 dimensions, 2 pairs of which turn (R = 4), as two tiles of HALF = 4 (3 used):
#
#     pair                    0    1    2    3 (masked)
#     HALVES       first      0    1    4    .        i with i + R / 2
#                  second     2    3    5    .
#     NEIGHBOURS   first      0    2    4    .        2i with 2i + 1
#                  second     1    3    5    .
#                             turn turn stay
@triton.jit
def dimensions(pair, PAIRS: tl.constexpr, SIZE: tl.constexpr, ARE_NEIGHBOURS: tl.constexpr):
    """The two dimensions of each pair as they come: PAIRS of them rotate, of SIZE dimensions."""
    half: tl.constexpr = (SIZE + 1) // 2
    is_turned = pair < PAIRS
    rest = PAIRS + pair
    if ARE_NEIGHBOURS:
        first = 2 * pair
        second = first + 1
    else:
        first = tl.where(is_turned, pair, rest)
        second = tl.where(is_turned, pair + PAIRS, pair + half)
    return first, second


@triton.jit
def destinations(
    pair, PAIRS: tl.constexpr, SIZE: tl.constexpr, ARE_NEIGHBOURS: tl.constexpr, TO_HALVES: tl.constexpr
):
    """The two dimensions of each pair as they are laid out."""
    first, second = dimensions(pair, PAIRS, SIZE, ARE_NEIGHBOURS)
    if ARE_NEIGHBOURS and TO_HALVES:
        is_turned = pair < PAIRS
        # DeepSeek-V3: neighbours rotate together, and are laid out as halves.
        first = tl.where(is_turned, pair, first)
        second = tl.where(is_turned, pair + PAIRS, second)
    return first, second


@triton.jit
def rounded(x, like_at):
    """Float32 numbers as the type of what `like_at` points to has them."""
    return x.to(like_at.dtype.element_ty).to(tl.float32)


@triton.jit
def turn(first, second, cos_at, sin_at, token, pair, token_mask, PAIRS: tl.constexpr):
    """Rotate two tiles [tokens, pairs] by the tables' angles."""
    # Beyond PAIRS the angle is 0: cosine 1, sine 0.
    mask = token_mask[:, None] & (pair < PAIRS)[None, :]
    place = token[:, None] * PAIRS + pair[None, :]
    # Tables have PAIRS columns only, so that dimensions without an angle cost no bytes.
    cos = tl.load(cos_at + place, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_at + place, mask=mask, other=0.0).to(tl.float32)
    # Each product is rounded before they are added, where the engine's own are.
    return (
        rounded(first * cos, cos_at) - rounded(second * sin, cos_at),
        rounded(second * cos, cos_at) + rounded(first * sin, cos_at),
    )


@triton.jit
def load_rows(
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTLIERS: tl.constexpr,
):
    """A tile [tokens, columns] of rows, dequantized to float32 where BITS says so."""
    # 64 bits: tokens times a row's stride pass 2^31 bytes in long runs of wide rows.
    token = token.to(tl.int64)
    if BITS == 4:
        byte = tl.load(values_at + token[:, None] * value_stride + column[None, :] // 2, mask=mask, other=0)
        # Two elements a byte, the even one in its low half.
        shift = (column % 2 * 4)[None, :]
        rows = ((byte.to(tl.int32) >> shift) & 0xF).to(tl.float32)
    else:
        place = token[:, None] * value_stride + column[None, :]
        rows = tl.load(values_at + place, mask=mask, other=0).to(tl.float32)
    if BITS:
        # One place serves both: `Quantized` refuses scales and zeros that do not lie equally far apart.
        place = token[:, None] * scale_stride + column[None, :] // GROUP
        scale = tl.load(scales_at + place, mask=mask, other=0.0).to(tl.float32)
        # A group begins at its least value and goes on by its scale.
        rows = rows * scale + tl.load(zeros_at + place, mask=mask, other=0.0).to(tl.float32)
    # A token has few, so that each is compared with every column of the tile.
    for i in tl.static_range(OUTLIERS):
        # Rows of tokens behind the last have no outliers to read: a load there would leave the buffer.
        is_token = tl.max(mask.to(tl.int32), 1) > 0
        at = tl.load(places_at + token * place_stride + i, mask=is_token, other=-1).to(tl.int32)
        outlier = tl.load(outliers_at + token * outlier_stride + i, mask=is_token, other=0.0).to(tl.float32)
        # The outlier takes the place of its code, and is not added to it: it comes back exactly.
        rows = tl.where(column[None, :] == at[:, None], outlier[:, None], rows)
    return rows


@triton.jit
def norm_head(first, second, weight_at, row_1, row_2, mask_1, mask_2, epsilon, SIZE: tl.constexpr):
    """Norm each head over its dimensions."""
    # Both halves together: the norm sees all dimensions of a head.
    spread = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + epsilon)[:, None]
    weight_1 = tl.load(weight_at + row_1, mask=mask_1, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight_at + row_2, mask=mask_2, other=0.0).to(tl.float32)
    first, second = rounded(first * spread, weight_at), rounded(second * spread, weight_at)
    return first * weight_1[None, :], second * weight_2[None, :]


@triton.jit
def store_head(
    cache,
    tile,
    head,
    dimension,
    slot,
    mask,
    page_stride,
    row_stride,
    head_stride,
    size_stride,
    PAGE: tl.constexpr,
):
    """Put a tile [tokens, dimensions] of one head where the slots say. Addresses are 64 bits wide."""
    # slot = page * PAGE + row, as engines number them:
    #
    #     block table   [7, 2, 9]            token 37 of pages of 16: the third page, row 5
    #     slot          9 * 16 + 5 = 149
    #     address       cache + 9 * page_stride + 5 * row_stride + head * head_stride + dim * size_stride
    #
    # Strides are the engine's own, so that no layout of a cache is copied into another one.
    row = (slot // PAGE) * page_stride + (slot % PAGE) * row_stride
    head = head.to(tl.int64)
    place = row[:, None] + head * head_stride + dimension.to(tl.int64)[None, :] * size_stride
    tl.store(cache + place, tile.to(cache.dtype.element_ty), mask=mask)
