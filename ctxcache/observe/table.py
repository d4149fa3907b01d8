"""TABLE: every metric of the store, once. Pure.

The exposition, the site's list of metrics and the dashboard come from it. First the metrics of the state that
is kept (hits, stay, tiers, moves, tenants), then those of the process that keeps it (calls, leases, hints,
metadata, event loop, memory).
"""

from ctxcache.observe.metric import Group, Metric, MetricKind, counter, gauge, histogram

WELL = Group(
    "Is it well?",
    (
        gauge(
            "info",
            "1",
            "Which version runs, and with which placement policy.",
            "For scale only.",
            "version",
            "placement_policy",
        ),
        gauge(
            "start_time_seconds",
            "unix time",
            "When the server began to serve.",
            "It changes though nobody restarted: it crashed, see the supervisor's log.",
        ),
        gauge(
            "ready",
            "0 or 1",
            "Whether it takes work: 0 while it drains.",
            "0 for long: a drain hangs, see `drain_timeout_s`.",
        ),
        histogram(
            "event_loop_lag_seconds",
            "seconds",
            "How late the event loop came to a timer: what every call has on top.",
            "p99 above 50 ms: something stalls the loop. Which calls are slow, how many sessions expire at "
            "once, is the machine short of CPU?",
        ),
        histogram(
            "scrape_seconds",
            "seconds",
            "What the event loop gives for one scrape of these.",
            "Above 10 ms: report it.",
        ),
    ),
)
CALLS = Group(
    "Calls",
    (
        histogram(
            "rpc_seconds",
            "seconds",
            "Rpcs by method, by gRPC code and, where it is an error of ours, its reason; streams from "
            "begin to end.",
            "p99 of small calls above some ms: see event loop and CPU. INTERNAL: a bug, the log has the "
            "traceback.",
            "method",
            "code",
            "reason",
        ),
        gauge(
            "rpcs",
            "rpcs",
            "Running now, by sort: `calls`, `streams`, `local_clients`, `engines`, `operators`.",
            "At its limit: more are refused.",
            "sort",
        ),
        gauge("rpc_limit", "rpcs", "The most of a sort that may run.", "For scale only.", "sort"),
        counter(
            "refused_rpcs",
            "rpcs",
            "Refused without being decoded, by sort and reason: `TOO_MANY_REQUESTS`, `DRAINING`.",
            "`TOO_MANY_REQUESTS` grows: raise the limit of that sort if the machine has CPU to spare, else "
            "fewer callers.",
            "sort",
            "reason",
        ),
        counter(
            "local_operations",
            "operations",
            "Local clients' operations, by kind and end (`OK`, or a reason).",
            "An end other than OK grows: its reason says what.",
            "operation",
            "end",
        ),
        gauge(
            "connections",
            "connections",
            "Connections over TCP to gRPC.",
            "Near `ctxcache_connection_limit`: further ones are closed at once.",
        ),
        gauge(
            "connection_limit",
            "connections",
            "The most of one address that the server listens at.",
            "For scale only.",
        ),
        counter(
            "ended_connections",
            "connections",
            "Connections ended because their host had too many.",
            "It grows: a client leaks connections, or many come by one address; see "
            "`max_connections_per_host`.",
        ),
        gauge(
            "bulk_connections",
            "connections",
            "Connections to the bulk channel.",
            "At `max_bulk_connections`: further clients use gRPC, which is slower.",
        ),
    ),
)
LEASES = Group(
    "Leases and reservations",
    (
        gauge(
            "leases",
            "leases",
            "Leases held, those of streams included.",
            "Near `ctxcache_lease_limit`; or it only grows: a client does not let go.",
        ),
        gauge("lease_limit", "leases", "The most there may be.", "For scale only."),
        gauge(
            "oldest_lease_seconds",
            "seconds",
            "Age of the oldest of them.",
            "Near 300: a reader hangs, or forgets to release; its lease ends by itself then.",
        ),
        histogram("lease_seconds", "seconds", "For how long leases were held.", "p99 in minutes: as above."),
        gauge(
            "reservations",
            "reservations",
            "Open reservations of writers.",
            "It only grows: writers die without a word; their slots are kept for a minute.",
        ),
    ),
)
HINTS = Group(
    "Hints",
    (
        gauge(
            "engines",
            "engines",
            "Engines whose waiting queue is there.",
            "0 with hints on: they do not connect.",
        ),
        gauge("engine_limit", "engines", "The most that may publish.", "For scale only."),
        gauge(
            "waiting_jobs",
            "jobs",
            "Jobs that wait in engines' queues.",
            "It only grows: an engine does not say that jobs have gone.",
        ),
    ),
)
METADATA = Group(
    "Metadata",
    (
        gauge(
            "metadata_fenced",
            "0 or 1",
            "1 while the metadata takes no changes: a write found no room or descriptor, which passes, or "
            "a write or sync failed, which needs a restart.",
            "1: `/readyz` says why; free what lacks, or look at the device of the data directory and "
            "restart.",
        ),
        counter(
            "metadata_reopened",
            "times",
            "How often the metadata takes changes again after it lacked something.",
            "It grows: descriptors, inodes or room run out now and then.",
        ),
        counter(
            "metadata_commits", "commits", "Commits since the data directory was made.", "For scale only."
        ),
        gauge(
            "rocksdb_memtable_bytes",
            "bytes",
            "RocksDB's tables in memory.",
            "Far above 64 MiB: flushes do not keep up.",
        ),
        gauge(
            "rocksdb_table_bytes",
            "bytes",
            "RocksDB's tables on disk.",
            "Far above 1 KiB per segment: compaction does not keep up.",
        ),
        gauge(
            "rocksdb_pending_compaction_bytes",
            "bytes",
            "What compaction has yet to rewrite.",
            "It only grows: the metadata's disk is too slow.",
        ),
        gauge("rocksdb_running_compactions", "compactions", "Compactions that run.", "For scale only."),
        gauge(
            "rocksdb_background_errors",
            "errors",
            "Errors in RocksDB's background work.",
            "Not 0: look at the device, then restart.",
        ),
        gauge("rocksdb_keys", "keys", "About how many records there are.", "For scale only."),
        gauge(
            "rocksdb_is_write_stopped",
            "0 or 1",
            "Whether RocksDB holds writes back.",
            "1: the metadata's disk is too slow.",
        ),
    ),
)
PROCESS = Group(
    "Process",
    (
        Metric(
            "process_resident_memory_bytes",
            MetricKind.GAUGE,
            (),
            "bytes",
            "Memory of the process, the arena's touched pages included.",
            "Near the container's limit: it is about to be killed; a smaller arena, or a larger limit.",
        ),
        Metric(
            "process_virtual_memory_bytes", MetricKind.GAUGE, (), "bytes", "Address space.", "For scale only."
        ),
        Metric(
            "process_cpu_seconds_total",
            MetricKind.COUNTER,
            (),
            "seconds",
            "CPU time. One core is what the event loop can use.",
            "Its rate is above 0.9 for long: the event loop is full; more servers.",
        ),
        Metric(
            "process_open_fds",
            MetricKind.GAUGE,
            (),
            "files",
            "Open file descriptors.",
            "Near `process_max_fds`: new connections wait.",
        ),
        Metric(
            "process_max_fds", MetricKind.GAUGE, (), "files", "The limit of them.", "Raise it where needed."
        ),
        Metric(
            "process_start_time_seconds",
            MetricKind.GAUGE,
            (),
            "unix time",
            "When the process began.",
            "See `ctxcache_start_time_seconds`.",
        ),
    ),
)


