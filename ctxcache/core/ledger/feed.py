"""Feed: tells the placement policy what happens to sessions, and the ledger how sessions rank.

A session is in use from its first access to the end of the last lease, stream or reservation on it; then it
rests, which is when a policy looks at it. A session in use ranks above every other. A policy knows sessions
by their names, so that a session that was evicted and is made anew is the same to it. Nothing here waits or
moves anything. Memory: an entry per session, and GHOSTS names of evicted ones.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ctxcache.core.ledger.places import Use
from ctxcache.core.ledger.residence import Kin
from ctxcache.core.ledger.retaining import Retaining
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, Session
from ctxcache.core.observations import Observations
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts, Level, Ranked

SECOND_NS = 10**9
# A policy's answer costs microseconds. Between two calls of `passed`, half a second, so many answers are
# asked for although the old ones may serve: a search among 100,000 sessions must not hold the event loop.
LOOKS = 1 << 10
"""Ranks that are looked up anew between two calls of `passed` though nothing happened to the sessions."""
GHOSTS = 1 << 17
"""Evicted sessions whose turns are remembered."""
IN_USE: Key = (math.inf,)


class Watcher(Protocol):
    """Hears what becomes of a session. Called on the event loop; must not wait."""

    def promoted(self, uid: bytes) -> None:
        """All of it is in memory now."""

    def demoted(self, uid: bytes) -> None:
        """Some of it is only below now."""

    def recounted(self, uid: bytes) -> None:
        """It shows another number of tokens: it was cut, or a device was lost or is back."""

    def evicted(self, uid: bytes) -> None:
        """It was given up for others. The last that is heard of it."""

    def ended(self, uid: bytes) -> None:
        """It has expired or was deleted. The last that is heard of it."""


class Ghost(NamedTuple):
    """The facts that are remembered of an evicted session. The time is of the monotonic clock."""

    turn_count: int = 0
    token_count: int = 0
    evict_time_s: float = 0.0


NOBODY = Ghost()


@dataclass(slots=True)
class Prefetched:
    """Segments promoted ahead of need since the start; of those, read since, and dropped unread.

    Late is what was read while it was still on its way: it counts as used too.
    """

    prefetched_segment_count: int = 0
    prefetch_used_segment_count: int = 0
    prefetch_unused_segment_count: int = 0
    prefetch_late_segment_count: int = 0


@dataclass(slots=True)
class Standing:
    """The policy's view of one session: facts told, and ranks returned."""

    session: Session
    name: bytes
    turn_count: int = 0
    rested_end: int = 0
    """Where its log ended when it last rested."""
    own_end: int = 0
    """Where its log ended when its last turn did, since it was made or known again."""
    adopted_end: int = 0
    """Where the tokens end that it adopted."""
    is_prefix: bool = False
    """Whether it is no session to the policy, but a prefix that sessions have in common: see Commons."""
    has_rested: bool = False
    coming_count: int = 0
    """Promotions ahead of need that are under way."""
    is_order_used: bool = False
    """Whether it was accessed since its job came."""
    is_leaving: bool = False
    """Something of it has left memory since it was last used.

    Half of it hastens no turn that waits for all.
    """
    has_fallen: bool = False
    """Its rank may be lower than at the last look, once it rests, and the rankings were not told."""
    is_queued: bool = False
    """Whether the policy takes a job of it to be waiting."""
    is_expected: bool = False
    """Whether the client said when it returns, and it has not since."""
    is_set_aside: bool = False
    """Not to be promoted ahead of need before its next hint or rest: that failed."""
    tier: Level | None = None
    rank: Key | None = None
    """As the policy last said; None where something has happened since."""
    heard_count: int = -1
    """How many events the policy had heard of when it said so."""
    order: float | None = None
    """When its next job starts, while one waits."""
    memory_since_s: float | None = None
    """Since when all of it is in memory, while it is."""

    @property
    # FRESH counts as in use: its first turn has not ended, and the policy has not heard of a rest.
    def is_in_use(self) -> bool:
        """Whether nothing of it leaves while others can."""
        return self.session.use is not Use.IDLE or self.coming_count > 0

    @property
    def is_turn_over(self) -> bool:
        """Whether it has got tokens since its last turn, and has not only adopted them."""
        return self.session.log_end > max(self.own_end, self.adopted_end)

    @property
    def is_begun(self) -> bool:
        """Whether it rests with what it adopted: its turn has added nothing yet, and goes on."""
        return self.has_rested and 0 < self.session.log_end <= self.adopted_end

    def recall(self, turn_count: int) -> Facts:
        """It was there when the store was opened, or dormant: all that it has came in its last turn."""
        self.turn_count, self.has_rested = turn_count, True
        self.rested_end = self.own_end = self.session.log_end
        return self._facts(self.session.log_end)

    def rest(self) -> Facts:
        """The session rests; a turn is over if something was appended."""
        session = self.session
        appended_count = session.log_end - self.rested_end
        # The rested end came from a ghost. The same name with fewer tokens is a new conversation.
        if appended_count < 0:
            # Made anew, and shorter than it was when it was evicted.
            appended_count = session.log_end
        self.has_rested, self.is_set_aside = True, False
        if self.is_begun:
            # What it adopted is a part of the input of the turn that goes on, and counts with it.
            return self._facts(appended_count)._replace(turn_count=self.turn_count + 1)
        # No more than was appended: the input may have begun in a turn before.
        answer_count = min(max(session.log_end - session.input_end, 0), appended_count)
        session.least_commit = 0
        # A rest without new tokens is a read: no turn.
        self.turn_count += appended_count > 0
        self.rested_end = self.own_end = session.log_end
        return self._facts(appended_count, answer_count)

    def facts(self) -> Facts:
        """It has another size, though nothing was appended."""
        return self._facts(0)

    def _facts(self, appended_count: int, answer_count: int = 0) -> Facts:
        layout = self.session.layout
        # Per token, of the whole slot: padding is paid for as well.
        token_bytes = layout.size_bytes / layout.segment_tokens
        size_bytes = self.session.size_bytes
        appended_bytes, answer_bytes = int(appended_count * token_bytes), int(answer_count * token_bytes)
        return Facts(size_bytes, self.turn_count, appended_bytes, token_bytes, answer_bytes)


