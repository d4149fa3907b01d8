"""Joining: what grows token by token comes to lie in few segments, whatever else happens to it meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import KV, SLOT_BYTES, TENANT, DiskRig, MemoryRig, Rig, Token, Writer, expected
from fakes import Operation

from ctxcache.cache import joining
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.limits import DEFAULT_WATERMARKS
from ctxcache.errors import TierFailure

A_PART = replace(DEFAULT_WATERMARKS, longest=0.17)
ARENA_SEGMENTS = 60
LONGEST = 1024
"""Tokens of the longest segment that such a part of the arena takes."""


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """Over files and a database; a session of more than four segments is looked at."""
    made = DiskRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(400,), many_segments=4)
    made.watermarks = A_PART
    await made.open()
    yield made
    await made.check()
    await made.close()


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[MemoryRig]:
    """Over stores in memory, which can be stopped and made to fail."""
    made = MemoryRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(400,), many_segments=4)
    made.watermarks = A_PART
    await made.open()
    yield made
    await made.check()
    await made.close()


def segments_of(rig: Rig, session_id: str) -> list[Segment]:
    """Those that a session lists."""
    return list(rig.cache.ledger.find(TENANT, session_id).segments)


def lengths_of(rig: Rig, session_id: str) -> list[int]:
    """Rows of each of its segments."""
    return [one.row_count for one in segments_of(rig, session_id)]


async def grow(rig: Rig, session_id: str, writer: Writer, count: int) -> list[Token]:
    """Append so many tokens, of which the store does not know beforehand, and make them durable."""
    await rig.create(session_id)
    tokens = writer.make(count)
    await rig.append(session_id, tokens, is_durable=True)
    assert max(lengths_of(rig, session_id)) == 64
    return tokens


async def test_short_segments_become_one(rig: DiskRig, writer: Writer) -> None:
    """Tokens, keys, space, and what a start finds, are as before; the tail goes on to grow."""
    tokens = await grow(rig, "a", writer, LONGEST + 300)
    generation = rig.cache.sessions.get(TENANT, "a").generation
    await rig.cache.joining.turn()
    assert lengths_of(rig, "a") == [LONGEST, 64, 64, 64, 64, 44]
    assert rig.cache.sessions.get(TENANT, "a").generation == generation
    tokens += (more := writer.make(30))
    await rig.append("a", more, is_durable=True)
    for begun_anew in (False, True):
        if begun_anew:
            await rig.crash()
        assert await rig.read("a") == expected(tokens)
        assert await rig.read("a", 1000, 1100) == expected(tokens[1000:1100])
        for count in (64, 640, LONGEST, LONGEST + 128, len(tokens)):
            assert (await rig.match([*tokens[:count], *writer.make(64)])).token_count == count - count % 64
        await rig.check()
    assert lengths_of(rig, "a")[0] == LONGEST


async def test_a_short_session_is_left_as_it_is(rig: DiskRig, writer: Writer) -> None:
    """It costs little: its rows are written once."""
    rig.cache.ledger.many_segments = 17
    await grow(rig, "a", writer, LONGEST + 44)
    await rig.cache.joining.turn()
    assert len(lengths_of(rig, "a")) == 17


async def test_what_may_be_written_unasked_bounds_it(rig: DiskRig, writer: Writer) -> None:
    """A device that is to last is not written twice as fast."""
    tokens = await grow(rig, "a", writer, 2 * LONGEST + 300)
    allowance = rig.cache.write_behind.allowance
    allowance.bytes_per_s = SLOT_BYTES
    rig.clock.advance(seconds=1)
    await rig.cache.joining.join(rig.cache.ledger.find(TENANT, "a"))
    assert lengths_of(rig, "a").count(LONGEST) == 1
    rig.clock.advance(seconds=60)
    await rig.cache.joining.join(rig.cache.ledger.find(TENANT, "a"))
    assert lengths_of(rig, "a").count(LONGEST) == 2
    assert await rig.read("a") == expected(tokens)


async def test_appends_of_every_length_are_joined(rig: DiskRig, writer: Writer) -> None:
    """Turns of a conversation, each of which fills segments of its own lengths."""
    await rig.create("a")
    tokens: list[Token] = []
    for count in (64, 128, 64, 256, 256, 128, 128, 512, 20):
        tokens += (more := writer.make(count))
        await rig.append("a", more, is_durable=True, is_coming=True)
    await rig.cache.joining.turn()
    assert lengths_of(rig, "a") == [LONGEST, 512, 20]
    assert await rig.read("a") == expected(tokens)


async def test_a_session_and_its_forks_are_joined_together(rig: DiskRig, writer: Writer) -> None:
    """All list the long segment, which takes its bytes once, and part behind it; a restart finds the same."""
    tokens = await grow(rig, "a", writer, LONGEST + 128)
    await rig.fork("a", "b", LONGEST + 128)
    await rig.fork("b", "c", LONGEST)
    await rig.cache.joining.join(rig.cache.ledger.find(TENANT, "b"))
    assert lengths_of(rig, "a") == lengths_of(rig, "b") == [LONGEST, 64, 64]
    assert lengths_of(rig, "c") == [LONGEST]
    assert len({segments_of(rig, name)[0] for name in "abc"}) == 1
    more = writer.make(40)
    await rig.append("b", more, is_durable=True)
    for begun_anew in (False, True):
        if begun_anew:
            await rig.crash()
        assert await rig.read("a") == expected(tokens)
        assert await rig.read("b") == expected([*tokens, *more])
        assert await rig.read("c") == expected(tokens[:LONGEST])
        assert (await rig.match(tokens)).token_count == LONGEST + 128
        assert len({segments_of(rig, name)[0] for name in "abc"}) == 1
        await rig.check()
    await rig.delete("b")
    await rig.truncate("a", (1000, 1010))
    await rig.crash()
    assert await rig.read("a") == expected([*tokens[:1000], *tokens[1010:]])
    assert await rig.read("c") == expected(tokens[:LONGEST])


async def test_what_more_sessions_list_than_one_record_takes_stays(
    rig: DiskRig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records are written at once, and others wait for the event loop meanwhile."""
    await grow(rig, "a", writer, LONGEST)
    await rig.fork("a", "b", LONGEST)
    session = rig.cache.ledger.find(TENANT, "a")
    with monkeypatch.context() as patched:
        patched.setattr(joining, "LISTINGS_LIMIT", 2 * LONGEST // 64 - 1)
        await rig.cache.joining.join(session)
        assert len(lengths_of(rig, "a")) == LONGEST // 64
    with monkeypatch.context() as patched:
        patched.setattr(joining, "KIN_LIMIT", 1)
        await rig.cache.joining.join(session)
        assert len(lengths_of(rig, "a")) == LONGEST // 64
    await rig.cache.joining.join(session)
    assert lengths_of(rig, "a") == lengths_of(rig, "b") == [LONGEST]


async def test_sessions_that_want_other_copies_are_not_joined(rig: DiskRig, writer: Writer) -> None:
    """The long segment would have too few for one of them."""
    await grow(rig, "a", writer, LONGEST)
    await rig.fork("a", "b", LONGEST)
    rig.cache.ledger.find(TENANT, "b").copies = 2
    await rig.cache.joining.join(rig.cache.ledger.find(TENANT, "a"))
    assert len(lengths_of(rig, "a")) == LONGEST // 64
    rig.cache.ledger.find(TENANT, "b").copies = 1


async def test_what_others_show_in_part_or_what_was_cut_stays(rig: DiskRig, writer: Writer) -> None:
    """A fork shows some rows of the same segments; of a cut segment not every row is there."""
    tokens = await grow(rig, "a", writer, LONGEST + 64)
    await rig.fork("a", "b", 500)
    await rig.cache.joining.turn()
    assert set(lengths_of(rig, "a")) == {64}
    await rig.delete("b")
    await rig.truncate("a", (100, 120))
    tokens = [*tokens[:100], *tokens[120:]]
    tokens += (more := writer.make(128))
    await rig.append("a", more, is_durable=True)
    await rig.cache.joining.turn()
    assert lengths_of(rig, "a")[0] == 64
    assert await rig.read("a") == expected(tokens)


async def test_a_reader_keeps_what_it_holds(slow: MemoryRig, writer: Writer) -> None:
    """A lease that began while segments are joined shows the same bytes to its end."""
    tokens = await grow(slow, "a", writer, LONGEST + 300)
    written_count = slow.ssd.counts[Operation.WRITE]
    gate = slow.ssd.hold(Operation.WRITE)
    under_way = asyncio.ensure_future(slow.cache.joining.turn())
    await slow.reached(Operation.WRITE, written_count + 1)
    lease = await slow.acquire("a")
    gate.set()
    await under_way
    assert lengths_of(slow, "a")[0] == LONGEST
    assert slow.leased(lease) == expected(tokens)
    slow.cache.leases.release(lease.lease_id)
    await slow.check()
    assert await slow.read("a") == expected(tokens)
    await slow.crash()
    assert lengths_of(slow, "a")[0] == LONGEST
    assert await slow.read("a") == expected(tokens)


@pytest.mark.parametrize("change", ["cut", "fork", "whole fork", "delete", "more"])
async def test_what_changes_meanwhile_decides(slow: MemoryRig, writer: Writer, change: str) -> None:
    """A session that was cut, shared in part or deleted is not joined, and nothing is left of the copy."""
    tokens = await grow(slow, "a", writer, LONGEST + 300)
    written_count = slow.ssd.counts[Operation.WRITE]
    gate = slow.ssd.hold(Operation.WRITE)
    under_way = asyncio.ensure_future(slow.cache.joining.turn())
    await slow.reached(Operation.WRITE, written_count + 1)
    if change == "cut":
        await slow.truncate("a", (10, 20))
        tokens = [*tokens[:10], *tokens[20:]]
    elif change == "fork":
        await slow.fork("a", "b", 700)
    elif change == "whole fork":
        await slow.fork("a", "b", LONGEST + 200)
    elif change == "delete":
        await slow.delete("a")
    else:
        tokens += (more := writer.make(40))
        await slow.append("a", more)
    gate.set()
    await under_way
    await slow.check()
    if change == "delete":
        assert not slow.names()
        return
    assert (lengths_of(slow, "a")[0] == LONGEST) == (change in ("more", "whole fork"))
    fork = {"fork": tokens[:700], "whole fork": tokens[: LONGEST + 200]}.get(change)
    for begun_anew in (False, True):
        if begun_anew and change == "more":
            break
        if begun_anew:
            await slow.crash()
        assert await slow.read("a") == expected(tokens)
        if fork is not None:
            assert await slow.read("b") == expected(fork)


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.SYNC])
async def test_a_device_that_refuses_costs_nothing(
    slow: MemoryRig, writer: Writer, operation: Operation
) -> None:
    """The short segments are there as before, also after a crash."""
    tokens = await grow(slow, "a", writer, LONGEST + 300)
    slow.ssd.fail(operation)
    with pytest.raises(TierFailure):
        await slow.cache.joining.turn()
    assert set(lengths_of(slow, "a")) == {64, 44}
    await slow.check()
    await slow.crash()
    assert await slow.read("a") == expected(tokens)


