"""Which session leaves first. A policy sees accesses and answers with an order; it moves nothing."""

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over sessions, by uid. Owned by the event loop."""

    def touch(self, uid: bytes) -> None:
        """The session was accessed, or appeared."""

    def forget(self, uid: bytes) -> None:
        """The session is gone."""

    def candidates(self) -> Iterator[bytes]:
        """Every session, the one to leave first first. The set must not change meanwhile."""


class LeastRecentlyUsed:
    """The session that was not accessed for longest leaves first."""

    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}

    def touch(self, uid: bytes) -> None:
        """See EvictionPolicy."""
        self._order.pop(uid, None)
        self._order[uid] = None

    def forget(self, uid: bytes) -> None:
        """See EvictionPolicy."""
        self._order.pop(uid, None)

    def candidates(self) -> Iterator[bytes]:
        """See EvictionPolicy."""
        return iter(self._order)
