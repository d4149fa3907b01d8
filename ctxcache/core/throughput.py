"""Throughput: how many bytes per second arrive while any are on their way, of late. Pure."""

from math import exp

DEFAULT_BYTES_PER_S = 1e9
"""Before anything was measured: about what one SSD reads."""
DEFAULT_WEIGHT_S = 0.05
"""How much time of measurements the default is worth."""
LEAST_BYTES_PER_S = 50.0
"""Where nothing arrives at all: what is 10 TB away has a time that the wire can say."""
MEMORY_S = 5.0
"""What arrived so much busy time ago counts for 1/e."""


class Throughput:
    """Bytes over the time in which at least one arrival was under way."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._bytes, self._busy_s = DEFAULT_BYTES_PER_S * DEFAULT_WEIGHT_S, DEFAULT_WEIGHT_S

    @property
    def bytes_per_s(self) -> float:
        """The rate; never 0."""
        return self._bytes / self._busy_s

    def begun(self, now_s: float) -> None:
        """An arrival begins."""
        self._pass(now_s)
        self._under_way += 1

    def ended(self, now_s: float, size_bytes: int) -> None:
        """One has ended; it brought so much, nothing if it failed."""
        self._pass(now_s)
        self._under_way -= 1
        self._bytes += size_bytes

    def time_s(self, size_bytes: int) -> float:
        """How long so much takes."""
        return size_bytes / self.bytes_per_s

    def _pass(self, now_s: float) -> None:
        passed_s, self._since_s = max(now_s - self._since_s, 0.0), now_s
        if self._under_way:
            kept = exp(-passed_s / MEMORY_S)
            self._busy_s = self._busy_s * kept + passed_s
            self._bytes = max(self._bytes * kept, self._busy_s * LEAST_BYTES_PER_S)
