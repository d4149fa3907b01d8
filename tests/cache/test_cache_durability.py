"""What is acknowledged as durable is there after a power cut, and nothing wrong is beside it."""

import asyncio

import pytest
from cache_rig import SEGMENT_TOKENS, MemoryRig, Writer, expected

from ctxcache.errors import CapacityExceeded, SessionNotFound, TierFailure
from ctxcache.testing.fakes import Operation


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def test_tokens_committed_during_a_flush_are_not_taken_for_older_ones(
    rig: MemoryRig, writer: Writer
) -> None:
    """Rows that came while a flush waited never stand in for those that are appended after a crash."""
    rig.arena_segments = 12
    await rig.restart()
    await rig.create("a")
    first = writer.make(8 * SEGMENT_TOKENS + 5)
    await rig.append("a", first)
    gate = rig.ssd.hold(Operation.WRITE)
    flushing = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.WRITE)
    await rig.append("a", writer.make(20))
    gate.set()
    await flushing
    await rig.crash()
    kept = rig.token_count("a")
    assert await rig.read("a") == expected(first[:kept])
    after = writer.make(30)
    await rig.append("a", after)

    assert kept == len(first)
    assert await rig.read("a") == expected([*first, *after])
