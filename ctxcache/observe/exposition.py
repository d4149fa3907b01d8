"""All metrics of a server as text for Prometheus: read on the event loop, written in a thread.

Reading takes a time that grows with tenants and with sessions that have unwritten rows, not with sessions or
segments; it waits for nothing. `watch_loop` measures how late the event loop comes to a timer: what stalls
the loop stalls every call. Bounded: one scrape at a time, others wait for their turn. Worst case: a file
system that hangs under `statvfs` keeps a thread, and further scrapes wait.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ctxcache.cache import Cache
from ctxcache.cache.state import LOOKUP, READ, RESULTS
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.fleet.claims import FleetFacts
from ctxcache.core.fleet.tenure import Tenure
from ctxcache.core.observations import QUICK_S, Histogram
from ctxcache.core.savings import Savings
from ctxcache.observe.families import families
from ctxcache.observe.moment import Sample, taken
from ctxcache.observe.table import OWN
from ctxcache.service.admission import Admissions, Connections, RpcTimes
from ctxcache.storage.tiers.base import Tier, TierRefusal
from ctxcache.wire.status import code_name

TENANTS_SHOWN = 100
OTHER = "_other"
"""The tenants that are not shown by name, together."""
SECOND_NS = 10**9


def read_cache(cache: Cache) -> Iterator[Sample]:
    """Every sample of the cache's metrics."""
    for metric in OWN:
        if metric.counted:
            yield Sample(metric.name, getattr(cache.state.counters, metric.counted))
    yield from _hits(cache)
    yield from _prefixes(cache)
    yield from _stay(cache)
    yield from _tiers(cache)
    yield from _moves(cache)
    yield from _leases(cache)
    yield from _tenants(cache)


def _hits(cache: Cache) -> Iterator[Sample]:
    state, counters, seen = cache.state, cache.state.counters, cache.state.seen
    for by in (LOOKUP, READ):
        for result in RESULTS:
            yield Sample("ctxcache_accesses_total", state.journal.counts[by, result], (by, result))
    in_dram = counters.dram_hit_token_count
    yield Sample("ctxcache_read_tokens_total", in_dram, ("dram",))
    yield Sample("ctxcache_read_tokens_total", counters.read_token_count - in_dram, ("ssd",))
    yield Sample("ctxcache_regretted_sessions_total", seen.regretted_session_count)
    yield Sample("ctxcache_regretted_tokens_total", seen.regretted_token_count)
    yield Sample("ctxcache_evict_to_reuse_seconds", taken(seen.evict_to_reuse_s))


def _prefixes(cache: Cache) -> Iterator[Sample]:
    counts, index = cache.prefixes.counts, cache.ledger.keyed.index
    yield Sample("ctxcache_prefix_asked_tokens_total", counts.asked_token_count)
    yield Sample("ctxcache_prefix_found_tokens_total", counts.found_token_count)
    yield Sample("ctxcache_prefix_adopted_tokens_total", counts.adopted_token_count)
    yield Sample("ctxcache_prefix_adopted_bytes_total", counts.adopted_bytes)
    yield Sample("ctxcache_prefix_keys", len(index))
    yield Sample("ctxcache_prefix_index_bytes", index.size_bytes)


def _stay(cache: Cache) -> Iterator[Sample]:
    state, counters, seen, ledger = cache.state, cache.state.counters, cache.state.seen, cache.ledger
    yield Sample("ctxcache_sessions", ledger.session_count)
    yield Sample("ctxcache_session_limit", state.limits.session_count)
    yield Sample("ctxcache_blocks", len(ledger.blocks()))
    yield Sample("ctxcache_wall_clock_ahead_seconds", state.clock.wall_ahead_ns() / SECOND_NS)
    yield Sample("ctxcache_models", len(state.models))
    yield Sample("ctxcache_model_limit", state.limits.model_count)
    yield Sample("ctxcache_segments", ledger.segment_count)
    for cause, count in (
        ("expired", counters.expired_session_count),
        ("evicted", counters.evicted_session_count),
        ("deleted", seen.deleted_session_count),
    ):
        yield Sample("ctxcache_ended_sessions_total", count, (cause,))
    yield Sample("ctxcache_evicted_session_age_seconds", taken(seen.evicted_age_s))
    yield Sample("ctxcache_evicted_session_idle_seconds", taken(seen.evicted_idle_s))
    yield Sample("ctxcache_dram_residence_seconds", taken(seen.memory_residence_s))


