"""When the queue's jobs start: by the order that is said, or by that in which they came, as far as either is true.

A scheduler may lie about the order and not about who waits, or the other way about. So an order has a trust of
its own: whether a job starts before one picked from the queue. Where the one that is said is false, jobs may
still start as they came, and the better of both is believed. Who waits and never comes is `returns`' to learn.
O(log n) and a short move of memory a delta. Worst case: an order that turns false; it is believed for some dozen starts.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from ctxcache.core.placement.trust import Trust

CHANCE = 0.2
"""How much better than by chance an order must be before it says anything."""
OVERTAKEN_BY = 8
"""So many jobs in a row that stood behind it start first: then a job is not where the order has it."""
INTERVAL_MEMORY = 64


class _Order:
    """One order of the jobs that wait, and how far it comes true."""

    def __init__(self) -> None:
        self._orders: dict[bytes, float] = {}
        self._places: list[float] = []
        self._trust = Trust()
        self._started: deque[float] = deque(maxlen=OVERTAKEN_BY)
        self._front = -math.inf

    @property
    def share(self) -> float:
        """How far the order is to be believed, 0 to 1."""
        return max(2 * self._trust.share - 1 - CHANCE, 0.0) / (1 - CHANCE)

    def put(self, uid: bytes, order: float) -> None:
        """A job that did not wait does so now."""
        self._orders[uid] = order
        insort(self._places, order)

    def discard(self, uid: bytes) -> None:
        """One that waited does so no longer."""
        del self._places[bisect_left(self._places, self._orders.pop(uid))]

    def started(self, uid: bytes, other: bytes) -> None:
        """A turn begins, while `other`, or none but itself, waits."""
        order = self._orders[uid]
        self._started.append(order)
        if len(self._started) == OVERTAKEN_BY:
            self._front = min(self._started)
        self._trust.made()
        if self._orders[other] < order:
            self._trust.broke()

    def is_late(self, uid: bytes) -> bool:
        """Whether the job ought to have started."""
        return self._orders[uid] < self._front

    def before_count(self, uid: bytes) -> int:
        """How many jobs start before this one; of those that are late nobody knows."""
        return bisect_left(self._places, self._orders[uid]) - bisect_left(self._places, self._front)


class Forecast:
    """The queue by order. Owned by a policy."""

    def __init__(self) -> None:
        self._said, self._line = _Order(), _Order()
        self._come_count = 0
        self._uids: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._pick = 0
        self._started_s: float | None = None
        self._interval_s = 0.0

    def __len__(self) -> int:
        return len(self._uids)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._numbers

    @property
    def said_share(self) -> float:
        """How far the order that is said is to be believed, 0 to 1."""
        return self._said.share

    @property
    def share(self) -> float:
        """How far `wait_s` is to be believed, 0 to 1."""
        return max(self._said.share, self._line.share)

    def put(self, uid: bytes, order: float) -> None:
        """A job waits at `order`, wherever it waited before; it has come when it first did."""
        if uid in self._numbers:
            self._said.discard(uid)
        else:
            self._come_count += 1
            self._line.put(uid, self._come_count)
            self._numbers[uid] = len(self._uids)
            self._uids.append(uid)
        self._said.put(uid, order)

    def discard(self, uid: bytes) -> bool:
        """The job waits no longer. Whether it did."""
        number = self._numbers.pop(uid, None)
        if number is None:
            return False
        self._said.discard(uid)
        self._line.discard(uid)
        last = self._uids.pop()
        if last != uid:
            self._uids[number] = last
            self._numbers[last] = number
        return True

    def started(self, uid: bytes, now_s: float) -> None:
        """The turn of a job that waits begins; called before the job is discarded."""
        if self._started_s is not None:
            self._interval_s += (now_s - self._started_s - self._interval_s) / INTERVAL_MEMORY
        self._started_s = now_s
        self._pick = (self._pick * 1103515245 + 12345) & 0x7FFFFFFF
        other = self._uids[(self._pick >> 8) % len(self._uids)]
        self._said.started(uid, other)
        self._line.started(uid, other)

    def is_late(self, uid: bytes) -> bool:
        """Whether the job ought to have started."""
        return self._believed.is_late(uid)

    def wait_s(self, uid: bytes) -> float:
        """How long the job will wait if all before it come, at the late pace."""
        return self._interval_s * self._believed.before_count(uid)

    @property
    def _believed(self) -> _Order:
        return self._said if self._said.share >= self._line.share else self._line
