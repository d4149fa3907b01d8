"""Rows over the server's bulk channel, and the connections to it.

A connection is announced by gRPC, opened with a ticket and kept for the next use. Rows are sent from where
they lie and received where they belong. The channel is thread-safe. Worst case: the channel cannot be
reached, which costs one attempt and then a pause; a broken append shows nothing that was not committed, and a
broken read goes on where it broke.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import (
    durability_to_wire,
    stream_from_wire,
    stream_to_wire,
)
from ctxcache.client.messages import read_session_info
from ctxcache.client.process_forks import end_in_children
from ctxcache.client.rows import Landing, OpenRead, RowPiece, RowTransport
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.errors import CacheError, ChecksumMismatch, DeadlineExceeded, TooManyRequests, Unavailable
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1 import bulk_pb2
from ctxcache.v1.bulk_pb2 import BulkChunk
from ctxcache.v1.session_pb2 import (
    AppendCommit,
    AppendHeader,
    AppendSessionResponse,
    ReadHeader,
    ReadSessionRequest,
)
from ctxcache.wire.framed_socket import (
    PIECE_BYTES,
    VERSION,
    ConnectionEnded,
    FramedSocket,
    FrameError,
    Part,
    SocketFrame,
    SocketFrameKind,
)
from ctxcache.wire.status import from_encoded_status

CONNECT_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 60.0
"""How long a channel that cannot be reached is left alone."""
IDLE_LIMIT = 8
"""Connections kept for the next use; with them, as many are open as threads are at work."""
IDLE_SHARE = 0.9
"""The share of the server's idle timeout for which a connection is kept.

The rest is for what is on its way.
"""


class NoBulkChannel(Exception):
    """There is none, it cannot be reached, or it takes no more connections; gRPC may do."""


# The life of a connection. gRPC gives a ticket, which names the caller and is good once:
#
#     ticket ──► connect ──► HELLO/WELCOME ──► in use ──── answered in full ────► idle ──► in use …
#                                                │                                 │
#                           error, broken off,   │        server's idle timeout,   │
#                           close()              ▼        or bytes unasked for     ▼
#                                              closed                            closed
#
# The way of a request whose kept connection turns out to be dead (the server closed it, or restarted):
#
#     nothing was answered, nothing was committed   ──► once more, on a fresh connection
#     anything was answered, or COMMIT was sent     ──► Unavailable: the caller must look what is there
class Connection(FramedSocket):
    """A framed socket that has said hello."""

    idle_limit_s = math.inf
    """How long after a request began the next one may."""
    asked_s = -math.inf
    """When the last request began: the server may have been idle since."""
    is_kept = False
    """Whether it has served a request already."""


class BulkChannel:
    """Hands out connections that have said hello."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self.idle: list[Connection] = []
        self.in_use: set[Connection] = set()
        """Both to be looked at, not changed."""
        self._is_closed = False
        self._not_before = 0.0
        end_in_children(self)

    @property
    def target(self) -> str:
        """The target that errors name."""
        return self._wire.target

    # The newest idle connection first: the others age, and are dropped when their time comes.
    def take(self, *, is_fresh: bool = False) -> Connection:
        """Return a connection for one request. Raises NoBulkChannel, and Unavailable when closed."""
        while not is_fresh and (idle := self._take_idle()) is not None:
            now_s = time.monotonic()
            # Without a request under way, only the connection's end can be received.
            if now_s < idle.asked_s + idle.idle_limit_s and not idle.wait(0):
                idle.asked_s = now_s
                return idle
            self.drop(idle)
        # Meanwhile rows go by gRPC: a firewall that lets only one port through costs one attempt a minute.
        if time.monotonic() < self._not_before:
            raise NoBulkChannel
        try:
            connected = self.connect()
        except (OSError, FrameError) as error:
            self._not_before = time.monotonic() + RETRY_INTERVAL_S
            raise NoBulkChannel(str(error)) from error
        connected.asked_s = time.monotonic()
        # A client may be closed while a connection is made; nobody else would ever close this one.
        with self._lock:
            if not self._is_closed:
                self.in_use.add(connected)
                return connected
        connected.close()
        raise self._closed()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that is between two requests."""
        connection.is_kept = True
        with self._lock:
            self.in_use.discard(connection)
            if not self._is_closed and len(self.idle) < IDLE_LIMIT:
                self.idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Close a connection in whatever state it is."""
        with self._lock:
            self.in_use.discard(connection)
        connection.shut()
        connection.close()

    def close(self) -> None:
        """End every connection; transfers under way raise Unavailable."""
        with self._lock:
            self._is_closed = True
            idle, self.idle = self.idle, []
            # Shut, not closed: the thread at work on it closes it, and its descriptor is no other file's
            # until then.
            for connection in self.in_use:
                connection.shut()
        for connection in idle:
            connection.close()

    def forked(self) -> None:
        """See Shared."""
        self._lock = threading.Lock()
        # The copies alone: a shutdown would end the parent's.
        for connection in (*self.idle, *self.in_use):
            connection.close()
        self.idle.clear()
        self.in_use.clear()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn a connection's end within the block into Unavailable."""
        try:
            yield
        except FrameError as error:
            problem = "the client is closed" if self._is_closed else str(error)
            raise Unavailable(target=self.target, problem=problem) from error

    def _closed(self) -> Unavailable:
        return Unavailable(target=self.target, problem="the client is closed")

    def _take_idle(self) -> Connection | None:
        with self._lock:
            if self._is_closed:
                raise self._closed()
            if not self.idle:
                return None
            connection = self.idle.pop()
            self.in_use.add(connection)
            return connection

    def connect(self) -> Connection:
        """Open a connection and say hello. Raises what a call does, OSError, FrameError, NoBulkChannel."""
        ticket = self.ticket()
        framed = Connection(self._open(ticket))
        try:
            hello = bulk_pb2.BulkHello(ticket=ticket.ticket, version=VERSION)
            framed.send(SocketFrameKind.HELLO, hello.SerializeToString())
            answer = framed.receive() if framed.wait(self._wire.timeout_s) else None
        except BaseException:
            framed.close()
            raise
        if answer is None or answer.kind is not SocketFrameKind.WELCOME:
            # A refusal, with why; or silence for as long as a call may take.
            framed.close()
            refusal = from_encoded_status(answer.message, self.target) if answer else "no answer"
            raise FrameError(f"the bulk channel: {refusal}")
        welcome = bulk_pb2.BulkWelcome.FromString(answer.message)
        if welcome.HasField("idle_timeout"):
            framed.idle_limit_s = IDLE_SHARE * welcome.idle_timeout.ToNanoseconds() / 10**9
        return framed

    def ticket(self) -> bulk_pb2.BulkTicket:
        """Ask for what names this caller, once. Raises as `connect` does."""
        try:
            ticket = self._wire.call(self._wire.bulk.OpenBulk, bulk_pb2.OpenBulkRequest())
        # The server has as many connections as it takes: no reason to leave the channel alone for a minute.
        except TooManyRequests as error:
            raise NoBulkChannel(str(error)) from error
        except CacheError as error:
            # A server of an earlier version knows no such service.
            if error.facts.get("code") != "UNIMPLEMENTED":
                raise
            ticket = bulk_pb2.BulkTicket()
        if not ticket.ticket:
            raise FrameError("the server has none")
        return ticket

    def _open(self, ticket: bulk_pb2.BulkTicket) -> socket.socket:
        # Never a socket of the file system for a server that was named by a TCP address: it may be another
        # host's path.
        if self._wire.target.startswith("unix:") and ticket.unix_path:
            return _connect_unix(ticket.unix_path)
        address = self._wire.address
        if address is None or not ticket.tcp_port:
            raise FrameError(f"no way to it from {self._wire.target}")
        connected = socket.create_connection((address.host, ticket.tcp_port), CONNECT_TIMEOUT_S)
        return self._secured(connected, address.host)

    def _secured(self, connected: socket.socket, host: str) -> socket.socket:
        context, tls = self._wire.tls_context, self._wire.tls
        if context is None or tls is None:
            return connected
        try:
            return context.wrap_socket(connected, server_hostname=tls.server_name or host)
        except OSError:
            connected.close()
            raise


