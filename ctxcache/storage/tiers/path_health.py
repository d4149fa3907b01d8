"""Health of an SSD path: whether it takes writes, and whether its bytes can be read.

The threads that do a path's I/O report what they met, and the event loop asks. Does no I/O. Worst case: a
sync that failed fences the path until a restart, though the device may work.
"""

import errno
import logging
import threading

from ctxcache.errors import TierFailure
from ctxcache.runtime.clock import Clock
from ctxcache.storage.tiers.base import TierRefusal

log = logging.getLogger(__name__)

REST_NS = 2 * 10**9
"""How long a path that lacked room takes no writes."""
HELD = "an operator took it out of use"
READ_FAILURE_LIMIT = 3
"""Reads that fail in a row until the path takes no more writes."""
# These errors pass: somebody deletes files, or memory comes back. Any other error means a broken device.
_LACKING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN))


# Two scales that move on their own, and what each lets through:
#
#     writes   open ──► rests 2 s ──► open              lacked room or memory
#              open ──► fenced, until a restart         a sync failed, a write was refused, 3 reads in a row
#     reads    there ──► doubted ──► lost ──► there     probes of the whole device decide
#
# A fence is never lifted by a success: after a failed fdatasync the kernel forgets the lost pages, and the
# next one reports that all is well.
class PathHealth:
    """Whether one path works. The threads that do its I/O report to it; the event loop asks it."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._fence = ""
        self._lack = ""
        self._is_held = False
        self._rest_ends_ns = 0
        self._read_failure_count = 0
        self._loss = self._displacement = ""
        self._fenced_ns = self._lost_ns = 0
        self._is_doubted = False

    @property
    def is_lost(self) -> bool:
        """Whether the path's bytes cannot be read."""
        return bool(self._loss)

    @property
    def is_doubted(self) -> bool:
        """Whether only a probe can tell if the path's bytes can be read."""
        return self._is_doubted or self.is_lost

    @property
    def refusal(self) -> TierRefusal | None:
        """Why the path takes no writes now; None while it does."""
        if self._loss:
            # A loss goes before other reasons: callers have to know it.
            return TierRefusal(self._loss, is_final=bool(self._fence), is_lost=True, since_ns=self._lost_ns)
        if self._fence:
            return TierRefusal(self._fence, is_final=True, since_ns=self._fenced_ns)
        if self._is_held:
            return TierRefusal(HELD, is_final=False)
        if self._displacement:
            return TierRefusal(self._displacement, is_final=False)
        if self._rest_ends_ns and self._clock.monotonic_ns() < self._rest_ends_ns:
            return TierRefusal(self._lack, is_final=False)
        return None

    def hold(self, *, is_held: bool) -> None:
        """Take no writes while `is_held`, though the path works."""
        self._is_held = is_held

    def check(self) -> None:
        """Raise TierFailure unless the path takes writes."""
        if refusal := self.refusal:
            raise TierFailure(path=self._path, problem=str(refusal))

    def check_fence(self) -> None:
        """Raise TierFailure once the path is fenced."""
        # A path that rests is synced: earlier writes must become durable.
        if self._fence:
            self.check()

    def read_succeeded(self) -> None:
        """Note that a read was answered."""
        self._read_failure_count = 0

    def read_failed(self, problem: str) -> None:
        """Note that a read failed."""
        # Several threads read at a time, and each failure must count once.
        with self._lock:
            self._read_failure_count += 1
            is_last = self._read_failure_count == READ_FAILURE_LIMIT
        if is_last:
            self.fence(f"{READ_FAILURE_LIMIT} reads failed in a row, the last: {problem}")

    def write_failed(self, problem: str, number: int | None) -> None:
        """Note that a write failed, with that error number if there is one."""
        if number not in _LACKING:
            self.fence(problem)
            return
        # Two threads may be refused at once.
        with self._lock:
            self._lack, self._rest_ends_ns = problem, self._clock.monotonic_ns() + REST_NS
        log.warning("path_rests path=%s problem=%s", self._path, problem)

    def lose(self, problem: str) -> None:
        """Note that the path's bytes cannot be read."""
        # The time comes first: whoever sees the loss sees when it was.
        if not self._loss:
            self._lost_ns = self._clock.wall_ns()
        is_first, self._loss = not self._loss, problem
        if is_first:
            log.error("path_lost path=%s problem=%s", self._path, problem)

    def found(self) -> None:
        """Note that a probe of the whole device succeeded."""
        self.stands()
        was_lost, self._loss = self._loss, ""
        if was_lost:
            log.warning("path_returned path=%s", self._path)

    def stands(self) -> None:
        """Note that a probe could read some places: the path is doubted no more."""
        self._is_doubted, self._read_failure_count = False, 0

    def displace(self, problem: str) -> None:
        """Take no writes while the file is not where a restart would look for it.

        An empty problem: the file is there again.
        """
        # The log gets this once, not with each probe.
        was, self._displacement = self._displacement, problem
        if problem and not was:
            log.error("path_displaced path=%s problem=%s", self._path, problem)

    def fence(self, problem: str) -> None:
        """Take no more writes until a restart."""
        with self._lock:
            if not self._fence:
                self._fenced_ns = self._clock.wall_ns()
            # The first reason stays: later ones follow from it.
            is_first, self._fence = not self._fence, self._fence or problem
            self._is_doubted = True
        if is_first:
            log.error("path_fenced path=%s problem=%s", self._path, problem)
