"""A moment: the values of all metrics, by name and labels. And a ring of moments for the last hour.

A recording puts a moment a minute into the ring, on the running loop, and costs what a scrape does.
Bounded: MINUTES moments, of KEPT counters only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from ctxcache.core.observations import Histogram


class Distribution(NamedTuple):
    """A histogram as it was: counts by bucket, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """One value. `labels` are in the order of the metric's."""

    name: str
    value: float | Distribution
    labels: tuple[str, ...] = ()


def taken(histogram: Histogram) -> Distribution:
    """A histogram as it is now."""
    return Distribution(histogram.bounds, tuple(histogram.counts), histogram.total)


MINUTES = 60
KEPT = frozenset(
    {
        "ctxcache_accesses_total",
        "ctxcache_read_tokens_total",
        "ctxcache_appended_tokens_total",
        "ctxcache_prefix_asked_tokens_total",
        "ctxcache_prefix_found_tokens_total",
        "ctxcache_prefix_adopted_bytes_total",
        "ctxcache_corrupt_segments_total",
        "ctxcache_mended_segments_total",
        "ctxcache_delayed_writes_total",
        "ctxcache_fleet_owners_lost_total",
        "ctxcache_fleet_share_failures_total",
        "ctxcache_upkeep_failures_total",
        "ctxcache_refused_rpcs_total",
        "ctxcache_rpc_seconds",
        "ctxcache_event_loop_lag_seconds",
        "ctxcache_promotion_seconds",
        "ctxcache_promoted_segments_total",
        "ctxcache_prefetched_segments_total",
        "ctxcache_prefetch_unused_segments_total",
        "ctxcache_regretted_tokens_total",
        "ctxcache_saved_prefill_seconds_total",
        "ctxcache_saved_dollars_total",
    }
)
"""The counters that are asked for over time."""
Labels = tuple[str, ...]
Value = float | Distribution
NOTHING: Mapping[Labels, Value] = {}


class Moment:
    """Values by metric and labels, the labels in the order of the metric's."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._values: dict[str, dict[Labels, Value]] = {}
        for sample in samples:
            self._values.setdefault(sample.name, {})[sample.labels] = sample.value

    def of(self, name: str) -> Mapping[Labels, float]:
        """A metric's values that are numbers."""
        found = self._values.get(name, NOTHING)
        return {labels: value for labels, value in found.items() if not isinstance(value, Distribution)}

    def one(self, name: str, *labels: str) -> float:
        """One value; 0 where there is none."""
        return self.of(name).get(labels, 0)

    def distributions(self, name: str) -> Mapping[Labels, Distribution]:
        """A metric's values that are distributions."""
        found = self._values.get(name, NOTHING)
        return {labels: value for labels, value in found.items() if isinstance(value, Distribution)}

    def kept(self) -> "Moment":
        """The part of the moment that is kept."""
        return self._with({name: values for name, values in self._values.items() if name in KEPT})

    def since(self, before: "Moment") -> "Moment":
        """The growth of its counters; gauges are of no use in it."""
        grown: dict[str, dict[Labels, Value]] = {}
        for name in KEPT & self._values.keys():
            earlier = before._values.get(name, NOTHING)  # noqa: SLF001  # its own
            grown[name] = {
                labels: _grown(value, earlier.get(labels)) for labels, value in self._values[name].items()
            }
        return self._with(grown)

    @classmethod
    def _with(cls, values: dict[str, dict[Labels, Value]]) -> "Moment":
        moment = cls(())
        moment._values = values
        return moment


# The ring, and questions to it. `now` is read at the request:
#
#     ring            | m0 | m1 | … | m60 |      now             moments, each of KEPT counters
#     last(now, 5)    now - m56: between four and five minutes
#     by_minute       m2 - m1, …, m60 - m59, now - m60
class Ring:
    """The last hour."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MINUTES + 1)

    def add(self, moment: Moment) -> None:
        """A minute after the one before."""
        self._moments.append(moment.kept())

    def last(self, now: Moment, minutes: int) -> Moment:
        """The growth of counters within the last minutes, or since the start."""
        before = list(self._moments)[-minutes:]
        return now.since(before[0]) if before else Moment(())

    def by_minute(self, now: Moment) -> list[Moment]:
        """Their growth in each minute, the oldest first; the last one has not ended yet."""
        moments = [*self._moments, now][-MINUTES - 1 :]
        return [after.since(before) for before, after in pairwise(moments)]


def quantile(values: Iterable[Distribution], share: float) -> float:
    """The value that `share` of all lie below, evenly spread within a bucket; 0 of none."""
    merged: list[int] = []
    bounds: tuple[float, ...] = ()
    for value in values:
        bounds = value.bounds
        merged = [a + b for a, b in zip(merged or [0] * len(value.counts), value.counts, strict=True)]
    wanted, low = share * sum(merged), 0.0
    for bound, count in zip(bounds, merged, strict=False):
        # Straight within the bucket: the true values are unknown there.
        if count and wanted <= count:
            return low + (bound - low) * wanted / count
        wanted -= count
        low = bound
    return low if sum(merged) else 0.0


def _grown(after: Value, before: Value | None) -> Value:
    if isinstance(after, Distribution):
        # A label that came since has grown from nothing.
        if not isinstance(before, Distribution):
            return after
        counts = tuple(a - b for a, b in zip(after.counts, before.counts, strict=True))
        return Distribution(after.bounds, counts, after.total - before.total)
    return after - before if isinstance(before, int | float) else after


INTERVAL_S = 60.0


class Recording:
    """The task that fills the ring. Owned by the event loop."""

    def __init__(self, read: Callable[[], Moment]) -> None:
        self.read = read
        self.ring = Ring()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Record now, and each minute from now on."""
        self._record(asyncio.get_running_loop())

    def stop(self) -> None:
        """Record no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The next one is timed from here, so a loop that was late does not catch up.
    def _record(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_S, self._record, loop)
        # Last: what cannot be read now is a gap, and not the end.
        self.ring.add(self.read())
