"""Readers get the bytes they asked for or an error, whatever happens to the session meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from cache_rig import (
    SEGMENT_TOKENS,
    SLOT_BYTES,
    STREAMS,
    TENANT,
    DiskRig,
    MemoryRig,
    Token,
    Writer,
    expected,
)
from fakes import Operation

from ctxcache.cache.leases import LEASE_LIFETIME_NS
from ctxcache.core.ledger.session import Expiration
from ctxcache.core.limits import Pinner
from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    DeadlineExceeded,
    GenerationMismatch,
    LeaseNotFound,
    ModelFingerprintMismatch,
    SessionNotFound,
    TierFailure,
    TokenRangeOutOfBounds,
    TooManyRequests,
)
from ctxcache.format.layout import Slot, decode_header

LEASE_S = LEASE_LIFETIME_NS / 10**9
End = Callable[[MemoryRig], Awaitable[object]]


async def filled(rig: MemoryRig | DiskRig, name: str, token_count: int, tag: int = 1) -> list[Token]:
    """A session with that many tokens, durable."""
    tokens = Writer(tag).make(token_count)
    await rig.create(name)
    await rig.append(name, tokens, is_durable=True)
    return tokens


async def _expire(rig: MemoryRig) -> None:
    await rig.cache.sessions.update(TENANT, "a", expiration=Expiration(10**9), is_pinned=None)
    rig.clock.advance(seconds=1)
    await rig.cache.sessions.expire_due()


@pytest.mark.parametrize(
    "end",
    [
        lambda rig: rig.truncate("a", (0, 200)),
        lambda rig: rig.delete("a"),
        lambda rig: rig.demote("a"),
        lambda rig: rig.cache.departures.remove(list(rig.cache.ledger.sessions())),
        _expire,
    ],
    ids=["truncate", "delete", "demote", "evict", "expire"],
)
async def test_leased_rows_outlive_their_session(rig: MemoryRig, end: End) -> None:
    """Nothing takes leased bytes away, and nobody else gets their room, before the lease ends."""
    tokens = await filled(rig, "a", 200)
    lease = await rig.acquire("a")
    await end(rig)
    await rig.create("b")
    with pytest.raises(CapacityExceeded):
        await rig.append("b", Writer(2).make(3 * SEGMENT_TOKENS))
    await rig.append("b", Writer(2).make(2 * SEGMENT_TOKENS))

    assert rig.leased(lease) == expected(tokens)
    rig.cache.leases.release(lease.lease_id)
    await rig.append("b", Writer(2).make(3 * SEGMENT_TOKENS))
    await rig.check()


async def test_rows_in_dram_are_leased_at_once_and_others_are_waited_for(rig: MemoryRig) -> None:
    """A lease that would have to wait is not begun, and counts as no access."""
    tokens = await filled(rig, "a", 2 * SEGMENT_TOKENS)
    reading, counters = rig.cache.leases, rig.cache.state.counters
    lease = reading.acquire_at_once(rig.request("a"))
    assert lease is not None
    assert rig.leased(lease) == expected(tokens)
    reading.release(lease.lease_id)
    await rig.demote("a")
    counted = counters.read_token_count

    assert reading.acquire_at_once(rig.request("a")) is None
    assert reading.acquire_at_once(replace(rig.request("a"), is_summed=True)) is None
    assert (reading.lease_count, counters.read_token_count) == (0, counted)
    with pytest.raises(SessionNotFound):
        reading.acquire_at_once(rig.request("b"))
    await rig.check()


async def test_a_part_that_is_read_counts_its_own_tokens(rig: MemoryRig) -> None:
    """From the middle of one segment to the middle of the next."""
    await filled(rig, "a", 2 * SEGMENT_TOKENS)
    counters = rig.cache.state.counters
    before = counters.read_token_count, counters.dram_hit_token_count
    lease = await rig.acquire("a", 10, SEGMENT_TOKENS + 20)
    count = SEGMENT_TOKENS + 10
    assert lease.dram_token_count == count
    assert (counters.read_token_count, counters.dram_hit_token_count) == (
        before[0] + count,
        before[1] + count,
    )
    await rig.check()


async def test_a_lease_ends_once(rig: MemoryRig) -> None:
    """Releasing again is an error and takes nothing from others."""
    await filled(rig, "a", 10)
    first, second = await rig.acquire("a"), await rig.acquire("a")
    rig.cache.leases.release(first.lease_id)
    with pytest.raises(LeaseNotFound):
        rig.cache.leases.release(first.lease_id)
    await rig.check()

    assert rig.cache.leases.lease_count == 1
    rig.cache.leases.release(second.lease_id)


async def test_a_lease_lasts_its_full_time_from_when_it_is_handed_out(rig: MemoryRig) -> None:
    """A slow device takes nothing from a lease's time, and the lease is held when it is handed out."""
    tokens = await filled(rig, "a", 100)
    await rig.demote("a")
    gate = rig.ssd.hold(Operation.READ)
    acquiring = asyncio.ensure_future(rig.acquire("a"))
    await rig.reached(Operation.READ)
    rig.clock.advance(seconds=LEASE_S + 1)
    rig.cache.leases.end_overdue()
    gate.set()
    lease = await acquiring
    rig.clock.advance(seconds=LEASE_S - 1)
    rig.cache.leases.end_overdue()

    assert rig.leased(lease) == expected(tokens)
    assert rig.cache.leases.is_held(lease.lease_id)
    rig.clock.advance(seconds=1)
    rig.cache.leases.end_overdue()
    assert not rig.cache.leases.is_held(lease.lease_id)
    await rig.check()


