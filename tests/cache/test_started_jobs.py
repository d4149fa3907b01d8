"""A job that is said to run before its session is accessed.

The policy sees its turn come out of the queue.
"""

from collections.abc import Callable

import pytest
from cache_rig import SEGMENT_TOKENS, TENANT, MemoryRig, Writer

from ctxcache.cache.queues import Queue
from ctxcache.core.placement.schedule import Job


class Heard:
    """The jobs and turns that the policy hears of, in order."""

    def __init__(self, rig: MemoryRig) -> None:
        self.events: list[str] = []
        policy = rig.cache.placement.policy
        for name in ("arrived", "hinted", "withdrawn"):
            setattr(policy, name, self._listen(name, getattr(policy, name)))

    def _listen(self, name: str, hear: Callable[..., None]) -> Callable[..., None]:
        def listen(*arguments: object) -> None:
            self.events.append(name)
            hear(*arguments)

        return listen


@pytest.fixture
async def queue(rig: MemoryRig) -> Queue:
    """An engine's queue with a job of session `a`."""
    await rig.create("a")
    await rig.append("a", Writer(1).make(SEGMENT_TOKENS))
    queue = rig.cache.queues.join(TENANT, "engine", grace_ns=None, fingerprint=b"")
    assert not rig.cache.queues.put(queue, "a", Job("job", None, position=1.0))
    return queue


async def test_a_turn_comes_out_of_the_queue_though_its_job_was_said_to_run_before(
    rig: MemoryRig, queue: Queue
) -> None:
    """Schedulers speak first, and workers read then: the queue is judged by turns that it foresaw."""
    heard = Heard(rig)
    rig.cache.queues.gone(queue, "job", is_started=True)
    assert heard.events == []

    lease = await rig.acquire("a")
    assert heard.events == ["arrived", "withdrawn"]
    rig.cache.leases.release(lease.lease_id)
    assert heard.events == ["arrived", "withdrawn"]


async def test_a_job_that_runs_and_reads_nothing_is_withdrawn_after_a_while(
    rig: MemoryRig, queue: Queue
) -> None:
    """Nothing stays in the queue for a turn that needs nothing of the store."""
    heard = Heard(rig)
    rig.cache.queues.gone(queue, "job", is_started=True)
    rig.clock.advance(ns=rig.cache.queues.limits.grace_ns - 1)
    await rig.cache.queues.end_overdue()
    assert heard.events == []

    rig.clock.advance(ns=1)
    await rig.cache.queues.end_overdue()
    assert heard.events == ["withdrawn"]


async def test_the_next_job_of_a_session_is_not_withdrawn_with_the_last(rig: MemoryRig, queue: Queue) -> None:
    """One that is put while its predecessor runs waits as any other does."""
    rig.cache.queues.gone(queue, "job", is_started=True)
    rig.cache.queues.put(queue, "a", Job("next", None, position=2.0))
    heard = Heard(rig)
    rig.clock.advance(ns=rig.cache.queues.limits.grace_ns)
    await rig.cache.queues.end_overdue()

    assert heard.events == []
    rig.cache.queues.gone(queue, "next", is_started=False)
    assert heard.events == ["withdrawn"]


async def test_a_job_said_to_run_after_its_turn_is_withdrawn_at_once(rig: MemoryRig, queue: Queue) -> None:
    """The access was its turn, though word of it came late: nothing waits for another."""
    lease = await rig.acquire("a")
    rig.cache.leases.release(lease.lease_id)
    heard = Heard(rig)
    rig.cache.queues.gone(queue, "job", is_started=True)

    assert heard.events == ["withdrawn"]


async def test_a_job_waits_from_the_moment_at_which_it_was_put(rig: MemoryRig, queue: Queue) -> None:
    """Not from that of the last event before it, which may be long ago: when it is due follows."""
    await rig.create("b")
    await rig.append("b", Writer(1).make(SEGMENT_TOKENS))
    policy = rig.cache.placement.policy
    passed: list[float] = []
    hear = policy.passed
    policy.passed = lambda now_s: (passed.append(now_s), hear(now_s))[1]  # type: ignore[method-assign,func-returns-value]
    rig.clock.advance(seconds=30)
    rig.cache.queues.put(queue, "b", Job("next", None, position=2.0))

    assert passed == [rig.clock.monotonic_ns() / 1e9]
