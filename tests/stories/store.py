"""The store's stories: four requests to a server in this process, traced on the server's side.

The client is made of bare stubs and frames, so that the product's own client is not counted. Every request is
warm: the server has answered the same request before. Upkeep is stopped, so that the request runs alone.
"""

import asyncio
import itertools
import mmap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from xxhash import xxh3_64_intdigest

from ctxcache.runtime.clock import SystemClock
from ctxcache.server.server import Server
from ctxcache.service import fairness
from ctxcache.settings.config import Settings
from ctxcache.storage.metadata.catalog import Catalog
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2
from tests.service.service_rig import Client, SocketWay, rows
from tests.stories.tracer import Told, Tracer, Walk

REPETITIONS = 8
WARM = 3
"""Repetitions before the first that is traced."""
TOKENS = 64
"""One whole segment."""


class Store:
    """A server without upkeep, and a client of each of its doors."""

    def __init__(self, tracer: Tracer, client: Client, socket: SocketWay, arena: mmap.mmap) -> None:
        self._tracer = tracer
        self._client, self._socket, self._arena = client, socket, arena
        self._number = 0

    async def create(self) -> Walk:
        """CreateSession."""
        with self._tracer.walk() as walk:
            await self._client.create(self._new_name())
            await _settled()
        return walk

    async def append_durable(self) -> Walk:
        """Room for one segment and its commit to disk, by the control socket."""
        name = self._new_name()
        await self._client.create(name)
        reserve = arena_pb2.Reserve(
            session=f"sessions/{name}", model_fingerprint=self._client.fingerprint, token_count=TOKENS
        )
        with self._tracer.walk() as walk:
            reserved = await self._socket.one(reserve=reserve)
            checksums = self._write(reserved.reservation)
            commit = arena_pb2.CommitReservation(
                reservation_id=reserved.reservation.reservation_id,
                token_count=TOKENS,
                durability=session_pb2.DURABILITY_DISK,
                checksums=checksums,
            )
            committed = await self._socket.one(commit=commit)
            await _settled()
        assert committed.committed.durable_token_count == TOKENS, committed
        return walk

    async def lease_resident(self) -> Walk:
        """A lease of one segment that lies in the arena and its release, by the control socket."""
        name = await self._saved()
        await self._lease(name)
        return await self._lease(name)

    async def lease_from_ssd(self) -> Walk:
        """A lease of one segment that lies only on SSD and its release, by the control socket."""
        name = await self._saved()
        session = await self._client.admin.DemoteSession(
            admin_pb2.DemoteSessionRequest(name=f"sessions/{name}")
        )
        assert session.dram_bytes == 0
        return await self._lease(name)

    async def _lease(self, name: str) -> Walk:
        lease = arena_pb2.AcquireLease(session=f"sessions/{name}", model_fingerprint=self._client.fingerprint)
        with self._tracer.walk() as walk:
            leased = await self._socket.one(acquire_lease=lease)
            release = arena_pb2.ReleaseLease(lease_id=leased.lease.lease_id)
            await self._socket.one(release_lease=release)
            await _settled()
        assert [segment.token_count for segment in leased.lease.segments] == [TOKENS], leased
        return walk

    async def _saved(self) -> str:
        """The name of a new session of one segment."""
        await self.append_durable()
        return f"story{self._number}"

    def _new_name(self) -> str:
        self._number += 1
        return f"story{self._number}"

    def _write(self, reservation: arena_pb2.Reservation) -> list[int]:
        """Write the reserved rows; returns their checksums, in the order of the layout."""
        checksums = []
        for segment in reservation.segments:
            for run in segment.rows:
                for item in reservation.layout:
                    end = run.token_begin + run.row_end - run.row_begin
                    data = rows(self._number, run.token_begin, end, item.stream)
                    at = segment.offset_bytes + item.offset_bytes + run.row_begin * item.row_bytes
                    self._arena[at : at + len(data)] = data
                    checksums.append(xxh3_64_intdigest(data))
        return checksums


STORIES: dict[str, Callable[[Store], Awaitable[Walk]]] = {
    "create": Store.create,
    "append durable": Store.append_durable,
    "lease resident": Store.lease_resident,
    "lease from SSD": Store.lease_from_ssd,
}


def tell(story: str, directory: Path) -> Told:
    """Several repetitions of the story in a new store below `directory`."""
    tracer = Tracer("ctxcache")
    with tracer.installed(), undisturbed():
        return asyncio.run(_tell(STORIES[story], tracer, directory))


async def _tell(story: Callable[[Store], Awaitable[Walk]], tracer: Tracer, directory: Path) -> Told:
    async with _store(tracer, directory) as store:
        for _ in range(WARM):
            await story(store)
        return Told.of([await story(store) for _ in range(REPETITIONS)])


@asynccontextmanager
async def _store(tracer: Tracer, directory: Path) -> AsyncIterator[Store]:
    settings = Settings(
        data_directory=directory / "data",
        listen="127.0.0.1:0",
        unix_socket="",
        metrics_listen="",
        arena_size_bytes=4 << 20,
        ssd_size_bytes=16 << 20,
        arena_huge_pages="off",
        drain_timeout_s=5,
    )
    server = await Server.start(settings)
    try:
        await still(server)
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            client = Client(channel)
            await client.register()
            arena = await client.arena.GetArena(arena_pb2.GetArenaRequest())
            with _mapped(arena) as mapped:
                socket = await SocketWay.open(arena.control_socket)
                yield Store(tracer, client, socket, mapped)
                await socket.finish()
                await socket.read()
    finally:
        await server.stop()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let each request run in one slice of time: a traced request is slow enough to lose its turn.

    Nor does a session come into another bin of idle time, however slow the machine is. The catalog has its
    write back when a commit asks for it.
    """
    steps_ns = itertools.count(time.monotonic_ns(), 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SystemClock, "monotonic_ns", staticmethod(lambda: next(steps_ns)))
        patch.setattr(fairness, "SLICE_NS", 10**18)
        patch.setattr(Catalog, "wait", _wait_at_once)
        yield


_waits_for = Catalog.wait


async def _wait_at_once(catalog: Catalog, write: "Future[None] | None") -> None:
    # The loop stands still meanwhile: whether the thread or the loop is quicker is chance.
    wait([write] if write else [])
    await _waits_for(catalog, write)


async def still(server: Server) -> None:
    """Stop everything that runs on a timer: upkeep, watches, and the measurement of the loop's lag."""
    server._lag.stop()
    server.recording.stop()
    loops = [task for task in (server._upkeep, *server._watches) if task is not None]
    for task in loops:
        task.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def _mapped(arena: arena_pb2.Arena) -> mmap.mmap:
    with Path(arena.path).open("r+b") as file:
        return mmap.mmap(file.fileno(), arena.size_bytes)


async def _settled() -> None:
    """Let the server finish the work that follows its answer."""
    for _ in range(20):
        await asyncio.sleep(0)
