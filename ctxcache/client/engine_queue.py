"""An engine's waiting queue, published to the server over a stream that is made anew when it breaks.

Changes return at once; the outbox keeps the newest of each job, so that a server that is away costs no memory
beyond the queue. The newest answer for each session is kept until it is taken. One daemon thread connects and
receives. Thread-safe. Worst case: a server that is away costs its hints; once back, it is told the whole
queue.
"""

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import SupportsIndex

import grpc

from ctxcache.client.convert import duration
from ctxcache.client.messages import read_session_event
from ctxcache.client.process_forks import end_in_children, of_parent
from ctxcache.client.types import SessionEvent, seconds
from ctxcache.client.wire import Closing, Wire
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    EngineTakenOver,
    InvalidArgument,
    TooManyRequests,
    Unavailable,
)
from ctxcache.format.ids import SESSION_ID
from ctxcache.v1 import hints_pb2
from ctxcache.v1.hints_pb2 import JOB_END_CANCELLED, JOB_END_STARTED, ScheduleRequest
from ctxcache.wire.status import from_parts, from_rpc_error

JOBS_PER_MESSAGE = 1024
GONE_LIMIT = 4096
"""Jobs that went and were not told yet; what goes beyond is told as a whole queue."""
JOB_LIMIT = 1 << 16
"""Most jobs that any server takes; its own limit comes with its welcome."""
SPAN_LIMIT_S = 30 * 86400
PRIORITY_LIMIT = 100
TOKENS_LIMIT = 2**62
JOB_ID_BYTES = 128
_SESSION = re.compile(f"sessions/{SESSION_ID.pattern}")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits.

    Either `position`, its place among the engine's jobs, or `start_in_s`, when it starts.

    `session` is a resource name. Spans are seconds from when the job is put. `priority` 0 to 100, more is
    sooner.
    """

    job_id: str
    session: str
    new_token_count: int = 0
    position: float | None = None
    start_in_s: float | None = None
    deadline_in_s: float | None = None
    priority: int = 0


# The bounds are the server's own: it would end the stream, and the whole queue with it, for one bad job.
def check_job(job: QueuedJob) -> None:
    """Refuse here what the server would refuse: it could not say which of many calls was to blame."""
    if not 1 <= len(job.job_id.encode()) <= JOB_ID_BYTES:
        raise InvalidArgument(field="job_id", problem=f"has not 1 to {JOB_ID_BYTES} bytes")
    if not _SESSION.fullmatch(job.session):
        raise InvalidArgument(field="session", problem=f"does not match {_SESSION.pattern}")
    if (job.position is None) == (job.start_in_s is None):
        raise InvalidArgument(field="position", problem="either this or start_in_s is required")
    if job.position is not None and not math.isfinite(job.position):
        raise InvalidArgument(field="position", problem="is not finite")
    for field, span_s in (("start_in_s", job.start_in_s), ("deadline_in_s", job.deadline_in_s)):
        if span_s is not None and not 0 <= span_s <= SPAN_LIMIT_S:
            raise InvalidArgument(field=field, problem=f"{span_s} is not within [0, {SPAN_LIMIT_S}]")
    _check_count("priority", job.priority, PRIORITY_LIMIT)
    _check_count("new_token_count", job.new_token_count, TOKENS_LIMIT)


def _check_count(field: str, count: int, limit: int) -> None:
    # A message takes no fraction, and is made where nobody hears of it: the queue could not be sent any more.
    if not isinstance(count, SupportsIndex):
        raise InvalidArgument(field=field, problem=f"{count!r} is not an integer")
    if not 0 <= count <= limit:
        raise InvalidArgument(field=field, problem=f"{count} is not within [0, {limit}]")


# The state of each job, by where it stands. It is in `_jobs` while it waits; the two others are the mail:
#
#     put ──► _jobs, _put ── sent ──► _jobs ── started, cancelled ──► _gone ── sent ──► forgotten
#                  │                                                    ▲
#                  └── gone before it was sent ─────────────────────────┘ told all the same: an earlier
#                                                                         version of it may be there
#     new link, replace, too many gone ──► `_is_whole_due`: the next request is a snapshot of `_jobs`
#
# `_put` holds ids only, so that a job that changes ten times between two requests is sent once, as it is
# then.
class Outbox:
    """The queue, and what is to be sent. Owned by the thread that has its lock."""

    def __init__(self) -> None:
        self.job_limit = JOB_LIMIT
        self.missing: dict[str, str] = {}
        """Why jobs' sessions are not there, by job."""
        self._jobs: dict[str, tuple[QueuedJob, float]] = {}
        """By id, with the moment when they were put."""
        self._put: dict[str, None] = {}
        self._gone: dict[str, hints_pb2.JobEnd.ValueType] = {}
        self._is_whole_due = True

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be sent."""
        return not (self._is_whole_due or self._put or self._gone)

    def put(self, jobs: Sequence[QueuedJob], now_s: float) -> None:
        """Jobs wait, all of them. Raises TooManyRequests, and then the queue is as it was."""
        # Counted before anything is changed: all jobs of a call wait, or none.
        new = {job.job_id for job in jobs} - self._jobs.keys()
        if len(self._jobs) + len(new) > self.job_limit:
            raise TooManyRequests(what="jobs of an engine", limit=self.job_limit)
        for job in jobs:
            self._jobs[job.job_id] = job, now_s
            self._put[job.job_id] = None
            self.missing.pop(job.job_id, None)

    def gone(self, job_id: str, end: hints_pb2.JobEnd.ValueType) -> None:
        """A job waits no longer; one that is not known is none."""
        if self._jobs.pop(job_id, None) is None:
            return
        self._put.pop(job_id, None)
        self.missing.pop(job_id, None)
        self._gone[job_id] = end
        # An engine that starts and ends jobs while the server is away adds here without end.
        if len(self._gone) > GONE_LIMIT:
            self.start_over()

    def replace(self, jobs: Iterable[QueuedJob], now_s: float) -> None:
        """The queue is this. Raises TooManyRequests, and then it is as it was."""
        wanted = {job.job_id: (job, now_s) for job in jobs}
        if len(wanted) > self.job_limit:
            raise TooManyRequests(what="jobs of an engine", limit=self.job_limit)
        self._jobs = wanted
        self.missing.clear()
        self.start_over()

    def learned(self, missing: Iterable[hints_pb2.JobMissing]) -> None:
        """The server says whose session is not there; a job that went, or was put again, is not meant."""
        for job in missing:
            # Said of the job as it was; one put again is looked up again by the server.
            if job.job_id in self._jobs and job.job_id not in self._put:
                self.missing[job.job_id] = job.reason

    def start_over(self) -> None:
        """The server is to be told all of it."""
        self._put.clear()
        self._gone.clear()
        self._is_whole_due = True

    def take(self, sequence: int, now_s: float) -> hints_pb2.ScheduleRequest:
        """The next request of those that are to be sent."""
        request = hints_pb2.ScheduleRequest(sequence=sequence)
        if self._is_whole_due:
            self._is_whole_due = False
            # Jobs that do not fit into the snapshot's message follow as changes, in the order of the queue.
            self._put = dict.fromkeys(self._jobs)
            request.snapshot.SetInParent()
            request.snapshot.jobs.extend(self._taken(now_s))
            return request
        # Departures first: the server's limit counts the jobs that wait, and the new ones need the room.
        gone = list(islice(self._gone.items(), JOBS_PER_MESSAGE))
        for job_id, end in gone:
            del self._gone[job_id]
            request.delta.gone.add(job_id=job_id, end=end)
        if not self._gone:
            request.delta.put.extend(self._taken(now_s))
        return request

    def _taken(self, now_s: float) -> list[hints_pb2.Job]:
        job_ids = list(islice(self._put, JOBS_PER_MESSAGE))
        for job_id in job_ids:
            del self._put[job_id]
        return [_to_wire(*self._jobs[job_id], now_s) for job_id in job_ids]


def _to_wire(job: QueuedJob, put_s: float, now_s: float) -> hints_pb2.Job:
    def left(span_s: float | None) -> timedelta | None:
        # Spans count from `put`, not from the sending, however long the server was away.
        return None if span_s is None else seconds(max(span_s - (now_s - put_s), 0.0))

    message = hints_pb2.Job(
        job_id=job.job_id,
        session=job.session,
        new_token_count=job.new_token_count,
        start_in=duration(left(job.start_in_s)),
        deadline_in=duration(left(job.deadline_in_s)),
        priority=job.priority,
    )
    if job.position is not None:
        message.position = job.position
    return message


# The flow on one link, where a request waits for room in the window, and changes gather in the outbox:
#
#     hello ──► welcome (job_limit) ──► snapshot ──► changes 1 … 4 under way ──► answered ──► changes 5 …
#                                                    └ no answer within `timeout_s`: the link is cancelled
UNANSWERED_LIMIT = 4
"""Requests under way; what changes meanwhile goes in the next one."""
EVENTS_LIMIT = 1 << 16
"""Sessions whose newest event is kept for whoever takes none; beyond, the oldest is forgotten."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
FINAL = (EngineTakenOver, InvalidArgument)
"""Errors that no further try would change."""


