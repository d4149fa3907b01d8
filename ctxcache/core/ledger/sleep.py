"""Sleep: which sessions become dormant, and how they come to be known again.

    known ── idle for `sleep_ns`, durable, nothing in memory, nobody at work ──► dormant     `fell_asleep`
    dormant ── looked up, due, the coldest, or on a lost path ──► known                      `wake`

`dormant.py` keeps the sessions that sleep. The policy forgets them, and no policy ranks them: a rank for each
would take back the memory that sleep saves. Dormant sessions leave in the order of their last use.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from ctxcache.core.ledger.dormant import Dormant
from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.lost_paths import LostPaths
from ctxcache.core.ledger.names import Names
from ctxcache.core.ledger.places import Backlog, Place, SegmentEvent, Use, UseEvent
from ctxcache.core.ledger.rankings import Evictable
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.order import Key

SECOND_NS = 10**9
AWAKE = 1 << 10
"""Sessions that are known however long nobody uses them: the policy is told of them after a start, too."""
SLEEP_NS = 300 * SECOND_NS
"""For how long nobody has used a session that falls asleep."""
LOOKS_FOR_DROWSY = 64
"""Sessions that are looked at in one turn of the event loop, whether they may fall asleep."""
SEGMENTS_ASLEEP = 64
"""Most segments of a session that may fall asleep, and of all that do in one turn of the event loop."""
WAKES = 256
"""Dormant sessions that one search for room wakes: those on a path that was just lost are of no use to it."""


class SleepClock(Protocol):
    """Where time comes from."""

    def now_ns(self) -> int:
        """The store's time."""

    def monotonic_ns(self) -> int:
        """For deadlines and ages."""


