"""What `top` shows, as numbers: two looks at a server, and what happened in between. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC

from ctxcache.v1.admin_pb2 import Stats
from ctxcache.v1.operations_pb2 import Activity, MethodActivity

# Rpcs that stay open, or are our own looking.
UNCOUNTED = ("Access", "Schedule", "GetStats", "GetActivity", "Verify", "Drain")


@dataclass(frozen=True, slots=True)
class Look:
    """A server at one moment."""

    stats: Stats
    activity: Activity

    @property
    def time_s(self) -> float:
        """When, by the server's clock."""
        return self.activity.time.ToNanoseconds() / 1e9

    @property
    def up_s(self) -> float:
        """Since when it runs."""
        return max(self.time_s - self.stats.start_time.ToNanoseconds() / 1e9, 0.001)

    @property
    def clock(self) -> str:
        """When, for people."""
        return self.activity.time.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S")


@dataclass(frozen=True, slots=True)
class Calls:
    """One method: calls a second, failed ones a second, and how long they take; None where that is not known."""

    method: str
    rate: float
    failed_rate: float
    p50_s: float | None
    p99_s: float | None


class Rates:
    """What happened between two looks; without an earlier one, since the server's start."""

    def __init__(self, now: Look, before: Look | None) -> None:
        # One that was started anew counts from nothing.
        if before is not None and before.stats.start_time != now.stats.start_time:
            before = None
        self._now, self._before = now, before
        self.seconds = now.up_s if before is None else max(now.time_s - before.time_s, 0.001)

    def stat(self, name: str) -> float:
        """A counter of GetStats, a second."""
        return self._per_s(self._grown("stats", name))

    def hit_rate(self) -> float | None:
        """Part of reads and look-ups that found the session; None when there were none."""
        hits, misses = self._grown("activity", "hit_count"), self._grown("activity", "miss_count")
        return hits / (hits + misses) if hits + misses else None

    def dram_rate(self) -> float | None:
        """Part of what was read that was in DRAM already; None when nothing was."""
        read = self._grown("stats", "read_token_count")
        return self._grown("stats", "dram_hit_token_count") / read if read else None

    def refused(self) -> float:
        """Rpcs refused, a second."""
        return self._per_s(self._grown("activity", "refused_rpc_count"))

    def calls(self) -> list[Calls]:
        """Methods that were called, the busiest first."""
        before = {} if self._before is None else {one.method: one for one in self._before.activity.methods}
        found = [self._calls(one, before.get(one.method)) for one in self._now.activity.methods]
        shown = [one for one in found if one.rate and one.method.rpartition("/")[2] not in UNCOUNTED]
        return sorted(shown, key=lambda one: -one.rate)

    def accesses(self, kind: str, name: str) -> float:
        """A session's or a tenant's accesses a second; since a moment unknown when it was not among the busiest before."""
        now = _accesses(self._now.activity, kind).get(name, 0)
        before = {} if self._before is None else _accesses(self._before.activity, kind)
        return self._per_s(max(now - before.get(name, now if self._before else 0), 0))

    def _calls(self, now: MethodActivity, before: MethodActivity | None) -> Calls:
        earlier = before or MethodActivity(bucket_counts=[0] * len(now.bucket_counts))
        buckets = [a - b for a, b in zip(now.bucket_counts, earlier.bucket_counts, strict=True)]
        return Calls(
            now.method, self._per_s(now.count - earlier.count), self._per_s(now.failed_count - earlier.failed_count),
            quantile(now.bounds_seconds, buckets, 0.5), quantile(now.bounds_seconds, buckets, 0.99),
        )  # fmt: skip

    def _grown(self, of: str, name: str) -> int:
        before = 0 if self._before is None else getattr(getattr(self._before, of), name)
        return int(getattr(getattr(self._now, of), name) - before)

    def _per_s(self, count: float) -> float:
        return count / self.seconds


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """The upper bound of the bucket in which so large a part of the values lies below; None without values."""
    left = part * sum(counts)
    if not left:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        left -= count
        if left <= 0:
            return bound
    return float("inf")


def _accesses(activity: Activity, kind: str) -> dict[str, int]:
    if kind == "tenant":
        return {one.tenant: one.access_count for one in activity.tenants}
    return {f"{one.tenant}/{one.name}": one.access_count for one in activity.sessions}
