"""The pages of the metrics endpoint: metrics for machines; the status page, HTML and JSON, for people.

A chart is stretched to its place, and its words are tooltips. A status is made at most once in FRESH_S, for
all requests of that time. Sessions are looked through at most once in SCAN_S, and the text is made in a
thread. Names of sessions and engines are shown only where the settings say so, and only under a host name
that no other page can point here.
"""

import asyncio
import ipaddress
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from time import monotonic

from ctxcache.core.placement.names import WORDS
from ctxcache.observe.alerts import CRITICAL, HeldAlert
from ctxcache.observe.endpoint import Answer, Page
from ctxcache.observe.exposition import Exposition, Sources
from ctxcache.observe.moment import MINUTES, Recording
from ctxcache.observe.status import (
    BacklogStatus,
    Engine,
    Hits,
    Path,
    SessionLine,
    SessionList,
    Status,
    StatusBound,
    Tenant,
    listed_engines,
    listed_sessions,
    problems_of_paths,
    status_of,
)
from ctxcache.observe.status_page_guide import guide
from ctxcache.observe.status_page_markup import (
    Html,
    count_text,
    document,
    element,
    joined,
    share_text,
    size_text,
    time_text,
    void,
)
from ctxcache.observe.status_page_runbook import RUNBOOK, advice, entry_link, runbook

HEIGHT, SLOT, BAR = 100, 10, 8
LABELLED = 10
"""Minutes from which the middle of an axis has a label."""


def hit_chart(by_minute: Sequence[Hits]) -> Html:
    """The hits among each minute's accesses, by tier; full height is all accesses."""
    return _columns(
        by_minute,
        [((hits.dram_share, "dram"), (hits.hit_share - hits.dram_share, "ssd")) for hits in by_minute],
        [
            f"{share_text(hits.hit_share)} of {count_text(hits.access_count)} accesses"
            if hits.access_count
            else "no access"
            for hits in by_minute
        ],
        [hits.access_count > 0 for hits in by_minute],
        "Share of accesses that hit, by minute",
    )


def token_chart(by_minute: Sequence[Hits]) -> Html:
    """Tokens reused, by tier, and tokens appended above them; full height is the most of any minute."""
    most = max((_token_count(hits) for hits in by_minute), default=0) or 1
    return _columns(
        by_minute,
        [
            (
                (hits.dram_token_count / most, "dram"),
                (hits.ssd_token_count / most, "ssd"),
                (hits.appended_token_count / most, "new"),
            )
            for hits in by_minute
        ],
        [
            f"{count_text(hits.dram_token_count)} from DRAM, {count_text(hits.ssd_token_count)} from SSD, "
            f"{count_text(hits.appended_token_count)} new"
            for hits in by_minute
        ],
        [False] * len(by_minute),
        "Tokens reused and appended, by minute",
    )


def most_tokens(by_minute: Iterable[Hits]) -> int:
    """The full height of the tokens' chart."""
    return max(map(_token_count, by_minute), default=0)


def meter(parts: Iterable[tuple[float, str]], marks: Iterable[tuple[float, str]] = (), *, label: str) -> Html:
    """A bar: shares of its width one after the other, by class, and marks at shares, with words for each."""
    drawn, left = [], 0.0
    for part, class_ in parts:
        width = max(min(part, 1 - left), 0)
        drawn.append(
            element(
                "rect", x=f"{left * 1000:.1f}", y=0, width=f"{width * 1000:.1f}", height=10, class_=class_
            )
        )
        left += width
    ticks = [
        element(
            "rect",
            element("title", text),
            x=f"{min(at, 1) * 1000 - 1.5:.1f}",
            y=0,
            width=3,
            height=10,
            class_="mark",
        )
        for at, text in marks
    ]
    return element(
        "svg",
        *drawn,
        *ticks,
        class_="meter",
        view_box="0 0 1000 10",
        preserve_aspect_ratio="none",
        role="img",
        aria_label=label,
    )


def _token_count(hits: Hits) -> int:
    return hits.dram_token_count + hits.ssd_token_count + hits.appended_token_count


