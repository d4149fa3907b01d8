"""Rankings: which session leaves first, by ranks that change between looks; one order for each account.

    Ranking, Rankings   some sessions in order, of all accounts or by account
    Evictable           the sessions that may leave the store
    Resident            the segments that may leave memory: of the coldest session the newest first

No ranking looks at sessions or segments that may not leave. An entry that comes up and may not leave is
passed over once. Where only its own change can alter that, it is out until that change adds it again. Callers
name the accounts in the order in which they are to be asked. Memory: an entry per session. Worst case: one
look at all that are held.
"""

import enum
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from ctxcache.core.ledger.residence import Kin
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Key

RankOf = Callable[[bytes], Key | None]
"""The place of a session: a lower one leaves first. None for a session that is not known."""
AccountOf = Callable[[bytes], str]
"""The account of a session. Never changes while the session is in a ranking."""
SLACK = 64
"""Fewer outdated entries of a ranking are not worth a pass."""


# A lazy heap. `_entered` has the entry of each session that counts; the heap has outdated ones as well:
#
#     rank rises     nothing is done: the old, lower entry comes up early, is looked up, and goes further back
#     rank falls     `fell` pushes a second entry: the old one would come up too late
#     discard        `_entered` forgets the session; its entry is passed over when it comes up
#
# Why not a sorted structure: a policy's clock moves all ranks at once, and most of those sessions never come
# up for a look.
class Ranking:
    """Some sessions, by rank. Owned by the ledger.

    The ranking is lazy. A rank that rises changes nothing: the session's rank is looked up when its entry
    comes up. A rank that falls must be told. So every operation takes logarithmic time, and `first` as often
    as ranks rose since.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._entered: dict[bytes, Key] = {}
        self._heap: list[tuple[Key, bytes]] = []

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._entered

    @property
    def entry_count(self) -> int:
        """Entries that take room, outdated ones included."""
        return len(self._heap)

    def add(self, uid: bytes) -> None:
        """Add a session, unless it has no rank."""
        if uid not in self._entered and (rank := self._rank(uid)) is not None:
            self._entered[uid] = rank
            heappush(self._heap, (rank, uid))
            if len(self._heap) > 2 * len(self._entered) + SLACK:
                self._tidy()

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """The session's rank fell to `rank`, or stayed."""
        entered = self._entered.get(uid)
        if entered is not None and rank is not None and rank < entered:
            self._enter(rank, uid)

    def discard(self, uid: bytes) -> None:
        """Take a session out."""
        self._entered.pop(uid, None)
        if len(self._heap) > 2 * len(self._entered) + SLACK:
            self._tidy()

    def first(
        self,
        accepts: Callable[[bytes], bool] = lambda _: True,
        among: Sequence[str] | None = None,  # noqa: ARG002  there is one account
    ) -> bytes | None:
        """The session that leaves first, of those that `accepts` takes; None when it takes none."""
        # Refused entries go back: they may leave for the next caller, who accepts others.
        refused: list[tuple[Key, bytes]] = []
        accepted = None
        while accepted is None and (item := self._pop()) is not None:
            refused.append(item)
            accepted = item[1] if accepts(item[1]) else None
        for item in refused:
            heappush(self._heap, item)
        return accepted

    def overtaken(self) -> list[bytes]:
        """Sessions that would leave too late, because their fall was not told. For checks: walks them all."""
        return [uid for uid in self._entered if (self._rank(uid) or self._entered[uid]) < self._entered[uid]]

    def _pop(self) -> tuple[Key, bytes] | None:
        """The first entry that is up to date, taken out of the heap."""
        while self._heap:
            # An entry is current if it is the one that `_entered` has. All others were overtaken or
            # discarded.
            rank, uid = heappop(self._heap)
            if self._entered.get(uid) != rank:
                continue
            # The entry goes before the look: a session that the look finds fallen must not be entered twice.
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
        if len(self._heap) > 2 * len(self._entered) + SLACK:
            self._tidy()

    def _tidy(self) -> None:
        """Drop outdated entries, which have become the larger part."""
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

    # The rank is asked for before an account is made: an unknown session has neither.
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
        """The session that leaves first, of the first account in `among` that has one, or None.

        Without `among`, all accounts count.
        """
        # The heads of all accounts are compared: one look at each account, not at each session.
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


# A session that is read now may leave in a moment, while a pinned one needs an event of its own. A search
# that looked at pinned sessions would take as long as there are pinned sessions.
class Verdict(enum.Enum):
    """The verdict on a session that comes up."""

    LEAVES = enum.auto()
    NOT_NOW = enum.auto()
    NOT_BEFORE_ITS_NEXT_CHANGE = enum.auto()


