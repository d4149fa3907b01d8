"""The scheduler's queue, as a store hears of it: by `core.placement.schedule`, whose code serves too.

What a job is expected to start at, that it is overdue, and that it is given up, is the schedule's to say. Of sessions that
are not held nobody hears. Worst case: a job that never starts is believed for as long as the store would.
"""

from collections.abc import Callable

from ctxcache.core.placement.policy import Policy
from ctxcache.core.placement.schedule import Job, Schedule

ENGINE = "engine"
JOBS_PER_LOOK = 1024
"""Overdue jobs looked at before the next ones are asked for."""


class Waiting:
    """One engine's jobs. Owned by a replay; `is_held` says whether the store has anything of a session."""

    def __init__(self, policy: Policy, is_held: Callable[[bytes], bool]) -> None:
        self._policy, self._is_held = policy, is_held
        self._schedule = Schedule(self._reordered)
        self._job_ids: dict[bytes, str] = {}
        """The job that a session's next turn is, where it was told."""
        self._job_count = 0
        self._now_s = 0.0

    def passed(self, now_s: float) -> None:
        """Time passes: jobs that should have started are put off."""
        self._now_s = now_s
        self._policy.passed(now_s)
        while self._schedule.passed(now_s, JOBS_PER_LOOK):
            pass

    def put(self, uid: bytes, position: float, now_s: float, *, is_turn: bool = True) -> None:
        """A job of the session waits there; without `is_turn` it will never start."""
        self._now_s = now_s
        self._job_count += 1
        job = Job(str(self._job_count), uid if self._is_held(uid) else None, position)
        if is_turn:
            self._job_ids[uid] = job.job_id
        self._schedule.put(ENGINE, job, now_s)

    def started(self, uid: bytes, now_s: float) -> None:
        """The session's turn has begun, which took it out of the queue."""
        self._now_s = now_s
        job_id = self._job_ids.pop(uid, None)
        if job_id is not None:
            self._schedule.gone(ENGINE, job_id, now_s, is_started=True)

    def rested(self, uid: bytes) -> None:
        """The turn is over: what still waits of the session was not it."""
        order = self._schedule.order(uid)
        if order is not None:
            self._reordered(uid, order)

    def lost(self) -> None:
        """The engine is gone, and with it all that waits."""
        self._schedule.drop(ENGINE, self._schedule.job_count(ENGINE))
        self._job_ids.clear()

    def _reordered(self, uid: bytes, order: float | None) -> None:
        if order is None:
            self._policy.withdrawn(uid)
        elif self._is_held(uid):
            # As the server does: what is foreseen of a job is dated by now, not by the last event.
            self._policy.passed(self._now_s)
            self._policy.hinted(uid, order)
