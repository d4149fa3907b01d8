"""Placement: tells the policy what happens to sessions, and the cache how they rank.

A session is in use from its first access to the end of the last lease, stream or reservation on it; then it
rests, which is when a policy looks at it. Whoever is in use ranks above everyone else. A policy knows sessions
by their names, so that one that was evicted and is made anew is the same to it. Neither waits nor moves
anything. Memory: an entry per session, and GHOSTS names of evicted ones.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from ctxcache.cache.ahead import Ahead
from ctxcache.cache.known import NOBODY, Ghost, Known
from ctxcache.cache.retaining import Retaining
from ctxcache.cache.watchers import Watcher, Watchers
from ctxcache.clock import Clock
from ctxcache.core.observations import Observations
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Tier
from ctxcache.core.placement.ranked import Ranked
from ctxcache.core.residence import Kin
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session

LOOKS = 1 << 10
"""Ranks that are looked up anew between two calls of `passed` though nothing happened to the sessions."""
GHOSTS = 1 << 17
"""Evicted sessions whose turns are remembered."""
IN_USE: Key = (math.inf,)
SECOND_NS = 10**9


class Placement:
    """The policy, and what it is told. Owned by the event loop."""

    def __init__(
        self, policy: Ranked, clock: Clock, by_uid: Mapping[bytes, Session],
        fallen: Callable[[Session], None], retention: Retaining, seen: Observations,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.retention = retention
        self.is_wanted = asyncio.Event()
        """Set when somebody may have come to be worth promoting ahead of need, or may have become so easily."""
        self._clock = clock
        self._by_uid = by_uid
        self._fallen = fallen
        self._seen = seen
        self._known: dict[bytes, Known] = {}
        self._uids: dict[bytes, bytes] = {}
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self._kin_in_dram: dict[bytes, set[bytes]] = {}
        """Sessions that share segments and are all in DRAM, by their kin's uid."""
        self._watchers = Watchers()
        self._ahead = Ahead()
        self.prefetched = self._ahead.counts
        self.promoting = self._ahead.promoting
        self.promoted = self._ahead.promoted
        self.used = self._ahead.used
        self._looks_left = LOOKS
        policy.watch(self._fell_by_name)
        policy.passed(self._now_s())

    # -- ranks -------------------------------------------------------------------------------------

    def rank(self, uid: bytes) -> Key | None:
        """Where the session stands: the lowest leaves the store first. None for one that is gone."""
        return self.ranks(uid)[0]

    def dram_rank(self, uid: bytes) -> Key | None:
        """As `rank`, where it is about leaving DRAM: of equal level first whoever has begun to."""
        return self.ranks(uid)[1]

    def ranks(self, uid: bytes) -> tuple[Key | None, Key | None]:
        """`rank` and `dram_rank`."""
        known = self._known.get(uid)
        if known is None:
            return None, None
        rank = None if known.is_in_use else self._policy_rank(known)
        if rank is None:
            known.has_fallen = True
            return IN_USE, IN_USE
        retention = self.retention
        return (retention.store_level(uid), *rank), (retention.dram_level(uid), not known.is_leaving, *rank)

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """Whether nothing of the session may leave DRAM for `fetched` to be promoted ahead of need."""
        known = self._known[uid]
        is_kept = known.is_in_use or self.retention.dram_level(uid) > 0
        return is_kept or self.policy.is_needed_soon(known.name, self._known[fetched].name)

    def passed(self) -> None:
        """Time passes. Called twice a second."""
        self._looks_left = LOOKS
        self.retention.passed()
        self.policy.passed(self._now_s())

    def use_counts(self) -> Mapping[bytes, int]:
        """How many accesses each session has open."""
        return {uid: known.use_count for uid, known in self._known.items()}

    @property
    def unread_count(self) -> int:
        """Segments promoted ahead of need, or being so, and not read since."""
        return len(self._ahead)

    def unread(self) -> Iterable[Segment]:
        """Segments promoted ahead of need, or being so, and not read since."""
        return self._ahead

    # -- what happens to sessions ------------------------------------------------------------------

    def appeared(self, session: Session) -> None:
        """The session is created, as a turn of it begins; it is in use, in a way, until it first rests."""
        self._appear(session)
        self.policy.arrived(self._known[session.uid].name, self._now_s())

    def _appear(self, session: Session) -> None:
        name = f"{session.tenant}\0{session.session_id}".encode()
        ghost = self._ghosts.pop(name, NOBODY)
        self._known[session.uid] = Known(name, ghost.turn_count, ghost.token_count)
        if ghost is not NOBODY:
            self._seen.regretted(ghost.token_count, self._now_s() - ghost.evict_time_s)
        self._uids[name] = session.uid

    def recalled(self, session: Session, idle_s: float) -> None:
        """The session was there when the store was opened, and idle for that long; the oldest come first."""
        self._appear(session)
        known = self._known[session.uid]
        self.policy.recalled(known.name, known.recall(session), idle_s)
        # Until now in use, in a way: of a session that nobody has looked at yet nobody needs to be told.
        known.has_rested = True
        self.settled(session)

    def accessed(self, session: Session) -> None:
        """An access begins, which `rested` ends."""
        known = self._known[session.uid]
        known.use_count += 1
        known.is_leaving, known.rank = False, None
        if known.use_count == 1:
            self.policy.arrived(known.name, self._now_s())
            self.policy.withdrawn(known.name)
            known.is_order_used = True
            kin = session.residence.kin
            if kin:
                kin.accessed(session.uid)
                # What they share ranks as this one from now on, and may have ranked higher.
                known.has_fallen = True

    def rested(self, session: Session) -> None:
        """An access is over. Of one that is gone nothing is said."""
        known = self._known.get(session.uid)
        if known is None:
            return
        if known.use_count == 1:
            self._rest(session, known)
        else:
            known.use_count -= 1

    def visited(self, session: Session) -> None:
        """An access that is over at once."""
        self.accessed(session)
        self.rested(session)

    def settled(self, session: Session) -> None:
        """Segments of the session came to DRAM: perhaps all that were missing."""
        known = self._known.get(session.uid)
        if known is None or not known.has_rested or not (session.segments or known.tier):
            return
        self._place(session, known, Tier.DRAM if session.is_in_dram else Tier.SSD)

    def dropped(self, segment: Segment) -> None:
        """The segment left DRAM."""
        self._ahead.dropped(segment)
        home = segment.home
        if isinstance(home, Kin):
            # Who does not list it is found to be in DRAM when it is next looked at.
            for uid in self._kin_in_dram.pop(home.uid, ()):
                self._left_dram(uid)
        elif home is not None:
            self._left_dram(home.uid)
            self._leave(home.uid)

    def evicted(self, session: Session) -> None:
        """The session is given up for others; it may be made anew under its name."""
        known = self._known.get(session.uid)
        if known is None:
            return
        self._ghosts[known.name] = Ghost(known.turn_count, session.token_count, self._now_s())
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        self.policy.evicted(known.name)
        self.policy.withdrawn(known.name)
        for watcher in self._forget(session, known):
            watcher.evicted(session.uid)

    def ended(self, session: Session) -> None:
        """The session was deleted or has expired."""
        known = self._known.get(session.uid)
        if known is not None:
            self.policy.ended(known.name)
            for watcher in self._forget(session, known):
                watcher.ended(session.uid)

    # -- what others say of them -------------------------------------------------------------------

    def hinted(self, session: Session, order: float) -> None:
        """A job of the session waits; it is expected to start at `order`, in monotonic seconds."""
        known = self._known.get(session.uid)
        if known is not None:
            known.is_order_used = known.is_order_used and known.order is not None
            known.is_set_aside, known.order, known.rank = False, order, None
            self.policy.passed(self._now_s())
            self.policy.hinted(known.name, order)
            self.is_wanted.set()

    def withdrawn(self, session: Session) -> None:
        """The job waits no longer."""
        known = self._known.get(session.uid)
        if known is not None:
            known.order = known.rank = None
            self.policy.withdrawn(known.name)

    def starting(self, session: Session) -> None:
        """The job runs: its turn is the access since it came, or else the next, which takes it out of the queue."""
        known = self._known.get(session.uid)
        if known is not None and known.is_order_used:
            self.withdrawn(session)
        elif known is not None:
            known.order = None

    def expected(self, session: Session, return_s: float | None) -> None:
        """The client says when the session returns, in monotonic seconds; None: never."""
        known = self._known.get(session.uid)
        if known is not None:
            known.rank = None
            self.policy.expected(known.name, return_s)

    def watch(self, uid: bytes, watcher: Watcher) -> None:
        """Let `watcher` hear of a session that is there, until it is gone."""
        if uid in self._known:
            self._watchers.add(uid, watcher)

    def unwatch(self, uid: bytes, watcher: Watcher) -> None:
        """Take back one `watch`; one that is over is none."""
        self._watchers.discard(uid, watcher)

    # -- promotion ahead of need -------------------------------------------------------------------

    def next_ahead(self) -> Session | None:
        """Whom the policy wants in DRAM, of those that are neither in use nor on their way."""
        name = self.policy.prefetch(self._may_come)
        return None if name is None else self._by_uid[self._uids[name]]

    def coming(self, session: Session) -> None:
        """The session is being promoted ahead of need: nothing of it leaves for others meanwhile."""
        known = self._known[session.uid]
        known.coming_count += 1
        known.is_leaving = False
        if session.residence.kin:
            # What it shares comes for its sake, and stands where it stands.
            session.residence.kin.accessed(session.uid)

    def came(self, session: Session, *, is_set_aside: bool = False) -> None:
        """That is over; `is_set_aside`: it failed, and would again."""
        known = self._known.get(session.uid)
        if known is not None:
            known.coming_count -= 1
            known.is_set_aside = is_set_aside
            self.settled(session)
            self._fallen(session)

    def is_idle(self, session: Session) -> bool:
        """Whether the session is there, and nobody uses it."""
        known = self._known.get(session.uid)
        return known is not None and not known.use_count

    def is_in_dram(self, session: Session) -> bool:
        """Whether all of it was in DRAM when it was last looked at."""
        known = self._known.get(session.uid)
        return known is not None and known.tier is Tier.DRAM

    # -- parts -------------------------------------------------------------------------------------

    def _policy_rank(self, known: Known) -> Key | None:
        """What the policy says, or said: all its ranks may rise at once, and who looks at all must not wait."""
        if known.rank is None or self._looks_left > 0:
            self._looks_left -= known.rank is not None
            known.rank = self.policy.rank(known.name)
        return known.rank

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / SECOND_NS

    def _rest(self, session: Session, known: Known) -> None:
        facts = known.rest(session)
        self.retention.rested(session)
        # In use until the policy has heard of it: that its rank falls is told once, at the end.
        self.policy.idle(known.name, facts, self._now_s())
        if known.order is not None:
            # Not the job that waits has used it, but the turn before, or another engine's.
            self.policy.hinted(known.name, known.order)
        self.settled(session)
        known.use_count = 0
        if known.has_fallen:
            known.has_fallen = False
            self._fallen(session)
        # What has just become idle may leave for others, and may be wanted itself.
        if self.policy.prefetch(self._may_come) is not None:
            self.is_wanted.set()

    def _place(self, session: Session, known: Known, tier: Tier) -> None:
        kin = session.residence.kin
        if kin and tier is Tier.DRAM:
            # Perhaps it has become kin to somebody since it came there.
            self._kin_in_dram.setdefault(kin.uid, set()).add(session.uid)
        if known.tier is tier:
            return
        before, known.tier = known.tier, tier
        self.policy.placed(known.name, tier)
        self._time_in_dram(known)
        if before is not None:
            for watcher in self._watchers.of(session.uid):
                (watcher.promoted if tier is Tier.DRAM else watcher.demoted)(session.uid)

    def _time_in_dram(self, known: Known) -> None:
        if known.tier is Tier.DRAM:
            known.dram_since_s = self._now_s()
        elif known.dram_since_s is not None:
            self._seen.dram_residence_s.observe(self._now_s() - known.dram_since_s)
            known.dram_since_s = None

    def _left_dram(self, uid: bytes) -> None:
        known = self._known.get(uid)
        if known is not None and known.tier is Tier.DRAM:
            self._place(self._by_uid[uid], known, Tier.SSD)

    def _leave(self, uid: bytes) -> None:
        known = self._known.get(uid)
        if known is not None and not known.is_leaving:
            known.is_leaving = True
            self._fallen(self._by_uid[uid])

    def _may_come(self, name: bytes) -> bool:
        uid = self._uids.get(name)
        known = None if uid is None else self._known[uid]
        return known is not None and not (known.is_in_use or known.is_set_aside)

    def _fell_by_name(self, name: bytes) -> None:
        uid = self._uids.get(name)
        session = None if uid is None else self._by_uid.get(uid)
        if session is not None:
            known = self._known[session.uid]
            known.rank = None
            if known.is_in_use:
                known.has_fallen = True
            else:
                self._fallen(session)

    def _forget(self, session: Session, known: Known) -> Iterable[Watcher]:
        """Forget a session; returns who is to hear of it for the last time."""
        del self._known[session.uid]
        self.retention.release(session.uid)
        if self._uids.get(known.name) == session.uid:
            del self._uids[known.name]
        kin = session.residence.kin
        if kin and kin.uid in self._kin_in_dram:
            self._kin_in_dram[kin.uid].discard(session.uid)
            if not self._kin_in_dram[kin.uid]:
                del self._kin_in_dram[kin.uid]
        return self._watchers.take(session.uid)
