"""The scheduler's waiting queue, as hints describe it, and windows over its head. Deltas in O(log n)."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ctxcache.core.placement.order import SLACK, Keyed


class Window:
    """The first `length` jobs of a queue. `changed` hears of every session that comes in or drops out."""

    def __init__(self, changed: Callable[[bytes], None]) -> None:
        self._changed = changed
        self._length = 1
        self._orders: dict[bytes, float] = {}
        self._inside: set[bytes] = set()
        self._tail: list[tuple[float, bytes]] = []
        self._outside = Keyed()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def order(self, uid: bytes) -> float:
        """When the job of one of the queue starts, relative to the others."""
        return self._orders[uid]

    @property
    def uids(self) -> frozenset[bytes]:
        """Whoever is in the window."""
        return frozenset(self._inside)

    def put(self, uid: bytes, order: float) -> None:
        """A job waits at `order`, wherever it waited before."""
        self.discard(uid)
        self._orders[uid] = order
        self._outside.put(uid, (order,))
        self._settle()

    def discard(self, uid: bytes) -> None:
        """The job waits no longer."""
        if self._orders.pop(uid, None) is None:
            return
        self._outside.discard(uid)
        if uid in self._inside:
            self._inside.discard(uid)
            self._changed(uid)
        self._settle()

    def resize(self, length: int) -> None:
        """Let the window be so long, at least one job."""
        length = max(length, 1)
        if length != self._length:
            self._length = length
            self._settle()

    def _settle(self) -> None:
        """Move the border until the window has the earliest jobs and is as long as it may be."""
        while (uid := self._outside.first()) is not None:
            if len(self._inside) >= self._length and self._orders[uid] >= self._last()[0]:
                break
            self._outside.discard(uid)
            self._inside.add(uid)
            heappush(self._tail, (-self._orders[uid], uid))
            self._changed(uid)
            self._shrink()
        self._shrink()
        if len(self._tail) > 2 * len(self._inside) + SLACK:
            self._tail = [(-self._orders[uid], uid) for uid in self._inside]
            heapify(self._tail)

    def _shrink(self) -> None:
        while len(self._inside) > self._length:
            order, uid = self._last()
            heappop(self._tail)
            self._inside.discard(uid)
            self._outside.put(uid, (order,))
            self._changed(uid)

    def _last(self) -> tuple[float, bytes]:
        while True:
            order, uid = -self._tail[0][0], self._tail[0][1]
            if uid in self._inside and self._orders[uid] == order:
                return order, uid
            heappop(self._tail)
