"""Second copies on another SSD path: what they save, what they cost, and when there are none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cache_rig import FINGERPRINT, SEGMENT_TOKENS, SLOT_BYTES, DiskRig, MemoryRig, Token, Writer, expected
from fakes import Operation

from ctxcache.core.ledger.segment import Segment
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import CapacityExceeded, InvalidArgument, SessionNotFound, TierFailure
from ctxcache.format.layout import ALIGN_BYTES

LENGTH = 3 * SEGMENT_TOKENS + 10


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[MemoryRig]:
    """A cache whose sessions lie on both of its two paths."""
    made = MemoryRig(tmp_path, copies=2)
    await made.open()
    yield made
    await made.cache.drain()
    made.arena.close()


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """The same over files and a database."""
    made = DiskRig(tmp_path, copies=2)
    await made.open()
    yield made
    await made.close()


def segments(rig: MemoryRig | DiskRig, name: str) -> list[Segment]:
    """A session's segments."""
    return rig.cache.ledger.find(rig.tenant, name).segments


def copy_counts(rig: MemoryRig | DiskRig, name: str) -> list[int]:
    """On how many paths each of a session's segments lies."""
    return [len({slot.path_index for slot in segment.places}) for segment in segments(rig, name)]


async def stored(rig: MemoryRig | DiskRig, count: int) -> dict[str, list[Token]]:
    """So many sessions, durable and only on SSD."""
    made = {f"s{i}": Writer(i).make(LENGTH) for i in range(count)}
    for name, tokens in made.items():
        await rig.create(name)
        await rig.append(name, tokens, is_durable=True)
        await rig.demote(name)
    return made


def damage(rig: DiskRig, segment: Segment, *places: int) -> None:
    """Flip a byte of a row in these of a segment's copies, behind the store's back."""
    for place in places:
        slot = segment.places[place]
        with rig.segments_file(slot.path_index).open("r+b") as file:
            file.seek(slot.offset_bytes + segment.layout.offsets[1] + 3)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_loss_of_either_path_costs_nothing(pair: MemoryRig, lost: int) -> None:
    """At run time and at the next start: look-ups hit, durable tokens are durable, and reads are right."""
    made = await stored(pair, 4)
    pair.ssd.lose(lost)
    await pair.cache.devices.look()
    for name, tokens in made.items():
        found = pair.cache.sessions.lookup(pair.tenant, name, FINGERPRINT)
        assert (found.token_count, found.reason) == (LENGTH, "")
        assert pair.cache.sessions.get(pair.tenant, name).durable_token_count == LENGTH
        assert await pair.read(name) == expected(tokens)
    assert pair.cache.ledger.lost.withheld == {}
    assert len(pair.cache.ledger.copies.single) == 4 * 4
    await pair.crash()

    for name, tokens in made.items():
        assert await pair.read(name) == expected(tokens)
    await pair.check()


async def test_a_path_that_fails_in_the_middle_of_a_read_is_read_round(pair: MemoryRig) -> None:
    """The store has not noticed yet that the path is gone.

    Promotion and reads past DRAM go to the other one.
    """
    made = await stored(pair, 2)
    pair.ssd.lose(0)
    lease = await pair.acquire("s0")
    assert pair.leased(lease) == expected(made["s0"])
    pair.cache.leases.release(lease.lease_id)
    assert await pair.read("s1") == expected(made["s1"])
    await pair.check()


async def test_both_copies_are_synced_before_the_record(pair: MemoryRig) -> None:
    """Acknowledged rows survive a power cut on either path alone."""
    tokens = Writer(1).make(LENGTH)
    await pair.create("s")
    await pair.append("s", tokens, is_durable=True)
    assert copy_counts(pair, "s") == [2] * 4
    for lost in (0, 1):
        await pair.crash()
        pair.ssd.lose(lost)
        await pair.cache.devices.look()
        assert await pair.read("s") == expected(tokens)
        pair.ssd.find(lost)
        await pair.cache.devices.look()


