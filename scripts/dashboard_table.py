"""Grafana's dashboards, of stores and of workers: rows and panels.

Texts come from the table of metrics, where there is one metric.
"""

from dataclasses import dataclass

STAT, LINES = "stat", "timeseries"


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: PromQL and legend; `$on` is the selection of servers, `$rate` the window of rates.

    `unit` is Grafana's.
    """

    title: str
    kind: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels of one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `chosen_by`: a metric that every process it may show has."""

    title: str
    uid: str
    chosen_by: str
    rows: tuple[Row, ...]


def _one(
    title: str, unit: str, query: str, legend: str = "{{instance}}", *, kind: str = LINES, width: int = 8
) -> Panel:
    return Panel(title, kind, unit, ((query, legend),), width)


def _quantiles(title: str, metric: str, by: str = "") -> Panel:
    group = f"le{', ' if by else ''}{by}"
    legend = f" {{{{{by}}}}}" if by else ""
    return Panel(
        title,
        LINES,
        "s",
        tuple(
            (
                f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{{$on}}[$rate])))",
                f"p{int(q * 100)}{legend}",
            )
            for q in (0.5, 0.99)
        ),
    )


HIT_SHARE = (
    'sum(rate(ctxcache_accesses_total{result="hit",$on}[$rate])) / '
    "sum(rate(ctxcache_accesses_total{$on}[$rate]))"
)
STORE = Board(
    "ctxcache",
    "ctxcache",
    "ctxcache_info",
    (
        Row(
            "Is it well?",
            (
                _one("Ready", "bool_yes_no", "min(ctxcache_ready{$on})", kind=STAT, width=3),
                _one(
                    "Fenced paths",
                    "none",
                    ('sum(ctxcache_path_state{state="fenced",$on}) + sum(ctxcache_metadata_fenced{$on})'),
                    kind=STAT,
                    width=3,
                ),
                _one(
                    "Corrupt segments",
                    "none",
                    "sum(ctxcache_corrupt_segments_total{$on})",
                    kind=STAT,
                    width=3,
                ),
                _one("Hit share", "percentunit", HIT_SHARE, kind=STAT, width=3),
                _one("At stake in a crash", "s", "max(ctxcache_flush_lag_seconds{$on})", kind=STAT, width=3),
                _one(
                    "Calls per second",
                    "reqps",
                    "sum(rate(ctxcache_rpc_seconds_count{$on}[$rate]))",
                    kind=STAT,
                    width=3,
                ),
                _one("Sessions", "none", "sum(ctxcache_sessions{$on})", kind=STAT, width=3),
                _one(
                    "Up since",
                    "dateTimeFromNow",
                    ("max(ctxcache_start_time_seconds{$on}) * 1000"),
                    kind=STAT,
                    width=3,
                ),
                _quantiles("Event loop lag", "ctxcache_event_loop_lag_seconds"),
                _one(
                    "Refused calls",
                    "reqps",
                    ("sum by (sort, reason) (rate(ctxcache_refused_rpcs_total{$on}[$rate]))"),
                    "{{sort}} {{reason}}",
                ),
                Panel(
                    "Process memory and CPU",
                    LINES,
                    "bytes",
                    (
                        ("process_resident_memory_bytes{$on}", "resident {{instance}}"),
                        ("rate(process_cpu_seconds_total{$on}[$rate]) * 1e9", "CPU, 1 GB is a core"),
                    ),
                ),
            ),
        ),
        Row(
            "Hits",
            (
                _one("Hit share", "percentunit", HIT_SHARE, "hits"),
                _one(
                    "Misses by reason",
                    "ops",
                    'sum by (result) (rate(ctxcache_accesses_total{result!="hit",$on}[$rate]))',
                    "{{result}}",
                ),
                _one(
                    "Tokens reused, by tier",
                    "ops",
                    "sum by (tier) (rate(ctxcache_read_tokens_total{$on}[$rate]))",
                    "{{tier}}",
                ),
                _one(
                    "Tokens appended",
                    "ops",
                    "sum(rate(ctxcache_appended_tokens_total{$on}[$rate]))",
                    "appended",
                ),
                Panel(
                    "Regret: tokens that were evicted and came back",
                    LINES,
                    "ops",
                    (
                        ("sum(rate(ctxcache_regretted_tokens_total{$on}[$rate]))", "tokens"),
                        ("sum(rate(ctxcache_regretted_sessions_total{$on}[$rate]))", "sessions"),
                    ),
                ),
                _quantiles("From eviction until it came back", "ctxcache_evict_to_reuse_seconds"),
            ),
        ),
        Row(
            "Prefixes",
            (
                _one(
                    "Share of prompt tokens found",
                    "percentunit",
                    "sum(rate(ctxcache_prefix_found_tokens_total{$on}[$rate]))"
                    " / sum(rate(ctxcache_prefix_asked_tokens_total{$on}[$rate]))",
                    "found",
                ),
                _one(
                    "Bytes not stored again",
                    "Bps",
                    "sum(rate(ctxcache_prefix_adopted_bytes_total{$on}[$rate]))",
                    "adopted",
                ),
                _one("Memory of the index", "bytes", "ctxcache_prefix_index_bytes{$on}", "{{instance}}"),
            ),
        ),
        Row(
            "Tiers",
            (
                _one(
                    "Used share",
                    "percentunit",
                    "ctxcache_tier_used_bytes{$on} / ctxcache_tier_capacity_bytes{$on}",
                    "{{tier}} {{path}}",
                ),
                _one(
                    "Largest free run", "bytes", "ctxcache_tier_largest_free_bytes{$on}", "{{tier}} {{path}}"
                ),
                _one(
                    "Capacities written a day",
                    "none",
                    "86400 * rate(ctxcache_path_written_bytes_total{$on}[$rate])"
                    " / on(job, instance, path) ctxcache_tier_capacity_bytes{$on}",
                    "{{path}}",
                ),
                Panel(
                    "Not on SSD yet",
                    LINES,
                    "bytes",
                    (
                        ("ctxcache_dirty_bytes{$on}", "dirty"),
                        ("ctxcache_spared_bytes{$on}", "spared"),
                        ("ctxcache_claimed_bytes{$on}", "claimed"),
                        ('ctxcache_watermark_bytes{mark=~"dirty.*",$on}', "{{mark}}"),
                    ),
                ),
                Panel(
                    "Segments moved",
                    LINES,
                    "ops",
                    (
                        ("sum(rate(ctxcache_promoted_segments_total{$on}[$rate]))", "promoted"),
                        ("sum(rate(ctxcache_flushed_segments_total{$on}[$rate]))", "flushed"),
                    ),
                ),
                _one(
                    "Held of the arena",
                    "percentunit",
                    "ctxcache_pinned_bytes{$on} / ctxcache_pinned_limit_bytes{$on}",
                    "{{by}}",
                ),
                _one(
                    "Free room of filesystems",
                    "bytes",
                    "ctxcache_filesystem_free_bytes{$on}",
                    "{{of}} {{path}}",
                ),
                _one("Withheld: lies on lost paths", "none", "ctxcache_withheld_tokens{$on}", "tokens"),
                _one(
                    "Kept from use",
                    "none",
                    "ctxcache_quarantined_slots{$on} + ctxcache_stranded_slots{$on}",
                    "places",
                ),
                _one(
                    "Writers that waited",
                    "ops",
                    "sum(rate(ctxcache_delayed_writes_total{$on}[$rate]))",
                    "writes",
                ),
                Panel(
                    "RocksDB",
                    LINES,
                    "bytes",
                    (
                        ("ctxcache_rocksdb_table_bytes{$on}", "tables"),
                        ("ctxcache_rocksdb_memtable_bytes{$on}", "in memory"),
                        ("ctxcache_rocksdb_pending_compaction_bytes{$on}", "to be compacted"),
                    ),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                _one(
                    "p99 by method",
                    "s",
                    "histogram_quantile(0.99, sum by (le, method) "
                    "(rate(ctxcache_rpc_seconds_bucket{$on}[$rate])))",
                    "{{method}}",
                ),
                _one(
                    "p50 by method",
                    "s",
                    "histogram_quantile(0.5, sum by (le, method) "
                    "(rate(ctxcache_rpc_seconds_bucket{$on}[$rate])))",
                    "{{method}}",
                ),
                _one(
                    "Calls by code",
                    "reqps",
                    "sum by (code) (rate(ctxcache_rpc_seconds_count{$on}[$rate]))",
                    "{{code}}",
                ),
                _quantiles("A segment from SSD", "ctxcache_promotion_seconds"),
                _quantiles("A flush", "ctxcache_flush_seconds"),
                Panel(
                    "Flush lag and backlog",
                    LINES,
                    "s",
                    (
                        ("ctxcache_flush_lag_seconds{$on}", "oldest unwritten rows"),
                        ("ctxcache_unwritten_sessions{$on}", "sessions"),
                        ("ctxcache_flushes{$on}", "flushes under way"),
                    ),
                ),
            ),
        ),
        Row(
            "Placement",
            (
                Panel(
                    "Against what there may be",
                    LINES,
                    "percentunit",
                    tuple(
                        (
                            f"ctxcache_{name}s{{$on}} / ctxcache_{name}_limit{{$on}}",
                            f"{name}s {{{{instance}}}}",
                        )
                        for name in ("session", "lease", "model")
                    ),
                ),
                _quantiles("Stay in DRAM", "ctxcache_dram_residence_seconds"),
                _quantiles("Idle before eviction", "ctxcache_evicted_session_idle_seconds"),
                _quantiles("Age at eviction", "ctxcache_evicted_session_age_seconds"),
                _one(
                    "Sessions that ended",
                    "ops",
                    "sum by (cause) (rate(ctxcache_ended_sessions_total{$on}[$rate]))",
                    "{{cause}}",
                ),
                Panel(
                    "Promoted ahead of need",
                    LINES,
                    "ops",
                    tuple(
                        (f"sum(rate(ctxcache_{name}_segments_total{{$on}}[$rate]))", name.replace("_", " "))
                        for name in ("prefetched", "prefetch_used", "prefetch_late", "prefetch_unused")
                    ),
                ),
                Panel(
                    "Engines' queues",
                    LINES,
                    "none",
                    (("ctxcache_waiting_jobs{$on}", "jobs"), ("ctxcache_engines{$on}", "engines")),
                ),
            ),
        ),
        Row(
            "Tenants",
            (
                _one("Kept", "bytes", 'ctxcache_tenant_bytes{tier="kept",$on}', "{{tenant}}"),
                _one("In DRAM", "bytes", 'ctxcache_tenant_bytes{tier="dram",$on}', "{{tenant}}"),
                _one("Sessions", "none", "ctxcache_tenant_sessions{$on}", "{{tenant}}"),
                _one(
                    "Against its limit",
                    "percentunit",
                    'ctxcache_tenant_bytes{tier="kept",$on} / ignoring (tier) '
                    "ctxcache_tenant_limit_bytes{$on}",
                    "{{tenant}}",
                ),
                _one("Guaranteed", "bytes", "ctxcache_tenant_guaranteed_bytes{$on}", "{{tenant}} {{tier}}"),
            ),
        ),
        Row(
            "Workers",
            (
                _one(
                    "Local operations",
                    "ops",
                    "sum by (operation) (rate(ctxcache_local_operations_total{$on}[$rate]))",
                    "{{operation}}",
                ),
                Panel(
                    "Connected",
                    LINES,
                    "none",
                    (("ctxcache_rpcs{$on}", "{{sort}}"), ("ctxcache_bulk_connections{$on}", "bulk")),
                ),
                Panel(
                    "Leases and reservations",
                    LINES,
                    "none",
                    (
                        ("ctxcache_leases{$on}", "leases"),
                        ("ctxcache_reservations{$on}", "reservations"),
                        ("sum by (by) (ctxcache_pin_waiters{$on})", "waiting: {{by}}"),
                    ),
                ),
                _quantiles("Leases held for", "ctxcache_lease_seconds"),
                _one("Oldest lease", "s", "ctxcache_oldest_lease_seconds{$on}"),
            ),
        ),
    ),
)
RESTORES = "ctxcache_worker_restores_total"
RESTORED_SHARE = (
    f'sum(rate({RESTORES}{{result="restored",$on}}[$rate])) / sum(rate({RESTORES}{{$on}}[$rate]))'
)
WORKER = Board(
    "ctxcache workers",
    "ctxcache-workers",
    "ctxcache_worker_limit",
    (
        Row(
            "Are they well?",
            (
                _one("Restored share", "percentunit", RESTORED_SHARE, kind=STAT, width=4),
                _one(
                    "Tokens restored per second",
                    "none",
                    "sum(rate(ctxcache_worker_restored_tokens_total{$on}[$rate]))",
                    kind=STAT,
                    width=5,
                ),
                _one(
                    "Tokens saved per second",
                    "none",
                    "sum(rate(ctxcache_worker_saved_tokens_total{$on}[$rate]))",
                    kind=STAT,
                    width=5,
                ),
                _one(
                    "Engines attached",
                    "none",
                    'sum(ctxcache_worker_running{what="attachments",$on})',
                    kind=STAT,
                    width=5,
                ),
                _one(
                    "Engines lost",
                    "none",
                    'sum(ctxcache_worker_ended_attachments_total{how="lost",$on})',
                    kind=STAT,
                    width=5,
                ),
            ),
        ),
        Row(
            "Restores",
            (
                _one("Restored share", "percentunit", RESTORED_SHARE, "restored"),
                _one(
                    "Misses by reason",
                    "ops",
                    f'sum by (reason) (rate({RESTORES}{{result="missed",$on}}[$rate]))',
                    "{{reason}}",
                ),
                _one(
                    "Bytes read from stores",
                    "Bps",
                    "sum by (instance) (rate(ctxcache_worker_read_bytes_total{$on}[$rate]))",
                ),
                _one(
                    "Stages: seconds by the second",
                    "none",
                    'sum by (stage) (rate(ctxcache_worker_stage_seconds_total{of="observed",$on}[$rate]))',
                    "{{stage}}",
                ),
                _one(
                    "Observed for each second of the plan",
                    "none",
                    "sum by (instance, stage) "
                    '(rate(ctxcache_worker_stage_seconds_total{of="observed",$on}[$rate])) / sum by '
                    "(instance, stage) "
                    '(rate(ctxcache_worker_stage_seconds_total{of="predicted",$on}[$rate]))',
                    "{{instance}} {{stage}}",
                ),
                _one(
                    "Refused at once",
                    "ops",
                    "sum by (what, reason) (rate(ctxcache_worker_refused_total{$on}[$rate]))",
                    "{{what}} {{reason}}",
                ),
            ),
        ),
        Row(
            "Saves and engines",
            (
                _one(
                    "Saves",
                    "ops",
                    "sum by (result, reason) (rate(ctxcache_worker_saves_total{$on}[$rate]))",
                    "{{result}} {{reason}}",
                ),
                Panel(
                    "Against its limit",
                    LINES,
                    "percentunit",
                    (("ctxcache_worker_running{$on} / ctxcache_worker_limit{$on}", "{{instance}} {{what}}"),),
                ),
                _one("Memory of engines", "bytes", "ctxcache_worker_attached_bytes{$on}"),
                _one(
                    "Attachments that ended",
                    "ops",
                    "sum by (how) (rate(ctxcache_worker_ended_attachments_total{$on}[$rate]))",
                    "{{how}}",
                ),
                _one("An engine has asked nothing for", "s", "ctxcache_worker_longest_idle_seconds{$on}"),
            ),
        ),
    ),
)
BOARDS = (STORE, WORKER)
