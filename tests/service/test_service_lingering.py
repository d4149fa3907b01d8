"""Leases that are asked for again over the control socket: the answer is that of a lease made anew, always.

A lease that its client has released lingers, and the same request from the same client takes it up. Another
connection has nothing that lingers, so what it is answered is what the first one must be answered too.
"""

import random
from collections.abc import Awaitable, Callable

import grpc
import pytest
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from integrity import check_integrity
from service_rig import Client, Ended, SocketWay, until

from ctxcache.cache import leases
from ctxcache.cache.leases import Lease, Leases
from ctxcache.core.ledger.session import Session
from ctxcache.server.server import Server
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2

SECOND_NS = 10**9


@pytest.fixture
def open_way(server: Server) -> Callable[[], Awaitable[SocketWay]]:
    """Open connections to the control socket."""
    return lambda: SocketWay.open(server.control_socket)


@pytest.fixture
async def way(open_way: Callable[[], Awaitable[SocketWay]], client: Client) -> SocketWay:
    """A connection; a session `a` of 100 tokens is there."""
    await client.create("a", ttl=Duration(seconds=60))
    await client.append("a", 1, 0, 100)
    return await open_way()


def request(client: Client, **changes: object) -> arena_pb2.AcquireLease:
    """Ask for a lease on the session."""
    facts = {"session": "sessions/a", "model_fingerprint": client.fingerprint}
    return arena_pb2.AcquireLease(**(facts | changes))  # type: ignore[arg-type]  # its fields


async def lease(way: SocketWay, asked: arena_pb2.AcquireLease) -> arena_pb2.OperationResult:
    """Acquire a lease, and release it if it was given."""
    result = await way.one(acquire_lease=asked)
    if result.HasField("lease"):
        released = await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=result.lease.lease_id))
        assert released.HasField("released"), released
    return result


def rest(result: arena_pb2.OperationResult) -> arena_pb2.OperationResult:
    """An answer without the number of its lease."""
    told = arena_pb2.OperationResult.FromString(result.SerializeToString())
    if told.HasField("lease"):
        told.lease.ClearField("lease_id")
    return told


def lingering(server: Server) -> int:
    """How many leases hold their rows without a reader."""
    return len(server._cache.leases._lingering)


