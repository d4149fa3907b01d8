"""Starting over what is there: what does not fit together is cut, and never harms what does."""

from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, DiskRig, MemoryRig, Token, Writer, expected
from fakes import MemoryTier

from ctxcache.errors import DataDirectoryUnusable, SessionNotFound
from ctxcache.storage.metadata.base import Changes


async def filled(rig: MemoryRig | DiskRig, name: str, token_count: int, tag: int = 1) -> list[Token]:
    """A session with that many tokens, durable."""
    tokens = Writer(tag).make(token_count)
    await rig.create(name)
    await rig.append(name, tokens, is_durable=True)
    return tokens


async def test_an_orderly_end_keeps_everything(disk_rig: DiskRig) -> None:
    """Tokens that were only in memory are there after a restart, and so is the session's state."""
    tokens = Writer(1).make(100)
    await disk_rig.create("a", is_pinned=True)
    await disk_rig.append("a", tokens)
    await disk_rig.truncate("a", (10, 20))
    await disk_rig.fork("a", "b", 50)
    before = disk_rig.cache.sessions.get(TENANT, "a")
    await disk_rig.restart()
    after = disk_rig.cache.sessions.get(TENANT, "a")

    assert await disk_rig.read("a") == expected(tokens[:10] + tokens[20:])
    assert await disk_rig.read("b") == expected((tokens[:10] + tokens[20:])[:50])
    assert after == before._replace(
        memory_bytes=0,
        durable_bytes=after.durable_bytes,
        generation=after.generation,
        durable_token_count=90,
    )
    await disk_rig.check()


async def test_sessions_leave_in_the_order_of_their_uses_after_a_restart(tmp_path: Path) -> None:
    """One that was used since leaves after those that were not."""
    rig = MemoryRig(tmp_path, ssd_segments=(3,))
    await rig.open()
    for name in ("a", "b", "c"):
        await filled(rig, name, SEGMENT_TOKENS)
        rig.clock.advance(seconds=1)
    await rig.restart()
    await rig.read("a")
    rig.clock.advance(seconds=1)
    await filled(rig, "d", SEGMENT_TOKENS)

    assert rig.names() == {"a", "c", "d"}
    await rig.check()
    await rig.close()


async def test_a_session_that_was_held_leaves_in_its_turn_afterwards(tmp_path: Path) -> None:
    """It is passed over while its segment is held, and comes up again when that is over."""
    rig = MemoryRig(tmp_path, ssd_segments=(3,))
    await rig.open()
    for name in ("a", "b", "c"):
        await filled(rig, name, SEGMENT_TOKENS)
        rig.clock.advance(seconds=1)
    (segment,) = rig.cache.ledger.find(TENANT, "a").segments
    rig.cache.ledger.held(segment)
    await filled(rig, "d", SEGMENT_TOKENS)
    assert rig.names() == {"a", "c", "d"}
    rig.cache.ledger.released(segment)
    await filled(rig, "e", SEGMENT_TOKENS)

    assert rig.names() == {"c", "d", "e"}
    await rig.check()
    await rig.close()


async def test_nothing_ranks_of_a_session_that_is_gone(rig: MemoryRig) -> None:
    """Also while SSD is never full, and no session is looked for that could leave."""
    await filled(rig, "a", SEGMENT_TOKENS)
    uid = rig.cache.ledger.find(TENANT, "a").uid
    assert uid in rig.cache.ledger.evictable
    await rig.delete("a")

    assert uid not in rig.cache.ledger.evictable


async def test_a_crash_keeps_a_right_beginning(disk_rig: DiskRig) -> None:
    """Durable tokens are there; what came after them is there from its beginning on, or not at all."""
    tokens = await filled(disk_rig, "a", 70)
    await disk_rig.append("a", Writer(2).make(100))
    await disk_rig.crash()

    assert await disk_rig.read("a") == expected(tokens)
    after = Writer(3).make(70)
    await disk_rig.append("a", after, is_durable=True)
    await disk_rig.crash()
    assert await disk_rig.read("a") == expected([*tokens, *after])
    await disk_rig.check()


