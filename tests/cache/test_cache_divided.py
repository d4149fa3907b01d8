"""Where tenants are told apart, one that takes all it can get leaves the next one enough to begin with."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rig import MODEL, SEGMENT_TOKENS, STREAMS, MemoryRig, Writer, expected

from ctxcache.cache.queues import Queues
from ctxcache.core.limits import Bound, Limits, QueueLimits
from ctxcache.errors import CapacityExceeded, TooManyRequests
from ctxcache.format.streams import ranges_of
from ctxcache.identity import ArenaGrant
from ctxcache.runtime.clock import SystemClock
from ctxcache.service.admission import Admission
from ctxcache.service.bulk_connection import Tickets
from ctxcache.service.callers import Caller

GREEDY = Limits(
    session_count=30,
    model_count=30,
    lease_count=9,
    lease_share=0.75,
    reservation_share=0.75,
    client_share=0.75,
    room_wait_ns=0,
    are_divided=True,
)


async def divided(directory: Path) -> MemoryRig:
    """A cache of 16 segments of memory, of tenants `a` and `b`."""
    rig = MemoryRig(directory, arena_segments=16, tenant="a", limits=GREEDY)
    await rig.open()
    await rig.cache.models.register("b", MODEL)
    return rig


async def as_many(take: Callable[[int], Any]) -> int:
    """How many are given before one is refused."""
    with suppress(TooManyRequests, CapacityExceeded):
        for number in range(2000):
            taken = take(number)
            if hasattr(taken, "__await__"):
                await taken
    return number


def test_what_is_left_is_for_those_who_have_less() -> None:
    """Alone a tenant has two thirds; however many come, each finds some.

    One tenant of an undivided count has all.
    """
    bound = Bound(30, is_divided=True)
    own = dict.fromkeys("abcdefgh", 0)
    for name in own:
        while not bound.is_reached(sum(own.values()), own[name]):
            own[name] += 1

    assert own["a"] == 20
    assert own["b"] == 7
    assert min(list(own.values())[:3]) > 0
    assert sum(own.values()) <= 30
    assert not Bound(30).is_reached(29, 29)
    assert Bound(30).is_reached(30, 0)


async def test_counts_leave_some_for_others(tmp_path: Path) -> None:
    """Sessions, models, leases, engines, tickets, running rpcs: whatever one takes, another gets some."""
    rig = await divided(tmp_path)

    def create(tenant: str) -> Callable[[int], Any]:
        return lambda number: rig.cache.sessions.create(
            tenant,
            f"s{number}",
            model_id=MODEL.model_id,
            layout=ranges_of(STREAMS),
            expiration=None,
            is_pinned=False,
        )

    def register(tenant: str) -> Callable[[int], Any]:
        return lambda number: rig.cache.models.register(tenant, replace(MODEL, model_id=f"m{number}"))

    def join(tenant: str) -> Callable[[int], Any]:
        return lambda number: queues.join(tenant, f"e{number}", grace_ns=None, fingerprint=b"")

    def issue(tenant: str) -> Callable[[int], Any]:
        return lambda _: tickets.issue(callers[tenant])

    def enter(tenant: str) -> Callable[[int], Any]:
        return lambda _: running.enter_context(admission.enter(tenant))

    running = ExitStack()
    queues = Queues(rig.cache.state, QueueLimits(engine_count=9, are_divided=True))
    tickets = Tickets(SystemClock(), are_divided=True)
    admission = Admission("rpcs", 9, is_divided=True)
    callers = {tenant: Caller(f"cn:{tenant}", ArenaGrant(tenant)) for tenant in "ab"}
    for take in (create, register, join, issue, enter):
        first, second = await as_many(take("a")), await as_many(take("b"))
        assert first > second > 0
    await rig.close()


async def test_room_in_memory_is_left_for_others(tmp_path: Path) -> None:
    """Readers and writers of one tenant, however many clients they are, never hold all that may be held."""
    rig = await divided(tmp_path)
    for tenant in "ab":
        rig.tenant = tenant
        for number in range(12):
            await rig.create(f"s{number}")
            await rig.append(f"s{number}", Writer(number).make(SEGMENT_TOKENS), is_durable=True)

    def lease(tenant: str) -> Callable[[int], Any]:
        async def acquire(number: int) -> None:
            rig.tenant = tenant
            await rig.cache.leases.acquire(replace(rig.request(f"s{number}"), client=number))

        return acquire

    def reserve(tenant: str) -> Callable[[int], Any]:
        async def write(number: int) -> None:
            rig.tenant = tenant
            await rig.reserve(f"s{number}", SEGMENT_TOKENS)

        return write

    rig.cache.state.limits = replace(GREEDY, lease_count=1000)
    leased = [await as_many(lease(tenant)) for tenant in "ab"]
    reserved = [await as_many(reserve(tenant)) for tenant in "ab"]

    assert leased == [6, 3]
    assert reserved == [6, 1]
    await rig.close()


async def test_what_could_never_be_ones_own_is_told_apart(tmp_path: Path) -> None:
    """More than a tenant may ever hold is refused for good, and read as a stream all the same."""
    rig = await divided(tmp_path)
    await rig.create("long")
    tokens = Writer(1).make(10 * SEGMENT_TOKENS)
    for begin in range(0, len(tokens), 2 * SEGMENT_TOKENS):
        await rig.append("long", tokens[begin : begin + 2 * SEGMENT_TOKENS], is_durable=True)
    with pytest.raises(CapacityExceeded) as caught:
        await rig.acquire("long")

    assert int(caught.value.limit_bytes) < int(caught.value.needed_bytes)
    assert await rig.read("long") == expected(tokens)
    await rig.close()