class Sleep:
    """The sessions that nobody has used for long. Owned by the ledger."""

    awake_count, sleep_ns = AWAKE, SLEEP_NS
    """How many sessions are known in any case, and for how long others are idle. May be replaced."""

    def __init__(
        self,
        clock: SleepClock,
        names: Names,
        segments: dict[int, Segment],
        usage: Usage,
        feed: Feed,
        evictable: Evictable,
        lost: LostPaths,
        is_noted: Callable[[Session], bool],
        forget: Callable[[Session], None],
        recall: Callable[[Session, float, int], None],
    ) -> None:
        """`segments`: all that known sessions list, by id.

        `is_noted`: whether an index of what is to be done has the session. `forget` takes it out of the other
        indices, and `recall` puts one there that was idle for so long and had so many turns.
        """
        self.dormant = Dormant()
        """To be looked at, not changed."""
        self._clock, self._names, self._segments, self._usage = clock, names, segments, usage
        self._feed, self._evictable, self._lost = feed, evictable, lost
        self._is_noted, self._forget, self._recall = is_noted, forget, recall
        self._looked_ns = 0
        """When it was last asked whether a session is drowsy: requests do not look at the clock for that."""
        self._awake: OrderedDict[bytes, int] = OrderedDict()
        """Known sessions by the time at which to look whether they may sleep."""
        self._woken_coldest: dict[str, tuple[bytes, Key | None]] = {}
        """By account, the session that `let_coldest_in` woke last, and its rank then."""

    # -- known sessions fall asleep ------------------------------------------------------------------

    def appeared(self, session: Session) -> None:
        """The session is known, and idle from here on as far as this knows."""
        self._awake[session.uid] = self._looked_ns + self.sleep_ns

    def ended(self, session: Session) -> None:
        """The session is gone."""
        self._awake.pop(session.uid, None)

    def drowsy(self, *, limit: int) -> list[Session]:
        """Sessions that may fall asleep, at most so many of those that are to be looked at."""
        sessions: list[Session] = []
        segment_count = 0
        most = min(limit, len(self._names.sessions) - self.awake_count)
        # None is looked at twice.
        for _ in range(min(LOOKS_FOR_DROWSY, len(self._awake))):
            if len(sessions) >= most or segment_count >= SEGMENTS_ASLEEP or not self.is_any_drowsy:
                break
            uid = next(iter(self._awake))
            # Its next look, if it does not fall asleep.
            self._stay_awake(uid)
            if self._may_sleep(uid):
                sessions.append(self._names.by_uid[uid])
                segment_count += len(sessions[-1].segments)
        return sessions

    @property
    def is_any_drowsy(self) -> bool:
        """Whether more sessions are known than need be, and one is to be looked at."""
        self._looked_ns = self._clock.monotonic_ns()
        if len(self._names.sessions) <= self.awake_count or not self._awake:
            return False
        return self._awake[next(iter(self._awake))] <= self._looked_ns

    def fell_asleep(self, session: Session, kept: object, kept_segments: Sequence[object]) -> None:
        """A session that may is dormant from here on, with its record and those of its segments."""
        uid, tenant = session.uid, session.tenant
        session.used(UseEvent.FELL_ASLEEP)
        idle_s, turn_count = self._feed.slept(session)
        number = self.dormant.add(uid, tenant, session.session_id, kept, idle_s=idle_s, turn_count=turn_count)
        for segment, kept_segment in zip(session.segments, kept_segments, strict=True):
            assert segment.durable is not None  # noqa: S101  # it is below
            segment.happened(SegmentEvent.FELL_ASLEEP)
            del self._segments[segment.segment_id]
            self.dormant.add_segment(segment.segment_id, number, segment.durable, kept_segment)
        self.dormant.timed(number, session.access_time_ns, session.expire_time_ns)
        # Its name, the count of its model and its tenant's bytes stay: it is there.
        self._names.fell_asleep(session)
        del self._awake[uid]
        self._forget(session)

    def _stay_awake(self, uid: bytes) -> None:
        self._awake[uid] = self._looked_ns + self.sleep_ns
        self._awake.move_to_end(uid)

    def _may_sleep(self, uid: bytes) -> bool:
        session = self._names.by_uid[uid]
        # Somebody at work on the session may wait for a device, and would not know another object in its
        # place.
        if self._lost.paths or session.worker_count or self._is_noted(session):
            return False
        segments = session.segments
        return (
            session.use is Use.IDLE
            and session.backlog is Backlog.DURABLE
            and session.recorded_end == session.log_end
            and session.copies == 1
            and session.residence.kin is None
            and not (session.is_pinned or session.withheld)
            and 0 < len(segments) <= SEGMENTS_ASLEEP
            and self._clock.now_ns() - session.access_time_ns >= self.sleep_ns
            and all(
                segment.place is Place.BELOW and segment.copy is None and not segment.hold_count
                for segment in segments
            )
            and not (self._feed.is_awaited(uid) or self._feed.is_expected(uid))
        )

    # -- dormant sessions wake -----------------------------------------------------------------------

    def wake_on(self, paths: Collection[int]) -> Iterator[Session]:
        """Make known the dormant sessions that have a segment on these paths below, one by one."""
        for number in self.dormant.on_paths(paths):
            yield self.wake(number)

    def wake(self, number: int) -> Session:
        """A dormant session becomes known: the only step that leads from one to the other."""
        session = self.dormant.revived(number, self._usage.of(self.dormant.tenant(number)))
        segments = {segment.segment_id: segment for segment in session.segments}
        idle_s, turn_count = self.dormant.idle_s(number), self.dormant.turn_count(number)
        size_bytes = self.dormant.slot_bytes(number)
        self.dormant.left(
            number, session.session_id, session.access_time_ns, session.expire_time_ns, segments
        )
        # Its segments were counted all the while, and are counted one by one now.
        self._usage.of(session.tenant).add(0, -size_bytes, -size_bytes)
        self._segments.update(segments)
        self._names.woke(session)
        self._stay_awake(session.uid)
        for segment in session.segments:
            segment.list_in(session.residence)
        self._recall(session, idle_s, turn_count)
        return session

    def let_coldest_in(self, among: Sequence[str] | None) -> None:
        """Wake the dormant session of each account that was used longest ago, so that it is ranked.

        `among` None: of all accounts. The next one is woken when that session has left or has another rank.
        """
        if not self.dormant.count:
            return
        for account in self.dormant.accounts(among):
            uid, rank = self._woken_coldest.get(account, (b"", None))
            for _ in range(WAKES):
                # While it is here and has its rank, the dormant sessions behind it need not be known.
                if uid in self._evictable and self._feed.rank(uid) == rank:
                    break
                number = self.dormant.coldest(account)
                if number is None:
                    break
                uid = self.wake(number).uid
                rank = self._feed.rank(uid)
            self._woken_coldest[account] = uid, rank
