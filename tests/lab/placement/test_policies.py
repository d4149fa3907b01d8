"""Each baseline against a slow version of its paper without structure: the same references, in order."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from ctxcache.core.placement.baselines import FirstInFirstOut
from ctxcache.core.placement.policy import Capacities, Facts, Level, Policy
from ctxcache.simulate.leaving import leaving
from lab.placement.policies import (
    AGE_BINS,
    POLICIES,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastHitDensity,
    LeastRecentlyUsedTwice,
    Sieve,
    WindowTinyLfu,
    hit_densities,
)

CAPACITY = 200
"""In bytes, which are objects of one byte unless a test says otherwise."""


def references(count: int, *, seed: int = 1) -> list[bytes]:
    """Names of which few are popular, with scans of names that come once."""
    chance = random.Random(seed)
    popular = [b"%d" % int(chance.paretovariate(0.6)) for _ in range(count)]
    return [b"scan %d" % n if n % 400 > 320 else name for n, name in enumerate(popular)]


def size_of(uid: bytes) -> int:
    """A size that a name always has, 1 to 16."""
    return 1 + sum(uid) % 16


def victims(policy: Policy, names: Iterable[bytes], size: Callable[[bytes], int]) -> list[bytes]:
    """The sessions that leave, in order, a store of CAPACITY bytes that makes room before it admits."""
    held: dict[bytes, int] = {}
    left, order = [], leaving(policy)
    for name in names:
        policy.arrived(name, 0.0)
        policy.idle(name, Facts(size(name), 1, size(name), 1), 0.0)
        while name not in held and sum(held.values()) + size(name) > CAPACITY:
            victim = order.first(Level.BELOW, lambda uid, name=name: uid != name)  # type: ignore[misc]
            assert victim is not None
            del held[victim]
            order.discard(victim)
            policy.evicted(victim)
            left.append(victim)
        if name not in held:
            held[name] = size(name)
            policy.placed(name, Level.BELOW)
        order.put(name, Level.BELOW)
    return left


def slow_lfu(names: Iterable[bytes]) -> list[bytes]:
    """By the whole list of uses since each came, counted anew for each victim."""
    uses: dict[bytes, list[int]] = {}
    left = []
    for now, name in enumerate(names):
        if name not in uses and len(uses) == CAPACITY:
            left.append(min(uses, key=lambda uid: (len(uses[uid]), uses[uid][-1])))
            del uses[left[-1]]
        uses.setdefault(name, []).append(now)
    return left


def slow_lru_2(names: Iterable[bytes]) -> list[bytes]:
    """By the last use but one, of all that ever were; those used once before all others, by their last."""
    uses: dict[bytes, list[int]] = {}
    held = set[bytes]()
    left = []
    for now, name in enumerate(names):
        if name not in held and len(held) == CAPACITY:
            left.append(
                min(held, key=lambda uid: (uses[uid][-2] if len(uses[uid]) > 1 else -1, uses[uid][-1]))
            )
            held.discard(left[-1])
        held.add(name)
        uses.setdefault(name, []).append(now)
    return left


def slow_gdsf(names: Iterable[bytes]) -> list[bytes]:
    """The report's four lines: on a hit or a load, Pr = Clock + Fr / Size; Clock is the victim's Pr."""
    clock, frequency, priority, used = 0.0, dict[bytes, int](), dict[bytes, float](), dict[bytes, int]()
    left = []
    for now, name in enumerate(names):
        before = clock
        if name not in priority:
            while sum(map(size_of, priority)) + size_of(name) > CAPACITY:
                victim = min(priority, key=lambda uid: (priority[uid], used[uid]))
                clock = max(clock, priority.pop(victim))
                del frequency[victim]
                left.append(victim)
        frequency[name] = frequency.get(name, 0) + 1
        # The policy hears of a turn before room is made for what it leaves behind.
        priority[name] = before + frequency[name] / size_of(name)
        used[name] = now
    return left


def slow_sieve(names: Iterable[bytes]) -> list[bytes]:
    """The paper's Algorithm 1 on a plain list, the youngest first."""
    queue: list[bytes] = []
    visited: dict[bytes, bool] = {}
    hand: bytes | None = None
    left = []
    for name in names:
        if name in queue:
            visited[name] = True
            continue
        if len(queue) == CAPACITY:
            place = queue.index(hand) if hand is not None else len(queue) - 1
            while visited[queue[place]]:
                visited[queue[place]] = False
                place = place - 1 if place else len(queue) - 1
            left.append(queue[place])
            hand = queue[place - 1] if place else None
            del queue[place]
        queue.insert(0, name)
        visited[name] = False
    return left


