"""The policies of the literature: LRU, FIFO, T-LRU, S3-FIFO, ARC. Amortised O(1) an event."""

from ctxcache.core.placement.order import Accepts, Key, Keyed, Line
from ctxcache.core.placement.policy import Facts, Level, Policy, Ranked


class Recency(Policy):
    """Two lines, the store's and memory's, in the order in which turns ended.

    What others rank by builds on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all = Line()
        self.dram = Line()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self.all.put(uid)
        self.dram.renew(uid)

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        if tier is Level.BELOW:
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

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        if tier is Level.MEMORY:
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

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        super().placed(uid, tier)
        if tier is Level.BELOW:
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


# S3-FIFO and ARC by bytes. Both order what leaves the store; memory is left in order of last use. Of an
# evicted session they remember the name and the size, up to the store's capacity in bytes and to GHOSTS
# names.

GHOSTS = 1 << 17
SMALL_SHARE = 10
MOST_USES = 3


def _bound(ghosts: Line, limit_bytes: int) -> None:
    while len(ghosts) and (ghosts.size_bytes > limit_bytes or len(ghosts) > GHOSTS):
        ghosts.discard(next(iter(ghosts)))


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
                self._uses[uid] = min(self._uses[uid] + 1, MOST_USES)
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
        if self._small.size_bytes * SMALL_SHARE <= self._total_bytes:
            lines.reverse()
        return next((uid for line in lines if (uid := line.first(accepts)) is not None), None)


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
