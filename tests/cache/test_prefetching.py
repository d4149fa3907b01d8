"""Promotion ahead of need.

A hinted session is in memory before it is read, at no cost to sessions that are needed sooner.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Token, Writer, counted_lines, expected
from fakes import Operation

from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.value import ReturnValue
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.server.upkeep import Upkeep

ARENA_SEGMENTS = 24
"""Segments of the arena; the high watermark keeps 3 of them free."""
SSD_SEGMENTS = (64, 64)
PARTS = 4
"""Segments of each session."""
NAMES = ("a", "b", "c", "d", "e", "f")


@dataclass(slots=True)
class Heard:
    """A watcher's notes."""

    notes: list[tuple[str, bytes]] = field(default_factory=list)

    def promoted(self, uid: bytes) -> None:
        """See Watcher."""
        self.notes.append(("promoted", uid))

    def demoted(self, uid: bytes) -> None:
        """See Watcher."""
        self.notes.append(("demoted", uid))

    def recounted(self, uid: bytes) -> None:
        """See Watcher."""

    def evicted(self, uid: bytes) -> None:
        """See Watcher."""
        self.notes.append(("evicted", uid))

    def ended(self, uid: bytes) -> None:
        """See Watcher."""
        self.notes.append(("ended", uid))


class Foreseen(MemoryRig):
    """A cache that looks ahead."""

    tokens: dict[str, list[Token]]

    def session(self, name: str) -> Session:
        """The cache's own."""
        return self.cache.ledger.find(TENANT, name)

    def in_dram(self, *names: str) -> list[int]:
        """How many segments of each are in DRAM."""
        return [self.session(name).amounts().memory_count for name in names]

    def hint(self, *names: str) -> None:
        """These are the queue, in this order."""
        for order, name in enumerate(names):
            self.cache.placement.hinted(self.session(name), order)

    async def prefetch(self) -> None:
        """One turn of the loop."""
        await self.cache.prefetching.prefetch()

    def counted(self) -> tuple[int, int, int]:
        """Segments promoted ahead, used, and dropped unused."""
        found = self.cache.placement.prefetched
        return (
            found.prefetched_segment_count,
            found.prefetch_used_segment_count,
            found.prefetch_unused_segment_count,
        )


async def until(is_so: Callable[[], object]) -> None:
    """Let others have their turns until something is so."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  what is waited for has no event of its own
            await asyncio.sleep(0)


@pytest.fixture
async def foreseen(tmp_path: Path) -> AsyncIterator[Foreseen]:
    """Six sessions of four segments each, all of them only on SSD; no more than five fit into DRAM."""
    capacities = Capacities(ARENA_SEGMENTS * SLOT_BYTES, (sum(SSD_SEGMENTS) - ARENA_SEGMENTS) * SLOT_BYTES)
    rig = Foreseen(tmp_path, ARENA_SEGMENTS, SSD_SEGMENTS, make_policy=partial(LookAhead, capacities))
    await rig.open()
    rig.tokens = {}
    for tag, name in enumerate(NAMES):
        rig.tokens[name] = Writer(tag).make(PARTS * SEGMENT_TOKENS)
        await rig.create(name)
        await rig.append(name, rig.tokens[name], is_durable=True)
        await rig.demote(name)
    yield rig
    await rig.check()
    await rig.close()


async def test_who_is_hinted_is_there_before_its_turn(foreseen: Foreseen) -> None:
    """The queue's head comes from SSD; its readers find all of it in DRAM, and are told so."""
    heard = Heard()
    foreseen.cache.placement.watch(foreseen.session("b").uid, heard)
    foreseen.hint("b", "e")
    await foreseen.prefetch()
    before = foreseen.cache.state.counters.dram_hit_token_count

    assert foreseen.in_dram(*NAMES) == [0, PARTS, 0, 0, PARTS, 0]
    assert foreseen.counted() == (2 * PARTS, 0, 0)
    assert heard.notes == [("promoted", foreseen.session("b").uid)]
    assert await foreseen.read("b") == expected(foreseen.tokens["b"])
    assert foreseen.counted() == (2 * PARTS, PARTS, 0)
    assert foreseen.cache.state.counters.dram_hit_token_count - before == PARTS * SEGMENT_TOKENS
    await foreseen.demote("e")
    assert foreseen.counted() == (2 * PARTS, PARTS, PARTS)


