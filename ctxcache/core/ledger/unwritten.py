"""Unwritten: the sessions with rows that memory alone has, by rank, by age, and their bytes.

Segments are noted as rows are committed, written and dropped, so nothing has to be searched. Reserved
segments count as well, for what is reserved will be committed without asking again. A session that is not
worth writing is spared: it stays as it is until the next look, and may leave.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """Sessions whose log goes on behind what is durable. Changed by the ledger's events and by write-behind.

    An unwritten segment is listed by one session: what is shared was made durable before.
    """

    def __init__(
        self, rank: RankOf, by_uid: Mapping[bytes, Session], account: AccountOf | None = None
    ) -> None:
        """`by_uid`: every session that is known."""
        self._rank, self._by_uid = rank, by_uid
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

    def sessions(self) -> list[Session]:
        """These sessions, the best kept first."""
        uids = sorted(self._segments, key=lambda uid: self._rank(uid) or (), reverse=True)
        return [self._by_uid[uid] for uid in uids]

    @property
    def due_bytes(self) -> int:
        """Slots of unwritten segments that are to be written."""
        return self.dirty_bytes - self.spared_bytes

    def is_queued(self, session: Session) -> bool:
        """Whether `take_oldest` or `take_old` would come to the session, or it is being written."""
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

    def coldest(self, accepts: Callable[[Session], bool], among: Sequence[str] | None) -> Session | None:
        """The coldest session that is to be written, of these accounts, of those that `accepts` takes."""
        # By rank, not by age: the coldest session leaves memory next, once it is written.
        uid = self.ranking.first(lambda uid: accepts(self._by_uid[uid]), among)
        return None if uid is None else self._by_uid[uid]

    def segments(self, session: Session) -> Collection[Segment]:
        """A session's unwritten segments, in the order of their positions."""
        return self._segments.get(session.uid, {}).keys()

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

    def take_oldest(self, until_ns: int) -> Session | None:
        """The session that has had unwritten rows for longest, if since `until_ns` or before.

        It is not shown again before it is put back or spared.
        """
        uid = self._ages.take(until_ns)
        return None if uid is None else self._by_uid[uid]

    def take_old(self, until_ns: int) -> Session | None:
        """As `take_oldest`; where there is none, the session that was spared for longest, if as long ago.

        A spared one is not shown again before it is recalled or spared anew.
        """
        uid = self._ages.take(until_ns) or self._spared_ages.take(until_ns)
        return None if uid is None else self._by_uid[uid]

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
        """The session's rank fell to `rank`, or stayed."""
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
