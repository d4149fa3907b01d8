"""The board: which sessions are being saved, which is next, and what became of each, under one lock.

The engine's thread adds the rows of its passes, and save threads take the sessions that are due:

    waiting ─► due ──next──► busy: write, commit
        ▲                       │
        └──────── settle ───────┘          finished and settled: closed

A session may already have tokens that its engine computes once more, as when a turn is asked for again:

    session   a b c d e f g h        rows that come   c d e X Y
                  └ ahead ──┘        c d e are there: not saved again; the session is cut before X

It stays whole until a token differs, and for good where none does. Writes no row and calls no store. Worst
case: a session that broke counts the tokens that it lost, by reason.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ctxcache.client.types import Durability
from ctxcache.errors import CacheError, DeadlineExceeded
from ctxcache.format.layout import SEGMENT_TOKENS
from gpu_worker.saving.appender import SessionAppender
from gpu_worker.saving.staging import RowRun, StagedPass, StagingBuffers

log = logging.getLogger(__name__)

CLOSED_LIMIT = 4096
"""Saved sessions that nobody has waited for. Beyond this many, the outcome of the oldest is forgotten."""

Part = tuple[StagedPass, RowRun]
"""A session's rows of one pass."""
Takers = list[tuple["Progress", RowRun]]
"""Sessions that take rows of a pass, each with its rows."""


