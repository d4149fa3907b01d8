"""Packed rows: rows of wide elements to a packed kind's bytes, and back, on any device.

Knows the layout of docs/chunk_format.md and tensors; what a kind's elements mean is for others. `quantized` copies nothing: its
parts are views of the rows, as kernels take them. Worst case: a row that few bits cannot hold, refused by name.
"""

import torch
from torch import Tensor

from ctxcache.format.packing import PACKINGS, PackedLayout, Packing
from ctxcache.format.streams import StateKind
from gpu_worker.errors import RowNotRepresentable, ShapeMismatch
from gpu_worker.kernels.operands import Quantized
from gpu_worker.kernels.quantization import NotRepresentable, dequantize, quantize

_BITS_PER_BYTE = 8


def pack(rows: Tensor, kind: StateKind) -> Tensor:
    """Rows [T, D] -> [T, row_bytes] uint8. Raises RowNotRepresentable, ShapeMismatch for a D that is not packed."""
    packing = PACKINGS[kind]
    try:
        layout = packing.layout(rows.shape[1] if rows.ndim == 2 else 0)
    except ValueError as error:
        raise ShapeMismatch(
            what=f"{kind.name.lower()} rows",
            expected="[T, an even number up to 32768]",
            actual=str(list(rows.shape)),
        ) from error
    packed = torch.zeros(len(rows), layout.row_bytes, dtype=torch.uint8, device=rows.device)
    if not len(rows):
        return packed
    try:
        parts = quantize(
            rows, bits=packing.bits, group_size=packing.group_size, outlier_count=packing.outlier_count
        )
    except NotRepresentable as error:
        raise RowNotRepresentable(what=kind.name.lower(), row=error.row, problem=error.problem) from error
    into = _views(packed, packing, layout)
    into.values.copy_(parts.values)
    into.outliers.copy_(parts.outliers)
    into.scales.copy_(parts.scales)
    into.zeros.copy_(parts.zeros)
    into.places.copy_(parts.places)
    return packed


def quantized(packed: Tensor, kind: StateKind, element_count: int) -> Quantized:
    """Rows [T, row_bytes] uint8 of `kind`, of so many elements, as kernels take them: views, nothing is copied.

    `packed` begins where float32 may and so does each row. Raises ShapeMismatch. Places are not looked at:
    `widen` does.
    """
    packing = PACKINGS[kind]
    layout = packing.layout(element_count)
    if packed.ndim != 2 or packed.shape[1] != layout.row_bytes or packed.dtype is not torch.uint8:
        raise ShapeMismatch(
            what=f"{kind.name.lower()} rows of {element_count} elements",
            expected=f"[T, {layout.row_bytes}] bytes", actual=f"{list(packed.shape)} {packed.dtype}",
        )  # fmt: skip
    return _views(packed, packing, layout)


def widen(packed: Tensor, kind: StateKind, element_count: int, dtype: torch.dtype) -> Tensor:
    """Rows [T, row_bytes] uint8 -> [T, element_count] in `dtype`. Raises ShapeMismatch, for places outside a row too."""
    rows = quantized(packed, kind, element_count)
    places = rows.places
    if len(rows) and not bool(((places >= 0) & (places < element_count)).all()):
        raise ShapeMismatch(
            what=f"outliers of {kind.name.lower()} rows",
            expected=f"places in [0, {element_count})", actual=f"[{int(places.min())}, {int(places.max())}]",
        )  # fmt: skip
    return dequantize(rows, dtype)


def _views(packed: Tensor, packing: Packing, layout: PackedLayout) -> Quantized:
    def part(begin: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        return packed[:, begin : begin + size_bytes].view(dtype)

    groups, kept = layout.group_count, layout.outlier_count
    return Quantized(
        values=packed[:, : layout.element_count * packing.bits // _BITS_PER_BYTE],
        scales=part(layout.scales, 2 * groups, torch.float16),
        zeros=part(layout.zeros, 2 * groups, torch.float16),
        outliers=part(layout.outliers, 4 * kept, torch.float32),
        places=part(layout.places, 2 * kept, torch.int16),
        group_size=packing.group_size,
        bits=packing.bits,
    )
