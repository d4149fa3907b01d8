"""Frames over a stream socket: what both ends of the bulk channel speak. docs/clients.md has the bytes.

A frame is 16 bytes (kind, sizes), a protobuf message and data; data is sent from where it lies and
received where it belongs. Knows no session. Not thread-safe, but `shut` may come from any thread.
Worst case: a peer that stops, or dribbles, costs `PIECE_TIMEOUT_S` per 256 KiB, then FrameError.
"""

import contextlib
import enum
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64

VERSION = 1
MESSAGE_LIMIT_BYTES = 1 << 20
DATA_LIMIT_BYTES = 4 << 20
"""Twice what a chunk may have: what is too long by less is refused by name, not by a cut."""
PARTS_LIMIT = 512
PIECE_BYTES = 256 << 10
"""So much is received, or sent, within one wait; it is verified while the caches still have it."""
PIECE_TIMEOUT_S = 30.0
UNIX_BUFFER_BYTES = 1 << 20
"""The kernel's default is smaller than a piece: both ends would wait for one another in turn."""
# The head of a frame, little endian, and what follows:
#
#      0       1        2          4                 8              16
#     | kind  | flags  | reserved | message, bytes  | data, bytes  | message … | data …
#
# Flags and what is reserved are 0; anything else is another version's, and ends the connection.
_HEADER = struct.Struct("<BBHIQ")
_TIMEVAL = struct.Struct("@ll")


class SocketFrameKind(enum.IntEnum):
    """The sort of a frame."""

    HELLO = 1
    READ = 2
    APPEND = 3
    CHUNK = 4
    COMMIT = 5
    FINISH = 6
    WELCOME = 16
    READ_HEADER = 17
    END = 18
    APPENDED = 19
    ERROR = 20


_KINDS = frozenset(map(int, SocketFrameKind))


class FrameError(Exception):
    """The connection is of no use any more: it ended, stalled, or carried something that is no frame."""


class ConnectionEnded(FrameError):
    """The peer has closed it, or is gone: it acts on nothing that it has not received by now."""


class Part(NamedTuple):
    """Bytes of a frame's data that are verified by themselves: XXH3-64 of them is `checksum`."""

    size_bytes: int
    checksum: int


class SocketFrame(NamedTuple):
    """A frame without its data, which is still to be received."""

    kind: SocketFrameKind
    message: bytes
    data_bytes: int


HEAD_BYTES = _HEADER.size


def frame_head(kind: SocketFrameKind, message: bytes, data_bytes: int) -> bytes:
    """The bytes of a frame up to its data."""
    return _HEADER.pack(kind, 0, 0, len(message), data_bytes) + message


def read_head(header: memoryview) -> tuple[SocketFrameKind, int, int]:
    """Kind, bytes of the message and of the data, from a frame's first 16 bytes. Raises FrameError."""
    kind, flags, reserved, message_bytes, data_bytes = _HEADER.unpack(header)
    if kind not in _KINDS or flags or reserved:
        raise FrameError("not a frame of this version")
    if message_bytes > MESSAGE_LIMIT_BYTES or data_bytes > DATA_LIMIT_BYTES:
        raise FrameError(f"a frame of {message_bytes} + {data_bytes} B is too large")
    return SocketFrameKind(kind), message_bytes, data_bytes


