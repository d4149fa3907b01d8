"""Knobs of who stays, and on whose account."""

from ctxcache.core.placement.names import POLICY_NAMES
from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

DAY_S = 86400

PLACEMENT = Section(
    "Placement",
    "Who leaves first, who may keep what, and what is believed of waiting queues; see placement.md and"
    " hints.md.",
    (
        Knob(
            name="placement_policy",
            kind=KnobKind.WORD,
            default="value",
            help="Who leaves memory and SSD when others need the room, and who is promoted ahead of need.",
            advice="`value`; `ctxcache simulate` compares them on a trace of yours",
            watch="ctxcache_read_tokens_total",
            choices=POLICY_NAMES,
        ),
        Knob(
            name="placement_objective",
            kind=KnobKind.WORD,
            default="seconds",
            help="What `value` saves most of: turns that hit, tokens of prefill, or seconds of waiting.",
            advice=(
                "`seconds`, with the engine's own `prefill_tokens_per_s`; `ctxcache simulate --objective`"
                " shows what each gives on a trace of yours"
            ),
            watch="ctxcache_read_tokens_total",
            choices=("turns", "tokens", "seconds"),
        ),
        Knob(
            name="prefill_tokens_per_s",
            kind=KnobKind.COUNT,
            default=7000,
            unit="tokens a second",
            help="How fast the engines prefill, as measured there: what a miss costs in `seconds`.",
            advice="prompt tokens by time to first token of long prompts that hit nothing",
            least=1,
            most=10**9,
        ),
        Knob(
            name="engine_cents_per_hour",
            kind=KnobKind.COUNT,
            default=0,
            unit="US cents an hour",
            help="Price of one engine with all of its GPUs: with it the store says what it saves in money.",
            advice="what you pay for the GPUs of one engine",
            watch="ctxcache_saved_dollars_total",
            least=0,
            most=10**9,
        ),
        Knob(
            name="write_cents_per_tb",
            kind=KnobKind.COUNT,
            default=0,
            unit="US cents a TB",
            help=(
                "Wear of a TB written to SSD: with it, and `engine_cents_per_hour`, `value` writes only"
                " what is expected to save more than its wear."
            ),
            more="0: writes cost nothing. What drives cost and endure differs more than a default could say.",
            advice="price of the drive by the TB it endures: 7 for 0.07 $; `ctxcache simulate --spare-wear`",
            watch="ctxcache_unadmitted_sessions_total",
            least=0,
            most=10**9,
        ),
        Knob(
            name="default_ttl_s",
            kind=KnobKind.SECONDS,
            default=3600,
            help="Life of a session after an access when its creator does not say.",
            advice="the think time that nine of ten users stay under",
            watch="ctxcache_accesses_total",
            least=1,
            most=3650 * DAY_S,
            can_reload=True,
        ),
        Knob(
            name="tenant_shares",
            kind=KnobKind.SHARES,
            default={},
            shown="none",
            help=(
                "Of SSD and arena, by tenant: what others' need does not touch; `:LIMIT` is the most on SSD."
            ),
            more=(
                "A table in the file: `[tenant_shares]` with `a = 0.5`, `b = { share = 0.2, limit = 0.4 }`."
                " Shares add up to 1 at most; tenants without one have equal parts of the rest. Live, where"
                " tenants are told apart at the start."
            ),
            watch="ctxcache_tenant_bytes",
            can_reload=True,
            advice="a share for each tenant that has a promise, what is left for the others",
        ),
        Knob(
            name="retention_share",
            kind=KnobKind.SHARE,
            default=0.25,
            unit="share of SSD",
            help="What may be retained on clients' request, divided by the tenants' shares.",
            least=0,
            most=1,
            advice="the default; 0 where no client may keep its state from eviction",
            watch="ctxcache_tenant_bytes",
        ),
        Knob(
            name="pin_share",
            kind=KnobKind.SHARE,
            default=0.25,
            unit="share of the arena",
            help="What may be kept there on clients' request, divided as above.",
            least=0,
            most=1,
            advice="the default; 0 where no client may keep its state in DRAM",
            watch="ctxcache_tenant_bytes",
        ),
        Knob(
            name="max_retention_s",
            kind=KnobKind.SECONDS,
            default=3600,
            help="Longest time for which either is granted.",
            least=0,
            most=365 * DAY_S,
            advice="the longest pause after which users come back",
        ),
        Knob(
            name="max_engines",
            kind=KnobKind.COUNT,
            default=64,
            unit="engines",
            help="Engines that publish their waiting queue at a time; more are refused with a retry delay.",
            more="Those that lost their stream count while their grace lasts.",
            watch="ctxcache_engines",
            least=1,
            most=4096,
            advice="twice the engines, for those that restart",
        ),
        Knob(
            name="max_engine_jobs",
            kind=KnobKind.COUNT,
            default=4096,
            unit="jobs",
            help="Waiting jobs that one engine may publish; what goes beyond is refused.",
            least=1,
            most=1 << 16,
            can_reload=True,
            advice="the longest queue of an engine",
            watch="ctxcache_waiting_jobs",
        ),
        Knob(
            name="engine_grace_s",
            kind=KnobKind.SECONDS,
            default=10,
            help="How long an engine's jobs stay when its stream breaks: the default, and the most granted.",
            least=0,
            most=3600,
            can_reload=True,
            advice="the time that an engine takes to connect again",
            watch="ctxcache_engines",
        ),
    ),
)
