"""Statistics of rounds, pure. Knows no clock and no path. Worst case: no values, which is a ValueError."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, between their 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Raises ValueError for no values."""
        return cls(percentile(values, 50), percentile(values, 10), percentile(values, 90))


@dataclass(frozen=True, slots=True)
class Goal:
    """How a ratio has to compare with `bound`: `is_floor` says at least, otherwise at most."""

    bound: float
    is_floor: bool

    def is_met(self, ratio: float) -> bool:
        """Whether this ratio is good enough."""
        return ratio >= self.bound if self.is_floor else ratio <= self.bound

    def ratio(self, ours: float, beside: float) -> float:
        """Speed of ours by that beside where more is better, cost by cost where less is. Both are costs."""
        return beside / ours if self.is_floor else ours / beside

    def __str__(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {self.bound:g}"


def at_least(bound: float) -> Goal:
    """Goal for a ratio of speeds."""
    return Goal(bound, is_floor=True)


def at_most(bound: float) -> Goal:
    """Goal for a ratio of costs."""
    return Goal(bound, is_floor=False)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the neighbours. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_round(goal: Goal, ours: Sequence[float], beside: Sequence[float]) -> Spread:
    """Ratios of the two sides of each round. Raises ValueError where rounds differ in number."""
    return Spread.of([goal.ratio(a, b) for a, b in zip(ours, beside, strict=True)])
