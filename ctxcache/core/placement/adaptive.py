"""S3-FIFO and ARC by bytes: what the peers have at their strongest. O(1) amortised an event.

Both order what leaves the store; memory is left in order of last use. What left is remembered by name
and size only, up to the store's capacity in bytes (and GHOSTS names).
"""

from ctxcache.core.placement.order import Line
from ctxcache.core.placement.policy import Accepts, Facts
from ctxcache.core.placement.recency import Recency

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