async def test_a_crash_leaves_the_short_or_the_long_ones(slow: MemoryRig, writer: Writer) -> None:
    """Before the record the one, after it the other: all tokens are there each time."""
    tokens = await grow(slow, "a", writer, LONGEST + 300)
    written_count = slow.ssd.counts[Operation.WRITE]
    gate = slow.ssd.hold(Operation.WRITE)
    under_way = asyncio.ensure_future(slow.cache.joining.turn())
    await slow.reached(Operation.WRITE, written_count + 1)
    crashed = slow.ssd.crash(), slow.metadata.crash()
    gate.set()
    await under_way
    assert lengths_of(slow, "a")[0] == LONGEST
    assert await slow.read("a") == expected(tokens)
    await slow.cache.drain()
    slow.ssd, slow.metadata = crashed
    await slow.open()
    assert lengths_of(slow, "a")[0] == 64
    assert await slow.read("a") == expected(tokens)


async def test_bytes_that_memory_did_not_keep_are_not_made_durable(slow: MemoryRig, writer: Writer) -> None:
    """The writer's checksum of a row decides: the short segment on SSD is right, and stays."""
    tokens = await grow(slow, "a", writer, LONGEST + 300)
    segment = segments_of(slow, "a")[5]
    assert segment.memory is not None
    slow.arena.view(segment.memory)[segment.layout.rows(KV, 9, 10).start] ^= 1
    await slow.cache.joining.turn()
    assert LONGEST not in lengths_of(slow, "a")
    await slow.crash()
    assert await slow.read("a") == expected(tokens)