async def test_a_watcher_hears_what_becomes_of_a_session(foreseen: Foreseen) -> None:
    """It comes, it leaves memory, it goes; after that, and after `unwatch`, there is nothing to hear."""
    heard, other = Heard(), Heard()
    uid = foreseen.session("a").uid
    for watcher in (heard, other):
        foreseen.cache.placement.watch(uid, watcher)
    foreseen.hint("a")
    await foreseen.prefetch()
    foreseen.cache.placement.unwatch(uid, other)
    await foreseen.demote("a")
    await foreseen.delete("a")

    assert heard.notes == [("promoted", uid), ("demoted", uid), ("ended", uid)]
    assert other.notes == [("promoted", uid)]
    foreseen.cache.placement.watch(uid, heard)
    foreseen.cache.placement.unwatch(uid, other)
    assert not foreseen.cache.placement.watched


async def test_what_is_not_needed_makes_room_and_what_is_does_not(foreseen: Foreseen) -> None:
    """Sessions without a job leave for the queue's head; its tail never pushes the head out."""
    for name in NAMES[:5]:
        await foreseen.read(name)
    foreseen.hint("f")
    await foreseen.prefetch()
    assert foreseen.in_dram("f") == [PARTS]
    assert sum(foreseen.in_dram(*NAMES)) == ARENA_SEGMENTS - 3

    await foreseen.demote("f")
    foreseen.hint(*NAMES)
    for _ in range(3):
        await foreseen.prefetch()
    # Five whole sessions and one segment lie beside what is kept free: the last one in the queue waits.
    assert foreseen.in_dram(*NAMES[:5]) == [PARTS] * 5
    assert foreseen.in_dram("f") == [1]


async def test_what_finds_no_room_is_not_tried_again_and_again(foreseen: Foreseen) -> None:
    """Leases on everything in DRAM leave no room: each turn ends, reads nothing, and pushes nobody out."""
    leases = [await foreseen.acquire(name) for name in NAMES[:5]]
    foreseen.hint("f")
    reads = foreseen.ssd.counts[Operation.READ]
    for _ in range(5):
        await foreseen.prefetch()
    assert foreseen.ssd.counts[Operation.READ] - reads <= PARTS
    assert foreseen.in_dram(*NAMES[:5]) == [PARTS] * 5

    foreseen.cache.state.is_prefetch_wanted.clear()
    for lease in leases:
        foreseen.cache.leases.release(lease.lease_id)
    assert foreseen.cache.state.is_prefetch_wanted.is_set()
    await foreseen.prefetch()
    assert foreseen.in_dram("f") == [PARTS]


async def test_who_has_nothing_left_keeps_nobody_from_coming(foreseen: Foreseen) -> None:
    """Sessions whose tokens were all dropped have nothing to come, whatever they had on SSD."""
    for name in ("a", "b", "c"):
        await foreseen.truncate(name, (0, PARTS * SEGMENT_TOKENS))
    foreseen.hint("a", "b", "c", "d")
    await foreseen.prefetch()
    assert foreseen.in_dram("d") == [PARTS]


async def test_what_a_fork_shares_stays_for_whom_it_came(foreseen: Foreseen) -> None:
    """A fork that nobody waits for makes nobody of its kin give way to the queue's tail, nor to itself."""
    leases = [await foreseen.acquire(name) for name in NAMES[2:]]
    await foreseen.fork("a", "fork")
    foreseen.hint("a", "b")
    for _ in range(3):
        await foreseen.prefetch()
    assert foreseen.in_dram("a", "b") == [PARTS, 1]
    assert foreseen.counted() == (PARTS + 1, 0, 0)
    for lease in leases:
        foreseen.cache.leases.release(lease.lease_id)


async def test_a_failure_leaves_a_session_aside_until_its_next_hint(foreseen: Foreseen) -> None:
    """A device that refuses a read is not asked the same again.

    The other session comes, and so does this one later.
    """
    foreseen.hint("a", "b")
    foreseen.ssd.fail(Operation.READ)
    with pytest.raises(TierFailure):
        await foreseen.prefetch()
    await foreseen.prefetch()
    assert foreseen.in_dram("b") == [PARTS]
    assert foreseen.in_dram("a") != [PARTS]

    reads = foreseen.ssd.counts[Operation.READ]
    await foreseen.prefetch()
    assert foreseen.ssd.counts[Operation.READ] == reads
    foreseen.hint("a")
    await foreseen.prefetch()
    assert foreseen.in_dram("a", "b") == [PARTS, PARTS]


