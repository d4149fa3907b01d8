"""Readers and writers get their share of the arena and no more.

Callers that must wait do so in order, and not for long.
"""

import asyncio
from dataclasses import replace

import pytest
from cache_rig import SEGMENT_TOKENS, STREAMS, TENANT, DiskRig, MemoryRig, Writer, expected

from ctxcache.cache.appends import GRACE_NS
from ctxcache.cache.leases import Lease
from ctxcache.core.limits import Limits
from ctxcache.errors import CapacityExceeded, SessionNotFound, TooManyRequests

# Three of the arena's six segments for readers, as many for writers, two for one client.
SHARES = Limits(lease_share=0.5, reservation_share=0.5, client_share=0.34, room_wait_ns=0)
PATIENT = replace(SHARES, room_wait_ns=10 * 10**9)


async def limited(rig: MemoryRig, limits: Limits, *names: str, segment_count: int = 1) -> None:
    """Durable sessions of so many segments, under these limits."""
    rig.limits = limits
    await rig.restart()
    for tag, name in enumerate(names):
        writer = Writer(tag)
        await rig.create(name)
        for _ in range(segment_count):
            await rig.append(name, writer.make(SEGMENT_TOKENS), is_durable=True)


async def acquire(rig: MemoryRig, name: str, client: int | None = None) -> Lease:
    """A client's lease of a whole session."""
    return await rig.cache.leases.acquire(replace(rig.request(name), client=client))


async def test_readers_together_hold_no_more_than_their_share(rig: MemoryRig) -> None:
    """The fourth segment is refused with a delay until one is released; writers have room all the while."""
    await limited(rig, SHARES, *"abcd")
    leases = [await acquire(rig, name) for name in "abc"]
    with pytest.raises(TooManyRequests):
        await acquire(rig, "d")
    again = await acquire(rig, "a")
    await rig.create("w")
    await rig.append("w", Writer(9).make(3 * SEGMENT_TOKENS), is_durable=True)
    await rig.check()

    for lease in (again, leases[0]):
        rig.cache.leases.release(lease.lease_id)
    assert (await acquire(rig, "d")).end == SEGMENT_TOKENS
    await rig.check()


async def test_one_client_holds_no_more_than_its_share(rig: MemoryRig) -> None:
    """A greedy client is refused while another still gets its own."""
    await limited(rig, SHARES, *"abc")
    for name in "ab":
        await acquire(rig, name, client=1)
    with pytest.raises(TooManyRequests):
        await acquire(rig, "c", client=1)

    assert (await acquire(rig, "c", client=2)).end == SEGMENT_TOKENS
    await rig.check()


async def test_more_than_a_share_is_refused_for_good(rig: MemoryRig) -> None:
    """Ranges that could never be leased are told apart from those that may be leased later.

    As a stream it is read all the same.
    """
    await limited(rig, PATIENT, "a", segment_count=4)
    with pytest.raises(CapacityExceeded) as caught:
        await acquire(rig, "a")

    assert int(caught.value.limit_bytes) < int(caught.value.needed_bytes)
    assert await rig.read("a") == expected(Writer(0).make(4 * SEGMENT_TOKENS))
    await rig.check()


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_stream_holds_no_more_than_the_readers_share(rig: MemoryRig, *, is_deleted: bool) -> None:
    """Rows of the stream beyond that share leave the arena for others.

    Its rows are read from SSD, also when it is deleted.
    """
    await limited(rig, SHARES, "a", segment_count=5)
    tokens, writer = Writer(0).make(5 * SEGMENT_TOKENS), Writer(9)
    await rig.create("w")
    found = dict.fromkeys(STREAMS, b"")
    async with rig.cache.leases.stream(rig.request("a"), ()) as (lease, _, rows):
        with rig.cache.leases.lend(lease) as lent:
            assert [piece.view is not None for piece in lent] == [True] * 3 + [False] * 2
        first = await anext(rows)
        found[first.stream] += bytes(first.data)
        if is_deleted:
            await rig.delete("a")
        await rig.append("w", writer.make(3 * SEGMENT_TOKENS))
        await rig.check()
        async for item in rows:
            found[item.stream] += bytes(item.data)

    assert found == expected(tokens)
    assert await rig.read("w") == expected(Writer(9).make(3 * SEGMENT_TOKENS))
    await rig.check()


