"""Properties of the chunk format for any segment."""

import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptSegment
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    ALIGN_BYTES,
    HEADER_FIXED_BYTES,
    SegmentHeader,
    SegmentIdentity,
    SegmentLayout,
    decode_header,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec

COUNT = st.integers(0, (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
IDENTITIES = st.builds(
    SegmentIdentity,
    st.text(max_size=32),  # four bytes a character at most: up to the limit of 128
    st.binary(min_size=16, max_size=16),
    COUNT,
    COUNT,
    COUNT,
    st.binary(min_size=32, max_size=32),
)
STREAMS = st.builds(Stream, INT32, st.sampled_from(StateKind))
SPECS = st.builds(StreamSpec, STREAMS, st.integers(1, 1 << 20), st.sampled_from(DType))
LAYOUTS = st.builds(
    SegmentLayout,
    st.lists(SPECS, max_size=6, unique_by=lambda spec: spec.stream).map(tuple),
    st.integers(1, 1 << 16),
)


@st.composite
def headers(draw: st.DrawFn) -> SegmentHeader:
    """Draw a header with as many checksums as streams."""
    layout = draw(LAYOUTS)
    checksums = draw(st.lists(UINT64, min_size=len(layout.specs), max_size=len(layout.specs)))
    return SegmentHeader(draw(UINT64), draw(IDENTITIES), layout, tuple(checksums))


IDENTITY = SegmentIdentity("acme", bytes(range(16)), 1, 64, 64, bytes(range(32)))
STREAM = Stream(3, StateKind.KV)
HEADER = SegmentHeader(
    9,
    IDENTITY,
    SegmentLayout((StreamSpec(STREAM, 96, DType.BFLOAT16), StreamSpec(TOKENS, 4, DType.INT32))),
    (1, 2),
)
MODEL = ModelSpec(
    "id",
    "arch",
    "rev",
    "weights",
    "tokenizer",
    DType.BFLOAT16,
    2,
    64,
    4,
    16,
    "rope",
    "norm",
    is_relocatable=True,
    streams=(
        StreamSpec(STREAM, 96, DType.BFLOAT16),
        StreamSpec(Stream(0, StateKind.HIDDEN), 128, DType.BFLOAT16),
    ),
)


def reseal(encoded: bytes) -> bytes:
    """Put a right checksum into a header whose bytes were changed."""
    at = HEADER_FIXED_BYTES - 8
    checksum = xxh3_64_intdigest(encoded[:at] + bytes(8) + encoded[HEADER_FIXED_BYTES:])
    return encoded[:at] + struct.pack("<Q", checksum) + encoded[HEADER_FIXED_BYTES:]


@given(headers())
def test_every_header_comes_back_as_it_went_in(header: SegmentHeader) -> None:
    """Encoding loses nothing, and what lies behind the header is not read."""
    assert decode_header(header.encode()) == header
    assert decode_header(header.encode() + b"\xff" * 100) == header


@given(headers(), st.data())
def test_any_flipped_bit_of_any_header_is_refused(header: SegmentHeader, data: st.DataObject) -> None:
    """No single flipped bit passes, with the padding of a slot behind it or without."""
    encoded = bytearray(header.encode())
    position = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[position // 8] ^= 1 << position % 8
    padding = bytes(data.draw(st.sampled_from([0, ALIGN_BYTES])))

    with pytest.raises(CorruptSegment):
        decode_header(bytes(encoded) + padding)


def test_every_flipped_bit_of_a_header_is_refused() -> None:
    """Every bit is covered, one after the other, those of the unused room included."""
    encoded = HEADER.encode()
    for position in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptSegment):
            decode_header(damaged)


def test_a_header_cut_short_is_refused() -> None:
    """No beginning of a header passes for a header."""
    encoded = HEADER.encode()
    for size_bytes in range(len(encoded)):
        with pytest.raises(CorruptSegment):
            decode_header(encoded[:size_bytes])


@pytest.mark.parametrize("offset", [4, 12], ids=["kind", "dtype"])
def test_a_kind_or_type_of_a_newer_version_is_refused(offset: int) -> None:
    """A header that is whole but names what this version does not know is no segment either."""
    encoded = bytearray(HEADER.encode())
    encoded[HEADER_FIXED_BYTES + offset] = 99

    with pytest.raises(CorruptSegment, match="parse"):
        decode_header(reseal(bytes(encoded)))


def test_a_newer_format_is_named() -> None:
    """A segment of another format is refused as that, not as damage."""
    encoded = bytearray(HEADER.encode())
    encoded[8] = 3

    with pytest.raises(CorruptSegment, match="unknown segment format 3"):
        decode_header(bytes(encoded))


def test_a_tenant_that_does_not_fit_is_refused() -> None:
    """A name is never cut: two tenants would become one."""
    fits, longer = IDENTITY._replace(tenant="x" * 128), IDENTITY._replace(tenant="x" * 129)
    assert decode_header(replace(HEADER, identity=fits).encode()).identity == fits

    with pytest.raises(ValueError, match="128"):
        replace(HEADER, identity=longer).encode()


@pytest.mark.parametrize("change", [{"session_uid": b"short"}, {"model_fingerprint": bytes(33)}])
def test_an_identity_of_odd_length_is_refused(change: dict[str, bytes]) -> None:
    """Ids are never padded or cut: two of them would hash alike."""
    identity = IDENTITY._replace(**change)  # type: ignore[arg-type]
    for use in (identity.seed, replace(HEADER, identity=identity).encode):
        with pytest.raises(ValueError, match="bytes"):
            use()


CHANGED_IDENTITIES = {
    "tenant": IDENTITY._replace(tenant="acm"),
    "session_uid": IDENTITY._replace(session_uid=bytes(16)),
    "generation": IDENTITY._replace(generation=2),
    "begin": IDENTITY._replace(begin=0),
    "token_count": IDENTITY._replace(token_count=63),
    "model_fingerprint": IDENTITY._replace(model_fingerprint=bytes(32)),
}


def test_every_field_of_an_identity_is_tried() -> None:
    """The cases below name each field there is."""
    assert set(CHANGED_IDENTITIES) == set(SegmentIdentity._fields)


@pytest.mark.parametrize("other", CHANGED_IDENTITIES.values(), ids=CHANGED_IDENTITIES.keys())
@given(data=st.binary(max_size=300))
def test_a_checksum_is_bound_to_the_identity(other: SegmentIdentity, data: bytes) -> None:
    """The same bytes under another tenant, session, generation, place, length or model fail."""
    assert chunk_checksum(IDENTITY.seed(), STREAM, data) != chunk_checksum(other.seed(), STREAM, data)


@pytest.mark.parametrize(
    "other", [Stream(4, StateKind.KV), Stream(3, StateKind.HIDDEN)], ids=["layer", "kind"]
)
@given(data=st.binary(max_size=300))
def test_a_checksum_is_bound_to_the_stream(other: Stream, data: bytes) -> None:
    """The same bytes as another layer's, or as another kind of state, fail."""
    assert chunk_checksum(IDENTITY.seed(), STREAM, data) != chunk_checksum(IDENTITY.seed(), other, data)


@given(IDENTITIES, IDENTITIES)
def test_two_identities_have_two_seeds(one: SegmentIdentity, other: SegmentIdentity) -> None:
    """Seeds differ exactly where identities do."""
    assert (one.seed() == other.seed()) == (one == other)


@given(IDENTITIES, st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_of_a_chunk_changes_its_checksum(
    identity: SegmentIdentity, data: bytes, draw: st.DataObject
) -> None:
    """Damage inside a chunk shows."""
    position = draw.draw(st.integers(0, len(data) * 8 - 1))
    damaged = bytearray(data)
    damaged[position // 8] ^= 1 << position % 8

    assert chunk_checksum(identity.seed(), STREAM, data) != chunk_checksum(identity.seed(), STREAM, damaged)


@given(LAYOUTS)
def test_chunks_are_aligned_and_do_not_overlap(layout: SegmentLayout) -> None:
    """Every chunk starts on 4 KiB behind the one before it, and has room for all its rows."""
    ends = [*layout.offsets, layout.size_bytes][1:]
    for spec, begin, end in zip(layout.specs, layout.offsets, ends, strict=True):
        assert begin % ALIGN_BYTES == 0
        assert 0 <= end - begin - spec.row_bytes * layout.segment_tokens < ALIGN_BYTES

    assert layout.size_bytes % ALIGN_BYTES == 0
    assert layout.header_bytes <= (layout.offsets[0] if layout.offsets else layout.size_bytes)


def test_rows_are_found_by_their_number() -> None:
    """A range of rows is a slice of the slot, relative to its chunk."""
    layout = HEADER.layout

    assert layout.rows(STREAM, 2, 5) == slice(layout.offsets[0] + 2 * 96, layout.offsets[0] + 5 * 96)
    with pytest.raises(KeyError):
        layout.rows(Stream(8, StateKind.KV), 0, 1)


def changed(value: object) -> Any:
    """Make another value of the same type."""
    match value:
        case DType():
            return DType.FLOAT16
        case bool():
            return not value
        case int():
            return value + 1
        case tuple():
            return value[:-1]
        case _:
            return f"{value}?"


CHANGED_MODELS = {
    field.name: replace(MODEL, **{field.name: changed(getattr(MODEL, field.name))})
    for field in fields(ModelSpec)
    if field.name != "model_id"
}


@pytest.mark.parametrize("other", CHANGED_MODELS.values(), ids=CHANGED_MODELS.keys())
def test_a_fingerprint_covers_every_field(other: ModelSpec) -> None:
    """State of a model that differs in anything is another model's state."""
    assert other.fingerprint() != MODEL.fingerprint()


def test_a_fingerprint_leaves_out_names_and_order() -> None:
    """A model's name, and the order in which its streams are listed, change nothing."""
    renamed = replace(MODEL, model_id="other", streams=MODEL.streams[::-1])

    assert renamed.fingerprint() == MODEL.fingerprint()


def test_text_does_not_slip_from_field_to_field() -> None:
    """Fields are delimited: moving a letter over the border between two makes another model."""
    moved = replace(MODEL, architecture="archr", revision="ev")

    assert moved.fingerprint() != MODEL.fingerprint()


def test_a_layout_resolves_in_storage_order() -> None:
    """Token ids come first, unasked for, then layer by layer; an unknown stream is named."""
    resolved = MODEL.resolve(spec.stream for spec in MODEL.streams)

    assert [spec.stream for spec in resolved] == [TOKENS, Stream(0, StateKind.HIDDEN), STREAM]
    with pytest.raises(KeyError):
        MODEL.resolve([Stream(9, StateKind.KV)])