async def test_a_session_found_bad_ends_there(foreseen: Foreseen) -> None:
    """Bytes that are not its own end a session as a read of them would, and nobody is given them."""
    slot = foreseen.session("a").segments[1].durable
    assert slot
    await foreseen.ssd.write(slot, 0, memoryview(bytes(slot.size_bytes)))
    foreseen.hint("a")
    with pytest.raises(CorruptSegment):
        await foreseen.prefetch()
    await foreseen.prefetch()

    assert foreseen.token_count("a") == SEGMENT_TOKENS
    assert await foreseen.read("a") == expected(foreseen.tokens["a"][:SEGMENT_TOKENS])


async def test_a_caller_that_waits_goes_first(foreseen: Foreseen) -> None:
    """While a lease waits for its rows, nothing is read ahead of need; afterwards it goes on."""
    gate = foreseen.ssd.hold(Operation.READ)
    foreground = asyncio.create_task(foreseen.acquire("a"))
    await until(lambda: foreseen.cache.promotions.awaited_count)
    foreseen.hint("b")
    ahead = asyncio.create_task(foreseen.prefetch())
    for _ in range(20):
        await asyncio.sleep(0)
    assert foreseen.ssd.counts[Operation.READ] <= PARTS
    assert foreseen.counted() == (0, 0, 0)
    assert not list(foreseen.cache.placement.unread)

    gate.set()
    foreseen.cache.leases.release((await foreground).lease_id)
    await ahead
    assert foreseen.in_dram("b") == [PARTS]


async def test_who_comes_before_its_promotion_is_over_waits_for_no_second_one(foreseen: Foreseen) -> None:
    """A reader shares what is under way; the promotion ahead of need begins nothing more."""
    gate = foreseen.ssd.hold(Operation.READ)
    foreseen.hint("a")
    ahead = asyncio.create_task(foreseen.prefetch())
    await until(lambda: list(foreseen.cache.placement.unread))
    reader = asyncio.create_task(foreseen.read("a"))
    await until(lambda: foreseen.cache.leases.lease_count)
    gate.set()

    assert await reader == expected(foreseen.tokens["a"])
    await ahead
    assert foreseen.cache.state.counters.promoted_segment_count == PARTS
    assert not list(foreseen.cache.placement.unread)


@pytest.mark.parametrize("ending", ["delete", "truncate", "cancel"])
async def test_a_promotion_may_lose_its_session(foreseen: Foreseen, ending: str) -> None:
    """Deletion, truncation and the loop's end while it is under way leave no slot, hold or mark behind."""
    gate = foreseen.ssd.hold(Operation.READ)
    foreseen.hint("a", "b")
    ahead = asyncio.create_task(foreseen.prefetch())
    await until(lambda: list(foreseen.cache.placement.unread))
    if ending == "delete":
        await foreseen.delete("a")
    elif ending == "truncate":
        await foreseen.truncate("a", (0, PARTS * SEGMENT_TOKENS))
    else:
        ahead.cancel()
    gate.set()
    await asyncio.gather(ahead, return_exceptions=True)
    await foreseen.check()

    assert ahead.cancelled() == (ending == "cancel")
    assert not any(standing.coming_count for standing in foreseen.cache.placement.standings.values())
    await foreseen.prefetch()
    assert foreseen.in_dram("b") == [PARTS]


async def test_a_budget_bounds_what_is_promoted_for_a_caller(foreseen: Foreseen) -> None:
    """The first segments come, as many as are paid for; what is there already, or used, costs nothing."""
    session, promote = foreseen.session("a"), foreseen.cache.prefetching.promote_ahead
    assert await promote(session, 2 * SLOT_BYTES + 1) == 2 * SLOT_BYTES
    assert [segment.memory is not None for segment in session.segments] == [True, True, False, False]
    assert await promote(session, 100 * SLOT_BYTES) == 2 * SLOT_BYTES
    assert await promote(session, 100 * SLOT_BYTES) == 0
    assert await promote(foreseen.session("b"), SLOT_BYTES - 1) == 0
    await foreseen.demote("a")
    lease = await foreseen.acquire("a", 0, 1)
    assert await promote(session, 100 * SLOT_BYTES) == 0
    foreseen.cache.leases.release(lease.lease_id)


async def test_the_loop_is_woken_by_a_hint_and_ends_with_the_others(foreseen: Foreseen) -> None:
    """No interval passes between a hint and the read, and a cancelled upkeep leaves nothing under way."""
    upkeep = asyncio.create_task(Upkeep(foreseen.cache, interval_s=3600).run())
    heard = asyncio.Event()

    class Woken(Heard):
        def promoted(self, uid: bytes) -> None:
            super().promoted(uid)
            heard.set()

    foreseen.cache.placement.watch(foreseen.session("c").uid, Woken())
    foreseen.hint("c")
    async with asyncio.timeout(30):
        await heard.wait()
    upkeep.cancel()
    await asyncio.gather(upkeep, return_exceptions=True)
    assert foreseen.in_dram("c") == [PARTS]


