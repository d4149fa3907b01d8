"""A server under a little of everything, and what its metrics endpoint says then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from scraped import Values, parsed
from server_process import write_secret
from service_rig import Client, GrpcWay

from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2

ARENA_BYTES, SSD_BYTES = 1 << 20, 3 << 19


def small_settings(directory: Path, **changes: Any) -> Settings:
    """A server that is soon full."""
    facts: dict[str, Any] = {
        "data_directory": directory / "data", "listen": "127.0.0.1:0", "unix_socket": "",
        "arena_size_bytes": ARENA_BYTES, "ssd_size_bytes": SSD_BYTES, "arena_huge_pages": "off",
        "max_concurrent_rpcs": 8, "drain_timeout_s": 1, "client_share": 0.75,
    }  # fmt: skip
    return Settings(**(facts | changes))


@asynccontextmanager
async def observed(directory: Path, **changes: Any) -> AsyncIterator[tuple[Server, Client, FakeClock]]:
    """A server, and a client that has registered the model."""
    clock = FakeClock()
    server = await Server.start(small_settings(directory, **changes), clock)
    try:
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            client = Client(channel)
            await client.register()
            yield server, client, clock
    finally:
        await server.stop()


def fleet_of_one(directory: Path) -> dict[str, Any]:
    """The settings of a store that is the first of its fleet."""
    write_secret(directory / "secret", "a secret of this fleet of stores")
    return {"fleet_bucket": f"file://{directory}/bucket", "fleet_secret_file": directory / "secret"}


async def fetch(server: Server, path: str, *, head: bytes = b"", method: str = "GET") -> tuple[int, str]:
    """Status and body of a page; `head` replaces the whole request."""
    host, _, port = server.metrics_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head or f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    first, _, rest = answer.partition("\r\n")
    return int(first.split()[1]), rest.partition("\r\n\r\n")[2]


async def values_of(server: Server) -> Values:
    """The server's metrics now."""
    status, text = await fetch(server, "/metrics")
    assert status == 200
    return parsed(text)


def value(values: Values, name: str, **labels: str) -> float:
    """One sample's value."""
    return values[name][tuple(sorted(labels.items()))]


async def load(client: Client, clock: FakeClock) -> int:
    """Some of all that can happen.

    Writes, hits in both tiers, every kind of miss that callers can cause, evictions. Returns the number of
    the session that was deleted.
    """
    fill = 24
    for i in range(fill):
        await client.create(f"s{i}")
        await client.append(f"s{i}", i, 0, 130, is_durable=True)
        clock.advance(seconds=1)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await client.read_rows("s0")
    await client.read_rows(f"s{fill - 1}")
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name=f"sessions/s{fill - 1}"))
    await client.read_rows(f"s{fill - 1}")
    await client.create("short", ttl=Duration(seconds=1))
    clock.advance(seconds=2)
    there = []
    for i in range(fill):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await client.get(f"s{i}")
            there.append(i)
    for name in ("short", "never"):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await client.get(name)
    # The placement policy chooses which sessions are still there.
    deleted = max([i for i in there if i < fill - 1])
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=f"sessions/s{deleted}"))
    query = session_pb2.LookupQuery(name=f"sessions/s{fill - 1}", model_fingerprint=b"x" * 32)
    await client.sessions.LookupSessions(session_pb2.LookupSessionsRequest(queries=[query]))
    way = GrpcWay(client.arena.Access())
    acquire = arena_pb2.AcquireLease(session=f"sessions/s{fill - 1}", model_fingerprint=client.fingerprint)
    lease = await way.one(acquire_lease=acquire)
    await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease.lease.lease_id))
    way.die()
    return deleted
