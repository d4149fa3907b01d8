"""Rankings: which of some sessions leaves first, by ranks that change while nobody looks."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from ctxcache.core.placement.order import Key

RankOf = Callable[[bytes], Key | None]
"""Where a session stands: a lower one leaves first. None for one not known."""
SLACK = 64
"""Outdated entries of a ranking that are not worth a pass."""


class Ranking:
    """Some sessions, by rank. Owned by the event loop.

    Lazy: a rank that rises changes nothing here; where a session stands by now is looked up when it comes
    up. One that falls must be told. So every operation takes logarithmic time, and `first` as often as
    ranks rose since.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._entered: dict[bytes, Key] = {}
        self._heap: list[tuple[Key, bytes]] = []

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._entered

    def add(self, uid: bytes) -> None:
        """It is one of them from now on; one that has no rank is not."""
        if uid not in self._entered and (rank := self._rank(uid)) is not None:
            self._enter(rank, uid)

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """Its rank, which is this now, may be lower than it was."""
        entered = self._entered.get(uid)
        if entered is not None and rank is not None and rank < entered:
            self._enter(rank, uid)

    def discard(self, uid: bytes) -> None:
        """It is none of them any more."""
        self._entered.pop(uid, None)
        self._tidy()

    def first(
        self,
        accepts: Callable[[bytes], bool] = lambda _: True,
        among: Sequence[str] | None = None,  # noqa: ARG002  there is one account
    ) -> bytes | None:
        """The one of those that `accepts` takes that leaves first; None when it takes none."""
        refused: list[tuple[Key, bytes]] = []
        found = None
        while found is None and (item := self._pop()) is not None:
            refused.append(item)
            found = item[1] if accepts(item[1]) else None
        for item in refused:
            heappush(self._heap, item)
        return found

    def overtaken(self) -> list[bytes]:
        """Those that would leave too late, as nobody told that they fell: none. Looks at all, for checks."""
        return [uid for uid in self._entered if (self._rank(uid) or self._entered[uid]) < self._entered[uid]]

    def _pop(self) -> tuple[Key, bytes] | None:
        """The first entry that says how it is, taken out of the heap."""
        while self._heap:
            rank, uid = heappop(self._heap)
            if self._entered.get(uid) != rank:
                continue
            # Before the look: what it finds fallen must not be entered twice.
            del self._entered[uid]
            actual = self._rank(uid)
            if actual == rank:
                self._entered[uid] = rank
                return rank, uid
            if actual is not None:
                self._enter(actual, uid)
        return None

    def _enter(self, rank: Key, uid: bytes) -> None:
        self._entered[uid] = rank
        heappush(self._heap, (rank, uid))
        self._tidy()

    def _tidy(self) -> None:
        """Drop outdated entries once they are the larger part."""
        if len(self._heap) > 2 * len(self._entered) + SLACK:
            self._heap = [(rank, uid) for uid, rank in self._entered.items()]
            heapify(self._heap)
