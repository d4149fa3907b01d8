"""A follower of a space knows its blocks as a look-up says them, after every change."""

import random

import pytest
from block_rig import OTHER_SPACE, SPACE, key_of, load, look, put, spoil
from cache_rig import DiskRig, MemoryRig, Rig

from ctxcache.cache.block_news import BlockNews, Subscriptions
from ctxcache.cache.blocks import ABSENT, BlockState, FoundBlock
from ctxcache.core.ledger.session import block_id
from ctxcache.server.upkeep import Upkeep

COUNT = 40
STEPS = 400


def let_go(subscriptions: Subscriptions, news: BlockNews) -> int:
    """End a subscription; in how many steps."""
    return sum(1 for _ in subscriptions.end(news))


class Follower:
    """Hears of a space's blocks, and looks up each key when it is told of it, as BlockService does."""

    def __init__(self, rig: Rig, space: bytes = SPACE) -> None:
        self._rig, self._space = rig, space
        subscriptions = rig.cache.blocks.subscriptions
        self.news: BlockNews = subscriptions.begin(rig.tenant, space)
        for _ in subscriptions.present(self.news):
            pass
        self.known: dict[bytes, FoundBlock] = {}
        self.told_count = 0

    def catch_up(self) -> None:
        """Hear of everything; what is known then is what a look-up says of every key."""
        while self.news.has_news.is_set():
            keys = self.news.take(3)
            self.told_count += len(keys)
            self.known |= zip(keys, self._look(keys), strict=True)
        keys = [key_of(number) for number in range(COUNT)]
        assert [self.known.get(key, ABSENT) for key in keys] == self._look(keys)

    def end(self) -> None:
        """Hear of nothing more, and leave nothing behind."""
        ledger, subscriptions = self._rig.cache.ledger, self._rig.cache.blocks.subscriptions
        let_go(subscriptions, self.news)
        assert not len(subscriptions)
        assert not ledger.placement.watched

    def _look(self, keys: list[bytes]) -> list[FoundBlock]:
        found = self._rig.cache.blocks.look_up(self._rig.tenant, self._space, keys)
        # A block that is being written is not there.
        return [one if one.state is BlockState.HIT else ABSENT for one in found]


