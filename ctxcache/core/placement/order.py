"""Orders over sessions: by a key that may change, and by when they came. Pure; nothing is scanned twice."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ctxcache.core.placement.policy import Accepts

SLACK = 64
"""Outdated entries of a heap that are not worth a pass."""
Key = tuple[float, ...]


class Keyed:
    """Sessions by key, the lowest first. Every operation takes amortised O(log n), `first` per refusal.

    Put in order when `first` is first asked: who never asks pays for a dictionary.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, Key] = {}
        self._heap: list[tuple[Key, bytes]] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._keys

    def key(self, uid: bytes) -> Key | None:
        """The session's key; None for one that is not in here."""
        return self._keys.get(uid)

    def put(self, uid: bytes, key: Key) -> None:
        """Add the session, or give it another key."""
        if self._keys.get(uid) == key:
            return
        self._keys[uid] = key
        if self._heap is not None:
            heappush(self._heap, (key, uid))
            self._tidy(self._heap)

    def discard(self, uid: bytes) -> None:
        """It is none of them any more."""
        if self._keys.pop(uid, None) is not None and self._heap is not None:
            self._tidy(self._heap)

    def first(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """The lowest that `accepts` takes; None when it takes none. It stays in here."""
        heap = self._in_order() if self._heap is None else self._heap
        passed, found = [], None
        while heap and found is None:
            key, uid = heappop(heap)
            if self._keys.get(uid) != key:
                continue
            passed.append((key, uid))
            found = uid if accepts(uid) else None
        for entry in passed:
            heappush(heap, entry)
        return found

    def _tidy(self, heap: list[tuple[Key, bytes]]) -> None:
        if len(heap) > 2 * len(self._keys) + SLACK:
            self._in_order()

    def _in_order(self) -> list[tuple[Key, bytes]]:
        self._heap = [(key, uid) for uid, key in self._keys.items()]
        heapify(self._heap)
        return self._heap


class Line:
    """Sessions in the order in which they were put, with their sizes. O(1), `first` per refusal."""

    def __init__(self) -> None:
        # A plain dict would look at every gap at its front for each `first`.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def put(self, uid: bytes, size_bytes: int = 0) -> None:
        """Put the session last, wherever it stood."""
        self.size_bytes += size_bytes - self._sizes.pop(uid, 0)
        self._sizes[uid] = size_bytes

    def renew(self, uid: bytes) -> None:
        """Put the session last if it is in here."""
        if uid in self._sizes:
            self._sizes.move_to_end(uid)

    def resize(self, uid: bytes, size_bytes: int) -> None:
        """Change its size and let it stand where it is."""
        self.size_bytes += size_bytes - self._sizes[uid]
        self._sizes[uid] = size_bytes

    def discard(self, uid: bytes) -> int | None:
        """Take it out; its size, None if it was not in here."""
        size_bytes = self._sizes.pop(uid, None)
        self.size_bytes -= size_bytes or 0
        return size_bytes

    def first(self, accepts: Accepts) -> bytes | None:
        """The earliest that `accepts` takes."""
        return next((uid for uid in self._sizes if accepts(uid)), None)
