"""Which session leaves first. A policy sees accesses and answers with an order; it moves nothing."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

SLACK = 64
"""Outdated entries of a ranking that are not worth a pass."""


class EvictionPolicy(Protocol):
    """An order over sessions, by uid. Owned by the event loop."""

    def touch(self, uid: bytes) -> None:
        """The session was accessed, or appeared."""

    def forget(self, uid: bytes) -> None:
        """The session is gone."""

    def rank(self, uid: bytes) -> int | None:
        """Where the session stands: a lower one leaves first. It only grows; None for one not known."""


class LeastRecentlyUsed:
    """The session that was not accessed for longest leaves first."""

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

    def rank(self, uid: bytes) -> int | None:
        """See EvictionPolicy."""
        return self._order.get(uid)


class Ranking:
    """Some of a policy's sessions, in its order. Owned by the event loop.

    Lazy: an access changes nothing here; where a session stands by now is looked up when it comes up.
    So every operation takes logarithmic time, and `first` as often as sessions were accessed since.
    """

    def __init__(self, rank: Callable[[bytes], int | None]) -> None:
        self._rank = rank
        self._entered: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._entered

    def add(self, uid: bytes) -> None:
        """It is one of them from now on; one that the policy does not know is not."""
        rank = self._rank(uid)
        if uid not in self._entered and rank is not None:
            self._enter(rank, uid)

    def discard(self, uid: bytes) -> None:
        """It is none of them any more."""
        self._entered.pop(uid, None)
        self._tidy()

    def first(self, accepts: Callable[[bytes], bool] = lambda _: True) -> bytes | None:
        """The one of those that `accepts` takes that leaves first; None when it takes none."""
        refused: list[tuple[int, bytes]] = []
        found = None
        while found is None and (item := self._pop()) is not None:
            refused.append(item)
            found = item[1] if accepts(item[1]) else None
        for item in refused:
            heappush(self._heap, item)
        return found

    def _pop(self) -> tuple[int, bytes] | None:
        """The first entry that says how it is, taken out of the heap."""
        while self._heap:
            rank, uid = heappop(self._heap)
            if self._entered.get(uid) != rank:
                continue
            actual = self._rank(uid)
            if actual == rank:
                return rank, uid
            del self._entered[uid]
            if actual is not None:
                self._enter(actual, uid)
        return None

    def _enter(self, rank: int, uid: bytes) -> None:
        self._entered[uid] = rank
        heappush(self._heap, (rank, uid))
        self._tidy()

    def _tidy(self) -> None:
        """Drop outdated entries once they are the larger part."""
        if len(self._heap) > 2 * len(self._entered) + SLACK:
            self._heap = [(rank, uid) for uid, rank in self._entered.items()]
            heapify(self._heap)
