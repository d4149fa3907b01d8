"""The ledger: where every segment and session is in its life, and every index over that.

Events come in: what was opened, read, committed, flushed, promoted, dropped, truncated, forked, ended. Moves
come out: which segment is to leave memory, which session the store, and what is to be written. `cache/`
carries the moves out. `places.py` has the tables of all steps. Nothing here waits or does I/O, and time is
what it is told.

Order that this rests on: bytes are durable before the record that points at them, and a record is gone before
its bytes are given back. A held segment keeps its slots.
"""

import sys
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from ctxcache.core import ranges
from ctxcache.core.ledger.dormant import Dormant
from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.keyed import Keyed, holds
from ctxcache.core.ledger.leaving import Leaving
from ctxcache.core.ledger.places import Backlog, Place, SegmentEvent, Use, UseEvent
from ctxcache.core.ledger.rankings import Evictable, Resident, Unwritten
from ctxcache.core.ledger.retaining import Retaining
from ctxcache.core.ledger.segment import Copies, Kin, Quotas, Residence, Segment, Shelf, Usage
from ctxcache.core.ledger.session import BEGIN, BLOCKS, BlockIndex, ExpiryQueue, Piece, Session, lies_on
from ctxcache.core.limits import Limits, Watermarks
from ctxcache.core.observations import Busiest, Observations
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Ranked
from ctxcache.core.placement.shares import EVERYONE, NO_SHARES, Shares
from ctxcache.core.prefix.keys import BLOCK_TOKENS, Scope
from ctxcache.core.ranges import Ranges
from ctxcache.errors import SessionNotFound
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import LONG_SLOT_BYTES, SegmentLayout, Slot

SECOND_NS = 10**9
# Lists of segments are walked at a lease, a fork and a record, in one turn of the event loop.
MANY_SEGMENTS = 128
"""Segments of a session that cost so much to list that short ones are joined."""
HOLDERS_LOOKED_AT = 64
"""Sessions and segments that a search by key looks at: what only others hold is not found."""
WAKES = 256
"""Dormant sessions that one search for room wakes: those on a path that was just lost are of no use to it."""

AWAKE = 1 << 10
"""Sessions that are known however long nobody uses them: the policy is told of them after a start, too."""
SLEEP_NS = 300 * SECOND_NS
"""For how long nobody has used a session that falls asleep."""
LOOKS_FOR_DROWSY = 64
"""Sessions that are looked at in one turn of the event loop, whether they may fall asleep."""
SEGMENTS_ASLEEP = 64
"""Segments of one that may, and of those that do in one turn of the event loop, which makes their records."""


class LedgerClock(Protocol):
    """Where time comes from."""

    def now_ns(self) -> int:
        """The store's time."""

    def monotonic_ns(self) -> int:
        """For deadlines and ages."""


class Below(Protocol):
    """The state of the tier below, as far as decisions need it."""

    @property
    def closed_paths(self) -> Collection[int]:
        """Paths that take no writes, by number."""

    @property
    def has_open_path(self) -> bool:
        """Whether a path takes writes."""


class Wishes(Protocol):
    """The moves that the ledger asks for soon. Called within an event; must not wait, nor call the ledger."""

    def prefetch_wanted(self) -> None:
        """A session may have come to be worth promoting ahead of need."""

    def write_wanted(self) -> None:
        """More is to be written than shall wait."""

    def tokens_withheld(self, session: Session, token_count: int) -> None:
        """The session shows so many tokens fewer, because a path is lost."""

    def segment_gone(self, segment: Segment) -> None:
        """The segment's slots are given back; one that was taken for a copy of it is of no use any more."""


def others_of(known: dict[Any, Any], key: object) -> int:
    """How many references there are to a value of the dict besides the dict's own."""
    return sys.getrefcount(known[key]) - _OWN


# Of a value that only its dict refers to: interpreters differ in what a call adds.
_OWN = 0
_OWN = others_of({0: object()}, 0)


@dataclass(frozen=True, slots=True)
class Flushed:
    """A segment's first `row_count` rows, written below to `slot`; `values`: one checksum per stream.

    `copy`: the slot on another path that has the same bytes, None where there is one copy.
    """

    segment: Segment
    slot: Slot
    row_count: int
    header_checksum: int
    values: tuple[int, ...]
    copy: Slot | None = None

    @property
    def places(self) -> tuple[Slot, ...]:
        """All its slots."""
        return (self.slot,) if self.copy is None else (self.slot, self.copy)


@dataclass(frozen=True, slots=True)
class Drop:
    """A move: this segment is to leave memory. A tier below has its rows."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A move: this session is to leave the store.

    Memory alone has it, and it is not worth its place below.
    """

    session: Session


