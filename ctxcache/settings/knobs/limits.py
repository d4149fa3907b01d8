"""Knobs of how much at a time, and of the process."""

from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

DAY_S = 86400
ARENA = "share of the arena"

LIMITS = Section(
    "Limits",
    "How many and how much at a time; see Overload in operations.md.",
    (
        Knob(
            name="max_sessions",
            kind=KnobKind.COUNT,
            default=1 << 20,
            unit="sessions",
            help="Sessions at a time, and blocks by themselves; making more is refused with a retry delay.",
            watch="ctxcache_sessions",
            least=1,
            can_reload=True,
            advice="what the SSD can hold at the usual length, with room to spare",
        ),
        Knob(
            name="max_leases",
            kind=KnobKind.COUNT,
            default=1 << 16,
            unit="leases",
            help="Leases at a time, those of streams included; more are refused with a retry delay.",
            watch="ctxcache_leases",
            least=1,
            can_reload=True,
            advice="the default; more only where it is reached",
        ),
        Knob(
            name="lease_share",
            kind=KnobKind.SHARE,
            default=0.75,
            unit=ARENA,
            help="What all readers together may keep from being evicted.",
            watch="ctxcache_pinned_bytes",
            above=0,
            most=1,
            advice="the default; less where writers wait for room",
        ),
        Knob(
            name="reservation_share",
            kind=KnobKind.SHARE,
            default=0.75,
            unit=ARENA,
            help="What all writers together may keep from being evicted.",
            watch="ctxcache_pinned_bytes",
            above=0,
            most=1,
            advice="the default; more where long prompts are written at once",
        ),
        Knob(
            name="client_share",
            kind=KnobKind.SHARE,
            default=0.5,
            unit=ARENA,
            help="What one local client may keep so, by leases and again by reservations.",
            more="0.75 where there is only one.",
            above=0,
            most=1,
            advice="the default; more where few clients have long sessions",
            watch="ctxcache_pinned_bytes",
        ),
        Knob(
            name="room_wait_s",
            kind=KnobKind.SECONDS,
            default=0.25,
            help="How long a caller waits for others to let go of the arena before it is refused.",
            least=0,
            most=DAY_S,
            advice="less than the time in which an engine computes the tokens anew",
            watch="ctxcache_pin_waiters",
        ),
    ),
)


LIFECYCLE = Section(
    "Process",
    "Its start, its end, and what it says.",
    (
        Knob(
            name="rebuild_metadata",
            kind=KnobKind.SWITCH,
            default=False,
            help="Make metadata that cannot be trusted anew at the start instead of refusing it.",
            more="As `ctxcache rebuild` does; the old is kept.",
            advice="true where nobody is there to run `ctxcache rebuild`",
        ),
        Knob(
            name="drain_timeout_s",
            kind=KnobKind.SECONDS,
            default=30,
            help="How long running rpcs may take to end on shutdown.",
            least=0,
            most=DAY_S,
            advice="less than the supervisor's own grace, such as `terminationGracePeriodSeconds`",
            watch="ctxcache_ready",
        ),
        Knob(
            name="flush_timeout_s",
            kind=KnobKind.SECONDS,
            default=120,
            help=(
                "How long what is not on disk may take to get there after that; then the process ends"
                " without it."
            ),
            advice="`dirty_limit` times the arena by the device's write bandwidth, and as much again",
            watch="ctxcache_dirty_bytes",
            least=0,
            most=DAY_S,
        ),
        Knob(
            name="trace_endpoint",
            kind=KnobKind.ADDRESS,
            default="",
            help="OTLP collector that spans are sent to over gRPC, http://host:port; empty for none.",
            more="Needs `pip install 'ctxcache[otel]'`. See logs.md.",
            advice="a collector on the same host",
        ),
        Knob(
            name="trace_ratio",
            kind=KnobKind.SHARE,
            default=0.0,
            help="Share of what comes without a trace that is traced; callers decide about the rest.",
            advice="0, or 0.01 to see upkeep's flushes too",
            least=0,
            most=1,
        ),
        Knob(
            name="fault_injection",
            kind=KnobKind.SWITCH,
            default=False,
            help="Let operators inject faults (`ctxcache fault`): for tests of what lies around the store.",
            more=(
                "Devices can then be made slow, refuse, or give back wrong bits, as operations.md says; the"
                " chart has no such setting."
            ),
            advice="false; true never where anybody's sessions matter",
        ),
        Knob(
            name="log_level",
            kind=KnobKind.WORD,
            default="info",
            help="Least severe events that are logged, to stderr.",
            choices=("debug", "info", "warning", "error"),
            can_reload=True,
            advice="info; debug only while something is looked for",
        ),
        Knob(
            name="log_format",
            kind=KnobKind.WORD,
            default="text",
            help="`text` for people, `json` for machines: an object per line.",
            advice="json where something collects logs",
            choices=("text", "json"),
        ),
    ),
)
