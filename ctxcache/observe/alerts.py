"""Alerts: what is wrong with a store, what it means, where to look and what to do. Each is stated here alone.

Prometheus' rules, their entries in the runbook and the conditions of the status page come from this table. A
rule waits until it has held for `for_minutes`; a condition of the page does not wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ctxcache.observe.measures import (
    Average,
    Below,
    Grown,
    Measure,
    Share,
    grown,
    late,
    per_second,
    ratio,
    value,
)
from ctxcache.observe.moment import Moment, Ring

CRITICAL, WARNING = "critical", "warning"
SMALL_CALLS = tuple(f"SessionService/{name}" for name in ("GetSession", "LookupSessions", "UpdateSession"))


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. It holds while its measure is above `bound`."""

    name: str
    severity: str
    summary: str
    measure: Measure | str
    """PromQL with its bound, where only Prometheus can know: the status page leaves it out."""
    bound: float
    unit: str
    """The measure's unit; empty where the number says nothing to a reader."""
    for_minutes: int
    means: str
    look: str
    do: str

    @property
    def expression(self) -> str:
        """The condition of Prometheus' rule."""
        if isinstance(self.measure, str):
            return self.measure
        return f"{self.measure.promql()} > {self.bound:g}"


@dataclass(frozen=True, slots=True)
class HeldAlert:
    """An alert that holds now."""

    alert: str
    severity: str
    summary: str
    measured: float
    bound: float
    unit: str
    means: str
    look: str
    do: str


def holding(now: Moment, ring: Ring) -> Iterator[HeldAlert]:
    """The alerts that hold, the critical ones first."""
    for severity in (CRITICAL, WARNING):
        for alert in STORE_ALERTS:
            if alert.severity == severity and not isinstance(alert.measure, str):
                measured = alert.measure.now(now, ring)
                if measured > alert.bound:
                    told = alert.summary, measured, alert.bound, alert.unit
                    yield HeldAlert(alert.name, severity, *told, alert.means, alert.look, alert.do)


