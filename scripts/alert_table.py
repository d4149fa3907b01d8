"""ALERTS: every rule with what to do about it. alerts.yaml, its tests and the runbook come from here."""

from alert import CRITICAL, ON, WARNING, X60, Alert, series
from alert_worker import WORKER_ALERTS

STORE_ALERTS = (
    Alert(
        "CtxcacheDown",
        CRITICAL,
        'up{job=~".*ctxcache.*"} == 0',
        2,
        "ctxcache does not answer",
        "The metrics endpoint did not answer for two minutes. A store: engines prefill everything from the "
        "start. A worker: its engines do. Nothing durable is lost.",
        "The supervisor's log, or `kubectl describe pod`: exit codes are in commands.md. `ctxcache doctor` "
        "with the options of `serve`.",
        "Start it again: it needs no repair by hand. Exit code 8: see operations.md, When something is "
        "full or broken. If the process runs and only this endpoint does not answer, see "
        "CtxcacheEventLoopStalls.",
        (series("up", f"0{X60}"),),
        3,
        ON,
        quiet=(series("up", f"1{X60}"),),
    ),
    Alert(
        "CtxcacheRestartsAgainAndAgain",
        WARNING,
        ("changes(ctxcache_start_time_seconds[1h]) > 2"),
        0,
        "ctxcache restarts again and again",
        "More than two starts within an hour. Each crash costs what only memory had, "
        "`ctxcache_flush_lag_seconds` worth at most.",
        "The end of the log before each start; the kernel's log for the out-of-memory killer; "
        "`process_resident_memory_bytes` before each end.",
        "Killed for memory: a smaller `--arena-size-bytes` or a higher limit. Else keep the log and report "
        "it.",
        (series("ctxcache_start_time_seconds", "1 1 2 2 3 3 4 4 4 4 4"),),
        9,
        ON,
        quiet=(series("ctxcache_start_time_seconds", "1 1 2 2 3 3 3 3 3 3 3"),),
    ),
    Alert(
        "CtxcacheNotReady",
        WARNING,
        "ctxcache_ready == 0",
        5,
        "ctxcache takes no work",
        "It has been draining for five minutes: a drain hangs on a call that does not end, or a flush on "
        "its device.",
        "`ctxcache_rpcs` by sort, `ctxcache_flushes`, `ctxcache_path_state`.",
        "Wait for `--drain-timeout-s` plus `--flush-timeout-s`; it ends by then. A supervisor that waits "
        "less kills it and loses what was not flushed.",
        (series("ctxcache_ready", f"0{X60}"),),
        6,
        ON,
        quiet=(series("ctxcache_ready", "1 1 0 0 0 0 0 1 1 1"),),
    ),
    Alert(
        "CtxcachePathFenced",
        CRITICAL,
        ('ctxcache_path_state{state="fenced"} == 1'),
        0,
        "An SSD path refuses writes",
        "The device under the path refused a write or a sync, or three reads in a row. It gets no more "
        "writes until a restart; its reads go on, and others take its share.",
        "`ctxcache stats` for the reason, the kernel's log and SMART for the device.",
        "Replace or mend the device, then restart. A disk that is gone for good: operations.md, When "
        "something is full or broken.",
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),),
        1,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "fenced")),
        quiet=(
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="resting"),
            series("ctxcache_path_state", f"0{X60}", tier="ssd", path="/d", state="fenced"),
        ),
    ),
    Alert(
        "CtxcachePathLost",
        CRITICAL,
        'ctxcache_path_state{state="lost"} == 1',
        0,
        "An SSD path is lost",
        "Nothing can be read from the device, or its directory was missing at the start (`--ssd-missing "
        "serve`). Sessions that lie on it show the tokens before the first one that is lost, most of them "
        "none; what memory has of it is being written to the other paths.",
        "`ctxcache stats` for the reason, `ctxcache_withheld_sessions` and `ctxcache_withheld_tokens` for "
        "how much; `ctxcache why-miss SESSION`; the kernel's log and `mount` for the device.",
        "Mount or mend it: it is taken again within seconds of being back under its path, and sessions "
        "that nobody has written to meanwhile have all their tokens again. A disk that is gone for good: "
        "operations.md, When something is full or broken.",
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="lost"),),
        1,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "lost")),
        quiet=(
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),
            series("ctxcache_path_state", f"0{X60}", tier="ssd", path="/d", state="lost"),
        ),
    ),
    Alert(
        "CtxcachePathLacksRoom",
        WARNING,
        ('avg_over_time(ctxcache_path_state{state="resting"}[15m]) > 0.2'),
        5,
        "An SSD path lacks room for writes",
        "The filesystem answered writes with no space, no quota or no memory for a fifth of the last "
        "quarter of an hour.",
        "`df` and quotas of the path; `ctxcache_filesystem_free_bytes`.",
        "Free room, or raise the quota. No restart is needed.",
        (series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="resting"),),
        20,
        (*ON, ("tier", "ssd"), ("path", "/d"), ("state", "resting")),
        quiet=(
            series("ctxcache_path_state", "0x15 1 1 0x60", tier="ssd", path="/d", state="resting"),
            series("ctxcache_path_state", f"1{X60}", tier="ssd", path="/d", state="fenced"),
        ),
    ),
    Alert(
        "CtxcacheMetadataFenced",
        CRITICAL,
        ("ctxcache_metadata_fenced == 1"),
        0,
        "The metadata takes no changes",
        "A write of the metadata found no descriptor, inode or room, or a write or sync failed. Reads and "
        "appends to memory go on; create, update, truncate, fork, delete and durable appends are refused.",
        "`/readyz` and the log: `resting until it has passed`, or `fenced after a failed write "
        "or sync`; the kernel's log, `df` and `df -i` of the data directory.",
        "Free what lacks: changes are taken again within seconds, and `metadata_reopened` is logged. Where "
        "it is fenced, mend the device and restart. If the start is refused with exit code 8: `ctxcache "
        "rebuild`.",
        (series("ctxcache_metadata_fenced", f"1{X60}"),),
        1,
        ON,
        quiet=(series("ctxcache_metadata_fenced", f"0{X60}"),),
    ),
    Alert(
        "CtxcacheMetadataAils",
        WARNING,
        ("ctxcache_rocksdb_background_errors > 0 or ctxcache_rocksdb_is_write_stopped == 1"),
        5,
        "RocksDB does not keep up, or has errors",
        "The database under the metadata reports errors in the background or holds writes back.",
        "`metadata/LOG` in the data directory; `ctxcache_rocksdb_pending_compaction_bytes`; the device's "
        "latency.",
        "A faster or a healthy device for the data directory; errors need a restart afterwards.",
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
    Alert(
        "CtxcacheDataDirectoryFull",
        CRITICAL,
        ('ctxcache_filesystem_free_bytes{of="data"} < 128 * 1024 * 1024'),
        1,
        "The data directory's filesystem is nearly full",
        "Less than 128 MiB are free. Below 16 MiB whatever makes new records is refused.",
        "`du` of the filesystem: SSD files are allocated ahead and do not grow; somebody else fills it.",
        "Free room; everything goes on as soon as there is some.",
        (series("ctxcache_filesystem_free_bytes", f"1000000{X60}", of="data", path="/d"),),
        2,
        (*ON, ("of", "data"), ("path", "/d")),
        quiet=(
            series("ctxcache_filesystem_free_bytes", f"200000000{X60}", of="data", path="/d"),
            series("ctxcache_filesystem_free_bytes", f"0{X60}", of="ssd", path="/s"),
        ),
    ),
    Alert(
        "CtxcacheCorruptSegments",
        CRITICAL,
        ("increase(ctxcache_corrupt_segments_total[1h]) > 0"),
        0,
        "Stored bytes came back wrong",
        "Segments failed verification. Nothing wrong was handed out: their sessions end before them.",
        "`ctxcache why-miss` of a session that lost tokens, `ctxcache verify` for what nobody has read "
        "yet, SMART, ECC and the kernel's log.",
        "Replace what returns wrong bytes. Places are kept from use until `ctxcache verify --release`.",
        (series("ctxcache_corrupt_segments_total", "0 0 1 1 1 1 1"),),
        3,
        ON,
        quiet=(series("ctxcache_corrupt_segments_total", f"7{X60}"),),
    ),
    Alert(
        "CtxcacheMendedSegments",
        WARNING,
        ("increase(ctxcache_mended_segments_total[1h]) > 0"),
        0,
        "Memory changed bytes",
        "Rows in the arena were not what was written. Nothing wrong was handed out and nothing is lost: "
        "SSD's took their place.",
        "`ctxcache why-miss` of a session, ECC counters and the kernel's log; which processes map the arena.",
        "Replace memory that changes bytes, or stop what writes where it holds no reservation.",
        (series("ctxcache_mended_segments_total", "0 0 1 1 1 1 1"),),
        3,
        ON,
        quiet=(series("ctxcache_mended_segments_total", f"7{X60}"),),
    ),
    Alert(
        "CtxcacheSingleCopies",
        WARNING,
        ("ctxcache_single_copy_segments > 0"),
        15,
        "Segments lack their second copy",
        "They shall be on two SSD directories and are on one, whose loss would cost their tokens.",
        "`ctxcache_path_state` and `ctxcache_tier_largest_free_bytes` of each SSD path.",
        "Bring the lost device back, replace it by an empty one, or give SSD more room. Copies follow.",
        (series("ctxcache_single_copy_segments", "5x100"),),
        16,
        ON,
        quiet=(series("ctxcache_single_copy_segments", "5x10 0x100"),),
    ),
    Alert(
        "CtxcacheQuarantinedPlaces",
        WARNING,
        ("ctxcache_quarantined_slots > 0"),
        60,
        "Places on SSD are kept from use",
        "They gave back other bytes than were written, and nobody has tested them for an hour.",
        "`ctxcache verify` says which file and where.",
        "`ctxcache verify --release`; when they come again, replace the device.",
        (series("ctxcache_quarantined_slots", "1x100"),),
        61,
        ON,
        quiet=(series("ctxcache_quarantined_slots", "1x50 0x100"),),
    ),
    Alert(
        "CtxcacheFlushLag",
        WARNING,
        ("ctxcache_flush_lag_seconds > 120"),
        5,
        "Tokens are in memory alone for minutes",
        "The oldest rows without a copy on SSD are two minutes old; a crash now would cost them. With "
        "`--tail-age-s` of 0, or beyond 100, that is as set: leave this alert out.",
        "`ctxcache_flush_seconds`, `ctxcache_upkeep_failures_total`, `ctxcache_path_state`; "
        "`--write-behind-bytes-per-s` where it is set.",
        "A faster device, one path more, or a higher bound on write-behind.",
        (series("ctxcache_flush_lag_seconds", f"200{X60}"),),
        6,
        ON,
        quiet=(series("ctxcache_flush_lag_seconds", f"100{X60}"),),
    ),
    Alert(
        "CtxcacheWritersWait",
        WARNING,
        ("increase(ctxcache_delayed_writes_total[10m]) > 10"),
        5,
        "Writers wait because too much is not on SSD",
        "The dirty limit holds writers back: SSD takes less than they write.",
        "`ctxcache_dirty_bytes` against `ctxcache_watermark_bytes`, `ctxcache_flush_seconds`.",
        "A faster device, one path more, a larger arena, or fewer writers.",
        (series("ctxcache_delayed_writes_total", "0+10x60"),),
        16,
        ON,
        quiet=(series("ctxcache_delayed_writes_total", "0x5 20x60"),),
    ),
    Alert(
        "CtxcacheUpkeepFails",
        WARNING,
        ("increase(ctxcache_upkeep_failures_total[10m]) > 5"),
        0,
        "What happens in the background fails",
        "Expiry, write-behind, making room or prefetch (`step`) failed again and again.",
        "The log: `upkeep_step_failed` with the reason, `upkeep_step_broken` with a traceback.",
        "Act on the reason: operations.md, When something is full or broken. A traceback is a bug: "
        "report it.",
        (series("ctxcache_upkeep_failures_total", "0+2x60", step="keep_free"),),
        11,
        (*ON, ("step", "keep_free")),
        quiet=(series("ctxcache_upkeep_failures_total", "0 1 2 3 3 3 3 3 3 3 3 3 3", step="keep_free"),),
    ),
    Alert(
        "CtxcacheRefusesCalls",
        WARNING,
        (
            'sum by (instance, job, sort) (rate(ctxcache_refused_rpcs_total{reason="TOO_MANY_REQUESTS"}[5m]))'
            " > 1"
        ),
        10,
        "Callers are refused because too many come at once",
        "More than one call a second was refused for ten minutes; callers try again and add to it.",
        "`ctxcache_rpcs` against `ctxcache_rpc_limit`; the event loop's lag; CPU.",
        "Where CPU is left raise the limit of that sort; else another server.",
        (series("ctxcache_refused_rpcs_total", "0+120x60", sort="calls", reason="TOO_MANY_REQUESTS"),),
        20,
        (*ON, ("sort", "calls")),
        quiet=(
            series("ctxcache_refused_rpcs_total", "0+30x60", sort="calls", reason="TOO_MANY_REQUESTS"),
            series("ctxcache_refused_rpcs_total", "0+300x60", sort="calls", reason="DRAINING"),
        ),
    ),
    Alert(
        "CtxcacheInternalErrors",
        WARNING,
        'increase(ctxcache_rpc_seconds_count{code="INTERNAL"}[10m]) > 0 or '
        'ctxcache_rpc_seconds_count{code="INTERNAL"} unless ctxcache_rpc_seconds_count{code="INTERNAL"} '
        "offset 10m",
        0,
        "A call ended with an internal error",
        "A bug: an error that is none of ours reached the edge.",
        "The log has `internal_error` with the traceback.",
        "Report it with the traceback.",
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
    Alert(
        "CtxcacheSlowCalls",
        WARNING,
        (
            "histogram_quantile(0.99, sum by (instance, job, le) (rate(ctxcache_rpc_seconds_bucket{"
            'method=~"SessionService/(GetSession|LookupSessions|UpdateSession)"}[5m]))) > 0.1'
        ),
        10,
        "Small calls are slow",
        "One in a hundred calls that move no rows took more than 100 ms.",
        "The event loop's lag, CPU (`process_cpu_seconds_total`), how many sessions expire at once.",
        "See CtxcacheEventLoopStalls.",
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
    Alert(
        "CtxcacheEventLoopStalls",
        WARNING,
        "histogram_quantile(0.99, sum by (instance, job, le) "
        "(rate(ctxcache_event_loop_lag_seconds_bucket[5m]))) > 0.25",
        10,
        "The event loop stalls",
        "One in a hundred turns came a quarter of a second late, and so did every call in it.",
        "CPU of the process and of the machine (throttling of the container!), swapping, slow methods in "
        "`ctxcache_rpc_seconds`.",
        "CPU for the process; no swap. If one method stalls it alone: report it.",
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
    Alert(
        "CtxcacheSessionsNearlyFull",
        WARNING,
        ("ctxcache_sessions / ctxcache_session_limit > 0.9"),
        10,
        "There are nearly as many sessions as there may be",
        "At the limit creating one is refused (`TOO_MANY_REQUESTS`), while sessions that nobody asks for "
        "any more take up the count.",
        "`ctxcache session list --idle 24h`, `ctxcache_tenant_sessions`, `ctxcache_ended_sessions_total` "
        "by cause.",
        "A TTL, or a shorter one (`--default-ttl-s`, `ctxcache session expire`); else a higher "
        "`max_sessions`: a reload takes it over.",
        (series("ctxcache_sessions", f"95{X60}"), series("ctxcache_session_limit", f"100{X60}")),
        11,
        ON,
        quiet=(series("ctxcache_sessions", f"85{X60}"), series("ctxcache_session_limit", f"100{X60}")),
    ),
    Alert(
        "CtxcacheLeasesNearlyFull",
        WARNING,
        ("ctxcache_leases / ctxcache_lease_limit > 0.8"),
        5,
        "There are nearly as many leases as there may be",
        "At the limit readers are refused (`TOO_MANY_REQUESTS`) and prefill.",
        "`ctxcache lease list`: whose, and how old; `ctxcache_oldest_lease_seconds`, "
        "`ctxcache_lease_seconds`.",
        "Mend the client that does not let go; `ctxcache lease revoke` ends one. Else a higher "
        "`max_leases`: a reload takes it over.",
        (series("ctxcache_leases", f"85{X60}"), series("ctxcache_lease_limit", f"100{X60}")),
        6,
        ON,
        quiet=(series("ctxcache_leases", f"75{X60}"), series("ctxcache_lease_limit", f"100{X60}")),
    ),
    Alert(
        "CtxcacheModelsNearlyFull",
        WARNING,
        ("ctxcache_models / ctxcache_model_limit > 0.9"),
        10,
        "There are nearly as many models as there may be",
        "At the limit registering one is refused (`TOO_MANY_REQUESTS`), and workers with a new model "
        "cannot begin.",
        "`ctxcache model list`: names that differ where models do not.",
        "`ctxcache model delete` those that no session is of; have workers register under one name per "
        "model.",
        (series("ctxcache_models", f"95{X60}"), series("ctxcache_model_limit", f"100{X60}")),
        11,
        ON,
        quiet=(series("ctxcache_models", f"85{X60}"), series("ctxcache_model_limit", f"100{X60}")),
    ),
    Alert(
        "CtxcacheArenaHeld",
        WARNING,
        ("ctxcache_pinned_bytes / ctxcache_pinned_limit_bytes > 0.95"),
        10,
        "Readers or writers hold all of the arena that they may",
        "For ten minutes further ones have waited, and been refused.",
        "`ctxcache_oldest_lease_seconds`, `ctxcache_pin_waiters`; which client has the leases.",
        "Mend the client that does not let go; a larger arena for more readers at a time.",
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
    Alert(
        "CtxcacheEvictsWhatComesBack",
        WARNING,
        'sum by (instance, job) (rate(ctxcache_accesses_total{result="evicted"}[30m])) / sum by (instance, '
        "job) (rate(ctxcache_accesses_total[30m])) > 0.1",
        30,
        ("A tenth of accesses miss what was evicted"),
        "SSD is too small for what comes back, or one tenant pushes out another.",
        "`ctxcache_regretted_tokens_total` for the cost, `ctxcache_evict_to_reuse_seconds`, "
        "`ctxcache_tenant_bytes`; `ctxcache simulate` for how much more SSD would help.",
        "More SSD, shares for tenants, shorter TTLs for what never comes back.",
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
    Alert(
        "CtxcacheFingerprintMismatch",
        WARNING,
        (
            'sum by (instance, job) (increase(ctxcache_accesses_total{result="fingerprint_mismatch"}[15m]))'
            " > 10"
        ),
        0,
        "Engines ask with another model than was saved with",
        "Their sessions are of no use to them: another revision, dtype, tokenizer or setting.",
        "`ctxcache model list` and the workers' versions; `ctxcache why-miss SESSION`.",
        "Finish the roll-out, or give each model its own sessions.",
        (series("ctxcache_accesses_total", "0+5x60", by="lookup", result="fingerprint_mismatch"),),
        16,
        ON,
        quiet=(
            series("ctxcache_accesses_total", "0x4 5x60", by="lookup", result="fingerprint_mismatch"),
            series("ctxcache_accesses_total", "0+50x60", by="lookup", result="hit"),
        ),
    ),
    Alert(
        "CtxcachePrefetchWasted",
        WARNING,
        (
            "rate(ctxcache_prefetch_unused_segments_total[30m]) / "
            "rate(ctxcache_prefetched_segments_total[30m]) > 0.5"
        ),
        30,
        ("Most of what is promoted ahead of need is not read"),
        "Hints are wrong or much too early, or the arena too small to keep what came until it is used.",
        "`ctxcache_waiting_jobs`, `ctxcache_dram_residence_seconds`, hints.md.",
        "Mend the engine's hints; a larger arena; or the policy `lru`, which takes none.",
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
    Alert(
        "CtxcacheTenantAtItsLimit",
        WARNING,
        ('ctxcache_tenant_bytes{tier="kept"} / ignoring (tier) ctxcache_tenant_limit_bytes > 0.95'),
        60,
        "A tenant has what it may have",
        "Its own sessions make way for each other from now on.",
        "`ctxcache tenants`; the tenant's accesses that miss as `evicted`.",
        "Raise its limit in `--tenant-shares`, or leave it: that is what limits are for.",
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
    Alert(
        "CtxcacheSlowDevice",
        WARNING,
        (
            "histogram_quantile(0.99, sum by (instance, job, le) "
            "(rate(ctxcache_promotion_seconds_bucket[10m]))) > 0.5"
        ),
        10,
        "Reading from SSD is slow",
        "One in a hundred segments took more than half a second to come into memory; whoever restores "
        "waits for it.",
        "`iostat -x`, other users of the device, SMART; `ctxcache bench` on an idle machine for what it "
        "can do.",
        "A device of its own; fewer readers; a larger arena.",
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
    Alert(
        "CtxcacheFileDescriptors",
        WARNING,
        ("process_open_fds / process_max_fds > 0.8"),
        10,
        "File descriptors run out",
        "New connections wait when there are none left.",
        "`ss -p`: which clients have so many connections.",
        "Raise the limit (`ulimit -n`, LimitNOFILE).",
        (series("process_open_fds", f"90{X60}"), series("process_max_fds", f"100{X60}")),
        11,
        ON,
        quiet=(series("process_open_fds", f"70{X60}"), series("process_max_fds", f"100{X60}")),
    ),
)
ALERTS = (*STORE_ALERTS, *WORKER_ALERTS)
