"""Evictable: which session leaves SSD next, found without a look at those that may not.

A session that may not leave is passed over once: for good where only a change of its own can alter
that, after which it is added again; else until it is added again or nobody else is left. Worst case:
one look at all that are held, when they are all there is.
"""

import enum
from collections.abc import Callable

from ctxcache.core.eviction import Ranking, RankOf


class Verdict(enum.Enum):
    """What is found of a session that comes up."""

    LEAVES = enum.auto()
    NOT_NOW = enum.auto()
    NOT_BEFORE_ITS_NEXT_CHANGE = enum.auto()


class Evictable:
    """Sessions that may have something on SSD that may leave. Owned by the event loop."""

    def __init__(self, rank: RankOf) -> None:
        self._ranking = Ranking(rank)
        self._aside: set[bytes] = set()

    def add(self, uid: bytes) -> None:
        """It may leave: something of it was written, unpinned or let go."""
        self._aside.discard(uid)
        self._ranking.add(uid)

    def fell(self, uid: bytes) -> None:
        """Its rank may be lower than it was."""
        self._ranking.fell(uid)

    def discard(self, uid: bytes) -> None:
        """It is gone."""
        self._aside.discard(uid)
        self._ranking.discard(uid)

    def first(self, judge: Callable[[bytes], Verdict]) -> bytes | None:
        """The one that leaves first; None when none does."""
        found = self._look(judge)
        if found is None:
            aside, self._aside = self._aside, set()
            for uid in aside:
                self._ranking.add(uid)
            found = self._look(judge)
        return found

    def _look(self, judge: Callable[[bytes], Verdict]) -> bytes | None:
        while (uid := self._ranking.first()) is not None:
            verdict = judge(uid)
            if verdict is Verdict.LEAVES:
                return uid
            self._ranking.discard(uid)
            if verdict is Verdict.NOT_NOW:
                self._aside.add(uid)
        return None
