"""Rows to bytes and back, without a change of any bit."""

import pytest
import torch
from sessions import rows_of

from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import ShapeMismatch, UnsupportedDtype
from gpu_worker.forms.rows import pack_rows, row_dtype, stored_dtype

_STREAM = Stream(0, StateKind.KV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("token_count", [0, 1, 65])
def test_rows_survive_the_store(dtype: torch.dtype, token_count: int) -> None:
    """Packing and unpacking gives the same bits, for strided rows and for none."""
    rows = torch.arange(token_count * 14).reshape(token_count, 14).to(dtype)[:, ::2]
    spec = StreamSpec(_STREAM, 7 * dtype.itemsize, row_dtype(dtype))

    data = pack_rows(rows, spec)

    assert data.nbytes == token_count * spec.row_bytes
    assert torch.equal(rows_of(data, spec), rows)


def test_wrong_sizes_are_refused() -> None:
    """Rows of another width raise ShapeMismatch."""
    spec = StreamSpec(_STREAM, 8, DType.FLOAT32)

    with pytest.raises(ShapeMismatch, match=r"expected shape \[T, 2\], got \[4, 3\]"):
        pack_rows(torch.zeros(4, 3), spec)


def test_wrong_types_are_refused() -> None:
    """Rows of another element type, or of one without rows, raise UnsupportedDtype."""
    with pytest.raises(UnsupportedDtype, match=r"expected FLOAT32, got torch\.float16"):
        pack_rows(torch.zeros(1, 2).half(), StreamSpec(_STREAM, 8, DType.FLOAT32))
    with pytest.raises(UnsupportedDtype, match=r"got torch\.float64"):
        row_dtype(torch.float64)
    with pytest.raises(UnsupportedDtype, match="INT8"):
        stored_dtype(StreamSpec(_STREAM, 8, DType.INT8))
