"""Queues: what engines say of their waiting jobs, and what they hear of the jobs' sessions.

A queue outlives its stream for a while, so that an engine that reconnects finds it as it was. Nothing here
waits. Memory is bounded by jobs: what happens to a session is kept once for each queue until it is told.
`Readiness` says where a session's state lies, layer by layer, and how long the rest takes to come.
"""

import asyncio
import enum
import itertools
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from ctxcache.cache.state import STEP_BY_STEP, Pace, State
from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import Bound, QueueLimits
from ctxcache.core.observations import Throughput
from ctxcache.core.placement.schedule import Job, Schedule
from ctxcache.errors import CacheError, EngineTakenOver, TooManyRequests
from ctxcache.format.streams import StreamRange

SECOND_NS = 10**9
JOBS_PER_SLICE = 32
"""Jobs that are withdrawn, or put off, before others get their turn of the event loop."""


class Change(enum.Flag):
    """A change of a session."""

    PROMOTED = enum.auto()
    DEMOTED = enum.auto()
    EVICTED = enum.auto()
    EXPIRED = enum.auto()


NOTHING = Change(0)
_numbers = itertools.count(1)


# A queue and its streams:
#
#     join ──► a stream has it ──► lost: the stream broke ──► grace is over ──► withdrawn, some jobs at a time
#                  ▲                       │
#                  └── join: same jobs ────┘        join while a stream has it: that stream is told, and ends
class Queue:
    """One engine's queue. Its methods are for those whom it hears; `Queues` has the others."""

    def __init__(self, tenant: str, engine: str) -> None:
        self.tenant = tenant
        self.engine = engine
        self.name = f"{tenant}\0{engine}"
        # Two queues of one name exist while the old one's jobs are taken away a few at a time.
        self.key = f"{self.name}\0{next(_numbers)}"
        """Names this queue alone: a queue that is being forgotten may have a successor of its name."""
        self.fingerprint = b""
        self.grace_ns = 0
        self.taken_over = asyncio.Event()
        """Set when the stream that has it is not to have it any more."""
        self.lost_until_ns: int | None = None
        """When it is withdrawn; None while a stream has it."""
        self.has_news = asyncio.Event()
        self.names: dict[bytes, str] = {}
        """Names of the sessions that jobs wait for, gone ones too, by uid."""
        self.job_counts: Counter[bytes] = Counter()
        self.news: dict[bytes, Change] = {}
        """What is to be told, by uid."""

    def promoted(self, uid: bytes) -> None:
        """See Watcher."""
        # A segment that is in DRAM now may have left it before.
        # Told once, as it is by now: promoted and demoted in turns is one change.
        self._tell(uid, Change.PROMOTED, instead_of=Change.DEMOTED)

    def demoted(self, uid: bytes) -> None:
        """See Watcher."""
        self._tell(uid, Change.DEMOTED, instead_of=Change.PROMOTED)

    def recounted(self, uid: bytes) -> None:
        """See Watcher. An engine hears of where a session is, not of how much of it."""

    def evicted(self, uid: bytes) -> None:
        """See Watcher."""
        self._tell(uid, Change.EVICTED)

    def ended(self, uid: bytes) -> None:
        """See Watcher."""
        self._tell(uid, Change.EXPIRED)

    def ask(self, uid: bytes) -> None:
        """How the session stands is to be told."""
        self._tell(uid, NOTHING)

    def forget(self, uid: bytes) -> None:
        """No job names the session any more."""
        del self.names[uid]
        self.news.pop(uid, None)

    def take_news(self) -> tuple[bytes, str, Change] | None:
        """The session with the oldest untold change, its name and the change; None when all is told."""
        uid = next(iter(self.news), None)
        # Nothing to tell, and cleared in the same step: a change that comes later sets it again.
        if uid is None:
            self.has_news.clear()
            return None
        return uid, self.names[uid], self.news.pop(uid)

    def _tell(self, uid: bytes, change: Change, *, instead_of: Change = NOTHING) -> None:
        # Sessions that no job names any more are not told.
        if uid in self.names:
            self.news[uid] = self.news.get(uid, NOTHING) & ~instead_of | change
            self.has_news.set()


