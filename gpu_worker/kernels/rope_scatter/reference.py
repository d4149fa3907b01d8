"""The reference of `rope_scatter`, in plain torch: rounded where an engine rounds."""

import torch
from torch import Tensor

from gpu_worker.kernels.operands import HeadNorm, Pages, Pairing, Quantized, Rotation, Rows
from gpu_worker.kernels.quantization import dequantize


def rope_scatter(rows: Rows, rotation: Rotation | None, pages: Pages) -> None:
    """Rows [T, H * C + H_v * C_v], K then V of each token, into the pages; V as it is.

    Source of the rotation: RoFormer, arXiv:2104.09864, equation 34. Raises ValueError for rows of another
    size.
    """
    check(rows, rotation, pages)
    # Rows are of the cache's type before they turn, as the engine's rows were.
    flat = (dequantize(rows) if isinstance(rows, Quantized) else rows).to(pages.keys.dtype)
    key_size = pages.keys.shape[2] * pages.keys.shape[3]
    keys = flat[:, :key_size].reshape(-1, *pages.keys.shape[2:])
    values = flat[:, key_size:].reshape(-1, *pages.values.shape[2:])
    scatter(keys if rotation is None else rotate(keys, rotation), values, pages)


def check(rows: Rows, rotation: Rotation | None, pages: Pages) -> None:
    """Raise ValueError unless the rows are what the pages hold, one slot and position for each."""
    size = rows.row_size if isinstance(rows, Quantized) else rows.shape[1]
    expected = sum(cache.shape[2] * cache.shape[3] for cache in (pages.keys, pages.values))
    if size != expected:
        raise ValueError(f"rows of {size} elements, the pages hold {expected}")
    check_tokens(len(rows), rotation, pages)


def check_tokens(token_count: int, rotation: Rotation | None, pages: Pages) -> None:
    """Raise ValueError unless each token has one slot and one position, and a head has what rotates."""
    slot_count = pages.slots.shape[0]
    if slot_count != token_count or (rotation and rotation.cos.shape[0] != token_count):
        raise ValueError(f"{token_count} rows, {slot_count} slots")
    if rotation and 2 * rotation.pair_count > pages.keys.shape[3]:
        raise ValueError(f"{2 * rotation.pair_count} of {pages.keys.shape[3]} dimensions rotate")


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [T, H, C], dimensions from R on unchanged; products are of the tables' type."""
    # Each pair turns by the angle of its position: (a, b) -> (a cos - b sin, b cos + a sin).
    #
    #     HALVES                 x = [a0 a1 | b0 b1 | rest]  ──►  [a0' a1' | b0' b1' | rest]
    #     NEIGHBOURS             x = [a0 b0 | a1 b1 | rest]  ──►  [a0' b0' | a1' b1' | rest]
    #     NEIGHBOURS_TO_HALVES   x = [a0 b0 | a1 b1 | rest]  ──►  [a0' a1' | b0' b1' | rest]
    size = 2 * rotation.pair_count
    cos, sin = (table.unsqueeze(1) for table in (rotation.cos, rotation.sin))
    turned, rest = heads[..., :size], heads[..., size:]
    is_halves = rotation.pairing is Pairing.HALVES
    first, second = turned.chunk(2, dim=-1) if is_halves else (turned[..., 0::2], turned[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    is_in_place = rotation.pairing is Pairing.NEIGHBOURS
    out = torch.stack(pair, dim=-1).flatten(-2) if is_in_place else torch.cat(pair, dim=-1)
    return torch.cat((out.to(heads.dtype), rest), dim=-1)


def head_normed(heads: Tensor, norm: HeadNorm) -> Tensor:
    """[T, H, C], each head normed over C."""
    return gained(rms(heads.float(), norm.epsilon), norm.weight).to(heads.dtype)


def rms(x: Tensor, epsilon: float) -> Tensor:
    """Float32 rows over the root of their mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def gained(x: Tensor, weight: Tensor | None) -> Tensor:
    """Normed rows, rounded to the gain's type and multiplied by it (see `Norm.weight`)."""
    return x if weight is None else x.to(weight.dtype) * weight


def scatter(keys: Tensor, values: Tensor, pages: Pages) -> None:
    """Put [T, H, C], [T, H_v, C_v] where their slots say; those of negative slots nowhere."""
    # A negative slot would otherwise count from the cache's end, and overwrite another token.
    kept = pages.slots >= 0
    page, row = pages.slots[kept] // pages.page_tokens, pages.slots[kept] % pages.page_tokens
    pages.keys[page, row] = keys[kept].to(pages.keys.dtype)
    pages.values[page, row] = values[kept].to(pages.values.dtype)