@pytest.fixture
def for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases linger for as long as nobody wants their rows to go, however slow this machine is."""
    monkeypatch.setattr(leases, "LINGER_NS", 10**12)


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("begin", [None, 10])
async def test_a_request_that_comes_again_is_answered_as_if_anew(
    way: SocketWay,
    open_way: Callable[[], Awaitable[SocketWay]],
    client: Client,
    server: Server,
    clock: FakeClock,
    begin: int | None,
    *,
    is_brief: bool,
) -> None:
    """The same rows, facts and times as another client is told; another number; counted as a read."""
    part = {} if begin is None else {"range": session_pb2.TokenRange(begin=begin, end=70)}
    asked = request(client, is_brief=is_brief, **part)
    first = await lease(way, asked)
    assert lingering(server) == 1
    before = server._cache.state.counters.read_token_count
    clock.advance(ns=SECOND_NS // 20)
    again = await lease(way, asked)
    last = await lease(way, asked)

    other = await lease(await open_way(), asked)
    assert rest(again) == rest(last) == rest(other)
    assert len({one.lease.lease_id for one in (first, again, last, other)}) == 4
    accessed = again.lease.session.access_time.ToNanoseconds()
    assert accessed - first.lease.session.access_time.ToNanoseconds() == SECOND_NS // 20
    assert again.lease.session.expire_time.ToNanoseconds() == accessed + 60 * SECOND_NS
    assert again.lease.expire_time.ToNanoseconds() == accessed + 300 * SECOND_NS
    tokens = 100 if begin is None else 60
    assert server._cache.state.counters.read_token_count - before == 3 * tokens
    await server._cache.drain()
    assert check_integrity(server._cache) == []


async def test_only_the_same_request_of_the_same_client_takes_it_up(
    way: SocketWay, open_way: Callable[[], Awaitable[SocketWay]], client: Client, server: Server
) -> None:
    """Another generation, range, fingerprint or connection is looked at anew; several at a time are apart."""
    first = await lease(way, request(client))
    generation = first.lease.session.generation
    assert (await lease(way, request(client, if_generation_match=generation))).HasField("lease")
    wrong = await lease(way, request(client, if_generation_match=generation + 1))
    assert wrong.error.reason == "GENERATION_MISMATCH"
    foreign = await lease(way, request(client, model_fingerprint=bytes(32)))
    assert foreign.error.reason == "MODEL_FINGERPRINT_MISMATCH"
    stolen = await (await open_way()).one(release_lease=arena_pb2.ReleaseLease(lease_id=first.lease.lease_id))
    assert stolen.error.reason == "LEASE_NOT_FOUND"
    one, two = [(await way.one(acquire_lease=request(client))).lease.lease_id for _ in range(2)]
    assert one != two
    for lease_id in (one, two):
        released = await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease_id))
        assert released.HasField("released")
    twice = await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=two))
    assert twice.error.reason == "LEASE_NOT_FOUND"
    await server._cache.drain()
    assert check_integrity(server._cache) == []


@pytest.mark.usefixtures("for_long")
async def test_other_tokens_in_the_place_of_those_that_were_cut_are_seen(
    way: SocketWay, open_way: Callable[[], Awaitable[SocketWay]], client: Client
) -> None:
    """As many tokens as before in the same segments, and other rows."""
    before = await lease(way, request(client))
    cut = session_pb2.TruncateSessionRequest(name="sessions/a", keep_first=80)
    await client.sessions.TruncateSession(cut)
    await client.append("a", 2, 80, 100)
    after = await lease(way, request(client))

    assert after.lease.range == before.lease.range
    assert after.lease.segments[-1].checksums != before.lease.segments[-1].checksums
    assert rest(after) == rest(await lease(await open_way(), request(client)))


async def test_it_ends_by_itself(way: SocketWay, client: Client, server: Server) -> None:
    """The session rests a moment later."""
    await lease(way, request(client))
    session = server._cache.ledger.find("default", "a")
    await until(lambda: session.is_idle)
    assert not server._cache.leases.pins.used_bytes


@pytest.mark.usefixtures("for_long")
async def test_it_ends_with_its_client_and_with_the_store(
    way: SocketWay, open_way: Callable[[], Awaitable[SocketWay]], client: Client, server: Server
) -> None:
    """A client that goes leaves nothing, and nor does a store that is closed."""
    other = await open_way()
    await lease(other, request(client))
    other.die()
    await until(lambda: not lingering(server))
    await lease(way, request(client))
    assert lingering(server) == 1  # the fixture looks at the books of the closed store


@pytest.mark.usefixtures("for_long")
async def test_a_session_that_is_read_all_the_time_rests_now_and_then(
    way: SocketWay, client: Client, server: Server, clock: FakeClock
) -> None:
    """A lease that lingered for long enough is released for good, though it is asked for again and again."""
    await client.create("b", ttl=Duration(seconds=86_400))
    await client.append("b", 1, 0, 64)
    asked = request(client, session="sessions/b")
    await lease(way, asked)
    for _ in range(9):
        clock.advance(ns=leases.LINGER_NS // 10)
        await lease(way, asked)
        assert lingering(server) == 1
    clock.advance(ns=leases.LINGER_NS // 10)
    await lease(way, asked)
    assert not lingering(server)
    assert server._cache.ledger.find("default", "b").is_idle


async def test_expired_drained_and_revoked_are_refused(
    way: SocketWay, client: Client, server: Server, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes again is refused for every reason that the first one would be."""
    await lease(way, request(client))
    clock.advance(seconds=61)
    assert (await lease(way, request(client))).error.reason == "SESSION_NOT_FOUND"
    await client.create("b")
    await client.append("b", 1, 0, 64)
    asked = request(client, session="sessions/b")
    await lease(way, asked)
    held = await way.one(acquire_lease=request(client, session="sessions/b", is_brief=True))
    server._admissions.local_clients.drain()
    assert (await way.one(acquire_lease=asked)).error.reason == "DRAINING"
    server._admissions.local_clients.resume()
    await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=held.lease.lease_id))
    await lease(way, asked)
    (connection,) = server._control.connections
    assert connection._caller is not None
    monkeypatch.setattr(connection._caller, "is_revoked", True)
    with pytest.raises(Ended):
        await way.one(acquire_lease=asked)


