"""Sessions that nobody uses: the store answers as if all of them were known."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cache_rig import (
    LAYOUT,
    MODEL,
    SEGMENT_TOKENS,
    SLOT_BYTES,
    TENANT,
    DiskRig,
    MemoryRig,
    Rig,
    Token,
    Writer,
    expected,
)

from ctxcache.core.ledger import sleep
from ctxcache.core.ledger.ledger import Drop
from ctxcache.core.ledger.rankings import Evictable
from ctxcache.core.ledger.session import SessionView
from ctxcache.core.ledger.work import Work, at_work
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.policy import Capacities, Facts, Level, Ranked
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.core.placement.value import ReturnValue
from ctxcache.errors import CacheError
from ctxcache.storage.metadata.base import Changes

COUNT = 8


async def filled(rig: Rig, count: int = COUNT, *, ttl_s: int = 3600) -> dict[str, list[Token]]:
    """So many durable sessions, a second between their uses: `a` was used longest ago."""
    tokens = {}
    for tag in range(count):
        name = chr(ord("a") + tag)
        tokens[name] = Writer(tag).make(SEGMENT_TOKENS + 1 + tag)
        await rig.create(name, ttl_s=ttl_s)
        await rig.append(name, tokens[name], is_durable=True)
        rig.clock.advance(seconds=1)
    return tokens


def dormant(rig: Rig) -> set[str]:
    """The sessions that are dormant."""
    return {name for names in rig.cache.ledger.sleep.dormant.names.values() for name in names}


async def views(rig: Rig) -> list[SessionView]:
    """The list of sessions."""
    return [view async for view in rig.cache.sessions.list(rig.tenant, after="", model_id="")]


def told(rig: Rig) -> dict[str, object]:
    """Facts about all sessions together, as an operator is told them."""
    ledger = rig.cache.ledger
    uses = {tenant: ledger.usage.of(tenant) for tenant in ledger.usage.tenants()}
    return {
        "sessions": ledger.session_count,
        "segments": ledger.segment_count,
        "names": {tenant: list(ledger.names.ids(tenant)) for tenant in sorted(ledger.tenants())},
        "of the model": ledger.names.model_count(TENANT, MODEL.model_id),
        "bytes": {t: (use.memory_bytes, use.durable_bytes, use.kept_bytes) for t, use in uses.items()},
        "taken": ledger.below.used_bytes,
        "uids": sorted(ledger.uids()),
    }


async def test_what_is_told_of_all_sessions_is_the_same_and_wakes_none(disk_rig: DiskRig) -> None:
    """Counts, names, bytes of tenants, and the list, field for field."""
    await filled(disk_rig)
    disk_rig.last_used = COUNT
    await disk_rig.restart()
    known = told(disk_rig), await views(disk_rig)
    assert not dormant(disk_rig)
    disk_rig.last_used = 2
    await disk_rig.restart()

    assert dormant(disk_rig) == set("abcdef")
    assert (told(disk_rig), await views(disk_rig)) == known
    await disk_rig.check()
    assert dormant(disk_rig) == set("abcdef")


USES: dict[str, Callable[[Rig], Awaitable[object]]] = {
    "read": lambda rig: rig.read("b"),
    "append": lambda rig: rig.append("b", Writer(99).make(3), is_durable=True),
    "truncate": lambda rig: rig.truncate("b", (10, 20)),
    "fork": lambda rig: rig.fork("b", "new", 50),
    "pin": lambda rig: rig.cache.sessions.update(TENANT, "b", expiration=None, is_pinned=True),
    "delete": lambda rig: rig.delete("b"),
    "create anew": lambda rig: rig.create("b"),
    "forget its model": lambda rig: rig.cache.models.delete(TENANT, MODEL.model_id),
}


async def refusal(use: Callable[[Rig], Awaitable[object]], rig: Rig) -> str:
    """The reason for which a use is refused; empty where it is not."""
    try:
        await use(rig)
    except CacheError as error:
        return error.reason
    return ""


async def left(rig: MemoryRig) -> object:
    """The rows before and after a crash, and what is pinned. The rig is closed."""
    await rig.check()
    found = []
    for _ in range(2):
        found.append({name: await rig.read(name) for name in sorted(rig.names())})
        await rig.crash()
    pinned = [view.is_pinned for view in await views(rig)]
    await rig.close()
    return found, pinned


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
async def test_a_use_does_what_it_does_to_a_known_session(
    tmp_path: Path, use: Callable[[Rig], Awaitable[object]]
) -> None:
    """The same answer, the same rows after another restart; and only that one is woken."""
    outcomes = []
    for last_used in (COUNT, 0):
        rig = MemoryRig(tmp_path, last_used=last_used)
        await rig.open()
        await filled(rig, 3)
        await rig.restart()
        reason = await refusal(use, rig)
        await rig.check()
        woken = set("abc") - dormant(rig)
        await rig.restart()
        rows = {name: await rig.read(name) for name in sorted(rig.names())}
        outcomes.append((reason, rows, [view.is_pinned for view in await views(rig)]))
        await rig.check()
        await rig.close()

    assert outcomes[0] == outcomes[1]
    assert woken <= {"b"}


def by_value() -> Ranked:
    """The policy of a server, for sessions of some segments."""
    return ReturnValue(Capacities(6 * SLOT_BYTES, 64 * SLOT_BYTES))


async def left_for(count: int, rig: MemoryRig) -> list[str]:
    """The sessions that leave, one by one, while so many of two segments come."""
    gone = []
    for number in range(count):
        before = rig.names()
        await rig.create(f"new{number}")
        await rig.append(f"new{number}", Writer(50 + number).make(2 * SEGMENT_TOKENS), is_durable=True)
        gone += sorted(before - rig.names())
        rig.clock.advance(seconds=1)
        await rig.check()
    return gone


async def test_sessions_leave_by_their_last_use(tmp_path: Path) -> None:
    """One by one, as room is needed; one that was used since, though it was the coldest, goes last."""
    for make_policy in (LeastRecentlyUsed, by_value):
        rig = MemoryRig(tmp_path, ssd_segments=(2 * COUNT,), make_policy=make_policy, last_used=0)
        await rig.open()
        await filled(rig)
        await rig.restart()
        await rig.read("a")
        gone = await left_for(4, rig)
        await rig.close()

        assert gone == ["b", "c", "d", "e"]


async def test_each_tenant_gives_its_own_coldest(tmp_path: Path) -> None:
    """The flood of one takes from that one, whoever was used longest ago."""
    shares = Shares({TENANT: Share(0.5), "other": Share(0.5)})
    rig = MemoryRig(tmp_path, ssd_segments=(16,), shares=shares, last_used=0)
    await rig.open()
    await filled(rig, 4)
    rig.tenant = "other"
    await filled(rig, 4)
    await rig.restart()
    rig.tenant = "other"
    await rig.create("new")
    await rig.append("new", Writer(50).make(2 * SEGMENT_TOKENS), is_durable=True)

    assert rig.names() == {"b", "c", "d", "new"}
    rig.tenant = TENANT
    assert dormant(rig) >= set("acd")
    assert rig.names() == set("abcd")
    await rig.check()
    await rig.close()


async def test_their_time_comes_without_a_look_at_them(tmp_path: Path) -> None:
    """Each at its own, and its bytes are given back."""
    rig = MemoryRig(tmp_path, last_used=0)
    await rig.open()
    await filled(rig, 4, ttl_s=100)
    await rig.restart()
    rig.clock.advance(seconds=97.5)
    await rig.cache.sessions.expire_due()

    assert (dormant(rig), rig.cache.ledger.segment_count) == ({"c", "d"}, 4)
    assert rig.cache.ledger.below.used_bytes == 4 * SLOT_BYTES
    assert rig.cache.state.counters.expired_session_count == 2
    await rig.check()
    await rig.close()


async def test_tokens_are_found_in_them(disk_rig: DiskRig) -> None:
    """A match looks for keys, which are there from the start; the session that has them is woken."""
    tokens = await filled(disk_rig, 4)
    disk_rig.last_used = 0
    await disk_rig.restart()
    found = await disk_rig.match(tokens["c"])

    assert found.token_count == SEGMENT_TOKENS
    assert dormant(disk_rig) == set("abd")
    await disk_rig.create("e")
    assert await disk_rig.adopt("e", tokens["a"]) == SEGMENT_TOKENS
    assert await disk_rig.read("e") == expected(tokens["a"][:SEGMENT_TOKENS])
    await disk_rig.check()


async def test_damage_of_one_is_found_and_the_others_sleep_on(disk_rig: DiskRig) -> None:
    """A pass verifies every slot, and ends the session that has lost its rows."""
    tokens = await filled(disk_rig, 4)
    slot = disk_rig.cache.ledger.find(TENANT, "b").segments[1].durable
    assert slot is not None
    disk_rig.last_used = 0
    await disk_rig.restart()
    fd = os.open(disk_rig.ssd.paths[slot.path_index], os.O_RDWR)
    os.pwrite(fd, bytes([7]) * 8, slot.offset_bytes + LAYOUT.header_bytes)
    os.close(fd)
    reports = [report async for report in disk_rig.cache.scrubbing.run()]

    assert [bad.sessions for report in reports for bad in report.bad] == [("sessions/b",)]
    assert reports[-1].checked_segment_count == reports[-1].segment_count == 8
    assert dormant(disk_rig) == set("acd")
    assert await disk_rig.read("b") == expected(tokens["b"][:SEGMENT_TOKENS])
    await disk_rig.check()


async def test_a_lost_path_withholds_what_is_on_it(rig: MemoryRig) -> None:
    """Look-ups say so, and everything is there again with the path."""
    tokens = await filled(rig)
    rig.last_used = 0
    await rig.restart()
    rig.ssd.lose(0)
    await rig.cache.devices.look()
    shown = {view.name.removeprefix("sessions/"): view.token_count for view in await views(rig)}

    assert sorted(shown.values())[:4] == [0] * 4
    assert {name for name, count in shown.items() if count} >= dormant(rig)
    rig.ssd.find(0)
    await rig.cache.devices.look()
    for name, written in tokens.items():
        assert await rig.read(name) == expected(written)
    await rig.check()


async def test_a_search_for_room_wakes_no_more_than_it_may(
    rig: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none of them may leave, as on a path that was just lost; the next search goes on behind them."""
    monkeypatch.setattr(sleep, "WAKES", 3)
    await filled(rig)
    await rig.restart()
    count = len(dormant(rig))
    assert count == COUNT - 1
    monkeypatch.setattr(Evictable, "__contains__", lambda *_: False)

    left = []
    for _ in range(3):
        rig.cache.ledger.sleep.let_coldest_in(None)
        left.append(len(dormant(rig)))

    assert left == [count - 3, count - 6, 0]


