"""Blocks are put and found by their keys: whole or not at all, and kept as sessions are."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from block_rig import (
    OTHER_SPACE,
    SECOND_NS,
    SECOND_WRITER,
    SIZE_BYTES,
    SPACE,
    WRITER,
    data_of,
    everything,
    key_of,
    load,
    look,
    put,
    reserved,
    spoil,
    wanted,
    write,
)
from cache_rig import SLOT_BYTES, TENANT, DiskRig, MemoryRig, Writer, expected

from ctxcache.cache.appends import GRACE_NS
from ctxcache.cache.blocks import ABSENT, BlockState, FoundBlock, Room, Wanted, WrittenPart
from ctxcache.cache.token_leases import TokenLease
from ctxcache.core.history import Event
from ctxcache.core.ledger.session import block_id
from ctxcache.core.limits import Pinner
from ctxcache.core.prefix.keys import Part, space_of
from ctxcache.errors import (
    CapacityExceeded,
    InvalidArgument,
    LeaseNotFound,
    ReservationNotFound,
    TooManyRequests,
    WriteInProgress,
)
from ctxcache.format.layout import block_layout
from ctxcache.server.upkeep import Upkeep


async def test_a_block_is_put_once_and_found_by_its_key_in_its_space(rig: MemoryRig) -> None:
    """In no other space, by no other tenant, and under no other key; no list of sessions shows it."""
    assert await put(rig, 1, 2) == 2
    assert await put(rig, 2, 3) == 1
    assert look(rig, 1, 2, 3, 4) == [BlockState.HIT] * 3 + [BlockState.MISS]
    assert look(rig, 1, space=OTHER_SPACE) == [BlockState.MISS]
    assert rig.cache.blocks.look_up("other", SPACE, [key_of(1)]) == [ABSENT]
    assert await load(rig, 3, 4, 1) == [data_of(3), None, data_of(1)]
    [found] = rig.cache.blocks.look_up(TENANT, SPACE, [key_of(1)])
    assert found == FoundBlock(BlockState.HIT, (SIZE_BYTES,), is_in_memory=True)
    assert rig.names() == set()
    assert rig.cache.ledger.newest(10) == []
    assert not rig.cache.ledger.names.ids(TENANT)
    await rig.check()


@pytest.mark.parametrize("size_bytes", [1, 63, 4096, 4097, SIZE_BYTES])
async def test_a_block_has_any_size(disk_rig: DiskRig, size_bytes: int) -> None:
    """No rounding of what is read back, from DRAM and from SSD."""
    await put(disk_rig, 1, is_durable=True, size_bytes=size_bytes)
    assert await load(disk_rig, 1) == [data_of(1, size_bytes)]
    await disk_rig.crash()
    assert await load(disk_rig, 1) == [data_of(1, size_bytes)]


async def test_what_was_not_made_durable_is_there_whole_or_not_at_all(disk_rig: DiskRig) -> None:
    """Durable blocks survive the death of the process; the others leave nothing behind."""
    await put(disk_rig, 1, 2, is_durable=True)
    await put(disk_rig, 3)
    await reserved(disk_rig, wanted(4))
    await load(disk_rig, 1, 2, 3)
    await disk_rig.cache.sessions.save_access_times()
    await disk_rig.crash()
    assert look(disk_rig, 1, 2, 3, 4) == [BlockState.HIT] * 2 + [BlockState.MISS] * 2
    assert await load(disk_rig, 1, 2) == everything([1, 2])
    assert len(disk_rig.cache.ledger.blocks()) == 2
    assert await put(disk_rig, 3, 4) == 2
    await disk_rig.check()


async def test_an_orderly_end_keeps_all(rig: MemoryRig) -> None:
    """Blocks that were in DRAM alone are written."""
    await put(rig, 1, 2, 3)
    await rig.restart()
    assert await load(rig, 1, 2, 3) == everything([1, 2, 3])


async def test_write_behind_writes_blocks(rig: MemoryRig) -> None:
    """Without anybody who asks for it, and a power cut leaves them."""
    await put(rig, 1, 2)
    await Upkeep(rig.cache).turn()
    await rig.cache.drain()
    await rig.crash()
    assert await load(rig, 1, 2) == everything([1, 2])


async def test_a_block_is_visible_when_all_its_parts_are_there(rig: MemoryRig) -> None:
    """Each rank writes its own; a look-up says PENDING until the last one."""
    parts = (Part(0, 2, 0), Part(0, 1, 1), Part(1, 2, 1))
    space, sizes = space_of(bytes(32), b"tiny", b"", parts), (1000, 300, 7)
    data = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    key = key_of(1)
    [first] = await reserved(rig, Wanted(key, sizes, (0,)), space=space)
    [second] = await reserved(rig, Wanted(key, sizes, (1, 2)), space=space, writer=SECOND_WRITER)
    [third] = await reserved(rig, Wanted(key, sizes, (1,)), space=space, writer=3)
    assert third == Room(BlockState.PENDING)
    assert first.reservation_id == second.reservation_id
    await rig.cache.blocks.commit([write(rig, first, 0, data[0])], writer=WRITER)
    assert look(rig, 1, space=space) == [BlockState.PENDING]
    assert await load(rig, 1, space=space) == [None]
    with pytest.raises(ReservationNotFound):
        write(rig, second, 1, data[1], WRITER)
    with pytest.raises(ReservationNotFound):
        await rig.cache.blocks.commit([WrittenPart(first.reservation_id, 0, 0)], writer=WRITER)
    rest = [write(rig, second, part, data[part], SECOND_WRITER) for part in (1, 2)]
    with pytest.raises(InvalidArgument, match="twice"):
        await rig.cache.blocks.commit([rest[0], rest[0]], writer=SECOND_WRITER)
    await rig.cache.blocks.commit(rest, writer=SECOND_WRITER)
    assert look(rig, 1, space=space) == [BlockState.HIT]
    assert await load(rig, 1, space=space) == [b"".join(data)]
    await rig.check()


async def test_writers_that_wait_do_not_pass_the_bound_together(rig: MemoryRig) -> None:
    """Both found places free for all of their blocks: one gets them, the other leaves nothing behind."""
    rig.limits = replace(rig.limits, session_count=3)
    await rig.restart()
    pins, have_come, is_free = rig.cache.appends.pins, asyncio.Event(), asyncio.Event()
    has_room, room = pins.has_room, pins.wait_for_room

    async def wait(client: Pinner, needed: Callable[[], Mapping[int, int]]) -> None:
        # The second one to come.
        if len(rig.cache.ledger.blocks()) == 2:
            have_come.set()
        await is_free.wait()
        await room(client, needed)

    pins.has_room = lambda *_: False  # type: ignore[method-assign]
    pins.wait_for_room = wait  # type: ignore[method-assign]
    writers = [
        asyncio.create_task(reserved(rig, wanted(number), wanted(number + 1), writer=number))
        for number in (1, 3)
    ]
    await have_come.wait()
    pins.has_room = has_room  # type: ignore[method-assign]
    is_free.set()
    rooms, refusal = await asyncio.gather(*writers, return_exceptions=True)

    assert isinstance(rooms, list)
    assert isinstance(refusal, TooManyRequests)
    assert len(rig.cache.ledger.blocks()) == 2
    await rig.check()


async def test_a_writer_that_disappears_leaves_nothing(rig: MemoryRig) -> None:
    """The put is given up, its slot is kept from others for a while, and the next writer begins anew."""
    [room] = await reserved(rig, wanted(1))
    rig.cache.blocks.withdraw(room.reservation_id, WRITER, is_abandoned=True)
    assert look(rig, 1) == [BlockState.MISS]
    assert not rig.cache.ledger.blocks()
    free_bytes = rig.cache.ledger.memory.free_bytes
    await rig.check()
    rig.clock.advance(ns=GRACE_NS)
    rig.cache.appends.end_overdue()
    assert rig.cache.ledger.memory.free_bytes == free_bytes + SLOT_BYTES
    [late] = await reserved(rig, wanted(1))
    with pytest.raises(ReservationNotFound):
        await rig.cache.blocks.commit([WrittenPart(room.reservation_id, 0, 0)], writer=WRITER)
    rig.clock.advance(seconds=301)
    rig.cache.appends.end_overdue()
    with pytest.raises(ReservationNotFound):
        await rig.cache.blocks.commit([WrittenPart(late.reservation_id, 0, 0)], writer=WRITER)
    assert await put(rig, 1) == 1
    await rig.check()


async def test_a_writer_that_lets_go_in_order_leaves_others_their_parts(rig: MemoryRig) -> None:
    """Unless nobody else has any."""
    sizes, space = (10, 10), space_of(bytes(32), b"", b"", (Part(0, 1, 0), Part(0, 1, 1)))
    [room] = await reserved(rig, Wanted(key_of(1), sizes, (0,)), space=space)
    [same] = await reserved(rig, Wanted(key_of(1), sizes, (1,)), space=space, writer=SECOND_WRITER)
    rig.cache.blocks.withdraw(room.reservation_id, WRITER, is_abandoned=False)
    assert look(rig, 1, space=space) == [BlockState.PENDING]
    rig.cache.blocks.withdraw(same.reservation_id, SECOND_WRITER, is_abandoned=False)
    assert look(rig, 1, space=space) == [BlockState.MISS]
    await rig.check()


async def test_of_several_writers_of_one_key_one_writes(disk_rig: DiskRig) -> None:
    """The others have nothing to write, and all find the same bytes."""
    rooms = await asyncio.gather(*(reserved(disk_rig, wanted(1), writer=i) for i in range(1, 9)))
    having = [i for i, [room] in enumerate(rooms, 1) if room.reservation_id]
    assert len(having) == 1
    [room] = rooms[having[0] - 1]
    await disk_rig.cache.blocks.commit([write(disk_rig, room, 0, data_of(1), having[0])], writer=having[0])
    again = await asyncio.gather(*(reserved(disk_rig, wanted(1), writer=i) for i in range(1, 9)))
    assert all(each == [Room(BlockState.HIT)] for each in again)
    assert await load(disk_rig, 1) == [data_of(1)]
    await disk_rig.check()


async def test_bad_requests_change_nothing(rig: MemoryRig) -> None:
    """Each has a precise error."""
    await put(rig, 1)
    [room] = await reserved(rig, wanted(2))
    before = rig.cache.ledger.memory.free_bytes, len(rig.cache.ledger.blocks())
    with pytest.raises(InvalidArgument, match=r"blocks\[1\].key: is named twice"):
        await reserved(rig, wanted(3), wanted(3))
    with pytest.raises(InvalidArgument, match=r"blocks\[1\].parent_key: is not there"):
        await reserved(rig, wanted(3), wanted(4, parent=5))
    with pytest.raises(InvalidArgument, match=r"blocks\[0\].parent_key: is not there"):
        await reserved(rig, wanted(3, parent=3))
    with pytest.raises(InvalidArgument, match="others write this block with parts of"):
        await reserved(rig, wanted(2, size_bytes=5), writer=SECOND_WRITER)
    with pytest.raises(InvalidArgument, match="do not fit"):
        rig.cache.blocks.place(room.reservation_id, 0, 1, memoryview(bytes(SIZE_BYTES)), writer=WRITER)
    with pytest.raises(WriteInProgress):
        await rig.cache.blocks.delete(TENANT, SPACE, [key_of(1), key_of(2)])
    with pytest.raises((CapacityExceeded, TooManyRequests)):
        await reserved(rig, *(wanted(i) for i in range(10, 20)))
    assert (rig.cache.ledger.memory.free_bytes, len(rig.cache.ledger.blocks())) == before
    assert look(rig, 1, 2, 3) == [BlockState.HIT, BlockState.PENDING, BlockState.MISS]
    await rig.check()


async def test_more_than_may_ever_be_reserved_is_refused_before_anything_is_made(rig: MemoryRig) -> None:
    """A call's blocks are held together: to try again is of no use, and the refusal says how much may be."""
    pins = rig.cache.appends.pins
    count = pins.limit_bytes // SLOT_BYTES
    before = rig.cache.ledger.memory.free_bytes

    with pytest.raises(CapacityExceeded) as refused:
        await reserved(rig, *map(wanted, range(count + 1)))
    assert refused.value.limit_bytes == pins.limit_bytes
    assert refused.value.needed_bytes == (count + 1) * SLOT_BYTES
    assert not rig.cache.ledger.blocks()
    assert rig.cache.ledger.memory.free_bytes == before
    # Blocks that are there already need no room.
    await put(rig, 0, 1)
    rooms = await reserved(rig, *map(wanted, range(count)))
    assert [room.state for room in rooms[:3]] == [BlockState.HIT, BlockState.HIT, BlockState.MISS]
    await rig.check()


