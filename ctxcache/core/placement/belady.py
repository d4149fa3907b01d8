"""Belady: the session needed last leaves first. Knows the future, so only the simulator can have it. O(log n)."""

from collections.abc import Callable

from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Capacities


class Belady(LookAhead):
    """The bound of policies that look at time alone; one that also looks at sizes may hit more often.

    `next_use_s` says when a session is needed next, infinity for never, as of its last turn.
    """

    def __init__(self, capacities: Capacities, next_use_s: Callable[[bytes], float]) -> None:
        super().__init__(capacities)
        self._next_use_s = next_use_s

    def score(self, uid: bytes) -> float:
        """See LookAhead."""
        return -self._next_use_s(uid)