async def test_records_that_do_not_fit_together_wake_their_sessions(rig: MemoryRig) -> None:
    """A segment that is missing, one that two list, and a slot that two claim: the others sleep."""
    tokens = await filled(rig)
    await rig.fork("f", "g2", SEGMENT_TOKENS)
    ids = {name: [s.segment_id for s in rig.cache.ledger.find(TENANT, name).segments] for name in "abc"}
    records = {record.segment_id: record for record in rig.metadata.segments()}
    claimed = records[ids["b"][1]]._replace(slot=records[ids["c"][1]].slot)
    await rig.metadata.commit(Changes(segments=[claimed], deleted_segment_ids=[ids["a"][1]]), is_durable=True)
    rig.last_used = 0
    await rig.crash()

    assert dormant(rig) in (set("bdegh"), set("cdegh"))
    assert rig.token_count("a") == SEGMENT_TOKENS
    assert min(rig.token_count(name) for name in "bc") == SEGMENT_TOKENS
    for name in "defgh":
        assert await rig.read(name) == expected(tokens[name])
    await rig.check()


def test_nothing_is_learned_of_one_that_was_dormant() -> None:
    """Those that never return are never told of: the others alone would teach that all return."""
    policy = ReturnValue(Capacities(1 << 20, 1 << 30))
    before = policy.lessons()
    facts = Facts(1 << 12, 1, 1 << 12, 64.0)
    policy.recalled(b"a", facts, 30.0, is_watched=False)
    policy.arrived(b"a", 1.0)

    assert policy.lessons() == before
    policy.recalled(b"b", facts, 30.0)
    assert policy.lessons() != before