async def test_a_lease_is_its_tenants_until_it_ends(rig: MemoryRig) -> None:
    """By its token, within its time; what is leased stays though it is deleted."""
    await put(rig, 1)
    blocks = rig.cache.blocks
    held = await blocks.lease(TENANT, SPACE, [key_of(1), key_of(2)], None, ttl_ns=SECOND_NS)
    assert blocks.leased(TENANT, held.token) is held
    with pytest.raises(LeaseNotFound):
        blocks.leased("other", held.token)
    with pytest.raises(LeaseNotFound):
        rig.cache.tokens.release("other", held.token)
    assert await blocks.delete(TENANT, SPACE, [key_of(1), key_of(2)]) == 1
    assert look(rig, 1) == [BlockState.MISS]
    lease = held.leases[0]
    assert lease is not None
    [piece] = lease.pieces
    assert piece.segment.memory is not None
    view = rig.arena.view(piece.segment.memory)
    assert bytes(view[piece.segment.layout.rows(piece.segment.layout.specs[0].stream, 0, 1)]) == data_of(1)
    rig.clock.advance(seconds=1)
    with pytest.raises(LeaseNotFound):
        blocks.leased(TENANT, held.token)
    rig.cache.leases.end_overdue()
    assert not rig.cache.leases.lease_count
    await rig.check()