def _tiers(cache: Cache) -> Iterator[Sample]:
    ledger = cache.ledger
    yield from _tier("dram", cache.arena, cache.arena.refusals, ledger.memory)
    yield from _tier("ssd", cache.ssd, cache.devices.refusals, ledger.below)
    for path, written_bytes in zip(cache.ssd.paths, cache.ssd.written_bytes, strict=True):
        yield Sample("ctxcache_path_written_bytes_total", written_bytes, (path,))
    withheld = cache.ledger.lost.withheld
    yield Sample("ctxcache_withheld_sessions", len(withheld))
    yield Sample("ctxcache_withheld_tokens", sum(withheld.values()))
    yield Sample("ctxcache_quarantined_slots", len(ledger.below.quarantined))
    yield Sample("ctxcache_quarantined_bytes", sum(slot.size_bytes for slot in ledger.below.quarantined))
    yield Sample("ctxcache_stranded_slots", len(ledger.below.stranded))
    marks, capacity_bytes = ledger.watermarks, ledger.memory.capacity_bytes
    for mark, share in (
        ("dram_low", marks.low),
        ("dram_high", marks.high),
        ("dirty", marks.dirty),
        ("dirty_limit", marks.dirty_limit),
    ):
        yield Sample("ctxcache_watermark_bytes", int(share * capacity_bytes), (mark,))
    for by, pins in (("leases", cache.leases.pins), ("reservations", cache.appends.pins)):
        yield Sample("ctxcache_pinned_bytes", pins.used_bytes, (by,))
        yield Sample("ctxcache_pinned_limit_bytes", pins.limit_bytes, (by,))
        yield Sample("ctxcache_pin_waiters", pins.waiting_count, (by,))


def _tier(
    name: str, tier: Tier, refusals: Mapping[int, TierRefusal], slots: SlotAllocator
) -> Iterator[Sample]:
    for i, path in enumerate(tier.paths):
        yield Sample("ctxcache_tier_capacity_bytes", tier.capacities_bytes[i], (name, path))
        yield Sample("ctxcache_tier_used_bytes", slots.used_bytes_by_path[i], (name, path))
        yield Sample("ctxcache_tier_largest_free_bytes", slots.largest_free_bytes_by_path[i], (name, path))
        yield Sample("ctxcache_tier_segments", slots.slot_count_by_path[i], (name, path))
        refusal = refusals.get(i)
        state = "open" if refusal is None else refusal.state
        for other in ("open", "resting", "fenced", "lost"):
            yield Sample("ctxcache_path_state", other == state, (name, path, other))


def _moves(cache: Cache) -> Iterator[Sample]:
    state, seen, ledger = cache.state, cache.state.seen, cache.ledger
    ahead = ledger.placement.prefetched
    yield Sample("ctxcache_promotion_seconds", taken(seen.promotion_s))
    yield Sample("ctxcache_prefetched_segments_total", ahead.prefetched_segment_count)
    yield Sample("ctxcache_prefetch_used_segments_total", ahead.prefetch_used_segment_count)
    yield Sample("ctxcache_prefetch_late_segments_total", ahead.prefetch_late_segment_count)
    yield Sample("ctxcache_prefetch_unused_segments_total", ahead.prefetch_unused_segment_count)
    yield Sample("ctxcache_prefetch_waiting_segments", len(ledger.placement.unread))
    yield Sample("ctxcache_flush_seconds", taken(seen.flush_s))
    yield Sample("ctxcache_flushes", cache.flushing.flush_count)
    since_ns, now_ns = ledger.unwritten.oldest_ns(), state.clock.monotonic_ns()
    yield Sample("ctxcache_flush_lag_seconds", 0 if since_ns is None else (now_ns - since_ns) / SECOND_NS)
    yield Sample("ctxcache_dirty_bytes", ledger.unwritten.due_bytes)
    yield Sample("ctxcache_spared_bytes", ledger.unwritten.dirty_bytes - ledger.unwritten.due_bytes)
    yield Sample("ctxcache_claimed_bytes", ledger.unwritten.claimed_bytes)
    yield Sample("ctxcache_unwritten_sessions", len(ledger.unwritten))
    yield Sample("ctxcache_single_copy_segments", len(ledger.copies.single))
    yield Sample("ctxcache_spoiled_slots", len(cache.ledger.memory.spoiled))
    for step, count in seen.upkeep_failures.items():
        yield Sample("ctxcache_upkeep_failures_total", count, (step,))