async def lull(rig: Rig, awake_count: int = 0) -> set[str]:
    """Let all sessions be idle for long, with nothing in memory; returns the dormant ones."""
    ledger = rig.cache.ledger
    ledger.sleep.awake_count = awake_count
    await rig.cache.sessions.save_access_times()
    while isinstance(move := ledger.next_out_of_memory(None, lambda _: False), Drop):
        ledger.dropped(move.segment)
    await rig.let_go()
    rig.clock.advance(seconds=ledger.sleep.sleep_ns / 10**9)
    await rig.cache.sessions.let_sleep()
    return dormant(rig)


async def test_what_nobody_uses_falls_asleep_with_the_records_on_disk(disk_rig: DiskRig) -> None:
    """Everything that is told is as before, and each kept record is the one that a start would read."""
    tokens = await filled(disk_rig)
    known = told(disk_rig), await views(disk_rig)
    in_memory: Any = known[0].pop("bytes")

    assert await lull(disk_rig) == set("abcdefgh")
    after = told(disk_rig)
    assert after.pop("bytes") == {t: (0, below, kept) for t, (_, below, kept) in in_memory.items()}
    assert after == known[0]
    ledger, metadata = disk_rig.cache.ledger, disk_rig.metadata
    assert not ledger.sessions()
    assert not ledger.segments()
    recorded = {record.uid: record for record in metadata.sessions()}
    segments = {record.segment_id: record for record in metadata.segments()}
    for number in ledger.sleep.dormant:
        uid = ledger.sleep.dormant.uid(number)
        assert metadata.session(uid, ledger.sleep.dormant.kept(number)) == recorded[uid]
        for segment_id in recorded[uid].segment_ids:
            kept = metadata.segment(segment_id, ledger.sleep.dormant.kept_segment(segment_id))
            assert kept == segments[segment_id]._replace(keys=())
    await disk_rig.check()
    for name, written in tokens.items():
        assert await disk_rig.read(name) == expected(written)
    assert not dormant(disk_rig)
    await disk_rig.check()


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_sleeper_is_found_on_the_path_that_it_lies_on(rig: MemoryRig, lost: int) -> None:
    """Also where the one that slept in its place before lay on another."""
    await filled(rig)
    await lull(rig)
    for name in "abde":
        await rig.delete(name)
    lengths = {name: 2 * SEGMENT_TOKENS + tag for tag, name in enumerate("uvwxyz")}
    for tag, (name, count) in enumerate(lengths.items(), COUNT):
        await rig.create(name)
        await rig.append(name, Writer(tag).make(count), is_durable=True)
    assert set(lengths) <= await lull(rig)
    paths = {record.segment_id: record.slot.path_index for record in rig.metadata.segments()}
    on_lost = {
        record.session_id
        for record in rig.metadata.sessions()
        if lost in {paths[segment_id] for segment_id in record.segment_ids}
    }
    rig.ssd.lose(lost)
    await rig.cache.devices.look()

    assert set("cfgh") | set(lengths) == dormant(rig) | on_lost
    assert not dormant(rig) & on_lost


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
async def test_a_use_of_a_sleeper_does_what_it_does_to_another(
    tmp_path: Path, use: Callable[[Rig], Awaitable[object]]
) -> None:
    """The same answer, and the same rows before and after a crash."""
    outcomes: list[object] = []
    for awake_count in (COUNT, 0):
        rig = MemoryRig(tmp_path, last_used=COUNT)
        await rig.open()
        await filled(rig, 3)
        assert await lull(rig, awake_count) == (set("abc") if not awake_count else set())
        reason = await refusal(use, rig)
        outcomes.append((reason, await left(rig)))

    assert outcomes[0] == outcomes[1]