def _columns(
    by_minute: Sequence[Hits],
    stacks: Sequence[Sequence[tuple[float, str]]],
    texts: Sequence[str],
    is_whole: Sequence[bool],
    label: str,
) -> Html:
    count = len(by_minute)
    columns = []
    for i, (stack, text) in enumerate(zip(stacks, texts, strict=True)):
        x = i * SLOT
        ago = f"{count - i - 1} min ago" if i < count - 1 else "this minute"
        parts = [element("rect", x=x, y=0, width=BAR, height=HEIGHT, class_="slot")] if is_whole[i] else []
        top = float(HEIGHT)
        for part, class_ in stack:
            top -= part * HEIGHT
            if part > 0:
                parts.append(
                    element(
                        "rect", x=x, y=f"{top:.1f}", width=BAR, height=f"{part * HEIGHT:.1f}", class_=class_
                    )
                )
        columns.append(element("g", element("title", f"{ago}: {text}"), joined(*parts)))
    base = element("rect", x=0, y=HEIGHT - 1, width=count * SLOT, height=1, class_="base")
    return element(
        "svg",
        base,
        *columns,
        class_="columns",
        view_box=f"0 0 {count * SLOT} {HEIGHT}",
        preserve_aspect_ratio="none",
        role="img",
        aria_label=label,
    )


REFRESH_WITHOUT_SCRIPT_S = 15
MISSES = {
    "never_stored": "never stored under that name",
    "evicted": "evicted to make room",
    "expired": "expired: not used within its TTL",
    "deleted": "deleted by a caller",
    "fingerprint_mismatch": "saved with another model",
    "corrupt": "bytes came back wrong",
    "quota": "no room, or too much at once",
    "timeout": "took longer than the caller waits",
    "device": "the device failed",
    "device_lost": "lies on a lost SSD path",
    "moved": "went on at another host",
    "owner_lost": "its host does not answer",
    "refused": "the caller's mistake",
}
"""Why an access missed, by its result."""
NOT_SHOWN = (
    "Names of sessions and engines are not shown: this page asks nobody who they are. "
    'status_names = "on" shows them.'
)


def page(status: Status) -> Html:
    """The whole page."""
    count = len(status.alerts)
    head = joined(
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        # Only without script: with it the page fetches itself anew.
        element("noscript", void("meta", http_equiv="refresh", content=REFRESH_WITHOUT_SCRIPT_S)),
        element("title", f"({count}) " * bool(count) + f"ctxcache {status.data_directory}"),
        void("link", rel="icon", href="data:,"),
        void("link", rel="stylesheet", href="/status.css"),
        element("script", src="/status.js", defer=True),
    )
    body = element(
        "body",
        _header(status),
        element(
            "main",
            _alerts(status),
            *([guide(status.addresses, status.settings)] if status.is_empty else []),
            _tiles(status),
            *(_charts(status) if not status.is_empty else []),
            _tiers(status),
            _backlog(status.backlog),
            _running(status.running),
            _engines(status),
            _tenants(status),
            *_sessions(status),
            _settings(status),
        ),
        element(
            "footer",
            "The same as ",
            element("a", "JSON", href="/status.json"),
            " and as ",
            element("a", "Prometheus metrics", href="/metrics"),
            ". What alerts mean: the ",
            element("a", "runbook", href=RUNBOOK),
            ".",
            element("span", id="age"),
        ),
    )
    return document(head, body)


def _header(status: Status) -> Html:
    worst = CRITICAL if any(held.severity == CRITICAL for held in status.alerts) else "warning"
    state = "draining" if not status.is_ready else worst if status.alerts else "well"
    words_of = {"draining": "draining", "well": "all well", CRITICAL: "needs you", "warning": "look here"}
    policy = status.placement_policy
    return element(
        "header",
        element("h1", "ctxcache"),
        element("code", status.data_directory, title="the data directory"),
        element("span", words_of[state], class_=f"pill {state}"),
        element("span", f"{status.version} · up {time_text(status.up_s)}", class_="quiet"),
        element(
            "span",
            "placement: ",
            element("b", policy),
            f", {WORDS[policy]}" if policy in WORDS else "",
            class_="quiet",
        ),
    )


def _alerts(status: Status) -> Html:
    if not status.alerts:
        return Html("")
    return element(
        "section",
        element(
            "ul",
            *(
                element(
                    "li",
                    element("strong", held.summary),
                    " ",
                    element("span", _measured(held), class_="quiet"),
                    element("code", entry_link(held.alert)),
                    *_facts_of(held, status),
                    *advice(held),
                    class_=held.severity,
                )
                for held in status.alerts
            ),
        ),
        class_="card wide alerts",
        aria_label="What is wrong now",
    )