def _leases(cache: Cache) -> Iterator[Sample]:
    yield Sample("ctxcache_leases", cache.leases.lease_count)
    yield Sample("ctxcache_lease_limit", cache.state.limits.lease_count)
    yield Sample("ctxcache_oldest_lease_seconds", cache.leases.oldest_lease_s)
    yield Sample("ctxcache_lease_seconds", taken(cache.state.seen.lease_s))
    yield Sample("ctxcache_reservations", cache.appends.reservation_count)
    for (operation, end), count in cache.state.seen.operations.items():
        yield Sample("ctxcache_local_operations_total", count, (operation, end))
    yield Sample("ctxcache_engines", cache.queues.engine_count)
    yield Sample("ctxcache_engine_limit", cache.queues.limits.engine_count)
    yield Sample("ctxcache_waiting_jobs", cache.queues.waiting_count)


def _tenants(cache: Cache) -> Iterator[Sample]:
    ledger, quotas = cache.ledger, cache.ledger.quotas
    names = ledger.tenants()
    yield Sample("ctxcache_tenants", len(names))
    shown = shown_tenants(
        names, {name: ledger.usage.of(name).kept_bytes for name in names}, set(ledger.usage.shares.by_tenant)
    )
    sums: Counter[tuple[str, str, str]] = Counter()
    for name in names:
        # Those that are not shown are added up under one name: labels stay bounded, sums stay right.
        use, own, as_name = ledger.usage.of(name), quotas.own(name), name if name in shown else OTHER
        sums["ctxcache_tenant_sessions", as_name, ""] += len(ledger.names.ids(name))
        for tier, size_bytes in (
            ("dram", use.memory_bytes),
            ("ssd", use.durable_bytes),
            ("kept", use.kept_bytes),
        ):
            sums["ctxcache_tenant_bytes", as_name, tier] += size_bytes
        for tier, size_bytes in (("dram", own.memory_bytes), ("ssd", own.durable_bytes)):
            sums["ctxcache_tenant_guaranteed_bytes", as_name, tier] += size_bytes
        if as_name == name and own.limit_bytes is not None:
            yield Sample("ctxcache_tenant_limit_bytes", own.limit_bytes, (name,))
        sums["ctxcache_tenant_read_tokens_total", as_name, ""] += cache.state.read_tokens[name]
        sums["ctxcache_tenant_appended_tokens_total", as_name, ""] += cache.state.appended_tokens[name]
        for what in ("computed", "used", "wasted"):
            sums["ctxcache_tenant_ahead_tokens_total", as_name, what] += cache.state.ahead_tokens[name, what]
    for (metric, tenant, tier), value in sums.items():
        yield Sample(metric, value, (tenant, tier) if tier else (tenant,))


def _saved(savings: Savings, token_count: int) -> Iterator[Sample]:
    yield Sample("ctxcache_saved_prefill_seconds_total", savings.prefill_s(token_count))
    yield Sample("ctxcache_saved_dollars_total", savings.dollars(token_count) or 0.0)


def shown_tenants(names: set[str], kept_bytes: dict[str, int], with_share: set[str]) -> set[str]:
    """Tenants that are shown by name: those with a share, then those with most bytes, then by name."""
    ordered = sorted(names, key=lambda name: (name not in with_share, -kept_bytes[name], name))
    return set(ordered[:TENANTS_SHOWN])


INTERVAL_S = 0.1


