"""Policies of the literature that the simulator compares with: LFU, GDSF, LHD, SIEVE, W-TinyLFU.

They order what leaves the store; memory is left in order of last use. Where a paper has a queue of equal
objects, bytes are counted. None can serve: what they rank by falls without a word.
"""

import math

from ctxcache.core.placement.classic import GHOSTS, Recency
from ctxcache.core.placement.order import Accepts, Keyed, Line
from ctxcache.core.placement.policy import Facts


class LeastFrequentlyUsed(Recency):
    """Who had the fewest turns since it came leaves first, of equals the least recently used.

    Source: Aho, Denning, Ullman, Principles of Optimal Page Replacement, J. ACM 18(1), 1971. O(log n).
    """

    def __init__(self) -> None:
        super().__init__()
        self._order = Keyed()
        self._uses: dict[bytes, int] = {}
        self._turn_count = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._turn_count += 1
        self._uses[uid] = self._uses.get(uid, 0) + 1
        self._order.put(uid, (self.priority(uid, facts), self._turn_count))

    def priority(self, uid: bytes, facts: Facts) -> float:  # noqa: ARG002  subclasses look at sizes
        """The lowest leaves first."""
        return self._uses[uid]

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._uses.pop(uid, None)
        self._order.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._order.first(accepts)


class GreedyDualSizeFrequency(LeastFrequentlyUsed):
    """GDSF: the clock + uses x cost / bytes, at a cost of 1; the clock is the priority of who left last.

    Source: Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy,
    HPL-98-69R1, 1998. O(log n).
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def priority(self, uid: bytes, facts: Facts) -> float:
        """See LeastFrequentlyUsed."""
        return self._clock + self._uses[uid] / max(facts.size_bytes, 1)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        key = self._order.key(uid)
        if key is not None:
            self._clock = max(self._clock, key[0])
        super().evicted(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy. Nobody had to leave: the clock stands."""
        super().evicted(uid)


class Sieve(Recency):
    """A queue in order of arrival; a hand goes from the oldest to the youngest and takes the first unvisited.

    Those that it passes are unvisited from then on; at the youngest it begins again. Source: Zhang et al.,
    SIEVE is Simpler than LRU, NSDI'24. Amortised O(1).
    """

    def __init__(self) -> None:
        super().__init__()
        self._older: dict[bytes, bytes | None] = {}
        self._younger: dict[bytes, bytes | None] = {}
        self._oldest: bytes | None = None
        self._youngest: bytes | None = None
        self._visited: set[bytes] = set()
        self._hand: bytes | None = None

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        if uid in self._older:
            self._visited.add(uid)
            return
        self._older[uid], self._younger[uid] = self._youngest, None
        if self._youngest is None:
            self._oldest = uid
        else:
            self._younger[self._youngest] = uid
        self._youngest = uid

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        if uid not in self._older:
            return
        older, younger = self._older.pop(uid), self._younger.pop(uid)
        if older is None:
            self._oldest = younger
        else:
            self._younger[older] = younger
        if younger is None:
            self._youngest = older
        else:
            self._older[younger] = older
        if self._hand == uid:
            self._hand = younger
        self._visited.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        # Two rounds: the first may find everybody visited.
        for _ in range(2 * len(self._older)):
            uid = self._oldest if self._hand is None else self._hand
            if uid is None:
                return None
            if accepts(uid):
                if uid not in self._visited:
                    self._hand = uid
                    return uid
                self._visited.discard(uid)
            self._hand = self._younger[uid]
        return None


WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
USES_REMEMBERED = 10
MOST_USES = 15


