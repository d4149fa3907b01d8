"""Promotions that were asked for and wait for room.

Deferred hints are bounded, and keep no caller waiting in vain.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Writer

from ctxcache.cache.hints import NO_ROOM, Action, Hint, HintAnswer, HintVerdict
from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Capacities

ARENA_SEGMENTS = 8
"""Segments of the arena; the high watermark keeps one of them free."""
SECOND_NS = 10**9


class Asked(MemoryRig):
    """A cache that clients give hints to."""

    async def store(self, name: str, segment_count: int) -> None:
        """A session that lies on SSD alone."""
        await self.create(name)
        for number in range(segment_count):
            await self.append(name, Writer(number).make(SEGMENT_TOKENS), is_durable=True)
            await self.demote(name)

    async def ask(self, name: str) -> HintAnswer:
        """Let a session come."""
        deadline_s = asyncio.get_running_loop().time() + 30
        hint = Hint(TENANT, name, Action.PREFETCH, ttl_ns=600 * SECOND_NS)
        return await self.cache.hints.carry_out(hint, deadline_s)

    def memory_count(self, name: str) -> int:
        """How many of its segments are in DRAM."""
        return self.cache.ledger.find(TENANT, name).amounts().memory_count


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    """Look-ahead over eight segments of DRAM."""
    policy = partial(LookAhead, Capacities(ARENA_SEGMENTS * SLOT_BYTES, 64 * SLOT_BYTES))
    rig = Asked(tmp_path, ARENA_SEGMENTS, make_policy=policy)
    await rig.open()
    yield rig
    await rig.check()
    await rig.close()


async def test_the_time_of_who_asks_again_counts_from_then(asked: Asked) -> None:
    """A later hint prolongs what waits."""
    await asked.store("held", 7)
    await asked.store("waiting", 2)
    lease = await asked.acquire("held")
    await asked.ask("waiting")
    asked.clock.advance(seconds=599)
    await asked.ask("waiting")
    asked.clock.advance(seconds=1)
    asked.cache.hints.drop_overdue()
    assert len(asked.cache.hints.deferred) == 1
    asked.cache.leases.release(lease.lease_id)
    await asked.cache.prefetching.prefetch()
    assert asked.memory_count("waiting") == 2
    assert not len(asked.cache.hints.deferred)


async def test_who_is_larger_than_memory_does_not_wait_for_it(asked: Asked) -> None:
    """The part that has room comes; the rest never could, and whoever is in a queue comes in its place."""
    await asked.store("large", 8)
    await asked.store("next", 1)
    answer = await asked.ask("large")
    assert (answer.outcome, answer.reason) == (HintVerdict.CLIPPED, NO_ROOM)
    assert asked.memory_count("large") == 7

    asked.cache.placement.hinted(asked.cache.ledger.find(TENANT, "next"), 100.0)
    await asked.cache.prefetching.prefetch()
    assert asked.memory_count("next") == 1
