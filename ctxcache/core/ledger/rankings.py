"""Rankings: which session leaves first, by ranks that change between looks; one order for each account.

    Ranking, Rankings   some sessions in order, of all accounts or by account
    Evictable           the sessions that may leave the store
    Resident            the segments that may leave memory: of the coldest session the newest first
    Unwritten           the sessions with rows that memory alone has: by rank, by age, and their bytes

None of these looks at sessions or segments that may not leave. One that comes up and may not leave is passed
over once: for good where only a change of its own can alter that, after which it is added again. Callers name
the accounts in the order in which they are to be asked. Memory: an entry per session. Worst case: one look at
all that are held.

Unwritten segments are noted as rows are committed, written and dropped, so nothing has to be searched.
Reserved segments count as well, for what is reserved will be committed without asking again. A session that
is not worth writing is spared: it stays as it is until the next look, and may leave.
"""

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from ctxcache.core.ledger.places import Backlog, BacklogEvent
from ctxcache.core.ledger.segment import Kin, Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Key

RankOf = Callable[[bytes], Key | None]
"""Where a session stands: a lower one leaves first. None for a session that is not known."""
AccountOf = Callable[[bytes], str]
"""The account of a session. Never changes while the session is in a ranking."""
SLACK = 64
"""Outdated entries of a ranking that are not worth a pass."""


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
            self._entered[uid] = rank
            heappush(self._heap, (rank, uid))
            if len(self._heap) > 2 * len(self._entered) + SLACK:
                self._tidy()

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """The session's rank, which is this now, may be lower than it was."""
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
            # An entry is current if it is the one that `_entered` has. All others were overtaken or
            # discarded.
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

    # A rank is asked for before an account is made: a session that is not known has neither.
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
        # The heads of all accounts are compared: that is one look at each account, not at each session.
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


# Why three: a session that is read now may leave in a moment, while a pinned one needs an event of its own.
# Looking at pinned sessions at each search would make a search as long as the store is pinned.
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
        """`let_in` of some accounts, or of all, adds the first to leave of those that are not added yet."""
        self._ranking = ranking(rank, account)
        self._let_in = let_in
        self._aside: set[bytes] = set()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._ranking

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
        # Nothing was left. Sessions that could not leave when they came up are asked once more, in their
        # order.
        if found is None:
            aside, self._aside = self._aside, set()
            for uid in aside:
                self._ranking.add(uid)
            found = self._look(judge, among)
        return found

    def in_order(
        self, judge: Callable[[bytes], Verdict], among: Sequence[str] | None = None
    ) -> Generator[bytes]:
        """The sessions that leave, one after the other. To be closed: who was shown is back only then."""
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


