"""The policies of the literature that no server can place by, and all policies by name.

S3-FIFO and ARC take amortised O(1) an event. LFU, GDSF, LHD, SIEVE and W-TinyLFU order what leaves the store;
memory is left in order of last use. Their rank falls without an event, so they run in the simulator alone.
Where a paper has a queue of equal objects, bytes are counted.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise

from ctxcache.core.placement.order import Accepts, Key, Keyed
from ctxcache.core.placement.policy import Capacities, Facts, Level, Policy
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.value import MISS_COST, MissCost
from ctxcache.simulate.study import BELADY


class Line:
    """Sessions in the order in which they were put, with their sizes. O(1), `first` per refusal."""

    def __init__(self) -> None:
        # Deleting from the front leaves gaps in a plain dict, and each iteration begins by walking over them.
        # A plain dict would look at every gap at its front for each `first`.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._aside: list[tuple[bytes, int]] | None = None
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def put(self, uid: bytes, size_bytes: int = 0) -> None:
        """Put the session last, wherever it stood."""
        self.size_bytes += size_bytes - self._sizes.pop(uid, 0)
        self._sizes[uid] = size_bytes

    def renew(self, uid: bytes) -> None:
        """Put the session last if it is in here."""
        if uid in self._sizes:
            self._sizes.move_to_end(uid)

    def resize(self, uid: bytes, size_bytes: int) -> None:
        """Change its size and let it stand where it is."""
        self.size_bytes += size_bytes - self._sizes[uid]
        self._sizes[uid] = size_bytes

    def discard(self, uid: bytes) -> int | None:
        """Take it out; its size, None if it was not in here."""
        size_bytes = self._sizes.pop(uid, None)
        self.size_bytes -= size_bytes or 0
        return size_bytes

    def first(self, accepts: Accepts) -> bytes | None:
        """The earliest that `accepts` takes."""
        sizes, aside = self._sizes, self._aside
        if aside is None:
            for uid in sizes:
                if accepts(uid):
                    return uid
            return None
        while sizes:
            uid = next(iter(sizes))
            if accepts(uid):
                return uid
            aside.append((uid, sizes.pop(uid)))
        return None

    def pass_over(self) -> None:
        """Look at those that `first` refuses once, until `look_again`: they will be refused all the while.

        Meanwhile they are not in here, but for their bytes.
        """
        self._aside = []

    def look_again(self) -> None:
        """End `pass_over`: they stand where they stood."""
        aside, self._aside = self._aside or [], None
        # Reversed, and each to the front: the first of them is the first again.
        for uid, size_bytes in reversed(aside):
            self._sizes[uid] = size_bytes
            self._sizes.move_to_end(uid, last=False)


class Ordered(Keyed):
    """Sessions by key, of which refused ones may be set aside."""

    def __init__(self) -> None:
        super().__init__()
        self._aside: dict[bytes, Key] | None = None

    def first(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """See Keyed."""
        aside = self._aside
        while (uid := super().first()) is not None and not accepts(uid) and aside is not None:
            aside[uid] = self.keys[uid]
            self.discard(uid)
        return uid if aside is not None or uid is None or accepts(uid) else super().first(accepts)

    def pass_over(self) -> None:
        """See Line."""
        self._aside = {}

    def look_again(self) -> None:
        """See Line."""
        aside, self._aside = self._aside or {}, None
        for uid, key in aside.items():
            self.put(uid, key)


def takes_or_passes(accepts: Accepts, in_turn: set[bytes], passed: list[bytes]) -> Accepts:
    """The filter `accepts`, with a note of refusals.

    `passed` are those in a turn that it does not, until the turn is over.
    """

    def takes(uid: bytes) -> bool:
        if accepts(uid):
            return True
        if uid in in_turn:
            passed.append(uid)
        return False

    return takes


# The lines and who stands in them. A line's first leaves first; `idle` puts a session at the end:
#
#     all         every session that is kept                 evict looks here
#     dram        those of them that are in memory           demote looks here
#
# A session in a turn may not leave. When it comes first it is taken out of the line, so that it is looked at
# once and not at each need, and `idle` puts it back; `_set_aside` knows who belongs in memory's line as well.
class Recency(Policy):
    """Two lines, the store's and memory's, in the order in which turns ended. Its own order: see Leaving.

    Other policies build on it, and say what leaves the store.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all = Line()
        self.dram = Line()
        self._in_turn: set[bytes] = set()
        self._set_aside: set[bytes] = set()
        """Those in a turn that were refused, and would stand in memory's line."""

    def arrived(self, uid: bytes, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._in_turn.add(uid)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._in_turn.discard(uid)
        self.all.put(uid)
        if uid in self._set_aside:
            self._set_aside.discard(uid)
            self.dram.put(uid)
        else:
            self.dram.renew(uid)

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        self._set_aside.discard(uid)
        if tier is Level.BELOW:
            self.dram.discard(uid)
        elif uid not in self.dram:
            self.dram.put(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        self._in_turn.discard(uid)
        self._set_aside.discard(uid)
        self.all.discard(uid)
        self.dram.discard(uid)

    ended = evicted

    def put(self, uid: bytes, level: Level) -> None:
        """See Leaving. Events tell it."""

    def discard(self, uid: bytes) -> None:
        """See Leaving. Events tell it."""

    def first(self, level: Level, accepts: Accepts) -> bytes | None:
        """See Leaving."""
        return self.demote(accepts) if level is Level.MEMORY else self.evict(accepts)

    def evict(self, accepts: Accepts) -> bytes | None:
        """Which session is to leave the store, of both tiers, of those that `accepts` takes."""
        passed: list[bytes] = []
        found = self.all.first(takes_or_passes(accepts, self._in_turn, passed))
        for uid in passed:
            self.all.discard(uid)
        return found

    def give_up(self, count: int, spared: Collection[bytes]) -> list[bytes]:
        """See Leaving. The spared are looked at once."""
        # Each line and order of a subclass keeps those that were refused out of the way.
        orders = [order for order in vars(self).values() if isinstance(order, (Line, Ordered))]
        for order in orders:
            order.pass_over()
        # Told to itself at once, so that the next answer is another session.
        left: list[bytes] = []
        while len(left) < count and (uid := self.evict(lambda other: other not in spared)) is not None:
            self.evicted(uid)
            left.append(uid)
        for order in orders:
            order.look_again()
        return left

    def demote(self, accepts: Accepts) -> bytes | None:
        """Which session is to leave memory for the tier below, likewise."""
        passed: list[bytes] = []
        found = self.dram.first(takes_or_passes(accepts, self._in_turn, passed))
        for uid in passed:
            self.dram.discard(uid)
        self._set_aside.update(passed)
        return found


# S3-FIFO and ARC by bytes. Both order what leaves the store; memory is left in order of last use. Of an
# evicted session they remember the name and the size, up to the store's capacity in bytes and to GHOSTS
# names.

GHOSTS = 1 << 17
SMALL_SHARE = 10
S3_FIFO_MOST_USES = 3


# By bytes, as many as the store has; by names too, since small sessions would make the ghosts too many.
def _bound(ghosts: Line, limit_bytes: int) -> None:
    while len(ghosts) and (ghosts.size_bytes > limit_bytes or len(ghosts) > GHOSTS):
        ghosts.discard(next(iter(ghosts)))


#     new ──► small (a tenth) ── used since ──► main ── used since ──► main, at the end, one use less
#               │ unused                          │ unused
#               ▼                                 ▼
#             leaves, its name is a ghost       leaves
#               └── comes back ──► main
class S3Fifo(Recency):
    """A tenth of the bytes on probation, the rest a FIFO with second chances. Source: SOSP'23."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self._total_bytes = total_bytes
        self._small, self._main, self._ghosts = Line(), Line(), Line()
        self._uses: dict[bytes, int] = {}

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        for line in (self._small, self._main):
            if uid in line:
                self._uses[uid] = min(self._uses[uid] + 1, S3_FIFO_MOST_USES)
                line.resize(uid, facts.size_bytes)
                return
        was_known = self._ghosts.discard(uid) is not None
        (self._main if was_known else self._small).put(uid, facts.size_bytes)
        self._uses[uid] = 0

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        size_bytes = self._small.discard(uid)
        if size_bytes is not None:
            self._ghosts.put(uid, size_bytes)
            _bound(self._ghosts, self._total_bytes)
        self._leave(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self._small.discard(uid)
        self._ghosts.discard(uid)
        self._leave(uid)

    def _leave(self, uid: bytes) -> None:
        super().evicted(uid)
        self._main.discard(uid)
        self._uses.pop(uid, None)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        while (uid := self._candidate(accepts)) is not None:
            uses = self._uses[uid]
            is_small = uid in self._small
            if not uses:
                return uid
            size_bytes = (self._small if is_small else self._main).discard(uid) or 0
            self._main.put(uid, size_bytes)
            self._uses[uid] = 0 if is_small else uses - 1
        return None

    def _candidate(self, accepts: Accepts) -> bytes | None:
        lines = [self._small, self._main]
        # The small queue gives only where it has more than its tenth; below that main gives first.
        if self._small.size_bytes * SMALL_SHARE <= self._total_bytes:
            lines.reverse()
        return next((uid for line in lines if (uid := line.first(accepts)) is not None), None)


#     once   seen once lately          ghosts of it that come back: `once` should have been larger
#     often  seen more than once       ghosts of it that come back: `often` should have been larger
#
# `_once_goal_bytes` is the balance between both, moved at each return of a ghost.
class AdaptiveReplacement(Recency):
    """ARC: recency against frequency, the balance learned from what left too early. Source: FAST'03."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self._total_bytes = total_bytes
        self._once, self._often = Line(), Line()
        self._once_ghosts, self._often_ghosts = Line(), Line()
        self._once_goal_bytes = 0.0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        is_known = uid in self._once or uid in self._often
        self._once.discard(uid)
        self._often.discard(uid)
        if not is_known:
            is_known = self._learn(uid)
        (self._often if is_known else self._once).put(uid, facts.size_bytes)

    def _learn(self, uid: bytes) -> bool:
        once, often = self._once_ghosts, self._often_ghosts
        # A step is larger where that side's ghosts are few: a rare return says more.
        once_bytes, often_bytes = max(once.size_bytes, 1), max(often.size_bytes, 1)
        if (size_bytes := once.discard(uid)) is not None:
            goal = self._once_goal_bytes + size_bytes * max(often_bytes / once_bytes, 1)
        elif (size_bytes := often.discard(uid)) is not None:
            goal = self._once_goal_bytes - size_bytes * max(once_bytes / often_bytes, 1)
        else:
            return False
        self._once_goal_bytes = min(max(goal, 0.0), self._total_bytes)
        return True

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        for line, ghosts in ((self._once, self._once_ghosts), (self._often, self._often_ghosts)):
            size_bytes = line.discard(uid)
            if size_bytes is not None:
                ghosts.put(uid, size_bytes)
                _bound(ghosts, self._total_bytes)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        for line in (self._once, self._often, self._once_ghosts, self._often_ghosts):
            line.discard(uid)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        lines = [self._often, self._once]
        if self._once.size_bytes > self._once_goal_bytes:
            lines.reverse()
        return next((uid for line in lines if (uid := line.first(accepts)) is not None), None)


class LeastFrequentlyUsed(Recency):
    """The session with the fewest turns since it came leaves first; of equals, the least recently used.

    Source: Aho, Denning, Ullman, Principles of Optimal Page Replacement, J. ACM 18(1), 1971. O(log n).
    """

    def __init__(self) -> None:
        super().__init__()
        self._order = Ordered()
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
        # Before it leaves the order: its priority is what newcomers must beat from here on.
        key = self._order.keys.get(uid)
        if key is not None:
            self._clock = max(self._clock, key[0])
        super().evicted(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy. No session had to leave: the clock stands."""
        super().evicted(uid)


class LeastRecentlyUsedTwice(LeastFrequentlyUsed):
    """LRU-2: the session whose last use but one is the longest ago leaves first.

    Those that were used once leave before all others. The last uses of GHOSTS that left are remembered, so
    that one that comes back has been used twice. Source: O'Neil, O'Neil, Weikum, The LRU-K Page Replacement
    Algorithm for Database Disk Buffering, SIGMOD'93; no uses are taken to belong together. O(log n).
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_turns: dict[bytes, int] = {}
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()

    def priority(self, uid: bytes, facts: Facts) -> float:  # noqa: ARG002
        """See LeastFrequentlyUsed."""
        before = self._last_turns.get(uid) or self._ghosts.pop(uid, 0)
        self._last_turns[uid] = self._turn_count
        return before

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        last_turn = self._last_turns.get(uid)
        self.ended(uid)
        if last_turn is not None:
            self._ghosts[uid] = last_turn
            if len(self._ghosts) > GHOSTS:
                self._ghosts.popitem(last=False)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._last_turns.pop(uid, None)
        self._ghosts.pop(uid, None)


#     oldest  A*  B   C*  D   E  youngest        * visited
#                 ▲ hand
#
# A is passed and unvisited, B is taken, and the hand stays before C: those behind it keep their place.
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
                    # Kept where it is: `evicted` moves it on to the younger one.
                    self._hand = uid
                    return uid
                self._visited.discard(uid)
            self._hand = self._younger[uid]
        return None


WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
USES_REMEMBERED = 10
MOST_USES = 15


# Where a session stands:
#
#     window      new ones, a hundredth of the bytes; the least lately used of it is the comer
#     probation   comers that were used more than the one that left for them; its first is the victim
#     protected   those of probation that were used again; over 80 % of the rest, its first goes back
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
            # Those used once are forgotten by it, which bounds the names.
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
        # By place: the session, the turn of its last use, its size. A sample reads lists, not dictionaries.
        self._uids: list[bytes] = []
        self._used: list[int] = []
        self._sizes: list[int] = []
        self._turn_count = 0
        self._hits, self._evictions = [0.0] * AGE_BINS, [0.0] * AGE_BINS
        # Until something is learned, the younger is the better.
        self._densities = [1.0 / (number + 1) for number in range(AGE_BINS)]
        self._pick = 1

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._turn_count += 1
        place = self._places.get(uid)
        if place is None:
            self._places[uid] = len(self._uids)
            self._uids.append(uid)
            self._used.append(self._turn_count)
            self._sizes.append(max(facts.size_bytes, 1))
        else:
            self._hits[self._age(place)] += 1
            self._used[place], self._sizes[place] = self._turn_count, max(facts.size_bytes, 1)
        if self._turn_count % RELEARNED_EVERY == 0:
            self._relearn()

    def _age(self, place: int) -> int:
        return BINS_OF_AGES[min(self._turn_count - self._used[place], OLDEST)]

    def _relearn(self) -> None:
        self._densities = hit_densities(self._hits, self._evictions)
        for counts in (self._hits, self._evictions):
            counts[:] = [each / 2 for each in counts]

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        place = self._places.get(uid)
        if place is not None:
            self._evictions[self._age(place)] += 1
        self.ended(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        place = self._places.pop(uid, None)
        if place is None:
            return
        # The last one takes the free place: lists without gaps can be drawn from by number.
        last, used, size_bytes = self._uids.pop(), self._used.pop(), self._sizes.pop()
        if last != uid:
            self._uids[place], self._used[place], self._sizes[place] = last, used, size_bytes
            self._places[last] = place

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        used, sizes, densities = self._used, self._sizes, self._densities
        now, pick, count = self._turn_count, self._pick, len(used)
        sample: list[tuple[float, int, int]] = []
        for _ in range(min(SAMPLED, count)):
            # A generator of its own, always begun alike: a replay that is repeated draws the same samples.
            pick = (pick * 1103515245 + 12345) & 0x7FFFFFFF
            place = (pick >> 8) % count
            used_at = used[place]
            age = now - used_at
            number = BINS_OF_AGES[age] if age < OLDEST else AGE_BINS - 1
            sample.append((densities[number] / sizes[place], used_at, place))
        self._pick = pick
        while sample:
            least = min(sample)
            uid = self._uids[least[2]]
            if accepts(uid):
                return uid
            sample = [each for each in sample if each != least]
        # None of the sample may leave, so the longest unused one that may is taken.
        return self.all.first(accepts)


OLDEST = (1 << AGE_BINS // 4) - 1
"""Whatever is as old or older is in the last bin."""
# Bin `n` ends where `age + 1` reaches 2 ** ((n + 1) / 4); OLDEST itself is in the last one.
_ENDS = [*(math.ceil(2 ** (number / 4)) - 1 for number in range(AGE_BINS)), OLDEST + 1]
BINS_OF_AGES = b"".join(
    bytes((number,)) * (end - begin) for number, (begin, end) in enumerate(pairwise(_ENDS))
)


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


POLICIES: dict[str, Callable[[Capacities], Policy]] = {
    **RANKED,
    "s3-fifo": lambda capacities: S3Fifo(capacities.total_bytes),
    "arc": lambda capacities: AdaptiveReplacement(capacities.total_bytes),
    "lfu": lambda _: LeastFrequentlyUsed(),
    "gdsf": lambda _: GreedyDualSizeFrequency(),
    "lhd": lambda _: LeastHitDensity(),
    "lru-2": lambda _: LeastRecentlyUsedTwice(),
    "sieve": lambda _: Sieve(),
    "w-tinylfu": lambda capacities: WindowTinyLfu(capacities.total_bytes),
}
NAMES = (*POLICIES, BELADY)


def policy_of(name: str, capacities: Capacities, miss_cost: MissCost = MISS_COST) -> Policy:
    """A policy of POLICIES; the cost of a miss is for those that weigh it."""
    return RANKED[name](capacities, miss_cost) if name in RANKED else POLICIES[name](capacities)
