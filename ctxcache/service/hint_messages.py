"""HintService's messages: what is accepted of them, and what comes back."""

import math
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from ctxcache.cache.hints import Action, Answer, Hint, Outcome
from ctxcache.cache.queues import Change, LayerPlace, Readiness
from ctxcache.core.placement.schedule import PRIORITY_LIMIT, Job
from ctxcache.errors import InvalidArgument
from ctxcache.service import convert, validate
from ctxcache.v1 import hints_pb2

SECOND_NS = 10**9
JOBS_PER_REQUEST = 1024
JOBS_PER_PAUSE = 32
"""Jobs of a request that are read before others may have their turn: a fifth of a millisecond."""
ACTIONS_PER_REQUEST = 256
ACTIONS_PER_PAUSE = 32
ID_BYTES = 128
SPAN_LIMIT_S = 30 * 86400
COUNT_LIMIT = 2**62
PREFETCH_TTL_S = 60
KEEP_TTL_S = 600
_OUTCOMES = {
    Outcome.ACCEPTED: hints_pb2.HINT_OUTCOME_ACCEPTED,
    Outcome.CLIPPED: hints_pb2.HINT_OUTCOME_CLIPPED,
    Outcome.DEFERRED: hints_pb2.HINT_OUTCOME_DEFERRED,
    Outcome.REJECTED: hints_pb2.HINT_OUTCOME_REJECTED,
    Outcome.MISSING: hints_pb2.HINT_OUTCOME_MISSING,
}
_CHANGES = {
    Change.PROMOTED: hints_pb2.SESSION_CHANGE_PROMOTED,
    Change.DEMOTED: hints_pb2.SESSION_CHANGE_DEMOTED,
    Change.EVICTED: hints_pb2.SESSION_CHANGE_EVICTED,
    Change.EXPIRED: hints_pb2.SESSION_CHANGE_EXPIRED,
}
_STATES = {
    LayerPlace.DRAM: hints_pb2.LAYER_STATE_DRAM,
    LayerPlace.SSD: hints_pb2.LAYER_STATE_SSD,
    LayerPlace.MISSING: hints_pb2.LAYER_STATE_MISSING,
}


@dataclass(frozen=True, slots=True)
class Hello:
    """Who publishes a queue."""

    engine: str
    grace_ns: int | None
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Deltas:
    """What changes in a queue: sessions' ids with their jobs, and jobs that go, with whether they started."""

    put: dict[str, tuple[str, Job]]
    gone: dict[str, bool]
    is_whole: bool = False
    """Whether what is put is all there is."""


def hello(message: hints_pb2.ScheduleHello) -> Hello:
    """A hello, validated. Raises InvalidArgument."""
    fingerprint = message.model_fingerprint
    if fingerprint:
        validate.fingerprint(fingerprint, "hello.model_fingerprint")
    grace_ns = span_ns(message.grace, "hello.grace") if message.HasField("grace") else None
    return Hello(validate.engine(message.engine, "hello.engine"), grace_ns, fingerprint)


def delta(message: hints_pb2.QueueDelta, now_s: float) -> Generator[None, None, Deltas]:
    """A delta that arrived at `now_s`, validated; pauses now and then. Raises InvalidArgument."""
    validate.within(len(message.gone), 0, JOBS_PER_REQUEST, "delta.gone")
    gone: dict[str, bool] = {}
    for i, item in enumerate(message.gone):
        try:
            _check_id(item.job_id, gone)
            gone[item.job_id] = _is_started(item.end)
        except InvalidArgument as error:
            raise _inside(f"delta.gone[{i}]", error) from error
        if i % JOBS_PER_PAUSE == JOBS_PER_PAUSE - 1:
            yield
    put = yield from _jobs(message.put, "delta.put", now_s)
    return Deltas(put, gone)


def snapshot(message: hints_pb2.QueueSnapshot, now_s: float) -> Generator[None, None, Deltas]:
    """A whole queue that arrived at `now_s`, validated; pauses now and then. Raises InvalidArgument."""
    put = yield from _jobs(message.jobs, "snapshot.jobs", now_s)
    return Deltas(put, {}, is_whole=True)


def _jobs(
    messages: Sequence[hints_pb2.Job], field: str, now_s: float
) -> Generator[None, None, dict[str, tuple[str, Job]]]:
    validate.within(len(messages), 0, JOBS_PER_REQUEST, field)
    jobs: dict[str, tuple[str, Job]] = {}
    for i, message in enumerate(messages):
        try:
            _check_id(message.job_id, jobs)
            jobs[message.job_id] = validate.session_id(message.session, "session"), _job(message, now_s)
        except InvalidArgument as error:
            raise _inside(f"{field}[{i}]", error) from error
        if i % JOBS_PER_PAUSE == JOBS_PER_PAUSE - 1:
            yield
    return jobs


def _job(message: hints_pb2.Job, now_s: float) -> Job:
    validate.within(message.new_token_count, 0, COUNT_LIMIT, "new_token_count")
    start_s: float | None = None
    match message.WhichOneof("start"):
        case "position":
            if not math.isfinite(message.position):
                raise InvalidArgument(field="position", problem="is not finite")
        case "start_in":
            start_s = now_s + span_ns(message.start_in, "start_in") / SECOND_NS
        case None:
            raise InvalidArgument(field="start", problem="is required")
    deadline_s = math.inf
    if message.HasField("deadline_in"):
        deadline_s = now_s + span_ns(message.deadline_in, "deadline_in") / SECOND_NS
    priority = validate.within(message.priority, 0, PRIORITY_LIMIT, "priority")
    return Job(message.job_id, None, message.position, start_s, priority, deadline_s)