# The order in which `take` walks. A session's segments leave from its end, because its first tokens are of
# use alone and its last ones are not:
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
        # Accounts are asked of a member: a kin's uid is no session's, and has no tenant.
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
        """Its rank, which is this now, may be lower than it was, and so may that of its kin."""
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
        """The segment that leaves first: of the coldest session the newest. None when none may.

        Of the accounts in `among` one after the other. `may_give` is asked for the session of an account
        that comes first, and decides: the sessions behind it are worth no less. It is not found again
        before it is added again.
        """
        # One account after the other, not all at once: the first account is the one whose turn it is to give.
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
            # The session asked for may be the one that needs the room.
            if not may_give(self._member(uid)):
                return None
            found = self._take_shared if uid in self._shared else self._take_own
            segment = found(uid, may_leave)
            if segment is not None:
                return segment
            # Nothing of it may leave: out, until a hold ends or a flush makes something clean, which adds it
            # again.
            self._forget(uid)
        return None

    def _take_shared(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        shared = self._shared[uid]
        while shared:
            # `popitem` takes the segment added last, and takes it for good: passed over, it is added again by
            # its change.
            segment, _ = shared.popitem()
            if may_leave(segment):
                return segment
        return None

    def _take_own(self, uid: bytes, may_leave: Callable[[Segment], bool]) -> Segment | None:
        session = self._by_uid[uid]
        segments = session.segments
        i = bisect_left(segments, self._ends[uid], key=lambda segment: segment.begin)
        # Segments that a fork shares stay: they leave as the kin's, when the last user of all forks is the
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
        """The session of its family that was accessed last: the whole family ranks as that one."""
        # By uid of the kin as it was when the segment came: `root` follows merges.
        kin = self._kin.get(uid)
        return kin.root().last_uid if kin else uid

    def _forget(self, uid: bytes) -> None:
        """The session's or the kin's segments may not leave."""
        for by_uid in (self._ends, self._kin, self._shared):
            by_uid.pop(uid, None)
        self._ranking.discard(uid)


# -- what is to be written ---------------------------------------------------------------------------


class Ages:
    """Some sessions, the one that waits for longest first.

    Every operation takes amortised logarithmic time.
    """

    def __init__(self) -> None:
        self._since_ns: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._since_ns

    def put(self, uid: bytes, since_ns: int) -> None:
        """Add the session, or let it wait since another time."""
        # The same time again would fill the heap with equal entries.
        if self._since_ns.get(uid) == since_ns:
            return
        self._since_ns[uid] = since_ns
        heappush(self._heap, (since_ns, uid))
        if len(self._heap) > 2 * len(self._since_ns) + SLACK:
            self._heap = [(since_ns, uid) for uid, since_ns in self._since_ns.items()]
            heapify(self._heap)

    def discard(self, uid: bytes) -> None:
        """It waits no more."""
        self._since_ns.pop(uid, None)

    def take(self, until_ns: int) -> bytes | None:
        """Take out the session that waits for longest, if since `until_ns` or before."""
        while self._heap and self._heap[0][0] <= until_ns:
            since_ns, uid = heappop(self._heap)
            if self._since_ns.get(uid) == since_ns:
                del self._since_ns[uid]
                return uid
        return None


# The bytes, of which segments are in two sets:
#
#     dirty       committed, in memory alone             reserved    a writer has room there
#     claimed   = dirty or reserved, + promised - spared        bounds writers
#     due       = dirty - spared                                presses write-behind
#
# A segment that is both counts once. Spared rows press nobody: they stay in memory on purpose.
class Unwritten:
    """Sessions whose log goes on behind what is durable. Owned by the ledger.

    An unwritten segment is listed by one session: what is shared was made durable before.
    """

    def __init__(self, rank: RankOf, account: AccountOf | None = None) -> None:
        self._rank = rank
        self.ranking = ranking(rank, account)
        """The sessions that are to be written, in the order in which they leave."""
        self.spared = ranking(rank, account)
        """The sessions that are spared, in the same order."""
        self.changed: dict[bytes, Session] = {}
        """Sessions that may have got an unwritten segment that grows no more since the last look."""
        self.dirty_bytes = 0
        """Slots of unwritten segments."""
        self.claimed_by: dict[str, int] = {}
        """Claimed bytes of each tenant that has some. To be looked at, not changed."""
        self.claimed_bytes = 0
        """Slots of segments that are to be written or reserved, and slots promised to reservations."""
        self.spared_bytes = 0
        """Slots of unwritten segments that stay unwritten."""
        self._spared_bytes: dict[bytes, int] = {}
        self._segments: dict[bytes, dict[Segment, int]] = {}
        self._dirty: set[Segment] = set()
        self._reserved: set[Segment] = set()
        self._since_ns: dict[bytes, int] = {}
        self._ages, self._spared_ages = Ages(), Ages()

    def __len__(self) -> int:
        return len(self._segments)

    def uids(self) -> Iterable[bytes]:
        """The sessions, in no order."""
        return self._segments.keys()

    @property
    def due_bytes(self) -> int:
        """Slots of unwritten segments that are to be written."""
        return self.dirty_bytes - self.spared_bytes

    def is_queued(self, session: Session) -> bool:
        """Whether `take_oldest` or `take_spared` would come to the session, or it is being written."""
        is_waiting = session.uid in self._ages or session.uid in self._spared_ages
        return is_waiting or session.backlog is Backlog.TAKEN

    def first(self, accepts: Callable[[bytes], bool], among: Sequence[str] | None = None) -> bytes | None:
        """The session that leaves first, spared or not, of those that `accepts` takes.

        Of the first account that has one.
        """
        # Account by account: the account asked first gives, even if another has a colder session.
        for asked in [None] if among is None else [[account] for account in among]:
            found = (each.first(accepts, asked) for each in (self.spared, self.ranking))
            uid = min((uid for uid in found if uid), key=lambda uid: self._rank(uid) or (), default=None)
            if uid is not None:
                return uid
        return None

    def segments(self, uid: bytes) -> Collection[Segment]:
        """A session's unwritten segments, in the order of their positions."""
        return self._segments.get(uid, {}).keys()

    def size_bytes(self, session: Session) -> int:
        """Slots of a session's unwritten segments."""
        return sum(segment.size_bytes for segment in self._segments.get(session.uid, ()))

    def has_full(self, session: Session) -> bool:
        """Whether a session has an unwritten segment that grows no more."""
        segments = self._segments.get(session.uid, {})
        return len(segments) > (session.growing_tail in segments)

    # -- what happens to rows ----------------------------------------------------------------------

    def committed(self, session: Session, segment: Segment, now_ns: int) -> bool:
        """Rows of the segment were committed; whether it had no unwritten ones before."""
        uid = session.uid
        # Its worth is judged anew with the rows that came. The recall comes first, for it counts bytes as
        # they are.
        if session.backlog is Backlog.SPARED:
            self.recall(session)
        segments = self._segments.get(uid)
        if segments is None:
            segments = self._segments[uid] = {}
            self.ranking.add(uid)
            self._age(uid, now_ns)
        # Whether or not the segment is full: the next look finds out, off the writer's path.
        self.changed[uid] = session
        is_new = segment not in segments
        if is_new:
            segments[segment] = now_ns
            self.dirty_bytes += segment.layout.size_bytes
            # Bytes that its writer reserved are claimed already.
            if segment in self._reserved:
                self._dirty.add(segment)
            else:
                self._count(segment, 1, self._dirty)
        session.owed(BacklogEvent.COMMITTED)
        return is_new

    def settled(self, session: Session, written: Iterable[Segment], begun_ns: int) -> None:
        """These were written as they were at `begun_ns`; the session's record may be durable too."""
        uid = session.uid
        segments = self._segments.get(uid)
        if segments is None:
            return
        # A spared session that was flushed all the same, because somebody asked for durability.
        if session.backlog is Backlog.SPARED:
            self.recall(session)
        for segment in written:
            if segment.durable_row_count >= segment.row_count:
                self._remove(segments, segment)
            elif segment in segments:
                # Rows came during its write: they are as old as the flush that left them, not as the first
                # row.
                segments[segment] = begun_ns
        if not segments and session.durable_end >= session.log_end:
            self._forget(session)
            session.owed(BacklogEvent.SETTLED)
        elif segments:
            session.owed(BacklogEvent.PUT_BACK)
            # Segments are noted in the order in which they became dirty: the first one's time is the oldest.
            self._age(uid, next(iter(segments.values())))

    def unlisted(self, session: Session, segment: Segment) -> None:
        """The session lists the segment no more, or only its durable rows are left."""
        self.recall(session)
        self._remove(self._segments.get(session.uid, {}), segment)

    def tail_changed(self, session: Session) -> None:
        """The session's last segment may grow no more, though nothing was committed."""
        if session.uid in self._segments:
            self.changed[session.uid] = session

    def ended(self, session: Session) -> None:
        """The session is gone."""
        self.recall(session)
        session.owed(BacklogEvent.ENDED)
        self._forget(session)

    # -- reservations ------------------------------------------------------------------------------

    def promise(self, tenant: str, size_bytes: int) -> None:
        """Count slots of segments that are still to be made; negative when they are made, or will not be."""
        self._claim(tenant, size_bytes)

    def reserve(self, segment: Segment) -> int:
        """A writer has room in the segment; returns the bytes that this adds to what is claimed."""
        before_bytes = self.claimed_bytes
        self._count(segment, 1, self._reserved)
        return self.claimed_bytes - before_bytes

    def release(self, segment: Segment) -> None:
        """No writer has room in the segment any more."""
        self._count(segment, -1, self._reserved)

    def new_bytes(self, segment: Segment) -> int:
        """The bytes that a reservation of the segment would add to the claimed ones."""
        return 0 if segment in self._dirty or segment in self._reserved else segment.layout.size_bytes

    # -- age ---------------------------------------------------------------------------------------

    def take_oldest(self, until_ns: int) -> bytes | None:
        """The session that has had unwritten rows for longest, if since `until_ns` or before.

        It is not shown again before it is put back or spared.
        """
        return self._ages.take(until_ns)

    def take_spared(self, until_ns: int) -> bytes | None:
        """The session that was spared for longest, if since `until_ns` or before.

        It is not shown again before it is recalled or spared anew.
        """
        return self._spared_ages.take(until_ns)

    def taken(self, session: Session) -> None:
        """The session is being written: it is not shown again before it is put back."""
        session.owed(BacklogEvent.TAKEN)
        self._ages.discard(session.uid)

    def oldest_ns(self) -> int | None:
        """Since when rows are to be written, of the session that has had some for longest.

        None when there is none.
        """
        # A spared session does not count: it would be the oldest for ever, and an alert would follow.
        since_ns = (at for uid, at in self._since_ns.items() if uid not in self._spared_bytes)
        return min(since_ns, default=None)

    def put_back(self, session: Session) -> None:
        """A session that was taken to be written may still have unwritten rows."""
        # SPARED and DURABLE need nothing: the write, or the decision not to write, has put the books right.
        if session.backlog in (Backlog.TAKEN, Backlog.DUE):
            session.owed(BacklogEvent.PUT_BACK)
            self._age(session.uid, self._since_ns[session.uid])
            # A segment that became full during the write was not part of it.
            if self.has_full(session):
                self.changed[session.uid] = session

    # -- what is not to be written -----------------------------------------------------------------

    def spare(self, session: Session, now_ns: int) -> None:
        """Leave an unwritten session as it is.

        It presses no writer, and is looked at when it has become old anew.
        """
        # Through `recall`, so that the bytes of an earlier sparing are not taken off twice.
        self.recall(session)
        session.owed(BacklogEvent.SPARED)
        uid = session.uid
        self.changed.pop(uid, None)
        self._ages.discard(uid)
        self.ranking.discard(uid)
        self.spared.add(uid)
        self._since_ns[uid] = now_ns
        self._spared_ages.put(uid, now_ns)
        spared_bytes = sum(segment.size_bytes for segment in self._segments[uid])
        self._spared_bytes[uid] = spared_bytes
        self.spared_bytes += spared_bytes
        # Rows that stay in memory on purpose make no writer wait.
        self._claim(session.tenant, -spared_bytes)

    def recall(self, session: Session) -> None:
        """Write a spared session after all, or something of it changes; it is as old as its being spared."""
        if session.backlog is not Backlog.SPARED:
            return
        session.owed(BacklogEvent.RECALLED)
        uid = session.uid
        spared_bytes = self._spared_bytes.pop(uid)
        self.spared_bytes -= spared_bytes
        self._claim(session.tenant, spared_bytes)
        self._spared_ages.discard(uid)
        self.spared.discard(uid)
        self.ranking.add(uid)
        # As old as its being spared, not as its rows: else a recall would look like a backlog of hours.
        self._age(uid, self._since_ns[uid])
        self.changed[uid] = session

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """The session's rank, which is this now, may be lower than it was."""
        if uid not in self._segments:
            return
        self.ranking.fell(uid, rank)
        self.spared.fell(uid, rank)

    # -- parts -------------------------------------------------------------------------------------

    def _forget(self, session: Session) -> None:
        uid = session.uid
        segments = self._segments.pop(uid, {})
        for segment in list(segments):
            self._remove(segments, segment)
        self._since_ns.pop(uid, None)
        self.changed.pop(uid, None)
        self._ages.discard(uid)
        self.ranking.discard(uid)

    def _age(self, uid: bytes, since_ns: int) -> None:
        self._since_ns[uid] = since_ns
        self._ages.put(uid, since_ns)

    def _claim(self, tenant: str, size_bytes: int) -> None:
        self.claimed_bytes += size_bytes
        own_bytes = self.claimed_by.get(tenant, 0) + size_bytes
        if own_bytes:
            self.claimed_by[tenant] = own_bytes
        else:
            self.claimed_by.pop(tenant, None)

    def _remove(self, segments: dict[Segment, int], segment: Segment) -> None:
        if segments.pop(segment, None) is not None:
            self._count(segment, -1, self._dirty)
            self.dirty_bytes -= segment.layout.size_bytes

    def _count(self, segment: Segment, change: int, among: set[Segment]) -> None:
        """The segment comes to be among the unwritten or the reserved segments, or is no more."""
        if (segment in among) == (change > 0):
            return
        other = self._reserved if among is self._dirty else self._dirty
        # A segment that is dirty and reserved has been claimed by the one that came first.
        if segment not in other:
            self._claim(segment.tenant, change * segment.layout.size_bytes)
        if change > 0:
            among.add(segment)
        else:
            among.discard(segment)
