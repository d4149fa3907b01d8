"""Watermarks, dirty bounds and write-behind, over a clock that is moved by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Writer, counted_lines, expected
from fakes import Operation

from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import Watermarks
from ctxcache.errors import CapacityExceeded
from ctxcache.server.upkeep import Upkeep

ARENA_SEGMENTS = 32
MARKS = Watermarks(low=2 / 32, high=4 / 32, dirty=8 / 32, dirty_limit=24 / 32, writer_wait_s=0)
MANY_SESSIONS = 50_000
PATIENCE_S = 30.0
Make = Callable[..., Awaitable[MemoryRig]]


@pytest.fixture
def writer() -> Writer:
    """Somebody who writes."""
    return Writer(1)


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Make]:
    """Caches with room for 32 segments, by their watermarks."""
    rigs = []

    async def make(marks: Watermarks = MARKS) -> MemoryRig:
        rig = MemoryRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(512,), watermarks=marks)
        await rig.open()
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        await rig.check()
        rig.arena.close()


def free_segments(rig: MemoryRig) -> int:
    """Slots of the arena that are free."""
    return rig.cache.ledger.memory.free_bytes // SLOT_BYTES


def dirty_segments(rig: MemoryRig) -> int:
    """Slots with rows that SSD has not."""
    segments = rig.cache.ledger.segments()
    return sum(segment.is_unwritten for segment in segments)


def durable(rig: MemoryRig, session_id: str) -> int:
    """Tokens of a session that are on SSD."""
    return rig.cache.sessions.get(TENANT, session_id).durable_token_count


# -- room ------------------------------------------------------------------------------------------------


async def test_the_free_share_is_kept_under_churn(large: Make, writer: Writer) -> None:
    """After every turn, whatever was written and read since, the low watermark is free."""
    rig = await large()
    for number in range(40):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make((number % 7 + 1) * SEGMENT_TOKENS))
        await rig.read(f"s{number // 2}")
        await Upkeep(rig.cache).turn()
        assert free_segments(rig) >= MARKS.low * ARENA_SEGMENTS
        await rig.check()


async def test_room_is_made_up_to_the_high_watermark(large: Make, writer: Writer) -> None:
    """Above the low watermark everything stays; below it the coldest leave until the high one is free."""
    rig = await large()
    await rig.create("cold")
    await rig.create("hot")
    await rig.append("cold", writer.make(15 * SEGMENT_TOKENS), is_durable=True)
    await rig.append("hot", writer.make(15 * SEGMENT_TOKENS), is_durable=True)
    await Upkeep(rig.cache).turn()
    free_above = free_segments(rig)
    await rig.append("hot", writer.make(SEGMENT_TOKENS), is_durable=True)
    await Upkeep(rig.cache).turn()

    assert free_above == 2
    assert free_segments(rig) == 4
    assert rig.cache.sessions.get(TENANT, "hot").memory_bytes == 16 * SLOT_BYTES


async def test_what_was_leased_leaves_after_the_lease(large: Make, writer: Writer) -> None:
    """Segments that were passed over because they were held are found when they are not."""
    rig = await large()
    await rig.create("leased")
    await rig.append("leased", writer.make(31 * SEGMENT_TOKENS), is_durable=True)
    lease = await rig.acquire("leased")
    await Upkeep(rig.cache).turn()
    free_leased = free_segments(rig)
    rig.cache.leases.release(lease.lease_id)
    await Upkeep(rig.cache).turn()

    assert free_leased == 1
    assert free_segments(rig) == 4


# -- the bound on what is dirty ----------------------------------------------------------------------------


async def fill(rig: MemoryRig, writer: Writer, count: int) -> int:
    """Let so many sessions write two segments each; how many of them could."""
    done = 0
    for number in range(count):
        await rig.create(f"s{number}")
        try:
            await rig.append(f"s{number}", writer.make(2 * SEGMENT_TOKENS))
            done += 1
        except CapacityExceeded as error:
            if error.facts["tier"] != "DRAM" or error.facts["needed_bytes"] > error.facts["limit_bytes"]:  # type: ignore[operator]
                raise
        assert dirty_segments(rig) <= MARKS.dirty_limit * ARENA_SEGMENTS
    return done


async def test_the_dirty_bound_holds_while_the_device_stands_still(large: Make, writer: Writer) -> None:
    """Writers fill the arena up to the limit, are refused there, and go on when the device does."""
    rig = await large()
    gate = rig.ssd.hold(Operation.WRITE)
    done = await fill(rig, writer, 20)
    gate.set()
    await rig.cache.drain()
    await rig.append("s19", writer.make(2 * SEGMENT_TOKENS))

    assert done == 12
    assert rig.cache.state.counters.delayed_write_count == 8


async def test_reservations_count_before_they_are_committed(large: Make, writer: Writer) -> None:
    """Writers that all reserve first and commit later do not get past the limit."""
    rig = await large()
    rig.ssd.hold(Operation.WRITE)
    opened = []
    for number in range(20):
        await rig.create(f"s{number}")
        try:
            opened.append(await rig.reserve(f"s{number}", 2 * SEGMENT_TOKENS))
        except CapacityExceeded:
            break
    for reservation in opened:
        tokens = writer.make(2 * SEGMENT_TOKENS)
        rig.place(reservation, 0, tokens)
        await rig.cache.appends.commit(reservation, len(tokens), is_durable=False, keep_open=False)

    assert len(opened) == 12
    assert dirty_segments(rig) == 24
    rig.ssd.hold(Operation.WRITE).set()


async def test_tails_that_grow_again_count(large: Make, writer: Writer) -> None:
    """A token for each of many sessions with clean tails makes no more of them dirty than may be."""
    rig = await large()
    for number in range(30):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make(10), is_durable=True)
    gate = rig.ssd.hold(Operation.WRITE)
    refused = 0
    for number in range(30):
        try:
            await rig.append(f"s{number}", writer.make(1))
        except CapacityExceeded:
            refused += 1
    gate.set()

    assert refused == 6


async def test_a_writer_waits_for_the_device(large: Make, writer: Writer) -> None:
    """At the limit a writer waits, and goes on as soon as something is written."""
    rig = await large(Watermarks(dirty_limit=24 / 32, writer_wait_s=60))
    await rig.create("full")
    await rig.append("full", writer.make(24 * SEGMENT_TOKENS))
    await rig.create("next")
    gate = rig.ssd.hold(Operation.WRITE)
    tokens = writer.make(SEGMENT_TOKENS)
    waiting = asyncio.ensure_future(rig.append("next", tokens))
    await rig.reached(Operation.WRITE)
    was_waiting = not waiting.done()
    gate.set()
    await waiting

    assert was_waiting
    assert await rig.read("next") == expected(tokens)


async def test_room_that_a_hanging_device_has_to_make_is_refused(large: Make, writer: Writer) -> None:
    """A writer within the limit and a reader alike; both are served when the device goes on."""
    rig = await large(Watermarks(low=0, high=0, dirty_limit=1, writer_wait_s=0.05))
    tokens = {
        name: writer.make(count * SEGMENT_TOKENS)
        for name, count in (("cold", 1), ("held", 20), ("dirty", 12))
    }
    for name, made in tokens.items():
        await rig.create(name)
        await rig.append(name, made, is_durable=name != "dirty")
    lease = await rig.acquire("held")
    assert not free_segments(rig)
    assert not rig.cache.ledger.find(TENANT, "cold").segments[0].memory
    await rig.create("next")
    gate = rig.ssd.hold(Operation.WRITE)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(CapacityExceeded):
            await rig.reserve("next", 1)
        with pytest.raises(CapacityExceeded):
            await rig.acquire("cold")
    gate.set()
    await rig.cache.drain()
    await rig.append("next", writer.make(1))

    assert await rig.read("cold") == expected(tokens["cold"])
    rig.cache.leases.release(lease.lease_id)


async def test_what_is_larger_than_the_limit_can_be_written(large: Make, writer: Writer) -> None:
    """A context that takes more than the limit is written when all else is."""
    rig = await large(Watermarks(dirty=0.1, dirty_limit=0.25, writer_wait_s=60))
    await rig.create("before")
    await rig.append("before", writer.make(SEGMENT_TOKENS))
    await rig.create("large")
    tokens = writer.make(20 * SEGMENT_TOKENS)
    await rig.append("large", tokens)

    assert await rig.read("large") == expected(tokens)
    assert durable(rig, "before") == SEGMENT_TOKENS


async def test_much_that_is_dirty_is_written_tails_too(large: Make, writer: Writer) -> None:
    """Above the watermark the oldest tails are written at once, until it is reached."""
    rig = await large()
    for number in range(12):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make(10))
        rig.clock.advance(seconds=0.001)
    await Upkeep(rig.cache).turn()

    assert [durable(rig, f"s{number}") for number in range(12)] == [10] * 4 + [0] * 8


async def test_a_tail_that_a_writer_has_room_in_is_left_for_its_age(large: Make, writer: Writer) -> None:
    """With the next token it would be dirty again, and its slot stays: writing it makes no room.

    A session that rests is written, and so is the writer's once its rows are old or the writer is done.
    """
    rig = await large()
    names = [f"w{number}" for number in range(10)]
    writers = []
    for name in names:
        await rig.create(name)
        writers.append(await rig.reserve(name, 20))
        rig.place(writers[-1], 0, writer.make(10))
        await rig.cache.appends.commit(writers[-1], 10, is_durable=False, keep_open=True)
    rig.clock.advance(seconds=0.001)
    await rig.create("rests")
    await rig.append("rests", writer.make(10))
    for _ in range(3):
        await Upkeep(rig.cache).turn()
    young = [durable(rig, name) for name in (*names, "rests")]
    rig.cache.appends.release(writers[0])
    await Upkeep(rig.cache).turn()
    done = [durable(rig, name) for name in names]
    rig.clock.advance(seconds=30)
    await Upkeep(rig.cache).turn()

    assert young == [0] * 10 + [10]
    assert done == [10] + [0] * 9
    assert [durable(rig, name) for name in names] == [10] * 10
    for other in writers[1:]:
        rig.cache.appends.release(other)


async def test_write_behind_is_called_for_what_it_can_write(large: Make, writer: Writer) -> None:
    """More rows of a tail under its writer are nothing for it, however much is dirty.

    A segment that is new or full is, and so is a tail whose writer is done.
    """
    rig = await large()
    for number in range(10):
        await rig.create(f"w{number}")
        await rig.append(f"w{number}", writer.make(10))
    await rig.create("grows")
    reservation = await rig.reserve("grows", 2 * SEGMENT_TOKENS)
    rig.place(reservation, 0, writer.make(2 * SEGMENT_TOKENS))
    is_pressed, called = rig.cache.state.is_pressed, list[int]()
    for token_count in range(1, 2 * SEGMENT_TOKENS):
        is_pressed.clear()
        await rig.cache.appends.commit(reservation, token_count, is_durable=False, keep_open=True)
        if is_pressed.is_set():
            called.append(token_count)
    is_pressed.clear()
    rig.cache.appends.release(reservation)

    assert called == [1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1]
    assert is_pressed.is_set()


# -- age and rate ------------------------------------------------------------------------------------------


async def test_a_tail_is_durable_after_its_age(large: Make, writer: Writer) -> None:
    """A tail that no caller flushed survives a power cut once it is 30 seconds old.

    A growing tail waits till then.
    """
    rig = await large()
    await rig.create("a")
    tokens = writer.make(10)
    await rig.append("a", tokens)
    rig.clock.advance(seconds=29.9)
    await rig.append("a", more := writer.make(5))
    await Upkeep(rig.cache).turn()
    young = durable(rig, "a")
    rig.clock.advance(seconds=0.1)
    await Upkeep(rig.cache).turn()
    await rig.crash()

    assert young == 0
    assert await rig.read("a") == expected(tokens + more)


async def test_age_counts_from_the_oldest_row_that_is_not_written(large: Make, writer: Writer) -> None:
    """Rows that come after a flush have their own 30 seconds."""
    rig = await large()
    await rig.create("a")
    await rig.append("a", writer.make(10), is_durable=True)
    rig.clock.advance(seconds=20)
    await rig.append("a", writer.make(1))
    rig.clock.advance(seconds=29.9)
    await Upkeep(rig.cache).turn()
    young = durable(rig, "a")
    rig.clock.advance(seconds=0.1)
    await Upkeep(rig.cache).turn()

    assert (young, durable(rig, "a")) == (10, 11)


async def test_without_an_age_tails_stay(large: Make, writer: Writer) -> None:
    """0 means that no tail is written because of its age."""
    rig = await large(Watermarks(tail_age_ns=0))
    await rig.create("a")
    await rig.append("a", writer.make(10))
    rig.clock.advance(seconds=3000)
    await Upkeep(rig.cache).write_behind()

    assert durable(rig, "a") == 0


async def test_a_commit_that_failed_is_made_up_for(large: Make, writer: Writer) -> None:
    """Rows that are on SSD without a record are recorded when they are old, though no row is dirty."""
    rig = await large()
    await rig.create("a")
    await rig.append("a", writer.make(10))
    rig.ssd.fail(Operation.WRITE)
    rig.clock.advance(seconds=30)
    await Upkeep(rig.cache).turn()
    failed = durable(rig, "a")
    await Upkeep(rig.cache).turn()

    assert (failed, durable(rig, "a")) == (0, 10)


async def test_the_rate_of_write_behind_is_kept(large: Make, writer: Writer) -> None:
    """No more goes to SSD unasked than the rate allows, in any second; all of it does in the end."""
    rig = await large(Watermarks(write_behind_bytes_per_s=2 * SLOT_BYTES))
    for number in range(20):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make(SEGMENT_TOKENS))
    flushed = []
    for _ in range(40):
        await Upkeep(rig.cache).write_behind()
        flushed.append(rig.cache.state.counters.flushed_segment_count)
        rig.clock.advance(seconds=0.5)

    assert all(count <= 2 + i + 1 for i, count in enumerate(flushed))
    assert flushed[-1] == 20


# -- what a turn costs -------------------------------------------------------------------------------------


def add_clean_sessions(rig: MemoryRig, sources: Sequence[Session], count: int) -> None:
    """Sessions that share their segments with others, as forks do."""
    for number in range(count):
        source = sources[number % len(sources)]
        session = rig.cache.sessions._blank(
            TENANT,
            f"clean{number:06}",
            source.model_id,
            source.model_fingerprint,
            source.layout,
            source.expiration,
            live=source.live,
        )
        session.segments = list(source.segments)
        session.log_end = session.recorded_end = session.durable_end = source.log_end
        rig.cache.ledger.shared(source, source.segments)
        rig.cache.ledger.opened(session)


async def lines_of_a_turn(rig: MemoryRig, writer: Writer) -> int:
    """The cost of upkeep after three sessions have changed."""
    for number in range(3):
        await rig.append(f"s{number}", writer.make(SEGMENT_TOKENS))
    upkeep = Upkeep(rig.cache)
    with counted_lines() as counts:
        await upkeep.write_behind()
        await upkeep.make_room()
    return counts[0]


async def test_a_turn_costs_what_has_changed(large: Make, writer: Writer) -> None:
    """Fifty thousand clean sessions in DRAM cost a turn not one line: it touches none of them."""
    rig = await large(Watermarks(low=0, high=0))
    for number in range(20):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make(SEGMENT_TOKENS), is_durable=True)
    alone = await lines_of_a_turn(rig, writer)
    sources = [rig.cache.ledger.find(TENANT, f"s{number}") for number in range(3, 20)]
    add_clean_sessions(rig, sources, MANY_SESSIONS)
    among_many = await lines_of_a_turn(rig, writer)

    assert 0 < alone < 10_000
    assert among_many <= 1.5 * alone


async def test_room_on_ssd_costs_what_leaves(tmp_path: Path, writer: Writer) -> None:
    """Older sessions that are pinned or held are looked at once, not at each eviction.

    Then they leave as others do.
    """
    rig = MemoryRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(8,))
    await rig.open()
    for name, is_pinned in (("pinned", True), ("held", False)):
        await rig.create(f"{name}0")
        await rig.append(f"{name}0", writer.make(SEGMENT_TOKENS), is_durable=True)
        for number in range(1, 300):
            await rig.fork(f"{name}0", f"{name}{number}")
        for number in range(300):
            await rig.cache.sessions.update(TENANT, f"{name}{number}", expiration=None, is_pinned=is_pinned)
    lease = await rig.acquire("held0")
    lines = []
    for number in range(30):
        with counted_lines() as counts:
            await rig.create(f"new{number}")
            await rig.append(f"new{number}", writer.make(SEGMENT_TOKENS), is_durable=True)
        lines.append(counts[0])
    held_names = rig.names()
    rig.cache.leases.release(lease.lease_id)
    await rig.create("large", is_pinned=True)
    await rig.append("large", writer.make(7 * SEGMENT_TOKENS), is_durable=True)
    await rig.check()
    names = rig.names()
    rig.arena.close()

    assert len(held_names) == 606
    assert sum(count > 1.5 * min(lines) for count in lines) == 1
    assert names == {"large", *(f"pinned{number}" for number in range(300))}


async def test_room_among_many_costs_what_leaves(large: Make, writer: Writer) -> None:
    """A search for room looks at none of two thousand sessions that share a reader's segments."""
    rig = await large(Watermarks(low=0, high=0))
    await rig.create("held")
    await rig.append("held", writer.make(20 * SEGMENT_TOKENS), is_durable=True)
    lease = await rig.acquire("held")
    for number in range(5):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    add_clean_sessions(rig, [rig.cache.ledger.find(TENANT, "held")], 2000)
    lines = []
    for number in range(12):
        with counted_lines() as counts:
            await rig.append(f"s{number % 5}", writer.make(SEGMENT_TOKENS))
        lines.append(counts[0])
    rig.cache.leases.release(lease.lease_id)

    assert 0 < max(lines) < 5_000
    assert free_segments(rig) == 0
