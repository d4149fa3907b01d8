"""Servers in this process, and clients of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from service_rig import Access, Client

from ctxcache.cache.integrity import check_integrity
from ctxcache.config import Settings
from ctxcache.server import Server
from ctxcache.testing.fakes import FakeClock

ARENA_BYTES = 1 << 20
SSD_BYTES = 4 << 20


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A small server without a Unix socket."""
    return Settings(
        data_directory=tmp_path / "data", listen="127.0.0.1:0", unix_socket="", arena_size_bytes=ARENA_BYTES,
        ssd_size_bytes=SSD_BYTES, max_concurrent_rpcs=8, max_local_clients=4, drain_timeout_s=5,
    )  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    """The server's clock."""
    return FakeClock()


@pytest.fixture
async def server(settings: Settings, clock: FakeClock) -> AsyncIterator[Server]:
    """A server whose books are checked at the end."""
    started = await Server.start(settings, clock)
    yield started
    await started.stop()
    assert check_integrity(started._cache) == []


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client that has registered the model."""
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        made = Client(channel)
        await made.register()
        yield made


@pytest.fixture
async def access(client: Client) -> AsyncIterator[Access]:
    """An open stream of operations."""
    call = client.arena.Access()
    yield Access(call)
    call.cancel()
