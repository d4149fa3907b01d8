"""Alerts of workers beside engines. Part of ALERTS."""

from alert import ON, WARNING, X60, Alert, series

RESTORES, SAVES, STAGES = (f"ctxcache_worker_{name}_total" for name in ("restores", "saves", "stage_seconds"))

WORKER_ALERTS = (
    Alert(
        "CtxcacheWorkerMisses",
        WARNING,
        "sum by (instance, job, reason) "
        f'(rate({RESTORES}{{result="missed",reason!~"SESSION_NOT_FOUND|RESTORE_CANCELLED"}}[15m])) / on '
        f"(instance, job) group_left sum by (instance, job) (rate({RESTORES}[15m])) > 0.1",
        15,
        "A tenth of restores are missed for one reason",
        "Sessions are there and do not come back into the engine, which prefills them instead. What is not "
        "stored, and what the engine cancels, does not count.",
        "The reason, in docs/sidecar.md, Restoring; the panel `Misses by reason`; `ctxcache why-miss "
        "SESSION` at the store.",
        "`RESTORE_TOO_LATE`, `DEADLINE_EXCEEDED`: a busy store or device, or deadlines that are too short. "
        "`UNAVAILABLE`: the store, or the way to it. `CORRUPT_SEGMENT`: see CtxcacheCorruptSegments. "
        "`MODEL_FINGERPRINT_MISMATCH`, `TOKENS_DIFFER`: engines do not ask for what they saved.",
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
    Alert(
        "CtxcacheWorkerFarFromPlan",
        WARNING,
        f'(rate({STAGES}{{of="observed"}}[30m]) / ignoring (of) rate({STAGES}{{of="predicted"}}[30m]) > 1.5 '
        f'or rate({STAGES}{{of="observed"}}[30m]) / ignoring (of) rate({STAGES}{{of="predicted"}}[30m]) < '
        f'0.5) and ignoring (of) rate({STAGES}{{of="observed"}}[30m]) > 0.01',
        30,
        "A stage of restores takes far more, or far less, than plans say",
        "The planner chooses by numbers that are not this machine's: restores are right and slower than "
        "they need be. It follows what it sees, so that this ends by itself unless the machine changes all "
        "the time. Stages with less than a hundredth of the time do not count.",
        "The panel `Observed for each second of the plan`, by stage: `read` is the store and the way to "
        "it, `copy` the bus, the rest computing; who else uses the device.",
        "`ctxcache worker profile` with the device idle, then start the worker with its `--directory`; "
        "give the device to the engine and its worker alone.",
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
    Alert(
        "CtxcacheWorkerRefuses",
        WARNING,
        "sum by (instance, job, what) "
        '(rate(ctxcache_worker_refused_total{reason="TOO_MANY_REQUESTS"}[10m])) > 0.1',
        10,
        "A worker sheds saves, restores or engines",
        "`what` is at its limit, and more than one in ten seconds was refused for ten minutes. Restores "
        "that are refused are prefilled, saves that are refused are lost to the store unless the engine "
        "tries again.",
        "`ctxcache_worker_running` against `ctxcache_worker_limit`; how long the store takes "
        "(`ctxcache_rpc_seconds`, `ctxcache_delayed_writes_total`).",
        "Where the store is quick and the device has room raise `--max-concurrent-saves`, "
        "`--max-concurrent-restores` or `--max-attachments`; else see what slows the store.",
        (series("ctxcache_worker_refused_total", "0+30x60", what="saves", reason="TOO_MANY_REQUESTS"),),
        22,
        (*ON, ("what", "saves")),
        quiet=(
            series("ctxcache_worker_refused_total", "0+5x60", what="saves", reason="TOO_MANY_REQUESTS"),
            series("ctxcache_worker_refused_total", "0+60x60", what="restores", reason="DRAINING"),
        ),
    ),
    Alert(
        "CtxcacheWorkerSavesFail",
        WARNING,
        f'sum by (instance, job, reason) (rate({SAVES}{{result="failed"}}[15m])) / on (instance, job) '
        f"group_left sum by (instance, job) (rate({SAVES}[15m])) > 0.05",
        10,
        "Saves fail",
        "More than one save in twenty ends with the same reason: those sessions end before it, and are "
        "prefilled from there when they come back.",
        "The reason; the store's log and alerts.",
        "`CAPACITY_EXCEEDED`, `UNAVAILABLE`, `DEADLINE_EXCEEDED`: the store. `GENERATION_MISMATCH`, "
        "`WRITE_OFFSET_MISMATCH`: two engines append to one session. `MODEL_FINGERPRINT_MISMATCH`: two "
        "models use one name.",
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
    Alert(
        "CtxcacheWorkerLosesEngines",
        WARNING,
        'increase(ctxcache_worker_ended_attachments_total{how="lost"}[30m]) > 2.5',
        0,
        "Engines go without a word, again and again",
        "Three attachments within half an hour ended because their connection broke: engines crashed or "
        "were killed. Their restores ended with them, what was saved is there.",
        "The engines' own logs; the kernel's for the out-of-memory killer; `kubectl describe pod`.",
        "Mend the engine. The worker needs nothing: whoever attaches with the same name is served.",
        (series("ctxcache_worker_ended_attachments_total", ("0 0 1 2 3 4 4 4 4 4 4 4 4"), how="lost"),),
        12,
        (*ON, ("how", "lost")),
        quiet=(
            series("ctxcache_worker_ended_attachments_total", ("0 0 1 2 2 2 2 2 2 2 2 2 2"), how="lost"),
            series("ctxcache_worker_ended_attachments_total", "0+5x20", how="left"),
        ),
    ),
    Alert(
        "CtxcacheWorkerEngineIdle",
        WARNING,
        "ctxcache_worker_longest_idle_seconds > 3600 and on (instance, job) sum by (instance, job) "
        f"(increase({RESTORES}[1h])) > 0",
        30,
        "An attached engine asks for nothing while others do",
        "It has been attached for an hour or more without a restore or a save, its memory is mapped all "
        "the while, and others of the same worker are busy.",
        "`ctxcache worker stats` says who is attached; that engine's log, and whether requests reach it.",
        "Mend what keeps requests from it, or its configuration: it may not use the cache at all. End it "
        "where nobody needs it.",
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
)