async def test_a_wall_clock_that_jumps_does_not_end_leases(rig: MemoryRig) -> None:
    """Deadlines are counted on the clock that never jumps."""
    await filled(rig, "a", 10)
    await rig.acquire("a")
    rig.clock.jump(to_ns=rig.clock.now_ns() + 10**15)
    rig.cache.leases.end_overdue()

    assert rig.cache.leases.lease_count == 1


async def test_a_reader_that_pauses_too_long_is_cut_off(rig: MemoryRig) -> None:
    """A stream whose lease ended says so; it never goes on with the bytes of whoever came after it."""
    await filled(rig, "a", 300)
    async with rig.cache.leases.stream(rig.request("a"), ()) as (_, _, rows):
        await anext(rows)
        rig.clock.advance(seconds=LEASE_S + 1)
        rig.cache.leases.end_overdue()
        await rig.delete("a")
        await rig.create("b")
        await rig.append("b", Writer(2).make(300))
        with pytest.raises(DeadlineExceeded):
            await anext(rows)
    await rig.check()


async def test_a_reader_that_goes_on_keeps_its_lease(rig: MemoryRig) -> None:
    """A stream may take as long as it likes while it moves."""
    tokens = await filled(rig, "a", 300)
    found = b""
    async with rig.cache.leases.stream(rig.request("a"), ()) as (_, chosen, rows):
        async for item in rows:
            found += bytes(item.data) if item.stream == chosen[-1] else b""
            rig.clock.advance(seconds=LEASE_S - 1)
            rig.cache.leases.end_overdue()

    assert found == expected(tokens)[chosen[-1]]


async def test_readers_of_overlapping_ranges_promote_a_segment_once(rig: MemoryRig) -> None:
    """However many ask for it, a segment takes one slot."""
    rig.arena_segments = 12
    await rig.restart()
    tokens = await filled(rig, "a", 10 * SEGMENT_TOKENS)
    await rig.demote("a")
    gate = rig.ssd.hold(Operation.READ)
    readers = [
        asyncio.ensure_future(rig.acquire("a", begin * SEGMENT_TOKENS, end * SEGMENT_TOKENS))
        for begin, end in ((0, 9), (1, 10), (3, 10), (0, 10))
    ]
    await rig.reached(Operation.READ)
    gate.set()
    leases = await asyncio.gather(*readers)
    await rig.check()

    assert (
        rig.cache.ledger.memory.used_bytes
        == 10 * rig.cache.ledger.names.by_uid[leases[0].view.uid].layout.size_bytes
    )
    assert rig.leased(leases[3]) == expected(tokens)


async def test_a_cancelled_reader_leaves_nothing_held(rig: MemoryRig) -> None:
    """A promotion goes on without the reader that wanted it, and holds nothing afterwards."""
    tokens = await filled(rig, "a", 100)
    await rig.demote("a")
    gate = rig.ssd.hold(Operation.READ)
    reader = asyncio.ensure_future(rig.acquire("a"))
    await rig.reached(Operation.READ)
    reader.cancel()
    await asyncio.wait([reader])
    await rig.delete("a")
    gate.set()
    await rig.check()

    assert rig.cache.ledger.memory.used_bytes == rig.cache.ledger.below.used_bytes == 0
    assert tokens


