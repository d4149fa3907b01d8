"""What `top` shows, as a picture. Pure: looks in, something to print out."""

import math
from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ctxcache.cli.operation_tables import fragmented
from ctxcache.cli.tables import duration
from ctxcache.cli.top_rates import Look, Rates
from ctxcache.cli.units import human_duration, human_size
from ctxcache.v1.admin_pb2 import PathState, TierStats
from ctxcache.v1.session_pb2 import Tier

WIDE = 110
ROWS = 6
NARROW_ROWS = 4
FULL, NEARLY = 0.95, 0.8


def frame(now: Look, before: Look | None, target: str, width: int) -> RenderableType:
    """Everything, for a terminal of so many columns."""
    rates = Rates(now, before)
    rows = ROWS if width >= WIDE else NARROW_ROWS
    parts = [
        _head(now, target, since_start=before is None),
        _problems(now.activity.problems),
        _panel("Tiers", _tiers(now, width)),
        _pair(
            _panel("Reads and writes", _traffic(now, rates)),
            _panel("Held and owed", _held(now, rates)),
            width,
        ),
        _panel("Calls", _calls(rates, rows)),
        _pair(
            _panel("Sessions", _sessions(now, rates, rows)),
            _panel("Tenants", _tenants(now, rates, rows)),
            width,
        ),
    ]
    return Group(*parts)


def _head(now: Look, target: str, *, since_start: bool) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    state = ("ready", "bold green") if now.activity.is_ready else ("draining", "bold yellow")
    left = Text.assemble(
        ("ctxcache ", "bold"),
        now.stats.version,
        "  ",
        target,
        "  ",
        state,
        f"  up {human_duration(now.up_s)}",
    )
    right = "since its start" if since_start else now.clock
    line.add_row(left, Text(right, style="dim"))
    return line


def _tiers(now: Look, width: int) -> RenderableType:
    rows = _rows("", "", ">used", ">of", ">free in one", ">segments", "state", "where")
    # Only the path gives way.
    rows.columns[-1].ratio = 1
    for tier in now.stats.tiers:
        part = tier.used_bytes / max(tier.capacity_bytes, 1)
        rows.add_row(
            Tier.Name(tier.tier).removeprefix("TIER_"), _bar(part, 24 if width >= WIDE else 10),
            human_size(tier.used_bytes), human_size(tier.capacity_bytes), f"{1 - fragmented(tier):.0%}",
            f"{tier.segment_count:,}", _state(tier), Text(_place(tier, width), style="dim"),
        )  # fmt: skip
    return rows


def _traffic(now: Look, rates: Rates) -> RenderableType:
    hit, in_dram = rates.hit_rate(), rates.dram_rate()
    facts = _facts()
    facts.add_row("found", _part(hit), _part_bar(hit))
    facts.add_row("read from DRAM", _part(in_dram), _part_bar(in_dram))
    facts.add_row("read", f"{_count(rates.stat('read_token_count'))} tokens/s", "")
    facts.add_row("appended", f"{_count(rates.stat('appended_token_count'))} tokens/s", "")
    ended = rates.stat("evicted_session_count"), rates.stat("expired_session_count")
    facts.add_row("evicted, expired", f"{_count(ended[0])}, {_count(ended[1])} /s", "")
    facts.add_row("sessions", f"{now.stats.session_count:,}, models {now.stats.model_count:,}", "")
    return facts


def _held(now: Look, rates: Rates) -> RenderableType:
    activity, stats, facts = now.activity, now.stats, _facts()
    leased = activity.leased_bytes / max(activity.leased_limit_bytes, 1)
    dirty = stats.dirty_bytes / max(activity.dirty_limit_bytes, 1)
    facts.add_row("leased", human_size(activity.leased_bytes), _bar(leased, 10))
    oldest = f", oldest {duration(activity.oldest_lease_age)}" if stats.lease_count else ""
    facts.add_row("leases", f"{stats.lease_count}{oldest}", "")
    facts.add_row("not on SSD yet", human_size(stats.dirty_bytes), _bar(dirty, 10))
    waits = activity.HasField("oldest_dirty_age")
    facts.add_row("since", duration(activity.oldest_dirty_age) if waits else "-", "")
    facts.add_row("flushed, promoted", _segments(rates), "")
    delayed, refused = rates.stat("delayed_write_count"), rates.refused()
    text = f"{_count(delayed)}, {_count(refused)} /s"
    facts.add_row("delayed, refused", Text(text, style="yellow" if delayed or refused else ""), "")
    return facts