class Evictable:
    """Sessions that may have something below that may leave. Owned by the ledger."""

    def __init__(
        self,
        rank: RankOf,
        account: AccountOf | None = None,
        let_in: Callable[[Sequence[str] | None], None] = lambda _: None,
    ) -> None:
        """`let_in` adds the first session to leave of some accounts, or of all, that are not added yet."""
        self._ranking = ranking(rank, account)
        self._let_in = let_in
        self._aside: set[bytes] = set()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._ranking

    def add(self, uid: bytes) -> None:
        """The session may leave: a part of it was written, unpinned or let go."""
        self._aside.discard(uid)
        self._ranking.add(uid)

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """The session's rank fell to `rank`, or stayed. Sessions that were set aside may leave again."""
        if uid in self._aside:
            self.add(uid)
        else:
            self._ranking.fell(uid, rank)

    def overtaken(self) -> list[bytes]:
        """See Ranking."""
        return self._ranking.overtaken()

    def discard(self, uid: bytes) -> None:
        """The session is gone."""
        self._aside.discard(uid)
        self._ranking.discard(uid)

    def first(self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None = None) -> bytes | None:
        """The session that leaves first, of these accounts one after the other; None when none does."""
        leaving = self._look(judge, among)
        # No session was left. Sessions that could not leave when they came up are asked once more, in their
        # order.
        if leaving is None:
            aside, self._aside = self._aside, set()
            for uid in aside:
                self._ranking.add(uid)
            leaving = self._look(judge, among)
        return leaving

    def in_order(
        self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None = None
    ) -> Generator[bytes]:
        """The sessions that leave, in order. Close the generator: shown sessions come back only then."""
        # Each session is taken out while the caller weighs it, so that `first` finds the next one. Closing
        # the generator puts all back: this is a question, and evicts nobody.
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
        while (uid := self._first(among)) is not None:
            verdict = judge(uid)
            if verdict is Verdict.LEAVES:
                return uid
            self._ranking.discard(uid)
            if verdict is Verdict.NOT_NOW:
                self._aside.add(uid)
        return None

    def _first(self, among: Sequence[str] | None) -> bytes | None:
        self._let_in(among)
        return self._ranking.first(among=among)


# `take` walks in this order. A session's segments leave from its end, because its first tokens are of use
# alone and its last ones are not:
#
#     segments   | s0 | s1 | s2 | s3 | s4 |
#                               ▲ _ends: everything from here on has left, or may not leave
#                next to leave: s2, then s1, then s0
#
# A kin's shared segments have no common end, so that they are a dict, taken from the last added.
class Resident:
    """Sessions, and kin, that may have segments that may leave memory. Owned by the ledger."""

    def __init__(
        self, rank: RankOf, by_uid: Mapping[bytes, Session], account: AccountOf | None = None
    ) -> None:
        self._by_uid = by_uid
        self._rank = rank
        # Accounts are those of a member: a kin's uid is no session's, and has no tenant.
        self._ranking = ranking(self._rank_of, account and (lambda uid: account(self._member(uid))))
        self._ends: dict[bytes, int] = {}
        self._kin: dict[bytes, Kin] = {}
        self._shared: dict[bytes, dict[Segment, None]] = {}
        """Shared segments that may leave, by the kin's uid."""

    def knows(self, segment: Segment) -> bool:
        """Whether `take` would come to the segment."""
        home = segment.home
        if isinstance(home, Kin):
            return segment in self._shared.get(home.uid, {})
        return home is not None and segment.begin < self._ends.get(home.uid, 0)

    def add(self, segment: Segment) -> None:
        """The segment may leave."""
        home = segment.counted_with
        if isinstance(home, Kin):
            home = home.root()
            self._kin[home.uid] = home
            self._shared.setdefault(home.uid, {})[segment] = None
            self._ranking.add(home.uid)
        elif home is not None:
            # Every session with an end here is in the ranking.
            end = segment.begin + segment.row_count
            if end > self._ends.get(home.uid, 0):
                self._ends[home.uid] = end
                self._ranking.add(home.uid)

    def fell(self, session: Session, rank: Key | None) -> None:
        """The session's rank fell to `rank`, or stayed, and so did that of its kin."""
        if session.uid in self._ends:
            self._ranking.fell(session.uid, rank)
        # The whole kin ranks as its member accessed last. A fall of the others changes nothing.
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
            # The member that gave the kin its rank is gone: the next one may rank lower.
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
        """The segment that leaves first, the newest of the coldest session. None when none may.

        The accounts in `among` are asked one after the other. `may_give` is asked for the session of an
        account that comes first, and decides: the sessions behind it are worth no less. The segment comes up
        again only after it is added again.
        """
        # Accounts are asked one after the other: it is the first account's turn to give.
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
            # The first session may be the one that needs the room.
            if not may_give(self._member(uid)):
                return None
            found = self._take_shared if uid in self._shared else self._take_own
            segment = found(uid, may_leave)
            if segment is not None:
                return segment
            # No segment of the session may leave: it is out until a hold ends or a flush makes a segment
            # clean.
            self._forget(uid)
        return None

    def _take_shared(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        shared = self._shared[uid]
        while shared:
            # `popitem` takes the segment added last out for good. A segment that is passed over is added
            # again by its next change.
            segment, _ = shared.popitem()
            if may_leave(segment):
                return segment
        return None

    def _take_own(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        session = self._by_uid[uid]
        segments = session.segments
        i = bisect_left(segments, self._ends[uid], key=lambda segment: segment.begin)
        # Segments that forks share stay here: they leave as the kin's, when the fork used last is the
        # coldest.
        while i and not (segments[i - 1].home is session.residence and may_leave(segments[i - 1])):
            i -= 1
        if not i:
            return None
        self._ends[uid] = segments[i - 1].begin
        return segments[i - 1]

    def _rank_of(self, uid: bytes) -> Key | None:
        return self._rank(self._member(uid))

    def _member(self, uid: bytes) -> bytes:
        """The session of its family that was accessed last. The whole family ranks as that one."""
        # The table has the kin of the time when the segment came: `root` follows merges.
        kin = self._kin.get(uid)
        return kin.root().last_uid if kin else uid

    def _forget(self, uid: bytes) -> None:
        """Note that the session's or the kin's segments may not leave."""
        for by_uid in (self._ends, self._kin, self._shared):
            by_uid.pop(uid, None)
        self._ranking.discard(uid)