HITS = Group(
    "Hits",
    (
        counter(
            "accesses",
            "accesses",
            "Lookups (GetSession, LookupSessions) and reads (leases, streams), by what came of them: "
            "`hit`, `empty` (a session without tokens), `never_stored`, `evicted`, `expired`, `deleted`, "
            "`fingerprint_mismatch`, `corrupt`, `quota` (no room or too much at once), `timeout`, "
            "`device`, `refused` (the caller was mistaken).",
            "The share of `hit` falls: see which other one grows. `evicted`: more SSD, or `ctxcache "
            "simulate`. `expired`: a longer TTL. `fingerprint_mismatch`: a worker runs another model or "
            "revision. `never_stored`: engines do not save, or ask under other names, or ended longer ago "
            "than is remembered.",
            "by",
            "result",
        ),
        counter(
            "read_tokens",
            "tokens",
            "Tokens read or leased, that is reused, by the tier in which they were when asked for.",
            "`ssd` grows faster than `dram`: sessions leave DRAM before they come back; see "
            "`ctxcache_dram_residence_seconds`.",
            "tier",
        ),
        counter(
            "saved_prefill_seconds",
            "seconds",
            "Engine seconds that the tokens that were read would have taken, by `prefill_tokens_per_s`.",
            "For scale only: set `prefill_tokens_per_s` to what the engines reach.",
        ),
        counter(
            "saved_dollars",
            "dollars",
            "US dollars of these seconds, by `engine_cents_per_hour`; 0 where no price is set.",
            "For scale only.",
        ),
        counter(
            "appended_tokens",
            "tokens",
            "Tokens committed.",
            "It stands still while engines work: they do not save.",
            counted="appended_token_count",
        ),
        counter(
            "regretted_sessions",
            "sessions",
            "Sessions that were evicted and later made anew under the same name.",
            "More than a few per cent of evictions: SSD is too small for the load, or the policy does not "
            "suit it.",
        ),
        counter(
            "regretted_tokens",
            "tokens",
            "Tokens those sessions had when they were evicted: what had to be computed again.",
            "As above; this is the cost.",
        ),
        histogram(
            "evict_to_reuse_seconds",
            "seconds",
            "From an eviction until the session was made anew.",
            "Small values: a little more SSD would have kept them. Large ones: only much more would.",
        ),
    ),
)
PREFIXES = Group(
    "Prefixes",
    (
        counter(
            "prefix_asked_tokens",
            "tokens",
            "Tokens of prompts that matches and adoptions were asked for.",
            "For scale only.",
        ),
        counter(
            "prefix_found_tokens",
            "tokens",
            "Of these, those that some session had.",
            "A small share of those asked for: prompts begin differently, or their sessions leave before "
            "they are asked for.",
        ),
        counter(
            "prefix_adopted_tokens",
            "tokens",
            "Tokens that sessions have got by adoption.",
            "It stands still while much is found: callers look, and compute all the same.",
        ),
        counter(
            "prefix_adopted_bytes",
            "bytes",
            "Slots of these, in one tier: what was not stored once more.",
            "For scale only.",
        ),
        gauge(
            "prefix_keys",
            "keys",
            "Keys in the index: one for 64 tokens that are found by what they are.",
            "Far below the tokens held divided by 64: sessions were cut, or went on behind short segments.",
        ),
        gauge(
            "prefix_index_bytes",
            "bytes",
            "Memory that the index takes.",
            "For scale only.",
        ),
    ),
)
STAY = Group(
    "What stays and what goes",
    (
        gauge(
            "sessions", "sessions", "Sessions.", "Near `ctxcache_session_limit`: creating more is refused."
        ),
        gauge("session_limit", "sessions", "The most there may be.", "For scale only."),
        gauge(
            "blocks",
            "blocks",
            "Blocks, those that are being written too; no session is one.",
            "Near `ctxcache_session_limit`, which counts for them by themselves: putting more is refused.",
        ),
        gauge(
            "wall_clock_ahead_seconds",
            "seconds",
            "How far the wall clock is ahead of the time that sessions live by, which no step of it moves.",
            "Not near 0: the wall clock was set while the server ran, or was wrong when the machine started.",
        ),
        gauge(
            "models",
            "models",
            "Registered models.",
            "It grows all the time: workers register under ever new names.",
        ),
        gauge("model_limit", "models", "The most there may be.", "For scale only."),
        gauge("segments", "segments", "Segments, shared ones counted once.", "For scale only."),
        counter(
            "ended_sessions",
            "sessions",
            "Sessions that ended, by cause: `expired`, `evicted`, `deleted`.",
            "`evicted` is much of it: SSD is the bound, not the TTL.",
            "cause",
        ),
        histogram(
            "evicted_session_age_seconds",
            "seconds",
            "From a session's creation until its eviction.",
            "Below the pause between two turns of a conversation: sessions go before they could be of use.",
        ),
        histogram(
            "evicted_session_idle_seconds",
            "seconds",
            "From a session's last access until its eviction.",
            "As above.",
        ),
        histogram(
            "dram_residence_seconds",
            "seconds",
            "For how long all of a session stayed in DRAM.",
            "Below the pause between two turns: a larger arena, or hints.",
        ),
    ),
)
TIERS = Group(
    "Tiers",
    (
        gauge(
            "tier_capacity_bytes", "bytes", "What a path holds at most.", "For scale only.", "tier", "path"
        ),
        gauge(
            "tier_used_bytes",
            "bytes",
            "Taken by segments and reservations.",
            "SSD is full in normal use. DRAM: near capacity for long, see `ctxcache_watermark_bytes`.",
            "tier",
            "path",
        ),
        gauge(
            "tier_largest_free_bytes",
            "bytes",
            "The largest run of free room. Against what is free it tells fragmentation.",
            "Below the size of one segment while much is free: models of very different segment sizes "
            "share the path; give them servers of their own.",
            "tier",
            "path",
        ),
        gauge(
            "tier_segments",
            "segments",
            "Segments on a path, those on the way included.",
            "For scale only.",
            "tier",
            "path",
        ),
        counter(
            "path_written_bytes",
            "bytes",
            "Written to an SSD path; failed writes are left out.",
            "A day's sum over the drive's capacity is its drive writes a day. Above what the drive is made "
            "for: a larger arena, or `write_cents_per_tb`.",
            "path",
        ),
        gauge(
            "path_state",
            "0 or 1",
            "1 for the state that a path is in: `open`, `resting` (it lacked room for a write), `fenced` "
            "(its device refused; no writes until a restart), `lost` (nothing can be read from it).",
            "`lost` is 1: sessions miss what lies there; mount or mend it. `fenced` is 1: look at the "
            "device, then restart. `resting` again and again: the filesystem or a quota is full.",
            "tier",
            "path",
            "state",
        ),
        gauge(
            "filesystem_free_bytes",
            "bytes",
            "Free room of the filesystem under the data directory (`of` is `data`) and under each SSD path.",
            "`data` below 16 MiB: what makes new records is refused. Free some room; no restart is needed.",
            "of",
            "path",
        ),
        gauge(
            "withheld_sessions",
            "sessions",
            "Sessions that show fewer tokens than they have, because the rest lies on a lost path.",
            "Not 0: see `ctxcache_path_state`, `lost`.",
        ),
        gauge("withheld_tokens", "tokens", "The tokens that they do not show.", "As above."),
        gauge(
            "quarantined_slots",
            "slots",
            "Places on SSD that gave back other bytes than were written.",
            "Not 0: `ctxcache verify --release`; if they come again, replace the device.",
        ),
        gauge("quarantined_bytes", "bytes", "What they take.", "As above."),
        gauge(
            "stranded_slots",
            "slots",
            "Places on SSD kept from use because a commit failed; free after a restart.",
            "Not 0: the metadata's device refused a write, see `ctxcache_metadata_fenced`.",
        ),
        gauge(
            "watermark_bytes",
            "bytes",
            "Bounds in the arena: `dram_low` and `dram_high` of what is free, `dirty` and `dirty_limit` of "
            "what is not on SSD.",
            "What they bound is beyond them for long: see the settings' table.",
            "mark",
        ),
        gauge(
            "arena_prefaulted_bytes",
            "bytes",
            "Of the arena, touched ahead of use.",
            "Below the arena's capacity minutes after the start: first touches are dear until then.",
        ),
        gauge(
            "pinned_bytes",
            "bytes",
            "Of the arena, held from eviction, by `leases` and by `reservations`.",
            "Near its limit: callers wait and are refused. Who holds leases too long?",
            "by",
        ),
        gauge("pinned_limit_bytes", "bytes", "The most that may be held so.", "For scale only.", "by"),
        gauge(
            "pin_waiters",
            "callers",
            "Callers that wait for others to let go.",
            "Not 0 for long: as above.",
            "by",
        ),
    ),
)
MOVES = Group(
    "Moves and durability",
    (
        counter(
            "promoted_segments",
            "segments",
            "Segments brought from SSD into DRAM.",
            "Much more than sessions come back: DRAM thrashes.",
            counted="promoted_segment_count",
        ),
        histogram(
            "promotion_seconds",
            "seconds",
            "Reading and verifying one segment from SSD.",
            "p99 far above the device's own latency: the device is busy or ails.",
        ),
        counter(
            "prefetched_segments",
            "segments",
            "Segments promoted ahead of need.",
            "0 with hints on: the arena has no room to spare, or the policy takes no hints.",
        ),
        counter(
            "prefetch_used_segments",
            "segments",
            "Of those, read afterwards.",
            "Few: hints are wrong, or come too early.",
        ),
        counter(
            "prefetch_late_segments",
            "segments",
            "Of the used, asked for while they were still on their way.",
            "Many: hints come too late, or SSD is too slow.",
        ),
        counter(
            "prefetch_unused_segments",
            "segments",
            "Of those, dropped without having been read.",
            "Many: hints are wrong or much too early.",
        ),
        gauge(
            "prefetch_waiting_segments",
            "segments",
            "Promoted ahead of need, or being so, and not read yet.",
            "For scale only.",
        ),
        counter(
            "flushed_segments",
            "segments",
            "Segments written to SSD.",
            "Much faster than tokens come: tails are written again and again, see `tail_age_s`.",
            counted="flushed_segment_count",
        ),
        histogram(
            "flush_seconds",
            "seconds",
            "Making one session durable: rows, sync, record, sync.",
            "p99 in seconds: the device is slow, durable appends wait for it.",
        ),
        gauge("flushes", "flushes", "Flushes under way.", "Many for long: as above."),
        gauge(
            "flush_lag_seconds",
            "seconds",
            "Age of the oldest rows that only DRAM has: what a crash would cost.",
            "Beyond `tail_age_s` by more than some seconds: the device does not keep up, or refuses.",
        ),
        gauge(
            "dirty_bytes",
            "bytes",
            "Segments with tokens that SSD has not and is to have.",
            "Above its watermark for long: the device does not keep up with writers.",
        ),
        gauge(
            "spared_bytes",
            "bytes",
            "Sessions that only DRAM has and that are not to be written for now: SSD is full of better ones.",
            "For scale only.",
        ),
        counter(
            "unadmitted_sessions",
            "sessions",
            "Of the sessions evicted, those that were never written to SSD.",
            "Many of those that are evicted, and regretted ones among them: SSD is too small for the load.",
            counted="unadmitted_session_count",
        ),
        gauge(
            "claimed_bytes",
            "bytes",
            "Dirty and to be written, or reserved: what counts against the dirty limit.",
            "Near the limit: writers are about to wait.",
        ),
        gauge(
            "unwritten_sessions",
            "sessions",
            "Sessions with rows that are not durable: the backlog of write-behind.",
            "It grows all the time: as above.",
        ),
        counter(
            "delayed_writes",
            "writes",
            "Times that a writer had to wait, or was refused, because too much was not on SSD.",
            "It grows: a faster device, a larger arena, or fewer writers.",
            counted="delayed_write_count",
        ),
        counter(
            "corrupt_segments",
            "segments",
            "Segments whose bytes failed verification; none was handed out.",
            "It grows: a device or memory returns wrong bytes. `ctxcache verify`, then look at SMART and "
            "ECC counters.",
            counted="corrupt_segment_count",
        ),
        counter(
            "mended_segments",
            "segments",
            "Segments whose bytes in memory were not what was written, and that have SSD's again; none was "
            "handed out.",
            "It grows: memory, or a process that maps the arena, changes bytes. Look at ECC counters, and "
            "at who may write there.",
            counted="mended_segment_count",
        ),
        counter(
            "mended_copies",
            "copies",
            "Copies on SSD that were bad or unreadable; the other one was served, and a new one made.",
            "It grows: a device returns wrong bytes. `ctxcache verify`, then look at SMART.",
            counted="mended_copy_count",
        ),
        counter(
            "uncopied_segments",
            "segments",
            "Segments that were made durable with one copy where two are asked for.",
            "It grows: a device has no room, or is lost.",
            counted="uncopied_segment_count",
        ),
        gauge(
            "single_copy_segments",
            "segments",
            "Segments that shall have two copies on SSD, and have one that can be had.",
            "Not 0 for long: the loss of another device costs their tokens.",
        ),
        counter(
            "joined_segments",
            "segments",
            "Short segments of long sessions that were made one with others.",
            "For scale only.",
            counted="joined_segment_count",
        ),
        gauge(
            "spoiled_slots",
            "slots",
            "Places in the arena that do not keep what is written; out of use until a restart.",
            "Not 0: memory is broken. Replace it.",
        ),
        counter(
            "upkeep_failures",
            "failures",
            "Steps of upkeep that failed, by name.",
            "It grows: the log says why (`upkeep_step_failed`).",
            "step",
        ),
    ),
)
TENANTS = Group(
    "Tenants",
    (
        gauge(
            "tenants",
            "tenants",
            "Tenants that have something, or a share.",
            "More than 100: those that have least are counted together as `_other` below.",
        ),
        counter(
            "tenant_read_tokens",
            "tokens",
            "Tokens that a tenant read or leased.",
            "For a bill: with `ctxcache_tenant_bytes` over time and the tokens appended.",
            "tenant",
        ),
        counter(
            "tenant_appended_tokens",
            "tokens",
            "Tokens that a tenant committed.",
            "For a bill, as above.",
            "tenant",
        ),
        counter(
            "tenant_ahead_tokens",
            "tokens",
            "Tokens that a tenant's engines computed ahead of turns: `computed`, `used` by turns, `wasted`.",
            "`wasted` is most of `computed`: clients send other histories than are rendered, or do not "
            "return; give passes a smaller share, or none.",
            "tenant",
            "what",
        ),
        gauge("tenant_sessions", "sessions", "A tenant's sessions.", "For scale only.", "tenant"),
        gauge(
            "tenant_bytes",
            "bytes",
            "A tenant's segments, in `dram`, on `ssd`, and `kept` (those in both places once).",
            "One tenant has more than its share and others need none of it now; `tenant_shares` guarantees "
            "other parts than equal ones.",
            "tenant",
            "tier",
        ),
        gauge(
            "tenant_guaranteed_bytes",
            "bytes",
            "What nobody else's need takes from it.",
            "It has less than this and misses as `evicted`: report it.",
            "tenant",
            "tier",
        ),
        gauge(
            "tenant_limit_bytes",
            "bytes",
            "The most that it may keep, where it has a limit.",
            "`kept` is near: its own sessions make way for each other.",
            "tenant",
        ),
    ),
)


