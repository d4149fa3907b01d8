"""One commit for many sessions is as many commits of one: what becomes visible, what fails, and why.

Two sets of sessions have the same history; the steps of one are committed by one operation, those of the
other session by session.
"""

import random
from collections.abc import AsyncIterator, Sequence

import pytest
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from integrity import check_integrity
from service_rig import ROW_BYTES, Client, SocketWay
from xxhash import xxh3_64_intdigest

from ctxcache.cache.appends import RESERVATION_LIFETIME_NS
from ctxcache.server.server import Server
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2

LANES, ROOM, STEPS = 6, 70, 90
JOINT_SUM = xxh3_64_intdigest(bytes(sum(ROW_BYTES.values())))
"""Of a token whose rows nobody wrote; below, of each stream by itself."""
SUMS = [xxh3_64_intdigest(bytes(ROW_BYTES[layer])) for layer in (-1, 0, 1)]
MEMORY, DISK = session_pb2.DURABILITY_MEMORY, session_pb2.DURABILITY_DISK
Outcome = tuple[int, str, str]
"""The session's generation afterwards, 0 where nothing became visible; why not, and which field says so."""


@pytest.fixture
async def way(server: Server, client: Client) -> AsyncIterator[SocketWay]:
    """A connection to the control socket; the model is registered."""
    assert client.fingerprint
    opened = await SocketWay.open(server.control_socket)
    yield opened
    opened.die()


async def reserved(way: SocketWay, client: Client, name: str, token_count: int) -> int:
    """Room behind the session's end; 0 where there is none to be had."""
    request = arena_pb2.Reserve(
        session=f"sessions/{name}",
        model_fingerprint=client.fingerprint,
        write_offset=token_count,
        token_count=ROOM,
        is_brief=True,
    )
    return (await way.one(reserve=request)).reservation.reservation_id


def reason(error: arena_pb2.OperationError) -> tuple[str, str]:
    """Why, and the field that a caller got wrong."""
    return error.reason, error.metadata.get("field", "")


async def together(
    way: SocketWay, ids: Sequence[int], counts: Sequence[int], durability: int, *, keep_open: bool
) -> list[Outcome]:
    """Commit a token of each by one operation."""
    commit = arena_pb2.CommitReservations(
        reservation_ids=ids,
        token_counts=counts,
        checksums=[JOINT_SUM] * len(ids),
        durability=durability,  # type: ignore[arg-type]  # one of its numbers
        keep_open=keep_open,
    )
    answer = (await way.one(commit_many=commit)).committed_many
    errors = {failed.index: reason(failed.error) for failed in answer.failures}
    return [(generation, *errors.get(index, ("", ""))) for index, generation in enumerate(answer.generations)]


async def one_by_one(
    way: SocketWay, ids: Sequence[int], counts: Sequence[int], durability: int, *, keep_open: bool
) -> list[Outcome]:
    """Commit a token of each by an operation of its own."""
    outcomes: list[Outcome] = []
    for reservation_id, token_count in zip(ids, counts, strict=True):
        commit = arena_pb2.CommitReservation(
            reservation_id=reservation_id,
            token_count=token_count,
            checksums=SUMS,
            durability=durability,  # type: ignore[arg-type]  # one of its numbers
            keep_open=keep_open,
        )
        result = await way.one(commit=commit)
        outcomes.append(
            (0, *reason(result.error)) if result.HasField("error") else (result.committed.generation, "", "")
        )
    return outcomes


