"""Watching: a store's own recording, counted while calls are played against it. A thread of its own.

So both sides of a comparison are counted by the same rule, at the same place. Worst case: somebody else records that
store, which is TooManyRequests.
"""

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ctxcache.client import Client
from ctxcache.errors import CacheError, Unavailable
from ctxcache.recordings.tally import Tally
from ctxcache.recordings.writing import called_of
from ctxcache.v1.recording_pb2 import RecordResponse

PATIENCE_S = 30.0
LONGEST_S = 7 * 86400.0
PARTS_UNTIL_ALL = 2
"""The next part may have been on its way already when the last call was made; the one behind it was not."""


class Watch:
    """Counts what a store is asked within the block. Raises what the recording's beginning does."""

    def __init__(self, client: Client) -> None:
        self.tally, self.lost_count = Tally(), 0
        self._client = client
        self._parts: Iterator[RecordResponse] | None = None
        self._heard = threading.Condition()
        self._part_count = 0
        self._failure: CacheError | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._count, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._await(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True

    def settle(self) -> None:
        """Wait until all that the store was asked before is counted. Raises CacheError."""
        self._await(self._part_count + PARTS_UNTIL_ALL)
        self._is_over = True
        self._thread.join(PATIENCE_S)

    def _await(self, part_count: int) -> None:
        with self._heard:
            is_there = self._heard.wait_for(
                lambda: self._failure is not None or self._part_count >= part_count, PATIENCE_S
            )
        if self._failure is not None:
            raise self._failure
        if not is_there:
            raise Unavailable(target="the store", problem="its recording stands still")

    def _count(self) -> None:
        failure: CacheError = Unavailable(target="the store", problem="it ended its recording")
        try:
            for part in self._client.record(LONGEST_S):
                for call in part.calls:
                    self.tally.add(called_of(call))
                self.lost_count += part.lost_count
                # Of one turn's calls the last part alone tells the time.
                if part.HasField("store") or part.HasField("elapsed"):
                    self._tell()
                if self._is_over:
                    return
        except CacheError as error:
            failure = error
        with self._heard:
            self._failure = failure
            self._heard.notify_all()

    def _tell(self) -> None:
        with self._heard:
            self._part_count += 1
            self._heard.notify_all()
