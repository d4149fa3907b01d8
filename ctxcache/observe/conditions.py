"""Conditions: what of the alerts holds at this moment, by the same names and bounds as Prometheus' rules.

Pure.

A rule waits until it has held for some minutes; a condition does not. Conditions that only Prometheus can
know are left out: CtxcacheDown, CtxcacheRestartsAgainAndAgain; and what asks the operating system.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ctxcache.observe.moment import Moment, Ring, quantile

CRITICAL, WARNING = "critical", "warning"
SMALL_CALLS = ("GetSession", "LookupSessions", "UpdateSession")


@dataclass(frozen=True, slots=True)
class Condition:
    """Holds while what it looks at is above `bound`, in `unit`."""

    alert: str
    severity: str
    summary: str
    unit: str
    bound: float
    look: Callable[[Moment, Ring], float]


@dataclass(frozen=True, slots=True)
class HeldCondition:
    """A condition that holds, with what it found."""

    alert: str
    severity: str
    summary: str
    found: float
    bound: float
    unit: str


# The facts that a condition may look at:
#
#     now     gauges, as they are
#     ring    counters and distributions, as they have grown in the last minutes
def holding(now: Moment, ring: Ring) -> Iterator[HeldCondition]:
    """The conditions that hold, the critical ones first."""
    for severity in (CRITICAL, WARNING):
        for each in CONDITIONS:
            found = each.look(now, ring) if each.severity == severity else 0
            if found > each.bound:
                yield HeldCondition(each.alert, severity, each.summary, found, each.bound, each.unit)


def _gauge(name: str) -> Callable[[Moment, Ring], float]:
    return lambda now, _: max(now.of(name).values(), default=0)


def _grown(name: str, minutes: int, *, result: str = "") -> Callable[[Moment, Ring], float]:
    def look(now: Moment, ring: Ring) -> float:
        grown = ring.last(now, minutes).of(name)
        return sum(value for labels, value in grown.items() if not result or result in labels)

    return look


def _p99(name: str, minutes: int, methods: tuple[str, ...] = ()) -> Callable[[Moment, Ring], float]:
    def look(now: Moment, ring: Ring) -> float:
        values = ring.last(now, minutes).distributions(name)
        asked = (
            value
            for labels, value in values.items()
            if not methods or labels[0].rpartition("/")[2] in methods
        )
        return quantile(asked, 0.99)

    return look


def _is_draining(now: Moment, _: Ring) -> float:
    return 1 - now.one("ctxcache_ready")


def _paths(state: str) -> Callable[[Moment, Ring], float]:
    def look(now: Moment, _: Ring) -> float:
        # Labels in the order of the metric's: tier, path, state.
        return sum(value for labels, value in now.of("ctxcache_path_state").items() if labels[2] == state)

    return look


def _refused_per_s(now: Moment, ring: Ring) -> float:
    grown = ring.last(now, 5).of("ctxcache_refused_rpcs_total")
    return max((n / 300 for labels, n in grown.items() if labels[1] == "TOO_MANY_REQUESTS"), default=0)


def _internal(now: Moment, ring: Ring) -> float:
    grown = ring.last(now, 10).distributions("ctxcache_rpc_seconds")
    return sum(sum(value.counts) for labels, value in grown.items() if labels[1] == "INTERNAL")


def _held(now: Moment, _: Ring) -> float:
    limits = now.of("ctxcache_pinned_limit_bytes")
    # The shares of leases and of reservations: the larger one counts.
    return max(
        (n / limits[by] for by, n in now.of("ctxcache_pinned_bytes").items() if limits.get(by)), default=0
    )


def _filled(name: str) -> Callable[[Moment, Ring], float]:
    return lambda now, _: now.one(f"{name}s") / (now.one(f"{name}_limit") or float("inf"))


def _evicted_share(now: Moment, ring: Ring) -> float:
    grown = ring.last(now, 30).of("ctxcache_accesses_total")
    evicted = sum(n for labels, n in grown.items() if labels[1] == "evicted")
    return evicted / (sum(grown.values()) or 1)


def _wasted_share(now: Moment, ring: Ring) -> float:
    grown = ring.last(now, 30)
    unused = grown.one("ctxcache_prefetch_unused_segments_total")
    return unused / (grown.one("ctxcache_prefetched_segments_total") or 1)


def _tenant_share(now: Moment, _: Ring) -> float:
    limits = now.of("ctxcache_tenant_limit_bytes")
    kept = now.of("ctxcache_tenant_bytes")
    return max((kept.get((*who, "kept"), 0) / limit for who, limit in limits.items() if limit), default=0)


CONDITIONS = (
    Condition("CtxcacheNotReady", WARNING, "ctxcache takes no work", "", 0, _is_draining),
    Condition("CtxcachePathFenced", CRITICAL, "An SSD path refuses writes", "paths", 0, _paths("fenced")),
    Condition("CtxcachePathLost", CRITICAL, "An SSD path is lost", "paths", 0, _paths("lost")),
    Condition(
        "CtxcachePathLacksRoom", WARNING, "An SSD path lacks room for writes", "paths", 0, _paths("resting")
    ),
    Condition(
        "CtxcacheMetadataFenced",
        CRITICAL,
        "The metadata takes no changes",
        "",
        0,
        _gauge("ctxcache_metadata_fenced"),
    ),
    Condition(
        "CtxcacheCorruptSegments",
        CRITICAL,
        "Stored bytes came back wrong",
        "segments in an hour",
        0,
        _grown("ctxcache_corrupt_segments_total", 60),
    ),
    Condition(
        "CtxcacheMendedSegments",
        WARNING,
        "Memory changed bytes",
        "segments in an hour",
        0,
        _grown("ctxcache_mended_segments_total", 60),
    ),
    Condition(
        "CtxcacheSingleCopies",
        WARNING,
        "Segments lack their second copy",
        "segments",
        0,
        _gauge("ctxcache_single_copy_segments"),
    ),
    Condition(
        "CtxcacheQuarantinedPlaces",
        WARNING,
        "Places on SSD are kept from use",
        "places",
        0,
        _gauge("ctxcache_quarantined_slots"),
    ),
    Condition(
        "CtxcacheFlushLag",
        WARNING,
        "Tokens are in memory alone for minutes",
        "s",
        120,
        _gauge("ctxcache_flush_lag_seconds"),
    ),
    Condition(
        "CtxcacheWritersWait",
        WARNING,
        "Writers wait because too much is not on SSD",
        "writes in 10 min",
        10,
        _grown("ctxcache_delayed_writes_total", 10),
    ),
    Condition(
        "CtxcacheUpkeepFails",
        WARNING,
        "What happens in the background fails",
        "failures in 10 min",
        5,
        _grown("ctxcache_upkeep_failures_total", 10),
    ),
    Condition(
        "CtxcacheRefusesCalls",
        WARNING,
        "Callers are refused because too many come at once",
        "calls/s",
        1,
        _refused_per_s,
    ),
    Condition(
        "CtxcacheInternalErrors",
        WARNING,
        "A call ended with an internal error",
        "calls in 10 min",
        0,
        _internal,
    ),
    Condition(
        "CtxcacheSlowCalls",
        WARNING,
        "Small calls are slow",
        "s",
        0.1,
        _p99("ctxcache_rpc_seconds", 5, SMALL_CALLS),
    ),
    Condition(
        "CtxcacheEventLoopStalls",
        WARNING,
        "The event loop stalls",
        "s",
        0.25,
        _p99("ctxcache_event_loop_lag_seconds", 5),
    ),
    Condition(
        "CtxcacheSessionsNearlyFull",
        WARNING,
        "There are nearly as many sessions as there may be",
        "of the limit",
        0.9,
        _filled("ctxcache_session"),
    ),
    Condition(
        "CtxcacheLeasesNearlyFull",
        WARNING,
        "There are nearly as many leases as there may be",
        "of the limit",
        0.8,
        _filled("ctxcache_lease"),
    ),
    Condition(
        "CtxcacheModelsNearlyFull",
        WARNING,
        "There are nearly as many models as there may be",
        "of the limit",
        0.9,
        _filled("ctxcache_model"),
    ),
    Condition(
        "CtxcacheArenaHeld",
        WARNING,
        "Readers or writers hold all of the arena that they may",
        "of the bound",
        0.95,
        _held,
    ),
    Condition(
        "CtxcacheEvictsWhatComesBack",
        WARNING,
        "A tenth of accesses miss what was evicted",
        "of accesses",
        0.1,
        _evicted_share,
    ),
    Condition(
        "CtxcacheFingerprintMismatch",
        WARNING,
        "Engines ask with another model than was saved with",
        "misses in 15 min",
        10,
        _grown("ctxcache_accesses_total", 15, result="fingerprint_mismatch"),
    ),
    Condition(
        "CtxcachePrefetchWasted",
        WARNING,
        "Most of what is promoted ahead of need is not read",
        "of it",
        0.5,
        _wasted_share,
    ),
    Condition(
        "CtxcacheTenantAtItsLimit",
        WARNING,
        "A tenant has what it may have",
        "of its limit",
        0.95,
        _tenant_share,
    ),
    Condition(
        "CtxcacheSlowDevice",
        WARNING,
        "Reading from SSD is slow",
        "s",
        0.5,
        _p99("ctxcache_promotion_seconds", 10),
    ),
)
