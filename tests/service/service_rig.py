"""A server on a real socket in this process, and a client of bare stubs.

Rows spell the session's number, the stream and the token, so that any foreign byte is recognised.
"""

import asyncio
import contextlib
import inspect
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.format.checksums import wire_checksum
from ctxcache.settings.config import Settings
from ctxcache.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    arena_pb2,
    arena_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)


def settings_in(directory: Path, **others: Any) -> Settings:
    """Settings of a server that lies in `directory` and listens on a free port alone."""
    usual: dict[str, Any] = {"arena_size_bytes": 1 << 20, "ssd_size_bytes": 2 << 20, "drain_timeout_s": 5}
    return Settings(
        data_directory=directory / "data",
        listen="127.0.0.1:0",
        unix_socket="",
        arena_huge_pages="off",
        **(usual | others),
    )


TOKENS = model_pb2.StreamName(layer=-1, kind=model_pb2.STATE_KIND_TOKENS)
HIDDEN = model_pb2.StreamName(layer=0, kind=model_pb2.STATE_KIND_HIDDEN)
KV = model_pb2.StreamName(layer=1, kind=model_pb2.STATE_KIND_KV)
STREAMS = (TOKENS, HIDDEN, KV)


def ranges(*streams: model_pb2.StreamName) -> list[model_pb2.StreamRange]:
    """Each of these as a range of its own."""
    return [
        model_pb2.StreamRange(kind=one.kind, layer_begin=one.layer, layer_end=one.layer + 1)
        for one in streams
    ]


def spec_of(stream: model_pb2.StreamName, **facts: Any) -> model_pb2.StreamSpec:
    """A model's description of one stream."""
    return model_pb2.StreamSpec(streams=ranges(stream)[0], **facts)


ROW_BYTES = {-1: 4, 0: 96, 1: 160}


def make_model(**changes: Any) -> model_pb2.Model:
    """A model of two streams besides token ids."""
    facts: dict[str, Any] = {
        "name": "models/tiny",
        "architecture": "Tiny",
        "dtype": model_pb2.DTYPE_FLOAT16,
        "layer_count": 2,
        "hidden_size": 48,
        "kv_head_count": 1,
        "head_size": 40,
        "is_relocatable": True,
        "streams": [
            spec_of(HIDDEN, row_bytes=96, dtype=model_pb2.DTYPE_FLOAT16),
            spec_of(KV, row_bytes=160, dtype=model_pb2.DTYPE_FLOAT16),
        ],
    }
    return model_pb2.Model(**(facts | changes))


def rows(tag: int, begin: int, end: int, stream: model_pb2.StreamName) -> bytes:
    """Rows of tokens `[begin, end)` of the session with that number."""
    size = ROW_BYTES[stream.layer]
    return b"".join(
        ((struct.pack("<HH", tag, i) + struct.pack("<i", stream.layer)) * size)[:size]
        for i in range(begin, end)
    )


def chunk(tag: int, begin: int, end: int, stream: model_pb2.StreamName, **changes: Any) -> session_pb2.Chunk:
    """A chunk as a good client sends it, with changes."""
    data = changes.pop("data", rows(tag, begin, end, stream))
    facts = {
        "stream": changes.pop("as_stream", stream),
        "token_begin": begin,
        "data": data,
        "checksum": wire_checksum(data),
    }
    return session_pb2.Chunk(**(facts | changes))


def chunks(tag: int, begin: int, end: int) -> list[session_pb2.AppendSessionRequest]:
    """Every stream's rows of some tokens."""
    return [session_pb2.AppendSessionRequest(chunk=chunk(tag, begin, end, stream)) for stream in STREAMS]


def commit(token_count: int, *, is_durable: bool = False) -> session_pb2.AppendSessionRequest:
    """Make what came so far visible."""
    durability = session_pb2.DURABILITY_DISK if is_durable else session_pb2.DURABILITY_MEMORY
    return session_pb2.AppendSessionRequest(
        commit=session_pb2.AppendCommit(token_count=token_count, durability=durability)
    )