STATE_OF = {
    "CtxcachePathLost": "lost",
    "CtxcachePathFenced": "fenced",
    "CtxcachePathLacksRoom": "resting",
}
"""The state of a path, by the alert that tells of it."""


def _facts_of(held: HeldAlert, status: Status) -> list[Html]:
    """Which paths it is about, since when, why and what they cost now."""
    state = STATE_OF.get(held.alert)
    paths = [path for path in status.paths if path.state == state]
    facts = [
        element(
            "p",
            element("code", path.path),
            f" is {state}{_since(path.problem_time_s, status)}",
            f": {path.problem}" if path.problem else "",
        )
        for path in paths
    ]
    if state == "lost" and paths:
        sessions, tokens = count_text(status.withheld_session_count), count_text(status.withheld_token_count)
        cost = (
            f"It costs {tokens} tokens of {sessions} sessions, until it is back."
            if status.withheld_session_count
            else "It costs no session a token so far."
        )
        facts.append(element("p", cost))
    return facts


def _since(time_s: float | None, status: Status) -> str:
    if time_s is None:
        return ""
    ago_s = max(status.start_time_s + status.up_s - time_s, 0)
    return f" since {datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC, {time_text(ago_s)} ago"


def _measured(held: HeldAlert) -> str:
    if not held.unit:
        return ""
    write = {"s": time_text, "of": share_text}.get(held.unit.split()[0], count_text)
    unit = "" if held.unit == "s" else f" {held.unit}"
    return f"{write(held.measured)}{unit}" + (f", more than {write(held.bound)}" if held.bound else "")


def _tiles(status: Status) -> Html:
    hour, sharing = status.last_hour, status.sharing
    lag = status.backlog.lag_s
    tiles = (
        (
            "Hits",
            share_text(hour.hit_share) if hour.access_count else "none asked",
            f"of {count_text(hour.access_count)} accesses, {_hours(status)}",
        ),
        ("Tokens reused", count_text(hour.dram_token_count + hour.ssd_token_count), _hours(status)),
        ("Saved", *_saved(status)),
        (
            "Found by tokens",
            share_text(sharing.found_share) if sharing.asked_token_count else "none asked",
            f"{size_text(sharing.adopted_bytes)} not stored again",
        ),
        ("Sessions", count_text(status.session_count), _of_models(status)),
        ("Calls", f"{count_text(round(status.calls_per_s, 1))}/s", "in the last five minutes"),
        ("At stake in a crash", time_text(lag) if lag else "nothing", "age of what only memory has"),
        ("Event loop, p99", time_text(status.loop_lag_p99_s), "late"),
    )
    return element(
        "section",
        *(
            element(
                "div",
                element("div", name, class_="quiet"),
                element("div", value, class_="number"),
                element("div", more, class_="quiet small"),
            )
            for name, value, more in tiles
        ),
        class_="wide tiles",
        aria_label="At a glance",
    )


def _of_models(status: Status) -> str:
    models, blocks = status.model_count, status.sharing.block_count
    of = "of 1 model" if models == 1 else f"of {count_text(models)} models"
    return f"{of}; {count_text(blocks)} blocks of engines" if blocks else of


def _saved(status: Status) -> tuple[str, str]:
    """In money where a price is set, else in engines' time; and how that is meant."""
    hour, start = status.saved_last_hour, status.saved_since_start
    is_all = len(status.by_minute) < MINUTES
    if hour.dollars is None or start.dollars is None:
        since = "" if is_all else f"; {time_text(start.prefill_s)} since the start"
        return time_text(hour.prefill_s), f"of engines' prefill, {_hours(status)}{since}"
    since = "" if is_all else f"; {_money(start.dollars)} since the start"
    return _money(hour.dollars), f"{time_text(hour.prefill_s)} of prefill, {_hours(status)}{since}"


def _money(dollars: float) -> str:
    return f"{dollars:,.2f} $"


def _card(title: str, *children: Html, class_: str = "half", more: str = "") -> Html:
    head = element("h2", title, element("span", more, class_="quiet") if more else Html(""))
    return element("section", head, *children, class_=f"card {class_}")


def _legend(*names: tuple[str, str]) -> Html:
    return element(
        "p", *(element("span", element("i", class_=class_), name) for name, class_ in names), class_="legend"
    )


def _charts(status: Status) -> list[Html]:
    return [_hits(status), _misses(status), _tokens(status)]