async def test_a_long_turn_costs_what_comes(tmp_path: Path) -> None:
    """Each of many that come in one turn costs the same, however many came before it."""
    count = 640
    capacities = Capacities(2 * count * SLOT_BYTES, count * SLOT_BYTES)
    rig = Foreseen(tmp_path, 2 * count, (count,), make_policy=partial(LookAhead, capacities))
    await rig.open()
    for number in range(count):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", Writer(number).make(1), is_durable=True)
        await rig.demote(f"s{number}")
    costs = []
    for begin, end in ((0, 60), (60, 600)):
        rig.hint(*(f"s{number}" for number in range(begin, end)))
        with counted_lines() as lines:
            await rig.prefetch()
        costs.append(lines[0] / (end - begin))
    assert rig.counted() == (600, 0, 0)
    assert costs[1] < 1.3 * costs[0], costs
    await rig.check()
    rig.arena.close()


EXPECTED_NAMES = tuple(f"chat {number}" for number in range(24))
PERIOD_S = 3.0
ROUND_S = PERIOD_S * len(EXPECTED_NAMES)


async def _found_in_dram(tmp_path: Path, *, is_told: bool) -> float:
    """Share of tokens that 72 turns of 24 sessions found in DRAM, which holds five of them.

    After each turn the client says when the session returns, and lets it lie on SSD.
    """
    capacities = Capacities(ARENA_SEGMENTS * SLOT_BYTES, (sum(SSD_SEGMENTS) - ARENA_SEGMENTS) * SLOT_BYTES)
    rig = Foreseen(tmp_path, ARENA_SEGMENTS, SSD_SEGMENTS, make_policy=partial(ReturnValue, capacities))
    await rig.open()
    found_before = 0
    for turn in range(4 * len(EXPECTED_NAMES)):
        name = EXPECTED_NAMES[turn % len(EXPECTED_NAMES)]
        rig.clock.advance(seconds=PERIOD_S)
        rig.cache.placement.passed()
        if rig.cache.state.is_prefetch_wanted.is_set():
            await rig.prefetch()
        if turn < len(EXPECTED_NAMES):
            await rig.create(name)
            await rig.append(name, Writer(turn).make(PARTS * SEGMENT_TOKENS), is_durable=True)
            found_before = rig.cache.state.counters.dram_hit_token_count
        else:
            await rig.read(name)
        if is_told:
            return_s = rig.clock.monotonic_ns() / 1e9 + ROUND_S
            rig.cache.placement.expected(rig.session(name), return_s)
        await rig.demote(name)
    found = rig.cache.state.counters.dram_hit_token_count - found_before
    await rig.check()
    await rig.close()
    return found / (3 * len(EXPECTED_NAMES) * PARTS * SEGMENT_TOKENS)


async def test_who_is_said_to_return_is_in_dram_by_then(tmp_path: Path) -> None:
    """At least 95 % of the reads; unsaid, none of those that lie on SSD."""
    assert await _found_in_dram(tmp_path / "told", is_told=True) >= 0.95
    assert await _found_in_dram(tmp_path / "untold", is_told=False) == 0


async def test_who_does_not_return_as_said_is_fetched_once(tmp_path: Path) -> None:
    """It comes for its promise; when it had to leave again, or is late, nothing is read for it."""
    capacities = Capacities(ARENA_SEGMENTS * SLOT_BYTES, (sum(SSD_SEGMENTS) - ARENA_SEGMENTS) * SLOT_BYTES)
    rig = Foreseen(tmp_path, ARENA_SEGMENTS, SSD_SEGMENTS, make_policy=partial(ReturnValue, capacities))
    await rig.open()
    for name in ("loyal", "late"):
        await rig.create(name)
        await rig.append(name, Writer(len(name)).make(PARTS * SEGMENT_TOKENS), is_durable=True)
        await rig.demote(name)
        rig.cache.placement.expected(rig.session(name), rig.clock.monotonic_ns() / 1e9 + 40.0)
    counts = []
    for passed_s in (10, 29, 2, 4, 15, 60):
        rig.clock.advance(seconds=passed_s)
        rig.cache.placement.passed()
        await rig.prefetch()
        counts.append(rig.counted()[0])
        for name in ("loyal", "late"):
            await rig.demote(name)

    assert counts[0] == 0
    assert counts[-1] == 2 * PARTS
    await rig.check()
    await rig.close()