# Events and moves. Each line is a call; `cache/` makes all of them, on the event loop:
#
#     cache/appends     reserved ► claimed ► committed ► appended ► unclaimed, write_ended
#     cache/flushing    staged ► (bytes written, synced) ► flushed ► (record synced) ► recorded
#     cache/leases      held ► read_began ► ... ► released ► read_ended
#     cache/promotion   held ► (read, verified) ► promoted ► released
#     cache/budgets     next_out_of_memory ► dropped
#     cache/eviction    next_from_below ► ended ► (record removed, synced) ► forgotten
#     upkeep            due ► ended; paths_lost ► reckon at the next look
#
# The parentheses are what only the caller can do. Between two calls other events may come: every event checks
# what it needs, and none trusts an earlier answer.
class Ledger:
    """Every session and every segment. Owned by the event loop.

    `memory` and `below` hand out slots; `usage` counts them by tenant; `quotas` divides them. These,
    `copies`, the `unread` segments and the counts are for others to look at, not to change.
    """

    awake_count, sleep_ns = AWAKE, SLEEP_NS
    """How many sessions are known in any case, and for how long others are idle. May be replaced."""
    _looked_ns = 0
    """When it was last asked whether one is drowsy: a request does not look at the clock for that."""

    def __init__(
        self,
        clock: LedgerClock,
        policy: Ranked,
        memory: Shelf,
        below: Shelf,
        devices: Below,
        *,
        limits: Limits,
        shares: Shares,
        watermarks: Watermarks,
        seen: Observations,
        wishes: "Wishes",
    ) -> None:
        self._clock, self._devices, self._wishes = clock, devices, wishes
        self.memory, self.below = memory, below
        self.watermarks = watermarks
        """May be replaced while the store runs."""
        self.usage = Usage(shares)
        self.busiest, self.accesses_by_tenant = Busiest(), Counter[str]()
        self._sessions: dict[tuple[str, str], Session] = {}
        # Every session by name and by uid. A name is given again after its session ended; a uid never is, so
        # that work under way finds by the uid that its session is gone.
        self._by_uid: dict[bytes, Session] = {}
        self._names: dict[str, list[str]] = {}
        """Session ids of each tenant, in order."""
        self._blocks = BlockIndex()
        self._children: dict[tuple[str, str], dict[bytes, Session]] = {}
        """Blocks by tenant and the id of the block that they continue, which may be gone."""
        self._model_sessions: Counter[tuple[str, str]] = Counter()
        self._segments: dict[int, Segment] = {}
        # How often paths were lost or came back is the reckoning.
        self._last_segment_id = self._reckoning = 0
        self.dormant = Dormant()
        """The sessions that nobody has used for long. To be looked at, not changed."""
        self._awake: OrderedDict[bytes, int] = OrderedDict()
        """Known sessions by the time at which to look whether they may sleep."""
        self._woken_coldest: dict[str, tuple[bytes, Key | None]] = {}
        """By account, the session that was the coldest dormant one, and its rank when it came to be known."""
        self.keyed = Keyed()
        """Which segments are found by their tokens."""
        self._expiry = ExpiryQueue()
        self._touched: dict[bytes, Session] = {}
        """Sessions whose last access no record has."""
        self.many_segments = MANY_SEGMENTS
        """From how many of its segments on a session is looked at to be joined. May be replaced."""
        self._lengthened: dict[bytes, Session] = {}
        """Sessions of many segments of which some have become full and durable."""
        self.copies = Copies()
        self._spoiling: set[Segment] = set()
        """Segments that leave a spoiled slot as soon as nothing uses it."""
        self.lost: Mapping[int, str] = {}
        """The files of paths of which nothing can be had now, by path number."""
        self._kept_back: set[Segment] = set()
        """Segments that were passed over because they lie on a lost path.

        They may leave when that is another.
        """
        self._withheld: dict[bytes, int] = {}
        self._exposed: dict[bytes, Session] = {}
        """Sessions of which memory has what lies on a lost path."""
        capacities = Capacities(memory.capacity_bytes, below.capacity_bytes)
        retaining = Retaining(self._now_s, self._by_uid, capacities, limits, shares, self._reclassed)
        # These are made in this order because each asks the one before: the feed knows ranks, the rankings
        # ask it, and `Leaving` asks both.
        self._feed = Feed(
            policy, clock.monotonic_ns, self._by_uid, self._fell, retaining, seen, wishes.prefetch_wanted
        )
        # Without shares all sessions are in one ranking, which is quicker than one for each of many tenants.
        account = self._account if shares else None
        self._resident = Resident(self._feed.memory_rank, self._by_uid, account)
        self._evictable = Evictable(self._feed.rank, account, self._let_coldest_in)
        self._unwritten = Unwritten(self._feed.rank, account)
        self.quotas = Quotas(
            self.usage, below.capacity_bytes, lambda: self.watermarks.filled_bytes(memory.capacity_bytes)
        )
        self._leaving = Leaving(
            self._by_uid.__getitem__,
            self._feed,
            self._unwritten,
            # Called at each look, not bound once: paths close and open while the store runs.
            self._evictable,
            self.quotas,
            below,
            lambda: devices.closed_paths,
            self._continued_by,
        )

    # -- look-ups ----------------------------------------------------------------------------------

    def find(self, tenant: str, session_id: str) -> Session:
        """A tenant's session that has not expired. Raises SessionNotFound."""
        return self.find_at(tenant, session_id, self._clock.now_ns())

    def find_at(self, tenant: str, session_id: str, now_ns: int) -> Session:
        """As `find`, for a caller that has looked at the clock: `now_ns` in the store's time."""
        name = tenant, session_id
        session = self._sessions.get(name)
        # Two dicts and no common one: listing sessions must not walk a million blocks.
        if session is None:
            session = self.named(tenant, session_id)
        # Upkeep removes expired sessions some time later. Until then a look-up already takes them for gone.
        if session is None or session.expire_time_ns <= now_ns:
            raise SessionNotFound(session=f"sessions/{session_id}")
        # Paths were lost or came back: sessions pay for that when they are looked up, not all at once.
        if session.reckoned != self._reckoning:
            self.reckon(session)
        return session

    def is_to_reckon(self, session: Session) -> bool:
        """Whether a path was lost or came back since the session was last looked at."""
        return session.reckoned != self._reckoning

    def check_expiry(self, session: Session) -> None:
        """Raise SessionNotFound once the session's time has come, whatever still keeps it in memory."""
        if session.expire_time_ns <= self._clock.now_ns():
            raise SessionNotFound(session=session.name)

    def named(self, tenant: str, session_id: str) -> Session | None:
        """A tenant's session or block, expired or not."""
        if session_id.startswith(BLOCKS):
            return self._blocks.named(tenant, session_id)
        session = self._sessions.get((tenant, session_id))
        if session is None and self.dormant.count:
            return self._woken(self.dormant.named(tenant, session_id))
        return session

    def glance(self, tenant: str, session_id: str) -> Session | None:
        """As `named`, to be looked at and no more. A dormant one stays so, and shows no segments."""
        number = self.dormant.named(tenant, session_id)
        # Rows that can be had while a path is lost are reckoned for known sessions alone.
        if number is None or self.lost:
            return self.named(tenant, session_id)
        session = self.dormant.revived(number, None)
        session.residence.add(0, 0, self.dormant.slot_bytes(number))
        session.reckoned = self._reckoning
        return session

    def blocks_under(self, tenant: str, space: bytes, keys: Iterable[bytes]) -> list[Session | None]:
        """A tenant's blocks under these keys, expired or not, as they can be had now; None for the others."""
        found = self._blocks.under(tenant, space, keys)
        reckoning = self._reckoning
        for block in found:
            if block is not None and block.reckoned != reckoning:
                self.reckon(block)
        return found

    def get(self, uid: bytes) -> Session | None:
        """A session that is there."""
        session = self._by_uid.get(uid)
        if session is None and self.dormant.count:
            return self._woken(self.dormant.with_uid(uid))
        return session

    @property
    def session_count(self) -> int:
        """How many sessions there are."""
        return len(self._sessions) + self.dormant.count

    @property
    def segment_count(self) -> int:
        """How many segments sessions list."""
        return len(self._segments) + self.dormant.segment_count

    def sessions(self) -> Collection[Session]:
        """Every session that is not dormant."""
        return self._sessions.values()

    def blocks(self) -> Collection[Session]:
        """Every block."""
        return self._blocks

    def listing(self) -> Collection[Session]:
        """Every session that is not dormant, and every block: all that list known segments."""
        return self._by_uid.values()

    def uids(self) -> list[bytes]:
        """The uids of every session."""
        return [*(s.uid for s in self._sessions.values()), *map(self.dormant.uid, self.dormant)]

    def newest(self, limit: int) -> list[Session]:
        """At most so many sessions that are not dormant, the last made first."""
        return list(islice(reversed(self._sessions.values()), limit))

    def names(self, tenant: str) -> Sequence[str]:
        """A tenant's session ids, in order."""
        return self._names.get(tenant, ())

    def tenants(self) -> set[str]:
        """Tenants that had anything since the start, or have a configured share."""
        return {*self.usage.tenants(), *self._names}

    def model_session_count(self, tenant: str, model_id: str) -> int:
        """Sessions of a tenant's model."""
        return self._model_sessions[tenant, model_id]

    def glance_at(self, segment_id: int) -> Segment | None:
        """As `segment`, to be looked at and no more. A dormant one stays so: it is made for this look."""
        number = self.dormant.lister(segment_id)
        if number is None:
            return self._segments.get(segment_id)
        session = self.dormant.revived(number, Usage(NO_SHARES).of(self.dormant.tenant(number)))
        return next((s for s in session.segments if s.segment_id == segment_id), None)

    def segment(self, segment_id: int) -> Segment | None:
        """A segment that a session lists."""
        if segment_id not in self._segments:
            self._woken(self.dormant.lister(segment_id))
        return self._segments.get(segment_id)

    def is_dormant(self, segment: Segment) -> bool:
        """Whether the session that lists the segment is dormant."""
        return self.dormant.lister(segment.segment_id) is not None

    def segments(self) -> Collection[Segment]:
        """Every segment that a session lists which is not dormant."""
        return self._segments.values()

    def listers(self, segment: Segment) -> list[Session]:
        """The sessions that list a segment. Looks at all that are kin to them."""
        # A segment with a residence has one lister, and nothing has to be searched.
        home = segment.home
        if not isinstance(home, Kin):
            return [self._by_uid[home.uid]] if home else []
        kin = (self._by_uid[uid] for uid in home.uids)
        return [session for session in kin if session.lists(segment)]

    def holder(self, scope: Scope, keys: Sequence[bytes]) -> tuple[Session, int] | None:
        """A session that holds the tokens of the longest run of these keys, and how many keys that is.

        `keys` are of tokens that follow one another from the first on. None where there is none.
        """
        now_ns, looks = self._clock.now_ns(), 0
        for number, segment_id, row_count in self.keyed.longest(scope, keys):
            segment = self.segment(segment_id)
            assert segment is not None  # noqa: S101  # no key leads to what is gone
            if segment.begin + row_count != (number + 1) * BLOCK_TOKENS:
                # A key that was given for tokens at another place.
                continue
            home = segment.home
            # The kin's sessions from the one accessed last: the most likely to be in memory, and to stay.
            uids = reversed(home.uids) if isinstance(home, Kin) else [home.uid] if home else []
            for uid in uids:
                looks += 1
                session = self._by_uid[uid]
                if session.expire_time_ns > now_ns and holds(session, segment, row_count):
                    self.reckon(session)
                    # Once more: the reckoning may have withheld some of its tokens.
                    if holds(session, segment, row_count):
                        return session, number + 1
                # Thousands of sessions may list one system prompt: the look-up is bounded.
                if looks >= HOLDERS_LOOKED_AT:
                    return None
        return None

    # -- sessions come and go ----------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """The session was created, or forked: its segments are listed by it too."""
        # The feed first: the indices ask for ranks, which a session without a standing does not have.
        self._add(session)
        self._feed.appeared(session)
        self._index(session)

    def recalled(self, session: Session, idle_s: float) -> None:
        """The session was there when the store was opened, and idle for that long; the oldest come first."""
        self._add(session)
        self._recall(session, idle_s, 1, is_watched=True)

    def asleep(self, dormant: Dormant, models: Counter[tuple[str, str]]) -> None:
        """These were there as well, so many of each tenant's model, and are dormant from here on."""
        self.dormant = dormant
        for tenant, names in dormant.names.items():
            self._names[tenant] = sorted([*self._names.get(tenant, ()), *names])
        self._model_sessions.update(models)
        for tenant, size_bytes in dormant.durable_bytes().items():
            self.usage.of(tenant).add(0, size_bytes, size_bytes)

    def drowsy(self, *, limit: int) -> list[Session]:
        """Sessions that may fall asleep, at most so many of those that are to be looked at."""
        found: list[Session] = []
        segment_count = 0
        most = min(limit, len(self._sessions) - self.awake_count)
        for _ in range(LOOKS_FOR_DROWSY):
            if len(found) >= most or segment_count >= SEGMENTS_ASLEEP or not self.is_drowsy:
                break
            uid = next(iter(self._awake))
            # Its next look, if it does not fall asleep.
            self._stay_awake(uid)
            if self._may_sleep(uid):
                found.append(self._by_uid[uid])
                segment_count += len(found[-1].segments)
        return found

    @property
    def is_drowsy(self) -> bool:
        """Whether more sessions are known than need be, and one is to be looked at."""
        self._looked_ns = self._clock.monotonic_ns()
        if len(self._sessions) <= self.awake_count or not self._awake:
            return False
        return self._awake[next(iter(self._awake))] <= self._looked_ns

    def _stay_awake(self, uid: bytes) -> None:
        self._awake[uid] = self._looked_ns + self.sleep_ns
        self._awake.move_to_end(uid)

    def _may_sleep(self, uid: bytes) -> bool:
        # Others may be at work with it and wait for a device: another object in its place would be unknown to
        # them. This is told by their references, so that none of them has to say so: by uid and name, and of
        # its standing.
        if self.lost or others_of(self._by_uid, uid) != 2:
            return False
        session = self._by_uid[uid]
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
            # One, for the session's list.
            and all(others_of(self._segments, each) == 1 for each in [s.segment_id for s in segments])
            and not (self._feed.is_awaited(uid) or self._feed.is_expected(uid))
        )

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
        del self._sessions[tenant, session.session_id], self._by_uid[uid], self._awake[uid]
        self._evictable.discard(uid)
        self._expiry.forget(uid)
        self._resident.forget_session(session)

    def wake_on(self, paths: Collection[int]) -> Iterator[Session]:
        """Make known the dormant sessions that have a segment on these paths below, one by one."""
        for number in self.dormant.on_paths(paths):
            yield self._wake(number)

    def _woken(self, number: int | None) -> Session | None:
        return None if number is None else self._wake(number)

    def _wake(self, number: int) -> Session:
        """A dormant session becomes known: the only step that leads from one to the other."""
        session = self.dormant.revived(number, self.usage.of(self.dormant.tenant(number)))
        segments = {segment.segment_id: segment for segment in session.segments}
        idle_s, turn_count = self.dormant.idle_s(number), self.dormant.turn_count(number)
        size_bytes = self.dormant.slot_bytes(number)
        self.dormant.left(
            number, session.session_id, session.access_time_ns, session.expire_time_ns, segments
        )
        # Its segments were counted all the while, and are counted one by one now.
        self.usage.of(session.tenant).add(0, -size_bytes, -size_bytes)
        self._segments.update(segments)
        self._sessions[session.tenant, session.session_id] = session
        self._by_uid[session.uid] = session
        self._stay_awake(session.uid)
        for segment in session.segments:
            segment.list_in(session.residence)
        self._recall(session, idle_s, turn_count, is_watched=False)
        return session

    def _let_coldest_in(self, among: Sequence[str] | None) -> None:
        """Let one that is ranked be the coldest of these accounts, of all where None, dormant ones included.

        Of dormant ones the policy was told nothing: they stand behind each other as they were used last. So
        it suffices that the first of them is known.
        """
        if not self.dormant.count:
            return
        for account in self.dormant.accounts(among):
            uid, rank = self._woken_coldest.get(account, (b"", None))
            for _ in range(WAKES):
                # One that was used since ranks above those that are still dormant.
                if uid in self._evictable and self._feed.rank(uid) == rank:
                    break
                number = self.dormant.coldest(account)
                if number is None:
                    break
                uid = self._wake(number).uid
                rank = self._feed.rank(uid)
            self._woken_coldest[account] = uid, rank

    def _recall(self, session: Session, idle_s: float, turn_count: int, *, is_watched: bool) -> None:
        # Slots of the last segments say where the session lies: a session stays on one device, so that a lost
        # device takes few sessions instead of a part of each.
        places = session.segments[-1].places if session.segments else ()
        session.path = places[0].path_index if places else None
        session.copy_path = places[1].path_index if len(places) > 1 else None
        # A session that wants one copy may list segments with two: those are surplus, and have to be counted.
        if session.copies == 1:
            for segment in session.segments:
                if segment.copy is not None:
                    self._count_copies(segment)
        session.used(UseEvent.RECALLED)
        self._feed.recalled(session, idle_s, turn_count, is_watched=is_watched)
        self._index(session)

    def forked(self, source: Session, fork: Session) -> None:
        """The fork, which is opened, shares the source's segments: both logs go on behind them."""
        # A visit and not a plain note: the policy is told of a use that began and ended, so that the source
        # ranks as used a moment ago.
        self._visit(source)
        # It may be in use, and go on in memory as kin to the new one.
        self._feed.settled(source)
        self._visit(fork)

    def replaced(self, old: Session, new: Session, source: Session) -> list[Segment]:
        """`new`, which lists the source's segments, has the name and the place of `old` from here on.

        Returns the segments that no session lists any more.
        """
        # The feed first: it passes the standing of `old` on to `new`. Once `old` has ended, there is none.
        self._feed.replaced(old, new)
        dead = self.ended(old)
        self._add(new)
        # RECALLED, not a use: the session was there under its name, and upkeep must not make it look used.
        new.used(UseEvent.RECALLED)
        self._index(new)
        self._visit(source)
        # Both may be all in memory, as kin to each other.
        self._feed.settled(source)
        self._feed.settled(new)
        return dead

    def adopted(self, source: Session, session: Session, token_count: int) -> None:
        """The session, which never had a token, lists the source's segments of its first tokens too.

        These tokens are durable.
        """
        session.adopt(source, token_count)
        for segment in session.segments:
            segment.list_in(session.residence)
        self._want_copies(session)
        # Two sessions list them from now on: a row that one appends must not appear in the other.
        self.closed(session.segments)
        self._index(session)
        self.forked(source, session)

    def shared(self, session: Session, segments: Iterable[Segment]) -> None:
        """Count these with the session's kin, as if a fork listed them.

        Segments that others list stay as they are.
        """
        residence = session.residence
        if residence.kin is None:
            residence.found_kin()
            # From here on its segments leave memory as its kin's, and placement has to know that beforehand.
            self._feed.settled(session)
        for segment in segments:
            if segment.home is residence:
                segment.share()
                if segment.memory:
                    self._resident.add(segment)

    def closed(self, segments: Iterable[Segment]) -> None:
        """These segments grow no more: what is appended from here on goes to another one."""
        for segment in segments:
            segment.is_growing = False

    def truncated(self, session: Session, live: Ranges) -> list[Segment]:
        """Only these positions of the session are live.

        Returns the segments that no session lists any more.
        """
        # Segments without a live position go at once; their slots only when their records are gone.
        dead = self._unlist(session, session.keep_positions(live))
        self.keyed.cut(session)
        self._feed.recounted(session)
        return dead

    def ended(self, session: Session, *, is_evicted: bool = False) -> list[Segment]:
        """The session is gone; returns the segments that no session lists any more.

        `is_evicted`: for others.
        """
        if is_evicted:
            # Before the end, which forgets the session: an eviction leaves a ghost that a return is counted
            # by.
            self._feed.evicted(session)
        session.used(UseEvent.ENDED)
        uid = session.uid
        # From here on a client may make a session of that name, while this one's record is being removed.
        self._forget_name(session)
        del self._by_uid[uid]
        self.busiest.forget(uid)
        self._awake.pop(uid, None)
        self._touched.pop(uid, None)
        self._lengthened.pop(uid, None)
        # Each index that could hand the session out again lets go of it, before its segments lose their home.
        self._unwritten.ended(session)
        self._evictable.discard(uid)
        self._feed.ended(session)
        self._expiry.forget(uid)
        self._exposed.pop(uid, None)
        # Last: the segments are unlisted while the session is known as gone, so that no index adds them
        # again.
        dead = self._unlist(session, session.segments)
        self._withheld.pop(uid, None)
        self._resident.forget_session(session)
        return dead

    # -- sessions are used -------------------------------------------------------------------------

    def touched(self, session: Session, now_ns: int) -> None:
        """Count an access at that time of the store; one behind a session's expiry changes nothing.

        Every access comes here, so that none revives a session that others were told is gone.
        """
        if session.expire_time_ns <= now_ns:
            return
        session.touch(now_ns)
        self.accesses_by_tenant[session.tenant] += 1
        # Earlier than before where an expiry was shortened.
        self._expiry.schedule(session.uid, session.expire_time_ns)
        if not session.is_block:
            self.busiest.count(session.uid)
            self._touched[session.uid] = session
        elif session.durable_end:
            # One that is not below has no record: after a crash it is not there.
            self._touched[session.uid] = session

    def read_began(self, session: Session, pieces: Iterable[Piece], now_s: float) -> None:
        """A lease or stream of these pieces begins, `now_s` of the monotonic clock."""
        self._begin(session, UseEvent.READ_BEGAN, now_s)
        if self._feed.unread:
            self._feed.read(pieces)

    def read_ended(self, uid: bytes, now_s: float) -> None:
        """A lease or stream of a session ended. Does nothing where the session is gone."""
        session = self._by_uid.get(uid)
        if session is not None:
            self._end(session, UseEvent.READ_ENDED, now_s)

    def write_began(self, session: Session, now_s: float) -> None:
        """A writer has the session, `now_s` of the monotonic clock."""
        self._begin(session, UseEvent.WRITE_BEGAN, now_s)
        # The session grows, so that its worth is judged anew.
        if session.backlog is Backlog.SPARED:
            self._unwritten.recall(session)

    def write_ended(self, session: Session, now_s: float) -> None:
        """The writer is done. Does nothing where the session is gone."""
        if session.use is not Use.GONE:
            self._end(session, UseEvent.WRITE_ENDED, now_s)
            # Rows that were flushed under the writer may leave below from now on.
            self._evictable.add(session.uid)
            # Its tail may be written now, although it is not full.
            self._press()

    def wanted(self, session: Session, segments: Iterable[Segment]) -> None:
        """As many copies of these of the session's segments shall be below as of the session.

        Segments that others list too keep a second copy that they have, for it may be theirs.
        """
        for segment in segments:
            # A fork with one copy must not take the second copy of its source, whose client asked for two.
            if session.copies > segment.copies or segment.reference_count == 1:
                segment.wanted(session.copies)
                self._count_copies(segment)

    def visited(self, session: Session) -> None:
        """An access that is over at once."""
        self._visit(session)

    def pinned(self, session: Session, *, is_pinned: bool) -> None:
        """The session may leave for others, or may not."""
        session.is_pinned = is_pinned
        self._evictable.add(session.uid)
        self._unwritten.tail_changed(session)

    # -- expiry, and accesses that no record has ----------------------------------------------------

    def due(self, now_ns: int, *, limit: int) -> list[Session]:
        """Sessions whose time has come, at most so many; each is told once."""
        for number in self.dormant.due(now_ns, limit):
            self._wake(number)
        return [self._by_uid[uid] for uid in self._expiry.due(now_ns, self._expire_time, limit=limit)]

    def still_due(self, session: Session, now_ns: int) -> None:
        """A session whose time has come could not be ended yet: it is told again."""
        if not session.is_gone:
            self._expiry.schedule(session.uid, now_ns)

    @property
    def unsaved_access_count(self) -> int:
        """How many sessions' last accesses no record has."""
        return len(self._touched)

    def unsaved_accesses(self, *, limit: int, part_limit: int) -> list[Session]:
        """Sessions whose last access no record has.

        At most so many, and about so many segments and streams of them.
        """
        # Records are made in one turn of the loop: their size bounds the turn, not only their number.
        some: list[Session] = []
        part_count = 0
        for session in islice(self._touched.values(), limit):
            some.append(session)
            part_count += len(session.segments) + len(session.layout.specs)
            if part_count >= part_limit:
                break
        return some

    def saved(self, sessions: Iterable[Session]) -> None:
        """Records have these sessions' last accesses."""
        for session in sessions:
            self._touched.pop(session.uid, None)

    def unsaved(self, sessions: Iterable[Session]) -> None:
        """No record could be given these sessions' last accesses."""
        self._touched |= {session.uid: session for session in sessions if not session.is_gone}

    # -- rows are written --------------------------------------------------------------------------

    def skip_segment_ids(self, last: int) -> None:
        """Numbers up to `last` are taken."""
        self._last_segment_id = max(self._last_segment_id, last)

    def new_segment_id(self) -> int:
        """A number no segment ever had in this data directory, as far as records tell."""
        self._last_segment_id += 1
        return self._last_segment_id

    @property
    def longest_bytes(self) -> int:
        """The largest slot of a segment that has more than 64 rows."""
        # Room for a long segment must lie in one piece, in memory and on a path. A share of the smaller of
        # the two keeps such pieces likely to be found.
        least_bytes = min(self.memory.capacity_bytes, self.below.smallest_path_bytes)
        return min(int(self.watermarks.longest * least_bytes), LONG_SLOT_BYTES)

    def reserved(
        self, session: Session, segment_id: int, begin: int, layout: SegmentLayout, slot: Slot
    ) -> Segment:
        """A writer got room for rows of the session from position `begin` on; returns their segment."""
        # The generation at reservation, not at commit: it is written into the header and bound into
        # checksums, and never changes while the segment lives.
        segment = Segment(
            segment_id=segment_id,
            tenant=session.tenant,
            writer_uid=session.uid,
            generation=session.generation,
            begin=begin,
            model_fingerprint=session.model_fingerprint,
            layout=layout,
            use=self.usage.of(session.tenant),
            copies=session.copies,
        )
        segment.reserved(slot)
        return segment

    def recorded_segment(self, segment: Segment) -> None:
        """A record names this segment, as the store is opened."""
        self._segments[segment.segment_id] = segment

    def unrecorded_segment(self, segment: Segment) -> None:
        """No session lists this segment, as the store is opened."""
        del self._segments[segment.segment_id]
        self.keyed.gone(segment)
        segment.placed(())

    def abandoned(self, segment: Segment) -> None:
        """The segment's writer ended, and none of its rows was committed."""
        segment.happened(SegmentEvent.ABANDONED)

    def claimed(self, segment: Segment) -> int:
        """A writer has room in the segment; returns the bytes that this adds to what is claimed."""
        return self._unwritten.reserve(segment)

    def unclaimed(self, segment: Segment) -> None:
        """No writer has room in the segment any more."""
        self._unwritten.release(segment)

    def promised(self, tenant: str, size_bytes: int) -> None:
        """So much more may become dirty; negative when it is claimed, or will not be."""
        self._unwritten.promise(tenant, size_bytes)

    def claim_bytes(self, segment: Segment) -> int:
        """The bytes that a reservation of the segment would add to the claimed ones."""
        return self._unwritten.new_bytes(segment)

    def committed(self, session: Session, segment: Segment, row_count: int, now_ns: int) -> bool:
        """The segment's first `row_count` rows are visible in the session. `now_ns`: monotonic.

        Returns whether that is news to write-behind, which passes by a tail that grows under its writer.
        """
        # The segment's first commit: only now does the session list it.
        if segment.place is Place.RESERVED:
            # Where a segment begins at the log's end no commit spans into it: what was flushed before it is
            # whole without it, and a crash may end the session there.
            session.is_tail_apart = segment.begin == session.log_end
            session.segments.append(segment)
            segment.list_in(session.residence)
            self._segments[segment.segment_id] = segment
        if row_count > segment.row_count:
            segment.happened(SegmentEvent.COMMITTED)
            segment.row_count = row_count
            return self._unwritten.committed(session, segment, now_ns) or segment.is_full
        return False

    def appended(self, session: Session, token_count: int, now_ns: int, *, is_news: bool) -> None:
        """So many committed tokens more are live, and the session was accessed at that time of the store.

        `is_news`: to write-behind, see `committed`.
        """
        if token_count:
            session.append_rows(session.log_end + token_count)
            if is_news:
                self._press()
        self.touched(session, now_ns)

    def staged(self, segment: Segment, slot: Slot, *, is_there: bool) -> None:
        """A slot below was taken for the segment's rows, or is given up again; no record names it."""
        segment.stage(slot.size_bytes if is_there else -slot.size_bytes)

    def flushed(self, session: Session, written: Sequence[Flushed], end: int, begun_ns: int) -> set[Slot]:
        """These are below and synced; a record is about to say so, of the log up to `end`.

        Returns the slots that they take the place of.
        """
        replaced: set[Slot] = set()
        for item in written:
            is_outgrown = item.row_count < item.segment.row_count
            replaced.update(self._adopt(item, SegmentEvent.OUTGROWN if is_outgrown else SegmentEvent.FLUSHED))
        self._evictable.add(session.uid)
        self._unwritten.settled(session, [item.segment for item in written], begun_ns)
        # Only long sessions are looked at to be joined, and only when a full segment became durable.
        if len(session.segments) > self.many_segments and any(item.segment.is_full for item in written):
            self._lengthened[session.uid] = session
        # Before the commit: a record written meanwhile must not fall back behind this one.
        # Durable in two steps. A crash at each point leaves this:
        #
        #     bytes synced        the slots hold rows that no record names: free after a restart
        #     recorded_end = end  the same; other records of this session that are made now reach as far
        #     record synced       the session ends at `end` after a restart
        #     durable_end = end   `recorded`; now the flush is acknowledged
        session.recorded_end = end
        return replaced

    def recorded(self, session: Session, end: int, begun_ns: int) -> None:
        """The record of that flush is durable."""
        session.durable_end = max(session.durable_end, end)
        self._unwritten.settled(session, (), begun_ns)

    def moved(self, written: Sequence[Flushed]) -> set[Slot]:
        """These lie in other slots below; returns the slots that they take the place of."""
        return {slot for item in written for slot in self._adopt(item, SegmentEvent.MOVED)}

    def copied(self, segment: Segment, slot: Slot) -> tuple[Slot, ...]:
        """The slot, which was taken for it, has what the segment has below.

        Returns the slots that it takes the place of: they lie on a lost path.
        """
        kept = self.best_place(segment)
        assert kept is not None  # noqa: S101  # its bytes were copied from there
        # The slot that could not be had is replaced. It lies on a lost path and may come back with other
        # rows.
        replaced = tuple(place for place in segment.places if place != kept)
        segment.placed((kept, slot))
        segment.stage(-slot.size_bytes)
        self._count_copies(segment)
        return replaced

    def place_lost(self, segment: Segment, slot: Slot, *, is_bad: bool) -> None:
        """One of the segment's two slots below is its own no more; see `disowned`."""
        segment.placed(tuple(place for place in segment.places if place != slot))
        self._disown(slot, is_bad=is_bad)
        self._count_copies(segment)
        # The remaining copy may be on a lost path: what was shown a moment ago cannot be had now.
        if self.is_on_lost_path(segment):
            self.reckon_again([segment])

    def best_place(self, segment: Segment) -> Slot | None:
        """The slot below from which the segment is read: one that can be had, if there is one."""
        durable, copy = segment.durable, segment.copy
        if copy is None or durable is None or durable.path_index not in self.lost:
            # Two copies, and the first is out of reach. If both are, the answer is the first: its read fails,
            # and says which path.
            return durable
        return durable if copy.path_index in self.lost else copy

    def recount_copies(self, segment: Segment) -> bool:
        """Whether a segment still lacks a copy: its path may have come back."""
        self._count_copies(segment)
        return segment in self.copies.single

    def take_lengthened(self) -> list[Session]:
        """Sessions of many segments that got full ones since the last look."""
        found, self._lengthened = self._lengthened, {}
        return list(found.values())

    def joined(self, sessions: Sequence[Session], parts: Sequence[Segment], whole: Flushed) -> list[Segment]:
        """One segment, which is below and synced, takes the place of these, whose rows it has; see `flushed`.

        They follow one another, all of these sessions list all of them, and no other does. Returns them: no
        session lists them any more.
        """
        segment = whole.segment
        segment.happened(SegmentEvent.COMMITTED)
        segment.row_count, segment.is_growing = whole.row_count, False
        self._segments[segment.segment_id] = segment
        self._adopt(whole, SegmentEvent.FLUSHED)
        for session in sessions:
            first = bisect_left(session.segments, segment.begin, key=BEGIN)
            # In place of the parts, so that positions are found by bisection as before.
            session.segments[first : first + len(parts)] = [segment]
            segment.list_in(session.residence)
            if session.residence.kin is not None:
                # A fork may be about to list it, which it was made ready for before.
                self.shared(session, [segment])
        # Before the parts are unlisted, which takes away their keys: the whole is to be found by them.
        self.keyed.joined(parts, segment)
        return [part for session in sessions for part in self._unlist(session, parts)]

    def shortened(self, segment: Segment, durable: Sums) -> list[Session]:
        """Only the rows that a tier below has are left of the segment; returns the sessions that list it."""
        sessions = self.listers(segment)
        segment.shortened(durable)
        self.keyed.shortened(segment)
        for session in sessions:
            self._unwritten.unlisted(session, segment)
        return sessions

    # -- segments move -----------------------------------------------------------------------------

    def held(self, segment: Segment, *, is_past: bool = False) -> None:
        """The segment keeps its slots until `released`; `is_past`: wherever they are, memory may be left."""
        # Two counts and no list of holders. A hold that needs memory and one that does not look the same
        # below.
        segment.hold_count += 1
        segment.past_hold_count += is_past

    def released(self, segment: Segment, *, is_past: bool = False) -> None:
        """One hold ended; the last hold of a segment without a record frees its slots."""
        segment.hold_count -= 1
        segment.past_hold_count -= is_past
        # The last use of a bad slot may just have ended.
        if segment in self._spoiling:
            self.spoiled(segment)
        if segment.place is Place.HELD:
            self._empty(segment)
            return
        is_clean = self.is_clean(segment)
        # A kin's uid is no session's.
        home = segment.counted_with
        # Spared rows in memory alone may leave too, with their whole session.
        session = self._by_uid.get(home.uid) if home is not None else None
        is_spared = session is not None and session.backlog is Backlog.SPARED
        # Added again although it may be there: a ranking that passed over the segment took it out for good.
        if is_clean or is_spared or (self.lost and self.is_on_lost_path(segment)):
            self._resident.add(segment)
        # A session that is written is added when its writer is done.
        if not segment.hold_count and session is not None and session.use is not Use.WRITTEN:
            self._evictable.add(session.uid)

    def forgotten(self, segment: Segment) -> None:
        """The segment's record is gone: its slots are free as soon as nothing holds them."""
        segment.happened(SegmentEvent.FORGOTTEN)
        self._empty(segment)

    def stranded(self, slots: Iterable[Slot]) -> None:
        """A commit failed: records may still name these slots below."""
        # Until the metadata is read again no other rows may lie there: an old record would name them.
        # `setdefault`: a slot that is stranded with its segment keeps that, because the segment still gives
        # it back.
        for slot in slots:
            self.below.stranded.setdefault(slot, None)

    def stranded_with(self, segments: Iterable[Segment]) -> None:
        """As `stranded`, of segments whose records were to go."""
        for segment in segments:
            for slot in segment.places:
                self.below.stranded[slot] = segment

    def unstranded(self, slots: Iterable[Slot]) -> None:
        """No record names these slots: they may be taken, those of held segments when the holds end."""
        for slot in slots:
            segment = self.below.stranded.pop(slot, None)
            # Quarantine outlasts stranding: a slot with wrong bytes stays taken though no record names it.
            is_bad = slot in self.below.quarantined
            # A segment that is still there gives its slot back itself, at its end.
            if not is_bad and (segment is None or segment.place is Place.GONE):
                self.below.give(slot)

    def unquarantined(self, slot: Slot) -> None:
        """The slot keeps what is written there: it may be taken, unless a record may still name it."""
        self.below.quarantined.discard(slot)
        self.below.give_back(slot)

    def dropped(self, segment: Segment) -> None:
        """The segment leaves memory."""
        self.memory.give_back(segment.dropped())
        self._left_memory(segment)

    def spoiled(self, segment: Segment) -> None:
        """The segment's slot in memory does not keep what is written.

        It is left for good, once nothing uses it.
        """
        segment.is_growing = False
        # Memory alone has the rows, or a reader uses them: the slot is left later.
        # Memory that does not keep its bytes is still the only place that has them: better read and verified
        # than dropped unread. Readers' pointers into the slot cannot be taken back either.
        if segment.is_unwritten or segment.memory_hold_count:
            self._spoiling.add(segment)
            return
        self._spoiling.discard(segment)
        if segment.memory:
            slot = segment.dropped()
            if slot:
                self.memory.spoiled.add(slot)
            self._left_memory(segment)

    def promoted(self, segment: Segment, slot: Slot, values: tuple[int, ...]) -> None:
        """Memory has the segment again; `values`: one checksum per stream, verified."""
        segment.promoted(slot)
        segment.settle(segment.row_count, values)

    def disowned(self, segment: Segment, *, is_bad: bool) -> tuple[Slot, ...]:
        """Take the slots below away from the segment and return them: records give them to another segment.

        `is_bad`: what lies there is not what was written, and the slots are kept from use.
        """
        slots = segment.places
        segment.placed(())
        for slot in slots:
            self._disown(slot, is_bad=is_bad)
        return slots

    def _disown(self, slot: Slot, *, is_bad: bool) -> None:
        if is_bad:
            self.below.quarantined.add(slot)
            if slot in self.below.stranded:
                # Without the segment: `unstranded` then keeps the slot for quarantine instead of waiting for
                # its end.
                # The segment's end does not give it back any more.
                self.below.stranded[slot] = None

    def is_clean(self, segment: Segment) -> bool:
        """Whether the segment may leave memory at once."""
        is_unwritten = segment.durable_row_count < segment.row_count
        if segment.memory is None or is_unwritten or segment.hold_count > segment.past_hold_count:
            return False
        # A segment of a lost path leaves memory only where no other path can take it.
        return not self.lost or not self.is_on_lost_path(segment) or not self._devices.has_open_path

    # -- moves out: what is to leave memory ----------------------------------------------------------

    def next_out_of_memory(
        self,
        among: Sequence[str] | None,
        is_due: Callable[[Session], bool],
        may_give: Callable[[bytes], bool] = lambda _: True,
    ) -> Drop | GiveUp | None:
        """The next segment to leave memory.

        Of the coldest session the newest segment, or a whole spared session.

        `among`: accounts, in the order in which they are asked. `is_due` says of a session in memory alone
        whether it is to be written anyway. `may_give`: see Resident. None when nothing may leave.
        """
        # No path can take these rows any more, so that keeping them back saves nothing.
        if self._kept_back and not self._devices.has_open_path:
            self._reconsider()
        segment = self._resident.take(lambda segment: self._may_leave(segment, is_due), may_give, among)
        if segment is None:
            return None
        if segment.is_unwritten and segment.home is not None:
            session = self._by_uid[segment.home.uid]
            leaf = self._leaving.leaf(session, lambda child: child.backlog is Backlog.SPARED)
            if leaf is not session:
                # A block that continues others cannot be found without its parent, so that the chain leaves
                # from its end.
                # It leaves after what continues it.
                self._resident.add(segment)
            return GiveUp(leaf)
        return Drop(segment)

    # -- moves out: what is to be written ------------------------------------------------------------

    @property
    def dirty_bytes(self) -> int:
        """Slots of segments that memory alone has."""
        return self._unwritten.dirty_bytes

    @property
    def due_bytes(self) -> int:
        """Slots of segments that memory alone has and that are to be written."""
        return self._unwritten.due_bytes

    @property
    def claimed_bytes(self) -> int:
        """Bytes that are due, reserved or promised to writers."""
        return self._unwritten.claimed_bytes

    @property
    def claimed_by(self) -> Mapping[str, int]:
        """The same by tenant, of those that have some."""
        return self._unwritten.claimed_by

    @property
    def unwritten_session_count(self) -> int:
        """Sessions with rows that memory alone has."""
        return len(self._unwritten)

    def oldest_unwritten_ns(self) -> int | None:
        """Since when rows are to be written, of the session that has had some for longest.

        None when there is none.
        """
        return self._unwritten.oldest_ns()

    def unwritten_segments(self, session: Session) -> Collection[Segment]:
        """A session's segments that memory alone has, in the order of their positions."""
        return self._unwritten.segments(session.uid)

    def unwritten_bytes(self, session: Session) -> int:
        """Slots of these."""
        return self._unwritten.size_bytes(session)

    def unwritten_sessions(self) -> list[Session]:
        """Sessions with rows that memory alone has, the best kept first."""
        uids = sorted(self._unwritten.uids(), key=lambda uid: self._feed.rank(uid) or (), reverse=True)
        return [self._by_uid[uid] for uid in uids]

    def coldest_to_write(
        self, accepts: Callable[[Session], bool], among: Sequence[str] | None
    ) -> Session | None:
        """The coldest session that is to be written, of these accounts, of those that `accepts` takes."""
        # By rank, not by age: the coldest session leaves memory next, once it is written.
        uid = self._unwritten.ranking.first(lambda uid: accepts(self._by_uid[uid]), among)
        return None if uid is None else self._by_uid[uid]

    def changed(self) -> list[Session]:
        """Sessions that may have got an unwritten segment that grows no more."""
        return list(self._unwritten.changed.values())

    def take_changed(self, session: Session) -> bool:
        """Look at one of `changed`: whether it has a segment to be written that grows no more.

        False for a session that waits for its use to end, which is told again, and one that was looked at.
        """
        if session.uid not in self._unwritten.changed or self._leaving.waits(session):
            return False
        del self._unwritten.changed[session.uid]
        return self._unwritten.has_full(session)

    def take_old(self, until_ns: int) -> Session | None:
        """The session that waits longest to be written, or to be looked at again, if since then or before."""
        uid = self._unwritten.take_oldest(until_ns) or self._unwritten.take_spared(until_ns)
        return None if uid is None else self._by_uid[uid]

    def take_oldest(self, now_ns: int) -> Session | None:
        """The session that waits longest to be written."""
        uid = self._unwritten.take_oldest(now_ns)
        return None if uid is None else self._by_uid[uid]

    def has_full(self, session: Session) -> bool:
        """Whether a session has a segment to be written that grows no more."""
        return self._unwritten.has_full(session)

    def taken(self, session: Session) -> None:
        """The session is being written, unasked."""
        self._unwritten.taken(session)

    def put_back(self, session: Session) -> None:
        """That write ended, well or not."""
        self._unwritten.put_back(session)

    def spares(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Leave an unwritten session as it is if it is not worth its place below; whether it is spared.

        `ahead_bytes` of what is free there are taken already.
        """
        if not self._leaving.refuses(session, ahead_bytes):
            self._unwritten.recall(session)
            return False
        # Spared rows may leave memory together with their session: each becomes a candidate.
        for segment in self._unwritten.segments(session.uid):
            self._resident.add(segment)
        self._unwritten.spare(session, self._clock.monotonic_ns())
        return True

    # -- moves out: who leaves the store -------------------------------------------------------------

    def next_from_memory(self, among: Sequence[str] | None) -> Session | None:
        """See Leaving.from_memory."""
        return self._leaving.from_memory(among)

    def next_from_below(
        self, for_session: Session, size_bytes: int, besides: Collection[int] = ()
    ) -> Session | None:
        """See Leaving.from_below."""
        return self._leaving.from_below(for_session, size_bytes, besides)

    def next_of_tenant(self, for_session: Session) -> Session | None:
        """See Leaving.of_tenant."""
        return self._leaving.of_tenant(for_session)

    def next_over_share(self, dirty: Session) -> Session | None:
        """See Leaving.over_share."""
        return self._leaving.over_share(dirty)

    # -- placement ---------------------------------------------------------------------------------

    @property
    def placement(self) -> Feed:
        """The feed of facts to the policy, and its ranks: hints, watchers, promotion ahead of need."""
        return self._feed

    # -- paths that are lost -----------------------------------------------------------------------

    def paths_lost(self, lost: Mapping[int, str]) -> bool:
        """These paths are lost, and no other; whether that is news.

        Sessions are reckoned at the next look.
        """
        if lost == self.lost:
            return False
        self.lost = lost
        # One number for all sessions. Each compares it at its next look, so that losing a path costs nothing
        # at once.
        self._reckoning += 1
        self._reconsider()
        return True

    def reckon(self, session: Session) -> None:
        """Show of the session what can be had.

        Takes a time that grows with its segments, once for each loss.
        """
        if session.reckoned == self._reckoning:
            return
        session.reckoned = self._reckoning
        # Negative where tokens came back: they are shown, and nobody is told of withheld ones.
        fewer_count = session.reckon(self.lost)
        if session.copies > 1:
            for segment in session.segments:
                self._count_copies(segment)
        if session.exposed_begin is None:
            self._exposed.pop(session.uid, None)
        else:
            self._exposed[session.uid] = session
        if not fewer_count:
            return
        self._note_withheld(session)
        # A restart is to know of its generation.
        self._touched[session.uid] = session
        if fewer_count > 0:
            self._wishes.tokens_withheld(session, fewer_count)
        self._feed.settled(session)
        self._feed.recounted(session)

    def reckon_again(self, segments: Iterable[Segment]) -> None:
        """Segments on a lost path left memory, or lie elsewhere now: their sessions are reckoned anew."""
        for segment in segments:
            for session in self.listers(segment):
                # -1 is no reckoning's number: the next look reckons, whatever the count is by then.
                session.reckoned = -1
                self._exposed[session.uid] = session

    def is_on_lost_path(self, segment: Segment) -> bool:
        """Whether what lies below of the segment cannot be had."""
        return bool(self.lost) and lies_on(segment, self.lost)

    def lost_paths_of(self, session: Session) -> list[str]:
        """The lost paths that have segments of the session."""
        on_lost = {slot.path_index for s in session.segments if lies_on(s, self.lost) for slot in s.places}
        return [self.lost[i] for i in sorted(on_lost)]

    def exposed(self) -> list[Session]:
        """Sessions of which memory has what lies on a lost path."""
        return list(self._exposed.values())

    def rescued(self, session: Session) -> None:
        """Segments of lost paths that memory had were written elsewhere, as far as possible."""
        if not session.is_gone:
            session.reckoned = -1
            self.reckon(session)

    @property
    def withheld(self) -> Mapping[bytes, int]:
        """Tokens that sessions do not show because paths are lost, by uid."""
        return self._withheld

    # -- parts -------------------------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        name = session.tenant, session.session_id
        if session.is_block:
            self._blocks.put(session)
            if session.parent_id:
                self._children.setdefault((session.tenant, session.parent_id), {})[session.uid] = session
        else:
            self._sessions[name] = session
            self._model_sessions[session.tenant, session.model_id] += 1
            # Sorted at insertion: pages of a listing are cut by bisection, with a million sessions.
            insort(self._names.setdefault(session.tenant, []), session.session_id)
            self._awake[session.uid] = self._looked_ns + self.sleep_ns
        self._by_uid[session.uid] = session
        for segment in session.segments:
            segment.list_in(session.residence)
        self._want_copies(session)

    def _forget_name(self, session: Session) -> None:
        name = session.tenant, session.session_id
        if not session.is_block:
            del self._sessions[name]
            self._model_sessions[session.tenant, session.model_id] -= 1
            names = self._names[session.tenant]
            del names[bisect_left(names, session.session_id)]
            return
        self._blocks.drop(session)
        if session.parent_id:
            parent = session.tenant, session.parent_id
            del self._children[parent][session.uid]
            if not self._children[parent]:
                del self._children[parent]

    def _continued_by(self, session: Session) -> Collection[Session]:
        """The blocks that name this one as what they continue."""
        return self._children.get((session.tenant, session.session_id), {}).values()

    def _index(self, session: Session) -> None:
        # A session without a segment has nothing to give and would be looked at in vain.
        if session.segments and not session.is_pinned:
            self._evictable.add(session.uid)
        for segment in session.segments:
            # Whether a segment may leave that others list is the same as before.
            if segment.reference_count == 1 and segment.memory:
                self._resident.add(segment)
        self._expiry.schedule(session.uid, session.expire_time_ns)
        # While a path is lost a new session may list segments on it, as a fork does. Else it is up to date.
        session.reckoned = -1 if self.lost else self._reckoning
        self.reckon(session)

    def _begin(self, session: Session, event: UseEvent, now_s: float) -> None:
        session.used(event)
        session.use_count += 1
        # Only the first of several uses is an arrival to the policy: parallel readers are one turn.
        self._feed.accessed(session, now_s, is_first=session.use_count == 1)

    def _end(self, session: Session, event: UseEvent, now_s: float) -> None:
        is_last = session.use_count == 1
        # In this order: the policy ranks the session anew before the session is idle and may leave.
        if is_last:
            self._feed.resting(session, now_s)
        session.used(UseEvent.LAST_ENDED if is_last else event)
        session.use_count -= 1
        if is_last:
            self._feed.rested(session)
        if session.backlog is not Backlog.DURABLE:
            # A session in use is passed over by write-behind, and is looked at again from here on.
            self._unwritten.tail_changed(session)

    def _visit(self, session: Session) -> None:
        now_s = self._now_s()
        self._begin(session, UseEvent.READ_BEGAN, now_s)
        self._end(session, UseEvent.READ_ENDED, now_s)

    def _press(self) -> None:
        """Let write-behind come at once where more is dirty than shall be; it comes now and then anyway."""
        due_bytes = self._unwritten.dirty_bytes - self._unwritten.spared_bytes
        if self.watermarks.excess_dirty_bytes(due_bytes, self.memory.capacity_bytes) > 0:
            self._wishes.write_wanted()

    def _unlist(self, session: Session, segments: Iterable[Segment]) -> list[Segment]:
        """The session lists these no more; returns those that no session lists."""
        dead, is_gone = [], session.is_gone
        for segment in segments:
            segment.unlist()
            if segment.reference_count:
                # It was made durable before it was shared, and goes on to be counted with the others.
                continue
            # A session that is gone has left `_unwritten` as a whole already.
            if not is_gone:
                self._unwritten.unlisted(session, segment)
            self._segments.pop(segment.segment_id, None)
            self.keyed.gone(segment)
            self._resident.discard(segment, session)
            # Plain segments with one copy are in neither set, and need no look.
            if segment.copies > 1 or segment.copy:
                self._count_copies(segment)
            dead.append(segment)
        session.residence.count_anew()
        self._note_withheld(session)
        # Its growing tail may be a closed segment by now.
        self._unwritten.tail_changed(session)
        return dead

    def _adopt(self, item: Flushed, event: SegmentEvent) -> tuple[Slot, ...]:
        """The slot that was taken for the rows becomes the segment's place; returns its places before."""
        segment = item.segment
        before = segment.flushed(event, item.places, item.row_count, item.header_checksum, item.values)
        if segment.copies > 1 or item.copy:
            self._count_copies(segment)
        return before

    def _want_copies(self, session: Session) -> None:
        """The session has come to list segments that may have fewer copies than its own shall have."""
        if session.copies > 1:
            for segment in session.segments:
                segment.wanted(session.copies)
                self._count_copies(segment)

    def _count_copies(self, segment: Segment) -> None:
        self.copies.count(segment, self.lost)

    def _empty(self, segment: Segment) -> None:
        """Give the slots of a segment without a record back, or as much as nothing uses."""
        # A reader past memory may hold it: memory is free now then, the slots below when the hold ends.
        if segment.hold_count:
            if self.is_clean(segment):
                self.dropped(segment)
            return
        memory, places = segment.emptied()
        # A slot that does not keep its bytes is given to no other segment.
        if memory and segment in self._spoiling:
            # Slots in memory are given to others by offset. A bad one keeps its bytes wrong for the next
            # owner too.
            self.memory.spoiled.add(memory)
        else:
            self.memory.give_back(memory)
        self._spoiling.discard(segment)
        self._kept_back.discard(segment)
        if memory:
            self._feed.dropped(segment)
        for slot in places:
            self.below.give_back(slot)
        self._wishes.segment_gone(segment)

    def _reconsider(self) -> None:
        kept_back, self._kept_back = self._kept_back, set()
        for segment in kept_back:
            self._resident.add(segment)

    def _left_memory(self, segment: Segment) -> None:
        self._feed.dropped(segment)
        if self.is_on_lost_path(segment):
            self.reckon_again([segment])

    def _may_leave(self, segment: Segment, is_due: Callable[[Session], bool]) -> bool:
        if self.is_clean(segment):
            return True
        if self.is_on_lost_path(segment):
            # Memory has the only copy that can be read: it waits until a path comes back, or none is left.
            self._kept_back.add(segment)
        # Segments of several forks are durable: a kin's that is not clean is held, or kept for a lost path.
        home = segment.home
        if not isinstance(home, Residence) or not self._is_spared(segment):
            return False
        session = self._by_uid[home.uid]
        may_leave = self._leaving.may_leave_spared(session, is_due)
        # The look found it worth writing. Memory is short, so that write-behind is to know at once.
        if session.backlog is not Backlog.SPARED:
            self._wishes.write_wanted()
        return may_leave

    def _is_spared(self, segment: Segment) -> bool:
        home = segment.counted_with
        session = self._by_uid.get(home.uid) if home else None
        return session is not None and session.backlog is Backlog.SPARED

    def _note_withheld(self, session: Session) -> None:
        if session.withheld:
            self._withheld[session.uid] = ranges.count(session.withheld)
        else:
            self._withheld.pop(session.uid, None)

    def _expire_time(self, uid: bytes) -> int | None:
        session = self._by_uid.get(uid)
        return session.expire_time_ns if session else None

    def _account(self, uid: bytes) -> str:
        session = self._by_uid.get(uid)
        return session.tenant if session else EVERYONE

    def _reclassed(self, session: Session) -> None:
        """A grant of the session came or went."""
        self._feed.fell(session)

    def _fell(self, session: Session, rank: Key | None, memory_rank: Key | None) -> None:
        """A session's ranks, which are these now, may be lower than they were."""
        self._resident.fell(session, memory_rank)
        self._evictable.fell(session.uid, rank)
        self._unwritten.fell(session.uid, rank)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / SECOND_NS

    # -- checks --------------------------------------------------------------------------------------

    # For tests: this walks everything, and is never called while serving.
    def faults(self) -> Iterator[str]:
        """Contradictions in the indices, one sentence each. Looks at everything."""
        if {*self._sessions.values(), *self._blocks} != set(self._by_uid.values()):
            yield "sessions and blocks by name and by uid differ"
        yield from self._faults_of_blocks()
        yield from self._faults_of_copies()
        listed = {(tenant, name) for tenant, names in self._names.items() for name in names}
        dormant = [(tenant, name) for tenant, names in self.dormant.names.items() for name in names]
        if not listed.issuperset(dormant) or len(dormant) != self.dormant.count:
            yield "dormant sessions are not those that have names"
        is_sorted = all(names == sorted(names) for names in self._names.values())
        if listed.difference(dormant) != set(self._sessions) or not is_sorted:
            yield "sessions and the list of their names differ"
        for session in self._by_uid.values():
            yield from self._faults_of(session)
        for segment in self._segments.values():
            yield from self._faults_of_segment(segment)
        rankings = (self._resident, self._evictable, self._unwritten.ranking, self._unwritten.spared)
        late = {uid for ranking in rankings for uid in ranking.overtaken()}
        # A session without a segment has nothing that could leave, and is placed nowhere.
        if any(uid not in self._by_uid or self._by_uid[uid].segments for uid in late):
            yield "sessions leave too late: the rankings were not told that their ranks fell"
        owners = self.keyed.index.owners()
        known = self._segments
        lost = (o for o in owners if o not in known and self.dormant.lister(o) is None)
        if not all(map(self.keyed.is_leaving, lost)):
            yield "segments that no session lists are found by keys"
        for session in self._feed.misplaced():
            yield f"{session.name} is taken to be in memory and is not"
        if any(not s.memory or s.place in (Place.HELD, Place.GONE) for s in self._feed.unread):
            yield "something promoted ahead of need is not there, and may still be used"

    def _faults_of_blocks(self) -> Iterator[str]:
        if any(session.is_block for session in self._sessions.values()):
            yield "a block is listed as a session"
        children = {(name, uid) for name, found in self._children.items() for uid in found}
        named = {((s.tenant, s.parent_id), s.uid) for s in self._blocks if s.parent_id}
        if children != named:
            yield "blocks, and what is known of which continues which, differ"

    def _faults_of_copies(self) -> Iterator[str]:
        for segment in self._segments.values():
            paths = {slot.path_index for slot in segment.places}
            if len(paths) < len(segment.places):
                yield f"segment {segment.segment_id}: both copies lie on one path"
            is_short = segment.copies > 1 and len(paths) == 1 and not paths & self.lost.keys()
            if is_short and segment not in self.copies.single:
                yield f"segment {segment.segment_id} would never get its second copy"
            if (segment.copies == 1 and len(paths) > 1) != (segment in self.copies.surplus):
                yield f"segment {segment.segment_id}: it is not known whether it has a copy too many"
        if not {*self.copies.single, *self.copies.surplus} <= set(self._segments.values()):
            yield "copies are wanted of segments that no session lists"

    def _faults_of(self, session: Session) -> Iterator[str]:
        if session.is_gone:
            yield f"{session.name} is gone and still known"
        clean = (
            segment
            for segment in session.segments
            if segment.memory
            and not (segment.is_unwritten or segment.hold_count or self.is_on_lost_path(segment))
        )
        if not all(map(self._resident.knows, clean)):
            yield f"{session.name} has segments in memory that would never leave"
        unwritten = [segment for segment in session.segments if segment.is_unwritten]
        if list(self._unwritten.segments(session.uid)) != unwritten:
            yield f"{session.name}: not all that is unwritten is known, or more is"
        is_behind = session.durable_end < session.log_end
        if (session.backlog is not Backlog.DURABLE) != is_behind:
            yield (
                f"{session.name}: durable up to {session.durable_end} of {session.log_end}, and"
                f" {session.backlog.value}"
            )
        is_looked_at = session.uid in self._unwritten.changed or session.backlog is Backlog.SPARED
        if self._unwritten.has_full(session) and not is_looked_at:
            yield f"{session.name} is unwritten and would never be looked at"
        if is_behind and not self._unwritten.is_queued(session):
            yield f"{session.name} is unwritten and would never become old"
        if session.backlog is Backlog.SPARED and (session.amounts().durable_bytes or session.recorded_end):
            yield f"{session.name} is spared, and something below has some of it"

    def _faults_of_segment(self, segment: Segment) -> Iterator[str]:
        expected = Place.UNWRITTEN if segment.is_unwritten else Place.BOTH if segment.memory else Place.BELOW
        if segment.place is not expected:
            yield f"segment {segment.segment_id} is {segment.place.value}, and should be {expected.value}"

    def is_spared(self, session: Session) -> bool:
        """Whether the session stays in memory alone for now."""
        return session.backlog is Backlog.SPARED
