"""A chunk of rows as a protobuf message, made and read around the payload without copying it.

AppendSessionRequest and ReadSessionResponse carry a Chunk as the same field, so one encoding serves
both directions; `proto/ctxcache/v1/session.proto` has the fields. Worst case: a message that is put
together in any other way than the usual one is not read here, and left to the protobuf parser.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from typing_extensions import Buffer

from ctxcache.format.streams import StateKind, Stream

# The message, byte by byte:
#
#     12 len                          chunk
#        0A len  08 layer  10 kind      stream; a 0 is left out
#        10 token_begin                 left out if 0
#        1A len  rows ...               data
#        21 checksum, 8 bytes           fixed64
#
# The rows stay where they came: the protobuf parser would copy them into an object of their own.
CHUNK_FIELD = 0x12  # field 2 of both messages, length-delimited
STREAM_FIELD, TOKEN_BEGIN_FIELD, DATA_FIELD, CHECKSUM_FIELD = 0x0A, 0x10, 0x1A, 0x21
LAYER_FIELD, KIND_FIELD = 0x08, 0x10
NAME_LIMIT_BYTES = 64
"""More than a stream's two numbers take: what is longer is not put together as usual."""
STREAMS_KEPT = 4096
"""Streams whose bytes are remembered, in each direction."""
_CHECKSUM = struct.Struct("<BQ")
_VARINT_LIMIT = 1 << 64
_INT32, _INT64 = 1 << 31, 1 << 63
_KINDS = frozenset(map(int, StateKind))


class WireChunk(NamedTuple):
    """A chunk's fields; `data` views the message it came in."""

    stream: Stream
    token_begin: int
    data: memoryview
    checksum: int


class _Unusual(Exception):
    """Not put together as usual: for the protobuf parser to judge."""


def encode_chunk(stream: Stream, token_begin: int, data: Iterable[Buffer], checksum: int) -> bytes:
    """The message for rows that lie in several places, in one copy; the bytes that protobuf would make."""
    parts = [memoryview(part) for part in data]
    size_bytes = sum(part.nbytes for part in parts)
    # protobuf leaves out fields that are 0, and so does this.
    before = _encoded_stream(stream) + _field(TOKEN_BEGIN_FIELD, token_begin)
    if size_bytes:
        before += bytes([DATA_FIELD]) + _varint(size_bytes)
    after = _CHECKSUM.pack(CHECKSUM_FIELD, checksum) if checksum else b""
    envelope = bytes([CHUNK_FIELD]) + _varint(len(before) + size_bytes + len(after))
    return b"".join((envelope, before, *parts, after))


def scan_chunk(message: bytes) -> WireChunk | None:
    """Read a message that `encode_chunk` or protobuf's own serialiser made of a chunk; None for any other.

    The protobuf parser reads every message alike that it can read. `message` lives as long as the chunk's
    data.
    """
    if not message or message[0] != CHUNK_FIELD:
        return None
    try:
        return _scan(memoryview(message))
    except (_Unusual, IndexError, struct.error):
        return None


def _scan(message: memoryview) -> WireChunk:
    size_bytes, at = _read_varint(message, 1)
    # The chunk is the whole message: anything behind it is for the parser.
    _expect(at + size_bytes == len(message))
    _expect(message[at] == STREAM_FIELD)
    size_bytes, at = _read_varint(message, at + 1)
    _expect(size_bytes <= NAME_LIMIT_BYTES)
    stream = _scan_stream(bytes(message[at : at + size_bytes]))
    at += size_bytes
    token_begin, at = _optional(message, at, TOKEN_BEGIN_FIELD)
    _expect(message[at] == DATA_FIELD)
    size_bytes, begin = _read_varint(message, at + 1)
    end = begin + size_bytes
    tag, checksum = _CHECKSUM.unpack_from(message, end)
    _expect(tag == CHECKSUM_FIELD and end + _CHECKSUM.size == len(message))
    return WireChunk(stream, _signed(token_begin, _INT64), message[begin:end], checksum)


@lru_cache(STREAMS_KEPT)
def _encoded_stream(stream: Stream) -> bytes:
    name = _field(LAYER_FIELD, stream.layer) + _field(KIND_FIELD, stream.kind)
    return bytes([STREAM_FIELD, len(name)]) + name


@lru_cache(STREAMS_KEPT)
def _scan_stream(name: bytes) -> Stream:
    layer, at = _optional(name, 0, LAYER_FIELD)
    kind, at = _optional(name, at, KIND_FIELD)
    _expect(at == len(name))
    # Negative numbers are varints of 64 bits: layer -1 takes ten bytes.
    layer = _signed(layer, _INT64)
    # A kind that is not known, and a number that protobuf would cut: what to make of them is not decided
    # here.
    _expect(-_INT32 <= layer < _INT32 and kind in _KINDS)
    return Stream(layer, StateKind(kind))


def _optional(message: Sequence[int], at: int, field: int) -> tuple[int, int]:
    """A varint field that is left out where it is 0."""
    return _read_varint(message, at + 1) if at < len(message) and message[at] == field else (0, at)


def _read_varint(message: Sequence[int], at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            # More than 64 bits is no varint that protobuf would read.
            _expect(value < _VARINT_LIMIT)
            return value, at
        shift += 7
        _expect(shift < 70)


def _signed(value: int, limit: int) -> int:
    return value - 2 * limit if value >= limit else value


def _expect(is_usual: bool) -> None:  # noqa: FBT001  # reads as an assertion
    if not is_usual:
        raise _Unusual


def _field(tag: int, value: int) -> bytes:
    return bytes([tag]) + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    value %= _VARINT_LIMIT
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