@pytest.mark.parametrize("bad", [0, 1])
async def test_a_flipped_byte_is_served_from_the_other_copy_and_mended(disks: DiskRig, bad: int) -> None:
    """The reader sees right rows; the bad slot is kept from use; a new copy is made, and survives a crash."""
    made = await stored(disks, 1)
    segment = segments(disks, "s0")[1]
    damage(disks, segment, bad)
    place = segment.places[bad]
    if bad == 0:
        assert await disks.read("s0") == expected(made["s0"])
    else:
        found = [bad async for report in disks.cache.scrubbing.run() for bad in report.bad]
        assert [(one.is_mended, one.is_in_dram, one.offset_bytes) for one in found] == [
            (True, False, place.offset_bytes)
        ]
    await disks.cache.drain()

    assert disks.token_count("s0") == LENGTH
    assert disks.cache.ledger.below.quarantined == {place}
    assert disks.cache.state.counters.mended_copy_count == 1
    assert disks.cache.state.counters.corrupt_segment_count == 0
    await disks.cache.copying.turn()
    assert copy_counts(disks, "s0") == [2] * 4
    assert place not in segment.places
    await disks.crash()
    assert disks.cache.ledger.below.quarantined == {place}
    assert [bad async for report in disks.cache.scrubbing.run() for bad in report.bad] == []
    await disks.demote("s0")
    for segment in segments(disks, "s0"):
        damage(disks, segment, 0)
    assert await disks.read("s0") == expected(made["s0"])
    await disks.check()


async def test_where_both_copies_are_bad_the_session_is_cut(disks: DiskRig) -> None:
    """Wrong bytes are never served; what comes before them is."""
    made = await stored(disks, 2)
    damage(disks, segments(disks, "s0")[2], 0, 1)
    damage(disks, segments(disks, "s1")[2], 0, 1)
    found = [bad async for report in disks.cache.scrubbing.run() for bad in report.bad]

    assert [one.is_mended for one in found] == [False] * 4
    for name, tokens in made.items():
        assert disks.token_count(name) == 2 * SEGMENT_TOKENS
        assert await disks.read(name) == expected(tokens[: 2 * SEGMENT_TOKENS])
    assert disks.cache.state.counters.corrupt_segment_count == 2
    assert len(disks.cache.ledger.below.quarantined) == 4
    await disks.check()


async def test_a_copy_is_bad_while_the_other_path_is_lost(pair: MemoryRig) -> None:
    """The remaining copy cannot be read now, and is there again with its path."""
    made = await stored(pair, 1)
    segment = segments(pair, "s0")[1]
    first, second = segment.places
    page = first.path_index, (first.offset_bytes + segment.layout.offsets[1]) // ALIGN_BYTES
    pair.ssd.pages[page] = bytes(ALIGN_BYTES)
    pair.ssd.lose(second.path_index)
    with pytest.raises(TierFailure):
        await pair.read("s0")
    await pair.cache.devices.look()
    assert pair.token_count("s0") == SEGMENT_TOKENS
    await pair.check()
    pair.ssd.find(second.path_index)
    await pair.cache.devices.look()

    assert await pair.read("s0") == expected(made["s0"])
    await pair.check()


async def test_one_path_without_room_leaves_one_copy_that_is_counted(pair: MemoryRig) -> None:
    """The append is durable all the same; the copy is made when there is room again."""
    tokens = Writer(1).make(LENGTH)
    await pair.create("s")
    pair.ssd.fill(1)
    view = await pair.append("s", tokens, is_durable=True)

    assert view.durable_token_count == LENGTH
    assert copy_counts(pair, "s") == [1] * 4
    assert pair.cache.state.counters.uncopied_segment_count == 4
    assert len(pair.cache.ledger.copies.single) == 4
    await pair.cache.copying.turn()
    assert copy_counts(pair, "s") == [1] * 4
    pair.ssd.fill(1, is_full=False)
    await pair.cache.copying.turn()
    assert copy_counts(pair, "s") == [2] * 4
    assert not pair.cache.ledger.copies.single
    await pair.check()
    pair.ssd.lose(0)
    await pair.crash()
    assert await pair.read("s") == expected(tokens)


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.SYNC])
async def test_any_write_or_sync_may_fail(pair: MemoryRig, operation: Operation, nth: int) -> None:
    """Acknowledged tokens have a copy at least, on a path that took it; a failed sync is no copy."""
    tokens = Writer(1).make(LENGTH)
    await pair.create("s")
    pair.ssd.fail(operation, nth=nth)
    try:
        await pair.append("s", tokens, is_durable=True)
    except TierFailure:
        tokens = []
    await pair.check()
    await pair.crash()
    found = await pair.read("s")
    assert found == expected(tokens) or not tokens
    await pair.check()


