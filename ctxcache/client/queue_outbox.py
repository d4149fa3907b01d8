"""Outbox: an engine's queue as it shall be, and what of it the server does not know yet. Waits for nothing.

What was not sent yet is kept once per job, so that a server that is slow or away costs no memory beyond the
queue itself.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

from ctxcache.client.convert import duration
from ctxcache.client.types import seconds
from ctxcache.errors import InvalidArgument, TooManyRequests
from ctxcache.v1 import hints_pb2

JOBS_PER_MESSAGE = 1024
GONE_LIMIT = 4096
"""Jobs that went and were not told yet; what goes beyond is told as a whole queue."""
JOB_LIMIT = 1 << 16
"""Most jobs that any server takes; its own limit comes with its welcome."""
SPAN_LIMIT_S = 30 * 86400
PRIORITY_LIMIT = 100
JOB_ID_BYTES = 128
_SESSION = re.compile(r"sessions/[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits. Either `position`, its place among the engine's jobs, or `start_in_s`, when it starts.

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
    if not 0 <= job.priority <= PRIORITY_LIMIT:
        raise InvalidArgument(field="priority", problem=f"{job.priority} is not within [0, {PRIORITY_LIMIT}]")
    if not 0 <= job.new_token_count <= 2**62:
        raise InvalidArgument(field="new_token_count", problem=f"{job.new_token_count} is no count of tokens")


class Outbox:
    """The queue, and what is to be sent. Owned by whoever has its lock."""

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
            self._put = dict.fromkeys(self._jobs)
            request.snapshot.SetInParent()
            request.snapshot.jobs.extend(self._taken(now_s))
            return request
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
