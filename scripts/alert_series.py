"""Series of which some make an alert fire and some do not: Prometheus' own tests of the rules."""

from dataclasses import dataclass, field

from alert_worker import RESTORES, SAVES, STAGES

Series = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Fires:
    """One alert's cases. `series` fire it at `fires_at`, in minutes; `quiet`, which are close, do not.

    Both are what a process would show, a value per minute. `labels` are those of the alert that fires,
    besides its severity.
    """

    series: Series
    fires_at: int
    labels: tuple[tuple[str, str], ...] = ()
    quiet: Series = field(kw_only=True)


ON = (("instance", "a"), ("job", "ctxcache"))
X60 = "x60"


def series(name: str, values: str, **labels: str) -> tuple[str, str]:
    """One series of promtool's: name and labels, and values."""
    inner = ",".join(
        f'{key}="{value}"' for key, value in {"instance": "a", "job": "ctxcache", **labels}.items()
    )
    return f"{name}{{{inner}}}", values


STORE_SERIES = {
    "CtxcacheDown": Fires((series("up", f"0{X60}"),), 3, ON, quiet=(series("up", f"1{X60}"),)),
    "CtxcacheRestartsAgainAndAgain": Fires(
        (series("ctxcache_start_time_seconds", "1 1 2 2 3 3 4 4 4 4 4"),),
        9,
        ON,
        quiet=(series("ctxcache_start_time_seconds", "1 1 2 2 3 3 3 3 3 3 3"),),
    ),
    "CtxcacheNotReady": Fires(
        (series("ctxcache_ready", f"0{X60}"),),
        6,
        ON,
        quiet=(series("ctxcache_ready", "1 1 0 0 0 0 0 1 1 1"),),
    ),
    "CtxcachePathFenced": Fires(
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),),
        1,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "fenced")),
        quiet=(
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="resting"),
            series("ctxcache_path_state", f"0{X60}", tier="ssd", path="/d", state="fenced"),
        ),
    ),
    "CtxcachePathLost": Fires(
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="lost"),),
        1,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "lost")),
        quiet=(
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),
            series("ctxcache_path_state", f"0{X60}", tier="ssd", path="/d", state="lost"),
        ),
    ),
    "CtxcachePathLacksRoom": Fires(
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="resting"),),
        20,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "resting")),
        quiet=(
            series("ctxcache_path_state", "0x15 1 1 0x60", tier="ssd", path="/d", state="resting"),
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),
        ),
    ),
    "CtxcacheMetadataFenced": Fires(
        (series("ctxcache_metadata_fenced", f"1{X60}"),),
        1,
        ON,
        quiet=(series("ctxcache_metadata_fenced", f"0{X60}"),),
    ),
    "CtxcacheFleetBucketSilent": Fires(
        (series("ctxcache_fleet_sure", f"0{X60}"),),
        3,
        ON,
        quiet=(series("ctxcache_fleet_sure", "1 1 0 1 1 0 1 1 0 1 1"),),
    ),
    "CtxcacheFleetOwnersLost": Fires(
        (series("ctxcache_fleet_owners_lost_total", "0 0 1 1 1 1 1"),),
        3,
        ON,
        quiet=(series("ctxcache_fleet_owners_lost_total", f"7{X60}"),),
    ),
    "CtxcacheFleetNotShared": Fires(
        (series("ctxcache_fleet_share_failures_total", "0+3x60"),),
        12,
        ON,
        quiet=(series("ctxcache_fleet_share_failures_total", "0 3 3 3 3 3 3 3 3 3 3 3 3 3"),),
    ),
    "CtxcacheMetadataAils": Fires(
        (
            series("ctxcache_rocksdb_background_errors", f"1{X60}"),
            series("ctxcache_rocksdb_is_write_stopped", f"0{X60}"),
        ),
        6,
        ON,
        quiet=(
            series("ctxcache_rocksdb_background_errors", f"0{X60}"),
            series("ctxcache_rocksdb_is_write_stopped", "1 1 0 1 1 0 1 1 0"),
        ),
    ),
    "CtxcacheDataDirectoryFull": Fires(
        (series("ctxcache_filesystem_free_bytes", f"1000000{X60}", of="data", path="/d"),),
        2,
        (*ON, ("of", "data"), ("path", "/d")),
        quiet=(
            series("ctxcache_filesystem_free_bytes", f"200000000{X60}", of="data", path="/d"),
            series("ctxcache_filesystem_free_bytes", f"0{X60}", of="ssd", path="/s"),
        ),
    ),
    "CtxcacheCorruptSegments": Fires(
        (series("ctxcache_corrupt_segments_total", "0 0 1 1 1 1 1"),),
        3,
        ON,
        quiet=(series("ctxcache_corrupt_segments_total", f"7{X60}"),),
    ),
    "CtxcacheMendedSegments": Fires(
        (series("ctxcache_mended_segments_total", "0 0 1 1 1 1 1"),),
        3,
        ON,
        quiet=(series("ctxcache_mended_segments_total", f"7{X60}"),),
    ),
    "CtxcacheSingleCopies": Fires(
        (series("ctxcache_single_copy_segments", "5x100"),),
        16,
        ON,
        quiet=(series("ctxcache_single_copy_segments", "5x10 0x100"),),
    ),
    "CtxcacheQuarantinedPlaces": Fires(
        (series("ctxcache_quarantined_slots", "1x100"),),
        61,
        ON,
        quiet=(series("ctxcache_quarantined_slots", "1x50 0x100"),),
    ),
    "CtxcacheFlushLag": Fires(
        (series("ctxcache_flush_lag_seconds", f"200{X60}"),),
        6,
        ON,
        quiet=(series("ctxcache_flush_lag_seconds", f"100{X60}"),),
    ),
    "CtxcacheWritersWait": Fires(
        (series("ctxcache_delayed_writes_total", "0+10x60"),),
        16,
        ON,
        quiet=(series("ctxcache_delayed_writes_total", "0x5 20x60"),),
    ),
    "CtxcacheUpkeepFails": Fires(
        (series("ctxcache_upkeep_failures_total", "0+2x60", step="keep_free"),),
        11,
        (*ON, ("step", "keep_free")),
        quiet=(series("ctxcache_upkeep_failures_total", "0 1 2 3 3 3 3 3 3 3 3 3 3", step="keep_free"),),
    ),
    "CtxcacheRefusesCalls": Fires(
        (series("ctxcache_refused_rpcs_total", "0+120x60", sort="calls", reason="TOO_MANY_REQUESTS"),),
        20,
        (*ON, ("sort", "calls")),
        quiet=(
            series("ctxcache_refused_rpcs_total", "0+30x60", sort="calls", reason="TOO_MANY_REQUESTS"),
            series("ctxcache_refused_rpcs_total", "0+300x60", sort="calls", reason="DRAINING"),
        ),
    ),
    "CtxcacheInternalErrors": Fires(
        (
            series(
                "ctxcache_rpc_seconds_count",
                "_x20 1x60",
                method="SessionService/GetSession",
                code="INTERNAL",
                reason="INTERNAL",
            ),
        ),
        22,
        (*ON, ("method", "SessionService/GetSession"), ("code", "INTERNAL"), ("reason", "INTERNAL")),
        quiet=(
            series(
                "ctxcache_rpc_seconds_count",
                "5x60",
                method="SessionService/GetSession",
                code="INTERNAL",
                reason="INTERNAL",
            ),
            series(
                "ctxcache_rpc_seconds_count",
                "0+9x60",
                method="SessionService/GetSession",
                code="OK",
                reason="",
            ),
        ),
    ),
    "CtxcacheSlowCalls": Fires(
        tuple(
            series(
                "ctxcache_rpc_seconds_bucket",
                f"0+{step}x60",
                method="SessionService/GetSession",
                code="OK",
                reason="",
                le=le,
            )
            for le, step in (("0.1", 10), ("0.5", 60), ("+Inf", 60))
        ),
        20,
        ON,
        quiet=tuple(
            series(
                "ctxcache_rpc_seconds_bucket",
                f"0+{step}x60",
                method="SessionService/GetSession",
                code="OK",
                reason="",
                le=le,
            )
            for le, step in (("0.1", 5990), ("0.5", 6000), ("+Inf", 6000))
        ),
    ),
    "CtxcacheEventLoopStalls": Fires(
        tuple(
            series("ctxcache_event_loop_lag_seconds_bucket", f"0+{step}x60", le=le)
            for le, step in (("0.25", 500), ("1", 600), ("+Inf", 600))
        ),
        20,
        ON,
        quiet=tuple(
            series("ctxcache_event_loop_lag_seconds_bucket", f"0+{step}x60", le=le)
            for le, step in (("0.25", 599), ("1", 600), ("+Inf", 600))
        ),
    ),
    "CtxcacheSessionsNearlyFull": Fires(
        (series("ctxcache_sessions", f"95{X60}"), series("ctxcache_session_limit", f"100{X60}")),
        11,
        ON,
        quiet=(series("ctxcache_sessions", f"85{X60}"), series("ctxcache_session_limit", f"100{X60}")),
    ),
    "CtxcacheLeasesNearlyFull": Fires(
        (series("ctxcache_leases", f"85{X60}"), series("ctxcache_lease_limit", f"100{X60}")),
        6,
        ON,
        quiet=(series("ctxcache_leases", f"75{X60}"), series("ctxcache_lease_limit", f"100{X60}")),
    ),
    "CtxcacheModelsNearlyFull": Fires(
        (series("ctxcache_models", f"95{X60}"), series("ctxcache_model_limit", f"100{X60}")),
        11,
        ON,
        quiet=(series("ctxcache_models", f"85{X60}"), series("ctxcache_model_limit", f"100{X60}")),
    ),
    "CtxcacheArenaHeld": Fires(
        (
            series("ctxcache_pinned_bytes", f"99{X60}", by="leases"),
            series("ctxcache_pinned_limit_bytes", f"100{X60}", by="leases"),
        ),
        11,
        (*ON, ("by", "leases")),
        quiet=(
            series("ctxcache_pinned_bytes", f"90{X60}", by="leases"),
            series("ctxcache_pinned_limit_bytes", f"100{X60}", by="leases"),
            series("ctxcache_pinned_limit_bytes", f"50{X60}", by="reservations"),
        ),
    ),
    "CtxcacheEvictsWhatComesBack": Fires(
        (
            series("ctxcache_accesses_total", "0+20x120", by="lookup", result="evicted"),
            series("ctxcache_accesses_total", "0+80x120", by="lookup", result="hit"),
        ),
        61,
        ON,
        quiet=(
            series("ctxcache_accesses_total", "0+9x120", by="lookup", result="evicted"),
            series("ctxcache_accesses_total", "0+91x120", by="lookup", result="hit"),
        ),
    ),
    "CtxcacheFingerprintMismatch": Fires(
        (series("ctxcache_accesses_total", "0+5x60", by="lookup", result="fingerprint_mismatch"),),
        16,
        ON,
        quiet=(
            series("ctxcache_accesses_total", "0x4 5x60", by="lookup", result="fingerprint_mismatch"),
            series("ctxcache_accesses_total", "0+50x60", by="lookup", result="hit"),
        ),
    ),
    "CtxcachePrefetchWasted": Fires(
        (
            series("ctxcache_prefetch_unused_segments_total", "0+8x120"),
            series("ctxcache_prefetched_segments_total", "0+10x120"),
        ),
        62,
        ON,
        quiet=(
            series("ctxcache_prefetch_unused_segments_total", "0+4x120"),
            series("ctxcache_prefetched_segments_total", "0+10x120"),
        ),
    ),
    "CtxcacheTenantAtItsLimit": Fires(
        (
            series("ctxcache_tenant_bytes", "99x100", tenant="t", tier="kept"),
            series("ctxcache_tenant_limit_bytes", "100x100", tenant="t"),
        ),
        61,
        (*ON, ("tenant", "t")),
        quiet=(
            series("ctxcache_tenant_bytes", "90x100", tenant="t", tier="kept"),
            series("ctxcache_tenant_bytes", "99x100", tenant="t", tier="dram"),
            series("ctxcache_tenant_limit_bytes", "100x100", tenant="t"),
        ),
    ),
    "CtxcacheSlowDevice": Fires(
        tuple(
            series("ctxcache_promotion_seconds_bucket", f"0+{step}x60", le=le)
            for le, step in (("0.5", 10), ("1", 60), ("+Inf", 60))
        ),
        25,
        ON,
        quiet=tuple(
            series("ctxcache_promotion_seconds_bucket", f"0+{step}x60", le=le)
            for le, step in (("0.5", 599), ("1", 600), ("+Inf", 600))
        ),
    ),
    "CtxcacheFileDescriptors": Fires(
        (series("process_open_fds", f"90{X60}"), series("process_max_fds", f"100{X60}")),
        11,
        ON,
        quiet=(series("process_open_fds", f"70{X60}"), series("process_max_fds", f"100{X60}")),
    ),
}
WORKER_SERIES = {
    "CtxcacheWorkerMisses": Fires(
        (
            series(RESTORES, "0+20x60", result="missed", reason="RESTORE_TOO_LATE"),
            series(RESTORES, "0+80x60", result="restored", reason=""),
        ),
        31,
        (*ON, ("reason", "RESTORE_TOO_LATE")),
        quiet=(
            series(RESTORES, "0+60x60", result="missed", reason="SESSION_NOT_FOUND"),
            series(RESTORES, "0+60x60", result="missed", reason="RESTORE_CANCELLED"),
            series(RESTORES, "0+10x60", result="missed", reason="RESTORE_TOO_LATE"),
            series(RESTORES, "0+80x60", result="restored", reason=""),
        ),
    ),
    "CtxcacheWorkerFarFromPlan": Fires(
        (
            series(STAGES, "0+12x90", stage="copy", of="observed"),
            series(STAGES, "0+6x90", stage="copy", of="predicted"),
        ),
        62,
        (*ON, ("stage", "copy")),
        quiet=(
            series(STAGES, "0+8x90", stage="copy", of="observed"),
            series(STAGES, "0+6x90", stage="copy", of="predicted"),
            series(STAGES, "0+0.3x90", stage="gather", of="observed"),
            series(STAGES, "0+0.001x90", stage="gather", of="predicted"),
        ),
    ),
    "CtxcacheWorkerRefuses": Fires(
        (series("ctxcache_worker_refused_total", "0+30x60", what="saves", reason="TOO_MANY_REQUESTS"),),
        22,
        (*ON, ("what", "saves")),
        quiet=(
            series("ctxcache_worker_refused_total", "0+5x60", what="saves", reason="TOO_MANY_REQUESTS"),
            series("ctxcache_worker_refused_total", "0+60x60", what="restores", reason="DRAINING"),
        ),
    ),
    "CtxcacheWorkerSavesFail": Fires(
        (
            series(SAVES, "0+10x60", result="failed", reason="CAPACITY_EXCEEDED"),
            series(SAVES, "0+90x60", result="saved", reason=""),
        ),
        26,
        (*ON, ("reason", "CAPACITY_EXCEEDED")),
        quiet=(
            series(SAVES, "0+4x60", result="failed", reason="CAPACITY_EXCEEDED"),
            series(SAVES, "0+96x60", result="saved", reason=""),
        ),
    ),
    "CtxcacheWorkerLosesEngines": Fires(
        (series("ctxcache_worker_ended_attachments_total", ("0 0 1 2 3 4 4 4 4 4 4 4 4"), how="lost"),),
        12,
        (*ON, ("how", "lost")),
        quiet=(
            series("ctxcache_worker_ended_attachments_total", ("0 0 1 2 2 2 2 2 2 2 2 2 2"), how="lost"),
            series("ctxcache_worker_ended_attachments_total", "0+5x20", how="left"),
        ),
    ),
    "CtxcacheWorkerEngineIdle": Fires(
        (
            series("ctxcache_worker_longest_idle_seconds", "3000+60x120"),
            series(RESTORES, "0+5x120", result="restored", reason=""),
        ),
        60,
        ON,
        quiet=(
            series("ctxcache_worker_longest_idle_seconds", "30000+60x120"),
            series(RESTORES, f"9{X60}", result="restored", reason=""),
        ),
    ),
}
SERIES = STORE_SERIES | WORKER_SERIES
