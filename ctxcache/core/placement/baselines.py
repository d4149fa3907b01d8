"""LRU, FIFO and T-LRU, and every policy that a server can place by, under the name that settings know.

Belady has no name here: it knows the future.
"""

from collections.abc import Callable

from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.order import Accepts, Key, Keyed, Line, takes_or_passes
from ctxcache.core.placement.policy import Capacities, Facts, Level, Policy, Ranked
from ctxcache.core.placement.value import MISS_COST, MissCost, ReturnValue


# The lines and who stands in them. A line's first leaves first; `idle` puts a session at the end:
#
#     all         every session that is kept                 evict looks here
#     dram        those of them that are in memory           demote looks here
#
# A session in a turn may not leave. When it comes first it is taken out of the line, so that it is looked at
# once and not at each need, and `idle` puts it back; `_set_aside` knows who belongs in memory's line as well.
class Recency(Policy):
    """Two lines, the store's and memory's, in the order in which turns ended.

    Other policies build on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all = Line()
        self.dram = Line()
        self._in_turn: set[bytes] = set()
        self._set_aside: set[bytes] = set()
        """Those in a turn that were refused, and would stand in memory's line."""

    def arrived(self, uid: bytes, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._in_turn.add(uid)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._in_turn.discard(uid)
        self.all.put(uid)
        if uid in self._set_aside:
            self._set_aside.discard(uid)
            self.dram.put(uid)
        else:
            self.dram.renew(uid)

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        self._set_aside.discard(uid)
        if tier is Level.BELOW:
            self.dram.discard(uid)
        elif uid not in self.dram:
            self.dram.put(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        self._in_turn.discard(uid)
        self._set_aside.discard(uid)
        self.all.discard(uid)
        self.dram.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        passed: list[bytes] = []
        found = self.all.first(takes_or_passes(accepts, self._in_turn, passed))
        for uid in passed:
            self.all.discard(uid)
        return found

    def give_up(self, count: int, accepts: Accepts) -> list[bytes]:
        """See Policy. Those that `accepts` refuses are looked at once."""
        # Each line and order of a subclass keeps those that were refused out of the way.
        orders = [each for each in vars(self).values() if isinstance(each, (Line, Keyed))]
        for order in orders:
            order.pass_over()
        try:
            return super().give_up(count, accepts)
        finally:
            for order in orders:
                order.look_again()

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy."""
        passed: list[bytes] = []
        found = self.dram.first(takes_or_passes(accepts, self._in_turn, passed))
        for uid in passed:
            self.dram.discard(uid)
        self._set_aside.update(passed)
        return found


class LeastRecentlyUsed(Recency, Ranked):
    """The session whose last turn ended first leaves first, either tier."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[bytes, float] = {}
        self._last = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
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

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy. Its place stays what it was."""

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        # Once, when it comes: a later turn changes nothing.
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
            # Its rank fell without its turn being the reason: whoever keeps an order by rank has to hear it.
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


GOAL_BYTES = 2 << 30
"""The bytes recomputed within a quarter of a second where prefill makes 8 GiB/s: T-LRU's knob."""

RANKED: dict[str, Callable[[Capacities], Ranked]] = {
    "lru": lambda _: LeastRecentlyUsed(),
    "fifo": lambda _: FirstInFirstOut(),
    "t-lru": lambda _: TailOptimised(GOAL_BYTES),
    "look-ahead": LookAhead,
    "value": ReturnValue,
}
"""The policies that a server can place by."""


def ranked_policy(name: str, capacities: Capacities, miss_cost: MissCost = MISS_COST) -> Ranked:
    """A policy of RANKED; the cost of a miss is for those that weigh it."""
    return ReturnValue(capacities, miss_cost) if name == "value" else RANKED[name](capacities)
