"""Control of one restore: whether it may still begin to write, and who ends it.

Shared by the thread that restores and the event loop. Before anything is written a restore ends at once; from
then on it is cancelled, and ends when nothing is written any more. Worst case: that takes as long as a drain.
"""

import threading
from collections.abc import Callable

from ctxcache.errors import CacheError
from gpu_worker.errors import RestoreTooLate
from gpu_worker.pipeline.deadline import Deadline


class Control:
    """One restore. Thread-safe."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._error: CacheError | None = None
        self._cancel: Callable[[], None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether anything may have been written."""
        return self._cancel is not None

    def check(self) -> None:
        """Raise why it has ended, or RestoreTooLate."""
        if self._error is not None:
            raise self._error
        self.deadline.check("the restore")

    def write(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Begin to write, unless it has ended. `begin` returns what cancels it. Raises as `check` does."""
        with self._lock:
            self.check()
            self._cancel = begin()

    def end(self, error: CacheError | None = None) -> bool:
        """End it. True: nothing was written, and nothing will be; else it is cancelled, and ends by itself."""
        with self._lock:
            if self._cancel is None:
                self._error = self._error or error or RestoreTooLate(what="the session")
                return True
        self._cancel()
        return False
