"""A whole placement policy, the example of docs/placement.md for those who add one."""

from ctxcache.core.placement.order import Accepts, Key, Keyed
from ctxcache.core.placement.policy import Facts, Level, Ranked


class LargestFirst(Ranked):
    """The largest session leaves first; among equals the one whose turn ended first."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[bytes, Key] = {}
        self._all, self._dram = Keyed(), Keyed()
        self._turn_count = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """The session rests, and may have grown. This order needs no clock."""
        del now_s
        self._turn_count += 1
        self._keys[uid] = (-facts.size_bytes, self._turn_count)
        for line in (self._all, self._dram):
            if uid in line:
                line.put(uid, self._keys[uid])
        self._fallen(uid)

    def placed(self, uid: bytes, tier: Level) -> None:
        """The session lies in this tier from now on."""
        self._all.put(uid, self._keys[uid])
        if tier is Level.MEMORY:
            self._dram.put(uid, self._keys[uid])
        else:
            self._dram.discard(uid)

    def evicted(self, uid: bytes) -> None:
        """The session has left the store."""
        self._keys.pop(uid, None)
        self._all.discard(uid)
        self._dram.discard(uid)

    ended = evicted

    def evict(self, accepts: Accepts) -> bytes | None:
        """The session that leaves the store next."""
        return self._all.first(accepts)

    def demote(self, accepts: Accepts) -> bytes | None:
        """The session that leaves memory next."""
        return self._dram.first(accepts)

    def rank(self, uid: bytes) -> Key | None:
        """The place of a session in the line: smaller leaves sooner."""
        return self._keys.get(uid)
