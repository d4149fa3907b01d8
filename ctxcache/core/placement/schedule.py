"""The waiting queues of many engines, merged by expected start into one order over sessions. Pure.

A job says when it starts, or at which position of its engine's queue it waits. A position becomes a start by
the rate at which the engine was seen to start jobs, between the starts of its neighbours. When an engine's
first job is due far too early or too late, JOBS_PER_DELTA of its jobs are estimated anew with each delta, in
the direction in which they stay in order: O(log n) a delta. A session that several jobs name starts with the
earliest of them.

    waits --> due --> overdue: put off by twice its lateness, again and again --> given up

A job that is late by some time is expected to be late by as much again. Jobs of an engine that is stuck keep
their order meanwhile. Worst case: a job that was given up starts after all, and its session was not fetched.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from math import exp, inf

from ctxcache.core.placement.order import Keyed, Place, Ranks

DEFAULT_PER_S = 1.0
"""Jobs per second of an engine that has started none."""
MEMORY_S = 60.0
"""A start that lies so far back counts for 1/e."""


class StartRate:
    """How many jobs per second an engine starts while jobs wait. Idle time says nothing of its speed."""

    def __init__(self, now_s: float) -> None:
        self._then_s = now_s
        self._started, self._waited_s = DEFAULT_PER_S, 1.0

    @property
    def per_s(self) -> float:
        """Jobs per second; never 0."""
        return self._started / self._waited_s

    def passed(self, now_s: float, *, is_waiting: bool, started: int = 0) -> None:
        """Time went by up to `now_s`, with jobs waiting or not, and then some were started."""
        # Never back: deltas of several engines come with clocks read in another order.
        passed_s, self._then_s = max(now_s - self._then_s, 0.0), max(now_s, self._then_s)
        # Time without waiting jobs is not counted: an idle engine is not a slow one.
        if is_waiting:
            kept = exp(-passed_s / MEMORY_S)
            self._started *= kept
            self._waited_s = self._waited_s * kept + passed_s
        self._started = max(self._started + started, 1e-6)
        # A waiting time of 0 would make the rate infinite.
        self._waited_s = max(self._waited_s, 1e-6)


LEAST_PATIENCE_S, MOST_PATIENCE_S = 60.0, 600.0
GIVEN_UP_AFTER = 16
"""Patiences that a job may be late by."""


@dataclass(frozen=True, slots=True)
class DueStart:
    """A start foreseen at `start_s`. The job is overdue once it is late by `patience_s`."""

    start_s: float
    patience_s: float

    def put_off_s(self, now_s: float) -> float:
        """By how much the start is put off, more than it is late.

        0 before it is overdue, infinity once given up.
        """
        late_s = self.patience_s
        # The job is not late by its patience yet.
        if now_s < self.start_s + late_s:
            return 0.0
        while self.start_s + late_s <= now_s:
            # Doubled: a job that is stuck is looked at a logarithmic number of times.
            late_s *= 2
        return late_s if late_s <= GIVEN_UP_AFTER * self.patience_s else inf

    def next_look_s(self, put_off_s: float) -> float:
        """When the job is looked at again."""
        return self.start_s + max(put_off_s, self.patience_s)


def due(start_s: float, now_s: float, patience_s: float) -> DueStart:
    """A start foreseen now: it may be late by as long as it is away, or `patience_s`, within bounds."""
    # A start far away may be late by as much; a near one is given a minute.
    return DueStart(start_s, min(max(start_s - now_s, patience_s, LEAST_PATIENCE_S), MOST_PATIENCE_S))


TIE_S = 1e-3
"""Starts that are expected within one such span are one: the priority, then the deadline decides."""
PRIORITY_LIMIT = 100
SLIP_JOBS = 8
"""By how many jobs' time an engine's first job may be off."""
JOBS_PER_DELTA = 4
"""How many are estimated anew with each delta, while there are such."""

Changed = Callable[[bytes, float | None], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that waits: at `position` among its engine's, or with a start that is expected at `start_s`.

    `uid` is the session's; None where the session is not cached: the job keeps its position and orders
    nothing. `priority` is 0 to 100, more is sooner. Times are on the caller's clock.
    """

    job_id: str
    uid: bytes | None
    position: float = 0.0
    start_s: float | None = None
    priority: int = 0
    deadline_s: float = inf


@dataclass(slots=True)
class _Queue:
    """One engine's jobs. `starts` are those of `ranks`."""

    rate: StartRate
    jobs: dict[str, Job] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    job_ids: dict[Place, str] = field(default_factory=dict)
    starts: dict[Place, float] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    cursor: Place | None = None
    """The job that was estimated anew last; None while there is no need."""
    is_later: bool = False
    """Whether that goes from the last job to the first, each to a later start; else the other way."""
    started_s: float = -inf
    """When one of its jobs started last."""
    dues: dict[str, DueStart] = field(default_factory=dict)
    put_off_s: dict[str, float] = field(default_factory=dict)
    """By how much overdue jobs are put off."""
    looks: Keyed = field(default_factory=Keyed)
    """Jobs by when they are to be put off, or further."""


