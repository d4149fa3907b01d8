"""When sessions expire: sliding or absolute, and which are due.

The queue is lazy: an access only moves the session's own `expire_time_ns`; the queue learns of it
when the old time comes up. So an access costs nothing, and a due session is found within the
resolution of whoever calls `due`.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_TTL_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Expiration:
    """When a session ends: `ttl_ns` after each access, or (ttl_ns None) at `expire_time_ns`."""

    ttl_ns: int | None
    expire_time_ns: int = 0

    def after_access(self, now_ns: int) -> int:
        """The instant of expiry, were the session accessed now."""
        return self.expire_time_ns if self.ttl_ns is None else now_ns + self.ttl_ns


class ExpiryQueue:
    """Sessions by the earliest time at which they may expire. Owned by the event loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []

    def schedule(self, uid: bytes, expire_time_ns: int) -> None:
        """Look at the session again at that time. Call it when a session appears or expires earlier than before."""
        heapq.heappush(self._heap, (expire_time_ns, uid))

    def due(self, now_ns: int, expire_time_of: Callable[[bytes], int | None]) -> list[bytes]:
        """Sessions whose time has come. `expire_time_of` gives the time that holds now, None if gone."""
        found: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, uid = heapq.heappop(self._heap)
            actual = expire_time_of(uid)
            if actual is not None and actual > now_ns:
                self.schedule(uid, actual)
            elif actual is not None and uid not in found:
                found.append(uid)
        return found
