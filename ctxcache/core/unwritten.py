"""Unwritten: rows that only DRAM has. Whose they are, since when, and how many bytes of slots they take.

Of the sessions some are spared: not worth writing, they stay as they are until somebody looks again, and may leave.

Kept where rows are committed, written and dropped, so that nobody has to look for them. Reserved
segments count as well, for what is reserved will be committed without asking again. Every operation
takes logarithmic time. Worst case: memory for every segment that is unwritten, as many as DRAM holds.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from ctxcache.core.accounts import AccountOf, ranking
from ctxcache.core.ages import Ages
from ctxcache.core.eviction import RankOf
from ctxcache.core.placement.order import Key
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session


class Unwritten:
    """Sessions whose log goes on behind what is durable. Owned by the event loop.

    A dirty segment is listed by one session: what is shared was made durable before.
    """

    def __init__(self, rank: RankOf, account: AccountOf | None = None) -> None:
        self._rank = rank
        self.ranking = ranking(rank, account)
        """The sessions that are to be written, the one that leaves first first."""
        self.spared = ranking(rank, account)
        """Those that are not."""
        self.changed: dict[bytes, None] = {}
        """Sessions that may have got a dirty segment that grows no more since somebody looked."""
        self.dirty_bytes = 0
        """Slots of dirty segments."""
        self._claimed_bytes = 0
        self._spared_bytes: dict[bytes, int] = {}
        self._all_spared_bytes = 0
        self._segments: dict[bytes, dict[Segment, int]] = {}
        self._dirty: set[Segment] = set()
        self._reserved: set[Segment] = set()
        self._since_ns: dict[bytes, int] = {}
        self._ages, self._spared_ages = Ages(), Ages()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._segments

    def __len__(self) -> int:
        return len(self._segments)

    def uids(self) -> Iterable[bytes]:
        """The sessions, in no order."""
        return self._segments.keys()

    @property
    def claimed_bytes(self) -> int:
        """Slots of segments that are to be written or reserved, and slots promised to reservations."""
        return self._claimed_bytes - self._all_spared_bytes

    @property
    def due_bytes(self) -> int:
        """Slots of dirty segments that are to be written."""
        return self.dirty_bytes - self._all_spared_bytes

    def is_queued(self, uid: bytes) -> bool:
        """Whether `take_oldest` or `take_spared` would come to the session."""
        return uid in self._ages or uid in self._spared_ages

    def is_spared(self, uid: bytes) -> bool:
        """Whether the session stays as it is for now."""
        return uid in self._spared_bytes

    def first(self, accepts: Callable[[bytes], bool], among: Sequence[str] | None = None) -> bytes | None:
        """The one of those that `accepts` takes that leaves first, spared or not; of the first account that has one."""
        for asked in [None] if among is None else [[account] for account in among]:
            found = (each.first(accepts, asked) for each in (self.spared, self.ranking))
            uid = min((uid for uid in found if uid), key=lambda uid: self._rank(uid) or (), default=None)
            if uid is not None:
                return uid
        return None

    def segments(self, uid: bytes) -> Collection[Segment]:
        """A session's dirty segments, in the order of their positions."""
        return self._segments.get(uid, {}).keys()

    def has_full(self, session: Session) -> bool:
        """Whether a session has a dirty segment that grows no more."""
        segments = self._segments.get(session.uid, {})
        return len(segments) > (session.growing_tail in segments)

    # -- what happens to rows ----------------------------------------------------------------------

    def add(self, session: Session, segment: Segment, now_ns: int) -> None:
        """Rows of the segment were committed."""
        uid = session.uid
        self.unspare(uid)
        segments = self._segments.get(uid)
        if segments is None:
            segments = self._segments[uid] = {}
            self.ranking.add(uid)
            self._age(uid, now_ns)
        self.changed[uid] = None
        if segment not in segments:
            segments[segment] = now_ns
            self._count(segment, 1, self._dirty)
            self.dirty_bytes += segment.layout.size_bytes

    def settle(self, session: Session, written: Iterable[Segment], begun_ns: int) -> None:
        """These were written as they were at `begun_ns`; the session's record may be on disk too."""
        uid = session.uid
        segments = self._segments.get(uid)
        if segments is None:
            return
        self.unspare(uid)
        for segment in written:
            if not segment.is_dirty:
                self._remove(segments, segment)
            elif segment in segments:
                segments[segment] = begun_ns
        if not segments and session.durable_end >= session.log_end:
            self.forget(uid)
        elif segments:
            self._age(uid, next(iter(segments.values())))

    def drop(self, uid: bytes, segment: Segment) -> None:
        """The session lists the segment no more."""
        self.unspare(uid)
        self._remove(self._segments.get(uid, {}), segment)

    def look_again(self, session: Session) -> None:
        """The session's last segment may grow no more, though nothing was committed."""
        if session.uid in self._segments:
            self.changed[session.uid] = None

    def forget(self, uid: bytes) -> None:
        """Everything of the session is written, or it is gone."""
        self.unspare(uid)
        segments = self._segments.pop(uid, {})
        for segment in list(segments):
            self._remove(segments, segment)
        for by_uid in (self._since_ns, self.changed):
            by_uid.pop(uid, None)
        self._ages.discard(uid)
        self.ranking.discard(uid)

    # -- reservations ------------------------------------------------------------------------------

    def promise(self, size_bytes: int) -> None:
        """Count slots of segments that are still to be made; negative when they are, or will not be."""
        self._claimed_bytes += size_bytes

    def reserve(self, segment: Segment) -> None:
        """A writer has room in the segment."""
        self._count(segment, 1, self._reserved)

    def release(self, segment: Segment) -> None:
        """No writer has room in the segment any more."""
        self._count(segment, -1, self._reserved)

    def new_bytes(self, segment: Segment) -> int:
        """What a reservation of the segment would add to what is claimed."""
        return 0 if segment in self._dirty or segment in self._reserved else segment.layout.size_bytes

    # -- age ---------------------------------------------------------------------------------------

    def take_oldest(self, until_ns: int) -> bytes | None:
        """The session that has had unwritten rows for longest, if since `until_ns` or before.

        It is not shown again; one that is not written after all must be put back.
        """
        return self._ages.take(until_ns)

    def take_spared(self, until_ns: int) -> bytes | None:
        """The session that was spared for longest, if since `until_ns` or before: somebody is to look again.

        It is not shown again; one that is not spared anew must be put back.
        """
        return self._spared_ages.take(until_ns)

    def taken(self, uid: bytes) -> None:
        """It is being written: it is not shown again before it is put back."""
        self._ages.discard(uid)

    def oldest_ns(self) -> int | None:
        """Since when rows are to be written, of the session that has had some for longest; None when there is none."""
        since_ns = (at for uid, at in self._since_ns.items() if uid not in self._spared_bytes)
        return min(since_ns, default=None)

    def put_back(self, session: Session) -> None:
        """What was taken to be written is still unwritten, or some of it."""
        if session.uid in self._segments and not self.is_spared(session.uid):
            self._age(session.uid, self._since_ns[session.uid])
            if self.has_full(session):
                self.changed[session.uid] = None

    # -- what is not to be written -----------------------------------------------------------------

    def spare(self, uid: bytes, now_ns: int) -> None:
        """Leave an unwritten session as it is: it presses nobody, and is looked at when it has become old anew."""
        self.unspare(uid)
        self.changed.pop(uid, None)
        self._ages.discard(uid)
        self.ranking.discard(uid)
        self.spared.add(uid)
        self._since_ns[uid] = now_ns
        self._spared_ages.put(uid, now_ns)
        spared_bytes = sum(segment.layout.size_bytes for segment in self._segments[uid])
        self._spared_bytes[uid] = spared_bytes
        self._all_spared_bytes += spared_bytes

    def unspare(self, uid: bytes) -> None:
        """It is to be written after all, or something of it changes; it is as old as its being spared."""
        if uid in self._spared_bytes:
            self._all_spared_bytes -= self._spared_bytes.pop(uid)
            self._spared_ages.discard(uid)
            self.spared.discard(uid)
            self.ranking.add(uid)
            self._age(uid, self._since_ns[uid])
            self.changed[uid] = None

    def fell(self, uid: bytes, rank: Key | None) -> None:
        """Its rank, which is this now, may be lower than it was."""
        self.ranking.fell(uid, rank)
        self.spared.fell(uid, rank)

    # -- parts -------------------------------------------------------------------------------------

    def _age(self, uid: bytes, since_ns: int) -> None:
        self._since_ns[uid] = since_ns
        self._ages.put(uid, since_ns)

    def _remove(self, segments: dict[Segment, int], segment: Segment) -> None:
        if segments.pop(segment, None) is not None:
            self._count(segment, -1, self._dirty)
            self.dirty_bytes -= segment.layout.size_bytes

    def _count(self, segment: Segment, step: int, among: set[Segment]) -> None:
        """The segment comes to be among the dirty or the reserved ones, or is no more."""
        if (segment in among) == (step > 0):
            return
        other = self._reserved if among is self._dirty else self._dirty
        self._claimed_bytes += step * segment.layout.size_bytes * (segment not in other)
        if step > 0:
            among.add(segment)
        else:
            among.discard(segment)
