"""Sessions in the order in which they leave: by the ranks of a policy, as a server keeps them."""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from ctxcache.core.placement.order import Accepts, Keyed
from ctxcache.core.placement.policy import Level, Policy, Ranked


@runtime_checkable
class Leaving(Protocol):
    """The order in which sessions leave. BELOW: the store, from either level. MEMORY: memory."""

    def put(self, uid: bytes, level: Level) -> None:
        """The session lies there from now on, and rests."""

    def discard(self, uid: bytes) -> None:
        """Name the session no more: a turn reads it, or it left."""

    def first(self, level: Level, accepts: Accepts) -> bytes | None:
        """The session that leaves first, of those that `accepts` takes; None where it takes none."""

    def give_up(self, count: int, spared: Collection[bytes]) -> list[bytes]:
        """The next `count` sessions that leave the store, none of the spared; fewer where no other is left.

        The policy hears that they were evicted. A spared session has to be put again.
        """


def leaving(policy: Policy) -> Leaving:
    """The order of a policy: its own, or one by its ranks."""
    if isinstance(policy, Leaving):
        return policy
    if isinstance(policy, Ranked):
        return ByRank(policy)
    raise TypeError(policy)


class ByRank:
    """The order by a policy's ranks, as the server keeps it. Amortised O(log n), `first` per refusal."""

    def __init__(self, policy: Ranked) -> None:
        self._policy = policy
        self._all, self._memory = Keyed(), Keyed()
        policy.watch(self._fell)

    def put(self, uid: bytes, level: Level) -> None:
        """See Leaving."""
        key = self._policy.rank(uid)
        if key is None:
            raise AssertionError("what is placed has rested, and has a rank")
        self._all.put(uid, key)
        if level is Level.MEMORY:
            self._memory.put(uid, key)
        else:
            self._memory.discard(uid)

    def discard(self, uid: bytes) -> None:
        """See Leaving."""
        self._all.discard(uid)
        self._memory.discard(uid)

    def first(self, level: Level, accepts: Accepts) -> bytes | None:
        """See Leaving."""
        line = self._memory if level is Level.MEMORY else self._all
        uid = line.first(accepts)
        # The session's rank rose since it was entered, so that another one may be the lowest.
        while uid is not None and self._moved(uid):
            uid = line.first(accepts)
        return uid

    def give_up(self, count: int, spared: Collection[bytes]) -> list[bytes]:
        """See Leaving."""
        for own in spared if count else ():
            self.discard(own)
        left: list[bytes] = []
        while len(left) < count and (uid := self.first(Level.BELOW, lambda _: True)) is not None:
            self.discard(uid)
            self._policy.evicted(uid)
            left.append(uid)
        return left

    def _fell(self, uid: bytes) -> None:
        if uid in self._all:
            self._moved(uid)

    def _moved(self, uid: bytes) -> bool:
        """Enter the session by its rank now. Whether that is another one than before."""
        key = self._policy.rank(uid)
        if key is None or key == self._all.keys[uid]:
            return False
        self._all.put(uid, key)
        if uid in self._memory:
            self._memory.put(uid, key)
        return True
