"""A device that hangs under the cache: readers and writers are answered, and late bytes hurt nobody."""

import asyncio

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, DiskRig, Token, Writer, expected
from hung_device import HungDevice

from ctxcache.errors import SessionNotFound, TierFailure
from ctxcache.storage.tiers.ssd import HANG_AFTER_S


def path_of(rig: DiskRig, session_id: str) -> int:
    """Where a session lies on SSD."""
    (path,) = {
        s.durable.path_index for s in rig.cache.ledger.find(rig.tenant, session_id).segments if s.durable
    }
    return path


async def stored(rig: DiskRig, count: int) -> dict[str, list[Token]]:
    """So many sessions of one segment, durable and only on SSD."""
    made = {f"s{i}": Writer(i).make(SEGMENT_TOKENS) for i in range(count)}
    for name, tokens in made.items():
        await rig.create(name)
        await rig.append(name, tokens)
        await rig.demote(name)
    return made


async def lose_what_hangs(rig: DiskRig) -> None:
    """Let the time pass after which an operation is too old."""
    rig.clock.advance(seconds=HANG_AFTER_S)
    await rig.cache.devices.give_up_overdue()


async def come_back(rig: DiskRig) -> None:
    """Look at the devices until none is lost."""
    while rig.cache.ledger.lost.paths:
        await rig.cache.devices.look()
        await asyncio.sleep(0)


async def test_a_read_that_comes_late_writes_into_nobodys_memory(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is answered when it is too old; the slot is nobody's until the device has let go of it."""
    rig = disk_rig
    made = await stored(rig, 2)
    lost, there = sorted(made, key=lambda name: path_of(rig, name))
    device = HungDevice(rig.ssd.paths[0], ("preadv",))
    free_bytes = rig.cache.ledger.memory.free_bytes
    with device.hung(monkeypatch):
        reader = asyncio.create_task(rig.acquire(lost))
        await asyncio.to_thread(device.came.wait)
        assert await rig.read(there) == expected(made[there])
        await lose_what_hangs(rig)
        with pytest.raises(TierFailure, match="has not come back for 30 s"):
            await reader
        assert rig.token_count(lost) == 0
        assert (
            rig.cache.sessions.lookup(rig.tenant, lost, made_fingerprint(rig, lost)).reason == "DEVICE_LOST"
        )
        # All the memory that there is, is somebody's by the time that the bytes come.
        others = {f"t{i}": Writer(9 + i).make(SEGMENT_TOKENS) for i in range(rig.arena_segments - 1)}
        for name, tokens in others.items():
            await rig.create(name)
            await rig.append(name, tokens)
        assert rig.cache.promotions.owed
        await rig.check()
        device.answer()
        while rig.cache.promotions.owed:  # noqa: ASYNC110  # the device's own thread ends it
            await asyncio.sleep(0)
        for name, tokens in others.items():
            assert await rig.read(name) == expected(tokens)
            await rig.delete(name)
        await come_back(rig)
    assert await rig.read(lost) == expected(made[lost])
    await rig.demote(lost)
    await rig.demote(there)

    assert rig.cache.ledger.memory.free_bytes == free_bytes
    await rig.check()


def made_fingerprint(rig: DiskRig, session_id: str) -> bytes:
    """The model's of a session."""
    return rig.cache.ledger.find(rig.tenant, session_id).model_fingerprint


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
async def test_a_flush_that_hangs_is_written_elsewhere(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Its writer gets durable tokens; what the device does late falls on nobody's rows."""
    rig = disk_rig
    made = await stored(rig, 2)
    home = path_of(rig, "s0")
    tokens = Writer(0)
    tokens.make(SEGMENT_TOKENS)
    more = tokens.make(SEGMENT_TOKENS)
    device = HungDevice(rig.ssd.paths[home], (operation,))
    with device.hung(monkeypatch):
        writer = asyncio.create_task(rig.append("s0", more, is_durable=True))
        await asyncio.to_thread(device.came.wait)
        await lose_what_hangs(rig)
        await writer
        assert not rig.ssd.refusals.keys() - {home}
        assert rig.cache.ledger.below.free_bytes_outside({home}) == 62 * SLOT_BYTES
        device.answer()
        await come_back(rig)
    for name in ("u0", "u1"):
        await rig.create(name)
        made[name] = Writer(20).make(SEGMENT_TOKENS)
        await rig.append(name, made[name], is_durable=True)
    await rig.check()
    await rig.crash()

    made["s0"] += more
    for name, expected_tokens in made.items():
        assert await rig.read(name) == expected(expected_tokens)
    await rig.check()


async def test_the_end_waits_for_no_device(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a read that never came back the cache closes, and everything that is elsewhere is kept."""
    rig = disk_rig
    made = await stored(rig, 2)
    lost = next(name for name in made if path_of(rig, name) == 0)
    device = HungDevice(rig.ssd.paths[0], ("preadv",))
    with device.hung(monkeypatch):
        reader = asyncio.create_task(rig.acquire(lost))
        await asyncio.to_thread(device.came.wait)
        await lose_what_hangs(rig)
        with pytest.raises((TierFailure, SessionNotFound)):
            await reader
        await rig.cache.drain()
        rig.ssd.close()
        device.answer()
        while rig.cache.promotions.owed:  # noqa: ASYNC110  # the device's own thread ends it
            await asyncio.sleep(0)
    await rig.restart()
    for name, tokens in made.items():
        assert await rig.read(name) == expected(tokens)
