"""The sorter: threads that take rows out of staging into the store, a session at a time.

Knows the board and lanes, not the engine. Worst case: a store that does not answer holds every thread until the
client's deadline; staging fills meanwhile, and what does not fit into it is shed.
"""

import logging
import threading
import time
from contextlib import suppress

from ctxcache.client import Client
from ctxcache.errors import CacheError
from ctxcache.v1.session_pb2 import DURABILITY_DISK
from gpu_worker.saving.board import Board
from gpu_worker.saving.lane import scratch_for
from gpu_worker.saving.progress import Job
from gpu_worker.saving.staging import Bytes, Staging

log = logging.getLogger(__name__)

COPY_TIMEOUT_S = 30.0


class Sorter:
    """Threads that work off a board until it is ended."""

    def __init__(self, client: Client, board: Board, staging: Staging, *, thread_count: int) -> None:
        self._client, self._board, self._staging = client, board, staging
        self._threads = [
            threading.Thread(target=self._run, name=f"ctxcache-save-{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads, until `deadline_s` of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))

    def _run(self) -> None:
        scratch = scratch_for(self._staging)
        while (job := self._board.next()) is not None:
            lane = job.progress.lane
            before = lane.session.token_count
            failure = self._save(job, scratch)
            self._board.settle(job, lane.session.token_count - before, failure)

    def _save(self, job: Job, scratch: Bytes) -> CacheError | None:
        progress, lane = job.progress, job.progress.lane
        try:
            for frame, _ in job.parts:
                frame.wait(COPY_TIMEOUT_S)
            lane.append(self._staging, [run for _, run in job.parts], scratch, is_last=job.is_last)
            if job.is_last:
                lane.close()
                if progress.durability == DURABILITY_DISK and progress.failure is None:
                    self._client.flush_session(progress.name)
        except CacheError as error:
            log.warning("save_failed session=%s reason=%s error=%s", progress.name, error.reason, error)
            failure = error
        except Exception as error:
            log.exception("save_broken session=%s", progress.name)
            failure = CacheError(str(error))
        else:
            return None
        with suppress(CacheError):
            lane.close()
        return failure
