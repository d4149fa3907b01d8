"""When sessions expire: sliding or absolute, and which are due.

The queue is lazy: an access only moves the session's own `expire_time_ns`; the queue learns of it
when the old time comes up. So an access costs nothing, and a due session is found within the
resolution of whoever calls `due`.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_TTL_NS = 3600 * 10**9
SLACK = 64
"""Outdated entries of a queue that are not worth a pass."""


@dataclass(frozen=True, slots=True)
class Expiration:
    """When a session ends: `ttl_ns` after each access, or (ttl_ns None) at `expire_time_ns`."""

    ttl_ns: int | None
    expire_time_ns: int = 0

    def after_access(self, now_ns: int) -> int:
        """The instant of expiry, were the session accessed now."""
        return self.expire_time_ns if self.ttl_ns is None else now_ns + self.ttl_ns


class ExpiryQueue:
    """Sessions by the earliest time at which they may expire. Owned by the ledger."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._earliest: dict[bytes, int] = {}

    def schedule(self, uid: bytes, expire_time_ns: int) -> None:
        """Look at the session at that time, or earlier if it is scheduled earlier.

        Call it at every change.
        """
        known = self._earliest.get(uid)
        if known is not None and known <= expire_time_ns:
            return
        self._earliest[uid] = expire_time_ns
        heapq.heappush(self._heap, (expire_time_ns, uid))
        self._tidy()

    def forget(self, uid: bytes) -> None:
        """The session is gone."""
        self._earliest.pop(uid, None)
        self._tidy()

    def due(
        self, now_ns: int, expire_time_of: Callable[[bytes], int | None], *, limit: int | None = None
    ) -> list[bytes]:
        """Sessions whose time has come, at most `limit`; each is told once.

        `expire_time_of` gives the time that holds now, None if gone.
        """
        found: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_ns and len(found) != limit:
            time_ns, uid = heapq.heappop(self._heap)
            if self._earliest.get(uid) != time_ns:
                continue
            del self._earliest[uid]
            actual = expire_time_of(uid)
            if actual is not None and actual > now_ns:
                self.schedule(uid, actual)
            elif actual is not None:
                found.append(uid)
        return found

    def _tidy(self) -> None:
        """Drop outdated entries once they are the larger part."""
        if len(self._heap) > 2 * len(self._earliest) + SLACK:
            self._heap = [(time_ns, uid) for uid, time_ns in self._earliest.items()]
            heapq.heapify(self._heap)
