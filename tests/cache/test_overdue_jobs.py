"""Engines that are stuck: what they have said keeps nothing from others for ever."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cache_rig import SEGMENT_TOKENS, TENANT, MemoryRig, Writer

from ctxcache.cache.queues import Queue
from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.schedule import Job


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[MemoryRig]:
    """A store whose policy follows the queue."""
    rig = MemoryRig(tmp_path, make_policy=partial(LookAhead, Capacities(1 << 20, 1 << 20)))
    await rig.open()
    yield rig
    await rig.cache.drain()
    rig.arena.close()


@pytest.fixture
async def queue(rig: MemoryRig) -> Queue:
    """An engine's queue, and sessions `a` to `c`, used in that order."""
    for i, name in enumerate("abc"):
        await rig.create(name)
        await rig.append(name, Writer(i + 1).make(SEGMENT_TOKENS))
        rig.clock.advance(seconds=1)
    return rig.cache.queues.join(TENANT, "engine", grace_ns=None, fingerprint=b"")


@pytest.mark.parametrize("start", [{"position": 1.0}, {"start_s": 10.0}])
async def test_a_job_that_never_starts_does_not_exempt_its_session_for_ever(
    rig: MemoryRig, queue: Queue, start: dict[str, Any]
) -> None:
    """Its session ranks as all others do in the end, though the stream is there.

    And as before when it is put again.
    """
    rig.cache.queues.put(queue, "a", Job("stuck", None, **start))
    placement, by_name = rig.cache.placement, rig.cache.ledger.find

    def is_above_others() -> bool:
        ranks = {name: placement.rank(by_name(TENANT, name).uid) or () for name in "ac"}
        return ranks["a"] > ranks["c"]

    assert is_above_others()
    for _ in range(16 * 60 + 20):
        rig.clock.advance(seconds=1)
        await rig.cache.queues.end_overdue()
    assert not is_above_others()
    assert rig.cache.queues.job_count(queue) == 1

    rig.cache.queues.put(queue, "a", Job("stuck", None, position=1.0))
    assert is_above_others()
