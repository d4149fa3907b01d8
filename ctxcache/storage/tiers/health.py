"""Health: what a path's device has answered, and whether the path still takes writes.

Knows no file and no slot. A device that refuses a write or a sync is not asked again: its path is
fenced until a restart. What only lacks room or memory rests, and is tried again. A path of which several
reads fail one after the other is doubted; when probes of the whole device fail too it is lost, until one
succeeds. Worst case: a device with a few bad places, which is doubted again and again and never lost.
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
"""Reads failing one after the other, none that succeeds between, until the path takes no more writes."""
_LACKING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN))


class PathHealth:
    """Of one path. Told by the threads that do its I/O, asked by the event loop."""

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
        self._is_doubted = False

    @property
    def is_lost(self) -> bool:
        """Whether its bytes cannot be had."""
        return bool(self._loss)

    @property
    def is_doubted(self) -> bool:
        """Whether only a probe can tell if its bytes can be had."""
        return self._is_doubted or self.is_lost

    @property
    def refusal(self) -> TierRefusal | None:
        """Why it takes no writes now; None while it does."""
        if self._loss:
            return TierRefusal(self._loss, is_final=bool(self._fence), is_lost=True)
        if self._fence:
            return TierRefusal(self._fence, is_final=True)
        if self._is_held:
            return TierRefusal(HELD, is_final=False)
        if self._displacement:
            return TierRefusal(self._displacement, is_final=False)
        if self._rest_ends_ns and self._clock.monotonic_ns() < self._rest_ends_ns:
            return TierRefusal(self._lack, is_final=False)
        return None

    def hold(self, *, is_held: bool) -> None:
        """Take no writes, though nothing is wrong with it, until this is taken back."""
        self._is_held = is_held

    def check(self) -> None:
        """Raise TierFailure unless it takes writes."""
        if refusal := self.refusal:
            raise TierFailure(path=self._path, problem=str(refusal))

    def check_fence(self) -> None:
        """Raise TierFailure once it is fenced. What was written before a rest may be synced in it."""
        if self._fence:
            self.check()

    def read_succeeded(self) -> None:
        """A read was answered."""
        self._read_failure_count = 0

    def read_failed(self, problem: str) -> None:
        """A read was not."""
        with self._lock:
            self._read_failure_count += 1
            is_last = self._read_failure_count == READ_FAILURE_LIMIT
        if is_last:
            self.fence(f"{READ_FAILURE_LIMIT} reads failed in a row, the last: {problem}")

    def write_failed(self, problem: str, number: int | None) -> None:
        """A write was refused with that error number, if it has one."""
        if number not in _LACKING:
            self.fence(problem)
            return
        with self._lock:
            self._lack, self._rest_ends_ns = problem, self._clock.monotonic_ns() + REST_NS
        log.warning("path_rests path=%s problem=%s", self._path, problem)

    def lose(self, problem: str) -> None:
        """Its bytes cannot be had."""
        is_first, self._loss = not self._loss, problem
        if is_first:
            log.error("path_lost path=%s problem=%s", self._path, problem)

    def found(self) -> None:
        """A probe of the whole device succeeded."""
        self.stands()
        was_lost, self._loss = self._loss, ""
        if was_lost:
            log.warning("path_returned path=%s", self._path)

    def stands(self) -> None:
        """A probe was answered in some places: it is what it was before."""
        self._is_doubted, self._read_failure_count = False, 0

    def displace(self, problem: str) -> None:
        """Take no writes while the file is not where a restart would look for it; empty.

        It is there again.
        """
        was, self._displacement = self._displacement, problem
        if problem and not was:
            log.error("path_displaced path=%s problem=%s", self._path, problem)

    def fence(self, problem: str) -> None:
        """Take no more writes."""
        with self._lock:
            is_first, self._fence = not self._fence, self._fence or problem
            self._is_doubted = True
        if is_first:
            log.error("path_fenced path=%s problem=%s", self._path, problem)
