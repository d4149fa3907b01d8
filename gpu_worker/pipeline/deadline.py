"""Deadlines: the moment until which one waits, told once and passed on to every wait below."""

import time
from dataclasses import dataclass
from typing import Self

from gpu_worker.errors import RestoreTooLate

LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock."""

    at_ns: int

    @classmethod
    def after_s(cls, seconds: float) -> Self:
        """So many seconds from now, at most LONGEST_S: every wait has an end."""
        return cls(time.monotonic_ns() + int(min(seconds, LONGEST_S) * 1e9))

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    def check(self, what: str) -> None:
        """Raise RestoreTooLate once it has passed."""
        if time.monotonic_ns() >= self.at_ns:
            raise RestoreTooLate(what=what)

    def earlier(self, other: "Deadline | None") -> "Deadline":
        """The earlier of both."""
        return self if other is None or self.at_ns <= other.at_ns else other
