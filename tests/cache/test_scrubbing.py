"""Scrubbing: everything bad is found in one pass, and its place is kept from use until it is tested."""

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import LAYOUT, SEGMENT_TOKENS, UNLIMITED, DiskRig, MemoryRig, Writer, expected
from fakes import Operation

from ctxcache.cache.scrubbing import PASS_NS, Bad
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, TooManyRequests
from ctxcache.format.layout import Slot
from ctxcache.server.upkeep import Upkeep

PLANTED = 100
SEGMENTS = 120


async def scrub(rig: DiskRig | MemoryRig, *, bytes_per_second: int = 0) -> list[Bad]:
    """One pass; returns what was bad."""
    found: list[Bad] = []
    async for report in rig.cache.scrubbing.run(bytes_per_second=bytes_per_second):
        found += report.bad
    return found


def damage(rig: DiskRig, segment: Segment, at: int) -> None:
    """Flip a bit of what SSD has."""
    assert segment.durable is not None
    fd = os.open(rig.ssd.paths[segment.durable.path_index], os.O_RDWR)
    offset = segment.durable.offset_bytes + at
    os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 4]), offset)
    os.close(fd)


async def test_a_hundred_of_a_hundred_are_found_in_one_pass(tmp_path: Path) -> None:
    """Headers and chunks of every layer; what is before the first bad segment of a session is still right."""
    rig = DiskRig(tmp_path, ssd_segments=(64, 80))
    await rig.open()
    draw, written = random.Random(1), {}
    for tag in range(12):
        await rig.create(f"s{tag}")
        written[f"s{tag}"] = Writer(tag).make(10 * SEGMENT_TOKENS)
        for begin in range(0, 10 * SEGMENT_TOKENS, SEGMENT_TOKENS):
            await rig.append(f"s{tag}", written[f"s{tag}"][begin : begin + SEGMENT_TOKENS])
        await rig.demote(f"s{tag}")
    segments = list(rig.cache.ledger.segments())
    bad = draw.sample(segments, PLANTED)
    for segment in bad:
        stream = draw.randrange(len(LAYOUT.specs))
        inside = draw.randrange(LAYOUT.specs[stream].row_bytes * SEGMENT_TOKENS)
        damage(rig, segment, draw.choice((draw.randrange(256), LAYOUT.offsets[stream] + inside)))
    found = await scrub(rig)
    again = await scrub(rig)
    for name, tokens in written.items():
        count = rig.token_count(name)
        assert await rig.read(name) == expected(tokens[:count])
    await rig.check()
    await rig.close()

    assert len(segments) == SEGMENTS
    assert {item.segment_id for item in found} == {segment.segment_id for segment in bad}
    assert again == []
    assert all(item.sessions for item in found)


async def test_a_bad_place_is_kept_from_use_until_it_is_tested(disk_rig: DiskRig) -> None:
    """Over a restart too; a place that gives back what it is given is used again."""
    await disk_rig.create("a")
    await disk_rig.append("a", Writer(1).make(100), is_durable=True)
    await disk_rig.demote("a")
    victim = next(s for s in disk_rig.cache.ledger.segments() if s.begin == SEGMENT_TOKENS)
    slot = victim.durable
    damage(disk_rig, victim, LAYOUT.offsets[1])
    (bad,) = await scrub(disk_rig)
    kept = set(disk_rig.cache.ledger.below.quarantined)
    await disk_rig.close()
    await disk_rig.open()
    kept_too = set(disk_rig.cache.ledger.below.quarantined)
    await disk_rig.check()
    used_bytes = disk_rig.cache.ledger.below.used_bytes
    released = await disk_rig.cache.scrubbing.release()
    await disk_rig.check()

    assert (bad.sessions, bad.begin, bad.end) == (("sessions/a",), SEGMENT_TOKENS, 100)
    assert "layer 0 hidden" in bad.problem
    assert kept == kept_too == {slot}
    assert released == (1, 0)
    assert not disk_rig.cache.ledger.below.quarantined
    assert disk_rig.cache.ledger.below.used_bytes == used_bytes - LAYOUT.size_bytes
    await disk_rig.close()
    await disk_rig.open()
    assert not disk_rig.cache.ledger.below.quarantined


