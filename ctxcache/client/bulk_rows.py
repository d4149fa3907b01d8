"""Rows over the bulk channel: sent from where they lie and received where they belong.

Worst case: the connection breaks; an append shows nothing of what was not committed, and a read goes
on where it broke.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from ctxcache.client.arena import Bytes
from ctxcache.client.bulk_channel import BulkChannel, Connection, NoBulkChannel
from ctxcache.client.convert import (
    durability_to_wire,
    session_from_wire,
    stream_from_wire,
    stream_to_wire,
)
from ctxcache.client.row_transport import Landing, OpenRead, RowTransport
from ctxcache.client.rows import RowPiece
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.errors import CacheError, ChecksumMismatch, DeadlineExceeded, Unavailable
from ctxcache.format.identity import wire_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.bulk_pb2 import BulkChunk
from ctxcache.v1.session_pb2 import (
    AppendCommit,
    AppendHeader,
    AppendSessionResponse,
    ReadHeader,
    ReadSessionRequest,
)
from ctxcache.wire.framed_socket import PIECE_BYTES, ConnectionEnded, Part, SocketFrame, SocketFrameKind
from ctxcache.wire.status import from_encoded_status

CHUNK_BYTES = 2 << 20
T = TypeVar("T")


class BulkRows:
    """See RowTransport. Where there is no bulk channel, `otherwise` does; without it that is Unavailable."""

    def __init__(self, wire: Wire, channel: BulkChannel, otherwise: RowTransport | None) -> None:
        self._wire, self._channel, self._otherwise = wire, channel, otherwise
        self.target = wire.target

    def read(self, request: ReadSessionRequest, *, size_bytes: int) -> OpenRead:
        """See RowTransport."""
        try:
            return self._ask(lambda talk: BulkRead(talk, request), size_bytes)
        except NoBulkChannel as error:
            return self._or_else(error).read(request, size_bytes=size_bytes)

    def append(
        self, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
    ) -> SessionInfo:
        """See RowTransport."""
        size_bytes = sum(view.nbytes for view in rows.values())
        try:
            return self._ask(lambda talk: _append(talk, header, rows, durability), size_bytes)
        except NoBulkChannel as error:
            return self._or_else(error).append(header, rows, durability)

    def _ask(self, ask: Callable[["_Talk"], T], size_bytes: int) -> T:
        """Ask; once more where a kept connection had ended before the server could act on it.

        Raises NoBulkChannel, and what `ask` raises.
        """
        talk = self._talk(self._channel.take(), size_bytes)
        try:
            with talk.failing():
                return ask(talk)
        except Unavailable as error:
            if not (talk.is_repeatable and isinstance(error.__cause__, ConnectionEnded)):
                raise
        talk = self._talk(self._channel.take(is_fresh=True), size_bytes)
        with talk.failing():
            return ask(talk)

    def _talk(self, connection: Connection, size_bytes: int) -> "_Talk":
        return _Talk(self._channel, connection, self._wire.bulk_timeout_s(size_bytes))

    def _or_else(self, error: NoBulkChannel) -> RowTransport:
        if self._otherwise is None:
            raise Unavailable(target=self.target, problem=f"no bulk channel: {error}") from error
        return self._otherwise


class BulkRead:
    """See OpenRead."""

    def __init__(self, talk: "_Talk", request: ReadSessionRequest) -> None:
        self._talk = talk
        talk.send(SocketFrameKind.READ, request.SerializeToString())
        self.header = ReadHeader.FromString(talk.receive(SocketFrameKind.READ_HEADER).message)

    def next(self, landing: Landing) -> RowPiece | None:
        """See OpenRead."""
        if self._talk.is_over:
            return None
        with self._talk.failing():
            frame = self._talk.receive(SocketFrameKind.CHUNK, SocketFrameKind.END)
            if frame.kind is SocketFrameKind.END:
                self._talk.end()
                return None
            return self._land(frame, landing)

    def close(self) -> None:
        """See OpenRead."""
        self._talk.abandon()

    def _land(self, frame: SocketFrame, landing: Landing) -> RowPiece:
        chunk = BulkChunk.FromString(frame.message)
        stream = stream_from_wire(chunk.stream)
        parts = list(map(Part, chunk.part_sizes, chunk.checksums))
        if sum(part.size_bytes for part in parts) != frame.data_bytes or any(p.size_bytes < 1 for p in parts):
            raise self._talk.broken_contract(f"the parts of {stream} are not its data")
        place = landing(stream, chunk.token_begin, frame.data_bytes)
        rows = np.empty(frame.data_bytes, np.uint8) if place is None else place
        if not self._talk.receive_into(rows.reshape(-1).data, parts):
            raise ChecksumMismatch(field=f"{stream} at token {chunk.token_begin}")
        # In a place of its caller's they are the caller's.
        if place is None:
            rows.flags.writeable = False
        return RowPiece(stream, chunk.token_begin, rows)


class _Talk:
    """One request on a connection: ended in order it is kept for the next, otherwise it is closed."""

    def __init__(self, channel: BulkChannel, connection: Connection, timeout_s: float) -> None:
        self._channel, self._connection, self._timeout_s = channel, connection, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.is_over = False
        self.is_repeatable = connection.is_kept
        """Whether nothing was answered and nothing asked that changes what anybody sees, on a connection kept."""

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn what happens to a connection into errors of ours; what goes wrong in the block ends it."""
        try:
            with self._channel.errors():
                yield
        except DecodeError as error:
            self.abandon()
            raise self.broken_contract("a message cannot be read") from error
        except BaseException:
            self.abandon()
            raise

    def send(self, kind: SocketFrameKind, message: bytes = b"", data: memoryview | None = None) -> None:
        """Send a frame. Raises FrameError, DeadlineExceeded."""
        self._check_time()
        self._connection.send(kind, message, () if data is None else (data,))

    def has_answer(self) -> bool:
        """Whether the server has something to say already."""
        return self._connection.wait(0)

    def receive(self, *kinds: SocketFrameKind) -> SocketFrame:
        """Receive a frame of one of these kinds. Raises the server's error, FrameError, DeadlineExceeded."""
        if not self._connection.wait(self._deadline - time.monotonic()):
            self._check_time()
        frame = self._connection.receive()
        if frame is None:
            raise ConnectionEnded("the server ended the connection")
        self.is_repeatable = False
        if frame.kind is SocketFrameKind.ERROR:
            self.end()
            raise from_encoded_status(frame.message, self._channel.target)
        if frame.kind not in kinds:
            raise self.broken_contract(f"{frame.kind.name} is not expected here")
        return frame

    def receive_into(self, place: memoryview, parts: list[Part]) -> bool:
        """See FramedSocket."""
        self._check_time()
        return self._connection.receive_into(((place, None),), parts)

    def end(self) -> None:
        """Keep the connection: the request was answered in full."""
        if not self.is_over:
            self.is_over = True
            self._channel.give_back(self._connection)

    def abandon(self) -> None:
        """Close the connection unless the request was answered in full."""
        if not self.is_over:
            self.is_over = True
            self._channel.drop(self._connection)

    def broken_contract(self, problem: str) -> CacheError:
        """What to raise when the server does not keep to the protocol."""
        return CacheError(f"{self._channel.target}: {problem}")

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(target=self._channel.target, timeout_s=f"{self._timeout_s:g}")


