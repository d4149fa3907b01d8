"""Chunks as protobuf messages: made and read as protobuf itself would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.format.streams import StateKind, Stream
from ctxcache.format.wire_chunk import encode_chunk, scan_chunk
from ctxcache.v1.model_pb2 import StreamName
from ctxcache.v1.session_pb2 import AppendSessionRequest, Chunk, ReadSessionResponse

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
KIND = st.sampled_from(StateKind)
PARTS = st.lists(st.binary(max_size=200), max_size=4)


def parsed(encoded: bytes) -> AppendSessionRequest | None:
    """The protobuf parser's reading; None when it refuses."""
    try:
        return AppendSessionRequest.FromString(encoded)
    except Exception:  # noqa: BLE001  # whatever it raises, it refuses
        return None


def check_alike(encoded: bytes) -> bool:
    """Fail unless the scanner reads what the parser reads, or nothing; whether it read something."""
    scanned = scan_chunk(encoded)
    if scanned is None:
        return False
    message = parsed(encoded)
    assert message is not None
    assert message.WhichOneof("message") == "chunk"
    chunk = message.chunk
    assert (scanned.stream.layer, int(scanned.stream.kind)) == (chunk.stream.layer, chunk.stream.kind)
    assert (scanned.token_begin, scanned.checksum) == (chunk.token_begin, chunk.checksum)
    assert bytes(scanned.data) == chunk.data
    return True


@given(INT32, KIND, INT64, PARTS, UINT64)
def test_a_chunk_is_encoded_as_protobuf_does(
    layer: int, kind: StateKind, token_begin: int, parts: list[bytes], checksum: int
) -> None:
    """Byte for byte, in both directions' messages."""
    name = StreamName(layer=layer, kind=StateKind(kind).value)  # type: ignore[arg-type]  # an enum's number
    chunk = Chunk(stream=name, token_begin=token_begin, data=b"".join(parts), checksum=checksum)
    encoded = encode_chunk(Stream(layer, kind), token_begin, parts, checksum)

    assert encoded == AppendSessionRequest(chunk=chunk).SerializeToString()
    assert encoded == ReadSessionResponse(chunk=chunk).SerializeToString()


@given(INT32, KIND, INT64, st.binary(min_size=1, max_size=300), st.integers(1, 2**64 - 1))
def test_what_is_encoded_is_read_without_the_parser(
    layer: int, kind: StateKind, token_begin: int, data: bytes, checksum: int
) -> None:
    """A chunk with rows never takes the slow way."""
    assert check_alike(encode_chunk(Stream(layer, kind), token_begin, [data], checksum))


@given(st.binary(max_size=80))
def test_rubbish_is_read_as_the_parser_reads_it(encoded: bytes) -> None:
    """Bytes that the scanner accepts, the parser accepts with the same values."""
    check_alike(encoded)
    check_alike(b"\x12" + bytes([len(encoded)]) + encoded)


EDIT = st.tuples(
    st.integers(0, 10**6), st.sampled_from(["flip", "cut", "insert", "set", "double"]), st.binary(max_size=6)
)


@given(INT32, KIND, INT64, st.binary(max_size=40), UINT64, st.lists(EDIT, max_size=4))
def test_a_damaged_chunk_is_read_as_the_parser_reads_it(
    layer: int,
    kind: StateKind,
    token_begin: int,
    data: bytes,
    checksum: int,
    edits: list[tuple[int, str, bytes]],
) -> None:
    """Wherever bytes change, go or come, the two never disagree about what was sent."""
    encoded = bytearray(encode_chunk(Stream(layer, kind), token_begin, [data], checksum))
    for place, edit, extra in edits:
        at = place % (len(encoded) + 1)
        if edit == "insert":
            encoded[at:at] = extra
        elif edit == "cut":
            del encoded[at : at + len(extra)]
        elif edit == "set":
            encoded[at : at + len(extra)] = extra
        elif edit == "double":
            encoded += bytes(encoded)
        elif at < len(encoded):
            encoded[at] ^= 1 << place % 8
    check_alike(bytes(encoded))
    # A length that fits again lets the damage inside be seen.
    inner = bytes(encoded[2:])
    if len(inner) < 0x80:
        check_alike(b"\x12" + bytes([len(inner)]) + inner)


FIELDS = st.sampled_from(
    [
        b"\x0a\x00", b"\x0a\x02\x08\x01", b"\x0a\x04\x08\x01\x10\x03", b"\x0a\x04\x10\x03\x08\x01",
        b"\x0a\x05\x08\x81\x80\x00\x10", b"\x0a\x0d\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x10\x01",
        b"\x0a\x02\x10\x63", b"\x0a\x08\x08\x80\x80\x80\x80\x10\x10\x03", b"\x10\x05", b"\x10\x80\x00",
        b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x02",
        b"\x1a\x00", b"\x1a\x03abc", b"\x1a\x83\x00abc", b"\x21" + bytes(range(8)), b"\x21" + bytes(8),
        b"\x28\x01", b"\x25abcd", b"\x0b\x0c", b"\x18\x01", b"\x92\x00",
    ]
)  # fmt: skip


@given(st.lists(FIELDS, max_size=6))
def test_fields_in_any_order_are_read_as_the_parser_reads_them(fields: list[bytes]) -> None:
    """Repeated, missing, unknown or oddly written fields: the same values, or left to the parser."""
    inner = b"".join(fields)
    check_alike(b"\x12" + bytes([len(inner)]) + inner)


@pytest.mark.parametrize("layer", [1 << 31, -(1 << 31) - 1])
def test_a_layer_that_protobuf_would_cut_is_left_to_it(layer: int) -> None:
    """A layer that the parser would cut to another number is not read here."""
    assert scan_chunk(encode_chunk(Stream(layer, StateKind.HIDDEN), 0, [b"rows"], 1)) is None