async def test_a_load_of_more_than_dram_holds_is_refused_and_holds_nothing(rig: MemoryRig) -> None:
    """A caller that asks for less is served."""
    numbers = list(range(12))
    for number in numbers:
        await put(rig, number, is_durable=True)
    with pytest.raises((CapacityExceeded, TooManyRequests)):
        await load(rig, *numbers)
    assert not rig.cache.leases.lease_count
    assert await load(rig, *numbers[:6]) == everything(numbers[:6])
    assert await load(rig, *numbers[6:]) == everything(numbers[6:])
    await rig.check()


async def test_a_child_leaves_before_its_parent(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Least recently used first would take the parents; what continues them goes first."""
    rig = MemoryRig(tmp_path_factory.mktemp("store"), ssd_segments=(8,))
    await rig.open()
    await put(rig, 0, is_durable=True)
    for number in range(1, 6):
        rig.clock.advance(seconds=1)
        await put(rig, number, is_durable=True, parent=number - 1)
    for number in range(100, 104):
        rig.clock.advance(seconds=1)
        await put(rig, number, is_durable=True)
    assert look(rig, *range(6)) == [BlockState.HIT] * 4 + [BlockState.MISS] * 2
    await rig.check()
    # Nor after a restart.
    await rig.restart()
    await put(rig, 104, is_durable=True)
    assert look(rig, *range(6)) == [BlockState.HIT] * 3 + [BlockState.MISS] * 3
    await rig.check()
    await rig.close()


async def test_blocks_that_name_each_other_leave_too(rig: MemoryRig) -> None:
    """A block that was deleted and put anew may continue what continues it."""
    await put(rig, 1, is_durable=True)
    await put(rig, 2, is_durable=True, parent=1)
    await rig.cache.blocks.delete(TENANT, SPACE, [key_of(1)])
    await put(rig, 1, is_durable=True, parent=2)
    for number in range(10, 160):
        await put(rig, number, is_durable=True)
    assert look(rig, 1, 2) == [BlockState.MISS] * 2
    await rig.check()


async def test_a_block_expires_after_its_last_access(rig: MemoryRig) -> None:
    """A look-up is none; what has expired is put anew."""
    await put(rig, 1, 2, is_durable=True)
    rig.clock.advance(seconds=3000)
    await load(rig, 2)
    assert look(rig, 1, 2) == [BlockState.HIT] * 2
    rig.clock.advance(seconds=601)
    assert look(rig, 1, 2) == [BlockState.MISS, BlockState.HIT]
    assert await put(rig, 1, 2) == 1
    assert await load(rig, 1, 2) == everything([1, 2])
    await rig.check()


async def test_bad_bytes_are_a_miss_and_the_block_can_be_put_anew(disk_rig: DiskRig) -> None:
    """Never other bytes than were put."""
    await put(disk_rig, 1, 2, is_durable=True)
    await spoil(disk_rig, 1)
    assert await load(disk_rig, 1, 2) == [None, data_of(2)]
    assert look(disk_rig, 1, 2) == [BlockState.MISS, BlockState.HIT]
    await disk_rig.crash()
    assert look(disk_rig, 1, 2) == [BlockState.MISS, BlockState.HIT]
    assert await put(disk_rig, 1, is_durable=True) == 1
    assert await load(disk_rig, 1) == everything([1])
    await disk_rig.check()


async def test_sessions_and_blocks_leave_for_each_other(rig: MemoryRig) -> None:
    """One policy places both, whoever was used last stays."""
    tokens = Writer(1).make(64)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    for number in range(200):
        await put(rig, number, is_durable=True)
        if number % 10 == 0:
            assert await rig.read("a") == expected(tokens)
    assert rig.names() == {"a"}
    assert look(rig, 199) == [BlockState.HIT]
    for number in range(200, 340):
        await put(rig, number, is_durable=True)
    assert rig.names() == set()
    # The session's fate is remembered, whatever number of blocks came and went.
    history = rig.cache.state.journal.history
    assert history.end_of(TENANT, "a") is Event.EVICTED
    assert history.end_of(TENANT, block_id(SPACE, key_of(0))) is None
    await rig.check()


async def test_a_refused_request_takes_back_its_own_places_alone(rig: MemoryRig) -> None:
    """A part that the same writer has by another request stays its own, and is committed."""
    sizes, space = (10, 10), space_of(bytes(32), b"", b"", (Part(0, 1, 0), Part(0, 1, 1)))
    [first] = await reserved(rig, Wanted(key_of(1), sizes, (0,)), space=space)
    # No more than may be reserved at all, and more than there is room for now.
    count = rig.cache.appends.pins.limit_bytes // block_layout(sizes).size_bytes
    too_many = [Wanted(key_of(number), sizes, (0, 1)) for number in range(2, count + 1)]

    with pytest.raises(CapacityExceeded, match="may be written before SSD has more"):
        await reserved(rig, Wanted(key_of(1), sizes, (1,)), *too_many, space=space)

    [second] = await reserved(rig, Wanted(key_of(1), sizes, (1,)), space=space)
    assert second.reservation_id == first.reservation_id
    await rig.cache.blocks.commit(
        [write(rig, first, 0, bytes(10)), write(rig, second, 1, bytes(10))], writer=WRITER
    )
    assert look(rig, 1, space=space) == [BlockState.HIT]
    await rig.check()


async def test_a_block_is_left_on_ssd_once(disk_rig: DiskRig) -> None:
    """Its slot stays while the lease does, whatever becomes of the block; the next reader has it in DRAM."""
    await put(disk_rig, 1, 2, is_durable=True)
    await disk_rig.crash()
    blocks, keys = disk_rig.cache.blocks, [key_of(1), key_of(2), key_of(3)]

    async def leased() -> list[bool | None]:
        found = await blocks.lease(TENANT, SPACE, keys, WRITER, ttl_ns=SECOND_NS, leaves_on_ssd=True)
        held.append(found)
        return [None if one is None else bool(one.lease.on_ssd) for one in found.blocks or ()]

    held: list[TokenLease] = []
    assert await leased() == [True, True, None]
    assert disk_rig.cache.leases.pins.used_bytes == 0
    assert await blocks.delete(TENANT, SPACE, keys[:1]) == 1
    for number in range(10, 20):
        await put(disk_rig, number, is_durable=True)
    await disk_rig.check()
    assert await leased() == [None, False, None]
    for found in held:
        disk_rig.cache.tokens.let_go(found)
    assert not disk_rig.cache.leases.lease_count
    await disk_rig.check()


async def test_what_readers_left_on_ssd_is_known_of_so_many_blocks(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is forgotten, and left there once more."""
    monkeypatch.setattr("ctxcache.cache.blocks.LEFT_KEPT", 2)
    await put(disk_rig, 1, 2, 3, is_durable=True)
    await disk_rig.crash()
    left = []
    for number in (1, 2, 3, 1, 3):
        found = await disk_rig.cache.blocks.lease(
            TENANT, SPACE, [key_of(number)], WRITER, ttl_ns=SECOND_NS, leaves_on_ssd=True
        )
        left.append([bool(one and one.lease.on_ssd) for one in found.blocks or ()])
        disk_rig.cache.tokens.let_go(found)
    assert left == [[True], [True], [True], [True], [False]]
    await disk_rig.check()


async def test_blocks_that_are_held_together_have_one_lease(rig: MemoryRig) -> None:
    """Each stays while it lasts, whatever becomes of the block, and is asked for by its key."""
    await put(rig, 1, 2, 3)
    leases, blocks = rig.cache.leases, rig.cache.blocks
    read_count = rig.cache.state.journal.counts["read", "hit"]
    held_blocks = blocks.hold_at_hand(TENANT, SPACE, list(map(key_of, (2, 9, 1, 2))), WRITER)
    found = rig.cache.tokens.hold(TENANT, held_blocks, SECOND_NS)
    assert leases.lease_count == len(found.leases) == 1
    assert rig.cache.state.journal.counts["read", "hit"] == read_count + 2
    assert await blocks.delete(TENANT, SPACE, [key_of(1), key_of(2)]) == 2
    for number in range(10, 30):
        await put(rig, number, is_durable=True)
    for held, number in zip(found.blocks or (), (2, 9, 1, 2), strict=True):
        assert (held is None) == (number == 9)
        if held is not None:
            slot, layout = held.segment.memory, held.segment.layout
            assert slot is not None
            view = rig.arena.view(slot)
            assert bytes(view[layout.rows(layout.specs[0].stream, 0, 1)]) == data_of(number)
    await rig.check()
    rig.clock.advance(seconds=1)
    leases.end_overdue()
    rig.cache.tokens.forget_ended()
    assert not leases.lease_count
    assert not leases.pins.used_bytes
    assert not len(rig.cache.tokens)
    await rig.check()


async def test_of_blocks_that_are_to_be_held_the_first_ones_are_that_fit(rig: MemoryRig) -> None:
    """Within half of what their client may pin, where what it pins takes no room again, and beside others."""
    leases, blocks = rig.cache.leases, rig.cache.blocks
    limit_bytes = leases.pins.limit_of(Pinner(TENANT, WRITER))
    most_count = limit_bytes // 2 // SLOT_BYTES
    numbers = list(range(2 * most_count))
    for number in numbers:
        await put(rig, number, is_durable=True)

    def held(*some: int, client: int = WRITER) -> int:
        found = blocks.hold_at_hand(TENANT, SPACE, list(map(key_of, some)), client)
        rig.cache.tokens.hold(TENANT, found, SECOND_NS)
        count = sum(one is not None for one in found)
        assert None not in found[:count]
        return count

    assert held(*numbers) == most_count
    assert held(*numbers) == most_count
    assert held(numbers[-1]) == 0
    assert leases.pins.used_by(Pinner(TENANT, WRITER)) == most_count * SLOT_BYTES <= limit_bytes // 2
    assert held(*reversed(numbers), client=SECOND_WRITER) > 0
    assert leases.pins.used_bytes <= leases.pins.limit_bytes
    await rig.check()
    rig.clock.advance(seconds=1)
    leases.end_overdue()
    assert not leases.pins.used_bytes
    await rig.check()
