"""Rows as tensors and as bytes: the border between the engine's numbers and the store's bytes.

Knows element types, row sizes, and the layout of packed rows (docs/chunk_format.md), not what a row
means. `quantized` copies nothing: its parts are views of the rows, as kernels take them. Worst case:
bytes of another element type or length, or a row that few bits cannot hold, refused before a tensor is
made.
"""

import warnings

import torch
from torch import Tensor

from ctxcache.format.packing import PACKINGS, PackedLayout, Packing
from ctxcache.format.streams import DType, StateKind, StreamSpec
from gpu_worker.errors import RowNotRepresentable, ShapeMismatch, UnsupportedDtype
from gpu_worker.kernels.operands import Quantized
from gpu_worker.kernels.quantization import NotRepresentable, dequantize, quantize

_BITS_PER_BYTE = 8


def pack(rows: Tensor, kind: StateKind) -> Tensor:
    """Rows [T, D] -> [T, row_bytes] uint8.

    Raises RowNotRepresentable, ShapeMismatch for a D that is not packed.
    """
    packing = PACKINGS[kind]
    try:
        layout = packing.layout(rows.shape[1] if rows.ndim == 2 else 0)
    except ValueError as error:
        raise ShapeMismatch(
            what=f"{kind.name.lower()} rows",
            expected="[T, an even number up to 32768]",
            actual=str(list(rows.shape)),
        ) from error
    # Zeros behind the parts: padding is a part of the checksum, and equal rows must be equal bytes.
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
    """Rows [T, row_bytes] uint8 of `kind`, of so many elements, as kernels take them.

    Views: nothing is copied.

    `packed` begins where float32 may and so does each row. Raises ShapeMismatch. Places are not looked at:
    `widen` does.
    """
    packing = PACKINGS[kind]
    layout = packing.layout(element_count)
    if packed.ndim != 2 or packed.shape[1] != layout.row_bytes or packed.dtype is not torch.uint8:
        raise ShapeMismatch(
            what=f"{kind.name.lower()} rows of {element_count} elements",
            expected=f"[T, {layout.row_bytes}] bytes",
            actual=f"{list(packed.shape)} {packed.dtype}",
        )
    return _views(packed, packing, layout)


def widen(packed: Tensor, kind: StateKind, element_count: int, dtype: torch.dtype) -> Tensor:
    """Rows [T, row_bytes] uint8 -> [T, element_count] in `dtype`.

    Raises ShapeMismatch, for places outside a row too.
    """
    rows = quantized(packed, kind, element_count)
    # Only the host checks places: kernels compare places with columns, and take none outside of a row.
    places = rows.places
    if len(rows) and not bool(((places >= 0) & (places < element_count)).all()):
        raise ShapeMismatch(
            what=f"outliers of {kind.name.lower()} rows",
            expected=f"places in [0, {element_count})",
            actual=f"[{int(places.min())}, {int(places.max())}]",
        )
    return dequantize(rows, dtype)


def _views(packed: Tensor, packing: Packing, layout: PackedLayout) -> Quantized:
    def part(begin: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        # A row of a packed kind, each part on a multiple of its element's size (docs/chunk_format.md):
        #
        #     [ codes │ outliers float32 │ scales float16 │ zeros float16 │ places uint16 │ padding ]
        #
        # A view of other elements needs just that alignment, so that nothing is copied.
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


BATCH_TOKENS = 512
"""Rows per batch: a projection of 64 rows takes twice as long per row as one of 512."""

_TORCH_DTYPES = {
    DType.INT32: torch.int32,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.PACKED: torch.uint8,
}
_ROW_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items()}

# Rows of the store are views of memory that readers must not write to; torch can only say so once.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def row_dtype(dtype: torch.dtype) -> DType:
    """The row element type of a tensor element type; raises UnsupportedDtype if there is none."""
    if dtype not in _ROW_DTYPES:
        known = ", ".join(str(item) for item in _ROW_DTYPES)
        raise UnsupportedDtype(what="rows", expected=f"one of {known}", actual=str(dtype))
    return _ROW_DTYPES[dtype]


def torch_dtype(dtype: DType, what: str = "rows") -> torch.dtype:
    """The tensor element type of stored elements. Raises UnsupportedDtype."""
    if dtype not in _TORCH_DTYPES:
        raise UnsupportedDtype(what=what, expected="a torch element type", actual=dtype.name)
    return _TORCH_DTYPES[dtype]


def stored_dtype(spec: StreamSpec) -> torch.dtype:
    """The tensor element type of a stream's rows as they are stored. Raises UnsupportedDtype."""
    return torch_dtype(spec.dtype, str(spec.stream))


def as_stored(rows: Tensor, spec: StreamSpec, *, token_count: int | None = None) -> Tensor:
    """Rows [T, row] as `spec` stores them, on their own device. Wide rows of a packed kind are packed.

    `token_count` is the T to expect, if one is. Raises ShapeMismatch, UnsupportedDtype, RowNotRepresentable.
    """
    # Rows that were packed where they were computed come as bytes, and are not packed again.
    if spec.dtype is DType.PACKED and rows.dtype is not torch.uint8:
        rows = pack(rows, spec.stream.kind)
    width = spec.row_bytes // spec.dtype.size_bytes
    shape = list(rows.shape)
    if shape != [shape[0] if shape and token_count is None else token_count, width]:
        expected = f"[{'T' if token_count is None else token_count}, {width}]"
        raise ShapeMismatch(what=str(spec.stream), expected=expected, actual=str(shape))
    if row_dtype(rows.dtype) is not spec.dtype:
        raise UnsupportedDtype(what=str(spec.stream), expected=spec.dtype.name, actual=str(rows.dtype))
    return rows


def pack_rows(rows: Tensor, spec: StreamSpec) -> memoryview:
    """Rows [T, row] as `spec` stores them: T * row_bytes bytes, native (little) endian.

    A view of the tensor where it is contiguous and on the host, else of a copy. For a packed kind rows are
    wide, or [T, row_bytes] uint8 that were packed before. Raises ShapeMismatch, UnsupportedDtype,
    RowNotRepresentable.
    """
    stored = as_stored(rows, spec)
    if not len(stored):
        return memoryview(b"")
    return stored.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
