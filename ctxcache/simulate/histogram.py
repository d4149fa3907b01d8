"""A histogram of durations in bounded memory: buckets of 1 % from a microsecond up."""

import math
from collections import Counter

LEAST_S = 1e-6
STEP = math.log(1.01)


class Histogram:
    """Counts by bucket. A quantile is off by half a per cent at most, and 0 is 0."""

    __slots__ = ("buckets", "count", "sum_s")

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        """How many durations, by number of the bucket."""
        self.count = 0
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count a duration of 0 or more."""
        self.count += 1
        self.sum_s += value_s
        self.buckets[int(math.log(value_s / LEAST_S) / STEP) + 1 if value_s > LEAST_S else 0] += 1

    def merge(self, other: "Histogram") -> None:
        """Count another's durations, too."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.buckets.update(other.buckets)

    def quantile_s(self, share: float) -> float:
        """The duration that so great a share does not exceed; 0 where nothing was counted."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return LEAST_S * math.exp((bucket - 0.5) * STEP) if bucket else 0.0
        return 0.0
