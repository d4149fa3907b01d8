"""Knobs of how much at a time."""

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
        ),
        Knob(
            name="room_wait_s",
            kind=KnobKind.SECONDS,
            default=0.25,
            help="How long a caller waits for others to let go of the arena before it is refused.",
            least=0,
            most=DAY_S,
        ),
    ),
)
