"""`ctxcache top`: a server at work, looked at again and again.

Asks `GetStats` and `GetActivity`, nothing else.

    Look ──┐
           ├── Rates (what happened in between) ──► frame (a picture)
    Look ──┘

Rates and frames are pure. Worst case: the server does not answer, and the screen says so until it does.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ctxcache.cli.call import CliCall, CtrlC, online
from ctxcache.cli.documents import Output, examples
from ctxcache.cli.failures import sentence
from ctxcache.cli.options import seconds
from ctxcache.cli.tables import duration, fragmented
from ctxcache.cli.units import human_duration, human_size
from ctxcache.client import Client
from ctxcache.client.convert import document
from ctxcache.client.types import (
    Activity,
    MethodActivity,
    StoreStats,
    TierStats,
    instant,
)
from ctxcache.errors import Unavailable

# An open call would count for nothing until it ends, and then for hours.
UNCOUNTED = ("Access", "Schedule", "GetStats", "GetActivity", "Verify", "Drain")
"""Rpcs that stay open, or with which `top` itself looks."""
PIPE_WIDTH = 120
app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Look:
    """A server at one moment."""

    stats: StoreStats
    activity: Activity

    @property
    def time_s(self) -> float:
        """The time of the look, by the server's clock."""
        return (self.activity.time_ns or 0) / 1e9

    @property
    def up_s(self) -> float:
        """The time since the server's start."""
        return max(self.time_s - (self.stats.start_time_ns or 0) / 1e9, 0.001)

    @property
    def clock(self) -> str:
        """The time of the look, for people."""
        return instant(self.activity.time_ns or 0).astimezone().strftime("%H:%M:%S")


@dataclass(frozen=True, slots=True)
class Calls:
    """One method: calls a second, failed ones a second, and how long they take.

    None where a figure is not known.
    """

    method: str
    rate: float
    failed_rate: float
    p50_s: float | None
    p99_s: float | None


class Rates:
    """The changes between two looks; without an earlier one, since the server's start."""

    def __init__(self, now: Look, before: Look | None) -> None:
        # A server that was started anew counts from nothing.
        if before is not None and before.stats.start_time_ns != now.stats.start_time_ns:
            before = None
        self._now, self._before = now, before
        self.seconds = now.up_s if before is None else max(now.time_s - before.time_s, 0.001)

    def stat(self, name: str) -> float:
        """A counter of GetStats, a second."""
        return self._per_s(self._grown("stats", name))

    def hit_rate(self) -> float | None:
        """Part of reads and look-ups that found the session; None when there were none."""
        hits, misses = self._grown("activity", "hit_count"), self._grown("activity", "miss_count")
        return hits / (hits + misses) if hits + misses else None

    def dram_rate(self) -> float | None:
        """Part of what was read that was in DRAM already; None when nothing was."""
        read = self._grown("stats", "read_token_count")
        return self._grown("stats", "dram_hit_token_count") / read if read else None

    def refused(self) -> float:
        """Rpcs refused, a second."""
        return self._per_s(self._grown("activity", "refused_rpc_count"))

    def calls(self) -> list[Calls]:
        """Methods that were called, the busiest first."""
        earlier = [] if self._before is None else self._before.activity.methods
        before = {method.method: method for method in earlier}
        calls = [self._calls(now, before.get(now.method)) for now in self._now.activity.methods]
        shown = [
            method for method in calls if method.rate and method.method.rpartition("/")[2] not in UNCOUNTED
        ]
        return sorted(shown, key=lambda method: -method.rate)

    def accesses(self, kind: str, name: str) -> float:
        """A session's or a tenant's accesses a second.

        A session that was not among the busiest before counts since a moment unknown.
        """
        # Without an earlier count, accesses of all time would be taken for those of this moment.
        now = _accesses(self._now.activity, kind).get(name, 0)
        before = {} if self._before is None else _accesses(self._before.activity, kind)
        return self._per_s(max(now - before.get(name, now if self._before else 0), 0))

    def _calls(self, now: MethodActivity, before: MethodActivity | None) -> Calls:
        earlier = before or MethodActivity(bucket_counts=(0,) * len(now.bucket_counts))
        buckets = [a - b for a, b in zip(now.bucket_counts, earlier.bucket_counts, strict=True)]
        return Calls(
            now.method,
            self._per_s(now.count - earlier.count),
            self._per_s(now.failed_count - earlier.failed_count),
            quantile(now.bounds_seconds, buckets, 0.5),
            quantile(now.bounds_seconds, buckets, 0.99),
        )

    def _grown(self, of: str, name: str) -> int:
        before = 0 if self._before is None else getattr(getattr(self._before, of), name)
        return int(getattr(getattr(self._now, of), name) - before)

    def _per_s(self, count: float) -> float:
        return count / self.seconds


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """The upper bound of the bucket in which so large a part of the values lies below.

    None without values.
    """
    left = part * sum(counts)
    if not left:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        left -= count
        if left <= 0:
            return bound
    return float("inf")


