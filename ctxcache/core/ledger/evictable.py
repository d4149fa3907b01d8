"""Evictable: which session leaves the store next, found without a look at sessions that may not.

A session that may not leave is passed over once: for good where only a change of its own can alter
that, after which it is added again; else until it is added again or no other is left. Worst case:
one look at all that are held, when they are all there is.
"""

import enum
from collections.abc import Callable, Generator, Sequence

from ctxcache.core.ledger.rankings import AccountOf, RankOf, ranking
from ctxcache.core.placement.order import Key


class Verdict(enum.Enum):
    """What is found of a session that comes up."""

    LEAVES = enum.auto()
    NOT_NOW = enum.auto()
    NOT_BEFORE_ITS_NEXT_CHANGE = enum.auto()


class Evictable:
    """Sessions that may have something below that may leave. Owned by the ledger."""

    def __init__(self, rank: RankOf, account: AccountOf | None = None) -> None:
        self._ranking = ranking(rank, account)
        self._aside: set[bytes] = set()

    def add(self, uid: bytes) -> None:
        """It may leave: something of it was written, unpinned or let go."""
        self._aside.discard(uid)
        self._ranking.add(uid)

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """Its rank, which is this now, may be lower than it was; who was passed over may leave by now."""
        if uid in self._aside:
            self.add(uid)
        else:
            self._ranking.fell(uid, rank)

    def overtaken(self) -> list[bytes]:
        """See Ranking."""
        return self._ranking.overtaken()

    def discard(self, uid: bytes) -> None:
        """It is gone."""
        self._aside.discard(uid)
        self._ranking.discard(uid)

    def first(self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None = None) -> bytes | None:
        """The one that leaves first, of these accounts one after the other; None when none does."""
        found = self._look(judge, among)
        if found is None:
            aside, self._aside = self._aside, set()
            for uid in aside:
                self._ranking.add(uid)
            found = self._look(judge, among)
        return found

    def in_order(
        self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None = None
    ) -> Generator[bytes]:
        """Those that leave, one after the other. To be closed: who was shown is back only then."""
        shown = []
        try:
            while (uid := self.first(judge, among)) is not None:
                shown.append(uid)
                self._ranking.discard(uid)
                yield uid
        finally:
            for uid in shown:
                self._ranking.add(uid)

    def _look(self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None) -> bytes | None:
        while (uid := self._ranking.first(among=among)) is not None:
            verdict = judge(uid)
            if verdict is Verdict.LEAVES:
                return uid
            self._ranking.discard(uid)
            if verdict is Verdict.NOT_NOW:
                self._aside.add(uid)
        return None
