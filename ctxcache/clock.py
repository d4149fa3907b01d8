"""Time, injected: the real clock here, a movable one in `ctxcache.testing.fakes`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_ns(self) -> int:
        """Wall-clock time, nanoseconds since the epoch. May jump."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment. Never goes back; for deadlines."""


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        """See Clock."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()
