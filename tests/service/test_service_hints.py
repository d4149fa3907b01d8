"""HintService.Hint over a real server: what each hint does, and how it is answered."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from hint_rig import seconds
from service_rig import Client, chunks, commit, refused, until

from ctxcache.cache.hints import Hint, HintAnswer, Hints
from ctxcache.core.ledger.work import Work
from ctxcache.server.server import Server
from ctxcache.service import fairness
from ctxcache.settings.config import Settings
from ctxcache.v1 import hints_pb2, hints_pb2_grpc, session_pb2
from ctxcache.v1.session_pb2 import TokenRange

Code = grpc.StatusCode
SLOT_BYTES = 28672
ACCEPTED = hints_pb2.HINT_OUTCOME_ACCEPTED
CLIPPED = hints_pb2.HINT_OUTCOME_CLIPPED
DEFERRED = hints_pb2.HINT_OUTCOME_DEFERRED
REJECTED = hints_pb2.HINT_OUTCOME_REJECTED
MISSING = hints_pb2.HINT_OUTCOME_MISSING
KINDS: dict[str, Any] = {
    "share": hints_pb2.ShareHint(),
    "prefetch": hints_pb2.PrefetchHint(),
    "demote": hints_pb2.DemoteHint(),
    "pin": hints_pb2.PinHint(),
    "retain": hints_pb2.RetainHint(),
    "expect": hints_pb2.ExpectHint(return_in=seconds(60)),
    "release": hints_pb2.ReleaseHint(),
}


@pytest.fixture
def policy() -> str:
    """A policy that promotes ahead."""
    return "look-ahead"


@pytest.fixture
def settings(settings: Settings, policy: str) -> Settings:
    """The policy's."""
    return settings.model_copy(update={"placement_policy": policy, "max_retention_s": 1000})


class Hinter:
    """Gives hints."""

    def __init__(self, client: Client) -> None:
        self._stub = hints_pb2_grpc.HintServiceStub(client.channel)

    async def batch(self, *actions: hints_pb2.HintAction, **facts: Any) -> hints_pb2.HintResponse:
        """Several at a time."""
        request = hints_pb2.HintRequest(actions=actions, **facts)
        return await self._stub.Hint(request)

    async def __call__(self, kind: str, name: str = "a", **facts: Any) -> hints_pb2.HintResult:
        """One."""
        (result,) = (await self.batch(action(kind, name, **facts))).results
        return result


def action(kind: str, name: str = "a", **facts: Any) -> hints_pb2.HintAction:
    """A hint."""
    own = {} if kind in facts else {kind: KINDS[kind]}
    return hints_pb2.HintAction(**({"session": f"sessions/{name}"} | own | facts))


