"""Bulk work takes turns, in order, and leaves the loop to others in between."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ctxcache.service import fairness as module
from ctxcache.service.fairness import TENANT, TURNS_BETWEEN, LoopSlice, Newcomers, Turns, Usage

MS = 10**6


@contextmanager
def coming(newcomers: Newcomers) -> Iterator[None]:
    """This task's call is a newcomer within the block."""
    call = newcomers.come(time.monotonic_ns())
    try:
        yield
    finally:
        newcomers.leave(call)


async def test_pieces_are_done_one_after_another_with_turns_for_others_between() -> None:
    """The first comer goes first, and between two pieces others have had their turns."""
    turns, log = Turns(), list[str]()

    async def bulk(name: str) -> None:
        for _ in range(2):
            await turns.take()
            log.append(name)
            await asyncio.sleep(0)

    async def other() -> None:
        while len([name for name in log if name != "."]) < 4:
            log.append(".")
            await asyncio.sleep(0)

    await asyncio.gather(bulk("a"), bulk("b"), other())

    assert [name for name in log if name != "."] == ["a", "b", "a", "b"]
    gaps = "".join(log).split("a")[1].split("b")[0]
    assert gaps.count(".") >= TURNS_BETWEEN


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    """A stream that ends while it waits for its turn is passed over."""
    turns = Turns()
    await turns.take()
    waiting = [asyncio.ensure_future(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()

    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)
    await asyncio.wait_for(turns.take(), 10)


async def test_bulk_work_waits_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that came lately is answered before the next piece, however many turns of the loop it takes."""
    monkeypatch.setattr(module, "NEW_NS", 10**12)
    monkeypatch.setattr(module, "PATIENCE_NS", 10**18)
    newcomers, log = Newcomers(), list[str]()
    newcomers.called_ns = time.monotonic_ns()
    turns = Turns(newcomers)

    async def bulk() -> None:
        for _ in range(3):
            await turns.take()
            log.append("piece")
            if log.count("piece") == 1:
                asyncio.get_running_loop().create_task(call())

    async def call() -> None:
        with coming(newcomers):
            for _ in range(10 * TURNS_BETWEEN):
                await asyncio.sleep(0)
            log.append("call")

    await asyncio.wait_for(bulk(), 10)

    assert log == ["piece", "call", "piece", "piece"]


async def test_calls_that_keep_coming_hold_nothing_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bulk work goes on when its patience ends, though calls are there at every moment."""
    monkeypatch.setattr(module, "NEW_NS", 10**12)
    newcomers = Newcomers()
    turns = Turns(newcomers)
    with coming(newcomers):
        for _ in range(3):
            await asyncio.wait_for(turns.take(), 10)
        assert newcomers.are_there()


async def test_a_call_that_waits_for_long_is_no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for a disk would hold up bulk work."""
    monkeypatch.setattr(module, "NEW_NS", -1)
    monkeypatch.setattr(module, "PATIENCE_NS", 10**18)
    newcomers = Newcomers()
    turns = Turns(newcomers)
    with coming(newcomers):
        assert not newcomers.are_there()
        for _ in range(3):
            await asyncio.wait_for(turns.take(), 10)


async def test_a_call_that_rests_is_bulk_work_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for newcomers, and is none: it does not wait for itself."""
    monkeypatch.setattr(module, "NEW_NS", 10**12)
    monkeypatch.setattr(module, "PATIENCE_NS", 10**18)
    newcomers = Newcomers()
    part = LoopSlice(Turns(newcomers))
    with coming(newcomers):
        await asyncio.wait_for(part.rest(), 10)
        assert not newcomers.are_there()
    await asyncio.wait_for(part.rest(), 10)


async def test_who_gives_up_behind_newcomers_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ends while it waits for newcomers is passed over."""
    monkeypatch.setattr(module, "NEW_NS", 10**12)
    newcomers = Newcomers()
    turns = Turns(newcomers)
    with coming(newcomers):
        waiting = [asyncio.ensure_future(turns.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)
    await asyncio.wait_for(turns.take(), 10)


async def test_tenants_have_their_turns_one_after_another() -> None:
    """However much one of them has waiting."""
    turns, log = Turns(), list[str]()
    await turns.take()

    async def piece(tenant: str) -> None:
        TENANT.set(tenant)
        await turns.take()
        log.append(tenant)

    await asyncio.wait_for(asyncio.gather(*map(piece, "aaaabbc")), 10)

    assert "".join(log) == "abcabaa"


async def test_after_a_piece_the_processor_is_left_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gRPC may have one processor with the loop, and be let in by nothing else for milliseconds."""
    yields: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(None))
    turns = Turns()
    for _ in range(3):
        await asyncio.wait_for(turns.take(), 10)

    assert len(yields) >= 2 * (TURNS_BETWEEN // module.YIELDING_TURNS)


@pytest.mark.parametrize(("since_ns", "yields"), [(module.RPCS_NS - 1, True), (module.RPCS_NS, False)])
async def test_the_processor_is_left_to_grpc_alone(
    monkeypatch: pytest.MonkeyPatch, since_ns: int, *, yields: bool
) -> None:
    """Where no rpc came lately gRPC has nothing to do, and strangers would compute for milliseconds."""
    yielded: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(None))
    monkeypatch.setattr(module, "time", Hands())
    newcomers = Newcomers()
    newcomers.called_ns = Hands().now_ns - since_ns
    turns = Turns(newcomers)
    for _ in range(3):
        await asyncio.wait_for(turns.take(), 10)

    assert bool(yielded) is yields