class Queues:
    """Every engine's queue. Owned by the event loop."""

    def __init__(self, state: State, limits: QueueLimits) -> None:
        self.limits = limits
        self._state = state
        self.schedule = Schedule(self._reordered)
        self._queues: dict[str, Queue] = {}
        self.leaving: deque[Queue] = deque()
        """Queues that are withdrawn, and have jobs yet."""
        self._starting: dict[bytes, int] = {}
        """Sessions whose job was said to run, until when they are taken to be about to be accessed.

        The earliest first.
        """

    @property
    def engine_count(self) -> int:
        """Engines whose queue is there."""
        return len(self._queues)

    def by_name(self) -> Mapping[str, Queue]:
        """Each engine's."""
        return self._queues

    @property
    def waiting_count(self) -> int:
        """Jobs that wait, of all engines."""
        return sum(map(self.job_count, self._queues.values()))

    def job_count(self, queue: Queue) -> int:
        """Jobs that wait in a queue."""
        return self.schedule.job_count(queue.key)

    def starts_in_s(self, session: Session) -> float | None:
        """How long until the first job of the session is expected to start; None when none waits."""
        order = self.schedule.order(session.uid)
        return None if order is None else order - self._now_s()

    # -- streams -------------------------------------------------------------------------------------

    def join(self, tenant: str, engine: str, *, grace_ns: int | None, fingerprint: bytes) -> Queue:
        """Give an engine's queue to a stream, with the jobs that it has. Raises TooManyRequests.

        Another stream that has it, which may be a dead one, is told so and has it no longer.
        """
        queue = Queue(tenant, engine)
        known = self._queues.get(queue.name)
        own = sum(queue.tenant == tenant for queue in self._queues.values())
        bound = Bound(self.limits.engine_count, self.limits.are_divided)
        if known is None and bound.is_reached(len(self._queues), own):
            raise TooManyRequests(what="engines", limit=self.limits.engine_count)
        queue = self._queues.setdefault(queue.name, queue)
        # The stream that had it hears of it, and each stream has an event of its own: an old one cannot end
        # the new.
        queue.taken_over.set()
        queue.taken_over = asyncio.Event()
        queue.lost_until_ns = None
        queue.fingerprint = fingerprint
        queue.grace_ns = self.limits.grace_ns if grace_ns is None else min(grace_ns, self.limits.grace_ns)
        # Changes without a stream are unknown to the engine: everything is told anew.
        for uid in queue.names:
            queue.ask(uid)
        return queue

    def check(self, queue: Queue, stream: asyncio.Event) -> None:
        """Raise EngineTakenOver where another stream has taken over the queue.

        `stream`: the caller's event.
        """
        # The event is the stream's identity: a stream that comes back is another one.
        if stream.is_set() or queue.taken_over is not stream:
            raise EngineTakenOver(engine=queue.engine)

    def lose(self, queue: Queue, stream: asyncio.Event) -> None:
        """The stream broke: its jobs stay for the grace period. Nothing happens where it was taken over."""
        if queue.taken_over is stream and self._queues.get(queue.name) is queue:
            queue.lost_until_ns = self._state.clock.monotonic_ns() + queue.grace_ns

    async def withdraw(self, queue: Queue, pace: Pace = STEP_BY_STEP) -> None:
        """Forget a queue and its jobs; its stream has it no longer."""
        # The stream that lost it long ago does not take it from its successor.
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]
            self.leaving.append(queue)
        await self._forget_jobs(pace)

    async def end_overdue(self) -> None:
        """Withdraw queues of engines that have not come back, and put off jobs that are overdue."""
        now_ns = self._state.clock.monotonic_ns()
        for queue in list(self._queues.values()):
            if queue.lost_until_ns is not None and queue.lost_until_ns <= now_ns:
                await self.withdraw(queue)
        await self._forget_jobs(STEP_BY_STEP)
        is_more = True
        # A few at a time, until none is due.
        while is_more:
            is_withdrawn = self._withdraw_started(now_ns)
            is_more = self.schedule.passed(now_ns / SECOND_NS, JOBS_PER_SLICE) > 0 or is_withdrawn
            await asyncio.sleep(0)

    def _withdraw_started(self, now_ns: int) -> bool:
        """Withdraw some jobs that began to run without an access to their session. True if there were any."""
        first = itertools.islice(self._starting.items(), JOBS_PER_SLICE)
        due = [uid for uid, until_ns in first if until_ns <= now_ns]
        for uid in due:
            del self._starting[uid]
            self._reordered(uid, self.schedule.order(uid))
        return bool(due)

    async def _forget_jobs(self, pace: Pace) -> None:
        """Also what others began and were cancelled at."""
        # Also what an earlier call left when its caller was cancelled.
        while self.leaving:
            queue = self.leaving[0]
            jobs = self.schedule.drop(queue.key, JOBS_PER_SLICE)
            for job in jobs:
                self._discount(queue, job.uid)
            if not jobs:
                self.leaving.popleft()
            if pace.is_over:
                await pace.rest()

    def forget(self, queue: Queue) -> None:
        """Forget a queue without jobs."""
        self.schedule.drop(queue.key, 0)

    # -- jobs ----------------------------------------------------------------------------------------

    def check_room(self, queue: Queue, put: AbstractSet[str], gone: AbstractSet[str]) -> None:
        """Raise TooManyRequests where these deltas would leave more jobs than an engine may have."""
        # Sets, which the interpreter compares without a step per job: a request names a thousand of them.
        left = self.job_ids(queue) - gone
        if len(left | put) > self.limits.job_count:
            raise TooManyRequests(what="jobs of an engine", limit=self.limits.job_count)

    def put(self, queue: Queue, session_id: str, job: Job) -> str:
        """A job waits, whose `uid` is filled in here.

        Returns why its session is not there; empty when it is.
        """
        session, reason = self._find(queue, session_id)
        before = self.schedule.job(queue.key, job.job_id)
        if session is not None:
            # Counted before the old one is taken back: a job that is put again keeps its session watched.
            self._count(queue, session)
        uid = None if session is None else session.uid
        self.schedule.put(queue.key, replace(job, uid=uid), self._now_s())
        if before is not None:
            self._discount(queue, before.uid)
        if uid is not None:
            queue.ask(uid)
        return reason

    def gone(self, queue: Queue, job_id: str, *, is_started: bool) -> None:
        """A job waits no longer, if it did."""
        waiting = self.schedule.job(queue.key, job_id)
        if is_started and waiting is not None and waiting.uid is not None:
            # The job is gone from the queue, and its access is still to come: until then the session is about
            # to be used.
            self._starting[waiting.uid] = self._state.clock.monotonic_ns() + self.limits.grace_ns
        job = self.schedule.gone(queue.key, job_id, self._now_s(), is_started=is_started)
        if job is not None:
            self._discount(queue, job.uid)

    def job_ids(self, queue: Queue) -> AbstractSet[str]:
        """Jobs that wait in a queue, as it changes."""
        return self.schedule.job_ids(queue.key)

    # -- parts ---------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._state.clock.monotonic_ns() / SECOND_NS

    def _find(self, queue: Queue, session_id: str) -> tuple[Session | None, str]:
        try:
            session = self._state.ledger.find(queue.tenant, session_id)
            if queue.fingerprint:
                session.check_fingerprint(queue.fingerprint)
        except CacheError as error:
            return None, error.reason
        return session, ""

    def _count(self, queue: Queue, session: Session) -> None:
        queue.job_counts[session.uid] += 1
        if session.uid not in queue.names:
            queue.names[session.uid] = session.name
            self._state.ledger.placement.watch(session.uid, queue)

    def _discount(self, queue: Queue, uid: bytes | None) -> None:
        if uid is None:
            return
        queue.job_counts[uid] -= 1
        if not queue.job_counts[uid]:
            del queue.job_counts[uid]
            queue.forget(uid)
            self._state.ledger.placement.unwatch(uid, queue)

    def _reordered(self, uid: bytes, order: float | None) -> None:
        session = self._state.ledger.get(uid)
        if session is None:
            return
        if order is not None:
            self._starting.pop(uid, None)
            self._state.ledger.placement.hinted(session, order)
        elif uid in self._starting:
            # The access that follows must find the job in the queue.
            self._state.ledger.placement.starting(session)
        else:
            self._state.ledger.placement.withdrawn(session)


