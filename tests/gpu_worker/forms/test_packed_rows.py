"""Packed rows: the documented bytes, and what is refused rather than taken for something else."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from independent_reader import unpack_row
from sessions import rows_of

from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import RowNotRepresentable, ShapeMismatch, UnsupportedDtype
from gpu_worker.forms.rows import pack, pack_rows, widen
from gpu_worker.kernels.quantization import dequantize, quantize

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "segments.json").read_text(encoding="utf-8"))
each_kind = pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name.lower())


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "case", GOLDEN["packed_rows"], ids=lambda case: f"{case['kind']} {case['element_count']}"
)
def test_golden_rows_come_back(case: dict[str, Any]) -> None:
    """Rows that any writer packed by the document are read, to the last bit; rows may lie apart."""
    row = torch.frombuffer(bytearray.fromhex(case["row_hex"]), dtype=torch.uint8)
    kind, count = StateKind(case["kind"]), case["element_count"]
    apart = torch.zeros(3, 2 * len(row), dtype=torch.uint8)[:, : len(row)].copy_(row)

    wide = widen(apart, kind, count, torch.float32)

    assert wide.shape == (3, count)
    assert all(each.numpy().tobytes().hex() == case["elements_hex"] for each in wide)


@given(st.sampled_from(list(PACKINGS)), st.integers(1, 50), st.integers(-12, 12), st.integers(0, 999))
def test_any_reader_finds_what_was_packed(kind: StateKind, half: int, exponent: int, seed: int) -> None:
    """The documented bytes say what the quantizer meant."""
    rows, packing = _normal(2, 2 * half, seed=seed) * 2.0**exponent, PACKINGS[kind]
    expected = dequantize(quantize(rows, bits=packing.bits, group_size=packing.group_size))

    packed = pack(rows, kind)

    found = [unpack_row(row.numpy().tobytes(), kind, 2 * half) for row in packed]
    assert torch.equal(torch.tensor(found), expected)
    assert torch.equal(widen(packed, kind, 2 * half, torch.float32), expected)


@each_kind
@pytest.mark.parametrize("token_count", [0, 1, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_go_through_the_store_in_few_bits(kind: StateKind, token_count: int, dtype: torch.dtype) -> None:
    """Wide rows become bytes, bytes packed rows, and those rows of the model's type.

    So do rows packed before.
    """
    rows = _normal(token_count, 96).to(dtype)
    spec = StreamSpec(Stream(0, kind), PACKINGS[kind].row_bytes(96), DType.PACKED)

    data = pack_rows(rows, spec)
    packed = rows_of(data, spec)

    assert data.nbytes == token_count * spec.row_bytes
    assert bytes(pack_rows(packed, spec)) == bytes(data)
    wide = widen(packed, kind, 96, dtype)
    assert wide.dtype is dtype
    assert ((wide - rows).abs() <= 4.5 / ((1 << PACKINGS[kind].bits) - 1)).all()


@each_kind
def test_zero_rows_come_back_as_zeros(kind: StateKind) -> None:
    """And every byte of padding is zero."""
    packed = pack(torch.zeros(2, 70), kind)

    assert torch.equal(widen(packed, kind, 70, torch.bfloat16), torch.zeros(2, 70, dtype=torch.bfloat16))
    at = PACKINGS[kind].layout(70)
    assert not packed[:, at.places + 2 * at.outlier_count :].any()


def test_a_row_that_few_bits_cannot_hold_is_refused_by_name() -> None:
    """No row of its batch is packed."""
    rows = _normal(5, 64)
    rows[3, 7] = torch.nan
    spec = StreamSpec(Stream(2, StateKind.KV_INT8), PACKINGS[StateKind.KV_INT8].row_bytes(64), DType.PACKED)

    with pytest.raises(RowNotRepresentable, match="kv_int8: row 3 has an infinity, or what is no number"):
        pack_rows(rows, spec)


def test_rows_of_other_shapes_and_types_are_refused() -> None:
    """Rows of another model or packing, wide rows in the place of packed ones, and the other way round."""
    packed = pack(_normal(2, 64), StateKind.HIDDEN_INT8)
    spec = StreamSpec(Stream(0, StateKind.HIDDEN_INT8), packed.shape[1], DType.PACKED)

    with pytest.raises(ShapeMismatch, match=r"expected shape \[T, 96\]"):
        pack_rows(_normal(2, 96), spec)
    for shape in ((2, 63), (2, 0), (64,), (2, 2, 32)):
        with pytest.raises(ShapeMismatch, match="an even number up to 32768"):
            pack_rows(torch.zeros(shape), spec)
    with pytest.raises(ShapeMismatch, match="hidden_int4 rows of 64 elements"):
        widen(packed, StateKind.HIDDEN_INT4, 64, torch.float32)
    with pytest.raises(ShapeMismatch, match="hidden_int8 rows of 96 elements"):
        widen(packed, StateKind.HIDDEN_INT8, 96, torch.float32)
    with pytest.raises(ShapeMismatch, match=r"torch\.float32"):
        widen(_normal(2, 96), StateKind.HIDDEN_INT8, 64, torch.float32)
    with pytest.raises(UnsupportedDtype, match="expected FLOAT32"):
        pack_rows(packed, StreamSpec(Stream(0, StateKind.HIDDEN), 96 * 4, DType.FLOAT32))


def test_places_outside_the_row_are_refused() -> None:
    """Another writer's mistake is no write past a row."""
    packed = pack(_normal(2, 64), StateKind.HIDDEN_INT8)
    at = PACKINGS[StateKind.HIDDEN_INT8].layout(64).places
    packed[1, at : at + 2] = torch.tensor(list(struct.pack("<H", 64)), dtype=torch.uint8)

    with pytest.raises(ShapeMismatch, match=r"places in \[0, 64\)"):
        widen(packed, StateKind.HIDDEN_INT8, 64, torch.float32)