@pytest.fixture
async def hint(client: Client) -> Hinter:
    """Hints, beside a session of 200 tokens, in 4 segments."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    return Hinter(client)


async def test_a_demoted_session_is_prefetched(client: Client, hint: Hinter) -> None:
    """Both are answered with the bytes that moved; again, there is nothing to move."""
    results = [await hint(kind) for kind in ("demote", "demote", "prefetch", "prefetch")]

    assert [result.outcome for result in results] == [ACCEPTED] * 4
    assert [result.granted_bytes // SLOT_BYTES for result in results] == [4, 0, 4, 0]
    assert (await client.get("a")).dram_bytes == 4 * SLOT_BYTES


async def test_a_prefetch_keeps_to_its_budget_and_its_range(client: Client, hint: Hinter) -> None:
    """Whole segments, the first ones."""
    await hint("demote")
    small = await hint("prefetch", budget_bytes=1)
    half = await hint("prefetch", budget_bytes=2 * SLOT_BYTES + 1)
    prefix = await hint("prefetch", range=TokenRange(begin=0, end=130))
    rest = await hint("prefetch", budget_bytes=1 << 60)

    assert (small.outcome, small.reason, small.granted_bytes) == (REJECTED, "BUDGET_EXHAUSTED", 0)
    assert (half.outcome, half.reason, half.granted_bytes) == (CLIPPED, "BUDGET_EXHAUSTED", 2 * SLOT_BYTES)
    assert (prefix.outcome, prefix.granted_bytes) == (ACCEPTED, SLOT_BYTES)
    assert (rest.outcome, rest.granted_bytes) == (ACCEPTED, SLOT_BYTES)


async def test_what_somebody_uses_is_left_to_him(client: Client, hint: Hinter, server: Server) -> None:
    """Neither promoted ahead nor taken away."""
    await hint("demote")
    cache = server.cache
    session = cache.ledger.names.sessions["default", "a"]
    cache.ledger.read_began(session, (), 0.0)
    prefetched = await hint("prefetch")
    cache.ledger.read_ended(session.uid, 0.0)
    await hint("prefetch")
    for segment in session.segments:
        cache.ledger.held(segment)
    demoted = await hint("demote")
    for segment in session.segments[1:]:
        cache.ledger.released(segment)
    in_part = await hint("demote")
    cache.ledger.released(session.segments[0])

    assert (prefetched.outcome, prefetched.reason) == (REJECTED, "IN_USE")
    assert (demoted.outcome, demoted.reason, demoted.granted_bytes) == (REJECTED, "IN_USE", 0)
    assert (in_part.outcome, in_part.reason, in_part.granted_bytes) == (CLIPPED, "IN_USE", 3 * SLOT_BYTES)


async def fill(server: Server) -> list[Any]:
    """Take all room in DRAM."""
    dram = server.cache.ledger.memory
    taken = []
    while slot := dram.take(SLOT_BYTES):
        taken.append(slot)
    return taken


async def test_without_room_a_prefetch_waits_for_it(client: Client, hint: Hinter, server: Server) -> None:
    """Within its ttl; then it comes by itself, and is done with."""
    await hint("demote")
    cache = server.cache
    taken = await fill(server)
    deferred = await hint("prefetch", ttl=seconds(30))
    waiting = len(cache.hints.deferred)
    in_part = await hint("prefetch", budget_bytes=SLOT_BYTES)
    for slot in taken:
        cache.ledger.memory.give(slot)
    cache.state.is_prefetch_wanted.set()
    await until(lambda: not len(cache.hints.deferred))

    assert (deferred.outcome, deferred.reason, deferred.granted_bytes) == (DEFERRED, "NO_ROOM", 0)
    assert deferred.valid_until.seconds * 10**9 == cache.state.clock.now_ns() + 30 * 10**9
    assert waiting == 1
    assert (in_part.outcome, in_part.reason) == (REJECTED, "NO_ROOM")
    assert (await client.get("a")).dram_bytes == 4 * SLOT_BYTES
    assert cache.queues.starts_in_s(cache.ledger.names.sessions["default", "a"]) is None


async def test_a_batch_waits_for_its_promotions_together(
    client: Client, hint: Hinter, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a bounded time, whoever else is being promoted; what has not come then is deferred, and comes."""
    await hint("demote")
    turns = server.cache.prefetching.turns
    monkeypatch.setattr("ctxcache.cache.hints.PATIENCE_S", 0.02)
    for _ in range(2):
        await turns.acquire()
    results = (await hint.batch(*[action("prefetch")] * 3)).results
    for _ in range(2):
        turns.release()
    await until(lambda: not len(server.cache.hints.deferred))

    assert [(result.outcome, result.reason) for result in results] == [(DEFERRED, "NO_ROOM")] * 3
    assert (await client.get("a")).dram_bytes == 4 * SLOT_BYTES


@pytest.mark.parametrize("policy", ["lru"])
async def test_what_would_never_come_is_not_deferred(hint: Hinter, server: Server) -> None:
    """Under a policy that promotes nothing ahead."""
    await hint("demote")
    taken = await fill(server)
    result = await hint("prefetch")
    for slot in taken:
        server.cache.ledger.memory.give(slot)

    assert (result.outcome, result.reason) == (REJECTED, "NO_ROOM")