async def test_a_lease_of_more_than_the_arena_moves_nothing(rig: MemoryRig) -> None:
    """A lease that can never fit is refused before anything makes way for it."""
    await filled(rig, "big", 4 * SEGMENT_TOKENS)
    await rig.append("big", Writer(1).make(4 * SEGMENT_TOKENS), is_durable=True)
    await filled(rig, "small", 10, tag=2)
    reads = rig.ssd.counts[Operation.READ]
    with pytest.raises(CapacityExceeded):
        await rig.acquire("big")

    assert rig.ssd.counts[Operation.READ] == reads
    assert rig.cache.sessions.get(TENANT, "small").memory_bytes > 0
    await rig.check()


async def test_a_session_larger_than_the_arena_is_read_as_a_stream(rig: MemoryRig) -> None:
    """Rows that do not fit into DRAM are read past it."""
    await rig.create("big")
    writer = Writer(1)
    tokens = []
    for _ in range(9):
        part = writer.make(SEGMENT_TOKENS)
        await rig.append("big", part, is_durable=True)
        tokens += part

    assert await rig.read("big") == expected(tokens)
    assert await rig.read("big", 60, 500) == expected(tokens[60:500])
    await rig.check()


async def test_a_stream_past_memory_outlives_its_session(rig: MemoryRig) -> None:
    """It keeps its places on SSD until it is done, and none in memory that another reader filled."""
    await rig.create("big")
    tokens = Writer(1).make(9 * SEGMENT_TOKENS)
    for i in range(0, len(tokens), SEGMENT_TOKENS):
        await rig.append("big", tokens[i : i + SEGMENT_TOKENS], is_durable=True)
    await rig.demote("big")
    found = dict.fromkeys(STREAMS, b"")
    ledger = rig.cache.ledger
    async with rig.cache.leases.stream(rig.request("big"), ()) as (_, _, rows):
        async for item in rows:
            if "big" in rig.names():
                rig.cache.leases.release((await rig.acquire("big", 0, 10)).lease_id)
                assert ledger.memory.used_bytes == SLOT_BYTES
                await rig.delete("big")
                assert (ledger.memory.used_bytes, ledger.below.used_bytes) == (0, 9 * SLOT_BYTES)
            found[item.stream] += bytes(item.data)

    assert found == expected(tokens)
    assert ledger.below.used_bytes == 0
    await rig.check()


async def test_what_does_not_fit_is_read_from_the_middle_of_its_segments(rig: MemoryRig) -> None:
    """Past DRAM too, rows that a truncation has left behind others come alone."""
    await rig.create("big")
    writer, tokens = Writer(1), []
    for _ in range(9):
        tokens += writer.make(SEGMENT_TOKENS)
        await rig.append("big", tokens[-SEGMENT_TOKENS:], is_durable=True)
    await rig.truncate("big", *((i * SEGMENT_TOKENS, i * SEGMENT_TOKENS + 5) for i in range(9)))
    await rig.demote("big")

    left = [token for i, token in enumerate(tokens) if i % SEGMENT_TOKENS >= 5]
    assert await rig.read("big") == expected(left)
    await rig.check()


async def test_leases_are_bounded(rig: MemoryRig) -> None:
    """A client cannot take memory by acquiring without end."""
    rig.limits = replace(rig.limits, lease_count=3)
    await rig.restart()
    await filled(rig, "a", 10)
    for _ in range(3):
        await rig.acquire("a")
    with pytest.raises(TooManyRequests):
        await rig.acquire("a")
    await rig.check()


@pytest.mark.parametrize("begin", ["acquire", "stream", "again"])
async def test_readers_that_wait_do_not_pass_the_bound_together(rig: MemoryRig, begin: str) -> None:
    """All of them found a place free before they waited for room: only one gets it."""
    rig.limits = replace(rig.limits, lease_count=2)
    await rig.restart()
    await filled(rig, "a", 10)
    await filled(rig, "b", 10, tag=2)
    reading = rig.cache.leases
    held = await rig.acquire("b")
    # Rows in memory are leased at once, and no reader would wait.
    await rig.demote("a")
    room = reading.pins.wait_for_room
    count, have_come, is_free = 4, asyncio.Event(), asyncio.Event()

    async def wait(client: Pinner, needed: Callable[[], Mapping[int, int]]) -> None:
        nonlocal count
        count -= 1
        if not count:
            have_come.set()
        await is_free.wait()
        await room(client, needed)

    async def read() -> None:
        if begin == "acquire":
            await reading.acquire(rig.request("a"))
        elif begin == "again":
            await reading.again(lambda: held, TENANT, 1)
        else:
            # Not closed: the stream is read yet.
            await streams.enter_async_context(reading.stream(rig.request("a"), ()))

    reading.pins.wait_for_room = wait  # type: ignore[method-assign]
    async with AsyncExitStack() as streams:
        readers = [asyncio.create_task(read()) for _ in range(4)]
        await have_come.wait()
        is_free.set()
        ended = await asyncio.gather(*readers, return_exceptions=True)

        assert reading.lease_count == 2
        assert sorted(type(one).__name__ for one in ended) == ["NoneType"] + 3 * ["TooManyRequests"]
    await rig.check()


