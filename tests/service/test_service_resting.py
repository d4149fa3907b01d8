"""A server whose metadata lacked something.

It says so where it is asked, reads go on, and it ends by itself.
"""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_rig import Client, all_rows, refused, until

from ctxcache.server.server import Server
from ctxcache.storage.metadata import rocksdb

Code = grpc.StatusCode
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WRITES = ("", "ctxcache.v1.writes", "ctxcache.v1.SessionService", "ctxcache.v1.ModelService")
READS = ("ctxcache.v1.reads", "ctxcache.v1.HintService", "ctxcache.v1.AdminService")


class Full:
    """A database that finds no descriptor for its next log, and cannot be opened, until it is told to."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def write(self, _: object) -> None:
        """See Rdict."""
        raise OSError("IO error: While open a file for appending: 000009.log: Too many open files")


@pytest.fixture
async def lacking(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Event]:
    """Set when there is again what the server lacks: since it has a session and was asked for another."""
    is_there = asyncio.Event()
    store: Any = server.storage.metadata
    monkeypatch.setattr(rocksdb, "REOPEN_PAUSE_S", 0)
    monkeypatch.setattr(rocksdb, "has_what_lacked", lambda _: is_there.is_set())
    await client.create("a")
    await client.append("a", 1, 0, 64, is_durable=True)
    store.database = Full(store.database)
    await refused(client.create("b"), Code.UNAVAILABLE, "TIER_FAILURE")
    yield is_there
    is_there.set()
    await until(lambda: not store.is_fenced)


async def health(client: Client) -> dict[str, Any]:
    """The health of each name, and why."""
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    found = {}
    for name in (*WRITES, *READS):
        call = stub.Check(health_pb2.HealthCheckRequest(service=name))
        found[name] = (
            (await call).status,
            dict(tuple(await call.trailing_metadata())).get("ctxcache-problem", ""),
        )
    return found


async def ready(server: Server) -> tuple[int, str]:
    """The answer of /readyz."""

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.metrics_address}/readyz") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def test_it_says_that_writes_are_refused_and_why(
    server: Server, client: Client, lacking: asyncio.Event
) -> None:
    """By the health of each service, to who asks and who watches, and at /readyz.

    Then it serves again by itself.
    """
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == NOT_SERVING
    found = await health(client)
    assert {found[name][0] for name in WRITES} == {NOT_SERVING}
    assert all("Too many open files" in found[name][1] for name in WRITES)
    assert {found[name] for name in READS} == {(SERVING, "")}
    status, said = await ready(server)
    assert status == 503
    assert said.startswith("writes are refused, reads go on: metadata resting")

    lacking.set()
    assert (await watch.read()).status == SERVING
    watch.cancel()
    assert {state for state, _ in (await health(client)).values()} == {SERVING}
    assert await ready(server) == (200, "ready\n")


async def test_reads_go_on_and_nothing_is_lost_or_there_twice(
    server: Server, client: Client, lacking: asyncio.Event
) -> None:
    """A refused call can be made again; what was read is what was written."""
    assert await client.read_rows("a") == all_rows(1, 64)
    await client.append("a", 1, 64, 70)
    await refused(client.append("a", 1, 70, 72, is_durable=True), Code.UNAVAILABLE, "TIER_FAILURE")
    assert (await client.get("a")).token_count == 72
    await refused(client.get("b"), Code.NOT_FOUND, "SESSION_NOT_FOUND")

    lacking.set()
    await until(lambda: not server.storage.metadata.is_fenced)
    await client.create("b")
    await client.append("a", 1, 72, 80, is_durable=True)
    assert await client.read_rows("a") == all_rows(1, 80)
    store = server.storage.metadata
    names = sorted(record.session_id for record in store.sessions())
    assert names == ["a", "b"]
    await until(lambda: not server.cache.ledger.below.stranded)