def _hits(status: Status) -> Html:
    return _card(
        "Hits",
        hit_chart(status.by_minute),
        _axis(status),
        _legend(("in DRAM", "dram"), ("on SSD", "ssd"), ("missed", "slot")),
        class_="two-thirds",
        more=f"share of accesses, {_hours(status)}",
    )


def _tokens(status: Status) -> Html:
    most = most_tokens(status.by_minute)
    return _card(
        "Tokens",
        token_chart(status.by_minute),
        _axis(status),
        _legend(("reused from DRAM", "dram"), ("reused from SSD", "ssd"), ("appended", "new")),
        class_="two-thirds",
        more=f"by minute, up to {count_text(most)}",
    )


def _axis(status: Status) -> Html:
    """As long as the chart: the minutes that the store has lived, an hour at most."""
    count = len(status.by_minute)
    begin = "1 h ago" if count == MINUTES else f"{count} min ago"
    middle = [element("span", f"{count // 2} min")] if count >= LABELLED else []
    return element("p", element("span", begin), *middle, element("span", "now"), class_="axis")


def _hours(status: Status) -> str:
    """The time that is looked at."""
    count = len(status.by_minute)
    return "last hour" if count == MINUTES else f"since the start, {count} min"


def _misses(status: Status) -> Html:
    missed_count = sum(status.misses.values())
    rows = [
        _row(
            MISSES.get(reason, reason),
            f"{count_text(count)} · {share_text(count / missed_count)}",
            meter([(count / missed_count, "miss")], label=f"{share_text(count / missed_count)} of misses"),
        )
        for reason, count in status.misses.items()
    ]
    asked_count = status.last_hour.access_count
    missed = f"{count_text(missed_count)} of {count_text(asked_count)} accesses"
    regret = status.regretted_token_count
    return _card(
        "Why sessions were missed",
        *(rows or [_nothing(f"None, {_hours(status)}.")]),
        *(
            [
                element(
                    "p",
                    f"{count_text(regret)} tokens were evicted and had to be computed again.",
                    class_="quiet",
                )
            ]
            if regret
            else []
        ),
        class_="third",
        more=missed if missed_count else "",
    )


def _row(name: object, value: object, bar: Html) -> Html:
    label = name if isinstance(name, Html) else element("span", name)
    return element("div", element("div", label, element("b", value), class_="label"), bar, class_="row")


def _nothing(text: str) -> Html:
    return element("p", text, class_="quiet")


def _tiers(status: Status) -> Html:
    return _card("Tiers", *(_path(path, status) for path in status.paths), class_="third")


def _path(path: Path, status: Status) -> Html:
    capacity = path.capacity_bytes or 1
    used = path.used_bytes / capacity
    marks = []
    if path.tier == "dram":
        for mark, text in (
            ("dram_high", "room is made up to here"),
            ("dram_low", "room is made from here on"),
        ):
            marks.append((1 - status.watermarks_bytes.get(mark, 0) / capacity, text))
    name = element(
        "span", path.tier.upper() + " ", element("span", path.path, class_="quiet path", title=path.path)
    )
    severity = "warning" if path.state == "resting" else CRITICAL
    state = [] if path.state == "open" else [element("span", path.state, class_=f"pill {severity}")]
    more = (
        f"{size_text(path.used_bytes)} of {size_text(path.capacity_bytes)}, "
        f"{count_text(path.segment_count)} segments, largest free run {size_text(path.largest_free_bytes)}"
    )
    # A path that takes no writes is not in the colour of one that is well.
    bar = meter([(used, path.tier if path.state == "open" else severity)], marks, label=more)
    return joined(_row(name, share_text(used), bar), element("p", more, *state, class_="quiet small"))


def _backlog(backlog: BacklogStatus) -> Html:
    limit = backlog.limit_bytes or 1
    bar = meter(
        [
            (backlog.dirty_bytes / limit, "dirty"),
            ((backlog.claimed_bytes - backlog.dirty_bytes) / limit, "claimed"),
        ],
        [(backlog.watermark_bytes / limit, "the oldest is written at once from here on")],
        label="dirty and reserved, of the limit",
    )
    return _card(
        "Write-behind",
        _row("Not on SSD yet", size_text(backlog.dirty_bytes), bar),
        element(
            "p",
            f"{size_text(backlog.claimed_bytes)} with reservations, of {size_text(backlog.limit_bytes)} "
            "that may be",
            class_="quiet small",
        ),
        _facts(
            [
                ("Sessions to write", count_text(backlog.session_count)),
                ("Flushes under way", count_text(backlog.flush_count)),
                ("Oldest unwritten", time_text(backlog.lag_s)),
                ("Spared, SSD full of better", size_text(backlog.spared_bytes)),
            ]
        ),
        class_="third",
    )


