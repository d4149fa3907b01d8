"""When the queue's jobs start, as far as their order is true. Deltas in O(log n) and a short move of memory.

A scheduler may lie about the order and not about who waits, or the other way about. So the order has a trust
of its own: whether a job starts about when its place said, and before one picked from the queue. Who waits and
never comes is `returns`' to learn. Worst case: an order that turns false; it is believed for some dozen starts.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

from ctxcache.core.placement.trust import Trust

CHANCE = 0.2
"""How much better than by chance an order must be before it says anything."""
OVERTAKEN_BY = 8
"""So many jobs in a row that stood behind it start first: then a job is not where it says."""
TOLERANCE_S, TOLERANCE_SHARE = 30.0, 0.75
"""How far a start may be from its forecast: so long, and such a share of the wait."""
INTERVAL_MEMORY = 64


class Forecast:
    """The queue by order. Owned by a policy."""

    def __init__(self) -> None:
        self._orders: dict[bytes, float] = {}
        self._places: list[float] = []
        self._uids: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._said: dict[bytes, tuple[float, float]] = {}
        self._pick = 0
        self._trust = Trust()
        self._started: deque[float] = deque(maxlen=OVERTAKEN_BY)
        self._front = -math.inf
        self._started_s: float | None = None
        self._interval_s = 0.0

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._orders

    @property
    def order_share(self) -> float:
        """How far the order is to be believed, 0 to 1."""
        return max(2 * self._trust.share - 1 - CHANCE, 0.0) / (1 - CHANCE)

    def put(self, uid: bytes, order: float, now_s: float) -> None:
        """A job waits at `order`, wherever it waited before. One that keeps its place is the job that it was."""
        before = self._orders.get(uid)
        if before is not None and self._has_place(before, order):
            self._orders[uid] = order
            del self._places[bisect_left(self._places, before)]
            insort(self._places, order)
            return
        self.discard(uid)
        self._orders[uid] = order
        insort(self._places, order)
        self._numbers[uid] = len(self._uids)
        self._uids.append(uid)
        self._said[uid] = (now_s, self.wait_s(uid))

    def discard(self, uid: bytes) -> bool:
        """The job waits no longer. Whether it did."""
        order = self._orders.pop(uid, None)
        if order is None:
            return False
        del self._places[bisect_left(self._places, order)]
        del self._said[uid]
        number, last = self._numbers.pop(uid), self._uids.pop()
        if last != uid:
            self._uids[number] = last
            self._numbers[last] = number
        return True

    def started(self, uid: bytes, now_s: float) -> None:
        """A turn begins; called before the job is discarded."""
        order = self._orders.get(uid)
        if order is None:
            return
        if self._started_s is not None:
            self._interval_s += (now_s - self._started_s - self._interval_s) / INTERVAL_MEMORY
        self._started_s = now_s
        self._started.append(order)
        if len(self._started) == OVERTAKEN_BY:
            self._front = min(self._started)
        self._pick = (self._pick * 1103515245 + 12345) & 0x7FFFFFFF
        other = self._uids[(self._pick >> 8) % len(self._uids)]
        self._trust.made()
        said_s, wait_s = self._said[uid]
        is_off = abs(now_s - said_s - wait_s) > _tolerance_s(wait_s)
        if is_off or self._orders[other] < order:
            self._trust.broke()

    def is_late(self, uid: bytes, now_s: float) -> bool:
        """Whether the job ought to have started."""
        said_s, wait_s = self._said[uid]
        return self._orders[uid] < self._front or now_s - said_s - wait_s > _tolerance_s(wait_s)

    def wait_s(self, uid: bytes) -> float:
        """How long the job will wait if all before it come, at the late pace."""
        return self._interval_s * (bisect_left(self._places, self._orders[uid]) - self._overtaken_count())

    def _has_place(self, before: float, order: float) -> bool:
        """Whether nobody else waits between the two."""
        low, high = sorted((before, order))
        return bisect_right(self._places, high) - bisect_left(self._places, low) == 1

    def _overtaken_count(self) -> int:
        return bisect_left(self._places, self._front)


def _tolerance_s(wait_s: float) -> float:
    return TOLERANCE_S + TOLERANCE_SHARE * wait_s