@pytest.mark.parametrize("way", ["expires", "release", "demote", "ended", "delete"])
async def test_a_deferred_prefetch_ends(
    client: Client, hint: Hinter, server: Server, clock: FakeClock, way: str
) -> None:
    """When its time is over, or it is not wanted any more; it never lasts longer than ten minutes."""
    await hint("demote")
    deferred = server.cache.hints.deferred
    taken = await fill(server)
    await hint("prefetch", ttl=seconds(86400))
    assert len(deferred) == 1
    if way == "expires":
        clock.advance(seconds=599)
        server.cache.hints.drop_overdue()
        assert len(deferred) == 1
        clock.advance(seconds=1)
        with Work():
            server.cache.hints.drop_overdue()
    elif way == "delete":
        await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/a"))
    elif way == "ended":
        await hint("expect", expect=hints_pb2.ExpectHint(ended=True))
    else:
        await hint(way)
    for slot in taken:
        server.cache.ledger.memory.give(slot)

    assert (len(deferred), len(deferred._waiting), len(deferred._due)) == (0, 0, 0)
    assert server.cache.queues.schedule.is_empty


async def test_deferred_prefetches_are_bounded(
    client: Client, hint: Hinter, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the jobs of an engine are."""
    await client.create("b")
    await client.append("b", 2, 0, 10, is_durable=True)
    for name in ("a", "b"):
        await hint("demote", name)
    queues = server.cache.queues
    monkeypatch.setattr(queues, "limits", queues.limits.__class__(job_count=1))
    taken = await fill(server)
    results = [await hint("prefetch", name) for name in ("a", "b", "a")]
    for slot in taken:
        server.cache.ledger.memory.give(slot)

    assert [result.outcome for result in results] == [DEFERRED, REJECTED, DEFERRED]
    assert results[1].reason == "TOO_MANY_REQUESTS"


async def test_a_prefetch_that_is_repeated_takes_no_more_memory(
    client: Client, hint: Hinter, server: Server
) -> None:
    """It is deferred once, until the last of its times, however often that moved."""
    await hint("demote")
    deferred, session = server.cache.hints.deferred, server.cache.ledger.names.sessions["default", "a"]
    tracemalloc.start()
    try:
        with Work():
            for until_ns in range(1, 10_001):
                deferred.put(session, 0, until_ns, 0)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with Work():
        deferred.drop_overdue(9_999)
        left_count = len(deferred)
        deferred.drop_overdue(10_000)

    assert grown_bytes < 100_000
    assert (left_count, len(deferred)) == (1, 0)


async def test_a_shared_session_is_forked_without_a_write(
    client: Client, hint: Hinter, server: Server
) -> None:
    """Durable and closed: the source's next tokens begin a segment of their own."""
    await client.append("a", 1, 200, 210)
    shared = await hint("share")
    flushed = server.cache.state.counters.flushed_segment_count
    request = session_pb2.ForkSessionRequest(name="sessions/a", session_id="fork")
    fork = await client.sessions.ForkSession(request)
    await client.append("a", 1, 210, 220)

    assert (shared.outcome, shared.granted_bytes) == (ACCEPTED, 4 * SLOT_BYTES)
    assert fork.durable_token_count == 210
    assert server.cache.state.counters.flushed_segment_count == flushed
    assert len(server.cache.ledger.names.sessions["default", "a"].segments) == 5


async def test_a_prefix_is_shared(client: Client, hint: Hinter) -> None:
    """The segments that hold it."""
    shared = await hint("share", range=TokenRange(begin=0, end=65))

    assert (shared.outcome, shared.granted_bytes) == (ACCEPTED, 2 * SLOT_BYTES)


async def test_what_is_being_written_is_not_shared(client: Client, hint: Hinter) -> None:
    """Its writer goes on behind what there is: try again."""
    may_end = asyncio.Event()

    async def messages() -> AsyncIterator[Any]:
        yield client.header("a", 200)
        for message in chunks(1, 200, 210):
            yield message
        await may_end.wait()
        yield commit(210)

    appending = asyncio.ensure_future(client.send(messages()))
    results: list[hints_pb2.HintResult] = []

    async def is_refused() -> bool:
        results.append(await hint("share"))
        return results[-1].outcome == REJECTED

    await until(is_refused)
    may_end.set()
    await appending

    assert results[-1].reason == "WRITE_IN_PROGRESS"
    assert (await hint("share")).outcome == ACCEPTED


async def test_expectations_reach_the_policy(
    client: Client, hint: Hinter, server: Server, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the session returns, on the store's clock, or never."""
    heard: list[tuple[bytes, float | None]] = []
    monkeypatch.setattr(server.cache.placement.policy, "expected", lambda *facts: heard.append(facts))
    now_s = clock.monotonic_ns() / 1e9
    results = [
        await hint("expect"),
        await hint("expect", expect=hints_pb2.ExpectHint(ended=True)),
    ]

    assert [result.outcome for result in results] == [ACCEPTED] * 2
    assert heard == [(b"default\0a", now_s + 60), (b"default\0a", None)]


@pytest.mark.parametrize("kind", ["pin", "retain"])
async def test_what_is_kept_is_granted_within_the_budget(
    client: Client, hint: Hinter, server: Server, kind: str
) -> None:
    """Whole or not at all, for as long as the server allows; a pin can wedge nothing."""
    retention = server.cache.placement.retaining
    clock = server.cache.state.clock
    plain = await hint(kind, ttl=seconds(100), priority=3)
    larger = await hint(kind, budget_bytes=6 * SLOT_BYTES)
    longer = await hint(kind, ttl=seconds(5000))
    too_small = await hint(kind, budget_bytes=SLOT_BYTES)
    used = retention.used_bytes("default")
    await hint("release")

    assert (plain.outcome, plain.granted_bytes) == (ACCEPTED, 4 * SLOT_BYTES)
    assert plain.valid_until.seconds * 10**9 == clock.now_ns() + 100 * 10**9
    assert (larger.outcome, larger.granted_bytes) == (ACCEPTED, 6 * SLOT_BYTES)
    assert larger.valid_until.seconds * 10**9 == clock.now_ns() + 600 * 10**9
    assert (longer.outcome, longer.reason) == (CLIPPED, "TTL_LIMIT")
    assert longer.valid_until.seconds * 10**9 == clock.now_ns() + 1000 * 10**9
    assert (too_small.outcome, too_small.reason) == (REJECTED, "BUDGET_EXHAUSTED")
    assert used[kind == "pin"] == 4 * SLOT_BYTES
    assert retention.used_bytes("default") == (0, 0)


async def test_a_full_budget_of_pins_stops_nobody(client: Client, hint: Hinter, server: Server) -> None:
    """Pins beyond the budget are rejected, and all writers go on."""
    outcomes = []
    for number in range(60):
        name = f"s{number}"
        await client.create(name)
        await client.append(name, 1, 0, 64, is_durable=True)
        outcomes.append((await hint("pin", name)).outcome)
    await client.create("large")
    await client.append("large", 1, 0, 20 * 64, is_durable=True)

    assert outcomes[0] == ACCEPTED
    assert outcomes[-1] == REJECTED
    assert (await client.get("large")).durable_token_count == 20 * 64


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_is_not_there_is_missing(hint: Hinter, kind: str) -> None:
    """Whatever is asked for it."""
    result = await hint(kind, "nobody")

    assert (result.outcome, result.reason) == (MISSING, "SESSION_NOT_FOUND")


@pytest.mark.parametrize("kind", KINDS)
async def test_ranges_are_prefixes_or_all(hint: Hinter, kind: str) -> None:
    """Placement moves sessions; share and prefetch know how to begin with the first tokens."""
    whole = await hint(kind, range=TokenRange(begin=0, end=200))
    prefix = await hint(kind, range=TokenRange(begin=0, end=100))
    middle = await hint(kind, range=TokenRange(begin=50, end=100))
    beyond = await hint(kind, range=TokenRange(begin=0, end=201))

    takes_prefixes = kind in ("share", "prefetch")
    assert whole.outcome == ACCEPTED
    assert (prefix.outcome, prefix.reason) == (
        (ACCEPTED, "") if takes_prefixes else (REJECTED, "RANGE_NOT_SUPPORTED")
    )
    assert (middle.outcome, middle.reason) == (REJECTED, "RANGE_NOT_SUPPORTED")
    assert (beyond.outcome, beyond.reason) == (REJECTED, "TOKEN_RANGE_OUT_OF_BOUNDS")


async def test_what_was_computed_ahead_is_added_up_for_the_tenant(
    client: Client, hint: Hinter, server: Server
) -> None:
    """Also of a session that has ended. Nothing of the session changes, and nothing is taken below 0."""
    before = await client.get("a")
    told = hints_pb2.AheadHint(computed_token_count=90, used_token_count=60, wasted_token_count=7)
    assert (await hint("ahead", ahead=told)).outcome == ACCEPTED
    assert (await hint("ahead", "nobody", ahead=told)).outcome == MISSING
    for name in ("computed", "used", "wasted"):
        wrong = hints_pb2.AheadHint(**{f"{name}_token_count": -1})
        found = await refused(hint("ahead", ahead=wrong), Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert found["field"] == f"actions[0].ahead.{name}_token_count"

    assert server.cache.state.ahead_tokens == {
        ("default", "computed"): 180, ("default", "used"): 120, ("default", "wasted"): 14,
    }  # fmt: skip
    assert await client.get("a") == before


async def test_a_batch_is_answered_one_by_one(hint: Hinter) -> None:
    """In order, by the ids of the client; what fails for one does not for the others."""
    response = await hint.batch(
        action("demote", action_id="one"), action("demote", "nobody", action_id="two"),
        action("prefetch", action_id="three"), message_id="m",
    )  # fmt: skip

    assert response.message_id == "m"
    assert [(result.action_id, result.outcome) for result in response.results] == [
        ("one", ACCEPTED), ("two", MISSING), ("three", ACCEPTED),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"session": ""}, "session"),
        ({"session": "sessions/../x"}, "session"),
        ({"action_id": "x" * 129}, "action_id"),
        ({"priority": 101}, "priority"),
        ({"priority": -1}, "priority"),
        ({"ttl": seconds(0)}, "ttl"),
        ({"ttl": seconds(31 * 86400)}, "ttl"),
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"budget_bytes": -1}, "budget_bytes"),
        ({"range": TokenRange(begin=-1, end=1)}, "range.begin"),
        ({"range": TokenRange(begin=2, end=1)}, "range.end"),
        ({"expect": hints_pb2.ExpectHint()}, "expect.expected"),
        ({"expect": hints_pb2.ExpectHint(ended=False)}, "expect.ended"),
        ({"expect": hints_pb2.ExpectHint(return_in=seconds(-1))}, "expect.return_in"),
        ({"expect": hints_pb2.ExpectHint(return_in=seconds(31 * 86400))}, "expect.return_in"),
    ],
)
async def test_a_bad_field_fails_the_batch_and_changes_nothing(
    client: Client, hint: Hinter, facts: dict[str, Any], field: str
) -> None:
    """Nothing was done, for the good hint beside it neither."""
    kind = "expect" if "expect" in facts else "retain"
    found = await refused(
        hint.batch(action("demote"), action(kind, **facts)), Code.INVALID_ARGUMENT, "INVALID_FIELD"
    )

    assert found["field"] == f"actions[1].{field}"
    assert (await client.get("a")).dram_bytes == 4 * SLOT_BYTES