class WindowTinyLfu(Recency):
    """W-TinyLFU: a window of 1 % by LRU, the rest by segmented LRU; who leaves the window must be used more.

    The least recently used of the window is compared with who would leave the rest: the one of fewer uses
    leaves. Uses are counted beyond eviction and halved after ten times as many as there are names; here
    exactly, the paper in a sketch. Source: Einziger, Friedman, Manes, TinyLFU: A Highly Efficient Cache
    Admission Policy, ACM Transactions on Storage 13(4), 2017. Amortised O(1).
    """

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self._total_bytes = total_bytes
        self._window, self._probation, self._protected = Line(), Line(), Line()
        self._uses: dict[bytes, int] = {}
        self._use_count = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._count(uid)
        if self._probation.discard(uid) is not None or uid in self._protected:
            self._protected.put(uid, facts.size_bytes)
            self._demote()
        else:
            self._window.put(uid, facts.size_bytes)

    def _demote(self) -> None:
        limit_bytes = self._total_bytes * (1 - WINDOW_SHARE) * PROTECTED_SHARE
        while self._protected.size_bytes > limit_bytes and len(self._protected) > 1:
            uid = next(iter(self._protected))
            self._probation.put(uid, self._protected.discard(uid) or 0)

    def _count(self, uid: bytes) -> None:
        self._uses[uid] = min(self._uses.get(uid, 0) + 1, MOST_USES)
        self._use_count += 1
        if self._use_count >= USES_REMEMBERED * max(len(self.all), 1) or len(self._uses) > GHOSTS:
            self._uses = {each: uses // 2 for each, uses in self._uses.items() if uses > 1}
            self._use_count //= 2

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        for line in (self._window, self._probation, self._protected):
            line.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        while True:
            victim = self._probation.first(accepts) or self._protected.first(accepts)
            comer = self._window.first(accepts)
            is_small = self._window.size_bytes <= self._total_bytes * WINDOW_SHARE
            if comer is None or (is_small and victim is not None):
                return victim
            main_bytes = self._probation.size_bytes + self._protected.size_bytes
            is_full = main_bytes >= self._total_bytes * (1 - WINDOW_SHARE)
            if is_full and (victim is None or self._uses.get(comer, 0) <= self._uses.get(victim, 0)):
                return comer
            self._probation.put(comer, self._window.discard(comer) or 0)
            if is_full:
                return victim


AGE_BINS = 64
"""Ages by the logarithm of the turns since: four bins for each doubling."""
SAMPLED = 64
RELEARNED_EVERY = 1 << 12


class LeastHitDensity(Recency):
    """LHD: of SAMPLED at random, the one of least expected hits by byte and turn that it is still kept.

    density(age) = hits of those older / sum over those older of how much longer they stayed

    Ages are turns of all sessions since the last use; hits and evictions by age are halved whenever densities
    are computed anew. One class. Source: Beckmann, Chen, Cidon, LHD: Improving Cache Hit Rate by Maximizing
    Hit Density, NSDI'18. O(SAMPLED).
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[bytes, int] = {}
        self._uids: list[bytes] = []
        self._used: dict[bytes, tuple[int, int]] = {}
        self._turn_count = 0
        self._hits, self._evictions = [0.0] * AGE_BINS, [0.0] * AGE_BINS
        # Until something is learned, the younger is the better.
        self._densities = [1.0 / (number + 1) for number in range(AGE_BINS)]
        self._pick = 1

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._turn_count += 1
        if uid in self._used:
            self._hits[self._age(uid)] += 1
        else:
            self._places[uid] = len(self._uids)
            self._uids.append(uid)
        self._used[uid] = (self._turn_count, max(facts.size_bytes, 1))
        if self._turn_count % RELEARNED_EVERY == 0:
            self._relearn()

    def _age(self, uid: bytes) -> int:
        return _age_bin(self._turn_count - self._used[uid][0])

    def _relearn(self) -> None:
        self._densities = hit_densities(self._hits, self._evictions)
        for counts in (self._hits, self._evictions):
            counts[:] = [each / 2 for each in counts]

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        if uid in self._used:
            self._evictions[self._age(uid)] += 1
        self.ended(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        if self._used.pop(uid, None) is None:
            return
        place, last = self._places.pop(uid), self._uids.pop()
        if last != uid:
            self._uids[place] = last
            self._places[last] = place

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        sample: list[bytes] = []
        for _ in range(min(SAMPLED, len(self._uids))):
            self._pick = (self._pick * 1103515245 + 12345) & 0x7FFFFFFF
            uid = self._uids[(self._pick >> 8) % len(self._uids)]
            if accepts(uid):
                sample.append(uid)
        if not sample:
            return self.all.first(accepts)
        return min(sample, key=self._density)

    def _density(self, uid: bytes) -> tuple[float, int]:
        used, size_bytes = self._used[uid]
        return self._densities[self._age(uid)] / size_bytes, used


def _age_bin(age: int) -> int:
    return min(int(4 * math.log2(age + 1)), AGE_BINS - 1)


def _bin_turns(number: int) -> float:
    """How many turns long an age bin is."""
    return float(2 ** ((number + 1) / 4) - 2 ** (number / 4))


def hit_densities(hits: list[float], evictions: list[float]) -> list[float]:
    """Hits per turn kept, by age bin, of those that reached it; an event counts at the end of its bin."""
    densities = [0.0] * len(hits)
    hit_count = event_count = kept_turns = 0.0
    for number in reversed(range(len(hits))):
        hit_count += hits[number]
        event_count += hits[number] + evictions[number]
        kept_turns += event_count * _bin_turns(number)
        densities[number] = hit_count / kept_turns if kept_turns else 0.0
    return densities