# Bounds on what a peer can cost this side, each by itself enough for one kind of peer:
#
#     silent       PIECE_TIMEOUT_S without a byte: the wait in the kernel ends (SO_RCVTIMEO, SO_SNDTIMEO)
#     dribbling    a piece of 256 KiB has PIECE_TIMEOUT_S as a whole, however many calls bring it
#     lying        sizes are bounded before anything is allocated for them
class FramedSocket:
    """A connected socket that carries frames. Takes the socket over."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._header = memoryview(bytearray(_HEADER.size))
        self._left_bytes = 0
        if connected.family == socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        else:
            # Its buffers are left to the kernel, which fits them to the way.
            # Frames are sent whole: waiting to fill a packet would only delay the last one.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_tls:
            connected.settimeout(PIECE_TIMEOUT_S)
            return
        # Waits in the kernel: Python's own timeouts would cost a poll per call.
        connected.settimeout(None)
        whole_s = int(PIECE_TIMEOUT_S)
        timeval = _TIMEVAL.pack(whole_s, int((PIECE_TIMEOUT_S - whole_s) * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be received, the end of the stream included; False when nothing came."""
        # Bytes that TLS has decrypted already are no news for the kernel.
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        with _translated():
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(max(timeout_s, 0) * 1000))

    def receive(self) -> SocketFrame | None:
        """Receive the next frame up to its data; None when the peer has ended in order.

        Data of the last frame that was not taken is passed over. Raises FrameError.
        """
        # A frame's data belongs to its reader only until the next one is asked for: an error in the middle of
        # a chunk costs no connection.
        self._discard()
        if not self._fill(self._header, may_end=True):
            return None
        kind, message_bytes, data_bytes = read_head(self._header)
        message = bytearray(message_bytes)
        self._fill(memoryview(message))
        self._left_bytes = data_bytes
        return SocketFrame(kind, bytes(message), data_bytes)

    def receive_into(
        self, places: Iterable[tuple[memoryview, xxh3_64 | None]], parts: Iterable[Part]
    ) -> bool:
        """Receive the frame's data to where it belongs; whether all of it is what its checksums say.

        Places and parts are both as long as the data. A place may have a hasher: it is fed what comes there,
        before that is verified. Raises FrameError.
        """
        is_right = True
        rest = Places(places)
        # However many parts and places there are: time is for bytes.
        # Rounded up: the last piece has its time too.
        deadline = time.monotonic() + PIECE_TIMEOUT_S * -(-self._left_bytes // PIECE_BYTES)
        for part in parts:
            hasher = xxh3_64()
            for piece, sums in rest.take(part.size_bytes):
                self._left_bytes -= self._fill(piece, deadline)
                # In this order: a byte that changes between the two is then found.
                if sums is not None:
                    sums.update(piece)
                hasher.update(piece)
            is_right &= hasher.intdigest() == part.checksum
        return is_right

    def _discard(self) -> None:
        # One buffer for all that is passed over, however much it is.
        rubbish = memoryview(bytearray(min(self._left_bytes, PIECE_BYTES)))
        while self._left_bytes:
            self._left_bytes -= self._fill(rubbish[: self._left_bytes])

    def send(self, kind: SocketFrameKind, message: bytes = b"", data: Sequence[memoryview] = ()) -> None:
        """Send a frame, its data from where it lies: at most `PARTS_LIMIT` places. Raises FrameError."""
        size_bytes = sum(part.nbytes for part in data)
        parts = [memoryview(frame_head(kind, message, size_bytes)), *data]
        with _translated():
            if self._is_tls:
                # `sendmsg` exists for plain sockets only. In pieces, so that each has the time-out of its
                # own.
                for part in parts:
                    for begin in range(0, len(part), PIECE_BYTES):
                        self._socket.sendall(part[begin : begin + PIECE_BYTES])
            else:
                self._send(parts, len(parts[0]) + size_bytes)

    def shut(self) -> None:
        """End the connection in both directions: whoever waits for it stops waiting."""
        with contextlib.suppress(OSError):
            # Past the TLS layer, which may be in use by another thread.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, parts: list[memoryview], size_bytes: int) -> None:
        begun = time.monotonic()
        while True:
            sent_bytes = self._socket.sendmsg(parts)
            size_bytes -= sent_bytes
            if not size_bytes:
                return
            # A blocking socket takes all, unless a signal came or the wait was over.
            now = time.monotonic()
            # Less than a piece in the time of a piece: the peer takes some, too little.
            if now - begun >= PIECE_TIMEOUT_S and sent_bytes < PIECE_BYTES:
                raise FrameError("the peer takes nothing")
            begun = now
            parts = _after(parts, sent_bytes)

    def _fill(self, place: memoryview, deadline: float = math.inf, *, may_end: bool = False) -> int:
        filled = 0
        now = time.monotonic()
        deadline = min(deadline, now + PIECE_TIMEOUT_S)
        while filled < len(place):
            if now > deadline:
                raise FrameError("the peer sends too slowly")
            with _translated():
                # MSG_WAITALL: one call brings a whole piece, instead of one call for each packet. TLS has no
                # such flag.
                count = self._socket.recv_into(place[filled:], 0, 0 if self._is_tls else socket.MSG_WAITALL)
            if not count:
                # An end between two frames is in order, in the middle of one it is a break.
                if may_end and not filled:
                    return 0
                raise FrameError("the connection ended in the middle of a frame")
            filled += count
            now = time.monotonic()
        return filled


class Places:
    """Places to fill one after the other, handed out in pieces."""

    def __init__(self, places: Iterable[tuple[memoryview, xxh3_64 | None]]) -> None:
        self._places = iter(places)
        self._current = memoryview(b"")
        self._sums: xxh3_64 | None = None

    def take(self, size_bytes: int) -> Iterator[tuple[memoryview, xxh3_64 | None]]:
        """The next `size_bytes`, in pieces of at most `PIECE_BYTES`, each with its place's hasher."""
        while size_bytes:
            if not self._current:
                self._current, self._sums = next(self._places)
            count = min(size_bytes, PIECE_BYTES, len(self._current))
            yield self._current[:count], self._sums
            self._current = self._current[count:]
            size_bytes -= count


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    # TLS sockets have Python's time-outs, the others the kernel's: two exceptions for the same fact.
    except TimeoutError as error:
        raise FrameError("the peer does not move") from error
    except BlockingIOError as error:
        # The error of a wait in the kernel whose time is over.
        raise FrameError("the peer does not move") from error
    except OSError as error:
        raise ConnectionEnded(f"the connection broke: {error}") from error
    # A socket that another thread closed has no number any more.
    except ValueError as error:
        raise FrameError(f"the connection broke: {error}") from error


def _after(parts: list[memoryview], sent_bytes: int) -> list[memoryview]:
    """The parts that are left after some of their bytes were sent."""
    for index, part in enumerate(parts):
        if sent_bytes < part.nbytes:
            return [part[sent_bytes:], *parts[index + 1 :]]
        sent_bytes -= part.nbytes
    return []