def _append(
    talk: _Talk, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
) -> SessionInfo:
    talk.send(SocketFrameKind.APPEND, header.SerializeToString())
    if _send_rows(talk, rows, header.write_offset):
        token_count = header.write_offset + len(next(iter(rows.values())))
        commit = AppendCommit(token_count=token_count, durability=durability_to_wire(durability))
        talk.is_repeatable = False
        talk.send(SocketFrameKind.COMMIT, commit.SerializeToString())
    talk.send(SocketFrameKind.FINISH)
    answer = AppendSessionResponse.FromString(talk.receive(SocketFrameKind.APPENDED).message)
    talk.end()
    return session_from_wire(answer.session)


def _send_rows(talk: _Talk, rows: Mapping[Stream, Bytes], write_offset: int) -> bool:
    """Whether all of them were sent; else the append has failed, and nothing more is wanted."""
    for stream, view in rows.items():
        for message, data in _chunks(stream, view, write_offset):
            if talk.has_answer():
                return False
            talk.send(SocketFrameKind.CHUNK, message, data)
    return True


def _chunks(stream: Stream, view: Bytes, write_offset: int) -> Iterator[tuple[bytes, memoryview]]:
    name = stream_to_wire(stream)
    step = max(1, CHUNK_BYTES // view.shape[1])
    for begin in range(0, len(view), step):
        data = view[begin : begin + step].data.cast("B")
        parts = [data[first : first + PIECE_BYTES] for first in range(0, len(data), PIECE_BYTES)]
        yield (
            BulkChunk(
                stream=name,
                token_begin=write_offset + begin,
                part_sizes=map(len, parts),
                checksums=map(wire_checksum, parts),
            ).SerializeToString(),
            data,
        )