class Lanes:
    """Sessions of one of the two sets."""

    def __init__(self, prefix: str) -> None:
        self.names = [f"{prefix}{lane}" for lane in range(LANES)]
        self.ids = [0] * LANES
        self.counts = [0] * LANES
        self.durable = [0] * LANES
        """Tokens that were acknowledged as being on disk."""
        self.first = [0] * LANES
        """The generation that each began with, which is the session's own."""

    def since(self, lanes: Sequence[int], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Outcomes with generations counted from each session's first."""
        return [
            (generation and generation - self.first[lane], why, field)
            for lane, (generation, why, field) in zip(lanes, outcomes, strict=True)
        ]

    def note(self, lane: int, generation: int, durability: int) -> None:
        """A commit of one token was answered with that generation."""
        self.counts[lane] += generation > 0
        if generation and durability == DISK:
            self.durable[lane] = self.counts[lane]

    async def check(self, client: Client) -> None:
        """Every session has what was acknowledged."""
        for lane, name in enumerate(self.names):
            found = await client.get(name)
            assert found.token_count == self.counts[lane]
            # More than was asked for, where upkeep came by.
            assert found.durable_token_count >= self.durable[lane]


async def renew(way: SocketWay, client: Client, server: Server, lanes: Lanes) -> None:
    """Reserve anew where a lane's room is full or gone."""
    appends = server.cache.appends
    for lane, name in enumerate(lanes.names):
        before = lanes.ids[lane]
        if not appends.is_open(before) or appends.get(before).end == lanes.counts[lane]:
            await way.one(release_reservation=arena_pb2.ReleaseReservation(reservation_id=before))
            lanes.ids[lane] = await reserved(way, client, name, lanes.counts[lane])


@pytest.mark.parametrize("seed", range(4))
async def test_many_commits_are_as_many_single_ones(
    way: SocketWay, client: Client, server: Server, seed: int
) -> None:
    """Random steps, some lanes left out, some with another count, sessions deleted, room given back."""
    dice = random.Random(seed)
    sets = [Lanes("many"), Lanes("single")]
    for lanes in sets:
        for lane, name in enumerate(lanes.names):
            lanes.first[lane] = (await client.create(name)).generation
            lanes.ids[lane] = await reserved(way, client, name, 0)
    for _ in range(STEPS):
        chosen = sorted(dice.sample(range(LANES), dice.randint(1, LANES)))
        wrong = {lane: dice.choice((-1, ROOM)) for lane in chosen if dice.random() < 0.03}
        durability = DISK if dice.random() < 0.1 else MEMORY
        keep_open, event, victim = dice.random() < 0.95, dice.random(), dice.randrange(LANES)
        told = []
        for lanes, commit in zip(sets, (together, one_by_one), strict=True):
            if event < 0.05:
                release = arena_pb2.ReleaseReservation(reservation_id=lanes.ids[victim])
                await way.one(release_reservation=release)
            if event < 0.02:
                await client.sessions.DeleteSession(
                    session_pb2.DeleteSessionRequest(name=f"sessions/{lanes.names[victim]}")
                )
                lanes.first[victim] = (await client.create(lanes.names[victim])).generation
                lanes.counts[victim] = lanes.durable[victim] = 0
            counts = [lanes.counts[lane] + 1 + wrong.get(lane, 0) for lane in chosen]
            ids = [lanes.ids[lane] for lane in chosen]
            outcomes = await commit(way, ids, counts, durability, keep_open=keep_open)
            told.append(lanes.since(chosen, outcomes))
            for lane, (generation, *_) in zip(chosen, outcomes, strict=True):
                lanes.note(lane, generation, durability)
            await renew(way, client, server, lanes)
        assert told[0] == told[1]

    assert sets[0].counts == sets[1].counts
    await sets[0].check(client)
    await sets[1].check(client)
    for many, single in zip(sets[0].names, sets[1].names, strict=True):
        assert await client.read_rows(many) == await client.read_rows(single)
    await server.cache.drain()
    assert check_integrity(server.cache) == []


async def test_a_writer_whose_time_is_over_fails_alone(
    way: SocketWay, client: Client, server: Server, clock: FakeClock
) -> None:
    """A reservation that has expired, and a session that has: told of each, and the third is committed."""
    await client.create("late", ttl=Duration(seconds=3600))
    ids = [await reserved(way, client, "late", 0)]
    clock.advance(ns=RESERVATION_LIFETIME_NS - 10**9)
    for name, ttl_s in (("gone", 2), ("fine", 3600)):
        await client.create(name, ttl=Duration(seconds=ttl_s))
        ids.append(await reserved(way, client, name, 0))
    clock.advance(ns=3 * 10**9)
    server.cache.appends.end_overdue()
    outcomes = await together(way, ids, [1, 1, 1], DISK, keep_open=True)

    assert [why for _, why, _ in outcomes] == ["RESERVATION_NOT_FOUND", "SESSION_NOT_FOUND", ""]
    assert [generation > 0 for generation, *_ in outcomes] == [False, False, True]
    assert (await client.get("fine")).durable_token_count == 1


async def test_what_a_batch_names_twice_or_too_often_is_refused(
    way: SocketWay, client: Client, server: Server
) -> None:
    """As a whole, before the first commit, with its field; another client's reservation is not found."""
    await client.create("a")
    own = await reserved(way, client, "a", 0)
    too_many = range(1, (1 << 16) + 2)
    commit = arena_pb2.CommitReservations(
        reservation_ids=too_many, token_counts=[1] * len(too_many), checksums=[JOINT_SUM] * len(too_many)
    )
    refused = await way.one(commit_many=commit)
    other = await SocketWay.open(server.control_socket)
    foreign = await together(other, [own], [1], MEMORY, keep_open=True)
    other.die()

    assert reason(refused.error) == ("INVALID_FIELD", "reservation_ids")
    assert foreign == [(0, "RESERVATION_NOT_FOUND", "")]
    assert (await client.get("a")).token_count == 0
    stats: admin_pb2.Stats = await client.stats()
    assert stats.reservation_count == 1