async def test_a_session_is_marked_and_unmarked_while_it_lives(rig: MemoryRig) -> None:
    """The session's segments are copied in the background.

    The copies are given back when they are not wanted.
    """
    tokens = Writer(1).make(LENGTH)
    await rig.create("s")
    await rig.append("s", tokens, is_durable=True)
    await rig.demote("s")
    assert copy_counts(rig, "s") == [1] * 4
    used = rig.cache.ledger.below.used_bytes
    assert (await rig.mark("s", 2)).copies == 2
    await rig.cache.copying.turn()
    assert copy_counts(rig, "s") == [2] * 4
    assert rig.cache.ledger.below.used_bytes == 2 * used
    assert rig.cache.sessions.get(rig.tenant, "s").durable_bytes == 2 * used
    await rig.check()
    await rig.crash()
    assert copy_counts(rig, "s") == [2] * 4
    for lost in (0, 1):
        rig.ssd.lose(lost)
        await rig.cache.devices.look()
        assert await rig.read("s") == expected(tokens)
        rig.ssd.find(lost)
        await rig.cache.devices.look()
    await rig.mark("s", 1)
    await rig.cache.copying.turn()
    assert copy_counts(rig, "s") == [1] * 4
    assert rig.cache.ledger.below.used_bytes == used
    await rig.restart()
    assert await rig.read("s") == expected(tokens)
    assert rig.cache.ledger.below.used_bytes == used
    await rig.check()


async def test_forks_and_adopted_prompts_keep_the_copies_that_one_of_them_wants(rig: MemoryRig) -> None:
    """A fork has as many as its source; an adopted prompt gets the second copy that its session wants."""
    tokens = Writer(1).make(2 * SEGMENT_TOKENS)
    await rig.create("plain")
    await rig.append("plain", tokens, is_durable=True)
    await rig.create("marked", copies=2)
    assert await rig.adopt("marked", tokens) == len(tokens)
    await rig.cache.copying.turn()
    assert copy_counts(rig, "plain") == copy_counts(rig, "marked") == [2, 2]
    assert (await rig.fork("marked", "fork")).copies == 2
    await rig.mark("marked", 1)
    await rig.cache.copying.turn()
    assert copy_counts(rig, "fork") == [2, 2]
    await rig.check()
    await rig.delete("fork")
    await rig.delete("marked")
    await rig.restart()
    await rig.cache.copying.turn()
    assert copy_counts(rig, "plain") == [1, 1]
    await rig.check()


@pytest.mark.parametrize("how", ["delete", "truncate", "expire", "evict"])
async def test_what_goes_gives_back_both(pair: MemoryRig, how: str) -> None:
    """No slot is left behind on either path, nor after a crash."""
    await stored(pair, 1)
    match how:
        case "delete":
            await pair.delete("s0")
        case "truncate":
            await pair.truncate("s0", (0, LENGTH))
        case "expire":
            pair.clock.advance(seconds=4000)
            await pair.cache.sessions.expire_due()
        case _:
            await pair.cache.sessions.evict(pair.tenant, "s0")
    assert pair.cache.ledger.below.used_bytes == 0
    await pair.check()
    await pair.crash()
    assert pair.cache.ledger.below.used_bytes == 0


async def test_copies_make_room_as_rows_do(tmp_path: Path) -> None:
    """Where SSD is full the coldest session leaves for them."""
    rig = MemoryRig(tmp_path, copies=2, arena_segments=8, ssd_segments=(8, 8))
    await rig.open()
    for i in range(5):
        await rig.create(f"s{i}")
        await rig.append(f"s{i}", Writer(i).make(2 * SEGMENT_TOKENS), is_durable=True)
        assert copy_counts(rig, f"s{i}") == [2, 2]
        await rig.check()
    assert rig.names() == {"s1", "s2", "s3", "s4"}
    rig.arena.close()


async def test_both_copies_count_in_a_tenants_limit(tmp_path: Path) -> None:
    """A session of two takes twice the room; to mark one beyond the limit is refused, and changes nothing."""
    shares = Shares({"acme": Share(0.25, 0.25), "other": Share(0.5)})
    rig = MemoryRig(tmp_path, arena_segments=16, ssd_segments=(16, 16), shares=shares)
    await rig.open()
    await rig.create("s", is_pinned=True)
    await rig.append("s", Writer(1).make(5 * SEGMENT_TOKENS), is_durable=True)
    with pytest.raises(CapacityExceeded):
        await rig.mark("s", 2)
    assert rig.cache.sessions.get("acme", "s").copies == 1
    await rig.check()
    await rig.create("t", copies=2)
    with pytest.raises(CapacityExceeded):
        await rig.append("t", Writer(2).make(5 * SEGMENT_TOKENS), is_durable=True)
    await rig.append("t", Writer(2).make(SEGMENT_TOKENS), is_durable=True)
    assert rig.cache.ledger.usage.of("acme").kept_bytes == 7 * SLOT_BYTES
    await rig.check()
    rig.arena.close()