# From a position to a start, for one engine that starts 2 jobs per second:
#
#     position   1      2      5      7            ranks 0, 1, 2, 3: positions may have gaps
#     start      now    +0.5   +1.0   +1.5         always between its neighbours' starts
class Schedule:
    """The merged queue.

    Calls `changed` with a session's expected start when it changes; None: no job waits.
    """

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self._queues: dict[str, _Queue] = {}
        self._orders: dict[bytes, Keyed] = {}
        self._last_number = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any engine or session."""
        return not (self._queues or self._orders)

    def order(self, uid: bytes) -> float | None:
        """When the session's first job starts; None when none waits."""
        keyed = self._orders.get(uid)
        first = None if keyed is None else keyed.first()
        key = keyed.keys.get(first) if keyed is not None and first is not None else None
        return None if key is None else key[0]

    def job(self, engine: str, job_id: str) -> Job | None:
        """A job that waits; None when it does not."""
        queue = self._queues.get(engine)
        return queue.jobs.get(job_id) if queue else None

    def job_ids(self, engine: str) -> AbstractSet[str]:
        """The engine's jobs that wait, in no order: a view, which changes with them."""
        queue = self._queues.get(engine)
        return queue.jobs.keys() if queue else frozenset()

    def job_count(self, engine: str) -> int:
        """How many jobs of the engine wait."""
        queue = self._queues.get(engine)
        return len(queue.jobs) if queue else 0

    def put(self, engine: str, job: Job, now_s: float) -> None:
        """A job waits, wherever it waited before."""
        queue = self._queue(engine, now_s)
        # The time before this job counts as waiting only if others waited.
        queue.rate.passed(now_s, is_waiting=bool(queue.jobs))
        before = self._take(queue, job.job_id)
        # Put under another session: the old one's order goes.
        if before is not None and before.uid != job.uid:
            self._set(before.uid, engine, before.job_id, None)
        queue.jobs[job.job_id] = job
        order = self._order(queue, job, now_s)
        # The place decides the start, and the start when it will be overdue.
        queue.dues[job.job_id] = foreseen = due(order, now_s, SLIP_JOBS / queue.rate.per_s)
        queue.looks.put(job.job_id.encode(), (foreseen.next_look_s(0.0),))
        self._set(job.uid, engine, job.job_id, order)
        self._refit(engine, queue, now_s)

    def gone(self, engine: str, job_id: str, now_s: float, *, is_started: bool) -> Job | None:
        """Remove a job and return it; None if it is not known.

        One that `is_started` teaches the engine's rate.
        """
        queue = self._queues.get(engine)
        if queue is None or job_id not in queue.jobs:
            return None
        queue.rate.passed(now_s, is_waiting=True, started=int(is_started))
        if is_started:
            queue.started_s = now_s
        job = self._take(queue, job_id)
        if job is not None:
            self._set(job.uid, engine, job_id, None)
        self._refit(engine, queue, now_s)
        return job

    def passed(self, now_s: float, limit: int) -> int:
        """Put off, or give up, jobs that are overdue, `limit` at most; how many there were."""
        count = 0
        for engine, queue in self._queues.items():
            while count < limit and (name := _overdue(queue, now_s)) is not None:
                self._put_off(engine, queue, name, now_s)
                count += 1
        return count

    def drop(self, engine: str, limit: int) -> list[Job]:
        """Take up to `limit` of an engine's jobs away, and after the last one forget the engine.

        Returns them.
        """
        queue = self._queues.get(engine)
        if queue is None:
            return []
        # A few at a time: an engine may have thousands of jobs.
        jobs = list(islice(queue.jobs.values(), limit))
        for job in jobs:
            self._take(queue, job.job_id)
            self._set(job.uid, engine, job.job_id, None)
        if not queue.jobs:
            del self._queues[engine]
        return jobs

    def _queue(self, engine: str, now_s: float) -> _Queue:
        if engine not in self._queues:
            self._queues[engine] = _Queue(StartRate(now_s))
        return self._queues[engine]

    def _take(self, queue: _Queue, job_id: str) -> Job | None:
        _unplace(queue, job_id)
        queue.dues.pop(job_id, None)
        queue.put_off_s.pop(job_id, None)
        queue.looks.discard(job_id.encode())
        return queue.jobs.pop(job_id, None)

    def _order(self, queue: _Queue, job: Job, now_s: float) -> float:
        if job.start_s is not None:
            return _untied(job.start_s, job.priority, job.deadline_s)
        # A number at the end: two jobs may be equal in everything else, and places are keys.
        self._last_number += 1
        place = (job.position, -job.priority, job.deadline_s, self._last_number)
        start_s = _estimate(queue, place, now_s)
        queue.ranks.add(place)
        queue.places[job.job_id], queue.job_ids[place], queue.starts[place] = place, job.job_id, start_s
        return start_s

    def _set(self, uid: bytes | None, engine: str, job_id: str, order: float | None) -> None:
        if uid is None:
            return
        before, keyed = self.order(uid), self._orders.setdefault(uid, Keyed())
        # By engine and job: two engines may use the same job id.
        name = f"{engine}\0{job_id}".encode()
        if order is None:
            keyed.discard(name)
        else:
            keyed.put(name, (order,))
        if not len(keyed):
            del self._orders[uid]
        after = self.order(uid)
        if after != before:
            self._changed(uid, after)

    def _refit(self, engine: str, queue: _Queue, now_s: float) -> None:
        """Estimate some jobs anew, when it is time or until all have been."""
        if queue.cursor is None and not _begin_pass(queue, now_s):
            # From the end that keeps the order: starts that move later go from the last job on, so that none
            # passes its neighbour on the way.
            return
        for _ in range(JOBS_PER_DELTA):
            _, before, after = queue.ranks.find(queue.cursor or ())
            queue.cursor = place = before if queue.is_later else after
            if place is None:
                return
            queue.starts[place] = start_s = _estimate(queue, place, now_s)
            job = queue.jobs[queue.job_ids[place]]
            self._set(job.uid, engine, job.job_id, start_s + queue.put_off_s.get(job.job_id, 0.0))

    def _put_off(self, engine: str, queue: _Queue, name: bytes, now_s: float) -> None:
        job = queue.jobs[name.decode()]
        place, foreseen = queue.places.get(job.job_id), queue.dues[job.job_id]
        start_s = foreseen.start_s if place is None else queue.starts[place]
        # Only jobs at the head are late by themselves. Those behind wait for the engine, and their lateness
        # begins when it last started one.
        if place is not None and queue.ranks.find(place).rank >= SLIP_JOBS:
            # The jobs before this one are late too: its lateness counts from the engine's last start.
            foreseen = DueStart(max(foreseen.start_s, queue.started_s), foreseen.patience_s)
            queue.dues[job.job_id] = foreseen
        put_off_s = queue.put_off_s[job.job_id] = foreseen.put_off_s(now_s)
        if put_off_s < inf:
            queue.looks.put(name, (foreseen.next_look_s(put_off_s),))
            self._set(job.uid, engine, job.job_id, start_s + put_off_s)
        else:
            # Given up until it is put again; jobs behind it move up.
            queue.looks.discard(name)
            _unplace(queue, job.job_id)
            self._set(job.uid, engine, job.job_id, None)


