"""Lateness: when a stretch of rows that another store should have sent is late.

Pure: times are told. Leaf.
"""

from collections import deque
from dataclasses import dataclass, field

KEPT = 64
"""So many of the last stretches are remembered."""
ENOUGH = 8
"""Of fewer nothing is known."""
FIRST_S, LEAST_S = 1.0, 0.1
LATE_PART = 0.95


@dataclass(slots=True)
class Lateness:
    """How long stretches of other stores' rows took."""

    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def took(self, seconds: float) -> None:
        """A stretch came."""
        self._took_s.append(seconds)

    @property
    def late_s(self) -> float:
        """After so long one is late: 95 of 100 took no longer."""
        if len(self._took_s) < ENOUGH:
            return FIRST_S
        ordered = sorted(self._took_s)
        return max(ordered[int(LATE_PART * (len(ordered) - 1))], LEAST_S)