async def test_a_refused_read_is_an_error_and_holds_nothing(rig: MemoryRig) -> None:
    """A device that cannot read costs the reader its answer and nobody else anything."""
    tokens = await filled(rig, "a", 100)
    await rig.demote("a")
    rig.ssd.fail(Operation.READ)
    with pytest.raises(TierFailure):
        await rig.acquire("a")
    await rig.check()

    assert await rig.read("a") == expected(tokens)
    assert rig.cache.state.counters.corrupt_segment_count == 0


async def test_what_a_reader_asks_for_is_checked(rig: MemoryRig) -> None:
    """Another model, another generation, a range that is not there: each has its own error."""
    await filled(rig, "a", 10)
    reading, good = rig.cache.leases, rig.request("a")
    for error, changes in (
        (SessionNotFound, {"session_id": "b"}),
        (SessionNotFound, {"tenant": "other"}),
        (ModelFingerprintMismatch, {"fingerprint": bytes(32)}),
        (GenerationMismatch, {"generation": 99}),
        (TokenRangeOutOfBounds, {"end": 11}),
        (TokenRangeOutOfBounds, {"begin": -1, "end": 1}),
        (TokenRangeOutOfBounds, {"begin": 5, "end": 4}),
    ):
        asked = type(good)(**{name: getattr(good, name) for name in good.__slots__} | changes)
        with pytest.raises(error):
            await reading.acquire(asked)
    await rig.check()

    assert reading.lease_count == 0


# -- damaged bytes --------------------------------------------------------------------------------------


async def demoted(rig: DiskRig, token_count: int = 200) -> list[Token]:
    """A session whose segments lie on SSD only, on both paths."""
    tokens = await filled(rig, "a", token_count)
    await rig.demote("a")
    return tokens


def segment_places(rig: DiskRig) -> list[tuple[int, int]]:
    """Path and offset of each segment of session a, in order."""
    session = rig.cache.ledger.find(TENANT, "a")
    return [(s.durable.path_index, s.durable.offset_bytes) for s in session.segments if s.durable]


def patch(rig: DiskRig, place: tuple[int, int], at: int, data: bytes) -> bytes:
    """Overwrite bytes of a slot behind the cache's back; returns what was there."""
    with rig.segments_file(place[0]).open("r+b") as file:
        file.seek(place[1] + at)
        before = file.read(len(data))
        file.seek(place[1] + at)
        file.write(data)
    return before


# Offsets into the slot: magic, version, segment id, generation, uid, table, tokens, hidden rows, KV rows.
DAMAGES = [0, 8, 16, 24, 50, 260, 4096, 8192 + 95, 16384 + 10239]


@pytest.mark.parametrize("at", DAMAGES)
@pytest.mark.parametrize("way", ["lease", "stream past DRAM"])
async def test_a_flipped_bit_is_an_error_and_the_session_ends_before_it(
    disk_rig: DiskRig, at: int, way: str
) -> None:
    """Damaged rows are never returned: the reader is told, it is counted, and what is before them stays."""
    tokens = await demoted(disk_rig)
    await disk_rig.restart()
    patch(disk_rig, segment_places(disk_rig)[1], at, bytes([byte_at(disk_rig, at) ^ 4]))
    if way != "lease":
        await disk_rig.create("full")
        await disk_rig.append("full", Writer(2).make(6 * SEGMENT_TOKENS))
        await disk_rig.acquire("full")
    with pytest.raises(CorruptSegment):
        await (disk_rig.acquire("a") if way == "lease" else disk_rig.read("a"))

    assert disk_rig.token_count("a") == SEGMENT_TOKENS
    assert await disk_rig.read("a") == expected(tokens[:SEGMENT_TOKENS])
    assert disk_rig.cache.state.counters.corrupt_segment_count == 1
    await disk_rig.check()
    await disk_rig.restart()
    assert await disk_rig.read("a") == expected(tokens[:SEGMENT_TOKENS])


