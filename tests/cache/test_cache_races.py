"""Many tasks at once on few sessions: every read shows one writer's tokens in one of their states.

Every token spells its number, so that a read is right by itself: what was appended in order is read
in order, without a gap that no truncation made and without a foreign byte.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cache_rig import TENANT, DiskRig, MemoryRig, Token, Writer, expected

from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    SessionAlreadyExists,
    SessionNotFound,
    TokenRangeOutOfBounds,
    TooManyRequests,
    WriteInProgress,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.server.upkeep import Upkeep

ALLOWED = (
    CapacityExceeded, SessionAlreadyExists, SessionNotFound, TokenRangeOutOfBounds, TooManyRequests,
    WriteInProgress, WriteOffsetMismatch,
)  # fmt: skip
NAMES = ("a", "b", "c", "d")
STEPS = 60
Step = Callable[[str], Awaitable[object]]


class Crowd:
    """Tasks that do one thing after another, chosen by dice that fall the same way every time."""

    def __init__(self, rig: DiskRig | MemoryRig, seed: int) -> None:
        self.rig = rig
        self.dice = random.Random(seed)  # no secret
        self.writer = Writer(1)
        self.read_count = 0

    async def run(self, task_count: int) -> None:
        """Let them all loose, then wait for the last."""
        await asyncio.gather(*(self.live() for _ in range(task_count)))

    async def live(self) -> None:
        """One task's life."""
        rig = self.rig
        steps: list[Step] = [
            self.append, self.append, self.append, self.read, self.read, self.lease, self.truncate, self.fork,
            self.cancelled, self.upkeep, rig.delete, rig.flush, rig.demote, rig.create,
        ]  # fmt: skip
        for _ in range(STEPS):
            try:
                await self.dice.choice(steps)(self.dice.choice(NAMES))
            except ALLOWED:
                await asyncio.sleep(0)

    async def upkeep(self, _: str) -> None:
        """The background steps."""
        await Upkeep(self.rig.cache).turn()

    async def append(self, name: str) -> None:
        """Some tokens, in one part or two."""
        reservation = await self.rig.reserve(name, count := self.dice.randrange(1, 90))
        begin, tokens = reservation.committed, self.writer.make(count)
        try:
            self.rig.place(reservation, begin, tokens)
            for end, keep_open in ((count // 2, True), (count, False)):
                await asyncio.sleep(0)
                await self.rig.cache.appends.commit(
                    reservation, begin + end, is_durable=self.dice.random() < 0.3, keep_open=keep_open
                )
        finally:
            self.rig.cache.appends.release(reservation, is_abandoned=self.dice.random() < 0.3)

    async def read(self, name: str) -> None:
        """All of a session."""
        self.check(await self.rig.read(name))

    async def lease(self, name: str) -> None:
        """A part of a session, for a while."""
        lease = await self.rig.acquire(name, 0, min(self.rig.token_count(name), 100))
        try:
            self.check(before := self.rig.leased(lease))
            for _ in range(self.dice.randrange(20)):
                await asyncio.sleep(0)
            assert self.rig.leased(lease) == before
        finally:
            self.rig.cache.leases.release(lease.lease_id)

    async def truncate(self, name: str) -> None:
        """Something from the middle or the end."""
        count = self.rig.token_count(name)
        begin = self.dice.randrange(count + 1)
        await self.rig.truncate(name, (begin, self.dice.randrange(begin, count + 1)))

    async def fork(self, name: str) -> None:
        """Into a name that may be taken."""
        await self.rig.fork(name, self.dice.choice(NAMES))

    async def cancelled(self, name: str) -> None:
        """Something whose caller stops waiting."""
        steps: list[Step] = [self.append, self.read, self.rig.flush]
        task = asyncio.ensure_future(self.dice.choice(steps)(name))
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    def check(self, found: dict[Stream, bytes]) -> None:
        """Every stream shows the same tokens, each in full, in the order in which they were made."""
        words = [found[TOKENS][at : at + 4] for at in range(0, len(found[TOKENS]), 4)]
        tokens = [Token(int.from_bytes(w[:2], "little"), int.from_bytes(w[2:], "little")) for w in words]
        assert found == expected(tokens)
        numbers = [token.number for token in tokens]
        assert numbers == sorted(set(numbers))
        self.read_count += 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [DiskRig, MemoryRig])
async def test_a_crowd_never_sees_a_wrong_byte(
    tmp_path: Path, make: type[DiskRig | MemoryRig], seed: int
) -> None:
    """Whatever is done at once, reads are right, nothing hangs, and the books add up afterwards."""
    rig = make(tmp_path, ssd_segments=(7, 7))
    await rig.open()
    for name in NAMES:
        await rig.create(name)
    crowd = Crowd(rig, seed)
    async with asyncio.timeout(60):
        await crowd.run(task_count=8)
    await rig.check()
    for name in rig.names():
        # Room for what is read comes from flushes, and room for those from other sessions.
        with suppress(SessionNotFound):
            await crowd.read(name)

    assert crowd.read_count > 20
    assert rig.cache.state.counters.corrupt_segment_count == 0
    assert rig.cache.appends.reservation_count == rig.cache.leases.lease_count == 0
    # One session may have become larger than all of SSD.
    with suppress(CapacityExceeded, TooManyRequests):
        await rig.close()


async def test_damage_found_by_many_at_once_is_counted_once(disk_rig: DiskRig) -> None:
    """All readers are told, the session is cut once, and nothing stays held."""
    await disk_rig.create("a")
    tokens = Writer(1).make(300)
    await disk_rig.append("a", tokens, is_durable=True)
    await disk_rig.demote("a")
    slot = disk_rig.cache.ledger.find(TENANT, "a").segments[2].durable
    assert slot
    with disk_rig.segments_file(slot.path_index).open("r+b") as file:
        file.seek(slot.offset_bytes + 9000)
        file.write(b"damage")
    reads = [disk_rig.read("a") for _ in range(5)]
    leases = [disk_rig.acquire("a", 100, 200) for _ in range(5)]
    results = await asyncio.gather(*reads, *leases, return_exceptions=True)
    await disk_rig.check()

    assert {type(result) for result in results} == {CorruptSegment}
    assert disk_rig.cache.state.counters.corrupt_segment_count == 1
    assert await disk_rig.read("a") == expected(tokens[:128])