@pytest.mark.usefixtures("for_long")
async def test_it_keeps_nobody_from_room(way: SocketWay, client: Client, server: Server) -> None:
    """An arena full of rows that linger takes others at once, and a session that lingers is demoted whole."""
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a"))
    count = 0
    while lingering(server) == count:
        count += 1
        await client.create(f"f{count}")
        await client.append(f"f{count}", 1, 0, 512, is_durable=True)
        await lease(way, request(client, session=f"sessions/f{count}"))
    # The arena was full, or this client's share of it: what lingered made room for what came.
    assert count > 3
    found = await lease(way, request(client, session="sessions/f1"))
    assert found.HasField("lease"), found
    session = await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/f1"))
    assert session.dram_bytes == 0
    last = f"sessions/f{count}"
    await lease(way, request(client, session=last))
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=last))
    await server._cache.drain()
    assert check_integrity(server._cache) == []


# -- any history ---------------------------------------------------------------------------------------


class History:
    """Random acts on a few sessions, and after each a lease that lingered beside one that cannot have."""

    def __init__(
        self,
        client: Client,
        way: SocketWay,
        open_way: Callable[[], Awaitable[SocketWay]],
        clock: FakeClock,
        seed: int,
    ) -> None:
        self._client, self._way, self._open_way, self._clock = client, way, open_way, clock
        self._chance = random.Random(seed)
        self._lengths: dict[str, int] = {}
        self.difference_count = 0

    async def go(self, step_count: int) -> None:
        """So many acts."""
        for _ in range(step_count):
            name = self._chance.choice("xyz")
            await self._act(name)
            if self._chance.random() < 0.7:
                await self._compare(self._chance.choice("xyz"))

    async def _act(self, name: str) -> None:
        length = self._lengths.get(name)
        if length is None:
            await self._client.create(name, ttl=Duration(seconds=5))
            self._lengths[name] = 0
            return
        try:
            await self._change(name, length)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            del self._lengths[name]

    async def _change(self, name: str, length: int) -> None:
        full = f"sessions/{name}"
        match self._chance.randrange(8):
            case 0 | 1:
                count = self._chance.choice([1, 5, 64])
                is_durable = self._chance.random() < 0.5
                await self._client.append(name, 1, length, length + count, is_durable=is_durable)
                self._lengths[name] = length + count
            case 2 if length:
                kept = self._chance.randrange(length)
                truncate = session_pb2.TruncateSessionRequest(name=full, keep_first=kept)
                await self._client.sessions.TruncateSession(truncate)
                self._lengths[name] = kept
            case 3:
                await self._client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=full))
                del self._lengths[name]
            case 4:
                await self._client.sessions.FlushSession(session_pb2.FlushSessionRequest(name=full))
            case 5:
                await self._client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name=full))
            case 6:
                update = session_pb2.UpdateSessionRequest(name=full, is_pinned=self._chance.random() < 0.5)
                update.ttl.seconds = self._chance.choice([2, 5])
                await self._client.sessions.UpdateSession(update)
            case _:
                self._clock.advance(ns=self._chance.choice([10**6, SECOND_NS]))

    async def _compare(self, name: str) -> None:
        asked = request(self._client, session=f"sessions/{name}", is_brief=name == "x")
        found = rest(await lease(self._way, asked))
        other = await self._open_way()
        expected = rest(await lease(other, asked))
        other.die()
        self.difference_count += rest(await lease(self._way, asked)) != expected
        # A lease that brought rows to DRAM tells how much was there before.
        for told in (found, expected):
            told.lease.session.ClearField("dram_bytes")
        self.difference_count += found != expected


@pytest.fixture
def history(
    way: SocketWay,
    open_way: Callable[[], Awaitable[SocketWay]],
    client: Client,
    server: Server,
    clock: FakeClock,
) -> Callable[[int], History]:
    """Histories by seed. Nothing changes unasked between two answers that are compared."""
    assert server._upkeep is not None
    # A slow machine gives it time to write what is not durable: other answers, and none of them stale.
    server._upkeep.cancel()
    return lambda seed: History(client, way, open_way, clock, seed)


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize("seed", range(3))
async def test_no_history_makes_an_answer_stale(history: Callable[[int], History], seed: int) -> None:
    """After any acts a lease that lingered is answered as one that never did."""
    told = history(seed)
    await told.go(60)

    assert told.difference_count == 0


@pytest.mark.usefixtures("for_long")
async def test_a_lease_that_is_taken_up_unseen_is_found(
    history: Callable[[int], History], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a store that does not look at the session gives stale answers, and they are found."""
    take_up = Leases.take_up

    def unseen(self: Leases, held: Lease) -> Session | None:
        session = server._cache.ledger.get(held.view.uid)
        if session is not None:
            held.view = session.view()
        return take_up(self, held)

    monkeypatch.setattr(Leases, "take_up", unseen)
    told = history(0)
    await told.go(60)

    assert told.difference_count > 0