@pytest.mark.parametrize(
    ("since_ns", "least", "most"), [(module.RPCS_NS - 1, TURNS_BETWEEN, 99), (module.RPCS_NS, 1, 2)]
)
async def test_a_rest_is_as_long_as_those_need_who_come(
    monkeypatch: pytest.MonkeyPatch, since_ns: int, least: int, most: int
) -> None:
    """Taking on a call by gRPC takes several turns of the loop; where no rpc came lately one is enough."""
    monkeypatch.setattr(module, "time", Hands())
    newcomers, log = Newcomers(), list[str]()
    newcomers.called_ns = Hands().now_ns - since_ns
    turns = Turns(newcomers)

    async def bulk() -> None:
        for _ in range(4):
            await LoopSlice(turns).rest()
            log.append("piece")

    async def other() -> None:
        while log.count("piece") < 4:
            log.append(".")
            await asyncio.sleep(0)

    await asyncio.gather(bulk(), other())
    gaps = " ".join(log).split("piece")[2:-1]
    assert all(least <= gap.count(".") <= most for gap in gaps), log


class Hands:
    """A clock that stands still by itself."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        """See time.monotonic_ns."""
        return self.now_ns


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """The time that the module under test sees."""
    hands = Hands()
    monkeypatch.setattr(module, "time", hands)
    return hands


async def test_a_tenant_is_greedy_by_what_its_work_takes(hands: Hands) -> None:
    """Its own work alone counts, not what others do while it waits; and not for ever."""
    usage = Usage()
    usage.come("idle")
    usage.come("busy")

    async def work(took_ns: int) -> str:
        hands.now_ns += took_ns
        await asyncio.sleep(0)
        hands.now_ns += took_ns
        return "done"

    async def another() -> None:
        hands.now_ns += 100 * MS

    found, _ = await asyncio.gather(usage.metered("idle", work(0)), another())
    assert found == "done"
    assert not usage.is_greedy("idle")

    await usage.metered("busy", work(5 * MS))
    assert usage.is_greedy("busy")
    assert not usage.is_greedy("idle")
    hands.now_ns += 100 * MS
    assert not usage.is_greedy("busy")


async def test_a_tenant_that_is_alone_is_not_greedy(hands: Hands) -> None:
    """No other tenant waits for it."""
    usage = Usage()
    for _ in range(100):
        usage.come("busy")
        usage.charge("busy", MS)
    assert not usage.is_greedy("busy")

    usage.come("other")
    assert usage.is_greedy("busy")


async def test_metered_work_fails_and_is_cancelled_as_itself() -> None:
    """Its errors come out, and a cancellation reaches what it does last."""
    usage, log = Usage(), list[str]()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            log.append("let go")

    with pytest.raises(LookupError):
        await usage.metered("a", fail())

    async def metered() -> None:
        await usage.metered("a", wait())

    waiting = asyncio.ensure_future(metered())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert log == ["let go"]
