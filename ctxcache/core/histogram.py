"""A histogram with fixed bounds: what is counted on paths where a microsecond matters. Never shrinks, never grows."""

from bisect import bisect_left
from collections.abc import Sequence

QUICK_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Calls and device operations, in seconds."""
LONG_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""How long something stays, in seconds."""


class Histogram:
    """Counts by bucket, not cumulative; the last is what is above every bound. Owned by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; a value that equals one counts below it."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one below 0, as of a clock that was set back, counts as 0."""
        if value < 0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)
