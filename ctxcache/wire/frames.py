"""Frames of the control socket: the borders between messages.

    | length of the message, u32 little endian | kind, u8 | message |

Frames know kinds, lengths and the number with which a request and its answer begin, and nothing else of
messages. Worst case: a frame whose length is out of bounds raises InvalidArgument when its first five bytes
are there.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from ctxcache.errors import InvalidArgument

PROTOCOL_VERSION = 1
MESSAGE_LIMIT_BYTES = 4 << 20
"""The largest message that is taken, as of the gRPC services."""
NUMBER = b"\x08"
"""The beginning of a request and of an answer: the field of its number."""
LENGTH_DELIMITED = 2
"""How protobuf says that a field has its length before it."""
_HEAD = struct.Struct("<IB")
HEAD_BYTES = _HEAD.size


class FrameKind(IntEnum):
    """The contents of a frame."""

    HELLO = 1
    """ControlHello from the client, ControlWelcome from the server."""
    ACCESS = 2
    """AccessRequest from the client, AccessResponse from the server."""
    END = 3
    """From the client nothing: it has finished. From the server a google.rpc.Status: why it ends; empty for
    OK."""


class Frame(NamedTuple):
    """One frame. `kind` is any number that the other side may send."""

    kind: int
    message: bytes


def encode_frame(kind: FrameKind, message: bytes) -> bytes:
    """Put a message into a frame."""
    return _HEAD.pack(len(message), kind) + message


def is_alone(data: bytes, kind: FrameKind) -> bool:
    """Whether these bytes are one whole frame of that kind, and nothing else."""
    return len(data) >= HEAD_BYTES and _HEAD.unpack_from(data) == (len(data) - HEAD_BYTES, kind)


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    # Nearly all numbers and lengths have one or two bytes, and are made without a loop.
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class FrameReader:
    """Cuts a stream of bytes into frames. Holds at most one frame and what was fed behind it."""

    def __init__(self, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""
        self._begin = 0
        self.held_bytes = 0
        """Bytes fed and not yet returned."""

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        # The rest is copied once per feed, and only if there is one: mostly a feed is one whole frame.
        self._rest = self._rest[self._begin :] + data if self.held_bytes else data
        self._begin = 0
        self.held_bytes = len(self._rest)

    def is_last(self, kind: FrameKind) -> bool:
        """Whether the held bytes are whole frames, the last of them an empty one of that kind."""
        # Frames are passed by their lengths: nothing is cut out, for the answer is mostly no.
        begin, is_end = self._begin, False
        while len(self._rest) - begin >= _HEAD.size:
            length, found_kind = _HEAD.unpack_from(self._rest, begin)
            is_end = (length, found_kind) == (0, kind)
            begin += _HEAD.size + length
        return is_end and begin == len(self._rest)

    def next(self) -> Frame | None:
        """Return the next whole frame. Raises InvalidArgument when it is too large."""
        begin = self._begin + _HEAD.size
        if len(self._rest) < begin:
            return None
        length, kind = _HEAD.unpack_from(self._rest, self._begin)
        # The first five bytes tell the length: a wrong one is refused before anything is gathered for it.
        if length > self._limit_bytes:
            raise InvalidArgument(field="frame", problem=f"{length} B are more than {self._limit_bytes}")
        end = begin + length
        if len(self._rest) < end:
            return None
        frame = Frame(kind, self._rest[begin:end])
        self._begin = end
        self.held_bytes = len(self._rest) - end
        if not self.held_bytes:
            self._rest, self._begin = b"", 0
        return frame