@pytest.mark.parametrize("seed", range(8))
async def test_a_follower_knows_what_a_look_up_says(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Blocks come, go, are evicted, demoted and promoted at random; the follower reads now and then."""
    rig = MemoryRig(tmp_path_factory.mktemp("store"), ssd_segments=(16, 8))
    await rig.open()
    draw = random.Random(seed)
    follower = Follower(rig)
    for _ in range(STEPS):
        numbers = draw.sample(range(COUNT), draw.randint(1, 3))
        act = draw.randrange(8)
        if act < 3:
            await put(rig, *numbers, is_durable=draw.random() < 0.7)
        elif act < 5:
            await load(rig, *numbers)
        elif act == 5:
            await rig.cache.blocks.delete(rig.tenant, SPACE, list(map(key_of, numbers)))
        elif act == 6 and (block := rig.cache.ledger.named(rig.tenant, block_id(SPACE, key_of(numbers[0])))):
            await rig.cache.flushing.demote(block)
        else:
            await rig.cache.drain()
        if draw.random() < 0.3:
            follower.catch_up()
    follower.catch_up()
    states = {(one.state, one.is_in_memory) for one in follower.known.values()}
    assert len(states) == 3
    follower.end()
    await rig.check()
    await rig.close()


async def test_a_subscription_begins_with_what_is_there(disk_rig: DiskRig) -> None:
    """After a restart too, and of its own space alone."""
    await put(disk_rig, 1, 2, is_durable=True)
    await put(disk_rig, 3, space=OTHER_SPACE, is_durable=True)
    await disk_rig.crash()
    follower = Follower(disk_rig)
    follower.catch_up()
    assert set(follower.known) == {key_of(1), key_of(2)}
    assert not any(one.is_in_memory for one in follower.known.values())
    await load(disk_rig, 1)
    follower.catch_up()
    assert follower.known[key_of(1)].is_in_memory
    follower.end()


async def test_two_followers_of_two_spaces_hear_of_their_own(rig: MemoryRig) -> None:
    """One ends, the other hears on."""
    first, second = Follower(rig), Follower(rig, OTHER_SPACE)
    await put(rig, 1)
    await put(rig, 2, space=OTHER_SPACE)
    first.catch_up()
    second.catch_up()
    assert (set(first.known), set(second.known)) == ({key_of(1)}, {key_of(2)})
    let_go(rig.cache.blocks.subscriptions, first.news)
    await put(rig, 3, space=OTHER_SPACE)
    second.catch_up()
    assert set(second.known) == {key_of(2), key_of(3)}
    second.end()


async def test_an_expired_block_is_told_when_it_is_swept(rig: MemoryRig) -> None:
    """The sweep removes it, and says so."""
    await put(rig, 1, 2, is_durable=True)
    follower = Follower(rig)
    follower.catch_up()
    rig.clock.advance(seconds=3601)
    await Upkeep(rig.cache).turn()
    await rig.cache.drain()
    follower.catch_up()
    assert list(follower.known.values()) == [ABSENT, ABSENT]
    follower.end()


async def test_a_block_that_turns_out_bad_is_told(disk_rig: DiskRig) -> None:
    """And again when it is put anew."""
    await put(disk_rig, 1, 2, is_durable=True)
    follower = Follower(disk_rig)
    follower.catch_up()
    await spoil(disk_rig, 1)
    await load(disk_rig, 1)
    follower.catch_up()
    assert follower.known[key_of(1)] == ABSENT
    await put(disk_rig, 1)
    follower.catch_up()
    assert follower.known[key_of(1)].state is BlockState.HIT
    follower.end()


async def test_a_block_whose_only_bytes_are_bad_is_told(rig: MemoryRig) -> None:
    """It was in DRAM alone, and nothing is left of it."""
    await put(rig, 1, 2)
    follower = Follower(rig)
    follower.catch_up()
    block = rig.cache.ledger.find(rig.tenant, block_id(SPACE, key_of(1)))
    slot = block.segments[0].memory
    assert slot is not None
    rig.arena.view(slot)[-9] ^= 1
    async for _ in rig.cache.scrubbing.run():
        pass
    follower.catch_up()
    assert look(rig, 1, 2) == [BlockState.MISS, BlockState.HIT]
    assert follower.known[key_of(1)] == ABSENT
    follower.end()


async def test_blocks_of_a_lost_path_are_told_and_told_again_when_it_is_back(rig: MemoryRig) -> None:
    """Blocks on a lost path are misses as long as it is lost."""
    for number in range(8):
        await put(rig, number, is_durable=True)
        block = rig.cache.ledger.find(rig.tenant, block_id(SPACE, key_of(number)))
        await rig.cache.flushing.demote(block)
    follower = Follower(rig)
    follower.catch_up()
    rig.ssd.lose(0)
    await rig.cache.devices.look()
    follower.catch_up()
    assert 0 < look(rig, *range(8)).count(BlockState.MISS) < 8
    late = Follower(rig)
    late.catch_up()
    rig.ssd.find(0)
    await rig.cache.devices.look()
    follower.catch_up()
    late.catch_up()
    assert look(rig, *range(8)) == [BlockState.HIT] * 8
    let_go(rig.cache.blocks.subscriptions, late.news)
    follower.end()


async def test_a_follower_that_reads_nothing_keeps_one_entry_a_key(rig: MemoryRig) -> None:
    """However often a block comes and goes."""
    follower = Follower(rig)
    for _ in range(50):
        await put(rig, 1)
        await rig.cache.blocks.delete(rig.tenant, SPACE, [key_of(1)])
    follower.catch_up()
    assert follower.told_count == 1
    follower.end()


async def test_another_tenants_blocks_are_not_told(rig: MemoryRig) -> None:
    """Not those that are there, and none that come."""
    await put(rig, 1)
    subscriptions = rig.cache.blocks.subscriptions
    news = subscriptions.begin("other", SPACE)
    for _ in subscriptions.present(news):
        pass
    await put(rig, 2)
    await rig.cache.blocks.delete(rig.tenant, SPACE, [key_of(1)])
    assert not news.has_news.is_set()
    assert not news.take(10)
    let_go(subscriptions, news)


async def test_an_end_is_taken_in_steps(rig: MemoryRig) -> None:
    """One block at each: others have their turn; a block that goes meanwhile leaves nothing either."""
    await put(rig, *range(4))
    first, second = Follower(rig), Follower(rig)
    subscriptions = rig.cache.blocks.subscriptions
    steps = subscriptions.end(first.news)
    next(steps)
    await rig.cache.blocks.delete(rig.tenant, SPACE, [key_of(0)])
    left_count = sum(1 for _ in steps)

    assert len(subscriptions) == 1
    assert left_count in (2, 3)
    second.catch_up()
    second.end()
    await rig.check()