async def test_a_place_that_keeps_nothing_stays_bad(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that returns other bytes than were written is not used again, however often it is tested."""
    await disk_rig.create("a")
    await disk_rig.append("a", Writer(1).make(100), is_durable=True)
    await disk_rig.demote("a")
    victim = next(s for s in disk_rig.cache.ledger.segments() if s.begin == SEGMENT_TOKENS)
    slot = victim.durable
    damage(disk_rig, victim, LAYOUT.offsets[1])
    await scrub(disk_rig)
    write = disk_rig.ssd.write

    async def write_other_bytes(slot: Slot, begin: int, data: memoryview, **named: object) -> None:
        await write(slot, begin, memoryview(bytearray(len(data))), **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_rig.ssd, "write", write_other_bytes)

    assert await disk_rig.cache.scrubbing.release() == (0, 1)
    assert disk_rig.cache.ledger.below.quarantined == {slot}


async def test_one_pass_at_a_time(disk_rig: DiskRig) -> None:
    """A second one is refused; when the first is given up, the next may begin."""
    first = disk_rig.cache.scrubbing.run()
    await anext(first)
    with pytest.raises(TooManyRequests):
        await anext(disk_rig.cache.scrubbing.run())
    await first.aclose()

    assert await scrub(disk_rig) == []


async def test_two_who_release_do_not_test_what_is_in_use_again(disk_rig: DiskRig) -> None:
    """A place is tested, and given back, by one of them: what it holds since stays as it is."""
    tokens = Writer(1).make(4 * SEGMENT_TOKENS)
    await disk_rig.create("a")
    await disk_rig.append("a", tokens, is_durable=True)
    await disk_rig.demote("a")
    first = min(disk_rig.cache.ledger.segments(), key=lambda segment: segment.begin)
    damage(disk_rig, first, LAYOUT.offsets[1])
    await scrub(disk_rig)
    release = disk_rig.cache.scrubbing.release
    released, refused = await asyncio.gather(release(), release(), return_exceptions=True)
    await disk_rig.check()

    assert released == (1, 0)
    assert isinstance(refused, TooManyRequests)


async def test_a_place_released_under_a_lease_is_given_back_once(disk_rig: DiskRig) -> None:
    """A reader of a bad segment's rows in memory ends when its place is somebody else's."""
    await disk_rig.create("a")
    await disk_rig.append("a", tokens := Writer(1).make(SEGMENT_TOKENS), is_durable=True)
    lease = await disk_rig.acquire("a")
    damage(disk_rig, lease.pieces[0].segment, LAYOUT.offsets[1])
    await scrub(disk_rig)
    released = await disk_rig.cache.scrubbing.release()
    assert disk_rig.leased(lease) == expected(tokens)
    await disk_rig.check()
    for tag in (2, 3):
        await disk_rig.create(f"s{tag}")
        await disk_rig.append(f"s{tag}", Writer(tag).make(SEGMENT_TOKENS), is_durable=True)
    disk_rig.cache.leases.release(lease.lease_id)
    await disk_rig.check()

    assert released == (1, 0)


def unasked(directory: Path, bytes_per_s: int) -> MemoryRig:
    """A cache that verifies what it has without being asked."""
    return MemoryRig(directory, ssd_segments=(64,), limits=replace(UNLIMITED, scrub_bytes_per_s=bytes_per_s))


def flip_in_memory(rig: MemoryRig) -> None:
    """Flip a bit of a row that memory has."""
    (segment,) = rig.cache.ledger.segments()
    assert segment.memory is not None
    rig.arena.view(segment.memory)[LAYOUT.offsets[1]] ^= 4


async def test_what_nobody_asks_for_is_verified_too(tmp_path: Path) -> None:
    """A byte that changed in DRAM is mended by upkeep itself, and what SSD has is found bad by it."""
    rig = unasked(tmp_path, 1 << 40)
    await rig.open()
    await rig.create("a")
    tokens = Writer(1).make(SEGMENT_TOKENS)
    await rig.append("a", tokens, is_durable=True)
    flip_in_memory(rig)
    counters, count = rig.cache.state.counters, rig.token_count
    upkeep = asyncio.ensure_future(Upkeep(rig.cache, interval_s=0).run())
    async with asyncio.timeout(30):
        rig.clock.advance(ns=PASS_NS)
        while not counters.mended_segment_count:
            await rig.flush("a")
            await asyncio.sleep(0)
        seen = await rig.read("a")
        await rig.demote("a")
        rig.ssd.pages.clear()
        while count("a"):
            rig.clock.advance(ns=PASS_NS // 100)
            await asyncio.sleep(0)
    upkeep.cancel()
    await asyncio.wait([upkeep])
    await rig.check()

    assert seen == expected(tokens)
    assert (counters.mended_segment_count, counters.corrupt_segment_count) == (1, 1)
    rig.arena.close()


async def test_what_is_asked_for_goes_before_what_is_not(tmp_path: Path) -> None:
    """A pass at a byte per second gives way to an operator's, and begins again when its time comes."""
    rig = unasked(tmp_path, 1)
    await rig.open()
    await rig.create("a")
    await rig.append("a", Writer(1).make(SEGMENT_TOKENS), is_durable=True)
    await rig.cache.scrubbing.verify_unasked()
    rig.clock.advance(ns=PASS_NS)
    gate = rig.ssd.hold(Operation.READ)
    slow = asyncio.ensure_future(rig.cache.scrubbing.verify_unasked())
    await rig.reached(Operation.READ)
    asked = asyncio.ensure_future(scrub(rig))
    await rig.reached(Operation.READ, 2)
    gate.set()

    assert await asked == []
    await asyncio.wait_for(slow, 30)
    flip_in_memory(rig)
    await rig.cache.scrubbing.verify_unasked()
    assert not rig.cache.state.counters.mended_segment_count
    rig.cache.state.limits = replace(UNLIMITED, scrub_bytes_per_s=0)
    rig.clock.advance(ns=PASS_NS)
    await rig.cache.scrubbing.verify_unasked()
    assert not rig.cache.state.counters.mended_segment_count
    await rig.check()
    rig.arena.close()


async def test_a_tail_that_moves_away_and_back_while_it_is_read_is_not_bad(tmp_path: Path) -> None:
    """Two flushes during one slow read may leave it where it was, and other bytes there."""
    rig = MemoryRig(tmp_path, ssd_segments=(2,))
    await rig.open()
    await rig.create("a")
    tokens = (writer := Writer(1)).make(10)
    await rig.append("a", tokens, is_durable=True)
    (segment,) = rig.cache.ledger.segments()
    place = segment.durable
    gate = rig.ssd.hold(Operation.READ)
    scrubbing = asyncio.ensure_future(scrub(rig))
    await rig.reached(Operation.READ)
    for _ in range(2):
        tokens += (more := writer.make(10))
        await rig.append("a", more, is_durable=True)
    assert segment.durable == place
    gate.set()

    assert await scrubbing == []
    assert await rig.read("a") == expected(tokens)
    await rig.check()
    rig.arena.close()


async def test_damage_that_a_reader_finds_first_ends_no_pass(tmp_path: Path) -> None:
    """A segment that is quarantined while it is verified is reported by whoever found it."""
    rig = MemoryRig(tmp_path, ssd_segments=(64,))
    await rig.open()
    await rig.create("a")
    await rig.append("a", Writer(1).make(SEGMENT_TOKENS), is_durable=True)
    await rig.demote("a")
    rig.ssd.pages.clear()
    gate = rig.ssd.hold(Operation.READ)
    reading = asyncio.ensure_future(rig.read("a"))
    await rig.reached(Operation.READ)
    scrubbing = asyncio.ensure_future(scrub(rig))
    await rig.reached(Operation.READ, 2)
    gate.set()
    with pytest.raises(CorruptSegment):
        await reading
    await scrubbing
    await rig.check()

    assert rig.cache.state.counters.corrupt_segment_count == 1
    assert rig.token_count("a") == 0
    rig.arena.close()
