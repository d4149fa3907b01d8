"""Look-ahead, as CachedAttention has it: the queue's head is fetched, its window is exempt, its tail goes first.

Source: CachedAttention, ATC'24, section 3.3: prefetch window Cmem/Skv, eviction window (Cmem+Cdisk)/Skv,
Skv the average size of a session held. The paper leaves open who goes first outside the eviction window.
Here: who has no job, least recently used first, then the queue beyond the window from its tail. So the one
order holds on both sides of the window's border. Without a queue it is LRU. Amortised O(log n) an event.
"""

from ctxcache.core.placement.order import Key, Keyed
from ctxcache.core.placement.policy import Accepts, Capacities, Facts, Tier
from ctxcache.core.placement.queue import Window
from ctxcache.core.placement.ranked import Ranked


class LookAhead(Ranked):
    """The paper's policy. Subclasses rank who has no job by another `score`."""

    def __init__(self, capacities: Capacities) -> None:
        super().__init__()
        self._capacities = capacities
        self._all, self._dram, self._fetchable = Keyed(), Keyed(), Keyed()
        self._sizes: dict[bytes, int] = {}
        self._held_bytes = 0
        self._held: dict[bytes, Tier] = {}
        self._last_use: dict[bytes, int] = {}
        self._use_count = 0
        self._queue: dict[bytes, float] = {}
        self._fetched = Window(self._rank_fetch)

    def score(self, uid: bytes) -> float:
        """Where a session stands that has no job in the queue: the lowest leaves first."""
        return self._last_use[uid]

    @property
    def follows_queue(self) -> bool:
        """Whether the queue decides anything."""
        return True

    @property
    def window_length(self) -> int:
        """How many jobs of the queue's head are exempt from eviction while others can go."""
        return self._capacities.total_bytes // self._average_bytes

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._use_count += 1
        self._last_use[uid] = self._use_count
        if uid in self._held:
            self._held_bytes += facts.size_bytes - self._sizes[uid]
        self._sizes[uid] = facts.size_bytes
        if uid in self._held:
            self._resize()
            self._rank(uid)

    def placed(self, uid: bytes, tier: Tier) -> None:
        """See Policy."""
        if uid not in self._held:
            self._held_bytes += self._sizes[uid]
        self._held[uid] = tier
        self._resize()
        self._rank(uid)
        self._rank_fetch(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        if self._held.pop(uid, None) is not None:
            self._held_bytes -= self._sizes[uid]
        self._sizes.pop(uid, None)
        self._last_use.pop(uid, None)
        self._rank(uid)
        self._rank_fetch(uid)

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

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._all.first(accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._dram.first(accepts)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        if uid in self._held:
            self._rank(uid)
            return self._all.key(uid)
        return self._key(uid) if uid in self._sizes else None

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """See Policy."""
        return self._fetchable.first(accepts) if self.follows_queue else None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """See Policy. Whoever is needed later gives way: DRAM may take fewer than the window has, and in its order."""
        if not self.follows_queue or uid not in self._fetched:
            return False
        return fetched not in self._fetched or self._fetched.order(uid) <= self._fetched.order(fetched)

    def _resize(self) -> None:
        self._fetched.resize(self._capacities.dram_bytes // self._average_bytes)

    @property
    def _average_bytes(self) -> int:
        return max(self._held_bytes // max(len(self._held), 1), 1)

    def _rank(self, uid: bytes) -> None:
        tier = self._held.get(uid)
        if tier is None:
            self._all.discard(uid)
            self._dram.discard(uid)
            return
        before, key = self._all.key(uid), self._key(uid)
        self._all.put(uid, key)
        if tier is Tier.DRAM:
            self._dram.put(uid, key)
        else:
            self._dram.discard(uid)
        if before is None or key < before:
            self._fallen(uid)

    def _key(self, uid: bytes) -> Key:
        order = self._queue.get(uid) if self.follows_queue else None
        # Of equals the least recently used leaves first, not the one whose name comes first.
        return (0, self.score(uid), self._last_use[uid]) if order is None else (1, -order)

    def _rank_fetch(self, uid: bytes) -> None:
        if uid in self._fetched and self._held.get(uid) is Tier.SSD:
            self._fetchable.put(uid, (self._fetched.order(uid),))
        else:
            self._fetchable.discard(uid)
