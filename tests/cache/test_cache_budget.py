"""Writers that wait for room: whose turn it is, and what is left when they stop waiting."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import MODEL, SEGMENT_TOKENS, UNLIMITED, MemoryRig, Writer
from fakes import Operation

from ctxcache.cache.budgets import QUEUE_LENGTH
from ctxcache.core.limits import LENGTH, Limits, Watermarks
from ctxcache.core.placement.shares import NO_SHARES, Share, Shares
from ctxcache.errors import CacheError, CapacityExceeded, TooManyRequests

LIMIT_SEGMENTS = 24
"""The segments that may be dirty, of the arena's 32."""
PATIENCE_S = 10.0
EQUAL = Shares(are_tenants_known=True)
QUARTER = Shares({"b": Share(0.25)})
Make = Callable[..., Awaitable[MemoryRig]]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Caches of two tenants, a and b."""
    rigs = []

    async def made(
        *, shares: Shares = EQUAL, writer_wait_s: float = PATIENCE_S, limits: Limits = UNLIMITED
    ) -> MemoryRig:
        marks = Watermarks(low=0, high=0, dirty=1, dirty_limit=24 / 32, writer_wait_s=writer_wait_s)
        rig = MemoryRig(
            tmp_path, arena_segments=32, ssd_segments=(512,), watermarks=marks, shares=shares, limits=limits
        )
        rig.tenant = "a"
        await rig.open()
        await rig.cache.models.register("b", MODEL)
        rigs.append(rig)
        return rig

    yield made
    for rig in rigs:
        # A test that fails leaves the device as it stands.
        rig.ssd.hold(Operation.WRITE).set()
        await rig.check()
        assert not rig.cache.dirty_bound.waiting_count
        assert not rig.cache.appends.pins.waiting_count
        rig.arena.close()


class _Budget:
    """Appends of whole segments to new sessions, and who was granted room, in order."""

    def __init__(self, rig: MemoryRig) -> None:
        self.rig, self.granted = rig, list[str]()
        self._count = 0

    async def append(self, tenant: str, segment_count: int = 1) -> None:
        """Append to a new session of that tenant."""
        self._count += 1
        name = f"s{self._count}"
        self.rig.tenant = tenant
        await self.rig.create(name)
        self.rig.tenant = tenant
        tokens = Writer(self._count).make(segment_count * SEGMENT_TOKENS)
        reservation = await self.rig.reserve(name, len(tokens))
        self.granted.append(tenant)
        self.rig.place(reservation, 0, tokens)
        await self.rig.cache.appends.commit(reservation, len(tokens), is_durable=False, keep_open=False)

    async def waiting(self, tenant: str, segment_count: int = 1) -> asyncio.Task[None]:
        """Begin an append that has to wait; it is in the line when this returns."""
        line = self.rig.cache.dirty_bound
        count = line.waiting_count
        task = asyncio.ensure_future(self.append(tenant, segment_count))
        while line.waiting_count == count and not task.done():  # noqa: ASYNC110  # tasks get there by themselves
            await asyncio.sleep(0)
        return task

    def claimed(self) -> dict[str, int]:
        """Segments that each tenant has claimed."""
        claimed = self.rig.cache.ledger.unwritten.claimed_by
        some = next(iter(self.rig.cache.ledger.segments()))
        return {tenant: size // some.layout.size_bytes for tenant, size in claimed.items()}


@pytest.mark.parametrize("shares", [EQUAL, QUARTER])
async def test_who_is_within_its_share_goes_first_whenever_it_comes(make: Make, shares: Shares) -> None:
    """A tenant that has everything waits, and those of the other are served in the order of coming."""
    rig = await make(shares=shares)
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS)
    gate = rig.ssd.hold(Operation.WRITE)
    tasks = [await budget.waiting("a", 20), await budget.waiting("a", 1)]
    await rig.reached(Operation.WRITE)
    tasks += [await budget.waiting("b", 2), await budget.waiting("b", 1)]
    budget.granted.clear()
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)

    assert budget.granted == ["b", "b", "a", "a"]


async def test_one_tenant_is_served_in_the_order_of_coming(make: Make) -> None:
    """Also where tenants are not told apart.

    A large request is not passed for ever by small ones that fit.
    """
    rig = await make(shares=NO_SHARES)
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS - 2)
    gate = rig.ssd.hold(Operation.WRITE)
    large = await budget.waiting("a", 10)
    small = [await budget.waiting("a"), await budget.waiting("a")]
    is_waiting = [task.done() for task in (large, *small)]
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(large, *small)

    assert is_waiting == [False] * 3


async def test_who_gives_up_leaves_the_line_to_the_next(make: Make) -> None:
    """The one that was making room, one in the middle and one within its share.

    The others go on, and nothing is claimed.
    """
    rig = await make()
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS)
    gate = rig.ssd.hold(Operation.WRITE)
    tasks = [await budget.waiting(tenant) for tenant in ("a", "a", "b", "a", "b")]
    await rig.reached(Operation.WRITE)
    for index in (0, 3, 2):
        tasks[index].cancel()
        await asyncio.wait([tasks[index]])
    claimed = budget.claimed()
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(tasks[1], tasks[4])

    assert claimed == {"a": LIMIT_SEGMENTS}
    assert sorted(budget.granted[1:]) == ["a", "b"]


async def test_a_writer_whose_time_is_up_gets_nothing_out_of_turn(make: Make) -> None:
    """Free room is for those that come first: it is refused, and told so; they get their room."""
    rig = await make()
    budget, ledger = _Budget(rig), rig.cache.ledger
    await budget.append("a", LIMIT_SEGMENTS - 1)
    gate = rig.ssd.hold(Operation.WRITE)
    first, behind = await budget.waiting("b", 2), await budget.waiting("b", 1)
    ledger.watermarks = replace(ledger.watermarks, writer_wait_s=0.01)
    late = await budget.waiting("a", 1)
    with pytest.raises(CapacityExceeded) as refused:
        await late
    claimed = budget.claimed()
    is_waiting = [not task.done() for task in (first, behind)]
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, behind)

    assert refused.value.facts["free_bytes"] == 0
    assert claimed == {"a": LIMIT_SEGMENTS - 1}
    assert is_waiting == [True, True]


async def test_a_deadline_leaves_the_line_in_order(make: Make) -> None:
    """All of them are refused while the device stands still; then there is room for the next."""
    rig = await make(writer_wait_s=0.01)
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS)
    gate = rig.ssd.hold(Operation.WRITE)
    tasks = [await budget.waiting(tenant) for tenant in ("b", "a", "b")]
    refused = await asyncio.gather(*tasks, return_exceptions=True)
    claimed = budget.claimed()
    gate.set()
    await rig.cache.drain()
    await budget.append("b", 2)

    assert [type(error) for error in refused] == [CapacityExceeded] * 3
    assert claimed == {"a": LIMIT_SEGMENTS}


async def test_a_reservation_that_ends_while_it_waits_is_told_so(make: Make) -> None:
    """Its place in the line goes to the next."""
    rig = await make()
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS)
    gate = rig.ssd.hold(Operation.WRITE)
    ended, other = await budget.waiting("b"), await budget.waiting("b")
    reservation = min(rig.cache.appends.reservations(), key=lambda one: one.reservation_id)
    rig.cache.appends.release(reservation)
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(ended, other, return_exceptions=True)

    assert isinstance(results[0], CacheError)
    assert results[1] is None


async def test_the_line_is_bounded_and_one_tenant_does_not_fill_it(make: Make) -> None:
    """More of one tenant are refused at once; the other finds a place, and its room."""
    rig = await make()
    budget = _Budget(rig)
    await budget.append("a", LIMIT_SEGMENTS)
    gate = rig.ssd.hold(Operation.WRITE)
    tasks = [await budget.waiting("a") for _ in range(LENGTH * 2 // 3 + 1)]
    with pytest.raises(TooManyRequests):
        await budget.append("a")
    other = await budget.waiting("b")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await other

    assert budget.granted == ["a", "b"]


DIVIDED = Limits(
    lease_share=1, reservation_share=1, client_share=1, room_wait_ns=int(PATIENCE_S * 10**9), are_divided=True
)


async def test_writers_of_one_tenant_that_wait_for_slots_keep_no_other_waiting(make: Make) -> None:
    """A tenant holds all that it may and has as many waiting as may: another reserves at once."""
    rig = await make(limits=DIVIDED)
    budget, pins = _Budget(rig), rig.cache.appends.pins
    rig.tenant = "a"
    await rig.create("held")
    held = await rig.reserve("held", 16 * SEGMENT_TOKENS)
    tasks = [asyncio.ensure_future(budget.append("a")) for _ in range(QUEUE_LENGTH * 2 // 3 + 1)]
    while pins.waiting_count < len(tasks):  # noqa: ASYNC110  # tasks get there by themselves
        await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await budget.append("a")
    async with asyncio.timeout(PATIENCE_S / 2):
        await budget.append("b")
    is_waiting = [task.done() for task in tasks]
    for task in tasks[2:]:
        task.cancel()
    await asyncio.wait(tasks[2:])
    rig.cache.appends.release(held)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks[:2])

    assert not any(is_waiting)
    assert budget.granted == ["b", "a", "a"]
