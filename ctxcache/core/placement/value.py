"""Ours: what keeping a session promises per byte, from learned return times and from hints as far as they hold.

value = returns per second kept x cost of a miss / bytes. Sessions of least value leave first, straight from
memory too, so that what will not return is never written below. What hints say replaces what is learned as far as
hints of their kind came true. Worst case: a load whose classes say nothing; then idle time alone ranks.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ctxcache.core.placement.cost import MissCost
from ctxcache.core.placement.forecast import Forecast
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Facts
from ctxcache.core.placement.returns import WATCHED, ReturnTimes
from ctxcache.core.placement.trust import Trust
from ctxcache.core.placement.windowed import Windowed

PREFETCHED_BELOW, PREFETCHED_ABOVE = 0.2, 0.4
"""Where trust in the queue's order falls so low that nothing is fetched by it, and where it is again."""
LEAST_WAIT_S = 1.0
TOLERANCE_S, TOLERANCE_SHARE = 10.0, 0.25
SURE = 3.0
"""Who is known to return counts so much more than who may: what left for a gamble does not come back."""

MissSeconds = Callable[[int], float]
MISS_S: MissSeconds = MissCost().seconds


class ReturnValue(Windowed):
    """Value per byte. `miss_s` is what a miss of so many bytes costs, in any unit. Amortised O(log n) an event."""

    def __init__(self, capacities: Capacities, miss_s: MissSeconds = MISS_S) -> None:
        super().__init__(capacities)
        self._miss_s = miss_s
        self._worth: dict[bytes, float] = {}
        """Cost of a miss per byte."""
        self._returns = ReturnTimes(self._rank)
        self._queue = Forecast()
        self._follows_order = True
        self._expected: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """When the client said it, and the return that it said; kept past eviction, since a lie shows at the return."""
        self._waits = Trust()

    @property
    def follows_order(self) -> bool:
        """See Windowed. The order is false at times."""
        return self._follows_order

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)
        self._returns.began(uid)
        if self._expected:
            self._judge_promise(uid, now_s)
        if uid in self._queue:
            self._queue.started(uid, now_s)
            share = self._queue.said_share
            self._follows_order = share > (PREFETCHED_BELOW if self._follows_order else PREFETCHED_ABOVE)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)
        self._returns.idle(uid, facts)
        self._weigh(uid, facts.size_bytes)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float) -> None:
        """See Policy."""
        self._returns.recalled(uid, idle_s)
        self._weigh(uid, facts.size_bytes)

    def lessons(self) -> dict[str, object]:
        """See Policy: return times. Whom to trust is learned anew within some dozen hints."""
        return self._returns.counts()

    def relearn(self, lessons: Mapping[str, Any], age_s: float) -> None:
        """See Policy."""
        self._returns.recount(lessons, age_s)

    def passed(self, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._worth.pop(uid, None)
        # Whether such a job comes is learned all the same: its session is watched on.
        self._queue.discard(uid)
        self._fetched.discard(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self._expected.pop(uid, None)
        self._returns.ended(uid)
        self.evicted(uid)

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy. Of sessions that are not there nobody hears in a store, so nobody does here."""
        if uid not in self._held:
            return
        self._queue.put(uid, order)
        self._returns.queued(uid)
        self._resize()
        self._fetched.put(uid, order)
        self._rank(uid)

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        if self._queue.discard(uid):
            self._fetched.discard(uid)
            self._returns.unqueued(uid)
            self._rank(uid)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See Policy."""
        if uid not in self._held:
            return
        self._expected.pop(uid, None)
        self._returns.said(uid, is_over=return_s is None)
        if return_s is not None:
            self._expected[uid] = (self._returns.now_s, return_s)
        if len(self._expected) > WATCHED:
            self._expected.popitem(last=False)
        self._rank(uid)

    def _weigh(self, uid: bytes, size_bytes: int) -> None:
        size_bytes = size_bytes or 1
        if self._sizes.get(uid) != size_bytes:
            self._worth[uid] = self._miss_s(size_bytes) / size_bytes
        self._measure(uid, size_bytes)
        self._rank(uid)

    def _key(self, uid: bytes) -> Key:
        # Of equals the least recently used leaves first, not the one whose name comes first.
        return (self._index_per_s(uid) * self._worth[uid], self._last_use[uid])

    def _index_per_s(self, uid: bytes) -> float:
        learned = self._returns.index_per_s(uid)
        if uid in self._queue:
            return self._queued_index_per_s(uid, learned)
        promise = self._expected.get(uid) if self._expected else None
        if promise is None:
            return learned
        said_s, return_s = promise
        now_s, share = self._returns.now_s, self._waits.share
        if now_s > return_s + _tolerance_s(said_s, return_s):
            return learned
        return share * SURE / max(return_s - now_s, LEAST_WAIT_S) + (1 - share) * learned

    def _queued_index_per_s(self, uid: bytes, learned: float) -> float:
        share = self._queue.share
        if not share or self._queue.is_late(uid):
            return SURE * learned
        wait_s = self._queue.wait_s(uid) * self._returns.coming_share
        by_order = self._returns.chance(uid) / max(wait_s, LEAST_WAIT_S)
        return SURE * (share * by_order + (1 - share) * learned)

    def _judge_promise(self, uid: bytes, now_s: float) -> None:
        promise = self._expected.pop(uid, None)
        if promise is None:
            return
        said_s, return_s = promise
        self._waits.made()
        if abs(now_s - return_s) > _tolerance_s(said_s, return_s):
            self._waits.broke()


def _tolerance_s(said_s: float, return_s: float) -> float:
    return max(TOLERANCE_S, TOLERANCE_SHARE * (return_s - said_s))