def _connect_unix(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(CONNECT_TIMEOUT_S)
        connected.connect(path)
    except OSError:
        with contextlib.suppress(OSError):
            connected.close()
        raise
    return connected


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
            # Only a connection that had ended: after a time-out the server may still be at work on the
            # request.
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
        # | message BulkChunk: stream, token_begin, sizes and checksums of parts | data: part 0, part 1, … |
        #
        # Parts are at most 256 KiB: each is verified while the caches still have it.
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
        """True if a kept connection answered nothing, and no request changed what others see."""

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
            # An error is a whole answer: the connection is between two requests.
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
        """The error to raise when the server breaks the protocol."""
        return CacheError(f"{self._channel.target}: {problem}")

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(target=self._channel.target, timeout_s=f"{self._timeout_s:g}")


#     client   APPEND(header)  CHUNK …  CHUNK  COMMIT  FINISH ──►
#     server                                                  ◄── APPENDED, or ERROR at any moment
#
# An ERROR that comes early ends the sending of chunks; FINISH then says where the next request begins.
def _append(
    talk: _Talk, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
) -> SessionInfo:
    talk.send(SocketFrameKind.APPEND, header.SerializeToString())
    if _send_rows(talk, rows, header.write_offset):
        token_count = header.write_offset + len(next(iter(rows.values())))
        commit = AppendCommit(token_count=token_count, durability=durability_to_wire(durability))
        # Before it is sent: a COMMIT that went out may have been acted upon, whatever is heard of it.
        talk.is_repeatable = False
        talk.send(SocketFrameKind.COMMIT, commit.SerializeToString())
    talk.send(SocketFrameKind.FINISH)
    answer = AppendSessionResponse.FromString(talk.receive(SocketFrameKind.APPENDED).message)
    talk.end()
    return read_session_info(answer.session)


def _send_rows(talk: _Talk, rows: Mapping[Stream, Bytes], write_offset: int) -> bool:
    """Whether all of them were sent; else the append has failed, and nothing more is wanted."""
    for stream, view in rows.items():
        for message, data in _chunks(stream, view, write_offset):
            # Looked at before each chunk: rows for an append that has failed would be sent for nothing.
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
