"""Small layers, rows and poisoned pages for the kernels' tests, the same every time."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxcache.format.streams import StateKind
from gpu_worker.forms.rows import pack, quantized
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import (
    MOST_BITS,
    NO_NORM,
    HeadNorm,
    Norm,
    NormKind,
    Pages,
    Pairing,
    ProjectionWeights,
    Quantized,
    Rotation,
    Rows,
)  # fmt: skip

if triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    _cut_off = interpreter._convert_float

    def _rounded(data: "np.ndarray[Any, Any]", source: tl.dtype, target: tl.dtype, mode: Any) -> Any:
        """Triton's interpreter cuts float32 off where a GPU rounds it to the nearest bfloat16."""
        if source != tl.float32 or target != tl.bfloat16:
            return _cut_off(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return rounded.view(torch.uint16).numpy().reshape(data.shape)

    interpreter._convert_float = _rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Greatest difference over the greatest value: some last places of each type."""
PAGE_TOKENS, PAGE_COUNT = 16, 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def norm_of(kind: NormKind, size: int, dtype: torch.dtype) -> Norm:
    """A norm with whatever the kind may have."""
    if kind is NormKind.NONE:
        return NO_NORM
    weight = (normal(size, seed=1).abs() + 0.5).to(dtype)
    return Norm(kind, 1e-5, weight, normal(size, seed=2).to(dtype) if kind is NormKind.LAYER else None)


def layer_of(
    kind: NormKind, dtype: torch.dtype, *, size: int, heads: tuple[int, int], value_heads: tuple[int, int],
    has_head_norm: bool = False,
) -> LayerWeights:  # fmt: skip
    """A layer with K of [H, C] and V of [H_v, C_v]; K's projection has a bias, V's none."""
    count, head_size = heads
    weight = (normal(count * head_size, size, seed=3) / size**0.5).to(dtype)
    value_weight = (normal(value_heads[0] * value_heads[1], size, seed=4) / size**0.5).to(dtype)
    head_norm = HeadNorm((normal(head_size, seed=5).abs() + 0.5).to(dtype), 1e-6) if has_head_norm else None
    return LayerWeights(
        norm_of(kind, size, dtype),
        ProjectionWeights(weight, count, normal(count * head_size, seed=6).to(dtype)),
        ProjectionWeights(value_weight, value_heads[0]), head_norm,
    )  # fmt: skip


def rotation_of(token_count: int, pair_count: int, pairing: Pairing, *, first: int = 3) -> Rotation:
    """Tables of positions from `first` on, every other one."""
    positions = first + 2 * torch.arange(token_count, device=DEVICE, dtype=torch.float32)
    rates = 10000 ** -(torch.arange(pair_count, device=DEVICE, dtype=torch.float32) / pair_count)
    angles = positions[:, None] * rates
    return Rotation(angles.cos(), angles.sin(), pairing)


def rows_of(rows: Tensor, bits: int, dtype: torch.dtype) -> Rows:
    """The rows in their type, or quantized: views of packed rows, as they come from the store."""
    if not bits:
        return rows.to(dtype)
    kind = StateKind.HIDDEN_INT8 if bits == MOST_BITS else StateKind.HIDDEN_INT4
    return quantized(pack(rows, kind), kind, rows.shape[1])


def poisoned(
    token_count: int, heads: tuple[int, int], value_heads: tuple[int, int], dtype: torch.dtype
) -> Pages:
    """Pages full of NaN, slots all over them, two of them left out."""
    slots = torch.randperm(PAGE_TOKENS * PAGE_COUNT, generator=torch.Generator().manual_seed(7))[:token_count]
    if token_count > 2:
        slots[1], slots[-1] = -1, -9
    caches = [
        torch.full((PAGE_COUNT, PAGE_TOKENS, *shape), torch.nan, dtype=dtype, device=DEVICE)
        for shape in (heads, value_heads)
    ]
    return Pages(caches[0], caches[1], slots.to(DEVICE))


def like(pages: Pages) -> Pages:
    """Pages of the same kind, still full of NaN."""
    return Pages(
        torch.full_like(pages.keys, torch.nan), torch.full_like(pages.values, torch.nan), pages.slots
    )


def assert_same(found: Pages, expected: Pages) -> None:
    """The same places are written, with the same numbers within some last places; nothing else is."""
    for one, other in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(torch.isnan(one), torch.isnan(other))
        least = other.float().nan_to_num().abs().amax()
        difference = (one.float() - other.float()).nan_to_num().abs().amax()
        assert difference <= TOLERANCES[one.dtype] * least


def size_of(rows: Rows) -> int:
    """Elements of a row."""
    return rows.row_size if isinstance(rows, Quantized) else rows.shape[1]
