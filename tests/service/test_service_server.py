"""The server as a whole: health, limits, drain, restart, and death at any moment."""

import asyncio
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_process import ServerProcess
from service_rig import Access, Client, all_rows, chunks, commit, refused, until

from ctxcache.cache.leases import LEASE_LIFETIME_NS
from ctxcache.errors import AddressUnusable, DataDirectoryUnusable
from ctxcache.server.server import SERVICES, Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2

Code = grpc.StatusCode
Connect = Callable[[], Awaitable[Access]]
# A connection that broke would be shared, and its back-off too.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    """The server's answer about a service's health."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


class Held:
    """An append that stays open until it is told to end."""

    def __init__(self, client: Client, name: str) -> None:
        self._ended = asyncio.Event()
        self._client, self._name = client, name
        self.call = asyncio.ensure_future(client.send(self._messages()))

    async def _messages(self) -> AsyncIterator[session_pb2.AppendSessionRequest]:
        yield self._client.header(self._name, 0)
        await self._ended.wait()
        for message in (*chunks(1, 0, 10), commit(10)):
            yield message

    def end(self) -> None:
        """Send the rest."""
        self._ended.set()


async def until_running(server: Server, count: int) -> None:
    """Wait until so many appends are open."""
    await until(lambda: server.cache.appends.reservation_count == count)


