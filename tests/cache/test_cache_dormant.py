"""Sessions that nobody has used since the start: the store answers as if all of them were known."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

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

from ctxcache.core.ledger import ledger
from ctxcache.core.ledger.rankings import Evictable
from ctxcache.core.ledger.session import SessionView
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.policy import Capacities, Facts, Ranked
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
    return {name for names in rig.cache.ledger.dormant.names.values() for name in names}


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
        "names": {tenant: list(ledger.names(tenant)) for tenant in sorted(ledger.tenants())},
        "of the model": ledger.model_session_count(TENANT, MODEL.model_id),
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
        reason = ""
        try:
            await use(rig)
        except CacheError as error:
            reason = error.reason
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


async def test_sessions_leave_by_their_last_use(tmp_path: Path) -> None:
    """One by one, as room is needed; one that was used since, though it was the coldest, goes last."""
    for make_policy in (LeastRecentlyUsed, by_value):
        rig = MemoryRig(tmp_path, ssd_segments=(2 * COUNT,), make_policy=make_policy, last_used=0)
        await rig.open()
        await filled(rig)
        await rig.restart()
        await rig.read("a")
        gone = []
        for number in range(4):
            before = rig.names()
            await rig.create(f"new{number}")
            await rig.append(f"new{number}", Writer(50 + number).make(2 * SEGMENT_TOKENS), is_durable=True)
            gone += sorted(before - rig.names())
            rig.clock.advance(seconds=1)
            await rig.check()
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
    monkeypatch.setattr(ledger, "WAKES", 3)
    await filled(rig)
    await rig.restart()
    count = len(dormant(rig))
    assert count == COUNT - 1
    monkeypatch.setattr(Evictable, "__contains__", lambda *_: False)

    left = []
    for _ in range(3):
        rig.cache.ledger._let_coldest_in(None)
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
