"""Rankings of accounts: sessions in the order in which they leave, one order per account.

Whoever asks names the accounts in the order in which they are to be asked, so that sessions of others are not
looked at. Costs what one ranking does, and an entry per session. Worst case: every account is looked at, where
none is named.
"""

from collections.abc import Callable, Sequence

from ctxcache.core.eviction import Ranking, RankOf
from ctxcache.core.placement.order import Key

AccountOf = Callable[[bytes], str]
"""Whose a session is. Never changes while the session is in a ranking."""


class Rankings:
    """Some sessions, by account and rank. Owned by the event loop. See Ranking."""

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
        """The one that leaves first, of the first account in `among` that has one; None: of them all."""
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
    """One order for all where nobody tells accounts apart."""
    return Ranking(rank) if account is None else Rankings(rank, account)
