"""Writers, readers, upkeep, a scrubber and failing devices at once, and the power cut at any moment.

Every session has one task that changes it, so that what must be in it is known. A cut takes what the
stores would keep, torn and out of order, at one instant between two steps of whoever is running, and looks
at it with a cache of its own while the storm goes on. Sessions fall asleep as soon as nobody uses them.
"""

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cache_rig import SLOT_BYTES, TENANT, MemoryRig, Token, Writer, expected, seeds
from fakes import FakeClock, MemoryTier, Operation
from integrity import check_integrity
from memory_metadata import MemoryMetadata

from ctxcache.cache.hints import Action, Hint
from ctxcache.cache.queues import Queue
from ctxcache.core.ledger.work import Work, at_work
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.schedule import Job
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import CacheError, CapacityExceeded, CorruptSegment, SessionNotFound, TierFailure
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.server.upkeep import Upkeep
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.tiers.base import Arrived, Pieces

STEPS = 80
CUTS = 5
SECTOR_BYTES = 512
SECOND_NS = 10**9
Dice = random.Random


async def pause(dice: Dice, most: int) -> None:
    """Let others have some turns."""
    for _ in range(dice.randrange(most)):
        await asyncio.sleep(0)


class SlowTier(MemoryTier):
    """Moves a page at a time; one sync at a time, as the files do."""

    def __init__(self, capacities_bytes: Sequence[int], dice: Dice) -> None:
        super().__init__(capacities_bytes)
        self._dice, self._syncing = dice, asyncio.Lock()
        self.is_damaged = False

    async def read(
        self, slot: object, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        for first, last in pieces or [(0, into.nbytes)]:
            for page in range(first, last, ALIGN_BYTES):
                await pause(self._dice, 3)
                await super().read(slot, begin + page, into[page : page + ALIGN_BYTES])  # type: ignore[arg-type]
            if then:
                then(first, last)

    async def write(self, slot: object, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """See Tier."""
        for first, last in pieces or [(0, data.nbytes)]:
            for page in range(first, last, ALIGN_BYTES):
                await pause(self._dice, 3)
                await super().write(slot, begin + page, data[page : page + ALIGN_BYTES])  # type: ignore[arg-type]

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier."""
        async with self._syncing:
            await super().sync(path_indexes)
            await pause(self._dice, 9)

    def cut(self) -> MemoryTier:
        """The state that a power cut leaves: of what was not synced some pages, some of them torn."""
        survivor = self.crash()
        for key, page in self.pages.items():
            kept_bytes = self._dice.choice((0, SECTOR_BYTES, ALIGN_BYTES))
            survivor.pages[key] = page[:kept_bytes] + survivor.pages.get(key, bytes(ALIGN_BYTES))[kept_bytes:]
        return survivor

    def damage(self) -> None:
        """Flip a bit of a page."""
        self.is_damaged = True
        if self.pages:
            key = self._dice.choice(list(self.pages))
            page = bytearray(self.pages[key])
            page[self._dice.randrange(ALIGN_BYTES)] ^= 1
            self.pages[key] = self.durable[key] = bytes(page)


class SlowMetadata(MemoryMetadata):
    """Commits are there at once and durable later."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self._dice = dice

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """See MetadataStore."""
        written = super().commit(changes, is_durable=False)
        if not is_durable:
            return written
        written.close()
        return self._sync_later()

    async def _sync_later(self) -> None:
        await pause(self._dice, 20)
        self.sync()

    def cut(self) -> MemoryMetadata:
        """The state that a power cut leaves.

        The first few of the commits that were not synced are there as well.
        """
        survivor = self.crash()
        for changes in self._unsynced[: self._dice.randrange(len(self._unsynced) + 1)]:
            survivor.current.apply(changes)
        return survivor


@dataclass(slots=True)
class Known:
    """The rows that a session must hold; `other` is what it may hold instead while it is being truncated."""

    uid: bytes
    tokens: list[Token] = field(default_factory=list)
    durable_count: int = 0
    is_pinned: bool = False
    other: tuple[list[Token], int] | None = None


class Storm:
    """All that goes on at once. With `is_faulty` devices fail and bits flip."""

    def __init__(self, rig: MemoryRig, dice: Dice, *, is_faulty: bool) -> None:
        self.rig, self.dice, self.is_faulty = rig, dice, is_faulty
        self.known: dict[str, Known] = {}
        self.tag = self.read_count = self.cut_count = 0
        sleep = rig.cache.ledger.sleep
        sleep.awake_count, sleep.sleep_ns = 0, 1
        self.queue: Queue | None = None
        self.pinning = asyncio.Lock()
        self.is_over = False

    @property
    def is_damaged(self) -> bool:
        """Whether bits have flipped."""
        return isinstance(self.rig.ssd, SlowTier) and self.rig.ssd.is_damaged

    async def run(self) -> None:
        """Until the owners have done what they wanted."""
        others = [
            asyncio.ensure_future(self._until_over(work))
            for work in (
                self.look,
                self.look,
                self.look,
                self.upkeep,
                self.scrub,
                self.cut,
                self.fail,
                self.foretell,
                self.foretell,
                self.foretell,
                self.rig.cache.prefetching.prefetch,
            )
        ]
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(self.own(f"owned{i}") for i in range(5)))
                self.is_over = True
                await asyncio.gather(*others)
        finally:
            for task in others:
                task.cancel()

    async def _until_over(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            await pause(self.dice, 20)
            try:
                await at_work(work())
            except (TierFailure, CorruptSegment):
                assert self.is_faulty
            except CacheError:
                continue

    # -- the owners ----------------------------------------------------------------------------------

    async def own(self, name: str) -> None:
        """One task's life with one session and a fork of it."""
        steps = [self.append] * 6 + [self.truncate, self.truncate, self.fork, self.delete]
        for _ in range(STEPS):
            with Work():
                try:
                    if self.settle(name) is None:
                        self.known[name] = Known((await self.rig.create(name)).uid)
                    else:
                        await self.dice.choice(steps)(name)
                except (TierFailure, CorruptSegment):
                    assert self.is_faulty
                except CacheError:
                    await asyncio.sleep(0)
                self.settle(name)

    def settle(self, name: str) -> Known | None:
        """The rows that must be in the session, if it was not evicted; what was damaged may have been cut."""
        known = self.known.get(name)
        session = self.rig.cache.ledger.get(known.uid) if known else None
        if known is None or session is None:
            assert known is None or not known.is_pinned
            self.known.pop(name, None)
            return None
        count = session.token_count
        assert count == len(known.tokens) or (self.is_damaged and count < len(known.tokens))
        known.tokens, known.durable_count = known.tokens[:count], min(known.durable_count, count)
        return known

    async def append(self, name: str) -> None:
        """Tokens in commits of all kinds, the last of them perhaps left out."""
        count, writing = self.dice.choice((1, 5, 63, 64, 65, 128, 150)), self.rig.cache.appends
        reservation = await self.rig.reserve(name, count)
        try:
            known = self.known[name]
            self.tag += 1
            base, tokens = known.tokens, Writer(self.tag).make(count)
            self.rig.place(reservation, len(base), tokens)
            end = 0
            while end < count and self.dice.random() < 0.9:
                end = self.dice.randrange(end, count + 1)
                writing.mark_written(reservation, len(base) + end)
                await pause(self.dice, 10)
                writing.commit_in_memory(reservation, len(base) + end, keep_open=True)
                known.tokens = base + tokens[:end]
                if self.dice.random() < 0.4:
                    await writing.flush(reservation)
                    known.durable_count = len(known.tokens)
        finally:
            writing.release(reservation, is_abandoned=self.dice.random() < 0.2)

    async def truncate(self, name: str) -> None:
        """Some tokens from anywhere."""
        known = self.known[name]
        begin = self.dice.randrange(len(known.tokens) + 1)
        end = self.dice.choice((len(known.tokens), self.dice.randrange(begin, len(known.tokens) + 1)))
        before = known.tokens, known.durable_count
        dropped_count = max(min(end, known.durable_count) - begin, 0)
        known.other, known.tokens = before, known.tokens[:begin] + known.tokens[end:]
        known.durable_count -= dropped_count
        try:
            await self.rig.truncate(name, (begin, end))
        except CacheError:
            known.tokens, known.durable_count = before
            raise
        finally:
            known.other = None

    async def fork(self, name: str) -> None:
        """Its first tokens under another name, which is free by now."""
        tokens = list(self.known[name].tokens)
        with suppress(SessionNotFound):
            self.known.pop(f"{name}-fork", None)
            await self.rig.delete(f"{name}-fork")
        if self.settle(name) and self.known[name].tokens == tokens:
            count = self.dice.randrange(len(tokens) + 1)
            view = await self.rig.fork(name, f"{name}-fork", count)
            self.known[f"{name}-fork"] = Known(view.uid, tokens[:count], count)
            self.settle(f"{name}-fork")

    async def delete(self, name: str) -> None:
        """Nothing is known of it from the moment in which it may be gone."""
        del self.known[name]
        await self.rig.delete(name)

    # -- everybody else --------------------------------------------------------------------------------

    async def look(self) -> None:
        """Read, lease or move a session, and perhaps stop waiting for it."""
        if not self.known:
            return
        name = self.dice.choice(sorted(self.known))
        work = self.dice.choice(
            [self.read, self.read, self.lease, self.lease, self.rig.flush, self.rig.demote]
        )
        task = asyncio.ensure_future(work(name))
        if self.dice.random() < 0.2:
            await pause(self.dice, 15)
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def read(self, name: str) -> None:
        """All of a session."""
        tokens_of(await self.rig.read(name))
        self.read_count += 1

    async def lease(self, name: str) -> None:
        """A session's rows, which stay as they are while they are leased."""
        lease = await self.rig.acquire(name)
        try:
            tokens_of(before := self.rig.leased(lease))
            await pause(self.dice, 60)
            assert self.rig.leased(lease) == before
        finally:
            self.rig.cache.leases.release(lease.lease_id)

    async def foretell(self) -> None:
        """Say something of a session, true or not, by a queue, by a hint, or with an operator's word."""
        if not self.known:
            return
        name, cache, tenant = self.dice.choice(sorted(self.known)), self.rig.cache, self.rig.tenant
        what = self.dice.choice([*Action, *["put"] * 6, "gone", "gone", "withdraw", "pin"])
        if isinstance(what, Action):
            hint = Hint(
                tenant,
                name,
                what,
                ttl_ns=self.dice.choice((1, 30)) * SECOND_NS,
                priority=self.dice.randrange(3),
                budget_bytes=self.dice.choice((None, None, 3 * SLOT_BYTES)),
                return_in_ns=self.dice.choice((None, 5 * SECOND_NS)),
            )
            await cache.hints.carry_out(hint, asyncio.get_running_loop().time() + 30)
        elif what == "pin":
            # One at a time: of two that overlap, the first to be applied may be the last to be answered.
            async with self.pinning:
                if (known := self.known.get(name)) is None:
                    return
                is_pinned = not known.is_pinned and sum(other.is_pinned for other in self.known.values()) < 1
                known.is_pinned = False
                await self.rig.cache.sessions.update(tenant, name, expiration=None, is_pinned=is_pinned)
                known.is_pinned = is_pinned
        else:
            if self.queue is None:
                self.queue = cache.queues.join(tenant, "engine", grace_ns=None, fingerprint=b"")
            if what == "put":
                position = self.dice.choice((1.0, 2.0, 3.0))
                cache.queues.put(self.queue, name, Job(str(self.dice.randrange(8)), None, position))
            elif what == "gone":
                cache.queues.gone(self.queue, str(self.dice.randrange(8)), is_started=True)
            else:
                queue, self.queue = self.queue, None
                await cache.queues.withdraw(queue)

    async def upkeep(self) -> None:
        """The background steps, a second later."""
        self.rig.clock.advance(seconds=1)
        await Upkeep(self.rig.cache).turn()

    async def scrub(self) -> None:
        """A pass that finds nothing but what was damaged, and a test of the places that it keeps from use."""
        async for report in self.rig.cache.scrubbing.run():
            assert self.is_damaged or not report.bad
        await self.rig.cache.scrubbing.release()

    async def fail(self) -> None:
        """A device refuses, once, or gives back something else."""
        await pause(self.dice, 100)
        if self.is_faulty and not self.dice.randrange(3):
            self.rig.ssd.damage()  # type: ignore[attr-defined]  # a SlowTier
        elif self.is_faulty:
            self.rig.ssd.fail(self.dice.choice((Operation.READ, Operation.WRITE)))

    async def cut(self) -> None:
        """The power goes, for a copy.

        Rows acknowledged as durable are there, and no rows but those that were written.
        """
        await pause(self.dice, 200)
        if self.cut_count == CUTS:
            return
        self.cut_count += 1
        after = MemoryRig(
            self.rig.directory,
            arena_segments=40,
            ssd_segments=self.rig.ssd_segments,
            clock=FakeClock(self.rig.clock.now_ns()),
        )
        after.ssd, after.metadata = self.rig.ssd.cut(), self.rig.metadata.cut()  # type: ignore[attr-defined]
        is_there = set(self.rig.cache.ledger.uids())
        promised = [
            (known.uid, [(known.tokens, known.durable_count), *filter(None, [known.other])])
            for known in self.known.values()
            if known.uid in is_there
        ]
        is_damaged = self.is_damaged
        await after.open()
        assert not check_integrity(after.cache)
        for uid, contents in promised:
            session = after.cache.ledger.get(uid)
            with suppress(*[CorruptSegment] * is_damaged):
                found = tokens_of(await after.read(session.session_id)) if session else []
                assert is_damaged or any(
                    found == tokens[: len(found)] and len(found) >= count for tokens, count in contents
                )
        after.cache.io.close()
        after.arena.close()


def tokens_of(found: dict[Stream, bytes]) -> list[Token]:
    """The tokens that a read brought, which every stream must show."""
    words = [found[TOKENS][at : at + 4] for at in range(0, len(found[TOKENS]), 4)]
    tokens = [Token(int.from_bytes(w[:2], "little"), int.from_bytes(w[2:], "little")) for w in words]
    assert found == expected(tokens)
    return tokens


async def assert_all_is_over(rig: MemoryRig, *storms: Storm) -> None:
    """Once what is overdue has ended and all sessions are gone, every slot is back, or in quarantine."""
    await rig.check()
    rig.clock.advance(seconds=1000)
    rig.cache.appends.end_overdue()
    rig.cache.hints.drop_overdue()
    for storm in storms:
        if storm.queue:
            await rig.cache.queues.withdraw(storm.queue)
    with suppress(CapacityExceeded):
        left = filter(None, map(rig.cache.ledger.get, rig.cache.ledger.uids()))
        await rig.cache.departures.remove(list(left))
    await rig.check()
    kept_count = len(rig.cache.ledger.below.quarantined)
    used_bytes = rig.cache.ledger.memory.used_bytes, rig.cache.ledger.below.used_bytes
    rig.cache.io.close()
    rig.arena.close()
    assert used_bytes == (0, kept_count * SLOT_BYTES)


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize("seed", seeds(6))
async def test_a_storm_leaves_nothing_wrong_and_nothing_behind(
    tmp_path: Path, seed: int, *, is_faulty: bool
) -> None:
    """No wrong byte, nothing durable lost in a cut, books that add up, and every slot back in the end."""
    dice = Dice(seed)
    rig = MemoryRig(
        tmp_path, arena_segments=dice.choice((6, 9, 14)), ssd_segments=dice.choice(((7, 7), (30, 30)))
    )
    rig.ssd = SlowTier([count * SLOT_BYTES for count in rig.ssd_segments], dice)
    rig.metadata = SlowMetadata(dice)
    await rig.open()
    storm = Storm(rig, dice, is_faulty=is_faulty)
    await storm.run()

    await assert_all_is_over(rig, storm)
    assert storm.cut_count
    assert storm.read_count


SHARES = Shares({TENANT: Share(0.4, 0.7), "other": Share(0.2)})


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize("seed", seeds(4))
async def test_whatever_is_foretold_a_storm_leaves_nothing_behind(
    tmp_path: Path, seed: int, *, is_faulty: bool
) -> None:
    """Two tenants with shares, every kind of hint, and a policy that follows them: the same holds."""
    dice = Dice(seed)
    rig = MemoryRig(
        tmp_path,
        arena_segments=dice.choice((14, 40)),
        ssd_segments=dice.choice(((7, 7), (30, 30))),
        shares=SHARES,
    )
    capacities = Capacities(rig.arena_segments * SLOT_BYTES, sum(rig.ssd_segments) * SLOT_BYTES)
    rig.make_policy = lambda: RANKED[("look-ahead", "value")[seed % 2]](capacities)
    rig.ssd = SlowTier([count * SLOT_BYTES for count in rig.ssd_segments], dice)
    rig.metadata = SlowMetadata(dice)
    await rig.open()
    other = copy.copy(rig)
    other.tenant = "other"
    storms = [Storm(part, dice, is_faulty=is_faulty) for part in (rig, other)]
    # Other rows than the first one's, and no cuts: what is opened after one knows one tenant.
    storms[1].tag, storms[1].cut_count = 30000, CUTS
    await asyncio.gather(*(storm.run() for storm in storms))

    await assert_all_is_over(rig, *storms)
    assert rig.cache.placement.is_empty
