"""Knobs of how bytes move between memory and SSD."""

from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

DAY_S = 86400
ARENA = "share of the arena"

TIERS = Section(
    "Tiers",
    "When segments are written to SSD, and when they leave memory.",
    (
        Knob(
            name="dram_low_watermark",
            kind=KnobKind.SHARE,
            default=1 / 16,
            unit=ARENA,
            help="When less is free, clean segments leave memory in the background.",
            advice="raise it when promotions wait for room",
            watch="ctxcache_tier_used_bytes",
            least=0,
            below=1,
            can_reload=True,
        ),
        Knob(
            name="dram_high_watermark",
            kind=KnobKind.SHARE,
            default=1 / 8,
            unit=ARENA,
            help="When as much is free again, no more of them leave.",
            watch="ctxcache_tier_used_bytes",
            least=0,
            below=1,
            can_reload=True,
        ),
        Knob(
            name="dirty_watermark",
            kind=KnobKind.SHARE,
            default=0.25,
            unit=ARENA,
            help="When more is not on SSD, the oldest is written at once, growing segments too.",
            watch="ctxcache_dirty_bytes",
            least=0,
            most=1,
            can_reload=True,
        ),
        Knob(
            name="dirty_limit",
            kind=KnobKind.SHARE,
            default=0.75,
            unit=ARENA,
            help="More is never without a copy on SSD: writers wait, and are then refused.",
            more="They wait up to 5 s, and the refusal has a retry delay.",
            advice="lower it where a crash must lose less",
            watch="ctxcache_dirty_bytes",
            above=0,
            most=1,
            can_reload=True,
        ),
        Knob(
            name="tail_age_s",
            kind=KnobKind.SECONDS,
            default=30,
            help="Age after which tokens in a growing segment are written behind; 0 for never.",
            advice="shorter where a crash must lose less, longer where the device wears",
            watch="ctxcache_flush_lag_seconds",
            least=0,
            most=DAY_S,
            can_reload=True,
        ),
        Knob(
            name="write_behind_bytes_per_s",
            kind=KnobKind.SIZE,
            default=0,
            unit="bytes/s",
            help="Most that is written per second though nobody waits; 0 for no bound.",
            advice="the device's daily write budget by 86400 where it is not rated for the load",
            watch="ctxcache_flushed_segments_total",
            least=0,
            most=1 << 60,
            can_reload=True,
        ),
    ),
)