async def test_rows_of_a_stream_that_lie_in_memory_alone_are_read(rig: MemoryRig) -> None:
    """Beyond the share and not on SSD yet.

    Some of them get there, and leave memory, while the stream goes on.
    """
    await limited(rig, replace(SHARES, lease_share=0.2))
    tokens = Writer(0).make(4 * SEGMENT_TOKENS)
    await rig.create("a")
    for begin in range(0, len(tokens), SEGMENT_TOKENS):
        await rig.append("a", tokens[begin : begin + SEGMENT_TOKENS])
    found = dict.fromkeys(STREAMS, b"")
    async with rig.cache.leases.stream(rig.request("a"), ()) as (_, _, rows):
        async for item in rows:
            found[item.stream] += bytes(item.data)
            if item.stream == STREAMS[1] and item.token_begin == SEGMENT_TOKENS:
                await rig.demote("a")
                await rig.check()

    assert found == expected(tokens)
    assert rig.cache.ledger.find(TENANT, "a").segments[0].memory
    assert not any(s.memory for s in rig.cache.ledger.find(TENANT, "a").segments[1:])
    await rig.check()


async def test_who_waits_is_served_in_order(rig: MemoryRig) -> None:
    """A large lease that waits is not overtaken for ever by small ones that would fit."""
    await limited(rig, PATIENT, *"abc")
    await rig.create("large")
    await rig.append("large", Writer(9).make(3 * SEGMENT_TOKENS), is_durable=True)
    small = await acquire(rig, "a")
    large = asyncio.ensure_future(acquire(rig, "large"))
    await asyncio.sleep(0)
    later = asyncio.ensure_future(acquire(rig, "b"))
    await asyncio.sleep(0)
    assert not large.done()
    rig.cache.leases.release(small.lease_id)
    lease = await large

    assert not later.done()
    rig.cache.leases.release(lease.lease_id)
    assert (await later).end == SEGMENT_TOKENS
    await rig.check()


async def test_what_waits_sees_the_session_as_it_is_when_its_turn_comes(rig: MemoryRig) -> None:
    """A session that is deleted meanwhile is not leased, and a reader that gives up leaves nothing behind."""
    await limited(rig, PATIENT, *"abcd")
    leases = [await acquire(rig, name) for name in "abc"]
    waits = [asyncio.ensure_future(acquire(rig, "d")) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await rig.delete("d")
    rig.cache.leases.release(leases[0].lease_id)
    with pytest.raises(SessionNotFound):
        await waits[1]
    await rig.check()

    assert rig.cache.leases.lease_count == 2


async def test_writers_hold_no_more_than_their_share(rig: MemoryRig) -> None:
    """Promised room counts; rows of a writer that disappeared count until its slots are safe again."""
    await limited(rig, SHARES)
    for name in "ab":
        await rig.create(name)
    first = await rig.reserve("a", 3 * SEGMENT_TOKENS)
    with pytest.raises(TooManyRequests):
        await rig.reserve("b", 1)
    rig.cache.appends.release(first, is_abandoned=True)
    with pytest.raises(TooManyRequests):
        await rig.reserve("b", 1)
    rig.clock.advance(ns=GRACE_NS)
    rig.cache.appends.end_overdue()
    await rig.check()

    assert (await rig.reserve("b", 3 * SEGMENT_TOKENS)).end == 3 * SEGMENT_TOKENS
    await rig.check()


async def test_a_refused_extension_pins_nothing_more(rig: MemoryRig) -> None:
    """A reservation that cannot grow is as large as before, in the books too."""
    await limited(rig, SHARES)
    await rig.create("a")
    reservation = await rig.reserve("a", 2 * SEGMENT_TOKENS)
    used_bytes = rig.cache.appends.pins.used_bytes
    with pytest.raises(CapacityExceeded):
        await rig.cache.appends.extend(reservation, 2 * SEGMENT_TOKENS)

    assert rig.cache.appends.pins.used_bytes == used_bytes
    await rig.check()


async def test_many_that_expire_at_once_leave_others_their_turn(disk_rig: DiskRig) -> None:
    """Between one slice of the removals and the next a reader runs.

    In the end all are gone, and their space.
    """
    for number in range(300):
        await disk_rig.create(f"s{number}", ttl_s=10)
    await disk_rig.create("stays")
    disk_rig.clock.advance(seconds=10)
    expiry = asyncio.ensure_future(disk_rig.cache.sessions.expire_due())
    turn_count = 0
    while not expiry.done():
        await asyncio.sleep(0)
        disk_rig.cache.sessions.get(TENANT, "stays")
        turn_count += 1

    assert disk_rig.names() == {"stays"}
    assert turn_count > 4
    assert disk_rig.cache.state.counters.expired_session_count == 300
    await disk_rig.check()
