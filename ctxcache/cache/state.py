"""State: a cache's models, ledger, counts and journal, and the tasks that end although their caller is gone.

Owned by the event loop; the state does no I/O. `loading.py` fills it from the records. A move between tiers
must not stop half-way: a device may still write to its slot. So a caller waits for a move with
`asyncio.shield`, and a cancelled caller leaves the move running. Worst case: a move that a device never
answers, for which `drain` waits.

The journal notes what the store was asked, what it did, and why a caller got less. It changes nothing.

    what happens          counts        history of the session     recording, while somebody listens
    found a session       hit or empty                             LOOKUP, GET, READ
    missed it             the reason    quota, timeout, ...         LOOKUP, GET, READ with the reason
    a write failed                      quota, timeout, ...         APPEND with the reason
    tokens went                         evicted, expired, cut, ... EVICT, EXPIRE, CUT, ...
    anything else                                                  its call

It knows names, and keeps no token and no row. Every memory is bounded: a recording that is not taken in
time loses what follows, and counts it.
"""

import asyncio
import enum
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from ctxcache.core.history import ENDS, Event, History, Miss, Requests
from ctxcache.core.ledger.ledger import Below, Ledger
from ctxcache.core.ledger.segment import Segment, Shelf
from ctxcache.core.ledger.session import BLOCKS, Session, SessionView
from ctxcache.core.ledger.work import current_work
from ctxcache.core.limits import DEFAULT_LIMITS, DEFAULT_WATERMARKS, Limits, Watermarks
from ctxcache.core.observations import Observations
from ctxcache.core.placement.policy import Ranked
from ctxcache.core.placement.shares import NO_SHARES, Shares
from ctxcache.errors import CacheError, Draining, ModelFingerprintMismatch, ModelNotFound
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_RANGE, StreamRange
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.spans import NO_SPANS, NOTHING, Spans, current_trace_id
from ctxcache.storage.metadata.base import ModelRecord

Fact: TypeAlias = "int | str | bool | Sequence[int]"


# Generations over crashes. Each run begins 2^32 further than the last one that was cut off:
#
#     run 1    1, 2, 3 ... 500      recorded: 480     crash: 481 .. 500 were seen by clients
#     run 2    2^32 + ...           none of them comes again with other content
GENERATION_BITS = 32
"""Changes that one session can see in one run before its generations reach those after the next crash."""


@dataclass(slots=True)
class Counters:
    """Counts since the start. The proto's `Stats` has a field of each name, by which GetStats answers.

    A metric shows one by `counted` in the table of metrics.
    """

    appended_token_count: int = 0
    read_token_count: int = 0
    dram_hit_token_count: int = 0
    expired_session_count: int = 0
    evicted_session_count: int = 0
    unadmitted_session_count: int = 0
    corrupt_segment_count: int = 0
    mended_segment_count: int = 0
    flushed_segment_count: int = 0
    promoted_segment_count: int = 0
    joined_segment_count: int = 0
    uncopied_segment_count: int = 0
    mended_copy_count: int = 0
    delayed_write_count: int = 0


