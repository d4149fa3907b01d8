"""Connections are divided among tenants: however many one asks for, another's next one is taken."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from bulk_stubs import HELLO, WELCOME, Connection
from service_rig import until

from ctxcache.config import Settings
from ctxcache.core.identity import Grant
from ctxcache.frames import PROTOCOL_VERSION, FrameReader, Kind, encode_frame
from ctxcache.server import Server
from ctxcache.testing.fakes import FakeClock
from ctxcache.tokens import Token, digest_of
from ctxcache.v1 import arena_pb2, bulk_pb2, bulk_pb2_grpc

LIMIT = 3


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server of two tenants, who share a user, with room for three connections of either sort."""
    hashes = tmp_path / "hashes"
    grants = {name: Grant(name, has_shared_memory=True) for name in ("a", "b")}
    lines = (Token(name, digest_of(name), grant).line() for name, grant in grants.items())
    hashes.write_text("\n".join(lines))
    settings = Settings(
        data_directory=tmp_path / "data", listen="127.0.0.1:0", unix_socket=str(tmp_path / "socket"),
        arena_size_bytes=1 << 20, ssd_size_bytes=1 << 20, arena_huge_pages="off", token_hashes=hashes,
        max_bulk_connections=LIMIT, max_local_clients=LIMIT, drain_timeout_s=5,
    )  # fmt: skip
    made = await Server.start(settings, FakeClock())
    yield made
    await made.stop()


async def _bulk(server: Server, token: str) -> Connection | None:
    """A connection that was let in; None for one that is one too many."""
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        stub: Any = bulk_pb2_grpc.BulkServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        issued = await stub.OpenBulk(bulk_pb2.OpenBulkRequest(), metadata=metadata)
    made = Connection(*await asyncio.open_connection("127.0.0.1", issued.tcp_port))
    await made.send(HELLO, bulk_pb2.BulkHello(ticket=issued.ticket, version=1).SerializeToString())
    try:
        kind, _, _ = await made.receive()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and await made.is_ended():
            return None
        raise
    assert kind == WELCOME
    return made


async def test_one_tenant_does_not_take_all_bulk_connections(server: Server) -> None:
    """One too many is told so; when one of its own has ended there is room for it again."""
    first, second = await _bulk(server, "a"), await _bulk(server, "a")
    assert first
    assert second
    assert await _bulk(server, "a") is None
    await until(lambda: server._bulk.connection_count == 2)
    other = await _bulk(server, "b")
    assert other

    for connection in (first, second, other):
        connection.close()
    await until(lambda: server._bulk.connection_count == 0)
    again = await _bulk(server, "a")
    assert again
    again.close()


class _Local:
    """A local client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._frames = reader, writer, FrameReader()

    async def hello(self, token: str) -> bool:
        """Say who it is. Whether it was let in."""
        said = arena_pb2.ControlHello(protocol_version=PROTOCOL_VERSION, token=token)
        self._writer.write(encode_frame(Kind.HELLO, said.SerializeToString()))
        while (frame := self._frames.next()) is None:
            data = await self._reader.read(1 << 16)
            assert data
            self._frames.feed(data)
        return frame.kind == Kind.HELLO

    def close(self) -> None:
        """End it."""
        self._writer.transport.abort()


async def _local(server: Server, token: str) -> _Local | None:
    made = _Local(*await asyncio.open_unix_connection(server._control._path))
    if await made.hello(token):
        return made
    made.close()
    return None


async def test_tenants_that_share_a_user_do_not_count_as_one_on_the_control_socket(server: Server) -> None:
    """By its token a local client is its tenant's, whoever its process is."""
    first, second = await _local(server, "a"), await _local(server, "a")
    assert first
    assert second
    assert await _local(server, "a") is None
    await until(lambda: len(server._control.connections) == 2)
    other = await _local(server, "b")
    assert other

    for connection in (first, second, other):
        connection.close()
