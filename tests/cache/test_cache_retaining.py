"""Retention and soft pins, over real tiers: who stays longer, and that nothing is ever wedged."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, DiskRig, Token, Writer, expected

from ctxcache.core.ledger.retaining import Grant, Retaining
from ctxcache.core.limits import Limits

SECOND_NS = 10**9
LIMITS = Limits(
    lease_share=1, reservation_share=1, client_share=1, room_wait_ns=0,
    retention_share=0.5, pin_share=0.5, retention_ns=100 * SECOND_NS,
)  # fmt: skip


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """16 segments on SSD, 8 in DRAM; half of each may be retained, or pinned, for 100 s."""
    rig = DiskRig(tmp_path, arena_segments=8, ssd_segments=(16,), limits=LIMITS)
    await rig.open()
    yield rig
    await rig.check()
    await rig.close()


async def _store(rig: DiskRig, name: str, segment_count: int, tag: int = 1) -> list[Token]:
    await rig.create(name)
    tokens = Writer(tag).make(segment_count * SEGMENT_TOKENS)
    for begin in range(0, len(tokens), 4 * SEGMENT_TOKENS):
        await rig.append(name, tokens[begin : begin + 4 * SEGMENT_TOKENS], is_durable=True)
    rig.clock.advance(ns=SECOND_NS)
    return tokens


def _retention(rig: DiskRig) -> Retaining:
    return rig.cache.placement.retaining


def _uid(rig: DiskRig, name: str) -> bytes:
    return rig.cache.sessions.get(rig.tenant, name).uid


def _retain(
    rig: DiskRig, name: str, segment_count: int, seconds: float = 50, priority: int = 0
) -> Grant | None:
    return _retention(rig).retain(
        _uid(rig, name), segment_count * SLOT_BYTES, _now_s(rig) + seconds, priority
    )


def _pin(rig: DiskRig, name: str, segment_count: int, seconds: float = 50, priority: int = 0) -> Grant | None:
    return _retention(rig).pin(_uid(rig, name), segment_count * SLOT_BYTES, _now_s(rig) + seconds, priority)


def _now_s(rig: DiskRig) -> float:
    return rig.clock.monotonic_ns() / SECOND_NS


def _segments_in_dram(rig: DiskRig, name: str) -> int:
    return rig.cache.sessions.get(rig.tenant, name).memory_bytes // SLOT_BYTES


async def test_what_is_retained_leaves_after_what_is_not(small: DiskRig) -> None:
    """The coldest stays while others can leave, and its bytes are right."""
    tokens = await _store(small, "kept", 4)
    assert _retain(small, "kept", 4)
    for number in range(12):
        await _store(small, f"s{number}", 4, tag=number + 2)
    assert small.names() == {"kept", "s9", "s10", "s11"}
    assert await small.read("kept") == expected(tokens)


async def test_retention_ends_by_itself(small: DiskRig) -> None:
    """When its time is over a session is as all others are, without anybody asking."""
    await _store(small, "kept", 4)
    for number in range(3):
        await _store(small, f"s{number}", 4, tag=number + 2)
    assert _retain(small, "kept", 4, seconds=10)
    small.clock.advance(ns=11 * SECOND_NS)
    small.cache.placement.passed()
    await _store(small, "new", 1)
    assert small.names() == {"s0", "s1", "s2", "new"}


async def test_nothing_is_granted_beyond_the_longest_time(small: DiskRig) -> None:
    """The answer says until when."""
    await _store(small, "kept", 1)
    granted = _retain(small, "kept", 3, seconds=1e9)
    assert granted == Grant(3 * SLOT_BYTES, _now_s(small) + 100)


async def test_a_session_is_granted_whole_or_not_at_all(small: DiskRig) -> None:
    """Fewer bytes than it has, more than the budget, a session that is not there: nothing."""
    await _store(small, "kept", 4)
    assert _retain(small, "kept", 3) is None
    assert _retain(small, "kept", 9) is None
    assert _retention(small).retain(bytes(16), SLOT_BYTES, _now_s(small) + 1, 0) is None
    assert _retain(small, "kept", 8)


async def test_what_grows_past_its_grant_asks_for_more_or_loses_it(small: DiskRig) -> None:
    """Growth counts when the turn is over; a session that the budget does not take is as all others are."""
    await _store(small, "kept", 4)
    await _store(small, "other", 2)
    assert _retain(small, "kept", 4)
    assert _retain(small, "other", 2)
    await small.append("kept", Writer(3).make(2 * SEGMENT_TOKENS), is_durable=True)
    assert _retention(small).used_bytes(small.tenant) == (8 * SLOT_BYTES, 0)

    await small.append("kept", Writer(4).make(1), is_durable=True)
    assert _retention(small).used_bytes(small.tenant) == (2 * SLOT_BYTES, 0)
    assert not _retention(small).store_level(_uid(small, "kept"))


async def test_whoever_is_gone_has_no_grant(small: DiskRig) -> None:
    """Deleted, expired or evicted: the budget is there for others."""
    for name in ("deleted", "expired"):
        await _store(small, name, 4)
        assert _retain(small, name, 4)
    await small.delete("deleted")
    small.clock.advance(ns=3600 * SECOND_NS)
    await small.cache.sessions.expire_due()
    assert _retention(small).used_bytes(small.tenant) == (0, 0)

    await _store(small, "evicted", 8)
    assert _retain(small, "evicted", 8)
    await _store(small, "new", 16, tag=2)
    assert small.names() == {"new"}
    assert _retention(small).used_bytes(small.tenant) == (0, 0)


async def test_what_is_pinned_stays_in_dram(small: DiskRig) -> None:
    """Others' reads take each other's place; after its release the pinned session goes first."""
    tokens = await _store(small, "pinned", 3)
    assert _pin(small, "pinned", 3)
    for number in range(3):
        await _store(small, f"s{number}", 3, tag=number + 2)
    for _ in range(2):
        for number in range(3):
            await small.read(f"s{number}")
    assert _segments_in_dram(small, "pinned") == 3
    assert await small.read("pinned") == expected(tokens)

    _retention(small).release(_uid(small, "pinned"))
    for number in (0, 1, 2):
        await small.read(f"s{number}")
    assert _segments_in_dram(small, "pinned") == 0


async def test_pins_never_wedge_the_store(small: DiskRig) -> None:
    """With everything pinned and retained that the budgets take, and the rest in use, writes go through."""
    for number in range(2):
        await _store(small, f"s{number}", 4, tag=number + 2)
        assert _pin(small, f"s{number}", 4, priority=100) or number
        assert _retain(small, f"s{number}", 4, priority=100)
    tokens = await _store(small, "large", 16, tag=9)
    assert small.names() == {"large"}
    assert await small.read("large") == expected(tokens)


async def test_what_is_pinned_leaves_dram_when_nothing_else_can(small: DiskRig) -> None:
    """A lease of as much as DRAM takes finds room, whatever is pinned."""
    await _store(small, "large", 8, tag=2)
    await _store(small, "pinned", 4)
    assert _pin(small, "pinned", 4, priority=100)
    lease = await small.acquire("large")
    assert len(small.leased(lease)) > 0
    assert _segments_in_dram(small, "pinned") == 0
    assert small.names() == {"large", "pinned"}
    small.cache.leases.release(lease.lease_id)
