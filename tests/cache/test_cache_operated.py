"""An operator at work in a storm.

Evicts, takes paths out of use, changes shares and marks, drains, ends streams' leases.
"""

import asyncio
import copy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from cache_rig import SLOT_BYTES, TENANT, MemoryRig, seeds
from test_cache_storm import CUTS, SHARES, Dice, SlowMetadata, SlowTier, Storm, assert_all_is_over

from ctxcache.core.limits import Watermarks
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.shares import Share
from ctxcache.errors import DeadlineExceeded, LeaseNotFound, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.storage.tiers.base import Range, TierRefusal


class HeldTier(SlowTier):
    """Paths of which an operator holds one at most."""

    def __init__(self, capacities_bytes: Sequence[int], dice: Dice) -> None:
        super().__init__(capacities_bytes, dice)
        self.held: set[int] = set()

    @property
    def refusals(self) -> dict[int, TierRefusal]:
        """See Tier."""
        return super().refusals | dict.fromkeys(self.held, TierRefusal("held", is_final=False))

    async def write(
        self, slot: object, begin: int, data: memoryview, *, pieces: Sequence[Range] | None = None
    ) -> None:
        """See Tier."""
        assert isinstance(slot, Slot)
        if slot.path_index in self.held:
            raise TierFailure(path=self.paths[slot.path_index], problem="held")
        await super().write(slot, begin, data, pieces=pieces)


class OperatedStorm(Storm):
    """A storm with an operator."""

    operated_count = 0
    has_faults = False

    async def fail(self) -> None:
        """A write may be refused while its path is taken out of use; devices fail where they are to."""
        await (super().fail() if self.has_faults else asyncio.sleep(0))

    async def foretell(self) -> None:
        """Now and again an operator's work instead."""
        if self.dice.random() < 0.5:
            await super().foretell()
            return
        works = (
            self.evict,
            self.evict,
            self.hold,
            self.change_shares,
            self.change_marks,
            self.drain,
            self.end_lease,
        )
        await self.dice.choice(works)()
        self.operated_count += 1

    async def evict(self) -> None:
        """A session in whatever state."""
        if not self.known:
            return
        name = self.dice.choice(sorted(self.known))
        async with self.pinning:
            if name in self.known:
                self.known[name].is_pinned = False
                await self.rig.cache.sessions.evict(self.rig.tenant, name)

    async def hold(self) -> None:
        """A path out of use, or back."""
        tier = self.rig.ssd
        assert isinstance(tier, HeldTier)
        if tier.held:
            tier.held.clear()
        else:
            index = self.dice.randrange(2)
            if set(range(2)) - tier.refusals.keys() - {index}:
                tier.held.add(index)

    async def change_shares(self) -> None:
        """Below what they have, too."""
        limit = self.dice.choice((0.1, 0.4, 0.7, 1.0))
        self.rig.cache.ledger.usage.shares.become(
            {TENANT: Share(limit / 2, limit), "other": Share(self.dice.choice((0.0, 0.2, 0.5)))}
        )

    async def change_marks(self) -> None:
        """As settings read again do."""
        low = self.dice.choice((0.0, 0.1, 0.3))
        dirty = self.dice.choice((0.1, 0.5))
        self.rig.cache.ledger.watermarks = Watermarks(
            low=low,
            high=low + 0.1,
            dirty=dirty,
            dirty_limit=dirty + 0.3,
            writer_wait_s=0.05,
            tail_age_ns=self.dice.choice((0, 10**9)),
            write_behind_bytes_per_s=self.dice.choice((0, SLOT_BYTES)),
        )
        self.rig.cache.state.is_pressed.set()

    async def drain(self) -> None:
        """All rows that SSD is to have are written."""
        task = asyncio.ensure_future(self.rig.cache.flush_due())
        if self.dice.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        # `wait` raises nothing of the task's, and what cancels this one still does.
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def end_lease(self) -> None:
        """A reader's, in the middle of it."""
        name = self.dice.choice(sorted(self.known)) if self.known else ""
        with suppress(LeaseNotFound, DeadlineExceeded):
            async with self.rig.cache.leases.stream(self.rig.request(name), ()) as (lease, _, rows):
                async for item in rows:
                    bytes(item.data)
                    if self.dice.random() < 0.3:
                        self.rig.cache.leases.release(lease.lease_id)


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize("seed", seeds(2))
async def test_whatever_an_operator_does_nothing_is_wrong(
    tmp_path: Path, seed: int, *, is_faulty: bool
) -> None:
    """Books add up, rows are what was written, and every slot comes back in the end."""
    dice = Dice(seed)
    rig = MemoryRig(
        tmp_path,
        arena_segments=dice.choice((8, 14, 40)),
        ssd_segments=dice.choice(((7, 7), (30, 30))),
        shares=SHARES,
    )
    capacities = Capacities(rig.arena_segments * SLOT_BYTES, sum(rig.ssd_segments) * SLOT_BYTES)
    rig.make_policy = lambda: RANKED[("look-ahead", "value", "lru")[seed % 3]](capacities)
    rig.ssd = HeldTier([count * SLOT_BYTES for count in rig.ssd_segments], dice)
    rig.metadata = SlowMetadata(dice)
    await rig.open()
    other = copy.copy(rig)
    other.tenant = "other"
    storms = [OperatedStorm(part, dice, is_faulty=True) for part in (rig, other)]
    for storm in storms:
        storm.has_faults = is_faulty
    storms[1].tag, storms[1].cut_count = 30000, CUTS
    await asyncio.gather(*(storm.run() for storm in storms))
    rig.ssd.held.clear()

    await assert_all_is_over(rig, *storms)
    assert sum(storm.operated_count for storm in storms) > 20