FLEET = Group(
    "Fleet",
    (
        gauge(
            "fleet_sure",
            "0 or 1",
            "Whether the bucket was heard lately; a store that is alone has none of these.",
            "0: heads are asked for before sessions are used, and nothing new is taken over.",
        ),
        gauge(
            "fleet_sessions",
            "sessions",
            "Sessions used since the start, by tenure: `owned`, `private` (no head yet), `unsure`, `guest` "
            "(of one that went on elsewhere).",
            "Many `private` for minutes: the bucket takes no changes. Many `guest`: sessions move often.",
            "tenure",
        ),
        counter(
            "fleet_arrived_sessions",
            "sessions",
            "Sessions that came from another store.",
            "For each turn that a router sends elsewhere one: fewer with session affinity.",
        ),
        counter(
            "fleet_arrived_tokens",
            "tokens",
            "Tokens that came with them, and were not computed.",
            "For scale only.",
        ),
        counter(
            "fleet_arrived_bytes",
            "bytes",
            "Bytes of rows that came with them.",
            "Near the network's rate: sessions move more than it carries.",
        ),
        counter(
            "fleet_yielded_sessions",
            "sessions",
            "Sessions that another store asked for and has.",
            "For scale only.",
        ),
        counter(
            "fleet_superseded_sessions",
            "sessions",
            "Sessions that went on elsewhere though this store was not asked.",
            "It grows: others do not reach this store. What it stored last is computed again there.",
        ),
        counter(
            "fleet_owners_lost",
            "sessions",
            "Sessions that were begun anew because their store did not answer.",
            "It grows: a store is down, or cut off from this one. `ctxcache fleet status` names it.",
        ),
        counter(
            "fleet_head_reads",
            "reads",
            "Reads of heads in the bucket: one for each session that is new here, or not sure.",
            "Above two a session: sessions move between stores with every turn.",
        ),
        counter(
            "fleet_head_changes",
            "changes",
            "Changes of heads in the bucket: one for each new session and each move.",
            "For scale and cost only.",
        ),
        counter(
            "fleet_no_answers",
            "questions",
            "Questions to the bucket that were not answered in time.",
            "It grows: the bucket is slow or gone. `fleet_patience_s` bounds what a user waits.",
        ),
        counter(
            "fleet_restored_sessions",
            "sessions",
            "Sessions that came out of the bucket, of those that arrived.",
            "It grows: hosts are lost, or sessions leave SSD before they return.",
        ),
        counter(
            "fleet_shared_objects",
            "objects",
            "Objects put into the bucket: rows, and one for each time that says which.",
            "For scale and cost only.",
        ),
        counter(
            "fleet_shared_bytes",
            "bytes",
            "Bytes put into the bucket.",
            "Near the network's rate: `fleet_share_bytes_per_s` bounds it.",
        ),
        gauge(
            "fleet_unshared_sessions",
            "sessions",
            "Sessions whose last turn is not in the bucket yet, and is to be.",
            "It grows for minutes: the bucket takes less than is written.",
        ),
        counter(
            "fleet_share_failures",
            "sessions",
            "Times that a session could not be shared; it is tried again.",
            "It grows: the bucket takes nothing. What was acknowledged as shared is there.",
        ),
        counter(
            "fleet_removed_objects",
            "objects",
            "Objects removed from the bucket: put again with more, deleted or expired.",
            "For scale only.",
        ),
        counter(
            "fleet_asked_prefixes",
            "questions",
            "Times that another store was asked for more of a prompt.",
            "Far above borrowed prefixes: what routers or the bucket say is outdated.",
        ),
        counter(
            "fleet_borrowed_prefixes",
            "prefixes",
            "Prefixes that came from another store.",
            "It grows with every turn: conversations move between hosts, and the router might keep them.",
        ),
        counter(
            "fleet_borrowed_tokens",
            "tokens",
            "Tokens that came with prefixes of other stores, and were not computed.",
            "For scale only.",
        ),
        counter(
            "fleet_borrowed_bytes",
            "bytes",
            "Bytes that came with prefixes of other stores.",
            "Near the network's rate: prefixes are computed where they would come later.",
        ),
        counter(
            "fleet_lent_prefixes",
            "prefixes",
            "Prefixes that other stores were let read here.",
            "One store lends most: it has what all others ask for.",
        ),
        counter(
            "fleet_told_prefixes",
            "prefixes",
            "Prefixes that the bucket was made to know, a request each.",
            "For scale and cost only: `fleet_prefixes`.",
        ),
    ),
)
TABLE = (WELL, HITS, PREFIXES, STAY, TIERS, MOVES, CALLS, LEASES, HINTS, TENANTS, METADATA, FLEET, PROCESS)
METRICS = {metric.name: metric for group in TABLE for metric in group.metrics}
"""By name, in the order of the table."""
OWN = tuple(metric for metric in METRICS.values() if not metric.name.startswith("process_"))
"""The metrics that the library for /proc does not make."""
