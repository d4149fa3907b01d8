"""Rankings: which of some sessions leaves first, by ranks that change between looks; one order for each account.

Callers name the accounts in the order in which they are to be asked, so that sessions of other accounts are not
looked at. Memory: an entry per session. Worst case: every account is looked at, where none is named.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from ctxcache.core.placement.order import Key

RankOf = Callable[[bytes], Key | None]
"""Where a session stands: a lower one leaves first. None for a session that is not known."""
AccountOf = Callable[[bytes], str]
"""Whose a session is. Never changes while the session is in a ranking."""
SLACK = 64
"""Outdated entries of a ranking that are not worth a pass."""


class Ranking:
    """Some sessions, by rank. Owned by the ledger.

    Lazy: a rank that rises changes nothing here; where a session stands by now is looked up when it comes
    up. A rank that falls must be told. So every operation takes logarithmic time, and `first` as often as
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
        """Add a session, unless it has no rank."""
        if uid not in self._entered and (rank := self._rank(uid)) is not None:
            self._enter(rank, uid)

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """The session's rank, which is this now, may be lower than it was."""
        entered = self._entered.get(uid)
        if entered is not None and rank is not None and rank < entered:
            self._enter(rank, uid)

    def discard(self, uid: bytes) -> None:
        """Take a session out."""
        self._entered.pop(uid, None)
        self._tidy()

    def first(
        self,
        accepts: Callable[[bytes], bool] = lambda _: True,
        among: Sequence[str] | None = None,  # noqa: ARG002  there is one account
    ) -> bytes | None:
        """The session that leaves first, of those that `accepts` takes; None when it takes none."""
        refused: list[tuple[Key, bytes]] = []
        found = None
        while found is None and (item := self._pop()) is not None:
            refused.append(item)
            found = item[1] if accepts(item[1]) else None
        for item in refused:
            heappush(self._heap, item)
        return found

    def overtaken(self) -> list[bytes]:
        """Sessions that would leave too late, because their fall was not told. Looks at all, for checks."""
        return [uid for uid in self._entered if (self._rank(uid) or self._entered[uid]) < self._entered[uid]]

    def _pop(self) -> tuple[Key, bytes] | None:
        """The first entry that is up to date, taken out of the heap."""
        while self._heap:
            rank, uid = heappop(self._heap)
            if self._entered.get(uid) != rank:
                continue
            # Before the look: a session that it finds fallen must not be entered twice.
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


class Rankings:
    """Some sessions, by account and rank. Owned by the ledger. See Ranking."""

    def __init__(self, rank: RankOf, account: AccountOf) -> None:
        self._rank = rank
        self._account = account
        self._by_account: dict[str, Ranking] = {}
        self._where: dict[bytes, Ranking] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_account.values()))

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._where and uid in self._where[uid]

    def add(self, uid: bytes) -> None:
        """See Ranking."""
        if uid in self or self._rank(uid) is None:
            return
        account = self._account(uid)
        if account not in self._by_account:
            self._by_account[account] = Ranking(self._rank)
        self._where[uid] = self._by_account[account]
        self._where[uid].add(uid)

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """See Ranking."""
        if uid in self._where:
            self._where[uid].fell(uid, rank)

    def discard(self, uid: bytes) -> None:
        """See Ranking."""
        ranking = self._where.pop(uid, None)
        if ranking is not None:
            ranking.discard(uid)

    def first(
        self, accepts: Callable[[bytes], bool] = lambda _: True, among: Sequence[str] | None = None
    ) -> bytes | None:
        """The session that leaves first, of the first account in `among` that has one; None: of all accounts."""
        if among is None:
            found = (ranking.first(accepts) for ranking in self._by_account.values())
            return min((uid for uid in found if uid is not None), key=self._known_rank, default=None)
        for account in among:
            ranking = self._by_account.get(account)
            uid = ranking.first(accepts) if ranking else None
            if uid is not None:
                return uid
        return None

    def overtaken(self) -> list[bytes]:
        """See Ranking."""
        return [uid for ranking in self._by_account.values() for uid in ranking.overtaken()]

    def _known_rank(self, uid: bytes) -> tuple[float, ...]:
        return self._rank(uid) or ()


AnyRanking = Ranking | Rankings


def ranking(rank: RankOf, account: AccountOf | None) -> AnyRanking:
    """One order for all sessions where accounts are not told apart."""
    return Ranking(rank) if account is None else Rankings(rank, account)
