"""Look-ahead, as CachedAttention has it: the queue's head is fetched, its window is exempt, its tail goes first.

Source: CachedAttention, ATC'24, section 3.3: prefetch window Cmem/Skv, eviction window (Cmem+Cdisk)/Skv,
Skv the average size of a session held. The paper leaves open who goes first outside the eviction window.
Here: who has no job, least recently used first, then the queue beyond the window from its tail. So the one
order holds on both sides of the window's border. Without a queue it is LRU. Amortised O(log n) an event.
"""

from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Facts
from ctxcache.core.placement.windowed import Windowed


class LookAhead(Windowed):
    """The paper's policy. Subclasses rank who has no job by another `score`."""

    def __init__(self, capacities: Capacities) -> None:
        super().__init__(capacities)
        self._queue: dict[bytes, float] = {}

    def score(self, uid: bytes) -> float:
        """Where a session stands that has no job in the queue: the lowest leaves first."""
        return self._last_use[uid]

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._measure(uid, facts.size_bytes)
        self._resize()
        self._rank(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self.evicted(uid)
        self.withdrawn(uid)

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy."""
        self._queue[uid] = order
        self._fetched.put(uid, order)
        self._rank(uid)

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        if self._queue.pop(uid, None) is not None:
            self._fetched.discard(uid)
            self._rank(uid)

    def _key(self, uid: bytes) -> Key:
        order = self._queue.get(uid)
        # Of equals the least recently used leaves first, not the one whose name comes first.
        return (0, self.score(uid), self._last_use[uid]) if order is None else (1, -order)
