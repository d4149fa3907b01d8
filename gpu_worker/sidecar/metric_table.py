"""TABLE: every metric of a worker, once. What is shown, docs/sidecar.md and the worker's dashboard come from here. Pure."""

from ctxcache.observe.metric import Group, counter, gauge

TABLE = Group("Workers", (
    counter("worker_restores", "restores", "Restores that ended: `restored`, or `missed` and why.", "`missed` is much of it: the reason says why; of `SESSION_NOT_FOUND` ask the store, `ctxcache why-miss`.", "result", "reason"),
    counter("worker_restored_tokens", "tokens", "Tokens that were restored.", "It stands still while engines work: they do not ask."),
    counter("worker_read_bytes", "bytes", "Bytes read from the store for them.", "For scale only."),
    gauge("worker_direct_path", "paths", "1 for the path by which sessions are read that lie only on SSD: `gds`, `kvikio-compat`, `posix`, `off` (`direct_storage.md`).", "Not the one that the machine should have: `ctxcache worker stats` says why.", "path"),
    counter("worker_direct_read_bytes", "bytes", "Bytes taken from the SSD tier's files.", "For scale only."),
    counter("worker_direct_failures", "restores", "Restores that gave the files up: the store read for them, or they were misses.", "It grows: of `TIER_FAILURE`, look at the disk and the driver; of `CORRUPT_SEGMENT`, `ctxcache verify`.", "reason"),
    counter("worker_saves", "saves", "Saves that ended: `saved`, or `failed` and why.", "`failed` grows: the reason says why.", "result", "reason"),
    counter("worker_saved_tokens", "tokens", "Tokens that were saved.", "It stands still while engines work: they do not save."),
    counter("worker_stage_seconds", "seconds", "Of whole restores, seconds by stage: `observed`, and `predicted` by the plans.", "The rates differ by more than a half for long: the profile is another machine's, or this one is busy; `ctxcache worker profile`.", "stage", "of"),
    counter("worker_refused", "calls", "Restores, saves and attachments refused at once: `TOO_MANY_REQUESTS`, `DRAINING`.", "It grows: raise the limit of that sort if the device has room, else another worker.", "what", "reason"),
    counter("worker_ended_attachments", "attachments", "Attachments that ended: `left`, as engines do that stop; `lost`, their connection broke; or the worker's reason.", "`lost` grows: engines crash or are killed; see their logs.", "how"),
    gauge("worker_running", "calls", "Restores, saves and attachments there are.", "At its limit for long: as above.", "what"),
    gauge("worker_limit", "calls", "The most there may be.", "For scale only.", "what"),
    gauge("worker_attached_bytes", "bytes", "Memory of engines that is mapped.", "Near `--max-attached-mib`: further engines are refused."),
    gauge("worker_longest_idle_seconds", "seconds", "Of the engines attached, the longest that one has not asked for a restore or a save; 0 where none is attached.", "Hours while others work: that engine hangs, gets no requests, or does not use its attachment."),
))  # fmt: skip
METRICS = {metric.name: metric for metric in TABLE.metrics}