def _is_started(end: int) -> bool:
    if end not in (hints_pb2.JOB_END_STARTED, hints_pb2.JOB_END_CANCELLED):
        raise InvalidArgument(field="end", problem=f"{end} is not the end of a job")
    return end == hints_pb2.JOB_END_STARTED


def _check_id(job_id: str, known: Collection[str]) -> None:
    validate.text(job_id, ID_BYTES, "job_id", is_required=True)
    if job_id in known:
        raise InvalidArgument(field="job_id", problem="is there twice")


def _inside(at: str, error: InvalidArgument) -> InvalidArgument:
    """The same error of a field of a part of the request."""
    return InvalidArgument(field=f"{at}.{error.field}", problem=error.problem)


def span_ns(message: Duration, field: str, *, least_s: int = 0) -> int:
    """A span of time from now on, in nanoseconds: up to 30 days. Raises InvalidArgument."""
    validate.within(message.seconds, least_s, SPAN_LIMIT_S, field)
    validate.within(message.nanos, 0, SECOND_NS - 1, f"{field}.nanos")
    return message.seconds * SECOND_NS + message.nanos


# -- hints ------------------------------------------------------------------------------------------


def hints(request: hints_pb2.HintRequest, tenant: str) -> Generator[None, None, list[Hint]]:
    """A batch of hints, validated; pauses now and then. Raises InvalidArgument."""
    validate.text(request.message_id, ID_BYTES, "message_id")
    validate.within(len(request.actions), 1, ACTIONS_PER_REQUEST, "actions")
    found = []
    for i, action in enumerate(request.actions):
        if i % ACTIONS_PER_PAUSE == ACTIONS_PER_PAUSE - 1:
            yield
        try:
            found.append(_hint(action, tenant))
        except InvalidArgument as error:
            raise _inside(f"actions[{i}]", error) from error
    return found


def _hint(message: hints_pb2.HintAction, tenant: str) -> Hint:
    validate.text(message.action_id, ID_BYTES, "action_id")
    kind = message.WhichOneof("action")
    if kind is None:
        raise InvalidArgument(field="action", problem="is required")
    action = Action(kind)
    begin, end = _range(message)
    return Hint(
        tenant, validate.session_id(message.session, "session"), action, begin, end,
        ttl_ns=_ttl_ns(message, action),
        priority=validate.within(message.priority, 0, PRIORITY_LIMIT, "priority"),
        budget_bytes=validate.within(message.budget_bytes, 1, COUNT_LIMIT, "budget_bytes")
        if message.HasField("budget_bytes") else None,
        return_in_ns=_return_in_ns(message.expect) if action is Action.EXPECT else None,
    )  # fmt: skip


def _range(message: hints_pb2.HintAction) -> tuple[int, int | None]:
    if not message.HasField("range"):
        return 0, None
    begin = validate.within(message.range.begin, 0, COUNT_LIMIT, "range.begin")
    return begin, validate.within(message.range.end, begin, COUNT_LIMIT, "range.end")


def _ttl_ns(message: hints_pb2.HintAction, action: Action) -> int:
    if message.HasField("ttl"):
        return span_ns(message.ttl, "ttl", least_s=1)
    return (PREFETCH_TTL_S if action is Action.PREFETCH else KEEP_TTL_S) * SECOND_NS


def _return_in_ns(message: hints_pb2.ExpectHint) -> int | None:
    match message.WhichOneof("expected"):
        case "return_in":
            return span_ns(message.return_in, "expect.return_in")
        case "ended" if message.ended:
            return None
        case "ended":
            raise InvalidArgument(field="expect.ended", problem="is false, which says nothing")
        case None:
            raise InvalidArgument(field="expect.expected", problem="is required")


def hint_result(action_id: str, answer: Answer, *, wall_offset_ns: int) -> hints_pb2.HintResult:
    """What came of a hint; `wall_offset_ns` leads from the monotonic to the wall clock."""
    result = hints_pb2.HintResult(
        action_id=action_id, outcome=_OUTCOMES[answer.outcome], reason=answer.reason,
        granted_bytes=answer.granted_bytes,
    )  # fmt: skip
    if answer.until_ns is not None:
        result.valid_until.CopyFrom(convert.timestamp(answer.until_ns + wall_offset_ns))
    return result


# -- events -----------------------------------------------------------------------------------------


def session_event(name: str, changes: Change, readiness: Readiness | None) -> hints_pb2.SessionEvent:
    """What happened to a session; no readiness for one that is gone."""
    event = hints_pb2.SessionEvent(session=name, changes=[_CHANGES[change] for change in changes])
    event.readiness.SetInParent()
    if readiness is not None:
        event.readiness.token_count = readiness.token_count
        event.readiness.missing_bytes = readiness.missing_bytes
        event.readiness.ready_in.CopyFrom(convert.duration(int(readiness.ready_in_s * SECOND_NS)))
        event.readiness.layers.extend(
            hints_pb2.LayerReadiness(
                layer_begin=run.begin, layer_end=run.end, state=_STATES[readiness.place(run)]
            )
            for run in readiness.runs
        )
    return event
