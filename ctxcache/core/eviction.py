"""Which session leaves first. A policy sees accesses and answers with an order; it moves nothing."""

from collections.abc import Collection, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over sessions, by uid. Owned by the event loop."""

    def touch(self, uid: bytes) -> None:
        """The session was accessed, or appeared."""

    def forget(self, uid: bytes) -> None:
        """The session is gone."""

    def candidates(self, among: Collection[bytes] | None = None) -> Iterator[bytes]:
        """Every session, or every known one of these, the one to leave first first.

        The set must not change meanwhile.
        """


class LeastRecentlyUsed:
    """The session that was not accessed for longest leaves first. A few are put in order without a look at all."""

    def __init__(self) -> None:
        self._order: dict[bytes, int] = {}
        self._last = 0

    def touch(self, uid: bytes) -> None:
        """See EvictionPolicy."""
        self._last += 1
        self._order.pop(uid, None)
        self._order[uid] = self._last

    def forget(self, uid: bytes) -> None:
        """See EvictionPolicy."""
        self._order.pop(uid, None)

    def candidates(self, among: Collection[bytes] | None = None) -> Iterator[bytes]:
        """See EvictionPolicy."""
        if among is None:
            return iter(self._order)
        return iter(sorted((uid for uid in among if uid in self._order), key=self._order.__getitem__))
