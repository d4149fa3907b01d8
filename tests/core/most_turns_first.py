"""A whole placement policy: the example of docs/placement.md. No store should run it."""

from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts


class MostTurnsFirst(LeastRecentlyUsed, ranks_holders=True):
    """The session that had the most turns leaves first; of equals, the one that was used least recently."""

    def __init__(self) -> None:
        super().__init__()
        self._turn_counts: dict[bytes, int] = {}

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """A turn is over. `recalled` calls this too."""
        super().idle(uid, facts, now_s)
        self._turn_counts[uid] = facts.turn_count
        # One turn more is a lower rank, and an order that keeps ranks has to hear of that.
        self._fallen(uid)

    def evicted(self, uid: bytes) -> None:
        """The session is forgotten. `ended` and `slept` call this too."""
        super().evicted(uid)
        self._turn_counts.pop(uid, None)

    def rank(self, uid: bytes) -> Key | None:
        """The lowest rank leaves first."""
        last_use = super().rank(uid)
        return last_use and (-self._turn_counts[uid], *last_use)
