"""LRU, FIFO and T-LRU: orders by when sessions were used, came, or are cheap to do without. O(1) an event."""

from ctxcache.core.placement.order import Key, Keyed, Line
from ctxcache.core.placement.policy import Accepts, Facts, Policy, Tier
from ctxcache.core.placement.ranked import Ranked


class Recency(Policy):
    """Two lines, the store's and memory's, in the order in which turns ended. What others rank by builds on it."""

    def __init__(self) -> None:
        super().__init__()
        self.all = Line()
        self.dram = Line()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self.all.put(uid)
        self.dram.renew(uid)

    def placed(self, uid: bytes, tier: Tier) -> None:
        """See Policy."""
        if tier is Tier.BELOW:
            self.dram.discard(uid)
        elif uid not in self.dram:
            self.dram.put(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        self.all.discard(uid)
        self.dram.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self.all.first(accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self.dram.first(accepts)


class LeastRecentlyUsed(Recency, Ranked):
    """The session whose last turn ended first leaves first, either tier."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[bytes, int] = {}
        self._last = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._number(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._numbers.pop(uid, None)

    ended = evicted

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        number = self._numbers.get(uid)
        return None if number is None else (number,)

    def _number(self, uid: bytes) -> None:
        self._last += 1
        self._numbers[uid] = self._last


class FirstInFirstOut(LeastRecentlyUsed):
    """The session that came into the store first leaves it first, and of those in memory memory."""

    def __init__(self) -> None:
        super().__init__()
        self._in_dram = Keyed()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        if uid not in self.all:
            self.all.put(uid)
            self._number(uid)

    def placed(self, uid: bytes, tier: Tier) -> None:
        """See Policy."""
        if tier is Tier.MEMORY:
            self._in_dram.put(uid, (self._numbers[uid],))
        else:
            self._in_dram.discard(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._in_dram.discard(uid)

    ended = evicted

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._in_dram.first(accepts)


class TailOptimised(LeastRecentlyUsed):
    """LRU among sessions that can be recomputed within the latency goal, then among the others.

    Source: Tail-Optimized Caching for LLM Inference (T-LRU), at whole sessions: a session whose history
    with the next input is at most `goal_bytes` meets the goal without the store.
    """

    def __init__(self, goal_bytes: int) -> None:
        super().__init__()
        self._goal_bytes = goal_bytes
        self._cheap = Line()
        self._cheap_dram = Line()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        # The next input is taken to be as long as this one was.
        if facts.size_bytes + facts.appended_bytes <= self._goal_bytes:
            is_fallen = uid not in self._cheap
            self._cheap.put(uid)
            if uid in self.dram:
                self._cheap_dram.put(uid)
            if is_fallen:
                self._fallen(uid)
        else:
            self._cheap.discard(uid)
            self._cheap_dram.discard(uid)

    def placed(self, uid: bytes, tier: Tier) -> None:
        """See Policy."""
        super().placed(uid, tier)
        if tier is Tier.BELOW:
            self._cheap_dram.discard(uid)
        elif uid in self._cheap and uid not in self._cheap_dram:
            self._cheap_dram.put(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._cheap.discard(uid)
        self._cheap_dram.discard(uid)

    ended = evicted

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        number = self._numbers.get(uid)
        return None if number is None else (uid not in self._cheap, number)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._cheap.first(accepts) or super().evict(accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        return self._cheap_dram.first(accepts) or super().demote(accepts)
