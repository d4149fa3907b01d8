"""Observations: histograms and counts behind the metrics, beside the counters of GetStats.

Counted where they happen.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import exp

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


def _quick() -> Histogram:
    return Histogram(QUICK_S)


def _long() -> Histogram:
    return Histogram(LONG_S)


@dataclass(slots=True)
class Observations:
    """Since the start. Durations in seconds. Owned by the event loop."""

    deleted_session_count: int = 0
    regretted_session_count: int = 0
    """Sessions that were evicted and made anew."""
    regretted_token_count: int = 0
    """Tokens that they had when they were evicted."""
    evict_to_reuse_s: Histogram = field(default_factory=_long)
    """From a session's eviction until it was made anew."""
    evicted_age_s: Histogram = field(default_factory=_long)
    """From a session's creation, or its coming back, until its eviction."""
    evicted_idle_s: Histogram = field(default_factory=_long)
    """From its last access until then."""
    memory_residence_s: Histogram = field(default_factory=_long)
    """For how long all of a session stayed in memory."""
    lease_s: Histogram = field(default_factory=_long)
    """For how long leases were held."""
    promotion_s: Histogram = field(default_factory=_quick)
    """How long one segment took from the tier below to memory."""
    flush_s: Histogram = field(default_factory=_quick)
    """How long it took until one session was durable."""
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Local clients' operations, by kind and end: OK, or an error's reason."""
    upkeep_failures: Counter[str] = field(default_factory=Counter)
    """Steps of upkeep that failed, by name."""

    def regretted(self, token_count: int, gone_s: float) -> None:
        """A session of so many tokens that was evicted so long ago was made anew."""
        self.regretted_session_count += 1
        self.regretted_token_count += token_count
        self.evict_to_reuse_s.observe(gone_s)


BUSIEST_LIMIT = 1024


class Busiest:
    """Which sessions are accessed most, of late. Every access counts, in constant amortised time.

    When too many are counted, the half with fewer accesses is forgotten and the others count half.
    """

    def __init__(self, limit: int = BUSIEST_LIMIT) -> None:
        self._limit = limit
        self._counts: dict[bytes, int] = {}

    def count(self, uid: bytes) -> None:
        """One more access."""
        self._counts[uid] = self._counts.get(uid, 0) + 1
        # Amortised: one sort of 1,024 after 512 new sessions. Counts halve, so that an old favourite can be
        # overtaken.
        if len(self._counts) > self._limit:
            self._counts = {uid: (count + 1) // 2 for uid, count in self.first(self._limit // 2)}

    def forget(self, uid: bytes) -> None:
        """The session is gone."""
        self._counts.pop(uid, None)

    def first(self, limit: int) -> list[tuple[bytes, int]]:
        """The busiest and their accesses, most first."""
        return nlargest(limit, self._counts.items(), key=lambda item: item[1])


DEFAULT_BYTES_PER_S = 1e9
"""Before anything was measured: about what one SSD reads."""
DEFAULT_WEIGHT_S = 0.05
"""How much time of measurements the default is worth."""
LEAST_BYTES_PER_S = 50.0
"""Where nothing arrives at all: what is 10 TB away has a time that the wire can say."""
MEMORY_S = 5.0
"""Bytes that arrived this much busy time ago count for 1/e."""


# Why busy time: two promotions at once take as long as one where the device has room for both.
#
#     arrival 1   ├──────────────┤
#     arrival 2          ├──────────────┤          ├─────┤
#     counted     ├─────────────────────┤          ├─────┤     their bytes over these times
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
        # The clock is the caller's: one that goes back counts no time.
        passed_s, self._since_s = max(now_s - self._since_s, 0.0), now_s
        # Time in which nothing was under way says nothing about the device.
        if self._under_way:
            kept = exp(-passed_s / MEMORY_S)
            self._busy_s = self._busy_s * kept + passed_s
            # The floor moves with the time: a device that returns nothing sinks to it, and never to 0.
            self._bytes = max(self._bytes * kept, self._busy_s * LEAST_BYTES_PER_S)