# Cancelled or broken, a link is over for good; the next one begins with the hello and the whole queue:
#
#     _run       connect ──► receive until it ends ──► pause (0.1 s, doubled to 2 s) ──► connect …
#                                                  └── a final error, or `close` ──► every caller hears it
#     gRPC's     draws `_requests` of the same link, and sends
class _Link:
    """One stream: what was sent on it and not answered."""

    def __init__(self, now_s: float) -> None:
        self.sequence = 0
        self.unanswered: dict[int, float] = {}
        self.begun_s = now_s
        self.is_welcome = self.is_over = self.is_withdrawn = False
        self.call: grpc.Call | None = None


class EngineQueue(Closing):
    """The queue of the engine of that name.

    Use it as a context manager, or close it: that withdraws the queue.
    """

    def __init__(
        self, wire: Wire, engine: str, *, grace: timedelta | None = None, model_fingerprint: bytes = b""
    ) -> None:
        self._wire = wire
        self._hello = hints_pb2.ScheduleHello(
            engine=engine, grace=duration(grace), model_fingerprint=model_fingerprint
        )
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._events: dict[str, SessionEvent] = {}
        self._link = _Link(time.monotonic())
        self._failure: CacheError | None = None
        self._is_closing = False
        # Registered with the wire: closing the client closes the queue first, which withdraws it.
        self._wire.open_streams.add(self)
        self._thread = threading.Thread(target=self._run, name="ctxcache-queue", daemon=True)
        self._thread.start()
        end_in_children(self)

    # -- the queue -------------------------------------------------------------------------------

    def put(self, *jobs: QueuedJob) -> None:
        """Let jobs wait, wherever they waited before.

        Raises InvalidArgument, TooManyRequests, why the queue ended.
        """
        for job in jobs:
            check_job(job)
        with self._changed:
            self._check()
            self._outbox.put(jobs, time.monotonic())
            self._changed.notify_all()

    def started(self, *job_ids: str) -> None:
        """Say that jobs run. Raises why the queue ended."""
        self._remove(job_ids, JOB_END_STARTED)

    def cancelled(self, *job_ids: str) -> None:
        """Say that jobs will not run. Raises why the queue ended."""
        self._remove(job_ids, JOB_END_CANCELLED)

    def replace(self, jobs: Iterable[QueuedJob]) -> None:
        """Let these be the whole queue. Raises as `put` does, and then it is as it was."""
        wanted = list(jobs)
        for job in wanted:
            check_job(job)
        with self._changed:
            self._check()
            self._outbox.replace(wanted, time.monotonic())
            self._changed.notify_all()

    @property
    def missing(self) -> Mapping[str, str]:
        """Jobs whose session the server does not have, with the reason: put them again once it has."""
        with self._changed:
            return dict(self._outbox.missing)

    # -- what comes of it ------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None) -> list[SessionEvent]:
        """Return what became of sessions since the last call, one event each; empty when nothing did in time.

        `timeout_s`: by default the client's. Raises why the queue ended.
        """
        wait_s = self._wire.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            # Also woken by the end: whoever waits for news hears of a broken queue at once.
            self._changed.wait_for(lambda: self._events or self._failure is not None, wait_s)
            # Handed out even after the end: they came before it.
            events, self._events = list(self._events.values()), {}
            if not events:
                self._check()
            return events

    def __iter__(self) -> Iterator[SessionEvent]:
        """News of sessions, until the queue is closed. Raises why it ended otherwise."""
        while True:
            try:
                yield from self.take()
            except CacheError:
                if self._is_closing:
                    return
                raise

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the server has answered for all that was put.

        Raises DeadlineExceeded, why the queue ended.
        """
        wait_s = self._wire.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or self._is_settled(), wait_s):
                raise DeadlineExceeded(target=self._wire.target, timeout_s=f"{wait_s:g}")
            self._check()

    def close(self) -> None:
        """Withdraw the queue. Waits for the server's answer, no longer than a call may take."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            # A server that has not even said hello has nothing to withdraw.
            wait_s = self._wire.timeout_s if self._link.is_welcome else 0.0
            self._changed.wait_for(lambda: self._failure is not None, wait_s)
            call = self._link.call
        # Outside the lock: `cancel` wakes the thread that receives, which needs the lock to end the link.
        if call is not None:
            call.cancel()
        self._thread.join(self._wire.timeout_s)
        self._wire.open_streams.discard(self)

    def forked(self) -> None:
        """See Shared."""
        self._changed, self._link = threading.Condition(), _Link(0.0)
        self._failure = of_parent(self._wire.target)

    # -- parts -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure), **self._failure.facts)

    def _remove(self, job_ids: Iterable[str], end: hints_pb2.JobEnd.ValueType) -> None:
        with self._changed:
            self._check()
            for job_id in job_ids:
                self._outbox.gone(job_id, end)
            self._changed.notify_all()

    def _is_settled(self) -> bool:
        link = self._link
        return link.is_welcome and self._outbox.is_empty and not link.unanswered

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        failure: CacheError | None = None
        while failure is None:
            link = self._connect()
            problem = self._receive(link)
            with self._changed:
                # Any server that said welcome was there: the next try is soon.
                pause_s = FIRST_PAUSE_S if link.is_welcome else min(2 * pause_s, LAST_PAUSE_S)
                link.is_over = True
                self._changed.notify_all()
                if isinstance(problem, FINAL):
                    failure = problem
                # The pause ends early when the queue is closed.
                elif self._is_closing or self._changed.wait_for(lambda: self._is_closing, pause_s):
                    failure = Unavailable(target=self._wire.target, problem="the queue is closed")
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _connect(self) -> _Link:
        with self._changed:
            self._link = _Link(time.monotonic())
            self._outbox.start_over()
            return self._link

    def _receive(self, link: _Link) -> CacheError:
        """Take what comes until the stream ends; returns why it did."""
        try:
            with self._wire.errors():
                call = self._wire.hints.Schedule(self._requests(link))
            with self._changed:
                link.call = call
            for response in call:
                if problem := self._deliver(link, response):
                    call.cancel()
                    return problem
        except CacheError as error:
            return error
        except grpc.RpcError as error:
            return from_rpc_error(error, self._wire.target)
        return Unavailable(target=self._wire.target, problem="the stream ended")

    def _requests(self, link: _Link) -> Iterator[ScheduleRequest]:
        """The requests that gRPC sends, drawn in a thread of its own: the hello, then what changed."""
        hello = ScheduleRequest(hello=self._hello)
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_sendable(link), self._patience_s(link)):
                    # No answer comes: the stream is cancelled from here, since the receiving thread waits
                    # without a deadline.
                    if link.call is not None:
                        link.call.cancel()
                    return
                # A closed queue ends by the end of its requests, by which the server knows a withdrawal from
                # a break.
                if link.is_over or (link.sequence and self._is_closing):
                    return
                now_s = time.monotonic()
                link.sequence += 1
                link.unanswered[link.sequence] = now_s
                request = self._outbox.take(link.sequence, now_s) if link.sequence > 1 else hello
            request.sequence = link.sequence
            yield request

    def _is_sendable(self, link: _Link) -> bool:
        # The hello needs no welcome, and an end has to be told at once.
        if link.is_over or self._is_closing or not link.sequence:
            return True
        return link.is_welcome and not self._outbox.is_empty and len(link.unanswered) < UNANSWERED_LIMIT

    def _patience_s(self, link: _Link) -> float | None:
        """How much longer the server may take to answer; None while nothing is asked of it."""
        oldest_s = min(link.unanswered.values(), default=None)
        return None if oldest_s is None else max(oldest_s + self._wire.timeout_s - time.monotonic(), 0.0)

    def _deliver(self, link: _Link, response: hints_pb2.ScheduleResponse) -> CacheError | None:
        with self._changed:
            self._changed.notify_all()
            match response.WhichOneof("message"):
                case "acknowledgement":
                    return self._answered(link, response.acknowledgement)
                case "events":
                    for told in response.events.events:
                        event = read_session_event(told)
                        # Popped and put back: the order of the dict is by the newest event, and what is
                        # forgotten is the oldest.
                        self._events[event.session] = _merged(self._events.pop(event.session, None), event)
                    while len(self._events) > EVENTS_LIMIT:
                        del self._events[next(iter(self._events))]
                case "withdrawn":
                    link.is_withdrawn = True
        return None

    def _answered(self, link: _Link, answer: hints_pb2.Acknowledgement) -> CacheError | None:
        link.unanswered.pop(answer.sequence, None)
        if answer.HasField("error"):
            error = answer.error
            return from_parts(
                error.code, error.reason, error.message, error.metadata, target=self._wire.target
            )
        if not link.is_welcome:
            link.is_welcome = True
            self._outbox.job_limit = answer.job_limit
            # Jobs that gathered before the welcome; the server would refuse the snapshot without saying
            # which.
            if len(self._outbox) > answer.job_limit:
                return InvalidArgument(
                    field="jobs", problem=f"{len(self._outbox)} wait, the server takes {answer.job_limit}"
                )
        self._outbox.learned(answer.missing)
        return None


def _merged(before: SessionEvent | None, event: SessionEvent) -> SessionEvent:
    """The newest state, with what happened in between."""
    changes = () if before is None else (c for c in before.changes if c not in event.changes)
    return replace(event, changes=(*changes, *event.changes))