def _overdue(queue: _Queue, now_s: float) -> bytes | None:
    """The job that is to be looked at next, if it is time."""
    name = queue.looks.first()
    key = None if name is None else queue.looks.keys.get(name)
    return name if key is not None and key[0] <= now_s else None


def _unplace(queue: _Queue, job_id: str) -> None:
    """Take the job's position out of the engine's order."""
    place = queue.places.pop(job_id, None)
    if place is not None:
        queue.ranks.discard(place)
        del queue.starts[place], queue.job_ids[place]


def _begin_pass(queue: _Queue, now_s: float) -> bool:
    """Whether the first job's start is so far from now that it and the others are to be estimated anew."""
    first = queue.ranks.find((-inf,)).after
    if first is None or abs(queue.starts[first] - now_s) * queue.rate.per_s <= SLIP_JOBS:
        return False
    queue.is_later = queue.starts[first] < now_s
    queue.cursor = (inf,) if queue.is_later else (-inf,)
    return True


def _estimate(queue: _Queue, place: Place, now_s: float) -> float:
    """When a job starts, between its neighbours."""
    rank, before, after = queue.ranks.find(place)
    return between(
        now_s + rank / queue.rate.per_s,
        -inf if before is None else queue.starts[before],
        inf if after is None else queue.starts[after],
        1 / queue.rate.per_s,
    )


def between(start_s: float, low_s: float, high_s: float, step_s: float) -> float:
    """`start_s` where it lies between its neighbours' starts, else about a step behind the nearer one."""
    if start_s <= low_s:
        return low_s + min(step_s, (high_s - low_s) / 2)
    if start_s >= high_s:
        return high_s - min(step_s, (high_s - low_s) / 2)
    return start_s


def _untied(start_s: float, priority: int, deadline_s: float) -> float:
    """An order by start, of starts within one span by priority, of equal ones by deadline."""
    slack_s = max(deadline_s - start_s, 0.0)
    # Slack as a fraction below 1: a deadline never outweighs a priority.
    late = 1.0 if slack_s == inf else slack_s / (1 + slack_s)
    level = PRIORITY_LIMIT - priority + late
    return start_s // TIE_S * TIE_S + TIE_S * level / (PRIORITY_LIMIT + 2)