class State:
    """Models, the ledger, counters and clocks, shared by the parts of the cache."""

    def __init__(
        self,
        clock: Clock,
        policy: Ranked,
        memory: Shelf,
        below: Shelf,
        devices: Below,
        *,
        crash_count: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        shares: Shares = NO_SHARES,
        watermarks: Watermarks = DEFAULT_WATERMARKS,
        spans: Spans = NO_SPANS,
        copies: int = 1,
    ) -> None:
        """`crash_count`: how many runs over these records were cut off before this one.

        `copies`: how many SSD paths the segments of new sessions and blocks are on, unless a session says.
        """
        self.copies = copies
        self.clock = clock
        self.spans = spans
        self.limits = limits
        self.least_generation = crash_count << GENERATION_BITS
        """Where generations begin: a crash took back commits that had some too, and none may come again."""
        # Metrics read these two objects, which are counted where things happen.
        self.counters, self.seen = Counters(), Observations()
        self.read_tokens: Counter[str] = Counter()
        """Tokens that each tenant read since the start."""
        self.appended_tokens: Counter[str] = Counter()
        """Tokens that each tenant committed since the start."""
        self.ahead_tokens: Counter[tuple[str, str]] = Counter()
        """By tenant, tokens that its engines told to be `computed` ahead of turns, `used` and `wasted`."""
        self.is_prefetch_wanted = asyncio.Event()
        """Set when a session may have come to be worth promoting ahead of need."""
        self.committed: Callable[[Session], None] = lambda _: None
        """Called with a session whose tokens were committed; a fleet sets it."""
        self.dropped: Callable[[Session], None] = lambda _: None
        """Called with a session of which tokens were dropped; a fleet sets it."""
        self.unstage: Callable[[Segment], None] = lambda _: None
        """Forgets what is staged of a segment; staging sets it."""
        self.is_pressed = asyncio.Event()
        """Set when more is to be written than shall wait."""
        self.ledger = Ledger(
            clock,
            policy,
            memory,
            below,
            devices,
            limits=limits,
            shares=shares,
            watermarks=watermarks,
            seen=self.seen,
            wishes=self,
        )
        self.journal = Journal(clock, self.ledger.glance)
        self.models: dict[tuple[str, str], ModelRecord] = {}
        self.model_ids: dict[str, list[str]] = {}
        """Model ids of each tenant, in order."""
        self.model_streams: Counter[str] = Counter()
        """Streams of each tenant's models."""
        self._layouts: WeakValueDictionary[tuple[bytes, tuple[StreamRange, ...]], SegmentLayout] = (
            WeakValueDictionary()
        )

    def span(self, name: str, **facts: str | int) -> AbstractContextManager[object]:
        """A part of the current work, for tracing: see Spans."""
        return self.spans.span(name, **facts) if self.spans.is_on else NOTHING

    # -- models ------------------------------------------------------------------------------------

    def model(self, tenant: str, model_id: str) -> ModelRecord:
        """A tenant's model. Raises ModelNotFound."""
        try:
            return self.models[tenant, model_id]
        except KeyError:
            raise ModelNotFound(model=f"models/{model_id}") from None

    def layout(self, model: ModelRecord, ranges: Sequence[StreamRange]) -> SegmentLayout:
        """Where streams and token ids lie in a slot: one object for all sessions with these streams.

        Raises KeyError(stream) for a stream that the model does not have.
        """
        # The same streams in another order, or repeated, are the same layout.
        key = model.fingerprint, tuple(sorted({TOKENS_RANGE, *ranges}))
        # The cache is weak: a layout lives as long as a session has it.
        layout = self._layouts.get(key)
        if layout is None:
            streams = (stream for item in ranges for stream in item.streams())
            layout = self._layouts[key] = SegmentLayout(model.spec.resolve(streams))
        return layout

    def add_model(self, model: ModelRecord) -> None:
        """Make a model known."""
        self.models[model.tenant, model.spec.model_id] = model
        insort(self.model_ids.setdefault(model.tenant, []), model.spec.model_id)
        self.model_streams[model.tenant] += len(model.spec.streams)

    def remove_model(self, tenant: str, model_id: str) -> None:
        """Make a model unknown that no session is of."""
        self.model_streams[tenant] -= len(self.models.pop((tenant, model_id)).spec.streams)
        self.model_ids[tenant].remove(model_id)

    # -- what the ledger wishes --------------------------------------------------------------------

    def prefetch_wanted(self) -> None:
        """See Wishes."""
        self.is_prefetch_wanted.set()

    def write_wanted(self) -> None:
        """See Wishes."""
        self.is_pressed.set()

    def segment_gone(self, segment: Segment) -> None:
        """See Wishes."""
        self.unstage(segment)

    def tokens_withheld(self, session: Session, token_count: int) -> None:
        """See Wishes."""
        paths = ", ".join(self.ledger.lost.of(session))
        self.journal.happened(session, Event.DEVICE_LOST, detail=paths, token_count=token_count)


T = TypeVar("T")
log = logging.getLogger(__name__)


# A move is a task of its own, for its caller may be cancelled in the middle of device I/O. The device goes on
# writing to the slot, so that somebody must wait for it and give the slot back.
class Background:
    """The moves under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, move: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin a move; its failure is for whoever waits for it, and for nobody else.

        It is a part of the caller's work.
        """
        task = part_of_work(move)
        # The loop itself keeps no reference to a task: one that nobody holds may be collected midway.
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def drain(self) -> None:
        """Wait for every move under way."""
        # A move may begin another one.
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, move: "asyncio.Task[Any]") -> None:
        self._tasks.discard(move)
        # The error is looked at, so that asyncio does not complain when its caller has stopped waiting. Some
        # moves have no caller: an unexpected error would end one in silence.
        error = None if move.cancelled() else move.exception()
        if error is not None and not isinstance(error, CacheError):
            log.error("move_broken", exc_info=error)


