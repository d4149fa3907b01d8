"""Windowed: policies that rank what is held, and fetch the head of a queue: as much of it as memory takes.

Prefetch window: Cmem/Skv jobs, Skv the average size of a session held. Amortised O(log n) an event.
Worst case: the queue's order is false; then `follows_order` is for the subclass to deny.
"""

from ctxcache.core.placement.order import Key, Keyed
from ctxcache.core.placement.policy import Accepts, Capacities, Tier
from ctxcache.core.placement.queue import Window
from ctxcache.core.placement.ranked import Ranked


class Windowed(Ranked):
    """Subclasses say where a session stands (`_key`), measure it before it is placed, and put jobs into `_fetched`."""

    def __init__(self, capacities: Capacities) -> None:
        super().__init__()
        self._capacities = capacities
        self._all, self._dram, self._fetchable = Keyed(), Keyed(), Keyed()
        self._held: dict[bytes, Tier] = {}
        self._held_bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._last_use: dict[bytes, int] = {}
        self._use_count = 0
        self._fetched = Window(self._rank_fetch)

    @property
    def follows_order(self) -> bool:
        """Whether sessions are fetched in the queue's order."""
        return True

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
        self._all.discard(uid)
        self._dram.discard(uid)
        self._fetchable.discard(uid)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._lowest(self._all, accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._lowest(self._dram, accepts)

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """See Policy."""
        return self._fetchable.first(accepts) if self.follows_order else None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """See Policy. Whoever is needed later gives way: memory may take fewer than the window has, and in its order."""
        if not self.follows_order or uid not in self._fetched:
            return False
        return fetched not in self._fetched or self._fetched.order(uid) <= self._fetched.order(fetched)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        if uid in self._held:
            self._lift(uid)
            return self._all.key(uid)
        return self._key(uid) if uid in self._sizes else None

    def _key(self, uid: bytes) -> Key:
        """Where a session that was measured stands: the lowest leaves first."""
        raise NotImplementedError

    def _measure(self, uid: bytes, size_bytes: int) -> None:
        """A turn of the session is over, and it has that size."""
        self._use_count += 1
        self._last_use[uid] = self._use_count
        if uid in self._held:
            self._held_bytes += size_bytes - self._sizes[uid]
        self._sizes[uid] = size_bytes

    @property
    def _average_bytes(self) -> int:
        return max(self._held_bytes // max(len(self._held), 1), 1)

    def _resize(self) -> None:
        self._fetched.resize(self._capacities.memory_bytes // self._average_bytes)

    def _rank(self, uid: bytes) -> None:
        tier = self._held.get(uid)
        if tier is None:
            return
        before, key = self._all.key(uid), self._key(uid)
        self._all.put(uid, key)
        if tier is Tier.MEMORY:
            self._dram.put(uid, key)
        else:
            self._dram.discard(uid)
        if before is None or key < before:
            self._fallen(uid)

    def _lowest(self, line: Keyed, accepts: Accepts) -> bytes | None:
        """Who leaves first. A rank may have risen since it was given: who comes up is looked at again."""
        uid = line.first(accepts)
        while uid is not None and self._lift(uid):
            uid = line.first(accepts)
        return uid

    def _lift(self, uid: bytes) -> bool:
        """Whether a session that is held has risen; its new rank is known from then on."""
        before, key = self._all.key(uid), self._key(uid)
        if before is None or key <= before:
            return False
        self._all.put(uid, key)
        if uid in self._dram:
            self._dram.put(uid, key)
        return True

    def _rank_fetch(self, uid: bytes) -> None:
        if uid in self._fetched and self._held.get(uid) is Tier.BELOW:
            self._fetchable.put(uid, (self._fetched.order(uid),))
        else:
            self._fetchable.discard(uid)
