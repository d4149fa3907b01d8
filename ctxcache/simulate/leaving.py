"""Sessions in the order in which they leave: by the ranks of a policy, as a server keeps them."""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from ctxcache.core.placement.order import Accepts, Keyed
from ctxcache.core.placement.policy import Level, Policy, Ranked


@runtime_checkable
class Leaving(Protocol):
    """An order over what is kept: by who leaves the store, from either level (BELOW), or memory (MEMORY)."""

    def put(self, uid: bytes, level: Level) -> None:
        """It lies there from now on, and rests."""

    def discard(self, uid: bytes) -> None:
        """It is not to be named: a turn reads it, or it left."""

    def first(self, level: Level, accepts: Accepts) -> bytes | None:
        """The session that leaves first, of those that `accepts` takes; None where it takes none."""

    def give_up(self, count: int, spared: Collection[bytes]) -> list[bytes]:
        """So many that leave the store, one after another, none of the spared; fewer where no other is left.

        The policy takes these sessions for evicted. Put a spared session again.
        """


def leaving(policy: Policy) -> Leaving:
    """The order of a policy: its own, or one by its ranks."""
    if isinstance(policy, Leaving):
        return policy
    if isinstance(policy, Ranked):
        return ByRank(policy)
    raise TypeError(policy)


class ByRank:
    """Asks the policy for ranks one by one, and hears which fell. Amortised O(log n), `first` per refusal."""

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
        # Risen since it was entered: the next one may be lower.
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
        """Whether the session's rank is another one now; it stands there from here on."""
        key = self._policy.rank(uid)
        if key is None or key == self._all.keys[uid]:
            return False
        self._all.put(uid, key)
        if uid in self._memory:
            self._memory.put(uid, key)
        return True