def part_of_work(what: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that is a part of the caller's work, which does not end before it."""
    work = current_work().join()
    task = asyncio.get_running_loop().create_task(what)
    task.add_done_callback(lambda _: work.leave())
    return task


async def in_window(moves: Iterable[Callable[[], "asyncio.Task[None]"]], count: int) -> None:
    """Start moves in order, never more than `count` under way, and raise the first failure.

    After a failure no further move is started, and those under way end first. A cancellation leaves them
    running.
    """
    pending: set[asyncio.Task[None]] = set()
    failure: BaseException | None = None
    waiting = iter(moves)
    while True:
        if len(pending) >= count:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # Failures are raised at the end, when nothing is under way any more.
            failure = _failure(done)
        # The next move is asked for when it can start: its conditions may have changed in the meantime.
        move = next(waiting, None) if failure is None else None
        if move is None:
            break
        pending.add(move())
    if pending:
        done, _ = await asyncio.wait(pending)
        failure = failure or _failure(done)
    if failure is not None:
        raise failure


def _failure(done: Iterable["asyncio.Task[None]"]) -> BaseException | None:
    return next(filter(None, (task.exception() for task in done)), None)


class Pace(Protocol):
    """When it is time to rest."""

    @property
    def is_over(self) -> bool:
        """Whether others should have their turn now."""

    async def rest(self) -> None:
        """Let others have their turn."""


class StepByStep:
    """Rests whenever it is asked, for one turn of the loop. It is for work that nobody waits for."""

    is_over = True

    async def rest(self) -> None:
        """See Pace."""
        await asyncio.sleep(0)


STEP_BY_STEP = StepByStep()


# -- the journal: what was asked and done ------------------------------------------------------------

LIMIT = 1 << 16
"""The most entries that wait to be taken: some 40 MB."""


class Call(enum.Enum):
    """The call; from EXPIRE on, an act of the store itself."""

    OPEN = "open"
    RESERVE = "reserve"
    APPEND = "append"
    FINISH = "finish"
    LOOKUP = "lookup"
    GET = "get"
    READ = "read"
    RELEASE = "release"
    TRUNCATE = "truncate"
    FORK = "fork"
    TOUCH = "touch"
    FLUSH = "flush"
    DEMOTE = "demote"
    DELETE = "delete"
    HINT = "hint"
    EXPIRE = "expire"
    EVICT = "evict"
    CUT = "cut"


class Heard(NamedTuple):
    """One call. `at_ns` is of the monotonic clock; `layout` is None where there was no session."""

    call: Call
    at_ns: int
    tenant: str
    name: str
    session_tokens: int
    layout: SegmentLayout | None
    fingerprint: bytes
    facts: Mapping[str, Fact]


class Listening:
    """Keeps calls until they are taken. Owned by the event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._heard: list[Heard] = []
        self._lost_count = 0

    def hear(self, heard: Heard) -> None:
        """Keep a call. When the memory is full, it and all later ones until `take` count as lost."""
        # A recording with a gap in its middle would replay wrong, so that all calls after the first loss are
        # lost.
        if len(self._heard) < self._limit:
            self._heard.append(heard)
        else:
            self._lost_count += 1

    def take(self) -> tuple[list[Heard], int]:
        """The calls since the last time, and how many later ones were lost."""
        taken = self._heard, self._lost_count
        self._heard, self._lost_count = [], 0
        return taken


LOOKUP, READ = "lookup", "read"
"""The sort of the access."""
WRITE = "write"
"""The kind of request that writes. Only requests have it: written tokens are counted elsewhere."""
HIT, EMPTY, NEVER_STORED, REFUSED = "hit", "empty", "never_stored", "refused"
_BY_STATUS: Mapping[str, Event] = {
    "DATA_LOSS": Event.CORRUPT,
    "RESOURCE_EXHAUSTED": Event.QUOTA,
    "DEADLINE_EXCEEDED": Event.TIMEOUT,
    "UNAVAILABLE": Event.DEVICE,
}
RESULTS = (
    HIT,
    EMPTY,
    NEVER_STORED,
    Event.EVICTED.value,
    Event.EXPIRED.value,
    Event.DELETED.value,
    Event.FINGERPRINT_MISMATCH.value,
    *(event.value for event in _BY_STATUS.values()),
    Event.DEVICE_LOST.value,
    Event.MOVED.value,
    Event.OWNER_LOST.value,
    REFUSED,
)
"""Every result there is."""
_CALLS = {
    Event.EVICTED: Call.EVICT,
    Event.EXPIRED: Call.EXPIRE,
    Event.DELETED: Call.DELETE,
    Event.TRUNCATED: Call.TRUNCATE,
    Event.CORRUPT: Call.CUT,
    Event.DEVICE_LOST: Call.CUT,
    Event.MOVED: Call.DELETE,
}
"""Events that take tokens from a session."""
_ASKED = {LOOKUP: Call.LOOKUP, READ: Call.READ}


def event_of(error: CacheError) -> Event | None:
    """What became of an access that failed so; None: the caller erred, or the server takes no work."""
    if isinstance(error, ModelFingerprintMismatch):
        return Event.FINGERPRINT_MISMATCH
    return None if isinstance(error, Draining) else _BY_STATUS.get(error.status)


class Journal:
    """Counts of results, and the history behind them. Owned by the event loop."""

    def __init__(self, clock: Clock, find: Callable[[str, str], Session | None]) -> None:
        """`find` returns a tenant's session by its id, expired or not."""
        self._clock, self._find = clock, find
        self.history = History()
        self.requests = Requests()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.listening: Listening | None = None
        """The recording under way, if there is one."""

    def did(self, call: Call, session: Session | SessionView, **facts: Fact) -> None:
        """Note a call on a session that is there, or an act on it."""
        # There is nearly always no listener.
        if self.listening is not None:
            self._hear(self.listening, call, session, session.token_count, facts)

    def found(
        self,
        by: str,
        session: Session | SessionView,
        call: Call | None = None,
        *,
        count: int = 1,
        **facts: Fact,
    ) -> None:
        """Note that the session was there. `tokens` among the facts: how many of its tokens were found.

        `count`: of several blocks found together.
        """
        self.counts[by, HIT if facts["tokens"] else self._without_tokens(session)] += count
        if self.listening is not None:
            self._hear(self.listening, call or _ASKED[by], session, session.token_count, facts)

    def _without_tokens(self, session: Session | SessionView) -> str:
        # Tokens on a lost path are no empty session: they may come back.
        there = self._find(session.tenant, session.name.removeprefix("sessions/"))
        return Event.DEVICE_LOST.value if there is not None and there.withheld else EMPTY

    def missed(
        self, by: str, tenant: str, session_id: str, error: CacheError, call: Call | None = None
    ) -> None:
        """Note that a session was not there, or not for this caller."""
        # Blocks are not part of recordings.
        if self.listening is not None and not session_id.startswith(BLOCKS):
            at_ns, name = self._clock.monotonic_ns(), f"sessions/{session_id}"
            self.listening.hear(
                Heard(call or _ASKED[by], at_ns, tenant, name, 0, None, b"", {"reason": error.reason})
            )
        # The reason comes from the error, and then from what became of the session.
        session, event = self._find(tenant, session_id), event_of(error)
        if event is not None:
            result = event.value
            # The step that cuts the session before the damage tells of it.
            if session is not None and event is not Event.CORRUPT:
                self.happened(session, event, detail=f"{by}: {error.reason}")
        elif error.reason != "SESSION_NOT_FOUND":
            result = REFUSED
        elif session is not None:
            # The session has expired, and is not cleared away yet.
            result = Event.EXPIRED.value
        else:
            end = self.history.end_of(tenant, session_id)
            # History is bounded: a session whose end was forgotten counts as never stored.
            result = end.value if end else NEVER_STORED
        self.counts[by, result] += 1
        self._noted(by, tenant, session_id, result)

    def write_failed(self, session: Session, error: CacheError) -> None:
        """Note that tokens of a session were not stored."""
        self.did(Call.APPEND, session, reason=error.reason)
        event = event_of(error)
        if event is not None:
            self.happened(session, event, detail=f"write: {error.reason}")
        self._noted(WRITE, session.tenant, session.session_id, event.value if event else REFUSED)

    def happened(
        self, session: Session, event: Event, *, detail: str = "", token_count: int = 0, **facts: Fact
    ) -> None:
        """Note an act on a session that is there, or was until now. It lost `token_count` tokens."""
        call = _CALLS.get(event)
        if self.listening is not None and call is not None:
            # After a session's end no token of it is left.
            left = 0 if event in ENDS else session.token_count
            self._hear(self.listening, call, session, left, {"tokens": token_count, **facts})
        if session.is_block:
            # Blocks come and go in numbers. Histories are for sessions, which people ask about.
            return
        self.history.note(
            session.tenant,
            session.session_id,
            event,
            time_ns=self._clock.wall_ns(),
            detail=detail,
            token_count=token_count,
            trace_id=current_trace_id(),
        )

    def _noted(self, by: str, tenant: str, session_id: str, result: str) -> None:
        trace_id = current_trace_id()
        if trace_id:
            self.requests.note(tenant, trace_id, Miss(session_id, by, result, self._clock.wall_ns()))

    def _hear(
        self,
        listening: Listening,
        call: Call,
        session: Session | SessionView,
        session_tokens: int,
        facts: Mapping[str, Fact],
    ) -> None:
        if session.layout.is_block:
            # Blocks are not part of recordings.
            return
        listening.hear(
            Heard(
                call,
                self._clock.monotonic_ns(),
                session.tenant,
                session.name,
                session_tokens,
                session.layout,
                session.model_fingerprint,
                facts,
            )
        )
