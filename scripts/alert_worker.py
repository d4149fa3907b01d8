"""Alerts of workers beside engines. Prometheus alone looks at them: a worker has no status page."""

from ctxcache.observe.alerts import WARNING, Alert

RESTORES, SAVES, STAGES = (f"ctxcache_worker_{name}_total" for name in ("restores", "saves", "stage_seconds"))

WORKER_ALERTS = (
    Alert(
        "CtxcacheWorkerMisses",
        WARNING,
        "A tenth of restores are missed for one reason",
        "sum by (instance, job, reason) "
        f'(rate({RESTORES}{{result="missed",reason!~"SESSION_NOT_FOUND|RESTORE_CANCELLED"}}[15m])) / on '
        f"(instance, job) group_left sum by (instance, job) (rate({RESTORES}[15m])) > 0.1",
        0,
        "",
        15,
        means="Sessions are there and do not come back into the engine, which prefills them instead. What is "
        "not stored, and what the engine cancels, does not count.",
        look="The reason, in docs/sidecar.md, Restoring; the panel `Misses by reason`; `ctxcache why-miss "
        "SESSION` at the store.",
        do="`RESTORE_TOO_LATE`, `DEADLINE_EXCEEDED`: a busy store or device, or deadlines that are too "
        "short. `UNAVAILABLE`: the store, or the way to it. `CORRUPT_SEGMENT`: see CtxcacheCorruptSegments. "
        "`MODEL_FINGERPRINT_MISMATCH`, `TOKENS_DIFFER`: engines do not ask for what they saved.",
    ),
    Alert(
        "CtxcacheWorkerFarFromPlan",
        WARNING,
        "A stage of restores takes far more, or far less, than plans say",
        f'(rate({STAGES}{{of="observed"}}[30m]) / ignoring (of) rate({STAGES}{{of="predicted"}}[30m]) > 1.5 '
        f'or rate({STAGES}{{of="observed"}}[30m]) / ignoring (of) rate({STAGES}{{of="predicted"}}[30m]) < '
        f'0.5) and ignoring (of) rate({STAGES}{{of="observed"}}[30m]) > 0.01',
        0,
        "",
        30,
        means="The planner chooses by numbers that are not this machine's: restores are right and slower "
        "than they need be. It follows what it sees, so that this ends by itself unless the machine changes "
        "all the time. Stages with less than a hundredth of the time do not count.",
        look="The panel `Observed for each second of the plan`, by stage: `read` is the store and the way to "
        "it, `copy` the bus, the rest computing; who else uses the device.",
        do="`ctxcache worker profile` with the device idle, then start the worker with its `--directory`; "
        "give the device to the engine and its worker alone.",
    ),
    Alert(
        "CtxcacheWorkerRefuses",
        WARNING,
        "A worker sheds saves, restores or engines",
        "sum by (instance, job, what) "
        '(rate(ctxcache_worker_refused_total{reason="TOO_MANY_REQUESTS"}[10m])) > 0.1',
        0,
        "",
        10,
        means="`what` is at its limit, and more than one in ten seconds was refused for ten minutes. "
        "Restores that are refused are prefilled, saves that are refused are lost to the store unless the "
        "engine tries again.",
        look="`ctxcache_worker_running` against `ctxcache_worker_limit`; how long the store takes "
        "(`ctxcache_rpc_seconds`, `ctxcache_delayed_writes_total`).",
        do="Where the store is quick and the device has room raise `--max-concurrent-saves`, "
        "`--max-concurrent-restores` or `--max-attachments`; else see what slows the store.",
    ),
    Alert(
        "CtxcacheWorkerSavesFail",
        WARNING,
        "Saves fail",
        f'sum by (instance, job, reason) (rate({SAVES}{{result="failed"}}[15m])) / on (instance, job) '
        f"group_left sum by (instance, job) (rate({SAVES}[15m])) > 0.05",
        0,
        "",
        10,
        means="More than one save in twenty ends with the same reason: those sessions end before it, and are "
        "prefilled from there when they come back.",
        look="The reason; the store's log and alerts.",
        do="`CAPACITY_EXCEEDED`, `UNAVAILABLE`, `DEADLINE_EXCEEDED`: the store. `GENERATION_MISMATCH`, "
        "`WRITE_OFFSET_MISMATCH`: two engines append to one session. `MODEL_FINGERPRINT_MISMATCH`: two "
        "models use one name.",
    ),
    Alert(
        "CtxcacheWorkerLosesEngines",
        WARNING,
        "Engines go without a word, again and again",
        'increase(ctxcache_worker_ended_attachments_total{how="lost"}[30m]) > 2.5',
        0,
        "",
        0,
        means="Three attachments within half an hour ended because their connection broke: engines crashed "
        "or were killed. Their restores ended with them, what was saved is there.",
        look="The engines' own logs; the kernel's for the out-of-memory killer; `kubectl describe pod`.",
        do="Mend the engine. The worker needs nothing: whoever attaches with the same name is served.",
    ),
    Alert(
        "CtxcacheWorkerEngineIdle",
        WARNING,
        "An attached engine asks for nothing while others do",
        "ctxcache_worker_longest_idle_seconds > 3600 and on (instance, job) sum by (instance, job) "
        f"(increase({RESTORES}[1h])) > 0",
        0,
        "",
        30,
        means="It has been attached for an hour or more without a restore or a save, its memory is mapped "
        "all the while, and others of the same worker are busy.",
        look=(
            "`ctxcache worker stats` says who is attached; that engine's log, and whether requests reach it."
        ),
        do="Mend what keeps requests from it, or its configuration: it may not use the cache at all. End it "
        "where nobody needs it.",
    ),
)
