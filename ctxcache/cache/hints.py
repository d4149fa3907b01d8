"""Hints: what a client says of a session's future, carried out as far as room and budgets allow.

No hint changes what a session is. Nothing here fails: what cannot be done is answered with a reason. A
promotion for which there is no room is deferred: it stands in the merged queue as if a job of the session
were about to start. Worst case: a hint waits for a flush, or some seconds for the promotion that it asked
for.
"""

import asyncio
import enum
from contextlib import suppress
from dataclasses import dataclass

from ctxcache.cache.flushing import Flushing
from ctxcache.cache.promotion import Prefetching
from ctxcache.cache.queues import Queue, Queues, missing_bytes
from ctxcache.cache.state import Call, Fact, State
from ctxcache.core import ranges
from ctxcache.core.history import Event
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Keyed
from ctxcache.core.placement.policy import Policy
from ctxcache.core.placement.schedule import Job
from ctxcache.errors import CacheError, SessionNotFound, TooManyRequests, WriteInProgress

NOBODY = ""
"""Stands for whoever gives hints without a queue: no engine has that name."""


class _Waiting(Queue):
    """The deferred hints of one tenant's sessions."""

    def __init__(self, tenant: str, deferred: "Deferred") -> None:
        super().__init__(tenant, NOBODY)
        self._deferred = deferred

    def promoted(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def demoted(self, uid: bytes) -> None:
        """See Watcher."""

    def evicted(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def ended(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def ask(self, uid: bytes) -> None:
        """Does nothing: nothing follows from hints here."""


# A deferred promotion is a job in the merged queue, of an engine that has no name:
#
#     hint ──► no room ──► a job that waits, due now ──► promoted, evicted, ended or too late ──► gone
#
# So it competes with engines' jobs by one order, and no second list of wishes is looked at.
class Deferred:
    """Promotions that wait for room, until a time of their own. Owned by the event loop."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._waiting: dict[str, _Waiting] = {}
        self._asked: dict[bytes, tuple[int, _Waiting]] = {}
        """Until when, and where, by session."""
        self._due = Keyed()

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, session: Session, now_ns: int, until_ns: int, priority: int) -> None:
        """Let the session come when there is room. Raises TooManyRequests where as many wait as may."""
        # Made for the first hint of a tenant, and gone with its last one.
        waiting = self._waiting.get(session.tenant) or _Waiting(session.tenant, self)
        job_id = session.uid.hex()
        self._queues.check_room(waiting, {job_id}, frozenset())
        self._waiting[session.tenant] = waiting
        self._asked[session.uid] = until_ns, waiting
        self._due.put(session.uid, (until_ns,))
        # Due now: it stands before all that is expected later.
        job = Job(job_id, None, start_s=now_ns / 10**9, priority=priority)
        self._queues.put(waiting, session.session_id, job)

    def discard(self, uid: bytes) -> None:
        """The session need not come any more, or is gone."""
        _, waiting = self._asked.pop(uid, (0, None))
        if waiting is not None:
            self._due.discard(uid)
            self._queues.gone(waiting, uid.hex(), is_started=False)
            if not self._queues.job_count(waiting):
                self._queues.forget(waiting)
                del self._waiting[waiting.tenant]

    def drop_overdue(self, now_ns: int) -> None:
        """Give up those whose time is over."""
        # By time, the earliest first: the look costs what is due.
        while (uid := self._due.first()) is not None and self._asked[uid][0] <= now_ns:
            self.discard(uid)


SECOND_NS = 10**9
BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
NO_ROOM = "NO_ROOM"
IN_USE = "IN_USE"
RANGE_NOT_SUPPORTED = "RANGE_NOT_SUPPORTED"
TTL_LIMIT = "TTL_LIMIT"
PATIENCE_S = 5.0
"""How long a caller waits for all the promotions that it asked for; what has not come then is deferred."""
DEFERRED_LIMIT_NS = 600 * SECOND_NS
"""Longest time that a promotion waits for room: it stands before every queue."""


class Action(enum.Enum):
    """The request of a hint."""

    SHARE = "share"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    PIN = "pin"
    RETAIN = "retain"
    EXPECT = "expect"
    RELEASE = "release"
    AHEAD = "ahead"


class HintVerdict(enum.Enum):
    """The outcome of a hint, by its name."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class AheadTokens:
    """Tokens that an engine computed ahead; those that turns began with, and those that none will."""

    computed_count: int = 0
    used_count: int = 0
    wasted_count: int = 0


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint, validated. `end` of the token range that begins at 0, None for all; times are spans."""

    tenant: str
    session_id: str
    action: Action
    begin: int = 0
    end: int | None = None
    ttl_ns: int = 0
    priority: int = 0
    budget_bytes: int | None = None
    return_in_ns: int | None = None
    """When an expected session returns; None: it does not return."""
    ahead: AheadTokens = AheadTokens()


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """The outcome of a hint.

    `until_ns`, monotonic: when what was granted ends; None for what does not last.
    """

    outcome: HintVerdict
    reason: str = ""
    granted_bytes: int = 0
    until_ns: int | None = None


class Hints:
    """Carries out hints. Owned by the event loop."""

    def __init__(self, state: State, flushing: Flushing, prefetching: Prefetching, queues: Queues) -> None:
        self._state = state
        self._ledger = state.ledger
        self._flushing, self._prefetching = flushing, prefetching
        self.deferred = Deferred(queues)

    def drop_overdue(self) -> None:
        """Give up what was deferred for long enough."""
        self.deferred.drop_overdue(self._state.clock.monotonic_ns())

    async def carry_out(self, hint: Hint, deadline_s: float) -> HintAnswer:
        """Do what one hint asks for, as far as it goes; a promotion until then, on the event loop's clock."""
        if hint.action is Action.AHEAD:
            return self._count(hint)
        try:
            session = self._ledger.find(hint.tenant, hint.session_id)
            # A range error is the hint's fault, not the session's.
            session.check_range(hint.begin, session.token_count if hint.end is None else hint.end)
            self._state.journal.did(Call.HINT, session, **_facts(hint))
            return await self._do(hint, session, deadline_s)
        except SessionNotFound as error:
            return HintAnswer(HintVerdict.MISSING, error.reason)
        except CacheError as error:
            return HintAnswer(HintVerdict.REJECTED, error.reason)

    async def _do(self, hint: Hint, session: Session, deadline_s: float) -> HintAnswer:
        # A retained or demoted session leaves whole, so that those hints are for whole sessions. Only a
        # prefix can be shared or fetched by itself.
        is_whole = hint.begin == 0 and hint.end in (None, session.token_count)
        is_prefix = hint.begin == 0 and hint.action in (Action.SHARE, Action.PREFETCH)
        if not is_whole and not is_prefix:
            return HintAnswer(HintVerdict.REJECTED, RANGE_NOT_SUPPORTED)
        match hint.action:
            case Action.SHARE:
                return await self._share(hint, session)
            case Action.PREFETCH:
                return await self._prefetch(hint, session, deadline_s)
            case Action.DEMOTE:
                return await self._demote(session)
        return self._note(hint, session)

    def _count(self, hint: Hint) -> HintAnswer:
        """Count what was computed ahead, also of a session that has ended since."""
        tokens, counts = hint.ahead, self._state.ahead_tokens
        counts[hint.tenant, "computed"] += tokens.computed_count
        counts[hint.tenant, "used"] += tokens.used_count
        counts[hint.tenant, "wasted"] += tokens.wasted_count
        try:
            session = self._ledger.find(hint.tenant, hint.session_id)
        except SessionNotFound as error:
            return HintAnswer(HintVerdict.MISSING, error.reason)
        if tokens.wasted_count:
            self._state.journal.happened(session, Event.COMPUTED_IN_VAIN, token_count=tokens.wasted_count)
        return HintAnswer(HintVerdict.ACCEPTED)

    def _note(self, hint: Hint, session: Session) -> HintAnswer:
        """Note a hint that moves nothing now."""
        match hint.action:
            case Action.EXPECT:
                self._expect(hint, session)
            case Action.RELEASE:
                self._release(session)
            case _:
                return self._keep(hint, session)
        return HintAnswer(HintVerdict.ACCEPTED)

    def _keep(self, hint: Hint, session: Session) -> HintAnswer:
        retaining = self._ledger.placement.retaining
        ask = retaining.pin if hint.action is Action.PIN else retaining.retain
        until_s = (self._state.clock.monotonic_ns() + hint.ttl_ns) / SECOND_NS
        grant = ask(session.uid, hint.budget_bytes or session.size_bytes, until_s, hint.priority)
        if grant is None:
            return HintAnswer(HintVerdict.REJECTED, BUDGET_EXHAUSTED)
        until_ns = int(grant.until_s * SECOND_NS)
        # Clipped: granted, for less time than was asked for.
        if grant.until_s < until_s:
            return HintAnswer(HintVerdict.CLIPPED, TTL_LIMIT, grant.size_bytes, until_ns)
        return HintAnswer(HintVerdict.ACCEPTED, granted_bytes=grant.size_bytes, until_ns=until_ns)

    async def _share(self, hint: Hint, session: Session) -> HintAnswer:
        # Until it is durable: a writer may go on, but may not hold the session.
        while True:
            if session.is_writing:
                raise WriteInProgress(session=session.name)
            if session.durable_end >= session.log_end:
                break
            await self._flushing.flush(session)
            session = self._ledger.find(hint.tenant, hint.session_id)
        end = session.token_count if hint.end is None else hint.end
        session.check_range(0, end)
        shared = session.segments_of(ranges.select(session.live, 0, end))
        # As a fork would do.
        self._ledger.closed(shared)
        return HintAnswer(HintVerdict.ACCEPTED, granted_bytes=sum(segment.size_bytes for segment in shared))

    async def _prefetch(self, hint: Hint, session: Session, deadline_s: float) -> HintAnswer:
        wanted_bytes = _missing_bytes(session, hint.end)
        if not wanted_bytes:
            return HintAnswer(HintVerdict.ACCEPTED)
        budget_bytes = wanted_bytes if hint.budget_bytes is None else min(hint.budget_bytes, wanted_bytes)
        with suppress(TimeoutError):
            # The deadline is the request's: other hints of it wait for this one.
            async with asyncio.timeout_at(deadline_s):
                await self._prefetching.promote_ahead(session, budget_bytes)
        came_bytes = max(wanted_bytes - _missing_bytes(session, hint.end), 0)
        if came_bytes >= wanted_bytes:
            return HintAnswer(HintVerdict.ACCEPTED, granted_bytes=came_bytes)
        # The budget decided, not the room: the next segment would have been one too many.
        if budget_bytes < wanted_bytes and came_bytes > budget_bytes - _next_bytes(session, hint.end):
            outcome = HintVerdict.CLIPPED if came_bytes else HintVerdict.REJECTED
            return HintAnswer(outcome, BUDGET_EXHAUSTED, came_bytes)
        return self._defer(hint, session, came_bytes)

    def _defer(self, hint: Hint, session: Session, came_bytes: int) -> HintAnswer:
        """There was no room for all of it, or somebody uses it."""
        reason = NO_ROOM if session.is_idle else IN_USE
        now_ns = self._state.clock.monotonic_ns()
        until_ns = now_ns + min(hint.ttl_ns, DEFERRED_LIMIT_NS)
        # A waiting session is promoted as a whole; a reader promotes the parts that it uses.
        # Queues promote whole sessions. A part, or a session larger than memory, would stand at the head for
        # ever.
        is_for_all = hint.budget_bytes is None and hint.end is None and self._has_place(session)
        if session.is_idle and is_for_all and _promotes_ahead(self._ledger.placement.policy):
            try:
                self.deferred.put(session, now_ns, until_ns, hint.priority)
            except TooManyRequests as error:
                reason = error.reason
            else:
                return HintAnswer(HintVerdict.DEFERRED, reason, came_bytes, until_ns)
        return HintAnswer(HintVerdict.CLIPPED if came_bytes else HintVerdict.REJECTED, reason, came_bytes)

    def _has_place(self, session: Session) -> bool:
        """Whether all of it could be in DRAM; what could not would keep everyone behind it waiting."""
        filled_bytes = self._ledger.watermarks.filled_bytes(self._ledger.memory.capacity_bytes)
        return session.size_bytes <= filled_bytes

    async def _demote(self, session: Session) -> HintAnswer:
        # Demoted, it must not be fetched again for an older hint.
        self.deferred.discard(session.uid)
        before_bytes = session.amounts().memory_bytes
        await self._flushing.demote(session)
        left_bytes = session.amounts().memory_bytes
        given_bytes = max(before_bytes - left_bytes, 0)
        if not left_bytes:
            return HintAnswer(HintVerdict.ACCEPTED, granted_bytes=given_bytes)
        return HintAnswer(HintVerdict.CLIPPED if given_bytes else HintVerdict.REJECTED, IN_USE, given_bytes)

    def _expect(self, hint: Hint, session: Session) -> None:
        if hint.return_in_ns is None:
            # It does not return: nothing is kept for it.
            self._release(session)
            self._ledger.placement.expected(session, None)
            return
        return_ns = self._state.clock.monotonic_ns() + hint.return_in_ns
        self._ledger.placement.expected(session, return_ns / SECOND_NS)

    def _release(self, session: Session) -> None:
        self._ledger.placement.retaining.release(session.uid)
        self.deferred.discard(session.uid)


def _facts(hint: Hint) -> dict[str, Fact]:
    """As recordings have it."""
    return_in_ms = None if hint.return_in_ns is None else hint.return_in_ns // 10**6
    spans = {"end": hint.end, "budget_bytes": hint.budget_bytes, "return_in_ms": return_in_ms}
    said: dict[str, Fact] = {name: value for name, value in spans.items() if value is not None}
    return {"hint": hint.action.value, "ttl_ms": hint.ttl_ns // 10**6, "priority": hint.priority} | said


def _promotes_ahead(policy: Policy) -> bool:
    """Whether what waits in a queue ever comes by itself."""
    return type(policy).prefetch is not Policy.prefetch


def _next_bytes(session: Session, end: int | None) -> int:
    """Bytes of the slot that comes next, on SSD alone; 0 when there is none before `end`."""
    held = session.shown if end is None else session.segments_of(ranges.select(session.live, 0, end))
    return next((segment.size_bytes for segment in held if not segment.memory), 0)


def _missing_bytes(session: Session, end: int | None) -> int:
    """Bytes of slots on SSD alone that hold tokens before `end`."""
    if end is None:
        return missing_bytes(session)
    held = session.segments_of(ranges.select(session.live, 0, end))
    return sum(segment.layout.size_bytes for segment in held if not segment.memory)