@pytest.mark.parametrize("tier", ["memory", "below"])
async def test_no_room_in_one_piece_changes_nothing(rig: DiskRig, writer: Writer, tier: str) -> None:
    """Nothing is evicted to join segments, and they are joined once there is room."""
    tokens = await grow(rig, "a", writer, LONGEST + 300)
    shelf = getattr(rig.cache.ledger, tier)
    taken = []
    while (slot := shelf.take(SLOT_BYTES)) is not None:
        taken.append(slot)
    await rig.cache.joining.turn()
    assert set(lengths_of(rig, "a")) == {64, 44}
    for slot in taken:
        shelf.give(slot)
    await rig.check()
    tokens += (more := writer.make(64))
    await rig.append("a", more, is_durable=True)
    await rig.cache.joining.turn()
    assert lengths_of(rig, "a")[0] == LONGEST
    assert await rig.read("a") == expected(tokens)


@pytest.mark.parametrize("lost", [0, 1])
async def test_both_copies_of_a_long_segment_are_synced(tmp_path: Path, writer: Writer, lost: int) -> None:
    """A power cut behind the join, and then the loss of either path, cost nothing."""
    rig = MemoryRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(400, 400), many_segments=4)
    rig.watermarks, rig.copies = A_PART, 2
    await rig.open()
    tokens = await grow(rig, "a", writer, LONGEST + 300)
    await rig.cache.joining.turn()
    assert lengths_of(rig, "a")[0] == LONGEST
    await rig.crash()
    rig.ssd.lose(lost)
    await rig.cache.devices.look()

    assert await rig.read("a") == expected(tokens)
    await rig.close()
