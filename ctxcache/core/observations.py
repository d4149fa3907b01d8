"""Observations: what metrics tell beside the counters of GetStats. Facts, counted where they happen."""

from collections import Counter
from dataclasses import dataclass, field

from ctxcache.core.histogram import LONG_S, QUICK_S, Histogram


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
    """Of one segment, from the tier below to memory."""
    flush_s: Histogram = field(default_factory=_quick)
    """Of one session, until all of it was durable."""
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Local clients' operations, by kind and end: OK, or an error's reason."""
    upkeep_failures: Counter[str] = field(default_factory=Counter)
    """Steps of upkeep that failed, by name."""

    def regretted(self, token_count: int, gone_s: float) -> None:
        """A session of so many tokens that was evicted so long ago was made anew."""
        self.regretted_session_count += 1
        self.regretted_token_count += token_count
        self.evict_to_reuse_s.observe(gone_s)
