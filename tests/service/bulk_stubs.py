"""AppendSession and ReadSession over the bulk channel, as calls that look like gRPC's.

Written from docs/clients.md alone: a socket, the protos and XXH3. No code of the product's frames is used.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable
from typing import Any

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed
from xxhash import xxh3_64_intdigest

from ctxcache.v1 import bulk_pb2, bulk_pb2_grpc, session_pb2

HELLO, READ, APPEND, CHUNK, COMMIT, FINISH = 1, 2, 3, 4, 5, 6
WELCOME, READ_HEADER, END, APPENDED, ERROR = 16, 17, 18, 19, 20


class Connection:
    """A connection to the bulk channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, *, ticket: bytes | None = None) -> "Connection":
        """Connect and say hello; with a ticket of the test's own, whatever the server answers to it."""
        stub: Any = bulk_pb2_grpc.BulkServiceStub(channel)
        issued = await stub.OpenBulk(bulk_pb2.OpenBulkRequest())
        if issued.tcp_port:
            streams = await asyncio.open_connection("127.0.0.1", issued.tcp_port)
        else:
            streams = await asyncio.open_unix_connection(issued.unix_path)
        made = cls(*streams)
        hello = bulk_pb2.BulkHello(ticket=issued.ticket if ticket is None else ticket, version=1)
        await made.send(HELLO, hello.SerializeToString())
        if ticket is None:
            kind, message, _ = await made.receive()
            assert (kind, bulk_pb2.BulkWelcome.FromString(message).version) == (WELCOME, 1)
        return made

    async def send(self, kind: int, message: bytes = b"", data: bytes = b"") -> None:
        """Send a frame."""
        self._writer.write(struct.pack("<BBHIQ", kind, 0, 0, len(message), len(data)) + message + data)
        await self._writer.drain()

    async def send_bytes(self, data: bytes) -> None:
        """Send what may be no frame."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> tuple[int, bytes, bytes]:
        """Receive a frame. Raises what the server says in place of one, or IncompleteReadError at the end."""
        header = await self._reader.readexactly(16)
        kind, flags, reserved, message_bytes, data_bytes = struct.unpack("<BBHIQ", header)
        assert (flags, reserved) == (0, 0)
        message = await self._reader.readexactly(message_bytes)
        data = await self._reader.readexactly(data_bytes)
        if kind == ERROR:
            raise rpc_error(message)
        return kind, message, data

    async def is_ended(self) -> bool:
        """Wait for the server to end the connection; False when it says something instead."""
        with contextlib.suppress(ConnectionError):
            return not await self._reader.read(1)
        return True

    def close(self) -> None:
        """End it, whatever is on its way."""
        self._writer.transport.abort()


def rpc_error(status: bytes) -> grpc.aio.AioRpcError:
    """The error as gRPC would have raised it."""
    parsed = status_pb2.Status.FromString(status)
    code = next(code for code in grpc.StatusCode if code.value[0] == parsed.code)
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", status))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, parsed.message)


class BulkAppend:
    """An append under way; awaiting it gives the answer."""

    def __init__(self, channel: grpc.aio.Channel, messages: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._channel, self._messages = channel, messages
        self._connection: Connection | None = None
        self._running = asyncio.ensure_future(self._run())

    def __await__(self) -> Generator[Any, None, session_pb2.AppendSessionResponse]:
        return self._running.__await__()

    def cancel(self) -> None:
        """Break the connection."""
        self._running.cancel()
        if self._connection:
            self._connection.close()

    async def _run(self) -> session_pb2.AppendSessionResponse:
        self._connection = connection = await Connection.open(self._channel)
        sending = asyncio.ensure_future(self._send(connection))
        try:
            kind, message, _ = await connection.receive()
            await sending
        finally:
            sending.cancel()
            connection.close()
        assert kind == APPENDED
        return session_pb2.AppendSessionResponse.FromString(message)

    async def _send(self, connection: Connection) -> None:
        is_first = True
        async for message in _each(self._messages):
            await connection.send(*as_frame(message, is_first=is_first))
            is_first = False
        await connection.send(FINISH)


class BulkRead:
    """A read under way: iterate over its messages."""

    def __init__(self, channel: grpc.aio.Channel, request: session_pb2.ReadSessionRequest) -> None:
        self._channel, self._request = channel, request
        self._connection: Connection | None = None

    def __aiter__(self) -> AsyncIterator[session_pb2.ReadSessionResponse]:
        return self._run()

    async def read(self) -> session_pb2.ReadSessionResponse:
        """Receive one message."""
        return await anext(aiter(self))

    def cancel(self) -> None:
        """Break the connection."""
        if self._connection:
            self._connection.close()

    async def _run(self) -> AsyncIterator[session_pb2.ReadSessionResponse]:
        self._connection = connection = await Connection.open(self._channel)
        await connection.send(READ, self._request.SerializeToString())
        kind, message, data = await connection.receive()
        assert (kind, data) == (READ_HEADER, b"")
        yield session_pb2.ReadSessionResponse(header=session_pb2.ReadHeader.FromString(message))
        while (frame := await connection.receive())[0] != END:
            assert frame[0] == CHUNK
            yield session_pb2.ReadSessionResponse(chunk=as_chunk(frame[1], frame[2]))
        connection.close()


class BulkSessions:
    """SessionService's stub, its two streams by the bulk channel."""

    def __init__(self, channel: grpc.aio.Channel, stub: Any) -> None:
        self._channel, self._stub = channel, stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def AppendSession(self, messages: Iterable[Any] | AsyncIterable[Any]) -> BulkAppend:  # noqa: N802
        """See the proto."""
        return BulkAppend(self._channel, messages)

    def ReadSession(self, request: session_pb2.ReadSessionRequest) -> BulkRead:  # noqa: N802
        """See the proto."""
        return BulkRead(self._channel, request)


def as_frame(message: session_pb2.AppendSessionRequest, *, is_first: bool) -> tuple[int, bytes, bytes]:
    """A message of AppendSession as a frame.

    A message that is none of the three is one that the server does not know.
    """
    match message.WhichOneof("message"):
        case "header":
            return (APPEND if is_first else READ), message.header.SerializeToString(), b""
        case "commit":
            return COMMIT, message.commit.SerializeToString(), b""
        case "chunk":
            chunk = message.chunk
            bulk = bulk_pb2.BulkChunk(
                stream=chunk.stream,
                token_begin=chunk.token_begin,
                part_sizes=[len(chunk.data)],
                checksums=[chunk.checksum],
            )
            return CHUNK, bulk.SerializeToString(), chunk.data
    return END, b"", b""


def as_chunk(message: bytes, data: bytes) -> session_pb2.Chunk:
    """A CHUNK frame as a message of ReadSession, each part verified."""
    chunk = bulk_pb2.BulkChunk.FromString(message)
    assert sum(chunk.part_sizes) == len(data)
    begin = 0
    for size_bytes, checksum in zip(chunk.part_sizes, chunk.checksums, strict=True):
        assert xxh3_64_intdigest(data[begin : begin + size_bytes]) == checksum
        begin += size_bytes
    return session_pb2.Chunk(
        stream=chunk.stream, token_begin=chunk.token_begin, data=data, checksum=xxh3_64_intdigest(data)
    )


async def _each(messages: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(messages, AsyncIterable):
        async for message in messages:
            yield message
    else:
        for message in messages:
            yield message