STORE_ALERTS = (
    Alert(
        "CtxcacheDown",
        CRITICAL,
        "ctxcache does not answer",
        'up{job=~".*ctxcache.*"} == 0',
        0,
        "",
        2,
        means=(
            "The metrics endpoint did not answer for two minutes. A store: engines prefill everything from "
            "the start. A worker: its engines do. Nothing durable is lost."
        ),
        look=(
            "The supervisor's log, or `kubectl describe pod`: exit codes are in commands.md. `ctxcache "
            "doctor` with the options of `serve`."
        ),
        do=(
            "Start it again: it needs no repair by hand. Exit code 8: see operations.md, When something is "
            "full or broken. If the process runs and only this endpoint does not answer, see "
            "CtxcacheEventLoopStalls."
        ),
    ),
    Alert(
        "CtxcacheRestartsAgainAndAgain",
        WARNING,
        "ctxcache restarts again and again",
        "changes(ctxcache_start_time_seconds[1h]) > 2",
        0,
        "",
        0,
        means=(
            "More than two starts within an hour. Each crash costs what only memory had, "
            "`ctxcache_flush_lag_seconds` worth at most."
        ),
        look=(
            "The end of the log before each start; the kernel's log for the out-of-memory killer; "
            "`process_resident_memory_bytes` before each end."
        ),
        do=(
            "Killed for memory: a smaller `--arena-size-bytes` or a higher limit. Else keep the log and "
            "report it."
        ),
    ),
    Alert(
        "CtxcacheNotReady",
        WARNING,
        "ctxcache takes no work",
        Below(value("ready")),
        0,
        "",
        5,
        means=(
            "It has been draining for five minutes: a drain hangs on a call that does not end, or a flush on "
            "its device."
        ),
        look=(
            "`ctxcache lease list` for the clients that hold it up; `ctxcache_rpcs` by sort, "
            "`ctxcache_flushes`, `ctxcache_path_state`."
        ),
        do=(
            "Wait for `--drain-timeout-s` plus `--flush-timeout-s`; it ends by then. A supervisor that waits "
            "less kills it and loses what was not flushed."
        ),
    ),
    Alert(
        "CtxcachePathFenced",
        CRITICAL,
        "An SSD path refuses writes",
        value("path_state", state="fenced"),
        0,
        "",
        0,
        means=(
            "The device under the path refused a write or a sync, or three reads in a row. It gets no more "
            "writes until a restart; its reads go on, and others take its share."
        ),
        look="`ctxcache tier list` for the reason, the kernel's log and SMART for the device.",
        do=(
            "Replace or mend the device, then restart. A disk that is gone for good: operations.md, When "
            "something is full or broken."
        ),
    ),
    Alert(
        "CtxcachePathLost",
        CRITICAL,
        "An SSD path is lost",
        value("path_state", state="lost"),
        0,
        "",
        0,
        means=(
            "Nothing can be read from the device, or its directory was missing at the start (`--ssd-missing "
            "serve`). Sessions that lie on it show the tokens before the first one that is lost, most of "
            "them none; what memory has of it is being written to the other paths."
        ),
        look=(
            "`ctxcache tier list` for the reason, `ctxcache_withheld_sessions` and "
            "`ctxcache_withheld_tokens` for how much; `ctxcache why-miss SESSION`; the kernel's log and "
            "`mount` for the device."
        ),
        do=(
            "Mount or mend it: it is taken again within seconds of being back under its path, and sessions "
            "that nobody has written to meanwhile have all their tokens again. A disk that is gone for good: "
            "operations.md, When something is full or broken."
        ),
    ),
    Alert(
        "CtxcachePathLacksRoom",
        WARNING,
        "An SSD path lacks room for writes",
        Average(value("path_state", state="resting"), 15),
        0.2,
        "",
        5,
        means=(
            "The filesystem answered writes with no space, no quota or no memory for a fifth of the last "
            "quarter of an hour."
        ),
        look=(
            "`ctxcache tier list` for the reason, `df` and quotas of the path; "
            "`ctxcache_filesystem_free_bytes`."
        ),
        do="Free room, or raise the quota. No restart is needed.",
    ),
    Alert(
        "CtxcacheMetadataFenced",
        CRITICAL,
        "The metadata takes no changes",
        value("metadata_fenced"),
        0,
        "",
        0,
        means=(
            "A write of the metadata found no descriptor, inode or room, or a write or sync failed. Reads "
            "and appends to memory go on; create, update, truncate, fork, delete and durable appends are "
            "refused."
        ),
        look=(
            "`/readyz` and the log: `resting until it has passed`, or `fenced after a failed write or sync`; "
            "the kernel's log, `df` and `df -i` of the data directory."
        ),
        do=(
            "Free what lacks: changes are taken again within seconds, and `metadata_reopened` is logged. "
            "Where it is fenced, mend the device and restart. If the start is refused with exit code 8: "
            "`ctxcache rebuild`."
        ),
    ),
    Alert(
        "CtxcacheFleetBucketSilent",
        WARNING,
        "The fleet's bucket does not answer",
        "ctxcache_fleet_sure == 0",
        0,
        "",
        2,
        means=(
            "This store has not heard the bucket for three beats. Sessions that are here are served; what "
            "another store has is computed, and nothing new can be found elsewhere."
        ),
        look="`ctxcache fleet status`, `ctxcache doctor bucket`; credentials, and the way to the bucket.",
        do="Bring the bucket back. What was created meanwhile is announced then, and nothing is lost.",
    ),
    Alert(
        "CtxcacheFleetOwnersLost",
        WARNING,
        "Sessions are begun anew: their store does not answer",
        grown("fleet_owners_lost", 60),
        0,
        "sessions in an hour",
        0,
        means="Turns landed here whose sessions are at a store that is down, or that this one cannot reach.",
        look="`ctxcache fleet status`: which store is silent; `ctxcache why-miss` of a session.",
        do="Bring the store back, or the way to it. Its sessions are computed once, and go on here.",
    ),
    Alert(
        "CtxcacheFleetNotShared",
        WARNING,
        "Sessions cannot be put into the bucket",
        grown("fleet_share_failures", 10),
        0,
        "failures in ten minutes",
        10,
        means=(
            "The bucket took no rows for ten minutes. Turns go on; what was not shared yet is lost with its "
            "host, and commits that ask for it are refused."
        ),
        look="`ctxcache fleet status`, `ctxcache doctor bucket`; the bucket's room, credentials and rate.",
        do="Bring the bucket back. What waits is shared then.",
    ),
    Alert(
        "CtxcacheMetadataAils",
        WARNING,
        "RocksDB does not keep up, or has errors",
        "ctxcache_rocksdb_background_errors > 0 or ctxcache_rocksdb_is_write_stopped == 1",
        0,
        "",
        5,
        means="The database under the metadata reports errors in the background or holds writes back.",
        look=(
            "`metadata/LOG` in the data directory; `ctxcache_rocksdb_pending_compaction_bytes`; the device's "
            "latency."
        ),
        do="A faster or a healthy device for the data directory; errors need a restart afterwards.",
    ),
    Alert(
        "CtxcacheDataDirectoryFull",
        CRITICAL,
        "The data directory's filesystem is nearly full",
        'ctxcache_filesystem_free_bytes{of="data"} < 128 * 1024 * 1024',
        0,
        "",
        1,
        means="Less than 128 MiB are free. Below 16 MiB whatever makes new records is refused.",
        look="`du` of the filesystem: SSD files are allocated ahead and do not grow; somebody else fills it.",
        do="Free room; everything goes on as soon as there is some.",
    ),
    Alert(
        "CtxcacheCorruptSegments",
        CRITICAL,
        "Stored bytes came back wrong",
        grown("corrupt_segments", 60),
        0,
        "segments in an hour",
        0,
        means="Segments failed verification. Nothing wrong was handed out: their sessions end before them.",
        look=(
            "`ctxcache why-miss` of a session that lost tokens, `ctxcache verify` for what nobody has read "
            "yet, SMART, ECC and the kernel's log."
        ),
        do="Replace what returns wrong bytes. Places are kept from use until `ctxcache verify --release`.",
    ),
    Alert(
        "CtxcacheMendedSegments",
        WARNING,
        "Memory changed bytes",
        grown("mended_segments", 60),
        0,
        "segments in an hour",
        0,
        means=(
            "Rows in the arena were not what was written. Nothing wrong was handed out and nothing is lost: "
            "SSD's took their place."
        ),
        look=(
            "`ctxcache why-miss` of a session, ECC counters and the kernel's log; which processes map the "
            "arena."
        ),
        do="Replace memory that changes bytes, or stop what writes where it holds no reservation.",
    ),
    Alert(
        "CtxcacheSingleCopies",
        WARNING,
        "Segments lack their second copy",
        value("single_copy_segments"),
        0,
        "segments",
        15,
        means="They shall be on two SSD directories and are on one, whose loss would cost their tokens.",
        look=(
            "`ctxcache tier list`: which SSD path takes no writes and why, and how much room the others have."
        ),
        do="Bring the lost device back, replace it by an empty one, or give SSD more room. Copies follow.",
    ),
    Alert(
        "CtxcacheQuarantinedPlaces",
        WARNING,
        "Places on SSD are kept from use",
        value("quarantined_slots"),
        0,
        "places",
        60,
        means="They gave back other bytes than were written, and nobody has tested them for an hour.",
        look="`ctxcache verify` says which file and where.",
        do="`ctxcache verify --release`; when they come again, replace the device.",
    ),
    Alert(
        "CtxcacheFlushLag",
        WARNING,
        "Tokens are in memory alone for minutes",
        value("flush_lag_seconds"),
        120,
        "s",
        5,
        means=(
            "The oldest rows without a copy on SSD are two minutes old; a crash now would cost them. With "
            "`--tail-age-s` of 0, or beyond 100, that is as set: leave this alert out."
        ),
        look=(
            "`ctxcache_flush_seconds`, `ctxcache_upkeep_failures_total`, `ctxcache_path_state`; "
            "`--write-behind-bytes-per-s` where it is set."
        ),
        do="A faster device, one path more, or a higher bound on write-behind.",
    ),
    Alert(
        "CtxcacheWritersWait",
        WARNING,
        "Writers wait because too much is not on SSD",
        grown("delayed_writes", 10),
        10,
        "writes in 10 min",
        5,
        means="The dirty limit holds writers back: SSD takes less than they write.",
        look="`ctxcache_dirty_bytes` against `ctxcache_watermark_bytes`, `ctxcache_flush_seconds`.",
        do="A faster device, one path more, a larger arena, or fewer writers.",
    ),
    Alert(
        "CtxcacheUpkeepFails",
        WARNING,
        "What happens in the background fails",
        grown("upkeep_failures", 10, by=("step",)),
        5,
        "failures in 10 min",
        0,
        means="Expiry, write-behind, making room or prefetch (`step`) failed again and again.",
        look="The log: `upkeep_step_failed` with the reason, `upkeep_step_broken` with a traceback.",
        do=(
            "Act on the reason: operations.md, When something is full or broken. A traceback is a bug: "
            "report it."
        ),
    ),
    Alert(
        "CtxcacheRefusesCalls",
        WARNING,
        "Callers are refused because too many come at once",
        per_second("refused_rpcs", 5, by=("sort",), reason="TOO_MANY_REQUESTS"),
        1,
        "calls/s",
        10,
        means="More than one call a second was refused for ten minutes; callers try again and add to it.",
        look="`ctxcache_rpcs` against `ctxcache_rpc_limit`; the event loop's lag; CPU.",
        do="Where CPU is left raise the limit of that sort; else another server.",
    ),
    Alert(
        "CtxcacheInternalErrors",
        WARNING,
        "A call ended with an internal error",
        Grown(
            "ctxcache_rpc_seconds", 10, {"code": "INTERNAL"}, ("method", "code", "reason"), counts_first=True
        ),
        0,
        "calls in 10 min",
        0,
        means="A bug: an error that is none of ours reached the edge.",
        look="The log has `internal_error` with the traceback.",
        do="Report it with the traceback.",
    ),
    Alert(
        "CtxcacheSlowCalls",
        WARNING,
        "Small calls are slow",
        late("rpc", 5, method=SMALL_CALLS),
        0.1,
        "s",
        10,
        means="One in a hundred calls that move no rows took more than 100 ms.",
        look="The event loop's lag, CPU (`process_cpu_seconds_total`), how many sessions expire at once.",
        do="See CtxcacheEventLoopStalls.",
    ),
    Alert(
        "CtxcacheEventLoopStalls",
        WARNING,
        "The event loop stalls",
        late("event_loop_lag", 5),
        0.25,
        "s",
        10,
        means="One in a hundred turns came a quarter of a second late, and so did every call in it.",
        look=(
            "CPU of the process and of the machine (throttling of the container!), swapping, slow methods in "
            "`ctxcache_rpc_seconds`."
        ),
        do="CPU for the process; no swap. If one method stalls it alone: report it.",
    ),
    Alert(
        "CtxcacheSessionsNearlyFull",
        WARNING,
        "There are nearly as many sessions as there may be",
        ratio(value("sessions"), "session_limit"),
        0.9,
        "of the limit",
        10,
        means=(
            "At the limit creating one is refused (`TOO_MANY_REQUESTS`), while sessions that nobody asks for "
            "any more take up the count."
        ),
        look=(
            "`ctxcache session list --idle 24h`, `ctxcache_tenant_sessions`, `ctxcache_ended_sessions_total` "
            "by cause."
        ),
        do=(
            "A TTL, or a shorter one (`--default-ttl-s`, `ctxcache session expire`); else a higher "
            "`max_sessions`: a reload takes it over."
        ),
    ),
    Alert(
        "CtxcacheLeasesNearlyFull",
        WARNING,
        "There are nearly as many leases as there may be",
        ratio(value("leases"), "lease_limit"),
        0.8,
        "of the limit",
        5,
        means="At the limit readers are refused (`TOO_MANY_REQUESTS`) and prefill.",
        look=(
            "`ctxcache lease list`: whose, and how old; `ctxcache_oldest_lease_seconds`, "
            "`ctxcache_lease_seconds`."
        ),
        do=(
            "Mend the client that does not let go; `ctxcache lease revoke` ends one. Else a higher "
            "`max_leases`: a reload takes it over."
        ),
    ),
    Alert(
        "CtxcacheModelsNearlyFull",
        WARNING,
        "There are nearly as many models as there may be",
        ratio(value("models"), "model_limit"),
        0.9,
        "of the limit",
        10,
        means=(
            "At the limit registering one is refused (`TOO_MANY_REQUESTS`), and workers with a new model "
            "cannot begin."
        ),
        look="`ctxcache model list`: names that differ where models do not.",
        do=(
            "`ctxcache model delete` those that no session is of; have workers register under one name per "
            "model."
        ),
    ),
    Alert(
        "CtxcacheArenaHeld",
        WARNING,
        "Readers or writers hold all of the arena that they may",
        ratio(value("pinned_bytes"), "pinned_limit_bytes"),
        0.95,
        "of the bound",
        10,
        means="For ten minutes further ones have waited, and been refused.",
        look=(
            "`ctxcache lease list`: which client holds how much, and how long; "
            "`ctxcache_oldest_lease_seconds`, `ctxcache_pin_waiters`."
        ),
        do="Mend the client that does not let go; a larger arena for more readers at a time.",
    ),
    Alert(
        "CtxcacheEvictsWhatComesBack",
        WARNING,
        "A tenth of accesses miss what was evicted",
        Share(per_second("accesses", 30, result="evicted"), per_second("accesses", 30)),
        0.1,
        "of accesses",
        30,
        means="SSD is too small for what comes back, or one tenant pushes out another.",
        look=(
            "`ctxcache_regretted_tokens_total` for the cost, `ctxcache_evict_to_reuse_seconds`, "
            "`ctxcache_tenant_bytes`; `ctxcache simulate` for how much more SSD would help."
        ),
        do="More SSD, shares for tenants, shorter TTLs for what never comes back.",
    ),
    Alert(
        "CtxcacheFingerprintMismatch",
        WARNING,
        "Engines ask with another model than was saved with",
        grown("accesses", 15, result="fingerprint_mismatch"),
        10,
        "misses in 15 min",
        0,
        means="Their sessions are of no use to them: another revision, dtype, tokenizer or setting.",
        look="`ctxcache model list` and the workers' versions; `ctxcache why-miss SESSION`.",
        do="Finish the roll-out, or give each model its own sessions.",
    ),
    Alert(
        "CtxcachePrefetchWasted",
        WARNING,
        "Most of what is promoted ahead of need is not read",
        Share(per_second("prefetch_unused_segments", 30), per_second("prefetched_segments", 30)),
        0.5,
        "of it",
        30,
        means="Hints are wrong or much too early, or the arena too small to keep what came until it is used.",
        look="`ctxcache_waiting_jobs`, `ctxcache_dram_residence_seconds`, hints.md.",
        do="Mend the engine's hints; a larger arena; or the policy `lru`, which takes none.",
    ),
    Alert(
        "CtxcacheTenantAtItsLimit",
        WARNING,
        "A tenant has what it may have",
        ratio(value("tenant_bytes", tier="kept"), "tenant_limit_bytes"),
        0.95,
        "of its limit",
        60,
        means="Its own sessions make way for each other from now on.",
        look="`ctxcache tenants`; the tenant's accesses that miss as `evicted`.",
        do="Raise its limit in `--tenant-shares`, or leave it: that is what limits are for.",
    ),
    Alert(
        "CtxcacheSlowDevice",
        WARNING,
        "Reading from SSD is slow",
        late("promotion", 10),
        0.5,
        "s",
        10,
        means=(
            "One in a hundred segments took more than half a second to come into memory; whoever restores "
            "waits for it."
        ),
        look=(
            "`iostat -x`, other users of the device, SMART; `ctxcache bench` on an idle machine for what it "
            "can do."
        ),
        do="A device of its own; fewer readers; a larger arena.",
    ),
    Alert(
        "CtxcacheFileDescriptors",
        WARNING,
        "File descriptors run out",
        "process_open_fds / process_max_fds > 0.8",
        0,
        "",
        10,
        means="New connections wait when there are none left.",
        look="`ss -p`: which clients have so many connections.",
        do="Raise the limit (`ulimit -n`, LimitNOFILE).",
    ),
)