LAYOUTS_LIMIT = 256
"""Layouts whose runs of layers are kept ready."""


class LayerWhere(enum.Enum):
    """Where a layer's state is; all that are stored lie together."""

    DRAM = "dram"
    SSD = "ssd"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `[begin, end)`, stored or not."""

    begin: int
    end: int
    is_stored: bool


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a session stands. `ready_in_s` is an estimate, 0 where nothing is missing in DRAM."""

    token_count: int
    runs: tuple[LayerRun, ...]
    missing_bytes: int
    ready_in_s: float

    def place(self, run: LayerRun) -> LayerWhere:
        """Where a run of layers lies."""
        if not run.is_stored:
            return LayerWhere.MISSING
        return LayerWhere.SSD if self.missing_bytes else LayerWhere.DRAM


def missing_bytes(session: Session) -> int:
    """Bytes of slots that are on SSD alone."""
    if session.withheld:
        return sum(s.layout.size_bytes for s in session.shown if not s.memory)
    # Without looking at each segment: engines ask for readiness with every change.
    return session.size_bytes - session.amounts().memory_bytes


def readiness_of(session: Session, state: State, promotions: Throughput) -> Readiness:
    """Where the session's state is now.

    Takes a time that does not grow with the session's tokens or layers.
    """
    missing = missing_bytes(session)
    model = state.model(session.tenant, session.model_id)
    runs = _runs(session.layout.outline.ranges, model.spec.layer_count)
    return Readiness(session.token_count, runs, missing, promotions.time_s(missing) if missing else 0.0)


@lru_cache(maxsize=LAYOUTS_LIMIT)
def _runs(ranges: tuple[StreamRange, ...], layer_count: int) -> tuple[LayerRun, ...]:
    stored = {layer for item in ranges for layer in range(item.layer_begin, item.layer_end)}
    groups = groupby(range(layer_count), key=lambda layer: layer in stored)
    runs = [(is_stored, list(layers)) for is_stored, layers in groups]
    return tuple(LayerRun(layers[0], layers[-1] + 1, is_stored) for is_stored, layers in runs)