async def test_every_service_is_healthy_and_can_be_looked_up(client: Client) -> None:
    """Standard tools find out what runs here."""
    assert [await health_of(client.channel, name) for name in ("", *SERVICES)] == [1] * (1 + len(SERVICES))
    make: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = make(client.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {item.name async for answer in call for item in answer.list_services_response.service}

    assert set(SERVICES) <= names


async def test_streams_over_the_limit_are_refused_with_a_delay(client: Client, server: Server) -> None:
    """Work is bounded: one too many is told when to come again, and small calls are still answered."""
    for number in range(8):
        await client.create(f"s{number}")
    held = [Held(client, f"s{number}") for number in range(8)]
    await until_running(server, 8)
    read = client.sessions.ReadSession(client.read_request("s0"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read.read()
    facts = await refused(client.append("s0", 1, 0, 1), Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")

    assert facts == {"what": "concurrent streams", "limit": "8"}
    metadata = dict(tuple(caught.value.trailing_metadata() or ()))
    assert b"google.rpc.RetryInfo" in metadata["grpc-status-details-bin"]
    assert int(metadata["grpc-retry-pushback-ms"]) > 0
    assert await health_of(client.channel, "") == 1
    assert (await client.get("s0")).token_count == 0
    for item in held:
        item.end()
    assert [(await item.call).token_count for item in held] == [10] * 8
    await client.append("s0", 1, 10, 11)


async def test_draining_refuses_new_work_and_finishes_old(
    client: Client, server: Server, connect: Connect
) -> None:
    """On shutdown health says no, new calls are refused with a delay, running ones end as they would have."""
    await client.create("a")
    held = Held(client, "a")
    await until_running(server, 1)
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    idle = await connect()
    await idle.one()
    stopping = asyncio.ensure_future(server.stop())
    said = await watch.read()
    watch.cancel()
    await idle.ended(Code.UNAVAILABLE, "DRAINING")
    held.end()
    session = await held.call
    await stopping

    assert said.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert session.token_count == 10
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get("a")
    assert caught.value.code() is Code.UNAVAILABLE


async def test_a_stream_whose_holds_have_ended_does_not_hold_the_drain(
    client: Client, server: Server, clock: FakeClock, connect: Connect
) -> None:
    """A local client that forgot its leases is let go like one that has none."""
    await client.create("a", ttl=Duration(seconds=10**6))
    await client.append("a", 1, 0, 10)
    idle = await connect()
    lease = arena_pb2.AcquireLease(session="sessions/a", model_fingerprint=client.fingerprint)
    assert (await idle.one(acquire_lease=lease)).lease.range.end == 10
    clock.advance(ns=LEASE_LIFETIME_NS)
    server.cache.leases.end_overdue()
    stopping = asyncio.ensure_future(server.stop())
    await idle.ended(Code.UNAVAILABLE, "DRAINING")
    await stopping


async def test_a_message_larger_than_any_of_ours_is_refused(client: Client) -> None:
    """The memory that one call can make the server hold is bounded."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get("x" * (5 << 20))

    assert caught.value.code() is Code.RESOURCE_EXHAUSTED


async def test_an_append_that_does_not_end_holds_the_drain_no_longer_than_its_time(
    settings: Settings,
) -> None:
    """Running work has a deadline; what it committed before is there after a restart."""
    server = await Server.start(settings.model_copy(update={"drain_timeout_s": 0.1}))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 100)
        await client.create("b")
        held = Held(client, "b")
        await until_running(server, 1)
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await held.call
    again = await Server.start(settings)
    async with grpc.aio.insecure_channel(again.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        assert await client.read_rows("a") == all_rows(1, 100)
        assert (await client.get("b")).token_count == 0
    await again.stop()


async def test_a_restart_keeps_everything(settings: Settings) -> None:
    """Sessions, their times and their rows, models and pins are as they were."""
    server = await Server.start(settings)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a", is_pinned=True, ttl=Duration(seconds=77))
        before = await client.append("a", 1, 0, 100)
    await server.stop()
    server = await Server.start(settings)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel, client.fingerprint)
        after = await client.get("a")
        assert await client.read_rows("a") == all_rows(1, 100)
    await server.stop()

    same = ("uid", "token_count", "ttl", "is_pinned", "create_time", "expire_time", "model_fingerprint")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    assert after.durable_token_count == 100


async def test_a_server_that_cannot_listen_leaves_nothing_open(settings: Settings) -> None:
    """An address in use is an error, and the data can be opened again at once."""
    first = await Server.start(settings)
    taken = first.addresses[0]
    other = settings.model_copy(update={"data_directory": settings.data_directory / "other"})
    with pytest.raises(AddressUnusable):
        await Server.start(other.model_copy(update={"listen": taken}))
    with pytest.raises(DataDirectoryUnusable):
        await Server.start(settings)
    second = await Server.start(other)
    await second.stop()
    await first.stop()


async def test_an_address_that_fails_lets_go_of_the_others(settings: Settings, tmp_path: Path) -> None:
    """A server that could bind one of two addresses holds neither."""
    first = await Server.start(settings)
    port = first.addresses[0]
    await first.stop()
    bad = {"listen": port, "unix_socket": str(tmp_path / "missing" / "x.sock")}
    with pytest.raises(AddressUnusable):
        await Server.start(settings.model_copy(update=bad))
    again = await Server.start(settings.model_copy(update={"listen": port}))
    await again.stop()


@pytest.mark.parametrize("suffix", ["", ".bulk"])
async def test_a_unix_socket_that_somebody_listens_to_is_not_taken_away(
    settings: Settings, tmp_path: Path, suffix: str
) -> None:
    """The second server is refused, even while the first takes no connections.

    The socket of a killed server is replaced.
    """
    path = tmp_path / "socket"
    wanted = settings.model_copy(update={"listen": "", "unix_socket": str(path)})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as living:
        living.bind(f"{path}{suffix}")
        living.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
            waiting.connect(f"{path}{suffix}")
            with pytest.raises(AddressUnusable, match="another process listens"):
                await Server.start(wanted)
        living.accept()[0].close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(f"{path}{suffix}")
    server = await Server.start(wanted)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        await Client(channel).register()
    await server.stop()


async def test_a_run_that_cannot_be_noted_is_none(settings: Settings) -> None:
    """The last step of a start that may fail.

    By then it listens, and nobody may be let in or kept waiting.
    """
    await (await Server.start(settings)).stop()
    in_the_way = settings.data_directory / "RUNS.partial"
    in_the_way.mkdir()
    with pytest.raises(DataDirectoryUnusable):
        await Server.start(settings)
    left = sorted(path.name for path in settings.data_directory.iterdir() if path.is_socket())
    in_the_way.rmdir()
    await (await Server.start(settings)).stop()

    assert left == []


# -- death ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Acknowledged:
    """The tokens that a client was told are durable."""

    counts: dict[int, int] = dataclasses.field(default_factory=dict)


async def write_for_ever(client: Client, tag: int, told: Acknowledged) -> None:
    """Append durably until the server is gone."""
    count = 0
    with_name = f"s{tag}"
    await client.create(with_name)
    told.counts[tag] = 0
    while True:
        size = 1 + (count * 7 + tag) % 90
        session = await client.append(with_name, tag, count, count + size, is_durable=True)
        count += size
        told.counts[tag] = session.durable_token_count


async def check_all(client: Client, told: Acknowledged) -> None:
    """Everything acknowledged is there, with the right bytes, and no more than was sent."""
    for tag, least in told.counts.items():
        session = await client.get(f"s{tag}")
        assert session.token_count >= least
        assert await client.read_rows(f"s{tag}") == all_rows(tag, session.token_count)


async def test_nothing_acknowledged_is_lost_to_a_kill(tmp_path: Path) -> None:
    """Killed in the middle of its work, again and again, the server has every token it called durable."""
    told = Acknowledged()
    with ServerProcess(tmp_path / "data", "--unix-socket", "") as process:
        for life in range(3):
            async with grpc.aio.insecure_channel(process.target, OWN_CONNECTION) as channel:
                client = Client(channel)
                await client.register()
                await check_all(client, told)
                writers = [
                    asyncio.ensure_future(write_for_ever(client, life * 3 + i, told)) for i in range(1, 4)
                ]
                async with asyncio.timeout(30):
                    while sum(told.counts.get(life * 3 + i, 0) for i in range(1, 4)) < 600:
                        await asyncio.wait(writers, timeout=0.01)
                process.kill9()
                results = await asyncio.gather(*writers, return_exceptions=True)
                assert all(isinstance(result, grpc.aio.AioRpcError) for result in results)
            process.start()
        async with grpc.aio.insecure_channel(process.target, OWN_CONNECTION) as channel:
            client = Client(channel)
            await client.register()
            await check_all(client, told)
            stats = await client.admin.GetStats(admin_pb2.GetStatsRequest())

    assert stats.corrupt_segment_count == 0
    assert sum(told.counts.values()) >= 1800


async def test_a_generation_that_a_crash_took_back_never_comes_again(tmp_path: Path) -> None:
    """A client that saw tokens which a crash lost is refused afterwards, however many commits follow."""
    with ServerProcess(tmp_path / "data") as server:
        async with grpc.aio.insecure_channel(server.target, OWN_CONNECTION) as channel:
            client = Client(channel)
            await client.register()
            await client.create("a")
            durable = await client.append("a", 1, 0, 10, is_durable=True)
            lost = await client.append("a", 1, 10, 15)
        server.terminate()
        server.start()
        async with grpc.aio.insecure_channel(server.target, OWN_CONNECTION) as channel:
            in_order = await Client(channel).get("a")
            client = Client(channel, client.fingerprint)
            seen = await client.append("a", 1, 15, 20)
        server.kill9()
        server.start()
        async with grpc.aio.insecure_channel(server.target, OWN_CONNECTION) as channel:
            client = Client(channel, client.fingerprint)
            after = await client.get("a")
            again = await client.append("a", 2, 15, 20)

    assert lost.generation == in_order.generation == durable.generation + 1
    assert after.token_count == 15
    assert again.generation > after.generation > seen.generation


async def test_who_watches_the_health_does_not_hold_the_drain(client: Client, server: Server) -> None:
    """A watcher is told, and its stream ends: balancers and kubelets never end theirs."""
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.ensure_future(server.stop())
    said = await watch.read()
    await refused(watch.read(), Code.UNAVAILABLE, "DRAINING")
    await stopping

    assert said.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_upkeep_that_breaks_is_tried_again_and_ends_with_the_server(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with it, the other loops go on, and what is dirty is written at the end."""
    server = await Server.start(settings)
    broken = asyncio.Event()

    async def turn(_: object) -> bool:
        broken.set()
        raise KeyError

    monkeypatch.setattr(server.cache.write_behind, "turn", turn)
    async with grpc.aio.insecure_channel(server.addresses[0], OWN_CONNECTION) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 10)
        async with asyncio.timeout(10):
            await broken.wait()
    await asyncio.sleep(0)
    await server.stop()
    again = await Server.start(settings)
    async with grpc.aio.insecure_channel(again.addresses[0], OWN_CONNECTION) as channel:
        found = await Client(channel).get("a")
    await again.stop()

    assert found.durable_token_count == 10


async def test_an_end_flushes_though_its_socket_cannot_be_removed(
    settings: Settings, clock: FakeClock, tmp_path: Path
) -> None:
    """Its directory is a file by now."""
    server = await Server.start(settings, clock)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 10)
    (tmp_path / "file").touch()
    server.control.path = str(tmp_path / "file" / "control.sock")
    await server.stop()
    server = await Server.start(settings, clock)
    assert server.cache.ledger.names.sessions["default", "a"].token_count == 10
    await server.stop()


async def test_an_append_to_memory_waits_for_no_sync(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable append stands in one: the records of another session's rows are written when those are."""
    for name in ("a", "b"):
        await client.create(name)
    stands, goes_on = threading.Event(), threading.Event()
    metadata = server.storage.metadata
    sync = metadata.sync_log

    def slow() -> None:
        stands.set()
        goes_on.wait()
        sync()

    monkeypatch.setattr(metadata, "sync_log", slow)
    durable = asyncio.ensure_future(client.append("a", 1, 0, 10, is_durable=True))
    await until(stands.is_set)
    try:
        async with asyncio.timeout(10):
            session = await client.append("b", 2, 0, 10)
    finally:
        goes_on.set()
    assert (session.token_count, durable.done()) == (10, False)
    assert (await durable).durable_token_count == 10