def _running(running: Sequence[StatusBound]) -> Html:
    def value(bound: StatusBound) -> str:
        write = size_text if bound.name.startswith("Held") else count_text
        return write(bound.value) + (f" of {write(bound.limit)}" if bound.limit else "")

    return _card("In flight", _facts([(bound.name, value(bound)) for bound in running]), class_="third")


def _facts(facts: Iterable[tuple[str, str]]) -> Html:
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in facts)
    )


def _engines(status: Status) -> Html:
    def row(engine: Engine) -> Sequence[object]:
        return engine.name, engine.tenant, count_text(engine.job_count), "lost" if engine.is_lost else ""

    named = status.engines or ()
    table = _table(("engine", "tenant", "#jobs", ""), map(row, named)) if named else Html("")
    text = f"{count_text(status.engine_count)} engines, {count_text(status.job_count)} jobs wait"
    return _card("Engines' queues", _nothing(text), table, class_="third")


def _tenants(status: Status) -> Html:
    def row(tenant: Tenant) -> Sequence[object]:
        limit = size_text(tenant.limit_bytes) if tenant.limit_bytes else "none"
        return (
            tenant.name,
            count_text(tenant.session_count),
            size_text(tenant.kept_bytes),
            size_text(tenant.dram_bytes),
            limit,
            count_text(tenant.ahead_token_count),
            count_text(tenant.ahead_used_token_count),
        )

    more = (
        f"{len(status.tenants)} of {status.tenant_count}" if status.tenant_count > len(status.tenants) else ""
    )
    heads = ("tenant", "#sessions", "#kept", "#in DRAM", "#limit", "#computed ahead", "#used")
    table = _table(heads, map(row, status.tenants))
    return _card(
        "Tenants", table if status.tenants else _nothing("Nobody has anything yet."), class_="wide", more=more
    )


def _sessions(status: Status) -> list[Html]:
    if status.sessions is None:
        return [_card("Sessions", _nothing(NOT_SHOWN), class_="wide")]
    seen = status.sessions.seen_count
    more = f"of the {count_text(seen)} newest" if seen < status.session_count else ""
    return [
        _card(
            "Hottest sessions",
            _session_table(status.sessions.hottest),
            more=more or "accesses, half of them every 10 min",
        ),
        _card("Largest sessions", _session_table(status.sessions.largest), more=more),
    ]


def _session_table(sessions: Sequence[SessionLine]) -> Html:
    if not sessions:
        return _nothing("None yet.")
    most = max(max(each.dram_bytes, each.ssd_bytes) for each in sessions) or 1

    def row(each: SessionLine) -> Sequence[object]:
        bars = joined(
            meter([(each.dram_bytes / most, "dram")], label=f"DRAM {size_text(each.dram_bytes)}"),
            meter([(each.ssd_bytes / most, "ssd")], label=f"SSD {size_text(each.ssd_bytes)}"),
        )
        name = element(
            "span", each.session_id, class_="name", title=f"{each.tenant} / {each.session_id}, {each.model}"
        )
        size_bytes = max(each.dram_bytes, each.ssd_bytes)
        return (
            name,
            each.tenant,
            count_text(each.tokens),
            size_text(size_bytes),
            f"{each.heat:.1f}",
            time_text(each.idle_s),
            bars,
        )

    return _table(
        ("session", "tenant", "#tokens", "#size", "#heat", "#idle", "DRAM, SSD"), map(row, sessions)
    )