def _accesses(activity: Activity, kind: str) -> dict[str, int]:
    if kind == "tenant":
        return {one.tenant: one.access_count for one in activity.tenants}
    return {f"{one.tenant}/{one.name}": one.access_count for one in activity.sessions}


WIDE = 110
ROWS = 6
NARROW_ROWS = 4
FULL, NEARLY = 0.95, 0.8


def frame(now: Look, before: Look | None, target: str, width: int) -> RenderableType:
    """The whole screen, for a terminal of so many columns."""
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
    # The path column alone gives way.
    rows.columns[-1].ratio = 1
    for tier in now.stats.tiers:
        part = tier.used_bytes / max(tier.capacity_bytes, 1)
        rows.add_row(
            tier.tier.name,
            _bar(part, 24 if width >= WIDE else 10),
            human_size(tier.used_bytes),
            human_size(tier.capacity_bytes),
            f"{1 - fragmented(tier):.0%}",
            f"{tier.segment_count:,}",
            _state(tier),
            Text(_place(tier, width), style="dim"),
        )
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
    oldest = f", oldest {duration(activity.oldest_lease_age_ns)}" if stats.lease_count else ""
    facts.add_row("leases", f"{stats.lease_count}{oldest}", "")
    facts.add_row("not on SSD yet", human_size(stats.dirty_bytes), _bar(dirty, 10))
    waits = activity.oldest_dirty_age_ns is not None
    facts.add_row("since", duration(activity.oldest_dirty_age_ns) if waits else "-", "")
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
    for session in now.activity.sessions[:limit]:
        rows.add_row(
            Text(session.name.removeprefix("sessions/"), overflow="ellipsis", no_wrap=True),
            _count(rates.accesses("session", f"{session.tenant}/{session.name}")),
            f"{session.token_count:,}",
            human_size(session.dram_bytes),
            human_size(session.ssd_bytes),
        )
    return rows if now.activity.sessions else _nothing("no session was used")


def _tenants(now: Look, rates: Rates, limit: int) -> RenderableType:
    rows = _rows("tenant", ">uses/s", ">sessions", ">DRAM", ">SSD")
    for tenant in now.activity.tenants[:limit]:
        rows.add_row(
            Text(tenant.tenant, overflow="ellipsis", no_wrap=True),
            _count(rates.accesses("tenant", tenant.tenant)),
            f"{tenant.session_count:,}",
            human_size(tenant.dram_bytes),
            human_size(tenant.ssd_bytes),
        )
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
    """Show two parts beside each other where there is room."""
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
    word = tier.state.name.lower()
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


# -- the command ------------------------------------------------------------------------------------------


@app.command("top", epilog=examples("ctxcache top --once", "ctxcache top --once --output json"))
@online
def top(
    call: CliCall,
    interval: Annotated[
        float, typer.Option("--interval", metavar="TIME", parser=seconds(0.1), help="How often to look.")
    ] = 2.0,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, and say what was since the start.")
    ] = False,
    width: Annotated[
        int | None,
        typer.Option("--width", metavar="COLUMNS", min=60, help="As if the terminal were so wide."),
    ] = None,
) -> None:
    """Show what goes on: tiers, hit rates, calls and how long they take, who is busy, what needs a look.

    Ctrl-C ends it. With --output json or yaml: one document, of what `GetStats` and `GetActivity` answer.
    """
    with call.client() as client:
        if call.output is not Output.TABLE:
            _document(call, _look(client))
        elif once:
            _print(_look(client), call.target, width)
        else:
            with CtrlC() as ctrl_c:
                _live(client, call.target, interval, width, ctrl_c)


def _look(client: Client) -> Look:
    return Look(client.admin.stats(), client.admin.activity())


def _document(call: CliCall, look: Look) -> None:
    call.show_facts({"stats": document(look.stats), "activity": document(look.activity)}, "")


def _print(look: Look, target: str, width: int | None) -> None:
    console = Console(highlight=False, width=width or (None if sys.stdout.isatty() else PIPE_WIDTH))
    console.print(frame(look, None, target, console.width))


def _live(client: Client, target: str, interval_s: float, width: int | None, ctrl_c: CtrlC) -> None:
    console = Console(highlight=False, width=width)
    before: Look | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not ctrl_c.was_pressed:
            try:
                now = _look(client)
                live.update(frame(now, before, target, console.width), refresh=True)
                # After a failed look the next rates span the gap: `before` is the last look that succeeded.
                before = now
            except Unavailable as error:
                live.update(Text(sentence(error), style="bold red"), refresh=True)
            ctrl_c.rest(interval_s)
