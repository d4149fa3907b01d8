"""Busiest: which sessions are accessed most, of late. Every access counts, in constant amortised time.

Bounded: when too many are counted, the half with fewer accesses is forgotten, and those of the others count
half. So one that is rarely accessed may be missed, and one that was busy long ago fades. Owned by the event
loop.
"""

from heapq import nlargest

LIMIT = 1024


class Busiest:
    """Accesses by session."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._counts: dict[bytes, int] = {}

    def count(self, uid: bytes) -> None:
        """One more access."""
        self._counts[uid] = self._counts.get(uid, 0) + 1
        if len(self._counts) > self._limit:
            self._counts = {uid: (count + 1) // 2 for uid, count in self.first(self._limit // 2)}

    def forget(self, uid: bytes) -> None:
        """The session is gone."""
        self._counts.pop(uid, None)

    def first(self, limit: int) -> list[tuple[bytes, int]]:
        """The busiest and their accesses, most first."""
        return nlargest(limit, self._counts.items(), key=lambda item: item[1])
