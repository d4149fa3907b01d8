"""The board: which sessions have rows in staging, and who goes next. One lock, held for bookkeeping alone.

Every method but those that say so is called with `changed` held. Knows no client. Worst case: a session that is
paused holds the oldest rows of staging; it goes next once staging is half full.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ctxcache.errors import CacheError, DeadlineExceeded
from gpu_worker.saving.progress import Job, Progress
from gpu_worker.saving.slices import Run
from gpu_worker.saving.staging import Frame, Staging

log = logging.getLogger(__name__)

CLOSED_LIMIT = 4096
"""Sessions that are saved and that nobody has waited for: what became of the oldest is forgotten."""


class Board:
    """What an engine's thread and the saving threads have in common."""

    def __init__(self, staging: Staging) -> None:
        self.changed = threading.Condition()
        self.sessions: dict[str, Progress] = {}
        self.shed: Counter[str] = Counter()
        """Tokens, by reason."""
        self.saved_token_count = 0
        self.is_ended = False
        self._staging = staging
        self._due: deque[Progress] = deque()
        self._frames: deque[Frame] = deque()
        self._closed: deque[Progress] = deque()

    def take_frame(self, token_ids: npt.NDArray[np.int32]) -> Frame | None:
        """Room for a pass; None where there is none now."""
        while self._frames and self._frames[0].is_free:
            self._frames.popleft()
            self._staging.ring.free_oldest()
        frame = self._staging.take(token_ids)
        if frame is not None:
            self._frames.append(frame)
        return frame

    def add(self, progress: Progress, frame: Frame, run: Run) -> None:
        """A session's rows of a pass are in staging, unless it takes no more by now."""
        if progress.failure is not None:
            self._count(len(run), progress.failure)
            return
        progress.add(frame, run)
        self.look_at(progress)

    def stop(self, progress: Progress, lost_count: int, failure: CacheError) -> None:
        """A session loses rows of a pass, and takes no more."""
        if progress.failure is None:
            progress.failure = failure
            log.warning("saves_shed session=%s reason=%s error=%s", progress.name, failure.reason, failure)
        self._count(lost_count, progress.failure)

    def look_at(self, progress: Progress) -> None:
        """A session changed: if it is time, it is due."""
        if progress.is_ripe:
            self.make_due(progress)

    def make_due(self, progress: Progress) -> None:
        """A session goes next that has something to do."""
        if progress.has_work and not progress.is_due and not progress.is_busy:
            progress.is_due = True
            self._due.append(progress)
            self.changed.notify_all()

    def relieve(self) -> None:
        """Where staging is half full, who holds its oldest quarter goes next, however little that is."""
        ring = self._staging.ring
        if 2 * ring.used_count < ring.row_count:
            return
        oldest = set()
        row_count = 0
        for frame in self._frames:
            oldest.add(frame)
            row_count += len(frame.rows)
            if 4 * row_count >= ring.row_count:
                break
        for progress in self.sessions.values():
            if progress.parts and progress.parts[0][0] in oldest:
                self.make_due(progress)

    def next(self) -> Job | None:
        """Wait for a session that is due, without the lock held before; None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self._due or self.is_ended)
            if self.is_ended:
                return None
            progress = self._due.popleft()
            progress.is_due, progress.is_busy = False, True
            return Job(progress, progress.take(), progress.is_finished)

    def settle(self, job: Job, saved_count: int, failure: CacheError | None) -> None:
        """A job is done, without the lock held before. What failed takes what came behind it with it."""
        progress = job.progress
        with self.changed:
            progress.is_busy = False
            lost_count = progress.let_go(job.parts) - saved_count
            self.saved_token_count += saved_count
            if failure is not None:
                progress.failure = progress.failure or failure
                self._count(lost_count, failure)
                self.drop(progress, failure)
            if job.is_last:
                self._close(progress)
            self.look_at(progress)
            self.changed.notify_all()

    def _close(self, progress: Progress) -> None:
        progress.is_closed = True
        self._closed.append(progress)
        while len(self._closed) > CLOSED_LIMIT:
            oldest = self._closed.popleft()
            if self.sessions.get(oldest.name) is oldest:
                del self.sessions[oldest.name]

    def drop(self, progress: Progress, failure: CacheError) -> None:
        """A session's rows in staging are lost."""
        self._count(progress.let_go(progress.take()), failure)

    def wait(self, is_so: Callable[[], bool], target: str, timeout_s: float) -> None:
        """Wait until something is so. Raises DeadlineExceeded."""
        if not self.changed.wait_for(is_so, timeout_s):
            raise DeadlineExceeded(target=target, timeout_s=str(timeout_s))

    def _count(self, lost_count: int, failure: CacheError) -> None:
        if lost_count:
            self.shed[failure.reason] += lost_count
