"""A whole placement policy, the example of docs/placement.md for those who add one."""

from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts, Ranked


class LargestFirst(Ranked):
    """The largest session leaves first; among equals the one whose turn ended first."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[bytes, Key] = {}
        self._turn_count = 0

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """The session rests, and may have grown. This order needs no clock."""
        del now_s
        self._turn_count += 1
        self._keys[uid] = (-facts.size_bytes, self._turn_count)
        self._fallen(uid)

    def evicted(self, uid: bytes) -> None:
        """The session has left the store."""
        self._keys.pop(uid, None)

    ended = evicted

    def rank(self, uid: bytes) -> Key | None:
        """The place of a session in the line: smaller leaves sooner."""
        return self._keys.get(uid)
