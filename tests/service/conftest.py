"""Servers in this process, and clients of them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from fakes import FakeClock
from integrity import check_integrity
from service_rig import Access, Client, GrpcWay, SocketWay, settings_in

from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import arena_pb2

ARENA_BYTES = 1 << 20
SSD_BYTES = 4 << 20


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A small server without a Unix socket."""
    return settings_in(
        tmp_path, arena_size_bytes=ARENA_BYTES, ssd_size_bytes=SSD_BYTES, max_concurrent_rpcs=8,
        max_local_clients=4, max_bulk_connections=12, max_concurrent_streams=8, client_share=0.75,
    )  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    """The server's clock."""
    return FakeClock()


@pytest.fixture
async def server(settings: Settings, clock: FakeClock) -> AsyncIterator[Server]:
    """A server whose books are checked at the end."""
    SocketWay.opened.clear()
    started = await Server.start(settings, clock)
    yield started
    while SocketWay.opened:
        SocketWay.opened.pop().die()
    await started.stop()
    await started.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(started.cache) == []


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client that has registered the model."""
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        made = Client(channel)
        await made.register()
        yield made


@pytest.fixture(params=["grpc", "socket"])
async def connect(
    request: pytest.FixtureRequest, client: Client
) -> AsyncIterator[Callable[[], Awaitable[Access]]]:
    """Open ways for operations: streams of ArenaService, or control sockets."""
    opened: list[Access] = []
    path = (await client.arena.GetArena(arena_pb2.GetArenaRequest())).control_socket

    async def open_one() -> Access:
        opened.append(
            await SocketWay.open(path) if request.param == "socket" else GrpcWay(client.arena.Access())
        )
        return opened[-1]

    yield open_one
    for way in opened:
        way.die()


@pytest.fixture
async def access(connect: Callable[[], Awaitable[Access]]) -> Access:
    """An open way for operations."""
    return await connect()