MORE_USES: dict[str, Callable[[Rig], Awaitable[object]]] = {
    "flush": lambda rig: rig.flush("b"),
    "two copies, and one again": lambda rig: two_copies_and_one(rig, "b"),
    "put in another's place": lambda rig: in_place_of(rig, "b", "c"),
    "adopt": lambda rig: adopted(rig, Writer(1).make(SEGMENT_TOKENS)),
}


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """All of it, though it lets others have their turns."""
    with suppress(StopIteration):
        while True:
            work.send(None)


async def two_copies_and_one(rig: Rig, name: str) -> None:
    """A session wants a second copy, and does not any more."""
    await rig.mark(name, 2)
    await rig.mark(name, 1)


async def in_place_of(rig: Rig, name: str, replaced: str) -> None:
    """A fork that replaces another session."""
    generation = rig.cache.sessions.get(TENANT, replaced).generation
    await rig.cache.sessions.fork(
        TENANT, name, replaced, None, token_count=50, expiration=None, replaces=generation
    )


async def adopted(rig: Rig, tokens: list[Token]) -> None:
    """A session that begins with another one's tokens."""
    await rig.create("new")
    await rig.adopt("new", tokens)


@pytest.mark.parametrize("use", [*USES.values(), *MORE_USES.values()], ids=[*USES, *MORE_USES])
async def test_a_use_that_waits_is_of_a_session_that_stays_awake(
    tmp_path: Path, use: Callable[[Rig], Awaitable[object]]
) -> None:
    """All that may fall asleep do, at each of its waits: it does what it does where none sleeps."""
    outcomes: list[object] = []
    for may_sleep in (False, True):
        rig = MemoryRig(tmp_path, last_used=COUNT)
        await rig.open()
        await filled(rig, 3)
        await lull(rig)
        ledger, used = rig.cache.ledger, asyncio.ensure_future(at_work(refusal(use, rig)))
        ledger.sleep.sleep_ns = 1
        while not used.done():
            await asyncio.sleep(0)
            if may_sleep:
                rig.clock.advance(ns=1)
                at_once(at_work(rig.cache.sessions.save_access_times()))
                at_once(at_work(rig.cache.sessions.let_sleep()))
        outcomes.append((used.result(), await left(rig)))

    assert outcomes[0] == outcomes[1]


