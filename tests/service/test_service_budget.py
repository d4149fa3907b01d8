"""The budget of what SSD does not have yet is divided.

One tenant's flood keeps no other tenant from its next append.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from integrity import check_integrity
from server_process import write_secret
from service_rig import Access, Client, GrpcWay, SocketWay, until

from ctxcache.cache.reservations import Reservation
from ctxcache.core.placement.shares import Share
from ctxcache.identity import ArenaGrant, Role, Token, digest_of
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import arena_pb2, faults_pb2

FLOODING, QUIET = "a", "b"
WRITERS = 24
"""Appends that the flooding tenant has under way at any time."""
SMALL_APPENDS = 12
"""Appends of the other tenant, a slot for each: less than half of the 27 that may be dirty."""
TOKENS = 128
"""Tokens of each append of the flood: two slots."""
SHARE_GRANTS = 6
"""Appends of the flood that are within its own half: of those that came first."""
Append = Callable[[str], Awaitable[None]]


@pytest.fixture(params=[{}, {FLOODING: Share(0.5), QUIET: Share(0.5)}], ids=["equal", "configured"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    """A server of two tenants, whose SSD can be slowed; its arena has 36 slots."""
    hashes = tmp_path / "hashes"
    grants = {
        name: ArenaGrant(name, has_shared_memory=True, writes_in_place=True) for name in (FLOODING, QUIET)
    }
    operator = ArenaGrant("operator", Role.OPERATOR)
    lines = [Token(name, digest_of(name), grant).line() for name, grant in grants.items()]
    write_secret(hashes, "\n".join([*lines, Token("operator", digest_of("operator"), operator).line()]))
    settings = Settings(
        data_directory=tmp_path / "data",
        listen="127.0.0.1:0",
        unix_socket=str(tmp_path / "socket"),
        arena_size_bytes=1 << 20,
        ssd_size_bytes=64 << 20,
        arena_huge_pages="off",
        token_hashes=hashes,
        tenant_shares=request.param,
        fault_injection=True,
        drain_timeout_s=5,
    )
    made = await Server.start(settings, FakeClock())
    yield made
    await made.stop()
    await made.cache.drain()
    assert check_integrity(made.cache) == []
    assert made.cache.ledger.unwritten.claimed_bytes == 0


class _Grants:
    """How much of the dirty budget the flood was promised while each small append waited for its part."""

    def __init__(self, server: Server) -> None:
        self.passed_counts: list[int] = []
        self._passed_count: int | None = None
        writing, ledger = server.cache.appends, server.cache.ledger
        self._admit, self._promise = writing._admit, ledger.unwritten.promise
        self._reserve_at_once = writing.reserve_at_once
        setattr(writing, "_admit", self._asked)  # noqa: B010  # mypy would have it typed
        setattr(writing, "reserve_at_once", self._taken_at_once)  # noqa: B010
        setattr(ledger.unwritten, "promise", self._promised)  # noqa: B010

    def _taken_at_once(self, tenant: str, session_id: str, **named: Any) -> Reservation | None:
        """An append that waits for nothing: none of the flood passes it."""
        reservation = self._reserve_at_once(tenant, session_id, **named)
        if reservation is not None and tenant == QUIET and named["token_count"]:
            self.passed_counts.append(0)
        return reservation

    async def _asked(self, reservation: Reservation, token_count: int) -> None:
        if reservation.session.tenant == QUIET and token_count:
            self._passed_count = 0
        await self._admit(reservation, token_count)

    def _promised(self, tenant: str, size_bytes: int) -> None:
        if size_bytes > 0 and self._passed_count is not None:
            if tenant == QUIET:
                self.passed_counts.append(self._passed_count)
                self._passed_count = None
            else:
                self._passed_count += 1
        self._promise(tenant, size_bytes)


def _named(token: str) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(("authorization", f"Bearer {token}"))


class _Calls(grpc.aio.UnaryUnaryClientInterceptor):
    """Calls of the tenant whose token this is."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """See grpc.aio."""
        return await continuation(details._replace(metadata=_named(self._token)), request)


class _Appends(grpc.aio.StreamUnaryClientInterceptor):
    """Appends of the tenant whose token this is."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """See grpc.aio."""
        return await continuation(details._replace(metadata=_named(self._token)), requests)


@pytest.fixture
async def clients(server: Server) -> AsyncIterator[dict[str, Client]]:
    """Clients by their token."""
    async with AsyncExitStack() as stack:
        made = {}
        for token in (FLOODING, QUIET, "operator"):
            channel = grpc.aio.insecure_channel(
                server.addresses[0], interceptors=[_Calls(token), _Appends(token)]
            )
            made[token] = Client(await stack.enter_async_context(channel))
            await made[token].register()
        yield made


async def _slow_down(operator: Client) -> None:
    fault = faults_pb2.InjectFaultRequest(kind=faults_pb2.FAULT_KIND_SSD_WRITE_DELAY, count=10_000)
    fault.duration.FromSeconds(600)
    fault.delay.FromMilliseconds(30)
    await operator.admin.InjectFault(fault)


@pytest.fixture
async def flood(server: Server, clients: dict[str, Client]) -> AsyncIterator[None]:
    """One tenant appends to new sessions without end, and has all of what may be dirty."""
    await _slow_down(clients["operator"])
    client = clients[FLOODING]

    async def write(writer: int) -> None:
        number = 0
        while True:
            number += 1
            name = f"flood{writer}-{number}"
            await client.create(name)
            # The flood itself may be told to come later.
            with suppress(grpc.aio.AioRpcError):
                await client.append(name, 1, 0, TOKENS)

    writers = [asyncio.ensure_future(write(number)) for number in range(WRITERS)]
    await until(lambda: server.cache.state.counters.delayed_write_count > WRITERS)
    yield
    for task in writers:
        task.cancel()
    await asyncio.gather(*writers, return_exceptions=True)


async def _streamed(client: Client, name: str) -> None:
    await client.append(name, 2, 0, 1)


async def _in_place(client: Client, way: Access, name: str) -> None:
    request = arena_pb2.Reserve(
        session=f"sessions/{name}", model_fingerprint=client.fingerprint, write_offset=0, token_count=1
    )
    made = await way.one(reserve=request)
    assert made.HasField("reservation"), made.error
    released = arena_pb2.ReleaseReservation(reservation_id=made.reservation.reservation_id)
    assert not (await way.one(release_reservation=released)).HasField("error")


@pytest.mark.usefixtures("flood")
@pytest.mark.parametrize("transport", ["stream", "access", "socket"])
async def test_a_small_append_is_next_whatever_another_tenant_floods(
    server: Server, clients: dict[str, Client], transport: str
) -> None:
    """None is refused, and the flood is promised no more while one waits than its own share takes."""
    client, grants = clients[QUIET], _Grants(server)
    way: Access | None = None
    if transport == "access":
        way = GrpcWay(client.arena.Access(metadata=_named(QUIET)))
    elif transport == "socket":
        path = (await client.arena.GetArena(arena_pb2.GetArenaRequest())).control_socket
        way = SocketWay(*await asyncio.open_unix_connection(path))
        way.write_frame(1, arena_pb2.ControlHello(protocol_version=1, token=QUIET).SerializeToString())
    for number in range(SMALL_APPENDS):
        await client.create(f"s{number}")
        await (_in_place(client, way, f"s{number}") if way else _streamed(client, f"s{number}"))
    if way:
        way.die()

    assert len(grants.passed_counts) == SMALL_APPENDS
    assert max(grants.passed_counts) <= SHARE_GRANTS, grants.passed_counts
