"""Resident: which segments may leave memory next, found without a look at segments that may not.

Of every session with something of its own that may leave, the position below which that lies is known;
the newest tokens leave first. What forks share leaves when the fork accessed last would, in the reverse order of
its releases. A segment that was said to have become clean, and is not, is passed over once.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from ctxcache.core.ledger.kin import Kin
from ctxcache.core.ledger.rankings import AccountOf, RankOf, ranking
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Key


class Resident:
    """Sessions, and kin, that may have segments that may leave memory. Owned by the ledger."""

    def __init__(
        self, rank: RankOf, by_uid: Mapping[bytes, Session], account: AccountOf | None = None
    ) -> None:
        self._by_uid = by_uid
        self._rank = rank
        self._ranking = ranking(self._rank_of, account and (lambda uid: account(self._member(uid))))
        self._ends: dict[bytes, int] = {}
        self._kin: dict[bytes, Kin] = {}
        self._shared: dict[bytes, dict[Segment, None]] = {}
        """What may leave of what is shared, by the kin's uid."""

    def knows(self, segment: Segment) -> bool:
        """Whether `take` would come to the segment."""
        home = segment.home
        if isinstance(home, Kin):
            return segment in self._shared.get(home.uid, {})
        return home is not None and segment.begin < self._ends.get(home.uid, 0)

    def add(self, segment: Segment) -> None:
        """The segment may leave."""
        home = segment.home
        if isinstance(home, Kin):
            self._kin[home.uid] = home
            self._shared.setdefault(home.uid, {})[segment] = None
            self._ranking.add(home.uid)
        elif home is not None:
            self._ends[home.uid] = max(self._ends.get(home.uid, 0), segment.end)
            self._ranking.add(home.uid)

    def fell(self, session: Session, rank: Key | None) -> None:
        """Its rank, which is this now, may be lower than it was, and so may that of its kin."""
        self._ranking.fell(session.uid, rank)
        kin = session.residence.kin
        if kin and kin.last_uid == session.uid:
            self._ranking.fell(kin.uid, rank)

    def overtaken(self) -> list[bytes]:
        """See Ranking."""
        return self._ranking.overtaken()

    def discard(self, segment: Segment, session: Session) -> None:
        """The session was the last to list the segment."""
        kin = session.residence.kin
        if kin:
            self._shared.get(kin.uid, {}).pop(segment, None)

    def forget_session(self, session: Session) -> None:
        """The session is gone."""
        self._forget(session.uid)
        kin = session.residence.kin
        if kin:
            kin.uids.pop(session.uid, None)
            if kin.uids:
                self._ranking.fell(kin.uid, self._rank(kin.last_uid))
            else:
                self._forget(kin.uid)

    def take(
        self,
        may_leave: Callable[[Segment], bool],
        may_give: Callable[[bytes], bool] = lambda _: True,
        among: Sequence[str] | None = None,
    ) -> Segment | None:
        """The segment that leaves first: of the coldest session the newest. None when none may.

        Of the accounts in `among` one after the other. `may_give` is asked for the session of an account
        that comes first, and decides: whoever stands behind it is worth no less. It is not found again
        before it is added again.
        """
        for asked in [None] if among is None else [[account] for account in among]:
            segment = self._take(may_leave, may_give, asked)
            if segment is not None:
                return segment
        return None

    def _take(
        self,
        may_leave: Callable[[Segment], bool],
        may_give: Callable[[bytes], bool],
        among: Sequence[str] | None,
    ) -> Segment | None:
        while (uid := self._ranking.first(among=among)) is not None:
            if not may_give(self._member(uid)):
                return None
            found = self._take_shared if uid in self._shared else self._take_own
            segment = found(uid, may_leave)
            if segment is not None:
                return segment
            self._forget(uid)
        return None

    def _take_shared(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        shared = self._shared[uid]
        while shared:
            segment, _ = shared.popitem()
            if may_leave(segment):
                return segment
        return None

    def _take_own(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        session = self._by_uid[uid]
        segments = session.segments
        i = bisect_left(segments, self._ends[uid], key=lambda segment: segment.begin)
        while i and not (segments[i - 1].home is session.residence and may_leave(segments[i - 1])):
            i -= 1
        if not i:
            return None
        self._ends[uid] = segments[i - 1].begin
        return segments[i - 1]

    def _rank_of(self, uid: bytes) -> Key | None:
        return self._rank(self._member(uid))

    def _member(self, uid: bytes) -> bytes:
        """Of kin the one accessed last, for whom all of it ranks."""
        kin = self._kin.get(uid)
        return kin.root().last_uid if kin else uid

    def _forget(self, uid: bytes) -> None:
        """Nothing of the session or the kin may leave."""
        for by_uid in (self._ends, self._kin, self._shared):
            by_uid.pop(uid, None)
        self._ranking.discard(uid)