class Progress:
    """A session that is being saved: its rows in staging, whether a thread has it, what stopped it."""

    def __init__(self, lane: SessionAppender, ahead: Sequence[int], unit_tokens: int) -> None:
        self.lane = lane
        self.name = lane.session.name
        self.token_count = lane.session.token_count - len(ahead)
        """The token of its next row. Every token before is in the store, in staging or under way."""
        self._ahead = np.asarray(ahead, "<i4")
        """The ids of tokens that the store has behind `token_count`."""
        self._unit_tokens = unit_tokens
        self.parts: list[Part] = []
        self.failure: CacheError | None = None
        """Why it takes no more rows."""
        self.durability: Durability = Durability.MEMORY
        self.is_finished = False
        """Whether no more rows come."""
        self.is_closed = False
        """Whether it is finished, and its last job is settled."""
        self.is_busy = False
        self.is_hurried = False
        """Whether somebody waits for the rows in staging, though they fill no segment."""

    @property
    def has_work(self) -> bool:
        """Whether a thread has rows to save, or the session to close."""
        return bool(self.parts) or (self.is_finished and not self.is_closed)

    @property
    def is_ripe(self) -> bool:
        """Whether a thread should save it now: rows end a segment, or somebody waits for them."""
        waiting = sum(len(run) for _, run in self.parts)
        # A full segment is sealed and flushed once; rows of a growing one may be flushed several times.
        begin = self.token_count - waiting
        return (
            self.is_finished
            or self.is_hurried
            or self.token_count // SEGMENT_TOKENS > begin // SEGMENT_TOKENS
        )

    @property
    def is_under_way(self) -> bool:
        """Whether some of its rows are still on their way to the store."""
        return bool(self.parts) or self.is_busy

    def skip(self, token_ids: npt.NDArray[np.int32]) -> int:
        """Pass over the next tokens as far as the store has them; returns how many these are.

        Where a token differs, the appender is told to cut the session before it.
        """
        count = min(len(token_ids), len(self._ahead))
        if not count:
            return 0
        differing = np.flatnonzero(self._ahead[:count] != token_ids[:count])
        if len(differing):
            count = int(differing[0])
        if count < len(token_ids):
            # A unit is saved whole, also where the session has its first tokens.
            count -= count % self._unit_tokens
        if count < min(len(token_ids), len(self._ahead)):
            self.lane.kept_count = self.token_count + count
            self._ahead = self._ahead[:0]
        self._ahead = self._ahead[count:]
        self.token_count += count
        return count

    def add(self, frame: StagedPass, run: RowRun) -> None:
        """Note rows of a pass: its next tokens."""
        self.parts.append((frame, run))
        frame.holder_count += 1
        self.token_count += len(run)

    def take(self) -> list[Part]:
        """Hand its rows to a job. They stay in staging until `give_back`."""
        parts, self.parts = self.parts, []
        self.is_hurried = False
        return parts

    def give_back(self, parts: Sequence[Part]) -> int:
        """Give rows back to staging; returns how many."""
        for frame, _ in parts:
            frame.holder_count -= 1
        return sum(len(run) for _, run in parts)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The rows of a session that one thread saves, alone until it settles them. `is_last`: none follow."""

    progress: Progress
    parts: Sequence[Part]
    is_last: bool


# The books of what is saved, all under one lock:
#
#     sessions    by name: open, or finished and not yet waited for
#     _due        those whose turn it is, in order; each at most once
#     _frames     passes in staging, oldest first: their rows go back to the ring in this order
#     _closed     finished and settled: the oldest are forgotten beyond CLOSED_LIMIT
class Board:
    """State that the engine's thread and the save threads share."""

    def __init__(self, staging: StagingBuffers) -> None:
        self.lock = threading.RLock()
        """Guards all that follows. Take it and not `changed`, whose `with` a signal may break off."""
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[str, Progress] = {}
        self.shed: Counter[str] = Counter()
        """Tokens that were not saved, by reason."""
        self.saved_token_count = 0
        self.is_ended = False
        self._staging = staging
        self._due: deque[Progress] = deque()
        self._frames: deque[StagedPass] = deque()
        self._closed: deque[Progress] = deque()

    def take_frame(self, token_ids: npt.NDArray[np.int32]) -> StagedPass | None:
        """Room for a pass; None where there is none now."""
        # Only from the oldest on: the ring takes rows back in the order in which it handed them out.
        self._staging.recover(self._frames[-1] if self._frames else None)
        while self._frames and self._frames[0].is_free:
            self._staging.ring.free(self._frames[0].rows)
            self._frames.popleft()
        frame = self._staging.take(token_ids)
        if frame is not None:
            self._frames.append(frame)
        return frame

    def add(self, progress: Progress, frame: StagedPass, run: RowRun) -> None:
        """Note a session's rows of a pass that are in staging now."""
        # A save may have failed while the pass was under way.
        if progress.failure is not None:
            self._count(len(run), progress.failure)
            return
        progress.add(frame, run)
        self.look_at(progress)

    def take_back(self, takers: Takers, frame: StagedPass, failure: CacheError) -> None:
        """Take a pass back that was added to some of its sessions. The lock is held since the first."""
        frame.holder_count = 0
        for progress, run in takers:
            progress.parts = [part for part in progress.parts if part[0] is not frame]
            self.stop(progress, len(run), failure)
        self.changed.notify_all()

    def stop(self, progress: Progress, lost_count: int, failure: CacheError) -> None:
        """Count a session's lost rows of a pass; it takes no more."""
        if progress.failure is None:
            progress.failure = failure
            log.warning("saves_shed session=%s reason=%s error=%s", progress.name, failure.reason, failure)
        self._count(lost_count, progress.failure)

    def look_at(self, progress: Progress) -> None:
        """Make a session due that changed, if it is ripe."""
        if progress.is_ripe:
            self.make_due(progress)

    def make_due(self, progress: Progress) -> None:
        """Put a session in the line of those that threads take, if a thread has something to do."""
        if progress.has_work and not progress.is_busy:
            if progress not in self._due:
                self._due.append(progress)
            # Told again for a session in the line: a signal may have come before threads were told.
            self.changed.notify_all()

    def relieve(self) -> None:
        """Where staging is half full, make the sessions due that hold its oldest quarter."""
        ring = self._staging.ring
        # At half: the other half takes the passes that come while the oldest rows are saved.
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

    def next(self) -> SaveJob | None:
        """Wait for a session that is due; None when the board is ended. The caller does not hold the lock."""
        with self.lock:
            self.changed.wait_for(lambda: self._due or self.is_ended)
            if self.is_ended:
                return None
            progress = self._due.popleft()
            progress.is_busy = True
            # `is_finished` is taken with the rows: rows that come later make the session due again.
            return SaveJob(progress, progress.take(), progress.is_finished)

    def settle(self, job: SaveJob, saved_count: int, failure: CacheError | None) -> None:
        """Note the outcome of a job. Rows behind a failure are lost. The caller does not hold the lock."""
        progress = job.progress
        with self.lock:
            progress.is_busy = False
            lost_count = progress.give_back(job.parts) - saved_count
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
        """Give up a session's rows in staging."""
        self._count(progress.give_back(progress.take()), failure)

    def wait(self, is_so: Callable[[], bool], target: str, timeout_s: float) -> None:
        """Wait until `is_so` holds. The caller holds the lock. Raises DeadlineExceeded."""
        if not self.changed.wait_for(is_so, timeout_s):
            raise DeadlineExceeded(target=target, timeout_s=str(timeout_s))

    def _count(self, lost_count: int, failure: CacheError) -> None:
        if lost_count:
            self.shed[failure.reason] += lost_count