async def test_a_missing_segment_record_ends_the_session_before_it(rig: MemoryRig) -> None:
    """A gap is never read over, the segments behind it are given back, and it stays so."""
    tokens = await filled(rig, "a", 4 * SEGMENT_TOKENS)
    second = rig.cache.ledger.find(TENANT, "a").segments[1]
    await rig.metadata.commit(Changes(deleted_segment_ids=[second.segment_id]), is_durable=True)
    for _ in range(2):
        await rig.crash()
        assert await rig.read("a") == expected(tokens[:SEGMENT_TOKENS])
        assert rig.cache.ledger.below.used_bytes == SLOT_BYTES
        await rig.check()
    after = Writer(2).make(10)
    await rig.append("a", after)

    assert await rig.read("a") == expected([*tokens[:SEGMENT_TOKENS], *after])


async def test_two_records_of_one_slot_cost_one_session_and_no_space(rig: MemoryRig) -> None:
    """A slot claimed twice belongs to one.

    The other session ends there and gives back only what was its own.
    """
    await filled(rig, "a", 3 * SEGMENT_TOKENS)
    await filled(rig, "b", 3 * SEGMENT_TOKENS, tag=2)
    taken, wrong = (next(iter(rig.cache.ledger.find(TENANT, n).segments)) for n in ("a", "b"))
    record = next(r for r in rig.metadata.segments() if r.segment_id == wrong.segment_id)
    claimed = next(r for r in rig.metadata.segments() if r.segment_id == taken.segment_id).slot
    await rig.metadata.commit(Changes(segments=[record._replace(slot=claimed)]), is_durable=True)
    await rig.crash()
    await rig.check()

    assert sorted(rig.token_count(name) for name in ("a", "b")) == [0, 3 * SEGMENT_TOKENS]
    assert rig.cache.ledger.below.used_bytes == 3 * SLOT_BYTES


async def test_a_path_that_nobody_named_is_refused(rig: MemoryRig) -> None:
    """With fewer SSD paths than records name nothing is opened, and nothing is lost for it."""
    tokens = {name: await filled(rig, name, 2 * SEGMENT_TOKENS) for name in ("a", "b")}
    await rig.close()
    both, rig.ssd = rig.ssd, MemoryTier([SLOT_BYTES * rig.ssd_segments[0]])
    with pytest.raises(DataDirectoryUnusable, match="name SSD directory number 1, which is missing"):
        await rig.open()
    rig.ssd = both
    await rig.open()

    assert all([await rig.read(name) == expected(tokens[name]) for name in ("a", "b")])


async def test_a_record_of_tokens_that_no_segment_holds_is_cut(rig: MemoryRig) -> None:
    """A session that claims more than its segments hold is cut to what they do hold."""
    tokens = await filled(rig, "a", 70)
    record = next(rig.metadata.sessions())
    await rig.metadata.commit(
        Changes(sessions=[replace(record, live=((0, 90),), log_end=90)]), is_durable=True
    )
    await rig.crash()
    await rig.check()

    assert await rig.read("a") == expected(tokens)


async def test_sessions_that_expired_meanwhile_are_gone(disk_rig: DiskRig) -> None:
    """Time passes while the server does not run."""
    await disk_rig.create("a", ttl_s=10)
    await disk_rig.create("b", ttl_s=100)
    await disk_rig.close()
    disk_rig.clock.advance(seconds=50)
    await disk_rig.open()

    assert disk_rig.names() == {"b"}
    assert disk_rig.cache.ledger.session_count == 1


async def test_a_sliding_expiry_goes_on_after_a_crash(disk_rig: DiskRig) -> None:
    """An access that upkeep has written down counts after a restart."""
    await filled(disk_rig, "a", 10)
    disk_rig.clock.advance(seconds=3000)
    await disk_rig.read("a")
    await disk_rig.cache.sessions.save_access_times()
    await disk_rig.crash()
    disk_rig.clock.advance(seconds=3000)
    await disk_rig.cache.sessions.expire_due()

    assert disk_rig.token_count("a") == 10
    disk_rig.clock.advance(seconds=600)
    await disk_rig.cache.sessions.expire_due()
    with pytest.raises(SessionNotFound):
        disk_rig.token_count("a")