def _settings(status: Status) -> Html:
    if not status.settings:
        return _card("Settings", _nothing("All at their defaults."), class_="wide")
    rows = [(element("code", name), element("code", value)) for name, value in status.settings.items()]
    return _card(
        "Settings",
        _table(("setting", "value"), rows),
        class_="wide",
        more="those that differ from their default",
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Columns whose head begins with # are numbers."""
    classes = ["right" if head.startswith("#") else None for head in heads]
    head = element(
        "tr",
        *(element("th", h.lstrip("#"), class_=c, scope="col") for h, c in zip(heads, classes, strict=True)),
    )
    body = [
        element("tr", *(element("td", cell, class_=c) for cell, c in zip(row, classes, strict=True)))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="table")


FRESH_S = 1.0
SCAN_S = 10.0


# Made at most once a second, whoever asks; names are looked through every ten. Two answers are kept, one with
# names and one without.
class StatusPages:
    """Makes a status when it is asked for. Owned by the event loop."""

    def __init__(
        self, sources: Sources, recording: Recording, addresses: Callable[[], Iterable[str]]
    ) -> None:
        self._sources, self._recording, self._addresses = sources, recording, addresses
        self._turn = asyncio.Lock()
        self._made: dict[bool, tuple[float, Status]] = {}
        self._sessions: tuple[float, SessionList] | None = None

    def pages(self) -> Mapping[str, Page]:
        """By path."""
        # Read once, at the start: a page costs no file.
        web = files("ctxcache.observe") / "web"
        css, script = ((web / name).read_bytes() for name in ("status.css", "status.js"))
        return {
            "/": self._html,
            "/status.json": self._json,
            RUNBOOK: partial(_fixed, Answer(runbook().encode(), "text/html; charset=utf-8")),
            "/status.css": partial(_fixed, Answer(css, "text/css; charset=utf-8")),
            "/status.js": partial(_fixed, Answer(script, "text/javascript; charset=utf-8")),
        }

    async def _html(self, headers: Mapping[str, str]) -> Answer:
        status = await self._status(headers)
        text = await asyncio.to_thread(page, status)
        return Answer(text.encode(errors="replace"), "text/html; charset=utf-8")

    async def _json(self, headers: Mapping[str, str]) -> Answer:
        status = await self._status(headers)
        text = await asyncio.to_thread(lambda: json.dumps(asdict(status)))
        return Answer(text.encode(), "application/json")

    async def _status(self, headers: Mapping[str, str]) -> Status:
        # By the name that the browser used: a page of another site could have its own name point to this
        # address, and read the answer.
        with_names = self._sources.shows_names() and is_own_name(headers.get("host", ""))
        # One at a time: all who wait find what the first one made.
        async with self._turn:
            made = self._made.get(with_names)
            if made is None or monotonic() - made[0] > FRESH_S:
                made = self._made[with_names] = (monotonic(), await self._make(with_names=with_names))
            return made[1]

    async def _make(self, *, with_names: bool) -> Status:
        cache = self._sources.cache
        sessions: SessionList | None = None
        engines: tuple[Engine, ...] | None = None
        if with_names:
            if self._sessions is None or monotonic() - self._sessions[0] > SCAN_S:
                self._sessions = (monotonic(), await listed_sessions(cache))
            sessions, engines = self._sessions[1], listed_engines(cache)
        return status_of(
            self._recording.read(),
            self._recording.ring,
            now_s=cache.state.clock.wall_ns() / 10**9,
            data_directory=self._sources.data_directory,
            addresses=tuple(self._addresses()),
            path_problems=problems_of_paths(cache),
            promotion_count=cache.promotions.running_count,
            settings=self._sources.settings(),
            sessions=sessions,
            engines=engines,
        )


async def _fixed(answer: Answer, _: Mapping[str, str]) -> Answer:
    return answer


def is_own_name(host: str) -> bool:
    """Whether a request's Host is an address, or localhost: no name that somebody could have pointed here."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def pages_of(
    sources: Sources, recording: Recording, addresses: Callable[[], Iterable[str]]
) -> Mapping[str, Page]:
    """By path. `addresses`: those that the store listens on.

    `/metrics`, `/healthz` (the event loop answers), `/readyz` (it takes work), and the status page's.
    """
    exposition = Exposition(sources)

    async def metrics(headers: Mapping[str, str]) -> Answer:
        body, content_type = await exposition.text(headers.get("accept", ""))
        return Answer(body, content_type)

    async def is_alive(_: Mapping[str, str]) -> Answer:
        return Answer(b"ok\n")

    async def is_ready(_: Mapping[str, str]) -> Answer:
        problem = sources.why_not_ready
        if not problem:
            return Answer(b"ready\n")
        return Answer(f"{problem}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)

    machines = {"/metrics": metrics, "/healthz": is_alive, "/readyz": is_ready}
    return machines | dict(StatusPages(sources, recording, addresses).pages())