@dataclass(slots=True)
class Client:
    """Stubs over one channel, and the fingerprint of the model in use."""

    channel: grpc.aio.Channel
    fingerprint: bytes = b""
    sessions: Any = field(init=False)
    models: Any = field(init=False)
    arena: Any = field(init=False)
    admin: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.arena = arena_pb2_grpc.ArenaServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def register(self) -> None:
        """Register the model."""
        request = model_pb2.RegisterModelRequest(model=make_model())
        self.fingerprint = (await self.models.RegisterModel(request)).fingerprint

    async def create(self, session_id: str, **facts: Any) -> session_pb2.Session:
        """A session that stores every stream."""
        request = session_pb2.CreateSessionRequest(
            session_id=session_id, model="models/tiny", layout=ranges(*STREAMS), **facts
        )
        return await self.sessions.CreateSession(request)  # type: ignore[no-any-return]

    def header(self, session_id: str, write_offset: int, **changes: Any) -> session_pb2.AppendSessionRequest:
        """The first message of an append."""
        facts: dict[str, Any] = {
            "name": f"sessions/{session_id}",
            "model_fingerprint": self.fingerprint,
            "write_offset": write_offset,
        }
        return session_pb2.AppendSessionRequest(header=session_pb2.AppendHeader(**(facts | changes)))

    async def append(
        self, session_id: str, tag: int, begin: int, end: int, *, is_durable: bool = False
    ) -> session_pb2.Session:
        """Append tokens in one stream."""
        messages = [
            self.header(session_id, begin),
            *chunks(tag, begin, end),
            commit(end, is_durable=is_durable),
        ]
        return await self.send(messages)

    async def send(self, messages: Iterable[Any] | AsyncIterable[Any]) -> session_pb2.Session:
        """An append of these messages."""
        return (await self.sessions.AppendSession(messages)).session  # type: ignore[no-any-return]

    async def get(self, session_id: str) -> session_pb2.Session:
        """One session."""
        request = session_pb2.GetSessionRequest(name=f"sessions/{session_id}")
        return await self.sessions.GetSession(request)  # type: ignore[no-any-return]

    def read_request(self, session_id: str, **changes: Any) -> session_pb2.ReadSessionRequest:
        """A reader's request."""
        facts = {"name": f"sessions/{session_id}", "model_fingerprint": self.fingerprint}
        return session_pb2.ReadSessionRequest(**(facts | changes))

    async def read(
        self, session_id: str, **changes: Any
    ) -> tuple[session_pb2.ReadHeader, list[session_pb2.Chunk]]:
        """Header and chunks."""
        messages = [m async for m in self.sessions.ReadSession(self.read_request(session_id, **changes))]
        return messages[0].header, [message.chunk for message in messages[1:]]

    async def read_rows(self, session_id: str) -> dict[int, bytes]:
        """Every stream's rows, by layer."""
        found = dict.fromkeys(ROW_BYTES, b"")
        for item in (await self.read(session_id))[1]:
            assert wire_checksum(item.data) == item.checksum
            found[item.stream.layer] += item.data
        return found

    async def stats(self) -> Any:
        """The server's statistics."""
        return await self.admin.GetStats(admin_pb2.GetStatsRequest())


def all_rows(tag: int, token_count: int) -> dict[int, bytes]:
    """The rows that a read of every stream must bring."""
    return {stream.layer: rows(tag, 0, token_count, stream) for stream in STREAMS}


class Access(ABC):
    """A local client's way to send operations: the contract is the same on each."""

    def __init__(self) -> None:
        self.count = 0

    @abstractmethod
    async def write(self, request: arena_pb2.AccessRequest) -> None:
        """Send a batch."""

    @abstractmethod
    async def read(self) -> arena_pb2.AccessResponse | None:
        """The next answer; None when the server ended in order. Raises Ended with why it did otherwise."""

    @abstractmethod
    async def finish(self) -> None:
        """Say that there is no more to come."""

    @abstractmethod
    def die(self) -> None:
        """Break off without a word."""

    async def send(self, *operations: arena_pb2.Operation) -> Sequence[arena_pb2.OperationResult]:
        """One batch; its results."""
        self.count += 1
        await self.write(arena_pb2.AccessRequest(request_id=self.count, operations=operations))
        response = await self.read()
        assert response is not None
        assert response.request_id == self.count
        return response.results

    async def one(self, **operation: Any) -> arena_pb2.OperationResult:
        """One operation; its result."""
        (result,) = await self.send(arena_pb2.Operation(**operation))
        return result

    async def ended(self, code: grpc.StatusCode, reason: str) -> dict[str, str]:
        """Fail unless the server ends it with that code and reason; returns the facts."""
        with pytest.raises(Ended) as caught:
            await self.read()
        found, facts, kinds = _info_in(caught.value.status)
        assert (caught.value.status.code, found) == (code.value[0], reason)
        assert ("BadRequest" in kinds) == (code is grpc.StatusCode.INVALID_ARGUMENT)
        assert ("RetryInfo" in kinds) == (reason in ("TOO_MANY_REQUESTS", "DRAINING"))
        return facts


