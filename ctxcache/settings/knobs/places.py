"""Knobs of where bytes lie, and of how they move between memory and SSD."""

from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

SIZE_LIMIT_BYTES = 1 << 60
"""More than any device has, and few enough for every sum of sizes."""

PLACES = Section(
    "Places",
    "Where metadata, memory and SSD files lie, and how large they are.",
    (
        Knob(
            name="data_directory",
            kind=KnobKind.DIRECTORY,
            shown="$XDG_STATE_HOME/ctxcache, else ~/.local/state/ctxcache",
            help="Where metadata, sockets and, unless said otherwise, SSD files lie.",
            advice="a local file system that survives a restart",
            watch="ctxcache_sessions",
        ),
        Knob(
            name="arena_directory",
            kind=KnobKind.DIRECTORY,
            default="/dev/shm",  # noqa: S108  # shared memory is what it is for
            help="Where the DRAM arena's file lies: a tmpfs that local workers reach.",
            advice="in a pod a memory-backed volume that the workers mount too",
        ),
        Knob(
            name="arena_size_bytes",
            kind=KnobKind.SIZE,
            default=0,
            shown=(
                "an eighth of the memory available, within every limit of the container, or half of the"
                " tmpfs' free space, 64 MiB to 8 GiB"
            ),
            help="Size of the DRAM tier, such as 8GiB; allocated at the start, all of it.",
            advice="what `ctxcache simulate` says for the load, see capacity.md",
            watch="ctxcache_read_tokens_total",
            least=0,
            most=SIZE_LIMIT_BYTES,
        ),
        Knob(
            name="arena_huge_pages",
            kind=KnobKind.WORD,
            default="auto",
            help="Reserved 2 MiB pages for the arena.",
            more=(
                "`on`: such pages or no start; `off`: a file in the arena's directory; `auto`: where the pool"
                " has enough."
            ),
            advice="reserve them and say `on` for arenas of 32 GiB and more",
            choices=("auto", "on", "off"),
        ),
        Knob(
            name="arena_prefault",
            kind=KnobKind.SWITCH,
            default=True,
            help="Touch the arena's pages ahead of use, in the background.",
            advice="true; a page nobody has touched costs four times as much to fill",
            watch="ctxcache_arena_prefaulted_bytes",
        ),
        Knob(
            name="arena_sealed",
            kind=KnobKind.SWITCH,
            default=False,
            help=(
                "No process but the server can write to the arena, whatever it is granted; all append by"
                " stream."
            ),
            more="The arena has no file then: local clients get it through the control socket.",
            advice="true where local clients are not trusted with the arena; an append costs a copy more",
        ),
        Knob(
            name="ssd_directories",
            kind=KnobKind.DIRECTORIES,
            default=(),
            shown="ssd in the data directory",
            help="Directory of the SSD tier; repeat for more.",
            more="One per device; separated by `:` in the variable, a list in the file.",
            advice="one per NVMe device, on a file system with direct I/O",
            watch="ctxcache_path_state",
        ),
        Knob(
            name="ssd_missing",
            kind=KnobKind.WORD,
            default="refuse",
            help="What a start does without an SSD directory that was in use.",
            more=(
                "`refuse`: it does not start. `serve`: it starts with the others, and sessions show what is"
                " left of them until the directory is back; one that is missing, empty, not mounted or not"
                " readable is left alone."
            ),
            advice="`serve` where several devices hold sessions and no one is there to decide",
            watch="ctxcache_withheld_tokens",
            choices=("refuse", "serve"),
        ),
        Knob(
            name="ssd_copies",
            kind=KnobKind.COUNT,
            default=1,
            unit="copies",
            help="On how many SSD directories each segment of new sessions and blocks is, 1 or 2.",
            more=(
                "A session may say otherwise when it is created or updated. Both copies count in its tenant's"
                " limit. Where one directory has no room or is lost, a segment has one copy until there is"
                " another place."
            ),
            advice="2 where the loss of a device must cost no token; it halves what SSD holds",
            watch="ctxcache_single_copy_segments",
            least=1,
            most=2,
        ),
        Knob(
            name="ssd_hang_after_s",
            kind=KnobKind.SECONDS,
            default=30,
            help="Age of a read, write or sync after which its SSD device counts as lost.",
            more=(
                "Callers that wait for the device get TIER_FAILURE then, and sessions show what is left of"
                " them. The device is back when it has returned every operation. A caller with a shorter"
                " deadline has its own error before."
            ),
            advice="longer where a controller retries for longer than that before it says EIO",
            watch="ctxcache_path_state",
            least=1,
            most=3600,
        ),
        Knob(
            name="ssd_size_bytes",
            kind=KnobKind.SIZE,
            default=0,
            shown="what is there, else a tenth of the free space, 64 MiB to 32 GiB",
            help="Size of the file in each of them; allocated at the first start.",
            more="At least 64 KiB. May grow later, not shrink.",
            advice="what `ctxcache simulate` says for the load, see capacity.md",
            watch="ctxcache_regretted_tokens_total",
            least=0,
            most=SIZE_LIMIT_BYTES,
        ),
    ),
)


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
            advice="the default; a little above the low one",
        ),
        Knob(
            name="dirty_watermark",
            kind=KnobKind.SHARE,
            default=0.25,
            unit=ARENA,
            help="When more is not on SSD, the oldest is written at once, growing segments too.",
            more="A segment that a writer has room in waits for its age.",
            watch="ctxcache_dirty_bytes",
            least=0,
            most=1,
            can_reload=True,
            advice="the default; less where a crash may cost less",
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
        Knob(
            name="scrub_bytes_per_s",
            kind=KnobKind.SIZE,
            default=16 << 20,
            unit="bytes/s",
            help="How fast DRAM and SSD are verified unasked, a pass every 10 minutes at most; 0 for never.",
            advice="what SSD holds by the time within which damage is to be found",
            watch="ctxcache_corrupt_segments_total",
            least=0,
            most=1 << 60,
            can_reload=True,
        ),
    ),
)
