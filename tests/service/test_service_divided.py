"""Tenants share a server.

However much one asks for, another keeps what is its own, and its next call is taken.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from bulk_stubs import HELLO, WELCOME, Connection
from fakes import FakeClock
from server_process import write_secret
from service_rig import Client, refused, until

from ctxcache.identity import ArenaGrant, Token, digest_of
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import arena_pb2, block_pb2, block_pb2_grpc, bulk_pb2, bulk_pb2_grpc, session_pb2
from ctxcache.wire.frames import PROTOCOL_VERSION, FrameKind, FrameReader, encode_frame

LIMIT = 3
SSD_BYTES = 4 << 20
TOKENS = 640
"""A session of ten segments, of which SSD takes 146."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server of two tenants, who share a user, with room for three connections of either sort."""
    hashes = tmp_path / "hashes"
    grants = {name: ArenaGrant(name, has_shared_memory=True, writes_in_place=True) for name in ("a", "b")}
    lines = (Token(name, digest_of(name), grant).line() for name, grant in grants.items())
    write_secret(hashes, "\n".join(lines))
    settings = Settings(
        data_directory=tmp_path / "data",
        listen="127.0.0.1:0",
        unix_socket=str(tmp_path / "socket"),
        arena_size_bytes=1 << 20,
        ssd_size_bytes=SSD_BYTES,
        arena_huge_pages="off",
        token_hashes=hashes,
        max_bulk_connections=LIMIT,
        max_local_clients=LIMIT,
        drain_timeout_s=5,
    )
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
    await until(lambda: server.bulk.connection_count == 2)
    other = await _bulk(server, "b")
    assert other

    for connection in (first, second, other):
        connection.close()
    await until(lambda: server.bulk.connection_count == 0)
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
        self._writer.write(encode_frame(FrameKind.HELLO, said.SerializeToString()))
        while (frame := self._frames.next()) is None:
            data = await self._reader.read(1 << 16)
            assert data
            self._frames.feed(data)
        return frame.kind == FrameKind.HELLO

    def close(self) -> None:
        """End it."""
        self._writer.transport.abort()


async def _local(server: Server, token: str) -> _Local | None:
    made = _Local(*await asyncio.open_unix_connection(server.control.path))
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
    await until(lambda: len(server.control.connections) == 2)
    other = await _local(server, "b")
    assert other

    for connection in (first, second, other):
        connection.close()


def _named(details: Any, token: str) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(("authorization", f"Bearer {token}")))


class _Calls(grpc.aio.UnaryUnaryClientInterceptor):
    """Calls of the tenant whose token this is."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """See grpc.aio."""
        return await continuation(_named(details, self._token), request)


class _Appends(grpc.aio.StreamUnaryClientInterceptor):
    """Appends of the tenant whose token this is."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """See grpc.aio."""
        return await continuation(_named(details, self._token), requests)


@pytest.fixture
async def tenants(server: Server) -> AsyncIterator[tuple[Client, Client]]:
    """Clients of either tenant, who know nothing of each other."""
    async with AsyncExitStack() as stack:
        made = []
        for token in ("a", "b"):
            channel = grpc.aio.insecure_channel(
                server.addresses[0], interceptors=[_Calls(token), _Appends(token)]
            )
            made.append(Client(await stack.enter_async_context(channel)))
            await made[-1].register()
        yield made[0], made[1]


async def test_a_flood_evicts_nothing_that_is_within_half(tenants: tuple[Client, Client]) -> None:
    """Without shares, ten times the capacity of one tenant costs another nothing within half of SSD."""
    quiet, flooding = tenants
    for number in range(7):
        await quiet.create(f"s{number}")
        await quiet.append(f"s{number}", number, 0, TOKENS, is_durable=True)
    for number in range(146):
        await flooding.create(f"flood{number}")
        await flooding.append(f"flood{number}", number, 0, TOKENS, is_durable=True)

    kept = [await quiet.get(f"s{number}") for number in range(7)]
    assert [session.durable_token_count for session in kept] == [TOKENS] * 7
    # The other tenant has borrowed the room that the quiet one does not use.
    listed = await flooding.sessions.ListSessions(session_pb2.ListSessionsRequest())
    assert sum(session.ssd_bytes for session in listed.sessions) > SSD_BYTES * 0.4


async def test_one_tenant_does_not_take_all_subscriptions(server: Server) -> None:
    """A follower of blocks is let in, however many another tenant has; and its own when one has ended."""
    space = block_pb2.BlockSpace(
        model_fingerprint=bytes(32), layout_tag="raw", parts=[block_pb2.BlockPart(layer_begin=0, layer_end=1)]
    )
    request = block_pb2.SubscribeBlocksRequest(space=space)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        stub: Any = block_pb2_grpc.BlockServiceStub(channel)

        def follow_one(token: str) -> Any:
            return stub.SubscribeBlocks(request, metadata=(("authorization", f"Bearer {token}"),))

        async def follow(token: str) -> Any:
            call = follow_one(token)
            with suppress(grpc.aio.AioRpcError):
                return call if await call.read() else None
            return None

        calls = []
        while call := await follow("a"):
            calls.append(call)
        await refused(follow_one("a"), grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        others = await follow("b")

        assert 1 < len(calls) < server.settings.max_engines
        assert others is not None
        for call in (*calls, others):
            call.cancel()
        await until(lambda: not len(server.cache.blocks.subscriptions))