def _segments(rates: Rates) -> str:
    flushed, promoted = rates.stat("flushed_segment_count"), rates.stat("promoted_segment_count")
    return f"{_count(flushed)}, {_count(promoted)} /s"


def _calls(rates: Rates, limit: int) -> RenderableType:
    rows = _rows("method", ">per s", ">failed", ">half within", ">99 % within")
    calls = rates.calls()
    for one in calls[:limit]:
        failed = Text(_count(one.failed_rate), style="red" if one.failed_rate else "dim")
        rows.add_row(one.method, _count(one.rate), failed, _time(one.p50_s), _time(one.p99_s))
    return rows if calls else _nothing("no calls")


def _sessions(now: Look, rates: Rates, limit: int) -> RenderableType:
    rows = _rows("session", ">uses/s", ">tokens", ">DRAM", ">SSD")
    for one in now.activity.sessions[:limit]:
        rows.add_row(
            Text(one.name.removeprefix("sessions/"), overflow="ellipsis", no_wrap=True),
            _count(rates.accesses("session", f"{one.tenant}/{one.name}")), f"{one.token_count:,}",
            human_size(one.dram_bytes), human_size(one.ssd_bytes),
        )  # fmt: skip
    return rows if now.activity.sessions else _nothing("no session was used")


def _tenants(now: Look, rates: Rates, limit: int) -> RenderableType:
    rows = _rows("tenant", ">uses/s", ">sessions", ">DRAM", ">SSD")
    for one in now.activity.tenants[:limit]:
        rows.add_row(
            Text(one.tenant, overflow="ellipsis", no_wrap=True), _count(rates.accesses("tenant", one.tenant)),
            f"{one.session_count:,}", human_size(one.dram_bytes), human_size(one.ssd_bytes),
        )  # fmt: skip
    return rows if now.activity.tenants else _nothing("no tenant was here")


def _problems(problems: Sequence[str]) -> RenderableType:
    if not problems:
        return Text(" nothing needs a look", style="green")
    return Panel(
        Text("\n".join(problems), style="yellow"), title="Look at", title_align="left", border_style="yellow"
    )


# -- parts ------------------------------------------------------------------------------------------------


def _panel(title: str, inner: RenderableType) -> Panel:
    return Panel(inner, title=title, title_align="left", border_style="bright_black", padding=(0, 1))


def _pair(left: RenderableType, right: RenderableType, width: int) -> RenderableType:
    """Beside each other where there is room."""
    if width < WIDE:
        return Group(left, right)
    both = Table.grid(expand=True)
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(left, right)
    return both


def _rows(*titles: str) -> Table:
    rows = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        is_number = title.startswith(">")
        rows.add_column(title.lstrip(">"), justify="right" if is_number else "left", no_wrap=True)
    return rows


def _facts() -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True)
    facts.add_column()
    return facts


def _bar(part: float, width: int) -> Text:
    filled = min(max(round(part * width), 1 if part > 0 else 0), width)
    colour = "red" if part >= FULL else "yellow" if part >= NEARLY else "cyan"
    return Text.assemble(("█" * filled, colour), ("░" * (width - filled), "bright_black"), f" {part:4.0%}")


def _part_bar(part: float | None) -> Text:
    filled = round((part or 0) * 10)
    return (
        Text.assemble(("█" * filled, "green"), ("░" * (10 - filled), "bright_black"))
        if part is not None
        else Text()
    )


def _part(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _state(tier: TierStats) -> Text:
    word = PathState.Name(tier.state).removeprefix("PATH_STATE_").lower()
    return Text(word, style={"open": "green", "resting": "yellow"}.get(word, "red"))


def _place(tier: TierStats, width: int) -> str:
    path = PurePath(tier.path)
    return str(path) if width >= WIDE else path.parent.name or str(path)


def _count(number: float) -> str:
    if number >= 10_000:
        return f"{number / 1000:.0f} k" if number < 1e6 else f"{number / 1e6:.1f} M"
    return (
        "0"
        if not number
        else f"{number:,.0f}"
        if number >= 100
        else f"{number:.1f}"
        if number >= 0.1
        else "<0.1"
    )


def _time(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return "-" if seconds is None else "> 30 s"
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


def _nothing(text: str) -> Text:
    return Text(text, style="dim")
