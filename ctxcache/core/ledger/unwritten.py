"""Unwritten: rows that only memory has. Whose they are, since when, and how many bytes of slots they take.

Some sessions are spared: not worth writing, they stay as they are until the next look, and may leave.

Kept where rows are committed, written and dropped, so that nothing has to be searched. Reserved segments
count as well, for what is reserved will be committed without asking again. Every operation takes logarithmic
time. Worst case: memory for every segment that is unwritten, as many as memory holds.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush

from ctxcache.core.ledger.places import Backlog, BacklogEvent
from ctxcache.core.ledger.rankings import SLACK, AccountOf, RankOf, ranking
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Key


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
        self._spared_bytes: dict[bytes, int] = {}
        self._all_spared_bytes = 0
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
        return self.dirty_bytes - self._all_spared_bytes

    def is_queued(self, session: Session) -> bool:
        """Whether `take_oldest` or `take_spared` would come to the session, or it is being written."""
        is_waiting = session.uid in self._ages or session.uid in self._spared_ages
        return is_waiting or session.backlog is Backlog.TAKEN

    def first(self, accepts: Callable[[bytes], bool], among: Sequence[str] | None = None) -> bytes | None:
        """The session that leaves first, spared or not, of those that `accepts` takes.

        Of the first account that has one.
        """
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
        return len(self._segments.get(session.uid, ())) * session.layout.size_bytes

    def has_full(self, session: Session) -> bool:
        """Whether a session has an unwritten segment that grows no more."""
        segments = self._segments.get(session.uid, {})
        return len(segments) > (session.growing_tail in segments)

    # -- what happens to rows ----------------------------------------------------------------------

    def committed(self, session: Session, segment: Segment, now_ns: int) -> None:
        """Rows of the segment were committed."""
        uid = session.uid
        if session.backlog is Backlog.SPARED:
            self.recall(session)
        session.owed(BacklogEvent.COMMITTED)
        segments = self._segments.get(uid)
        if segments is None:
            segments = self._segments[uid] = {}
            self.ranking.add(uid)
            self._age(uid, now_ns)
        self.changed[uid] = session
        if segment not in segments:
            segments[segment] = now_ns
            self.dirty_bytes += segment.layout.size_bytes
            # What its writer reserved is claimed already.
            if segment in self._reserved:
                self._dirty.add(segment)
            else:
                self._count(segment, 1, self._dirty)

    def settled(self, session: Session, written: Iterable[Segment], begun_ns: int) -> None:
        """These were written as they were at `begun_ns`; the session's record may be durable too."""
        uid = session.uid
        segments = self._segments.get(uid)
        if segments is None:
            return
        if session.backlog is Backlog.SPARED:
            self.recall(session)
        for segment in written:
            if not segment.is_unwritten:
                self._remove(segments, segment)
            elif segment in segments:
                segments[segment] = begun_ns
        if not segments and session.durable_end >= session.log_end:
            session.owed(BacklogEvent.SETTLED)
            self._forget(session)
        elif segments:
            session.owed(BacklogEvent.PUT_BACK)
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
        """What a reservation of the segment would add to what is claimed."""
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
        since_ns = (at for uid, at in self._since_ns.items() if uid not in self._spared_bytes)
        return min(since_ns, default=None)

    def put_back(self, session: Session) -> None:
        """A session that was taken to be written may still have unwritten rows."""
        if session.backlog in (Backlog.TAKEN, Backlog.DUE):
            session.owed(BacklogEvent.PUT_BACK)
            self._age(session.uid, self._since_ns[session.uid])
            if self.has_full(session):
                self.changed[session.uid] = session

    # -- what is not to be written -----------------------------------------------------------------

    def spare(self, session: Session, now_ns: int) -> None:
        """Leave an unwritten session as it is.

        It presses no writer, and is looked at when it has become old anew.
        """
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
        self._all_spared_bytes += spared_bytes
        self._claim(session.tenant, -spared_bytes)

    def recall(self, session: Session) -> None:
        """Write a spared session after all, or something of it changes; it is as old as its being spared."""
        if session.backlog is not Backlog.SPARED:
            return
        session.owed(BacklogEvent.RECALLED)
        uid = session.uid
        spared_bytes = self._spared_bytes.pop(uid)
        self._all_spared_bytes -= spared_bytes
        self._claim(session.tenant, spared_bytes)
        self._spared_ages.discard(uid)
        self.spared.discard(uid)
        self.ranking.add(uid)
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
            self.dirty_bytes -= segment.size_bytes

    def _count(self, segment: Segment, change: int, among: set[Segment]) -> None:
        """The segment comes to be among the unwritten or the reserved segments, or is no more."""
        if (segment in among) == (change > 0):
            return
        other = self._reserved if among is self._dirty else self._dirty
        if segment not in other:
            self._claim(segment.tenant, change * segment.layout.size_bytes)
        if change > 0:
            among.add(segment)
        else:
            among.discard(segment)