@dataclass
class SlowTinyLfu:
    """Three lists, the least recently used first, and a list of all uses that are still counted."""

    window: list[bytes] = field(default_factory=list)
    probation: list[bytes] = field(default_factory=list)
    protected: list[bytes] = field(default_factory=list)
    uses: dict[bytes, int] = field(default_factory=dict)
    use_count: int = 0

    def count(self, name: bytes) -> None:
        """Count a use; all are halved after ten for each name that the store has, this one among them."""
        self.uses[name] = min(self.uses.get(name, 0) + 1, 15)
        self.use_count += 1
        if self.use_count >= 10 * len({*self.window, *self.probation, *self.protected, name}):
            self.uses = {uid: uses // 2 for uid, uses in self.uses.items()}
            self.use_count //= 2

    def play(self, names: Iterable[bytes]) -> list[bytes]:
        """Return who left."""
        left = []
        for name in names:
            self.count(name)
            if name in self.protected or name in self.probation:
                (self.protected if name in self.protected else self.probation).remove(name)
                self.protected.append(name)
                if len(self.protected) > CAPACITY * 0.99 * 0.8:
                    self.probation.append(self.protected.pop(0))
                continue
            is_new = name not in self.window
            if not is_new:
                self.window.remove(name)
            self.window.append(name)
            if is_new and len(self.window + self.probation + self.protected) > CAPACITY:
                left.append(self.victim())
        return left

    def victim(self) -> bytes:
        """One that leaves, the window's last use excepted."""
        main = self.probation or self.protected
        while len(self.window) > CAPACITY * 0.01:
            comer = self.window[0]
            is_full = len(self.probation + self.protected) >= CAPACITY * 0.99
            if is_full and self.uses.get(comer, 0) <= self.uses.get(main[0], 0):
                return self.window.pop(0)
            self.probation.append(self.window.pop(0))
            if is_full:
                return main.pop(0)
            main = self.probation
        return main.pop(0)


@pytest.mark.parametrize(
    ("policy", "slow", "size"),
    [
        (LeastFrequentlyUsed(), slow_lfu, lambda _: 1),
        (LeastRecentlyUsedTwice(), slow_lru_2, lambda _: 1),
        (GreedyDualSizeFrequency(), slow_gdsf, size_of),
        (Sieve(), slow_sieve, lambda _: 1),
        (WindowTinyLfu(CAPACITY), SlowTinyLfu().play, lambda _: 1),
    ],
    ids=["lfu", "lru-2", "gdsf", "sieve", "w-tinylfu"],
)
def test_the_same_leave_as_in_a_slow_version(
    policy: Policy, slow: Callable[[Iterable[bytes]], list[bytes]], size: Callable[[bytes], int]
) -> None:
    """Victim by victim."""
    names = references(6000)
    expected = slow(names)

    assert len(expected) > 1000
    assert victims(policy, names, size) == expected


def test_hit_densities_are_hits_by_the_turns_that_those_older_stayed() -> None:
    """The paper's sum, by each event itself: hits at that age or later over the turns stayed from it on."""
    chance = random.Random(3)
    hits = [float(chance.randrange(9)) for _ in range(AGE_BINS)]
    evictions = [float(chance.randrange(9)) for _ in range(AGE_BINS)]

    def ends(number: int) -> float:
        return float(2 ** ((number + 1) / 4))

    for age, density in enumerate(hit_densities(hits, evictions)):
        stayed = sum(
            (hits[end] + evictions[end]) * (ends(end) - ends(age - 1)) for end in range(age, AGE_BINS)
        )
        assert density == pytest.approx(sum(hits[age:]) / stayed if stayed else 0.0)


def test_lhd_learns_that_what_is_scanned_does_not_return() -> None:
    """A loop that fits, a scan that never returns: LHD gives up the scan, FIFO both."""
    loop = [b"loop %d" % number for number in range(CAPACITY // 2)]
    names = [name for n in range(12_000) for name in (loop[n % len(loop)], b"scan %d" % n)]

    by_lhd, by_fifo = (
        sum(name.startswith(b"loop") for name in victims(policy, names, lambda _: 1)[-5_000:])
        for policy in (LeastHitDensity(), FirstInFirstOut())
    )

    assert by_lhd < by_fifo / 3


@pytest.mark.parametrize("name", POLICIES)
def test_several_at_once_are_those_who_leave_one_by_one(name: str) -> None:
    """A request of ten names spares its own, and what stands aside for that stands where it stood."""
    policies = [POLICIES[name](Capacities(0, CAPACITY)) for _ in range(2)]
    at_once, one_by_one = (leaving(policy) for policy in policies)
    names, held = references(6000), set[bytes]()
    for begin in range(0, len(names), 10):
        mine = set(names[begin : begin + 10])
        for policy in policies:
            for uid in sorted(mine):
                policy.arrived(uid, 0.0)
                policy.idle(uid, Facts(1, 1, 1, 1), 0.0)
        count = max(len(held | mine) - CAPACITY, 0)
        left = at_once.give_up(count, mine)

        assert len(left) == count
        for uid in left:
            assert one_by_one.first(Level.BELOW, lambda other, mine=mine: other not in mine) == uid  # type: ignore[misc]
            one_by_one.discard(uid)
            policies[1].evicted(uid)
        held = held.difference(left)
        for policy, order in zip(policies, (at_once, one_by_one), strict=True):
            for uid in sorted(mine):
                if uid not in held:
                    policy.placed(uid, Level.BELOW)
                order.put(uid, Level.BELOW)
        held |= mine
