"""The engine's own caches in front of the store: those of the sessions that were used last.

Knows no tensors. Worst case: no room at all, and every request is a miss.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

_Cache = TypeVar("_Cache")


class Front(Generic[_Cache]):
    """At most `room_count` caches by session number; the least recently used one leaves."""

    def __init__(self, room_count: int) -> None:
        self._room_count = room_count
        self._kept: OrderedDict[int, _Cache] = OrderedDict()

    def get(self, session: int) -> _Cache | None:
        """Its cache, the most recently used one then; None is a miss."""
        if session in self._kept:
            self._kept.move_to_end(session)
        return self._kept.get(session)

    def put(self, session: int, cache: _Cache) -> None:
        """Keep it, as the most recently used."""
        self._kept[session] = cache
        self._kept.move_to_end(session)
        while len(self._kept) > self._room_count:
            self._kept.popitem(last=False)
