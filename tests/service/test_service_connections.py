"""Connections that say nothing: how many there may be, of whom, and for how long."""

import asyncio
import contextlib
import errno
import resource
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fakes import FakeClock
from server_process import ServerProcess
from service_rig import Client, all_rows, until

from ctxcache.runtime import sockets, watches
from ctxcache.server import listening
from ctxcache.server.server import Server
from ctxcache.service import admission
from ctxcache.settings.config import Settings

CROWD = 1100
HASTE_S = 0.1
"""How long a stop waits for connections that never say anything."""
FEW = ("sh", "-c", 'ulimit -Sn 256; ulimit -Hn 1000; exec "$0" "$@"')
Connect = Callable[[str, str], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open connections from any address of this machine, and say nothing."""
    with contextlib.ExitStack() as opened:

        def open_one(target: str, host: str) -> socket.socket:
            name, _, port = target.rpartition(":")
            made = socket.create_connection((name, int(port)), source_address=(host, 0))
            made.settimeout(0)
            return opened.enter_context(made)

        yield open_one


def is_open(connected: socket.socket) -> bool:
    """Whether the server has not ended it: a server says what it is before it is asked."""
    try:
        while connected.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def test_a_look_that_fails_is_not_the_last_one(
    settings: Settings, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors no connection can be looked at; the end flushes what memory has all the same."""
    monkeypatch.setattr(admission, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watches, "PAUSE_S", 0.01)
    server = await Server.start(settings, clock)
    looks = 0

    def look() -> int:
        nonlocal looks
        looks += 1
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(server.connections, "look", look)
    await until(lambda: looks > 0)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 10)
    begun = looks
    try:
        await until(lambda: looks > begun + 1)
    finally:
        await server.stop()
    server = await Server.start(settings, clock)
    assert server.cache.ledger.names.sessions["default", "a"].token_count == 10
    await server.stop()


async def test_a_host_has_no_more_connections_than_it_may(
    settings: Settings, clock: FakeClock, connect: Connect
) -> None:
    """The newest of more are ended, those before are not, and other hosts notice nothing."""
    server = await Server.start(
        settings.model_copy(update={"max_connections_per_host": 4, "drain_timeout_s": HASTE_S}), clock
    )
    try:
        target = server.addresses[0]
        before = [connect(target, "127.0.0.2") for _ in range(4)]
        await until(lambda: server.connections.look() == 0 and server.connections.count == 4)
        more = [connect(target, "127.0.0.2") for _ in range(20)]
        await until(lambda: server.connections.look() == 0 and server.connections.ended_count >= 20)
        await until(lambda: not any(map(is_open, more)))

        assert all(map(is_open, before))
        async with grpc.aio.insecure_channel(target) as channel:
            client = Client(channel)
            await client.register()
            await client.create("a")
    finally:
        await server.stop()


async def test_there_are_no_more_connections_than_there_may_be(
    settings: Settings, clock: FakeClock, connect: Connect
) -> None:
    """All hosts together: one more is closed at once, and there is room when another one has gone."""
    server = await Server.start(
        settings.model_copy(update={"max_connections": 8, "drain_timeout_s": HASTE_S}), clock
    )
    try:
        target = server.addresses[0]
        taken = [connect(target, f"127.0.0.{host}") for host in range(2, 10)]
        await until(lambda: (server.connections.look(), server.connections.count)[1] == 8)
        extra = connect(target, "127.0.0.20")
        await until(lambda: not is_open(extra))
        assert all(map(is_open, taken))

        taken[0].close()
        async with grpc.aio.insecure_channel(target) as channel:
            client = Client(channel)
            await until(lambda: (server.connections.look(), server.connections.count)[1] == 7)
            await client.register()
    finally:
        await server.stop()


async def test_who_says_nothing_is_not_waited_for(
    settings: Settings, clock: FakeClock, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without TLS's or HTTP/2's first words ends by itself."""
    hasty = dict(listening.OPTIONS) | {"grpc.server_handshake_timeout_ms": 200}
    monkeypatch.setattr(listening, "OPTIONS", tuple(hasty.items()))
    server = await Server.start(settings, clock)
    try:
        silent = connect(server.addresses[0], "127.0.0.2")
        await until(lambda: not is_open(silent))
    finally:
        await server.stop()


def test_connections_get_what_descriptors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage's share is not theirs; where there is nearly nothing, they have a quarter of it."""
    for limit, wanted, found in ((100_000, 1024, 1024), (2000, 1024, 584), (256, 1024, 32)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert sockets.connection_limit(wanted, listener_count=2, others=320) == found


def descriptor_count(pid: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For this process, which is its own crowd."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < CROWD + 500:
        pytest.skip(f"THIS NEEDS {CROWD + 500} DESCRIPTORS (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_descriptors")
async def test_more_connections_than_descriptors_harm_nothing_that_is_stored(
    tmp_path: Path, connect: Connect
) -> None:
    """Where 1,000 could be open and 256 were wanted.

    Rows become durable and are read, and the server is ready.
    """
    options = ("--metrics-listen=127.0.0.1:0", "--unix-socket=", "--max-local-clients=16")
    with ServerProcess(tmp_path / "data", *options, wrapper=FEW) as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1000, 1000)
        for i in range(CROWD):
            connect(server.target, f"127.0.0.{2 + i % 50}")
        held = descriptor_count(server.pid)
        assert held <= 1000 - 400, "storage's share is taken"

        # The crowd is told to go when it has said nothing for a while; until then only who was there has a
        # place.
        deadline_s = 30
        async with grpc.aio.insecure_channel(server.target) as channel:
            await asyncio.wait_for(channel.channel_ready(), deadline_s)
            client = Client(channel)
            await client.register()
            await client.create("a")
            await client.append("a", 1, 0, 64, is_durable=True)
            assert await client.read_rows("a") == all_rows(1, 64)
        url = f"http://{server.ready['metrics_address']}/readyz"
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            assert answer.status == 200
