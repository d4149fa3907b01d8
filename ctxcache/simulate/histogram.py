"""A histogram of durations in bounded memory: buckets of 1 % from a microsecond up."""

import math
from collections import Counter

LEAST_S = 1e-6
STEP = math.log(1.01)


class Histogram:
    """Counts by bucket. A quantile is off by half a per cent at most, and 0 is 0."""

    __slots__ = ("_buckets", "count", "sum_s")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count a duration of 0 or more."""
        self.count += 1
        self.sum_s += value_s
        self._buckets[int(math.log(value_s / LEAST_S) / STEP) + 1 if value_s > LEAST_S else 0] += 1

    def quantile_s(self, share: float) -> float:
        """The duration that so great a share does not exceed; 0 where nothing was counted."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return LEAST_S * math.exp((bucket - 0.5) * STEP) if bucket else 0.0
        return 0.0
