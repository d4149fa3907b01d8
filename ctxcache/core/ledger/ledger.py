"""The ledger: where every segment and session is in its life, and every index over that.

Events come in: what was opened, read, committed, flushed, promoted, dropped, truncated, forked, ended. Moves
come out: which segment is to leave memory, which session the store, and what is to be written. `cache/`
carries the moves out. `places.py` has the tables of all steps. Nothing here waits or does I/O, and time is
what it is told.

Order that this rests on: bytes are durable before the record that points at them, and a record is gone before
its bytes are given back. A held segment keeps its slots.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from ctxcache.core.ledger.commons import Commons
from ctxcache.core.ledger.dormant import Dormant
from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.keyed import Keyed, holds
from ctxcache.core.ledger.leaving import Leaving
from ctxcache.core.ledger.lost_paths import LostPaths
from ctxcache.core.ledger.names import Names
from ctxcache.core.ledger.places import Backlog, Place, SegmentEvent, Use, UseEvent
from ctxcache.core.ledger.rankings import Evictable, Resident
from ctxcache.core.ledger.residence import Kin, Residence
from ctxcache.core.ledger.retaining import Retaining
from ctxcache.core.ledger.segment import Copies, Segment, Shelf
from ctxcache.core.ledger.session import (
    BEGIN,
    BLOCKS,
    GUESTS,
    NAMELESS_TTL_NS,
    Expiration,
    ExpiryQueue,
    Piece,
    Session,
    former_id,
)
from ctxcache.core.ledger.sleep import Sleep
from ctxcache.core.ledger.unwritten import Unwritten
from ctxcache.core.ledger.usage import Quotas, Usage
from ctxcache.core.ledger.work import current_work
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
"""Sessions that a search by key looks at for each segment: one that only others list is not found."""
SEGMENTS_LOOKED_AT = 8
"""Segments for which it does so, from the longest prefix on."""


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
        self.names = Names()
        """Sessions and blocks by name and by uid. To be looked at."""
        self._segments: dict[int, Segment] = {}
        self._last_segment_id = 0
        self.keyed = Keyed()
        """Which segments are found by their tokens."""
        self.expiry = ExpiryQueue()
        self._touched: dict[bytes, Session] = {}
        """Sessions whose last access no record has."""
        self.many_segments = MANY_SEGMENTS
        """From how many of its segments on a session is looked at to be joined. May be replaced."""
        self._lengthened: dict[bytes, Session] = {}
        """Sessions of many segments of which some have become full and durable."""
        self.copies = Copies()
        self._spoiling: set[Segment] = set()
        """Segments that leave a spoiled slot as soon as nothing uses it."""
        capacities = Capacities(memory.capacity_bytes, below.capacity_bytes)
        retaining = Retaining(self._now_s, self.names.by_uid, capacities, limits, shares, self._reclassed)
        # These are made in this order because each asks the one before: the feed knows ranks, the rankings
        # ask it, and `Leaving` asks both.
        self._feed = Feed(
            policy, clock.monotonic_ns, self.names.by_uid, self._fell, retaining, seen, wishes.prefetch_wanted
        )
        self.commons = Commons(
            self._feed,
            self.keyed,
            self.names.by_uid,
            lambda session: self.touched(session, clock.now_ns()),
        )
        """What sessions have in common. To be asked."""
        # Without shares all sessions are in one ranking, which is quicker than one for each of many tenants.
        account = self._account if shares else None
        self.resident = Resident(self._feed.memory_rank, self.names.by_uid, account)
        self.evictable = Evictable(self._feed.rank, account, self._let_coldest_in)
        self.unwritten = Unwritten(self._feed.rank, self.names.by_uid, account)
        """The sessions with rows that memory alone has."""
        self.lost = LostPaths(
            self.copies, self._feed, self.names.listers, wishes.tokens_withheld, self._touched
        )
        """The paths that cannot be had now, and what that withholds."""
        self.sleep = Sleep(
            clock,
            self.names,
            self._segments,
            self.usage,
            self._feed,
            self.evictable,
            self.lost,
            self._is_noted,
            self._forget_sleeper,
            partial(self._recall, is_watched=False),
        )
        """The sessions that nobody has used for long."""
        self.quotas = Quotas(
            self.usage, below.capacity_bytes, lambda: self.watermarks.filled_bytes(memory.capacity_bytes)
        )
        self.leaving = Leaving(
            self.names.by_uid.__getitem__,
            self._feed,
            self.commons,
            self.unwritten,
            # Called at each look, not bound once: paths close and open while the store runs.
            self.evictable,
            self.quotas,
            below,
            lambda: devices.closed_paths,
            self.names.continued_by,
        )
        """Which session leaves next. To be asked."""

    # -- look-ups ----------------------------------------------------------------------------------

    # A session that a method here returns is at work for its caller, see `Work`. A result "to be looked at"
    # is right for this turn of the event loop alone.
    def find(self, tenant: str, session_id: str) -> Session:
        """A tenant's session that has not expired. Raises SessionNotFound."""
        return self.find_at(tenant, session_id, self._clock.now_ns())

    def find_at(self, tenant: str, session_id: str, now_ns: int) -> Session:
        """As `find`, for a caller that has looked at the clock: `now_ns` in the store's time."""
        name = tenant, session_id
        session = self.names.sessions.get(name)
        if session is None:
            session = self.named(tenant, session_id)
        # Upkeep removes expired sessions some time later. Until then a look-up already takes them for gone.
        if session is None or session.has_expired(now_ns):
            raise SessionNotFound(session=f"sessions/{session_id}")
        # Paths were lost or came back: sessions pay for that when they are looked up, not all at once.
        self.lost.reckon(session)
        current_work().on(session)
        return session

    def check_expiry(self, session: Session) -> None:
        """Raise SessionNotFound once the session's time has come, whatever still keeps it in memory."""
        if session.has_expired(self._clock.now_ns()):
            raise SessionNotFound(session=session.name)

    def named(self, tenant: str, session_id: str) -> Session | None:
        """A tenant's session or block, expired or not."""
        return self._worked(self._known(tenant, session_id))

    def _known(self, tenant: str, session_id: str) -> Session | None:
        if session_id.startswith(BLOCKS):
            return self.names.blocks.named(tenant, session_id)
        session = self.names.sessions.get((tenant, session_id))
        if session is None and self.sleep.dormant.count:
            return self._woken(self.sleep.dormant.named(tenant, session_id))
        return session

    def _worked(self, session: Session | None) -> Session | None:
        """The session, which the caller is at work on from here on."""
        work = current_work()
        if session is not None:
            work.on(session)
        return session

    def glance(self, tenant: str, session_id: str) -> Session | None:
        """As `named`, to be looked at and no more. A dormant one stays so, and shows no segments."""
        dormant = self.sleep.dormant
        number = dormant.named(tenant, session_id)
        # Rows that can be had while a path is lost are reckoned for known sessions alone.
        if number is None or self.lost.paths:
            return self._known(tenant, session_id)
        session = dormant.revived(number, None)
        session.residence.add(0, 0, dormant.slot_bytes(number))
        self.lost.reckoned_elsewhere(session)
        return session

    def blocks_under(self, tenant: str, space: bytes, keys: Iterable[bytes]) -> list[Session | None]:
        """A tenant's blocks under these keys, expired or not, as they can be had now; None for the others."""
        blocks = self.names.blocks.under(tenant, space, keys)
        is_reckoned = self.lost.is_reckoned
        for block in blocks:
            if block is not None and not is_reckoned(block):
                self.lost.reckon(block)
        return blocks

    def get(self, uid: bytes) -> Session | None:
        """A session that is there."""
        session = self.names.by_uid.get(uid)
        if session is None and self.sleep.dormant.count:
            session = self._woken(self.sleep.dormant.with_uid(uid))
        return self._worked(session)

    @property
    def session_count(self) -> int:
        """How many sessions there are."""
        return len(self.names.sessions) + self.sleep.dormant.count

    @property
    def segment_count(self) -> int:
        """How many segments sessions list."""
        return len(self._segments) + self.sleep.dormant.segment_count

    def sessions(self) -> Collection[Session]:
        """Every session that is not dormant, to be looked at."""
        return self.names.sessions.values()

    def blocks(self) -> Collection[Session]:
        """Every block."""
        return self.names.blocks

    def listing(self) -> Collection[Session]:
        """Every session that is not dormant, and every block: all that list known segments.

        To be looked at.
        """
        return self.names.by_uid.values()

    def uids(self) -> list[bytes]:
        """The uids of every session."""
        dormant = self.sleep.dormant
        return [*(s.uid for s in self.names.sessions.values()), *map(dormant.uid, dormant)]

    def newest(self, limit: int) -> list[Session]:
        """At most so many sessions that are not dormant, the last made first. To be looked at."""
        return list(islice(reversed(self.names.sessions.values()), limit))

    def tenants(self) -> set[str]:
        """Tenants that had anything since the start, or have a configured share."""
        return {*self.usage.tenants(), *self.names.tenants()}

    def glance_at(self, segment_id: int) -> Segment | None:
        """As `segment`, to be looked at and no more. A dormant one stays so: it is made for this look."""
        dormant = self.sleep.dormant
        number = dormant.lister(segment_id)
        if number is None:
            return self._segments.get(segment_id)
        session = dormant.revived(number, Usage(NO_SHARES).of(dormant.tenant(number)))
        return next((s for s in session.segments if s.segment_id == segment_id), None)

    def segment(self, segment_id: int) -> Segment | None:
        """A segment that a session lists."""
        if segment_id not in self._segments:
            self._woken(self.sleep.dormant.lister(segment_id))
        segment = self._segments.get(segment_id)
        # Sessions that have kin do not sleep.
        if segment is not None and isinstance(segment.home, Residence):
            self._worked(self.names.by_uid.get(segment.home.uid))
        return segment

    def segments(self) -> Collection[Segment]:
        """Every segment that a session lists which is not dormant, to be looked at."""
        return self._segments.values()

    def holder(self, scope: Scope, keys: Sequence[bytes]) -> tuple[Session, int] | None:
        """A session that holds the tokens of the longest run of these keys, and how many keys that is.

        `keys` are of tokens that follow one another from the first on. None where there is none.
        """
        now_ns, looked_at = self._clock.now_ns(), 0
        for number, segment_id, row_count in self.keyed.longest(scope, keys):
            segment = self.segment(segment_id)
            assert segment is not None  # noqa: S101  # no key leads to what is gone
            if segment.begin + row_count != (number + 1) * BLOCK_TOKENS:
                # A key that was given for tokens at another place.
                continue
            looked_at += 1
            for uid in islice(self._likely_holders(segment), HOLDERS_LOOKED_AT):
                session = self.names.by_uid[uid]
                is_there = not session.has_expired(now_ns) and self._is_owned(session, now_ns)
                if is_there and holds(session, segment, row_count):
                    self.lost.reckon(session)
                    # Once more: the reckoning may have withheld some of its tokens.
                    if holds(session, segment, row_count):
                        current_work().on(session)
                        return session, number + 1
            # Thousands of sessions may list one system prompt: the look-up is bounded.
            if looked_at == SEGMENTS_LOOKED_AT:
                return None
        return None

    def _likely_holders(self, segment: Segment) -> Iterator[bytes]:
        """Sessions that may list a segment: one that did, and its kin from the last access on."""
        home = segment.home
        if isinstance(home, Kin):
            # The most likely to stay; then those that are the most likely to be in memory.
            if segment.lister_uid in self.names.by_uid:
                yield segment.lister_uid
            yield from reversed(home.uids)
        elif home is not None:
            yield home.uid

    def _is_owned(self, session: Session, now_ns: int) -> bool:
        """Whether the session is found by its tokens: a former rendering is while its owner is there."""
        if not session.is_former:
            return True
        # The owner's time may have come, and upkeep not yet.
        owner = self.glance(session.tenant, session.owner_id)
        return owner is not None and not owner.has_expired(now_ns)

    def with_formers(self, session: Session) -> list[Session]:
        """The session, and its former renderings by last use: they end in the same step."""
        if session.is_block or session.is_hidden:
            return [session]
        known = (self._known(session.tenant, one) for one in self.names.former_ids(session))
        formers = [former for former in known if former is not None]
        return [session, *sorted(formers, key=lambda former: former.access_time_ns)]

    # -- sessions come and go ----------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """The session was created, or forked: its segments are listed by it too."""
        # The caller has made the session, and goes on to change it.
        current_work().on(session)
        # The feed first: the indices ask for ranks, which a session without a standing does not have.
        self._add(session)
        self._feed.appeared(session)
        self._index(session)

    def recalled(self, session: Session, idle_s: float) -> None:
        """The session was there when the store was opened, and idle for that long; the oldest come first."""
        self._add(session)
        self._recall(session, idle_s, 1, is_watched=True)

    def slept_before(self, dormant: Dormant, models: Counter[tuple[str, str]]) -> None:
        """These were there as well, so many of each tenant's model, and are dormant from here on."""
        self.sleep.dormant = dormant
        self.names.dormant_at_start(dormant.names, models)
        for tenant, size_bytes in dormant.durable_bytes().items():
            self.usage.of(tenant).add(0, size_bytes, size_bytes)

    def _woken(self, number: int | None) -> Session | None:
        return None if number is None else self.sleep.wake(number)

    def _let_coldest_in(self, among: Sequence[str] | None) -> None:
        self.sleep.let_coldest_in(among)

    def _is_noted(self, session: Session) -> bool:
        """Whether something is to be done with the session, and an index has it for that."""
        uid = session.uid
        noted = self._touched, self._lengthened, self.unwritten.changed
        return any(uid in sessions for sessions in noted) or self.lost.is_exposed(session)

    def _forget_sleeper(self, session: Session) -> None:
        """The session fell asleep: no index of known sessions shows it."""
        self.commons.cut(session)
        self.evictable.discard(session.uid)
        self.expiry.forget(session.uid)
        self.resident.forget_session(session)

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

    def forked(self, source: Session, fork: Session, *, is_quiet: bool = False) -> None:
        """The fork, which is opened, shares the source's segments: both logs go on behind them.

        `is_quiet`: that is no use of the source.
        """
        # A visit and not a plain note: the policy is told of a use that began and ended, so that the source
        # ranks as used a moment ago.
        if not is_quiet:
            self._visit(source)
        # It may be in use, and go on in memory as kin to the new one.
        self._feed.settled(source)
        self._visit(fork)

    def replaced(
        self, old: Session, new: Session, source: Session, *, former_count: int | None = None
    ) -> tuple[list[Session], list[Segment]]:
        """`new`, which lists the source's segments, has the name and the place of `old` from here on.

        `former_count`: `old` becomes a former rendering, and so many at most stay, of those that have keys of
        tokens that `new` has not; None: `old` ends, and former renderings stay as they are. Returns the
        sessions that have ended, and the segments that no session lists any more.
        """
        current_work().on(new)
        gone = [old]
        if former_count is not None:
            owner, *formers = self.with_formers(old)
            kept = [former for former in (*formers, owner) if _has_more(former, new)]
            kept = kept[max(len(kept) - former_count, 0) :]
            gone = [former for former in (owner, *formers) if former not in kept]
        if old not in gone:
            # Its name is free before another session has it.
            self.names.rename(old, former_id(old.session_id, old.uid))
        # The feed first: it passes the standing of `old` on to `new`. Once `old` has ended, there is none.
        self._feed.replaced(old, new)
        if old not in gone:
            self._became_former(old)
        dead = [segment for each in gone for segment in self.ended(each)]
        self._add(new)
        # RECALLED, not a use: the session was there under its name, and upkeep must not make it look used.
        new.used(UseEvent.RECALLED)
        self._index(new)
        self._visit(source)
        # Both may be all in memory, as kin to each other.
        self._feed.settled(source)
        self._feed.settled(new)
        return gone, dead

    def _became_former(self, session: Session) -> None:
        """The session has given its name and its standing to another one."""
        ttl_ns = session.expiration.ttl_ns
        session.expiration = Expiration(min(NAMELESS_TTL_NS if ttl_ns is None else ttl_ns, NAMELESS_TTL_NS))
        session.touch(self._clock.now_ns())
        self.expiry.schedule(session.uid, session.expire_time_ns)
        self._feed.recalled(session, 0.0, 1, is_watched=False)
        self.pinned(session, is_pinned=False)
        self._feed.fell(session)

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
        self._feed.adopted(session)
        # Where the policy hears of prefixes, that is a use of the prefix and not of the session that has it.
        self.forked(source, session, is_quiet=self.commons.is_on)

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
                # Its kin may be thousands, of which it is the only one that lists this.
                segment.lister_uid = session.uid
                if segment.memory:
                    self.resident.add(segment)

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
        self.commons.cut(session)
        self._feed.recounted(session)
        return dead

    def left_behind(self, session: Session, token_count: int) -> list[Segment]:
        """The session gives way to others, but for its first tokens, which `commons` has said stay.

        It has no name and no label any more, and is found by its tokens, until an hour after their last use.
        Returns the segments that no session lists any more.
        """
        self.commons.leaving(session, token_count)
        self._feed.evicted(session)
        self.names.rename(session, GUESTS + session.uid.hex())
        # No command reaches it by a name or a label: it may not stay for longer than its user was promised.
        session.labels = ()
        own, used_ns = session.expiration, session.access_time_ns
        session.expiration = (
            Expiration(None, min(own.expire_time_ns, used_ns + NAMELESS_TTL_NS))
            if own.ttl_ns is None
            else Expiration(min(own.ttl_ns, NAMELESS_TTL_NS))
        )
        session.expire_time_ns = session.expiration.after_access(used_ns)
        self.expiry.schedule(session.uid, session.expire_time_ns)
        self.commons.stays(session, token_count)
        dead = self.truncated(session, ((0, token_count),))
        self._feed.fell(session)
        return dead

    def ended(self, session: Session, *, is_evicted: bool = False) -> list[Segment]:
        """The session is gone; returns the segments that no session lists any more.

        `is_evicted`: for others.
        """
        if is_evicted:
            # Before the end, which forgets the session: an eviction leaves a ghost that a return is counted
            # by.
            self.commons.leaving(session)
            self._feed.evicted(session)
        session.used(UseEvent.ENDED)
        uid = session.uid
        self.commons.cut(session)
        # From here on a client may make a session of that name, while this one's record is being removed.
        self.names.forget(session)
        self.busiest.forget(uid)
        self.sleep.ended(session)
        self._touched.pop(uid, None)
        self._lengthened.pop(uid, None)
        # Each index that could hand the session out again lets go of it, before its segments lose their home.
        self.unwritten.ended(session)
        self.evictable.discard(uid)
        self._feed.ended(session)
        self.expiry.forget(uid)
        # Last: the segments are unlisted while the session is known as gone, so that no index adds them
        # again.
        dead = self._unlist(session, session.segments)
        self.lost.forget(session)
        self.resident.forget_session(session)
        return dead

    # -- sessions are used -------------------------------------------------------------------------

    def touched(self, session: Session, now_ns: int) -> None:
        """Count an access at that time of the store; one behind a session's expiry changes nothing.

        Every access comes here, so that none revives a session that others were told is gone.
        """
        if session.has_expired(now_ns):
            return
        session.touch(now_ns)
        self.accesses_by_tenant[session.tenant] += 1
        # Earlier than before where an expiry was shortened.
        self.expiry.schedule(session.uid, session.expire_time_ns)
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
        session = self.names.by_uid.get(uid)
        if session is not None:
            self._end(session, UseEvent.READ_ENDED, now_s)

    def write_began(self, session: Session, now_s: float) -> None:
        """A writer has the session, `now_s` of the monotonic clock."""
        self._begin(session, UseEvent.WRITE_BEGAN, now_s)
        # The session grows, so that its worth is judged anew.
        if session.backlog is Backlog.SPARED:
            self.unwritten.recall(session)

    def write_ended(self, session: Session, now_s: float) -> None:
        """The writer is done. Does nothing where the session is gone."""
        if session.use is not Use.GONE:
            self._end(session, UseEvent.WRITE_ENDED, now_s)
            # Rows that were flushed under the writer may leave below from now on.
            self.evictable.add(session.uid)
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

    def renamed(self, session: Session, session_id: str) -> None:
        """A session has another id from here on, which is free."""
        self.names.rename(session, session_id)
        self._feed.renamed(session)

    def pinned(self, session: Session, *, is_pinned: bool) -> None:
        """The session may leave for others, or may not."""
        session.is_pinned = is_pinned
        self.evictable.add(session.uid)
        self.unwritten.tail_changed(session)

    # -- expiry, and accesses that no record has ----------------------------------------------------

    def due(self, now_ns: int, *, limit: int) -> list[Session]:
        """Sessions whose time has come, at most so many; each is told once."""
        for number in self.sleep.dormant.due(now_ns, limit):
            self.sleep.wake(number)
        return [self.names.by_uid[uid] for uid in self.expiry.due(now_ns, self._expire_time, limit=limit)]

    def still_due(self, session: Session, now_ns: int) -> None:
        """A session whose time has come could not be ended yet. The next look for due ones finds it."""
        if not session.is_gone:
            self.expiry.schedule(session.uid, now_ns)

    @property
    def unsaved_access_count(self) -> int:
        """How many sessions' last accesses no record has."""
        return len(self._touched)

    def unsaved_accesses(self, *, limit: int, part_limit: int) -> list[Session]:
        """Sessions whose last access no record has.

        At most so many, and about so many segments and streams of them.
        """
        work = current_work()
        # Records are made in one turn of the loop: their size bounds the turn, not only their number.
        some: list[Session] = []
        part_count = 0
        for session in islice(self._touched.values(), limit):
            some.append(session)
            work.on(session)
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
            return self.unwritten.committed(session, segment, now_ns) or segment.is_full
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
        self.evictable.add(session.uid)
        self.unwritten.settled(session, [item.segment for item in written], begun_ns)
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
        self.unwritten.settled(session, (), begun_ns)

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
        if self.lost.has(segment):
            self.lost.reckon_again([segment])

    def best_place(self, segment: Segment) -> Slot | None:
        """The slot below from which the segment is read: one that can be had, if there is one."""
        durable, copy = segment.durable, segment.copy
        if copy is None or durable is None or durable.path_index not in self.lost.paths:
            # Two copies, and the first is out of reach. If both are, the answer is the first: its read fails,
            # and says which path.
            return durable
        return durable if copy.path_index in self.lost.paths else copy

    def recount_copies(self, segment: Segment) -> bool:
        """Whether a segment still lacks a copy: its path may have come back."""
        self._count_copies(segment)
        return segment in self.copies.single

    def take_lengthened(self) -> list[Session]:
        """Sessions of many segments that got full ones since the last look."""
        found, self._lengthened = list(self._lengthened.values()), {}
        for session in found:
            current_work().on(session)
        return found

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
        sessions = self.names.listers(segment)
        segment.shortened(durable)
        self.keyed.shortened(segment)
        for session in sessions:
            self.unwritten.unlisted(session, segment)
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
        session = self.names.by_uid.get(home.uid) if home is not None else None
        is_spared = session is not None and session.backlog is Backlog.SPARED
        # Added again although it may be there: a ranking that passed over the segment took it out for good.
        if is_clean or is_spared or self.lost.has(segment):
            self.resident.add(segment)
        # A session that is written is added when its writer is done.
        if not segment.hold_count and session is not None and session.use is not Use.WRITTEN:
            self.evictable.add(session.uid)

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
        return not self.lost.has(segment) or not self._devices.has_open_path

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
        if self.lost.paths and not self._devices.has_open_path:
            self._reconsider()
        segment = self.resident.take(lambda segment: self._may_leave(segment, is_due), may_give, among)
        if segment is None:
            return None
        if segment.is_unwritten and segment.home is not None:
            session = self.names.by_uid[segment.home.uid]
            leaf = self.leaving.leaf(session, lambda child: child.backlog is Backlog.SPARED)
            if leaf is not session:
                # A block that continues others cannot be found without its parent, so that the chain leaves
                # from its end.
                # It leaves after what continues it.
                self.resident.add(segment)
            return GiveUp(leaf)
        return Drop(segment)

    # -- moves out: what is to be written ------------------------------------------------------------

    def take_changed(self, session: Session) -> bool:
        """Look at one of `changed`: whether it has a segment to be written that grows no more.

        False for a session that waits for its use to end, which is told again, and one that was looked at.
        """
        if session.uid not in self.unwritten.changed or self.leaving.waits(session):
            return False
        del self.unwritten.changed[session.uid]
        return self.unwritten.has_full(session)

    def spares(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Leave an unwritten session as it is if it is not worth its place below; whether it is spared.

        `ahead_bytes` of what is free there are taken already.
        """
        if not self.leaving.refuses(session, ahead_bytes):
            self.unwritten.recall(session)
            return False
        # Spared rows may leave memory together with their session: each becomes a candidate.
        for segment in self.unwritten.segments(session):
            self.resident.add(segment)
        self.unwritten.spare(session, self._clock.monotonic_ns())
        return True

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
        if not self.lost.changed(lost):
            return False
        self._reconsider()
        return True

    # -- parts -------------------------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        self.names.add(session)
        if not session.is_block:
            self.sleep.appeared(session)
        for segment in session.segments:
            segment.list_in(session.residence)
        self._want_copies(session)

    def _index(self, session: Session) -> None:
        # A session without a segment has nothing to give and would be looked at in vain.
        if session.segments and not session.is_pinned:
            self.evictable.add(session.uid)
        for segment in session.segments:
            # Whether a segment may leave that others list is the same as before.
            if segment.reference_count == 1 and segment.memory:
                self.resident.add(segment)
        self.expiry.schedule(session.uid, session.expire_time_ns)
        self.lost.begin(session)

    def _begin(self, session: Session, event: UseEvent, now_s: float) -> None:
        session.used(event)
        session.use_count += 1
        # Only the first of several uses is an arrival to the policy: parallel readers are one turn.
        self._feed.accessed(session, now_s, is_first=session.use_count == 1)

    def _end(self, session: Session, event: UseEvent, now_s: float) -> None:
        is_last = session.use_count == 1
        # In this order: the policy ranks the session anew before the session is idle and may leave.
        if is_last:
            self.commons.resting(session, now_s)
            self._feed.resting(session, now_s)
        session.used(UseEvent.LAST_ENDED if is_last else event)
        session.use_count -= 1
        if is_last:
            self._feed.rested(session)
        if session.backlog is not Backlog.DURABLE:
            # A session in use is passed over by write-behind, and is looked at again from here on.
            self.unwritten.tail_changed(session)

    def _visit(self, session: Session) -> None:
        now_s = self._now_s()
        self._begin(session, UseEvent.READ_BEGAN, now_s)
        self._end(session, UseEvent.READ_ENDED, now_s)

    def _press(self) -> None:
        """Let write-behind come at once where more is dirty than shall be; it comes now and then anyway."""
        due_bytes = self.unwritten.dirty_bytes - self.unwritten.spared_bytes
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
                self.unwritten.unlisted(session, segment)
            self._segments.pop(segment.segment_id, None)
            self.keyed.gone(segment)
            self.resident.discard(segment, session)
            # Plain segments with one copy are in neither set, and need no look.
            if segment.copies > 1 or segment.copy:
                self._count_copies(segment)
            dead.append(segment)
        session.residence.count_anew()
        self.lost.note_withheld(session)
        # Its growing tail may be a closed segment by now.
        self.unwritten.tail_changed(session)
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
        self.copies.count(segment, self.lost.paths)

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
        self.lost.emptied(segment)
        if memory:
            self._feed.dropped(segment)
        for slot in places:
            self.below.give_back(slot)
        self._wishes.segment_gone(segment)

    def _reconsider(self) -> None:
        for segment in self.lost.take_kept_back():
            self.resident.add(segment)

    def _left_memory(self, segment: Segment) -> None:
        self._feed.dropped(segment)
        if self.lost.has(segment):
            self.lost.reckon_again([segment])

    def _may_leave(self, segment: Segment, is_due: Callable[[Session], bool]) -> bool:
        if self.is_clean(segment):
            return True
        if self.lost.has(segment):
            # Memory has the only copy that can be read: it waits until a path comes back, or none is left.
            self.lost.keep_back(segment)
        # Segments of several forks are durable: a kin's that is not clean is held, or kept for a lost path.
        home = segment.home
        if not isinstance(home, Residence) or not self._is_spared(segment):
            return False
        session = self.names.by_uid[home.uid]
        may_leave = self.leaving.may_leave_spared(session, is_due)
        # The look found it worth writing. Memory is short, so that write-behind is to know at once.
        if session.backlog is not Backlog.SPARED:
            self._wishes.write_wanted()
        return may_leave

    def _is_spared(self, segment: Segment) -> bool:
        home = segment.counted_with
        session = self.names.by_uid.get(home.uid) if home else None
        return session is not None and session.backlog is Backlog.SPARED

    def _expire_time(self, uid: bytes) -> int | None:
        session = self.names.by_uid.get(uid)
        return session.expire_time_ns if session else None

    def _account(self, uid: bytes) -> str:
        session = self.names.by_uid.get(uid)
        return session.tenant if session else EVERYONE

    def _reclassed(self, session: Session) -> None:
        """A grant of the session came or went."""
        self._feed.fell(session)

    def _fell(self, session: Session, rank: Key | None, memory_rank: Key | None) -> None:
        """A session's ranks fell to these, or stayed."""
        self.resident.fell(session, memory_rank)
        self.evictable.fell(session.uid, rank)
        self.unwritten.fell(session.uid, rank)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / SECOND_NS


def _has_more(former: Session, new: Session) -> bool:
    """Whether a rendering is found by its tokens where a new one is not: the last key of it is its own."""
    keyed_count = former.whole_token_count // BLOCK_TOKENS * BLOCK_TOKENS
    if not keyed_count:
        return False
    [piece] = former.pieces(keyed_count - 1, keyed_count)
    return not holds(new, piece.segment, piece.row_end)