class Ended(Exception):
    """The server ended a way of access. `status` is the google.rpc.Status that it gave."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.status = status


class GrpcWay(Access):
    """ArenaService.Access."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    async def write(self, request: arena_pb2.AccessRequest) -> None:
        """See Access."""
        await self.call.write(request)

    async def read(self) -> arena_pb2.AccessResponse | None:
        """See Access."""
        try:
            response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            encoded = dict(tuple(error.trailing_metadata() or ()))["grpc-status-details-bin"]
            raise Ended(status_pb2.Status.FromString(encoded)) from error
        return None if response == grpc.aio.EOF else response

    async def finish(self) -> None:
        """See Access."""
        await self.call.done_writing()

    def die(self) -> None:
        """See Access."""
        self.call.cancel()


class SocketWay(Access):
    """The control socket, by struct and protobuf alone."""

    opened: ClassVar[list["SocketWay"]] = []
    """Those that the `server` of a test ends: the collector would, in the middle of another test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self.reader, self.writer = reader, writer
        self.opened.append(self)

    @classmethod
    async def open(cls, path: str) -> "SocketWay":
        """Connect, and say hello."""
        made = cls(*await asyncio.open_unix_connection(path))
        made.write_frame(1, arena_pb2.ControlHello(protocol_version=1).SerializeToString())
        return made

    def write_frame(self, kind: int, message: bytes) -> None:
        """Send any frame."""
        self.writer.write(struct.pack("<IB", len(message), kind) + message)

    async def read_frame(self) -> tuple[int, bytes]:
        """The next frame. Raises asyncio.IncompleteReadError at the end."""
        length, kind = struct.unpack("<IB", await self.reader.readexactly(5))
        return kind, await self.reader.readexactly(length)

    async def write(self, request: arena_pb2.AccessRequest) -> None:
        """See Access."""
        self.write_frame(2, request.SerializeToString())

    async def read(self) -> arena_pb2.AccessResponse | None:
        """See Access."""
        kind, message = await self.read_frame()
        if kind == 1:
            assert arena_pb2.ControlWelcome.FromString(message).protocol_version == 1
            kind, message = await self.read_frame()
        if kind == 2:
            return arena_pb2.AccessResponse.FromString(message)
        assert kind == 3
        # Reset: it was refused before what we sent was read.
        with contextlib.suppress(ConnectionResetError):
            assert await self.reader.read() == b""
        if not message:
            return None
        raise Ended(status_pb2.Status.FromString(message))

    async def finish(self) -> None:
        """See Access."""
        self.write_frame(3, b"")

    def die(self) -> None:
        """See Access."""
        self.writer.transport.abort()


def info_of(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], set[str]]:
    """Reason and facts of ErrorInfo, and the kinds of details that came with it."""
    encoded = dict(tuple(error.trailing_metadata() or ()))["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(encoded)
    assert status.code == error.code().value[0]
    return _info_in(status)


def _info_in(status: Any) -> tuple[str, dict[str, str], set[str]]:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    assert info.domain == "ctxcache"
    return info.reason, dict(info.metadata), {detail.type_url.rpartition(".")[2] for detail in status.details}


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


async def until(condition: Callable[[], Any]) -> None:
    """Wait for the server to get there; the condition may be an awaitable's."""
    async with asyncio.timeout(60):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0)


async def refused(call: Any, code: grpc.StatusCode, reason: str) -> dict[str, str]:
    """Fail unless the call ends with that code and reason; returns the facts."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_drained(call) if hasattr(call, "__aiter__") else call)
    found, facts, kinds = info_of(caught.value)
    assert (caught.value.code(), found) == (code, reason)
    assert ("BadRequest" in kinds) == (code is grpc.StatusCode.INVALID_ARGUMENT)
    return facts