async def test_work_under_way_keeps_a_session_awake(rig: MemoryRig) -> None:
    """A change that waits for a device is of the session that is there, and not of one that was put away."""
    await filled(rig, 3)
    ledger, first, second = rig.cache.ledger, Work(), Work()
    segment_id = ledger.find(TENANT, "b").segments[0].segment_id
    with first:
        ledger.find(TENANT, "a")
        first.join()
    with second:
        segment = ledger.segment(segment_id)
        second.join()

    assert segment
    assert await lull(rig) == {"c"}
    first.leave()
    assert await lull(rig) == {"a", "c"}
    assert segment.is_listed
    second.leave()
    assert await lull(rig) == {"a", "b", "c"}
    await rig.check()


async def test_what_is_to_be_written_down_stays_awake(rig: MemoryRig) -> None:
    """An access that no record has; the others sleep."""
    await filled(rig, 3)
    assert await lull(rig) == {"a", "b", "c"}
    await rig.cache.sessions.update(TENANT, "b", expiration=None, is_pinned=None)
    await rig.let_go()
    rig.clock.advance(seconds=rig.cache.ledger.sleep.sleep_ns / 10**9)
    await rig.cache.sessions.let_sleep()

    assert dormant(rig) == {"a", "c"}
    await rig.cache.sessions.save_access_times()
    await rig.let_go()
    rig.clock.advance(seconds=rig.cache.ledger.sleep.sleep_ns / 10**9)
    await rig.cache.sessions.let_sleep()
    assert dormant(rig) == {"a", "b", "c"}
    await rig.check()


async def test_what_somebody_waits_for_stays_awake(rig: MemoryRig) -> None:
    """Pinned, forked, leased, in memory alone, hinted, promised, and of two copies; all others sleep."""
    await filled(rig)
    ledger = rig.cache.ledger
    await rig.cache.sessions.update(TENANT, "a", expiration=None, is_pinned=True)
    await rig.fork("b", "new", SEGMENT_TOKENS)
    lease = await rig.acquire("c", 0, 1)
    await rig.append("d", Writer(90).make(1))
    ledger.placement.expected(ledger.find(TENANT, "e"), 10**9)
    ledger.placement.hinted(ledger.find(TENANT, "f"), 10**9)
    await rig.mark("g", 2)

    assert await lull(rig) == {"h"}
    rig.cache.leases.release(lease.lease_id)
    ledger.placement.withdrawn(ledger.find(TENANT, "f"))
    await rig.cache.flushing.flush(ledger.find(TENANT, "d"))
    del lease
    assert await lull(rig) == set("cdfh")
    await rig.check()


