"""An engine's scheduler: the replay's queue on a real stream, and what clients say of returns in real hints.

It stands where a replay has its queue. Every change is acknowledged before the replay goes on.
"""

from collections import Counter
from collections.abc import Callable

from ctxcache.client import Client
from ctxcache.client.engine_queue import EngineQueue, QueuedJob
from ctxcache.client.types import seconds
from tests.live.names import name_of


class Hints:
    """A scheduler's hints: nothing. `tell_time` lets the store know what time it is."""

    def __init__(self) -> None:
        self.tell_time: Callable[[float], None] = lambda _: None

    def passed(self, now_s: float) -> None:
        """Time passes."""
        self.tell_time(now_s)

    def put(self, uid: bytes, position: float, now_s: float) -> None:
        """A job of the session waits."""

    def started(self, uid: bytes, now_s: float) -> None:
        """Its first job runs."""

    def rested(self, uid: bytes) -> None:
        """Its turn is over."""

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """When the session returns; None: never."""

    def set_time(self, now_s: float) -> None:
        """It is so many seconds after the start."""


class Scheduler(Hints):
    """Says it all. `queue` is its caller's to close."""

    def __init__(self, client: Client, queue: EngineQueue) -> None:
        super().__init__()
        self._client, self._queue = client, queue
        self._jobs: dict[bytes, str] = {}
        self._job_count = 0
        self._now_s = 0.0
        self.outcomes: Counter[int] = Counter()

    def set_time(self, now_s: float) -> None:
        """See Hints."""
        self._now_s = now_s

    def put(self, uid: bytes, position: float, now_s: float) -> None:
        """See Hints."""
        self.tell_time(now_s)
        self._job_count += 1
        self._jobs[uid] = f"job-{self._job_count}"
        self._queue.put(QueuedJob(self._jobs[uid], name_of(uid), position=position))
        self._queue.flush()

    def started(self, uid: bytes, now_s: float) -> None:  # noqa: ARG002  the store knows
        """See Hints."""
        job_id = self._jobs.pop(uid, None)
        if job_id is not None:
            self._queue.started(job_id)
            self._queue.flush()

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See Hints."""
        return_in_s = None if return_s is None else max(return_s - self._now_s, 0.0)
        self.outcomes[
            self._client.hints.expect(
                name_of(uid), None if return_in_s is None else seconds(return_in_s)
            ).outcome
        ] += 1


class LostScheduler(Scheduler):
    """Is cut off at its `at`-th job by `cut`, and says nothing from then on."""

    def __init__(self, client: Client, queue: EngineQueue, *, at: int, cut: Callable[[], None]) -> None:
        super().__init__(client, queue)
        self._at, self._cut = at, cut

    def put(self, uid: bytes, position: float, now_s: float) -> None:
        """See Hints."""
        if self._job_count < self._at:
            super().put(uid, position, now_s)
        elif self._job_count == self._at:
            self._job_count += 1
            self._cut()

    def started(self, uid: bytes, now_s: float) -> None:
        """See Hints."""
        if self._job_count <= self._at:
            super().started(uid, now_s)