async def test_more_copies_than_paths_are_refused(tmp_path: Path) -> None:
    """At creation and later, with the field and what lacks."""
    rig = MemoryRig(tmp_path, ssd_segments=(16,))
    await rig.open()
    with pytest.raises(InvalidArgument, match="copies: 2 copies need 2 SSD directories, and the store has 1"):
        await rig.create("s", copies=2)
    await rig.create("s")
    with pytest.raises(InvalidArgument, match="copies"):
        await rig.mark("s", 2)
    rig.arena.close()


async def test_a_new_device_gets_its_copies_again(pair: MemoryRig) -> None:
    """A device was replaced by an empty one: nothing is lost, and everything has two copies again."""
    made = await stored(pair, 2)
    pair.ssd.emptied = {0}
    pair.ssd.pages = {key: page for key, page in pair.ssd.pages.items() if key[0] != 0}
    await pair.restart()
    for name, tokens in made.items():
        assert await pair.read(name) == expected(tokens)
    pair.ssd.emptied = set()
    await pair.cache.copying.turn()
    assert copy_counts(pair, "s0") == copy_counts(pair, "s1") == [2] * 4
    await pair.check()
    pair.ssd.lose(1)
    await pair.crash()
    for name, tokens in made.items():
        assert await pair.read(name) == expected(tokens)


async def test_a_third_path_takes_the_copies_of_a_lost_one(tmp_path: Path) -> None:
    """Two losses, one after the other, cost nothing either."""
    rig = MemoryRig(tmp_path, copies=2, ssd_segments=(64, 64, 64))
    await rig.open()
    made = await stored(rig, 6)
    assert all(len({slot.path_index for s in segments(rig, name) for slot in s.places}) == 2 for name in made)
    for lost in (0, 1):
        rig.ssd.lose(lost)
        await rig.cache.devices.look()
        await rig.cache.copying.turn()
        await rig.check()
    for name, tokens in made.items():
        assert await rig.read(name) == expected(tokens)
    rig.ssd.find(0)
    await rig.cache.devices.look()
    await rig.cache.copying.turn()
    assert not rig.cache.ledger.copies.single
    await rig.check()
    rig.arena.close()


async def test_a_session_of_the_same_name_does_not_get_what_another_was_asked(
    rig: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was asked goes while room is made for its copies; the new one is as it was."""
    has_room = asyncio.Event()

    async def wait(*_: object) -> None:
        await has_room.wait()

    monkeypatch.setattr(rig.cache.sessions._ssd_room, "keep_within_limit", wait)
    await rig.create("s")
    await rig.append("s", Writer(1).make(LENGTH), is_durable=True)
    asked = asyncio.ensure_future(
        rig.cache.sessions.update(rig.tenant, "s", expiration=None, is_pinned=True, copies=2)
    )
    await asyncio.sleep(0)
    await rig.delete("s")
    await rig.create("s", copies=1)
    has_room.set()

    with pytest.raises(SessionNotFound):
        await asked

    view = rig.cache.ledger.find(rig.tenant, "s").view()
    assert (view.is_pinned, view.copies) == (False, 1)
    await rig.check()


async def test_a_copy_of_rows_that_were_written_anew_is_none(rig: MemoryRig) -> None:
    """The tail grew, and went to another slot, while it was copied: what was copied is of no use."""
    tokens = Writer(1).make(30)
    await rig.create("s")
    await rig.append("s", tokens[:20], is_durable=True)
    await rig.mark("s", 2)
    [segment] = segments(rig, "s")
    other = 1 - segment.places[0].path_index
    gate, sync_count = rig.ssd.hold(Operation.SYNC, other), rig.ssd.counts[Operation.SYNC]
    copying = asyncio.create_task(rig.cache.copying.turn())
    await rig.reached(Operation.SYNC, sync_count + 1)
    # Else the new slot would have a copy too, and none would be lacking.
    rig.ssd.fill(other)
    await rig.append("s", tokens[20:], is_durable=True)
    rig.ssd.fill(other, is_full=False)
    gate.set()
    await copying
    await rig.cache.copying.turn()
    assert copy_counts(rig, "s") == [2]
    await rig.crash()
    rig.ssd.lose(1 - other)
    await rig.cache.devices.look()

    assert await rig.read("s") == expected(tokens)
    await rig.check()