class LoopLag:
    """Ten timers a second, each measured. Owned by the event loop."""

    def __init__(self) -> None:
        self.lag_s = Histogram(QUICK_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, on the running loop."""
        self._begin(asyncio.get_running_loop())

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_S, self._fire, loop, loop.time() + INTERVAL_S)

    # Timed anew each time: a stall is told once, by the timer that it held up.
    def _fire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.lag_s.observe(loop.time() - due_s)
        self._begin(loop)


@dataclass(slots=True)
class Sources:
    """Where metrics come from, beside the cache."""

    cache: Cache
    admissions: Admissions
    rpc_times: RpcTimes
    version: str
    placement_policy: str
    start_time_s: float
    connections: Callable[[], Connections]
    bulk_connection_count: Callable[[], int]
    arena_prefaulted_bytes: Callable[[], int]
    metadata_commit_count: Callable[[], int]
    metadata_problem: Callable[[], str]
    """Why it takes no changes; empty while it does."""
    metadata_reopened_count: Callable[[], int]
    metadata_properties: Callable[[], Mapping[str, int]]
    """Called in a thread."""
    data_directory: str
    loop_lag_s: Histogram
    settings: Callable[[], Mapping[str, str]]
    """The settings that differ from their default, as people may see them."""
    shows_names: Callable[[], bool]
    """Whether sessions and engines may be named to whoever reaches the endpoint."""
    savings: Savings
    fleet: Callable[[], FleetFacts] | None = None
    """None for a store that is alone."""
    scrape_s: Histogram = field(default_factory=lambda: Histogram(QUICK_S))

    @property
    def is_ready(self) -> bool:
        """Whether the server takes work: it does not drain."""
        return not self.admissions.calls.is_draining

    @property
    def why_not_ready(self) -> str:
        """Why it does not take all work; empty when it does."""
        if not self.is_ready:
            return "draining"
        problem = self.metadata_problem()
        return problem and f"writes are refused, reads go on: metadata {problem}"


# The readers of each figure. Nothing on the loop waits:
#
#     event loop   counters, gauges, histograms of cache and calls       copied to samples
#     thread       RocksDB's properties, statvfs, /proc                  may hang with a device
#     thread       samples to text
class Exposition:
    """Writes the metrics of one server."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._process = ProcessCollector(registry=None)
        self._turn = asyncio.Lock()

    async def text(self, accepted: str) -> tuple[bytes, str]:
        """All metrics, in the format that is asked for, and its content type."""
        async with self._turn:
            begun_s = perf_counter()
            samples = list(read(self._sources))
            self._sources.scrape_s.observe(perf_counter() - begun_s)
            # Within the turn: a scrape that hangs holds up the next one instead of taking another thread.
            return await asyncio.to_thread(self._written, samples, accepted)

    def _written(self, samples: list[Sample], accepted: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accepted)
        samples += _slow(self._sources)
        return encode(_Made([*families(OWN, samples), *self._process.collect()])), content_type


def read(sources: Sources) -> Iterator[Sample]:
    """All samples but those that ask the system, or RocksDB."""
    yield from read_cache(sources.cache)
    yield from _saved(sources.savings, sources.cache.state.counters.read_token_count)
    yield from _server(sources)
    yield from _calls(sources)
    if sources.fleet is not None:
        yield from _fleet(sources.fleet())


class _Made(Collector):
    """Families that are there already."""

    def __init__(self, made: Iterable[Family]) -> None:
        self._made = made

    def collect(self) -> Iterable[Family]:
        return self._made


def _server(sources: Sources) -> Iterator[Sample]:
    yield Sample("ctxcache_info", 1, (sources.version, sources.placement_policy))
    yield Sample("ctxcache_start_time_seconds", sources.start_time_s)
    yield Sample("ctxcache_ready", sources.is_ready)
    yield Sample("ctxcache_event_loop_lag_seconds", taken(sources.loop_lag_s))
    yield Sample("ctxcache_scrape_seconds", taken(sources.scrape_s))
    yield Sample("ctxcache_arena_prefaulted_bytes", sources.arena_prefaulted_bytes())
    yield Sample("ctxcache_metadata_fenced", bool(sources.metadata_problem()))
    yield Sample("ctxcache_metadata_reopened_total", sources.metadata_reopened_count())
    yield Sample("ctxcache_metadata_commits_total", sources.metadata_commit_count())


def _calls(sources: Sources) -> Iterator[Sample]:
    for method, timer in sources.rpc_times:
        for end, histogram in timer.by_end.items():
            code, reason = code_name(end)
            yield Sample("ctxcache_rpc_seconds", taken(histogram), (method, code, reason))
    for sort, admission in sources.admissions.by_sort().items():
        yield Sample("ctxcache_rpcs", admission.running_count, (sort,))
        yield Sample("ctxcache_rpc_limit", admission.limit, (sort,))
        for reason, refusal in (
            ("TOO_MANY_REQUESTS", admission.when_full),
            ("DRAINING", admission.when_draining),
        ):
            yield Sample("ctxcache_refused_rpcs_total", refusal.count, (sort, reason))
    connections = sources.connections()
    yield Sample("ctxcache_connections", connections.count)
    yield Sample("ctxcache_connection_limit", connections.limit)
    yield Sample("ctxcache_ended_connections_total", connections.ended_count)
    yield Sample("ctxcache_bulk_connections", sources.bulk_connection_count())


def _fleet(facts: FleetFacts) -> Iterator[Sample]:
    counts = facts.counts
    yield Sample("ctxcache_fleet_sure", facts.is_sure)
    for tenure in Tenure:
        yield Sample("ctxcache_fleet_sessions", facts.tenures[tenure], (tenure.name.lower(),))
    yield Sample("ctxcache_fleet_arrived_sessions_total", counts.arrived)
    yield Sample("ctxcache_fleet_arrived_tokens_total", counts.arrived_tokens)
    yield Sample("ctxcache_fleet_arrived_bytes_total", counts.arrived_bytes)
    yield Sample("ctxcache_fleet_yielded_sessions_total", counts.yielded)
    yield Sample("ctxcache_fleet_superseded_sessions_total", counts.superseded)
    yield Sample("ctxcache_fleet_owners_lost_total", counts.taken_from_silent)
    yield Sample("ctxcache_fleet_head_reads_total", counts.head_reads)
    yield Sample("ctxcache_fleet_head_changes_total", counts.head_changes)
    yield Sample("ctxcache_fleet_no_answers_total", counts.no_answers)
    yield Sample("ctxcache_fleet_restored_sessions_total", counts.arrived_stored)
    yield Sample("ctxcache_fleet_shared_objects_total", counts.shared_objects)
    yield Sample("ctxcache_fleet_shared_bytes_total", counts.shared_bytes)
    yield Sample("ctxcache_fleet_unshared_sessions", facts.unshared_count)
    yield Sample("ctxcache_fleet_share_failures_total", counts.share_failures)
    yield Sample("ctxcache_fleet_removed_objects_total", counts.removed_objects)
    yield Sample("ctxcache_fleet_asked_prefixes_total", counts.asked_prefixes)
    yield Sample("ctxcache_fleet_borrowed_prefixes_total", counts.borrowed_prefixes)
    yield Sample("ctxcache_fleet_borrowed_tokens_total", counts.borrowed_tokens)
    yield Sample("ctxcache_fleet_borrowed_bytes_total", counts.borrowed_bytes)
    yield Sample("ctxcache_fleet_lent_prefixes_total", counts.lent_prefixes)
    yield Sample("ctxcache_fleet_told_prefixes_total", counts.told_prefixes)


def _slow(sources: Sources) -> Iterator[Sample]:
    """Samples that ask the system, or RocksDB: in a thread."""
    for name, value in sources.metadata_properties().items():
        yield Sample(f"ctxcache_rocksdb_{name}", value)
    for of, path in (("data", sources.data_directory), *(("ssd", path) for path in sources.cache.ssd.paths)):
        # A path that is gone has no room to report; its state is reported besides.
        with suppress(OSError):
            space = os.statvfs(path)
            yield Sample("ctxcache_filesystem_free_bytes", space.f_bavail * space.f_frsize, (of, path))
