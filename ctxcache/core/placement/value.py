"""Ours: what keeping a session promises per byte, from learned return times and from hints as far as they hold.

value = returns per second kept x cost of a miss / bytes. Sessions of least value leave first, straight from
DRAM too, so that what will not return is never written to SSD. A queue decides as in LookAhead while its
order comes true. Worst case: a load whose classes say nothing; then idle time alone ranks, which is LRU by size.
"""

from collections import OrderedDict
from collections.abc import Callable

from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Accepts, Capacities, Facts
from ctxcache.core.placement.returns import WATCHED, ReturnTimes
from ctxcache.core.placement.trust import Trust

QUEUE_LEFT_BELOW, QUEUE_TAKEN_ABOVE = 0.4, 0.6
LEAST_WAIT_S = 1.0
TOLERANCE_S, TOLERANCE_SHARE = 10.0, 0.25
RANKED_AGAIN = 16
"""Sessions whose value is looked up anew before one of them is given up."""

MissCost = Callable[[int], float]


def a_turn(size_bytes: int) -> float:  # noqa: ARG001
    """Every miss costs the same: what the hit rate counts."""
    return 1.0


def its_bytes(size_bytes: int) -> float:
    """A miss costs by what has to be computed again: what GPU time counts."""
    return float(size_bytes)


class ReturnValue(LookAhead):
    """Value per byte. `miss_cost` is any measure of a miss of so many bytes."""

    def __init__(self, capacities: Capacities, miss_cost: MissCost = a_turn) -> None:
        super().__init__(capacities)
        self._miss_cost = miss_cost
        self._returns = ReturnTimes(self._rank)
        self._expected: OrderedDict[bytes, tuple[float, float | None]] = OrderedDict()
        """When the client said it, and the return that it said; kept past eviction, since a lie shows at the return."""
        self._ends, self._waits, self._order = Trust(), Trust(), Trust()
        self._believes_queue = True

    @property
    def follows_queue(self) -> bool:
        """See LookAhead."""
        return self._believes_queue

    def score(self, uid: bytes) -> float:
        """See LookAhead."""
        size_bytes = max(self._sizes[uid], 1)
        return self._index_per_s(uid) * self._miss_cost(size_bytes) / size_bytes

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)
        self._returns.began(uid)
        self._judge_promise(uid, now_s)
        # A queue names only what the store has: who is new, or was evicted, proves nothing about it.
        if self._queue and uid in self._held:
            self._judge_queue(uid)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)
        self._returns.idle(uid, facts)
        super().idle(uid, facts, now_s)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float) -> None:
        """See Policy."""
        self._returns.recalled(uid, facts, idle_s)
        super().idle(uid, facts, 0.0)

    def passed(self, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self._expected.pop(uid, None)
        self._returns.ended(uid)
        super().ended(uid)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See Policy."""
        if uid not in self._held:
            return
        self._expected.pop(uid, None)
        self._expected[uid] = (self._returns.now_s, return_s)
        if len(self._expected) > WATCHED:
            del self._expected[next(iter(self._expected))]
        if return_s is None:
            self._ends.made()
        self._rank(uid)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._least(super().evict, accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._least(super().demote, accepts)

    def _least(self, first: Callable[[Accepts], bytes | None], accepts: Accepts) -> bytes | None:
        """The first whose value is still what it was when it was ranked."""
        uid = first(accepts)
        for _ in range(RANKED_AGAIN):
            if uid is None:
                break
            before = self._all.key(uid)
            self._rank(uid)
            if self._all.key(uid) == before:
                break
            uid = first(accepts)
        return uid

    def _index_per_s(self, uid: bytes) -> float:
        learned = self._returns.index_per_s(uid)
        promise = self._expected.get(uid)
        if promise is None:
            return learned
        _, return_s = promise
        if return_s is None:
            return learned * (1 - self._ends.share)
        now_s, share = self._returns.now_s, self._waits.share
        if now_s > return_s + _tolerance_s(promise[0], return_s):
            return learned
        return share / max(return_s - now_s, LEAST_WAIT_S) + (1 - share) * learned

    def _judge_promise(self, uid: bytes, now_s: float) -> None:
        promise = self._expected.pop(uid, None)
        if promise is None:
            return
        said_s, return_s = promise
        if return_s is None:
            self._ends.broke()
            return
        self._waits.made()
        if abs(now_s - return_s) > _tolerance_s(said_s, return_s):
            self._waits.broke()

    def _judge_queue(self, uid: bytes) -> None:
        """Whoever starts must have been near the head; where that seldom holds, the queue is left aside."""
        self._order.made()
        if uid not in self._fetched:
            self._order.broke()
        limit = QUEUE_LEFT_BELOW if self._believes_queue else QUEUE_TAKEN_ABOVE
        if (self._order.share > limit) is not self._believes_queue:
            self._believes_queue = not self._believes_queue
            # Once in dozens of turns at most, by the distance of the two limits.
            for waiting in tuple(self._queue):
                self._rank(waiting)


def _tolerance_s(said_s: float, return_s: float) -> float:
    return max(TOLERANCE_S, TOLERANCE_SHARE * (return_s - said_s))