class Feed:
    """The policy, and what it is told. Owned by the ledger."""

    def __init__(
        self,
        policy: Ranked,
        monotonic_ns: Callable[[], int],
        sessions: Mapping[bytes, Session],
        fallen: Callable[[Session, Key | None, Key | None], None],
        retaining: Retaining,
        seen: Observations,
        wanted: Callable[[], None],
    ) -> None:
        """`wanted` is called when a session may have come to be worth promoting ahead of need.

        `fallen` hears of sessions whose ranks may be lower than they were, and of their two ranks.
        """
        self.policy = policy
        self.retaining = retaining
        self._monotonic_ns = monotonic_ns
        self._sessions = sessions
        self._fallen = fallen
        self._seen = seen
        self._wanted = wanted
        self.standings: dict[bytes, Standing] = {}
        """How each session stands. To be looked at, not changed."""
        self._uids: dict[bytes, bytes] = {}
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self._kin_in_memory: dict[bytes, set[bytes]] = {}
        """Sessions that share segments and are all in memory, by their kin's uid."""
        self._watchers: dict[bytes, list[Watcher]] = {}
        self.unread: set[Segment] = set()
        """Segments promoted ahead of need, or being so, and not read since. To be looked at, not changed."""
        self.prefetched = Prefetched()
        self._looks_left = LOOKS
        self._heard_count = 0
        """Events that the policy was told of: as long as it hears of none, no rank changes."""
        policy.watch(self._fell_by_name)
        policy.passed(self._now_s())

    # -- ranks -------------------------------------------------------------------------------------

    def rank(self, uid: bytes) -> Key | None:
        """Where the session stands: the lowest leaves the store first. None for a session that is gone."""
        # In use: above all others, and the policy is not even asked. When the rest comes, `fell` tells the
        # rankings, for the rank falls from infinity.
        standing = self.standings.get(uid)
        if standing is not None and standing.session.use is not Use.IDLE:
            standing.has_fallen = True
            return IN_USE
        return self.ranks(uid)[0]

    def memory_rank(self, uid: bytes) -> Key | None:
        """As `rank`, for leaving memory: among equals a session that has begun to leave goes first."""
        return self.ranks(uid)[1]

    def ranks(self, uid: bytes) -> tuple[Key | None, Key | None]:
        """`rank` and `memory_rank`."""
        standing = self.standings.get(uid)
        if standing is None:
            return None, None
        is_in_use = standing.session.use is not Use.IDLE or standing.coming_count
        rank = None if is_in_use else self._policy_rank(standing)
        if rank is None:
            standing.has_fallen = True
            return IN_USE, IN_USE
        # Class first, then what left memory already, then the policy:
        #
        #     store     (class, policy's key ...)
        #     memory    (class, 0 if it has begun to leave else 1, policy's key ...)
        #
        # Half a session in memory hastens no turn that waits for all of it, so that what began to leave goes
        # on.
        retaining = self.retaining
        if uid not in retaining.retained and uid not in retaining.pinned:
            return (0, *rank), (0, not standing.is_leaving, *rank)
        return (
            (retaining.store_level(uid), *rank),
            (retaining.memory_level(uid), not standing.is_leaving, *rank),
        )

    def fell(self, session: Session) -> None:
        """A session's rank may be lower than it was."""
        self._fallen(session, *self.ranks(session.uid))

    def chance(self, uid: bytes) -> float:
        """How likely the session returns within what the policy learns; see Policy."""
        return self.policy.chance(self.standings[uid].name)

    def backed(self, session: Session) -> None:
        """A bucket has all of the session as it is now."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            self.policy.backed(standing.name)
            self._heard_count += 1

    def is_worth_wear(self, uid: bytes) -> bool:
        """Whether what the session's hits are expected to save is worth the wear of writing it below."""
        return self.policy.is_worth_wear(self.standings[uid].name)

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """Whether nothing of the session may leave memory for `fetched` to be promoted ahead of need."""
        standing = self.standings[uid]
        is_kept = standing.is_in_use or self.retaining.memory_level(uid) > 0
        return is_kept or self.policy.is_needed_soon(standing.name, self.standings[fetched].name)

    def passed(self) -> None:
        """Time passes. Called twice a second."""
        # Twice a second: sessions are looked up again although nothing happened, because policies know time.
        self._looks_left = LOOKS
        self.retaining.passed()
        self.policy.passed(self._now_s())
        self._heard_count += 1
        if self.policy.prefetch(self._may_come) is not None:
            self._wanted()

    # -- what happens to sessions ------------------------------------------------------------------

    def appeared(self, session: Session) -> None:
        """The session is created, as a turn of it begins."""
        standing = self._appear(session)
        self.policy.arrived(standing.name, self._now_s())
        self._heard_count += 1

    def recalled(self, session: Session, idle_s: float, turn_count: int, *, is_watched: bool) -> None:
        """The session was there when the store was opened, and idle for that long, or dormant. See Policy."""
        standing = self._appear(session)
        self.policy.recalled(standing.name, standing.recall(turn_count), idle_s, is_watched=is_watched)
        self._heard_count += 1
        self.settled(session)

    def slept(self, session: Session) -> tuple[float, int]:
        """The session, which nobody awaits, is dormant from here on; returns `recalled`'s two numbers."""
        standing = self.standings[session.uid]
        idle_s = self.policy.slept(standing.name)
        self._heard_count += 1
        self._forget(standing)
        return idle_s, standing.turn_count

    def is_awaited(self, uid: bytes) -> bool:
        """Whether a job of the session waits, or somebody hears of it or asked to keep it."""
        standing, retaining = self.standings[uid], self.retaining
        is_kept = uid in retaining.retained or uid in retaining.pinned
        return standing.order is not None or standing.coming_count > 0 or uid in self._watchers or is_kept

    def is_expected(self, uid: bytes) -> bool:
        """Whether the client said when the session returns, and it has not since."""
        return self.standings[uid].is_expected

    def replaced(self, old: Session, new: Session) -> None:
        """`new` has the name and tokens of `old`, which nobody awaits: to the policy it is the same."""
        standing = self.standings[old.uid]
        self._forget(standing)
        standing.session, standing.rested_end, standing.rank = new, new.log_end, None
        self.standings[new.uid] = standing
        self._uids[standing.name] = new.uid
        self.policy.resized(standing.name, standing.facts())
        self._heard_count += 1

    def renamed(self, session: Session) -> None:
        """The session has another name: to the policy the one has ended, and the other was there before.

        One that has lost its name goes on at another host: that is a return, though not one to this host.
        """
        before = self.standings[session.uid]
        if session.is_hidden:
            self.policy.continued(before.name)
        self.policy.ended(before.name)
        for watcher in self._forget(before):
            watcher.ended(session.uid)
        standing = self._appear(session)
        standing.coming_count = before.coming_count
        if session.use is Use.IDLE:
            facts = standing.recall(before.turn_count)
            self.policy.recalled(standing.name, facts, 0.0, is_watched=False)
        else:
            self.policy.arrived(standing.name, self._now_s())
        self._heard_count += 1
        self.settled(session)
        self.fell(session)

    def accessed(self, session: Session, now_s: float, *, is_first: bool) -> None:
        """An access begins; `is_first`: the session was idle until now."""
        standing = self.standings[session.uid]
        standing.is_leaving, standing.rank = False, None
        standing.is_expected = False
        if not is_first or standing.is_prefix:
            return
        if standing.is_begun:
            # One turn to the policy, and no return: as if it had not rested.
            self.policy.ended(standing.name)
            standing.has_rested, standing.tier = False, None
        self.policy.arrived(standing.name, now_s)
        self._heard_count += 1
        # The job that was announced has come. What it waits for is over.
        if standing.is_queued:
            standing.is_queued = False
            self.policy.withdrawn(standing.name)
            self._heard_count += 1
        standing.is_order_used = True
        kin = session.residence.kin
        if kin:
            kin.accessed(session.uid)
            # The shared segments rank as this session from now on, and may have ranked higher before.
            standing.has_fallen = True

    def resting(self, session: Session, now_s: float) -> None:
        """The last access is about to end: the policy hears of it while the session still ranks as in use."""
        standing = self.standings[session.uid]
        if standing.is_prefix:
            # Its uses are those of sessions that begin with it, and are told when these rest.
            self.settled(session)
            return
        facts = standing.rest()
        # A session that grew past its grant asks for more, or loses its class, before it is ranked.
        if self.retaining.retained or self.retaining.pinned:
            self.retaining.rested(session)
        # In this order: the policy hears the rest while the rank is still that of use. The session may leave
        # only when `rested` has told the rankings.
        self.policy.idle(standing.name, facts, now_s)
        self._heard_count += 1
        if standing.order is not None:
            # Not the job that waits has used it, but the turn before, or another engine's.
            standing.is_queued = True
            self.policy.hinted(standing.name, standing.order)
            self._heard_count += 1
        self.settled(session)

    def rested(self, session: Session) -> None:
        """The last access has ended: the session may leave for others, and may be wanted itself."""
        standing = self.standings[session.uid]
        # Once for each use, and not for each access of it: a rank that did not fall needs no word.
        if standing.has_fallen:
            standing.has_fallen = False
            self.fell(session)
        if self.policy.prefetch(self._may_come) is not None:
            self._wanted()

    def settled(self, session: Session) -> None:
        """Segments of the session came to memory: perhaps all that were missing."""
        standing = self.standings.get(session.uid)
        # A session that never rested was never placed: the policy has no facts of it.
        if standing is None or not standing.has_rested or not (session.segments or standing.tier):
            return
        tier = Level.MEMORY if session.is_in_memory else Level.BELOW
        # With kin even an unchanged tier is told: the kin may have changed, and what leaves with it.
        if tier is not standing.tier or session.residence.kin:
            self._place(standing, tier)

    def recounted(self, session: Session) -> None:
        """The session shows another number of tokens, though nothing was appended."""
        for watcher in tuple(self._watchers.get(session.uid, ())):
            watcher.recounted(session.uid)

    def dropped(self, segment: Segment) -> None:
        """The segment left memory."""
        # Promoted, never read, gone: a promotion that was in vain.
        if segment in self.unread:
            self.unread.discard(segment)
            self.prefetched.prefetch_unused_segment_count += 1
        home = segment.home
        if isinstance(home, Kin):
            # A session that does not list the segment is found to be in memory at the next look at it.
            for uid in self._kin_in_memory.pop(home.uid, ()):
                self._left_memory(uid)
        elif home is not None:
            self._left_memory(home.uid)
            self._leave(home.uid)

    def evicted(self, session: Session) -> None:
        """The session is given up for others; it may be made anew under its name."""
        standing = self.standings.get(session.uid)
        if standing is None:
            return
        # By name: the session may be made anew, and its turns count on. GHOSTS bounds what is remembered.
        if not standing.is_prefix:
            self._ghosts[standing.name] = Ghost(standing.turn_count, session.token_count, self._now_s())
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        # Evicted, not ended: the policy may learn from a return.
        self.policy.evicted(standing.name)
        self._heard_count += 1
        self.policy.withdrawn(standing.name)
        self._heard_count += 1
        for watcher in self._forget(standing):
            watcher.evicted(session.uid)

    def ended(self, session: Session) -> None:
        """The session was deleted or has expired."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            self.policy.ended(standing.name)
            self._heard_count += 1
            for watcher in self._forget(standing):
                watcher.ended(session.uid)

    # -- what they have in common ------------------------------------------------------------------

    def adopted(self, session: Session) -> None:
        """All that the session has it adopted, as its turn begins."""
        self.standings[session.uid].adopted_end = session.log_end

    def continued(self, name: bytes) -> None:
        """Another session went on where the one of that name ended."""
        self.policy.continued(name)
        self._heard_count += 1

    def prefix_used(self, name: bytes, facts: Facts, now_s: float, *, is_new: bool) -> None:
        """A turn began with the prefix of that name; `is_new`: no session kept it until now."""
        self.policy.arrived(name, now_s)
        self.policy.idle(name, facts, now_s)
        if is_new:
            self.policy.placed(name, Level.BELOW)
        self._heard_count += 1

    def prefix_left(self, name: bytes) -> None:
        """No session keeps the prefix any more."""
        self.policy.evicted(name)
        self._heard_count += 1

    def prefix_rank(self, name: bytes) -> Key | None:
        """Where a prefix stands that some session keeps, among the ranks of sessions."""
        rank = self.policy.rank(name)
        return None if rank is None else (0, *rank)

    def stays_as(self, session: Session, name: bytes) -> None:
        """The session, which was evicted, stays as the prefix of that name, whose rank it has from now on."""
        standing = Standing(session, name, is_prefix=True, has_rested=True)
        self.standings[session.uid] = standing
        self._uids[name] = session.uid
        self.settled(session)

    # -- what others say of them -------------------------------------------------------------------

    def hinted(self, session: Session, order: float) -> None:
        """A job of the session waits; it is expected to start at `order`, in monotonic seconds."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            # The access that used an earlier order does not use this one.
            standing.is_order_used = standing.is_order_used and standing.order is not None
            standing.is_set_aside, standing.order, standing.rank = False, order, None
            standing.is_queued = True
            # A policy's clock may stand half a second back, and orders are times.
            self.policy.passed(self._now_s())
            self._heard_count += 1
            self.policy.hinted(standing.name, order)
            self._heard_count += 1
            self._wanted()

    def withdrawn(self, session: Session) -> None:
        """The job waits no longer."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            standing.order = standing.rank = None
            standing.is_queued = False
            self.policy.withdrawn(standing.name)
            self._heard_count += 1

    def starting(self, session: Session) -> None:
        """The job runs.

        Its turn is the access since it came, or else the next, which takes it out of the queue.
        """
        standing = self.standings.get(session.uid)
        if standing is not None and standing.is_order_used:
            self.withdrawn(session)
        elif standing is not None:
            standing.order = None

    def expected(self, session: Session, return_s: float | None) -> None:
        """The client says when the session returns, in monotonic seconds; None: never."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            standing.rank = None
            standing.is_expected = return_s is not None
            self.policy.expected(standing.name, return_s)
            self._heard_count += 1

    @property
    def watched(self) -> Collection[bytes]:
        """The sessions that somebody hears of."""
        return self._watchers.keys()

    def watch(self, uid: bytes, watcher: Watcher) -> None:
        """Let `watcher` hear of a session that is there, until it is gone."""
        if uid in self.standings:
            self._watchers.setdefault(uid, []).append(watcher)

    def unwatch(self, uid: bytes, watcher: Watcher) -> None:
        """Undo one `watch`. Does nothing if it is over already."""
        watchers = self._watchers.get(uid, [])
        number = next((i for i, other in enumerate(watchers) if other is watcher), None)
        if number is not None:
            del watchers[number]
            if not watchers:
                del self._watchers[uid]

    # -- promotion ahead of need -------------------------------------------------------------------

    def next_ahead(self) -> Session | None:
        """The session that the policy wants in memory, of those that are neither in use nor on their way."""
        name = self.policy.prefetch(self._may_come)
        return None if name is None else self._sessions[self._uids[name]]

    def coming(self, session: Session) -> None:
        """The session is being promoted ahead of need: nothing of it leaves for others meanwhile."""
        standing = self.standings[session.uid]
        # Counted: two promotions of one session may be under way.
        standing.coming_count += 1
        standing.is_leaving = False
        if session.residence.kin:
            # The segments that it shares come for its sake, and stand where it stands.
            session.residence.kin.accessed(session.uid)

    def came(self, session: Session, *, is_set_aside: bool = False) -> None:
        """That is over; `is_set_aside`: it failed, and would again."""
        standing = self.standings.get(session.uid)
        if standing is not None:
            standing.coming_count -= 1
            standing.is_set_aside = is_set_aside
            self.settled(session)
            # It stood as in use, above all others, and falls back to its own rank.
            self.fell(session)

    def promoting(self, segment: Segment) -> None:
        """The segment is being promoted ahead of need."""
        self.unread.add(segment)

    def promoted(self, segment: Segment) -> None:
        """Its promotion ahead of need is over; it may have failed."""
        if segment.memory is None:
            self.unread.discard(segment)
        else:
            self.prefetched.prefetched_segment_count += 1

    def read(self, pieces: Iterable[Piece]) -> None:
        """These are read."""
        for piece in pieces:
            if piece.segment in self.unread:
                self.unread.discard(piece.segment)
                self.prefetched.prefetch_used_segment_count += 1
                # Not in memory yet: the promotion was begun, but too late to help this read.
                self.prefetched.prefetch_late_segment_count += piece.segment.memory is None

    def is_in_memory(self, session: Session) -> bool:
        """Whether all of it was in memory at the last look."""
        standing = self.standings.get(session.uid)
        return standing is not None and standing.tier is Level.MEMORY

    # -- parts -------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._monotonic_ns() / SECOND_NS

    def _appear(self, session: Session) -> Standing:
        # The name, not the uid: a session that comes back has another uid.
        name = f"{session.tenant}\0{session.session_id}".encode()
        ghost = self._ghosts.pop(name, NOBODY)
        standing = Standing(session, name, ghost.turn_count, ghost.token_count)
        self.standings[session.uid] = standing
        if ghost is not NOBODY:
            self._seen.regretted(ghost.token_count, self._now_s() - ghost.evict_time_s)
        self._uids[name] = session.uid
        return standing

    def _policy_rank(self, standing: Standing) -> Key | None:
        """The policy's rank, now or as last asked.

        All its ranks may rise at once, and a look at all must not wait.
        """
        # No event reached the policy since this rank was read, so it is still valid.
        if standing.rank is not None and standing.heard_count == self._heard_count:
            return standing.rank
        # Beyond LOOKS the last answer stands in. It may be half a second old, which is less than policies
        # tell apart.
        if standing.rank is None or self._looks_left > 0:
            self._looks_left -= standing.rank is not None
            standing.heard_count = self._heard_count
            standing.rank = self.policy.rank(standing.name)
        return standing.rank

    def _place(self, standing: Standing, tier: Level) -> None:
        session = standing.session
        kin = session.residence.kin
        # Entered even if the tier is the same: it may have become kin to others since.
        if kin and tier is Level.MEMORY:
            # Perhaps it has become kin to another one since it came there.
            self._kin_in_memory.setdefault(kin.uid, set()).add(session.uid)
        if standing.tier is tier:
            return
        before, standing.tier = standing.tier, tier
        self.policy.placed(standing.name, tier)
        self._heard_count += 1
        self._time_in_memory(standing)
        # The first placement is no move: nobody is told.
        if before is not None:
            for watcher in tuple(self._watchers.get(session.uid, ())):
                (watcher.promoted if tier is Level.MEMORY else watcher.demoted)(session.uid)

    def _time_in_memory(self, standing: Standing) -> None:
        if standing.tier is Level.MEMORY:
            standing.memory_since_s = self._now_s()
        elif standing.memory_since_s is not None:
            self._seen.memory_residence_s.observe(self._now_s() - standing.memory_since_s)
            standing.memory_since_s = None

    def _left_memory(self, uid: bytes) -> None:
        standing = self.standings.get(uid)
        if standing is not None and standing.tier is Level.MEMORY:
            self._place(standing, Level.BELOW)

    def _leave(self, uid: bytes) -> None:
        standing = self.standings.get(uid)
        if standing is not None and not standing.is_leaving:
            standing.is_leaving = True
            self.fell(standing.session)

    def _may_come(self, name: bytes) -> bool:
        uid = self._uids.get(name)
        standing = None if uid is None else self.standings[uid]
        return standing is not None and not (standing.is_in_use or standing.is_set_aside)

    def _fell_by_name(self, name: bytes) -> None:
        uid = self._uids.get(name)
        session = None if uid is None else self._sessions.get(uid)
        if session is not None:
            standing = self.standings[session.uid]
            standing.rank = None
            if standing.is_in_use:
                standing.has_fallen = True
            else:
                self.fell(session)

    def _forget(self, standing: Standing) -> Sequence[Watcher]:
        """Forget a session; returns the watchers that are to hear of it for the last time."""
        session = standing.session
        del self.standings[session.uid]
        self.retaining.release(session.uid)
        # The name may be another session's by now.
        if self._uids.get(standing.name) == session.uid:
            del self._uids[standing.name]
        kin = session.residence.kin
        if kin and kin.uid in self._kin_in_memory:
            self._kin_in_memory[kin.uid].discard(session.uid)
            if not self._kin_in_memory[kin.uid]:
                del self._kin_in_memory[kin.uid]
        return self._watchers.pop(session.uid, ())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session, for checks."""
        return not (self.standings or self._uids or self._kin_in_memory or self._watchers or self.unread)

    def misplaced(self) -> Iterator[Session]:
        """Sessions taken to be in memory that are not. Looks at all, for checks."""
        for standing in self.standings.values():
            if standing.tier is Level.MEMORY and not all(s.memory for s in standing.session.shown):
                yield standing.session
