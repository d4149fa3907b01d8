"""Frames that lie in memory, written and read as those of a socket: an object of a bucket has them.

A digest is kept of all but the rows: sums of these are in the frames' messages. Knows no session.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from typing_extensions import Buffer
from xxhash import xxh3_64

from ctxcache.wire.framed_socket import (
    HEAD_BYTES,
    FrameError,
    Part,
    Places,
    SocketFrame,
    SocketFrameKind,
    frame_head,
    read_head,
)


class FrameWriter:
    """Puts frames one behind the other."""

    def __init__(self, hasher: blake2b) -> None:
        self.body = bytearray()
        self._hasher = hasher

    def write(self, kind: SocketFrameKind, message: bytes = b"", data: Sequence[memoryview] = ()) -> None:
        """Add a frame."""
        head = frame_head(kind, message, sum(part.nbytes for part in data))
        self._hasher.update(head)
        self.body += head
        for part in data:
            self.body += part

    @property
    def digest(self) -> bytes:
        """Of all that was written but the rows."""
        return self._hasher.digest()


class FrameReader:
    """Reads frames out of a buffer."""

    def __init__(self, body: Buffer, hasher: blake2b) -> None:
        self._rest, self._hasher = memoryview(body).cast("B"), hasher
        self._left_bytes = 0

    def receive(self) -> SocketFrame | None:
        """The next frame up to its data; None at the end. Raises FrameError."""
        self._take(self._left_bytes)
        if not self._rest:
            return None
        header = self._take(HEAD_BYTES)
        kind, message_bytes, data_bytes = read_head(header)
        message = self._take(message_bytes)
        self._hasher.update(header)
        self._hasher.update(message)
        self._left_bytes = data_bytes
        return SocketFrame(kind, bytes(message), data_bytes)

    def receive_into(
        self, places: Iterable[tuple[memoryview, xxh3_64 | None]], parts: Iterable[Part]
    ) -> bool:
        """See FramedSocket. Raises FrameError."""
        is_right, rest = True, Places(places)
        for part in parts:
            data = self._take(part.size_bytes)
            self._left_bytes -= part.size_bytes
            hasher, at = xxh3_64(), 0
            for piece, sums in rest.take(part.size_bytes):
                piece[:] = data[at : at + len(piece)]
                at += len(piece)
                # What lies in its place is summed, and not what it was copied from.
                if sums is not None:
                    sums.update(piece)
                hasher.update(piece)
            is_right &= hasher.intdigest() == part.checksum
        return is_right

    @property
    def digest(self) -> bytes:
        """Of all that was read but the rows."""
        return self._hasher.digest()

    def _take(self, size_bytes: int) -> memoryview:
        if len(self._rest) < size_bytes:
            raise FrameError("it ends in the middle of a frame")
        taken, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
        return taken