async def test_batches_are_bounded(hint: Hinter) -> None:
    """1 to 256 hints, each saying what it wants."""
    nothing = hints_pb2.HintAction(session="sessions/a")
    for actions, facts, field in (
        ([], {}, "actions"),
        ([action("release")] * 257, {}, "actions"),
        ([nothing], {}, "actions[0].action"),
        ([action("release")], {"message_id": "x" * 129}, "message_id"),
    ):
        found = await refused(hint.batch(*actions, **facts), Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert found["field"] == field
    assert len((await hint.batch(*[action("release")] * 256)).results) == 256


async def test_a_batch_leaves_turns_to_others(
    monkeypatch: pytest.MonkeyPatch, hint: Hinter, server: Server
) -> None:
    """However little of it takes long: between two hints of one batch others have a turn."""
    monkeypatch.setattr(fairness, "SLICE_NS", 0)
    hints, turn_count, seen = server.cache.hints, 0, []

    async def carry_out(asked: Hint, deadline_s: float) -> HintAnswer:
        seen.append(turn_count)
        return await Hints.carry_out(hints, asked, deadline_s)

    async def others() -> None:
        nonlocal turn_count
        while True:
            turn_count += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(hints, "carry_out", carry_out)
    turning = asyncio.ensure_future(others())
    await hint.batch(*[action("share")] * 20)
    turning.cancel()

    assert len(set(seen)) == 20
