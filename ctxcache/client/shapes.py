"""The shapes and element types of rows that a caller hands in, checked before anything is sent or written.

Knows row sizes and nothing of transports. Worst case: rows of a wrong shape raise InvalidArgument;
nothing is copied to find out.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ctxcache.client.arena import Bytes
from ctxcache.errors import IncompleteAppend, InvalidArgument
from ctxcache.format.streams import DType, Stream, StreamSpec

_ELEMENTS = {
    DType.INT32: "int32",
    DType.FLOAT32: "float32",
    DType.FLOAT16: "float16",
    DType.BFLOAT16: "bfloat16",
    DType.INT8: "int8",
    DType.FLOAT8_E4M3: "float8_e4m3fn",
    DType.PACKED: "uint8",
}
"""Names of the arrays' types, numpy's own and those that ml_dtypes adds."""


def view_rows(stream: Stream, array: npt.NDArray[np.generic], specs: Mapping[Stream, StreamSpec]) -> Bytes:
    """View a C-contiguous array of T rows as uint8 [T, row_bytes]. Raises InvalidArgument.

    Its elements are the stream's, or unsigned integers, which are raw bytes.
    """
    spec = specs.get(stream)
    if spec is None:
        raise InvalidArgument(field="rows", problem=f"{stream} is not part of the session's layout")
    if array.ndim == 0 or not array.flags.c_contiguous or array.dtype.hasobject:
        raise InvalidArgument(field="rows", problem=f"{stream} is not a C-contiguous array of numbers")
    if array.dtype.kind != "u" and array.dtype.name != _ELEMENTS[spec.dtype]:
        problem = f"{stream} is of {array.dtype.name}; the model has {_ELEMENTS[spec.dtype]} there"
        raise InvalidArgument(field="rows", problem=problem)
    shape = (array.shape[0], spec.row_bytes)
    if array.nbytes != shape[0] * shape[1]:
        problem = f"{stream}: {array.nbytes} B are not {shape[0]} rows of {shape[1]} B"
        raise InvalidArgument(field="rows", problem=problem)
    return array.reshape(-1).view(np.uint8).reshape(shape)


def check_append(
    rows: Mapping[Stream, npt.NDArray[np.generic]], specs: Mapping[Stream, StreamSpec]
) -> dict[Stream, Bytes]:
    """View the rows of an append, in storage order: every stream of the layout, equally many rows.

    Raises InvalidArgument, and IncompleteAppend for a stream that is missing or short.
    """
    views = {stream: view_rows(stream, array, specs) for stream, array in rows.items()}
    row_counts = {stream: len(view) for stream, view in views.items()}
    token_count = max(row_counts.values(), default=0)
    if token_count == 0:
        raise InvalidArgument(field="rows", problem="there are none")
    check_complete(row_counts, specs, token_count)
    return {stream: views[stream] for stream in specs}


def check_complete(
    row_counts: Mapping[Stream, int], specs: Mapping[Stream, StreamSpec], token_count: int
) -> None:
    """Raise IncompleteAppend unless every stream of the layout has `token_count` rows."""
    for stream in specs:
        row_count = row_counts.get(stream, 0)
        if row_count < token_count:
            raise IncompleteAppend(stream=str(stream), row_count=row_count, token_count=token_count)
