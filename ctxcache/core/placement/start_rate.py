"""How many jobs per second an engine starts, learned from those it has started. Pure."""

from math import exp

DEFAULT_PER_S = 1.0
"""Before anything was seen."""
MEMORY_S = 60.0
"""What lies that long back counts for 1/e."""


class StartRate:
    """Jobs started over the time in which jobs waited; idle time tells nothing of an engine's speed."""

    def __init__(self, now_s: float) -> None:
        self._then_s = now_s
        self._started, self._waited_s = DEFAULT_PER_S, 1.0

    @property
    def per_s(self) -> float:
        """Jobs per second; never 0."""
        return self._started / self._waited_s

    def passed(self, now_s: float, *, is_waiting: bool, started: int = 0) -> None:
        """Time went by up to `now_s`, with jobs waiting or not, and then some were started."""
        passed_s, self._then_s = max(now_s - self._then_s, 0.0), max(now_s, self._then_s)
        if is_waiting:
            kept = exp(-passed_s / MEMORY_S)
            self._started *= kept
            self._waited_s = self._waited_s * kept + passed_s
        self._started = max(self._started + started, 1e-6)
        # However fast they start: a time of nothing would be no rate.
        self._waited_s = max(self._waited_s, 1e-6)
