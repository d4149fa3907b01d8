"""Watchers: who asked about sessions, and is told what becomes of them. Nothing here waits.

Memory: an entry per watch, which ends with its session.
"""

from collections.abc import Sequence
from typing import Protocol


class Watcher(Protocol):
    """Who asked about a session. Called on the event loop; must not wait."""

    def promoted(self, uid: bytes) -> None:
        """All of it is in DRAM now."""

    def demoted(self, uid: bytes) -> None:
        """Some of it is only on SSD now."""

    def evicted(self, uid: bytes) -> None:
        """It was given up for others. The last that is heard of it."""

    def ended(self, uid: bytes) -> None:
        """It has expired or was deleted. The last that is heard of it."""


class Watchers:
    """The watchers of every session. Owned by the event loop."""

    def __init__(self) -> None:
        self._by_uid: dict[bytes, list[Watcher]] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def add(self, uid: bytes, watcher: Watcher) -> None:
        """One more."""
        self._by_uid.setdefault(uid, []).append(watcher)

    def discard(self, uid: bytes, watcher: Watcher) -> None:
        """Take back one `add`; one that is over is none."""
        watchers = self._by_uid.get(uid, [])
        number = next((i for i, other in enumerate(watchers) if other is watcher), None)
        if number is not None:
            del watchers[number]
            if not watchers:
                del self._by_uid[uid]

    def of(self, uid: bytes) -> Sequence[Watcher]:
        """A session's, as they are now."""
        return tuple(self._by_uid.get(uid, ()))

    def take(self, uid: bytes) -> Sequence[Watcher]:
        """A session's, for the last time: it is gone."""
        return self._by_uid.pop(uid, ())