def byte_at(rig: DiskRig, at: int) -> int:
    """The byte that is there."""
    path, offset = segment_places(rig)[1]
    with rig.segments_file(path).open("rb") as file:
        file.seek(offset + at)
        return file.read(1)[0]


async def test_segments_that_changed_places_are_refused(disk_rig: DiskRig) -> None:
    """Right bytes in the wrong place are damage like any other."""
    await demoted(disk_rig)
    first, _, third, _ = segment_places(disk_rig)
    size = disk_rig.cache.ledger.find(TENANT, "a").layout.size_bytes
    patch(disk_rig, third, 0, patch(disk_rig, first, 0, patch(disk_rig, third, 0, bytes(size))))
    with pytest.raises(CorruptSegment):
        await disk_rig.read("a", 130, 140)

    assert disk_rig.token_count("a") == 2 * SEGMENT_TOKENS
    with pytest.raises(CorruptSegment):
        await disk_rig.read("a")
    assert disk_rig.token_count("a") == 0


async def test_an_older_copy_put_back_is_refused(disk_rig: DiskRig) -> None:
    """A slot as it was under an earlier record does not pass for what is recorded now."""
    await filled(disk_rig, "a", 10)
    place = segment_places(disk_rig)[0]
    size = disk_rig.cache.ledger.find(TENANT, "a").layout.size_bytes
    with disk_rig.segments_file(place[0]).open("rb") as file:
        file.seek(place[1])
        older = file.read(size)
    await disk_rig.append("a", Writer(1).make(10), is_durable=True)
    await disk_rig.demote("a")
    patch(disk_rig, segment_places(disk_rig)[0], 0, older)
    with pytest.raises(CorruptSegment):
        await disk_rig.read("a")


async def test_a_segment_id_used_again_after_a_crash_does_not_take_older_bytes(rig: MemoryRig) -> None:
    """Bytes written under an id that was never recorded are refused under the same id later."""
    await rig.create("a")
    await rig.append("a", Writer(1).make(10))
    gate = rig.ssd.hold(Operation.SYNC)
    flush = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.SYNC)
    rig.metadata.fail("no")
    gate.set()
    with pytest.raises(TierFailure):
        await flush
    before = rig.cache.ledger.find(TENANT, "a").segments[0]
    older = memoryview(bytearray(before.layout.size_bytes))
    await rig.ssd.read(Slot(0, 0, before.layout.size_bytes), 0, older)
    await rig.crash()
    await rig.append("a", Writer(2).make(10), is_durable=True)
    after = rig.cache.ledger.find(TENANT, "a").segments[0]
    await rig.demote("a")
    await rig.ssd.write(Slot(0, 0, before.layout.size_bytes), 0, older)

    assert decode_header(older).identity == after.identity(10)
    assert (before.segment_id, before.generation) == (after.segment_id, after.generation)
    with pytest.raises(CorruptSegment):
        await rig.read("a")


async def test_damage_in_shared_rows_ends_every_session_that_lists_them(disk_rig: DiskRig) -> None:
    """A fork and its source lose the same tokens at once, and the segment is counted once."""
    tokens = await demoted(disk_rig)
    await disk_rig.fork("a", "b")
    await disk_rig.append("b", Writer(2).make(10), is_durable=True)
    patch(disk_rig, segment_places(disk_rig)[2], 9000, b"\xff")
    with pytest.raises(CorruptSegment):
        await disk_rig.read("b")
    await disk_rig.check()

    for name in ("a", "b"):
        assert await disk_rig.read(name) == expected(tokens[: 2 * SEGMENT_TOKENS])
    assert disk_rig.cache.state.counters.corrupt_segment_count == 1


async def test_a_writer_into_a_session_that_turned_out_damaged_is_told(disk_rig: DiskRig) -> None:
    """Rows are never put behind a gap: the commit is refused and the session goes on from where it ends."""
    tokens = await demoted(disk_rig)
    reservation = await disk_rig.reserve("a", 10)
    disk_rig.place(reservation, 200, Writer(2).make(10))
    patch(disk_rig, segment_places(disk_rig)[1], 9000, b"\xff")
    with pytest.raises(CorruptSegment):
        await disk_rig.read("a")
    with pytest.raises(Exception, match="reservation"):
        await disk_rig.cache.appends.commit(reservation, 210, is_durable=False, keep_open=False)
    after = Writer(3).make(10)
    await disk_rig.append("a", after)
    await disk_rig.check()

    assert await disk_rig.read("a") == expected([*tokens[:SEGMENT_TOKENS], *after])
