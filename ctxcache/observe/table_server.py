"""Metrics of the process that keeps it: calls, leases, hints, metadata, event loop, memory. Part of TABLE."""

from ctxcache.observe.metric import Group, Kind, Metric, counter, gauge, histogram

WELL = Group("Is it well?", (
    gauge("info", "1", "Which version runs, and with which placement policy.", "For scale only.", "version", "placement_policy"),
    gauge("start_time_seconds", "unix time", "When the server began to serve.", "It changes though nobody restarted: it crashed, see the supervisor's log."),
    gauge("ready", "0 or 1", "Whether it takes work: 0 while it drains.", "0 for long: a drain hangs, see `drain_timeout_s`."),
    histogram("event_loop_lag_seconds", "seconds", "How late the event loop came to a timer: what every call has on top.", "p99 above 50 ms: something stalls the loop. Which calls are slow, how many sessions expire at once, is the machine short of CPU?"),
    histogram("scrape_seconds", "seconds", "What the event loop gives for one scrape of these.", "Above 10 ms: report it."),
))  # fmt: skip
CALLS = Group("Calls", (
    histogram("rpc_seconds", "seconds", "Rpcs by method, by gRPC code and, where it is an error of ours, its reason; streams from begin to end.", "p99 of small calls above some ms: see event loop and CPU. INTERNAL: a bug, the log has the traceback.", "method", "code", "reason"),
    gauge("rpcs", "rpcs", "Running now, by sort: `calls`, `streams`, `local_clients`, `engines`, `operators`.", "At its limit: more are refused.", "sort"),
    gauge("rpc_limit", "rpcs", "The most of a sort that may run.", "For scale only.", "sort"),
    counter("refused_rpcs", "rpcs", "Refused without being decoded, by sort and reason: `TOO_MANY_REQUESTS`, `DRAINING`.", "`TOO_MANY_REQUESTS` grows: raise the limit of that sort if the machine has CPU to spare, else fewer callers.", "sort", "reason"),
    counter("local_operations", "operations", "Local clients' operations, by kind and end (`OK`, or a reason).", "An end other than OK grows: its reason says what.", "operation", "end"),
    gauge("connections", "connections", "Connections over TCP to gRPC.", "Near `ctxcache_connection_limit`: further ones are closed at once."),
    gauge("connection_limit", "connections", "The most of one address that the server listens at.", "For scale only."),
    counter("ended_connections", "connections", "Connections ended because their host had too many.", "It grows: a client leaks connections, or many come by one address; see `max_connections_per_host`."),
    gauge("bulk_connections", "connections", "Connections to the bulk channel.", "At `max_bulk_connections`: further clients use gRPC, which is slower."),
))  # fmt: skip
LEASES = Group("Leases and reservations", (
    gauge("leases", "leases", "Leases held, those of streams included.", "Near `ctxcache_lease_limit`; or it only grows: a client does not let go."),
    gauge("lease_limit", "leases", "The most there may be.", "For scale only."),
    gauge("oldest_lease_seconds", "seconds", "Age of the oldest of them.", "Near 300: a reader hangs, or forgets to release; its lease ends by itself then."),
    histogram("lease_seconds", "seconds", "For how long leases were held.", "p99 in minutes: as above."),
    gauge("reservations", "reservations", "Open reservations of writers.", "It only grows: writers die without a word; their slots are kept for a minute."),
))  # fmt: skip
HINTS = Group("Hints", (
    gauge("engines", "engines", "Engines whose waiting queue is there.", "0 with hints on: they do not connect."),
    gauge("engine_limit", "engines", "The most that may publish.", "For scale only."),
    gauge("waiting_jobs", "jobs", "Jobs that wait in engines' queues.", "It only grows: an engine does not say that jobs have gone."),
))  # fmt: skip
METADATA = Group("Metadata", (
    gauge("metadata_fenced", "0 or 1", "1 while the metadata takes no changes: a write found no room or descriptor, which passes, or a write or sync failed, which needs a restart.", "1: `/readyz` says why; free what lacks, or look at the device of the data directory and restart."),
    counter("metadata_reopened", "times", "How often the metadata takes changes again after it lacked something.", "It grows: descriptors, inodes or room run out now and then."),
    counter("metadata_commits", "commits", "Commits since the data directory was made.", "For scale only."),
    gauge("rocksdb_memtable_bytes", "bytes", "RocksDB's tables in memory.", "Far above 64 MiB: flushes do not keep up."),
    gauge("rocksdb_table_bytes", "bytes", "RocksDB's tables on disk.", "Far above 1 KiB per segment: compaction does not keep up."),
    gauge("rocksdb_pending_compaction_bytes", "bytes", "What compaction has yet to rewrite.", "It only grows: the metadata's disk is too slow."),
    gauge("rocksdb_running_compactions", "compactions", "Compactions that run.", "For scale only."),
    gauge("rocksdb_background_errors", "errors", "Errors in RocksDB's background work.", "Not 0: look at the device, then restart."),
    gauge("rocksdb_keys", "keys", "About how many records there are.", "For scale only."),
    gauge("rocksdb_is_write_stopped", "0 or 1", "Whether RocksDB holds writes back.", "1: the metadata's disk is too slow."),
))  # fmt: skip
PROCESS = Group("Process", (
    Metric("process_resident_memory_bytes", Kind.GAUGE, (), "bytes", "Memory of the process, the arena's touched pages included.", "Near the container's limit: it is about to be killed; a smaller arena, or a larger limit."),
    Metric("process_virtual_memory_bytes", Kind.GAUGE, (), "bytes", "Address space.", "For scale only."),
    Metric("process_cpu_seconds_total", Kind.COUNTER, (), "seconds", "CPU time. One core is what the event loop can use.", "Its rate is above 0.9 for long: the event loop is full; more servers."),
    Metric("process_open_fds", Kind.GAUGE, (), "files", "Open file descriptors.", "Near `process_max_fds`: new connections wait."),
    Metric("process_max_fds", Kind.GAUGE, (), "files", "The limit of them.", "Raise it where needed."),
    Metric("process_start_time_seconds", Kind.GAUGE, (), "unix time", "When the process began.", "See `ctxcache_start_time_seconds`."),
))  # fmt: skip
