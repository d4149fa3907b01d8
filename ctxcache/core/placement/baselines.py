"""LRU, FIFO and T-LRU."""

from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts, Ranked


class LeastRecentlyUsed(Ranked, ranks_holders=False):
    """The session whose last turn ended first leaves first, either tier."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[bytes, float] = {}
        self._last = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._number(uid)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:  # noqa: ARG002
        """See Policy."""
        self.idle(uid, facts, 0.0)
        self._numbers[uid] = -idle_s

    def slept(self, uid: bytes) -> float:
        """See Policy."""
        number = self._numbers.get(uid, 0)
        super().slept(uid)
        return -number

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        self._numbers.pop(uid, None)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self.evicted(uid)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        number = self._numbers.get(uid)
        return None if number is None else (number,)

    def _number(self, uid: bytes) -> None:
        self._last += 1
        self._numbers[uid] = self._last


class FirstInFirstOut(LeastRecentlyUsed, ranks_holders=False):
    """The session that came into the store first leaves first: the store, and memory."""

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        # Once, when it comes: a later turn changes nothing.
        if uid not in self._numbers:
            self._number(uid)


class TailOptimised(LeastRecentlyUsed, ranks_holders=True):
    """LRU among sessions that can be recomputed within the latency goal, then among the others.

    Source: Tail-Optimized Caching for LLM Inference (T-LRU), at whole sessions: a session whose history
    with the next input is at most `goal_bytes` meets the goal without the store.
    """

    def __init__(self, goal_bytes: int) -> None:
        super().__init__()
        self._goal_bytes = goal_bytes
        self._inputs: dict[bytes, int] = {}
        """What each session's last turn added: its next input is taken to be as long."""
        self._cheap: set[bytes] = set()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._inputs[uid] = facts.appended_bytes
        self.resized(uid, facts)

    def resized(self, uid: bytes, facts: Facts) -> None:
        """See Policy."""
        if facts.size_bytes + self._inputs[uid] > self._goal_bytes:
            self._cheap.discard(uid)
        elif uid not in self._cheap:
            self._cheap.add(uid)
            # The rank fell, and an order that keeps ranks has to hear of that.
            self._fallen(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._inputs.pop(uid, None)
        self._cheap.discard(uid)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        number = self._numbers.get(uid)
        return None if number is None else (uid not in self._cheap, number)


GOAL_BYTES = 2 << 30
"""The bytes recomputed within a quarter of a second where prefill makes 8 GiB/s: T-LRU's knob."""