async def test_sleepers_leave_by_their_last_use(tmp_path: Path) -> None:
    """With those that sleep since the start, and after one that was woken has been used."""
    for make_policy in (LeastRecentlyUsed, by_value):
        rig = MemoryRig(tmp_path, ssd_segments=(2 * COUNT,), make_policy=make_policy, last_used=0)
        await rig.open()
        await filled(rig)
        await rig.restart()
        for name in "ab":
            await rig.read(name)
            rig.clock.advance(seconds=1)
        assert await lull(rig) == set("abcdefgh")
        rig.cache.ledger.find(TENANT, "e")
        await rig.read("c")
        gone = await left_for(5, rig)
        await rig.close()

        assert "".join(gone) == "defgh"


async def test_the_policy_forgets_a_sleeper_and_counts_its_turns_on(tmp_path: Path) -> None:
    """Its dictionaries shrink with the ledger's; what it is told at the next rest is the next turn."""
    policies: list[ReturnValue] = []

    def make_policy() -> Ranked:
        policies.append(ReturnValue(Capacities(6 * SLOT_BYTES, 64 * SLOT_BYTES)))
        return policies[-1]

    rig = MemoryRig(tmp_path, make_policy=make_policy)
    await rig.open()
    await filled(rig, 3)
    for _ in range(2):
        await rig.append("b", Writer(9).make(1), is_durable=True)
    feed, policy = rig.cache.ledger.placement, policies[-1]
    await lull(rig)
    kept: list[Sized] = [
        policy._held,
        policy._sizes,
        policy._last_use,
        policy._worth,
    ]

    assert feed.is_empty
    assert [len(each) for each in kept] == [0] * len(kept)
    assert not policy._returns._watches
    await rig.append("b", Writer(9).make(1), is_durable=True)
    (standing,) = feed.standings.values()
    assert standing.turn_count == 4
    await rig.close()


async def test_their_time_comes_in_their_sleep(tmp_path: Path) -> None:
    """The same as of those that sleep since the start; and numbers that are free are given again."""
    rig = MemoryRig(tmp_path)
    await rig.open()
    await filled(rig, 4, ttl_s=1000)
    await lull(rig)
    rig.clock.advance(seconds=697.5)
    await rig.cache.sessions.expire_due()
    assert (dormant(rig), rig.cache.ledger.segment_count) == ({"c", "d"}, 4)
    await rig.check()
    tokens = Writer(77).make(SEGMENT_TOKENS + 3)
    await rig.create("late")
    await rig.append("late", tokens, is_durable=True)
    await lull(rig)

    assert dormant(rig) == {"c", "d", "late"}
    assert set(rig.cache.ledger.sleep.dormant) <= set(range(4))
    assert await rig.read("late") == expected(tokens)
    await rig.check()
    await rig.close()


@pytest.mark.parametrize("name", RANKED)
def test_sleepers_that_are_woken_rank_as_they_did(name: str) -> None:
    """Behind one another by their last use, and behind all that was not used since the start."""
    policy, facts = RANKED[name](Capacities(0, 1 << 20)), Facts(1 << 12, 1, 1 << 12, 64.0)
    policy.recalled(b"z", facts, 5.0, is_watched=False)
    for number, uid in enumerate((b"c", b"b", b"a")):
        policy.arrived(uid, float(number))
        policy.idle(uid, facts, float(number))
        policy.placed(uid, Level.BELOW)
    told = {uid: policy.slept(uid) for uid in (b"a", b"b", b"c")}
    for uid, idle_s in told.items():
        policy.recalled(uid, facts, idle_s, is_watched=False)

    order = sorted((b"a", b"b", b"c", b"z"), key=lambda uid: policy.rank(uid) or ())
    assert order == [b"z", b"c", b"b", b"a"]
