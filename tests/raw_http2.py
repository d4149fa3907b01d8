"""HTTP/2 by hand: a client that sends what no library would, and notices what comes back when."""

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def message(encoded: bytes, *, size_bytes: int | None = None) -> bytes:
    """A gRPC message; `size_bytes` says it is longer than it is."""
    return struct.pack("!BI", 0, len(encoded) if size_bytes is None else size_bytes) + encoded


def _literal(name: str, value: str) -> bytes:
    # A header field, neither indexed nor compressed.
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class RawClient:
    """One connection. `begun` has the streams that were answered at all, `ended` those that are over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.begun: set[int] = set()
        self.ended: dict[int, bytes] = {}
        """By stream, the last header block, as it came."""
        self._room = {0: 65535}
        self._first_room = 65535

    @classmethod
    async def open(cls, target: str, *, room: int | None = None) -> "RawClient":
        """Connect. `room`: how many bytes of an answer are taken, all of them if nothing is said."""
        host, _, port = target.rpartition(":")
        made = cls(*await asyncio.open_connection(host, int(port)))
        settings = b"" if room is None else struct.pack("!HI", INITIAL_WINDOW_SIZE, room)
        made.writer.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        while await made.take() != SETTINGS:
            pass
        return made

    def begin(self, stream: int, path: str, **fields: str) -> None:
        """Begin an rpc."""
        fields = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "here",
            "te": "trailers", "content-type": "application/grpc", **fields,
        }  # fmt: skip
        block = b"".join(_literal(*field) for field in fields.items())
        self.writer.write(frame(HEADERS, END_HEADERS, stream, block))
        self._room[stream] = self._first_room

    def say(self, stream: int, encoded: bytes = b"", *, is_last: bool = False) -> None:
        """Send bytes that the server has given room for."""
        self._room[0] -= len(encoded)
        self._room[stream] -= len(encoded)
        pieces = [encoded[at : at + 16384] for at in range(0, len(encoded), 16384)]
        for piece in pieces:
            self.writer.write(frame(DATA, 0, stream, piece))
        if is_last:
            self.writer.write(frame(DATA, END_STREAM, stream))

    def room(self, stream: int) -> int:
        """How many bytes the server would take of a stream now."""
        return min(self._room[0], self._room[stream])

    async def take(self) -> int:
        """Take the next frame, and do what it asks for; returns its kind."""
        head = await self._reader.readexactly(9)
        size_bytes, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        stream = int.from_bytes(head[5:])
        payload = await self._reader.readexactly(size_bytes)
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, size_bytes, 6):
                name, value = struct.unpack_from("!HI", payload, at)
                if name == INITIAL_WINDOW_SIZE:
                    self._first_room = value
            self.writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._room[stream] = self._room.get(stream, 0) + int.from_bytes(payload)
        elif kind in {HEADERS, DATA}:
            self.begun.add(stream)
            if kind == HEADERS and flags & END_STREAM:
                self.ended[stream] = payload
        return kind

    async def until_ended(self, stream: int) -> bytes:
        """Take frames until that stream is over; its last header block."""
        while stream not in self.ended:
            await self.take()
        return self.ended[stream]

    async def until_room(self, stream: int, size_bytes: int) -> None:
        """Take frames until the server would take so many bytes more."""
        while self.room(stream) < size_bytes:
            await self.take()
