"""What is known of sessions and models met before and never changes. Worst case: it is asked for again."""

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 4096
"""Entries: a few KiB each at most."""


class Met(Generic[K, V]):
    """Facts by key. Bounded: forgets all of them when it is full."""

    def __init__(self) -> None:
        self._known: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """What is known, if anything is."""
        return self._known.get(key)

    def put(self, key: K, value: V) -> V:
        """Remember, and return it."""
        if len(self._known) >= LIMIT:
            self._known.clear()
        self._known[key] = value
        return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """What is known, made when it is not."""
        found = self._known.get(key)
        return self.put(key, make()) if found is None else found

    def forget(self, key: K) -> None:
        """Ask again the next time."""
        self._known.pop(key, None)
