"""Saving off the critical path: rows are handed over, a background thread commits them.

Knows the store's client and rows as arrays, no model. The queue is bounded in bytes: what a slow
store cannot take is shed and counted, and a session that lost rows takes no more of them until its
engine looks at it again, because rows behind a gap are of no use. Worst case: a session keeps only
the tokens before the first save that was shed or failed.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ctxcache.client import Client
from ctxcache.errors import CacheError, DeadlineExceeded, TooManyRequests
from ctxcache.format.streams import Stream
from ctxcache.v1 import session_pb2

log = logging.getLogger(__name__)

Rows = Mapping[Stream, npt.NDArray[np.uint8]]
QUEUE_BYTES = 1 << 30
SAVE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Progress:
    """One session's saves: where the store has it, how many are under way, what stopped them."""

    session: session_pb2.Session
    pending_count: int = 0
    failure: CacheError | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    session_name: str
    rows: Rows
    durability: "session_pb2.Durability.ValueType"

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())

    @property
    def token_count(self) -> int:
        return max((len(rows) for rows in self.rows.values()), default=0)


class Saver:
    """One thread that appends to the store. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, client: Client, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self._client = client
        self._queue_bytes = queue_bytes
        self._queue: deque[_Batch] = deque()
        self._queued_bytes = 0
        self._progress: dict[str, _Progress] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self.shed_token_count = 0
        """Tokens that were not saved: no room in the queue, or a save failed, theirs or one before it."""
        self._thread = threading.Thread(target=self._run, name="ctxcache-save", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        session: session_pb2.Session,
        rows: Rows,
        *,
        durability: "session_pb2.Durability.ValueType" = session_pb2.DURABILITY_MEMORY,
    ) -> bool:
        """Queue rows [T, row_bytes] of every stream for the session's next tokens; never waits.

        `session` is as the store had it before the first save since `wait`. The arrays belong to the
        saver from here on. False: shed, and so is all that follows for this session until `wait`.
        """
        batch = _Batch(session.name, rows, durability)
        with self._changed:
            progress = self._progress.setdefault(session.name, _Progress(session))
            if self._queued_bytes + batch.size_bytes > self._queue_bytes:
                too_much = TooManyRequests(what="bytes waiting to be saved", limit=self._queue_bytes)
                progress.failure = progress.failure or too_much
            if progress.failure or self._is_closing:
                self.shed_token_count += batch.token_count
                return False
            progress.pending_count += 1
            self._queue.append(batch)
            self._queued_bytes += batch.size_bytes
            self._changed.notify_all()
        return True

    def wait(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Wait until a session's saves have ended; what stopped them, if anything did, is then forgotten.

        Raises DeadlineExceeded.
        """
        with self._changed:
            progress = self._progress.get(session_name)
            if progress is None:
                return None
            if not self._changed.wait_for(lambda: not progress.pending_count, timeout_s):
                raise DeadlineExceeded(target=session_name, timeout_s=str(timeout_s))
            del self._progress[session_name]
            return progress.failure

    def close(self, *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save what is queued, then end the thread. What is not saved by the deadline is dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            batch, progress = item
            # Only this thread calls the store; a failure that `submit` noted meanwhile is as good.
            failure = progress.failure or self._save(batch, progress)
            with self._changed:
                self.shed_token_count += batch.token_count if failure else 0
                progress.failure = progress.failure or failure
                progress.pending_count -= 1
                self._queued_bytes -= batch.size_bytes
                self._changed.notify_all()

    def _next(self) -> tuple[_Batch, _Progress] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if not self._queue:
                return None
            batch = self._queue.popleft()
            return batch, self._progress[batch.session_name]

    def _save(self, batch: _Batch, progress: _Progress) -> CacheError | None:
        try:
            progress.session = self._client.append(progress.session, batch.rows, durability=batch.durability)
        except CacheError as error:
            log.warning("save_failed session=%s reason=%s error=%s", batch.session_name, error.reason, error)
            return error
        return None
