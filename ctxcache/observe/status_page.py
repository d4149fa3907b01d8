"""The status page: a status as HTML. Pure; `html` sees to it that no name becomes markup."""

from collections.abc import Iterable, Sequence

from ctxcache.observe import words
from ctxcache.observe.charts import hit_chart, meter, most_tokens, token_chart
from ctxcache.observe.conditions import CRITICAL, Holding
from ctxcache.observe.html import Html, document, element, joined, void
from ctxcache.observe.listed import Engine, Listed
from ctxcache.observe.status import Backlog, Bound, Path, Status, Tenant

REFRESH_WITHOUT_SCRIPT_S = 15
MISSES = {
    "never_stored": "never stored", "fingerprint_mismatch": "another model", "corrupt": "corrupt",
    "quota": "no room, or too much at once", "refused": "caller mistaken",
}  # fmt: skip
NOT_SHOWN = (
    "Names of sessions and engines are not shown: this page asks nobody who they are. "
    'status_names = "on" shows them.'
)


def page(status: Status) -> Html:
    """The whole page."""
    count = len(status.conditions)
    head = joined(
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        element("noscript", void("meta", http_equiv="refresh", content=REFRESH_WITHOUT_SCRIPT_S)),
        element("title", f"({count}) ctxcache" if count else "ctxcache"),
        void("link", rel="icon", href="data:,"),
        void("link", rel="stylesheet", href="/status.css"),
        element("script", src="/status.js", defer=True),
    )
    body = element(
        "body",
        _header(status),
        element(
            "main",
            _conditions(status), _tiles(status), _hits(status), _misses(status), _tokens(status), _tiers(status),
            _backlog(status.backlog), _running(status.running), _engines(status), _tenants(status),
            *_sessions(status), _settings(status),
        ),
        element("footer", "The same as ", element("a", "JSON", href="/status.json"), " and as ", element("a", "Prometheus metrics", href="/metrics"), element("span", id="age")),
    )  # fmt: skip
    return document(head, body)


def _header(status: Status) -> Html:
    worst = CRITICAL if any(each.severity == CRITICAL for each in status.conditions) else "warning"
    state = "draining" if not status.is_ready else worst if status.conditions else "well"
    words_of = {"draining": "draining", "well": "all well", CRITICAL: "needs you", "warning": "look here"}
    return element(
        "header",
        element("h1", "ctxcache"),
        element("span", words_of[state], class_=f"pill {state}"),
        element("span", f"{status.version} · {status.placement_policy} · up {words.span(status.up_s)}", class_="quiet"),
    )  # fmt: skip


def _conditions(status: Status) -> Html:
    if not status.conditions:
        return Html("")
    return element("section", element("ul", *(
        element("li", element("strong", each.summary), " ",
            element("span", _found(each), class_="quiet"),
            element("code", each.alert), class_=each.severity)
        for each in status.conditions
    )), class_="card wide alerts", aria_label="What is wrong now")  # fmt: skip


def _found(each: Holding) -> str:
    if not each.unit:
        return ""
    write = {"s": words.span, "of": words.share}.get(each.unit.split()[0], words.count)
    unit = "" if each.unit == "s" else f" {each.unit}"
    return f"{write(each.found)}{unit}" + (f", more than {write(each.bound)}" if each.bound else "")


def _tiles(status: Status) -> Html:
    hour = status.last_hour
    lag = status.backlog.lag_s
    tiles = (
        ("Hits, last hour", words.share(hour.hit_share) if hour.access_count else "none asked", f"{words.count(hour.access_count)} accesses"),
        ("Tokens reused", words.count(hour.dram_token_count + hour.ssd_token_count), "in the last hour"),
        ("Sessions", words.count(status.session_count), f"of {words.count(status.model_count)} models"),
        ("Calls", f"{words.count(round(status.calls_per_s, 1))}/s", "in the last five minutes"),
        ("At stake in a crash", words.span(lag) if lag else "nothing", "age of what only memory has"),
        ("Event loop, p99", words.span(status.loop_lag_p99_s), "late"),
    )  # fmt: skip
    return element("section", *(
        element("div", element("div", name, class_="quiet"), element("div", value, class_="number"), element("div", more, class_="quiet small"))
        for name, value, more in tiles
    ), class_="wide tiles", aria_label="At a glance")  # fmt: skip


def _card(title: str, *children: Html, class_: str = "half", more: str = "") -> Html:
    head = element("h2", title, element("span", more, class_="quiet") if more else Html(""))
    return element("section", head, *children, class_=f"card {class_}")


def _legend(*names: tuple[str, str]) -> Html:
    return element("p", *(
        element("span", element("i", class_=class_), name) for name, class_ in names
    ), class_="legend")  # fmt: skip


def _hits(status: Status) -> Html:
    return _card(
        "Hits", hit_chart(status.by_minute), _axis(), _legend(("in DRAM", "dram"), ("on SSD", "ssd"), ("missed", "slot")),
        class_="two-thirds", more="share of accesses, last hour",
    )  # fmt: skip


def _tokens(status: Status) -> Html:
    most = most_tokens(status.by_minute)
    return _card(
        "Tokens", token_chart(status.by_minute), _axis(), _legend(("reused from DRAM", "dram"), ("reused from SSD", "ssd"), ("appended", "new")),
        class_="two-thirds", more=f"by minute, up to {words.count(most)}",
    )  # fmt: skip


def _axis() -> Html:
    return element(
        "p", element("span", "1 h ago"), element("span", "30 min"), element("span", "now"), class_="axis"
    )


def _misses(status: Status) -> Html:
    most = max(status.misses.values(), default=0)
    rows = [
        _row(
            MISSES.get(reason, reason), words.count(count), meter([(count / most, "miss")], label=f"{count}")
        )
        for reason, count in status.misses.items()
    ]
    regret = status.regretted_token_count
    return _card(
        "Misses", *(rows or [_nothing("None in the last hour.")]),
        *([element("p", f"{words.count(regret)} tokens were evicted and had to be computed again.", class_="quiet")] if regret else []),
        class_="third", more="last hour",
    )  # fmt: skip


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
    state = [] if path.state == "open" else [element("span", path.state, class_="pill critical")]
    more = (
        f"{words.size(path.used_bytes)} of {words.size(path.capacity_bytes)}, {words.count(path.segment_count)} segments, "
        f"largest free run {words.size(path.largest_free_bytes)}"
    )
    bar = meter([(used, path.tier)], marks, label=more)
    return joined(_row(name, words.share(used), bar), element("p", more, *state, class_="quiet small"))


def _backlog(backlog: Backlog) -> Html:
    limit = backlog.limit_bytes or 1
    bar = meter(
        [(backlog.dirty_bytes / limit, "dirty"), ((backlog.claimed_bytes - backlog.dirty_bytes) / limit, "claimed")],
        [(backlog.watermark_bytes / limit, "the oldest is written at once from here on")],
        label="dirty and reserved, of the limit",
    )  # fmt: skip
    return _card(
        "Write-behind",
        _row("Not on SSD yet", words.size(backlog.dirty_bytes), bar),
        element("p", f"{words.size(backlog.claimed_bytes)} with reservations, of {words.size(backlog.limit_bytes)} that may be", class_="quiet small"),
        _facts([
            ("Sessions to write", words.count(backlog.session_count)), ("Flushes under way", words.count(backlog.flush_count)),
            ("Oldest unwritten", words.span(backlog.lag_s)), ("Spared, SSD full of better", words.size(backlog.spared_bytes)),
        ]), class_="third",
    )  # fmt: skip


def _running(running: Sequence[Bound]) -> Html:
    def value(bound: Bound) -> str:
        write = words.size if bound.name.startswith("Held") else words.count
        return write(bound.value) + (f" of {write(bound.limit)}" if bound.limit else "")

    return _card("In flight", _facts([(bound.name, value(bound)) for bound in running]), class_="third")


def _facts(facts: Iterable[tuple[str, str]]) -> Html:
    return element("dl", *(
        element("div", element("dt", name), element("dd", value)) for name, value in facts
    ))  # fmt: skip


def _engines(status: Status) -> Html:
    def row(engine: Engine) -> Sequence[object]:
        return engine.name, engine.tenant, words.count(engine.job_count), "lost" if engine.is_lost else ""

    named = status.engines or ()
    table = _table(("engine", "tenant", "#jobs", ""), map(row, named)) if named else Html("")
    text = f"{words.count(status.engine_count)} engines, {words.count(status.job_count)} jobs wait"
    return _card("Engines' queues", _nothing(text), table, class_="third")


def _tenants(status: Status) -> Html:
    def row(tenant: Tenant) -> Sequence[object]:
        limit = words.size(tenant.limit_bytes) if tenant.limit_bytes else "none"
        return (
            tenant.name,
            words.count(tenant.session_count),
            words.size(tenant.kept_bytes),
            words.size(tenant.dram_bytes),
            limit,
        )

    more = (
        f"{len(status.tenants)} of {status.tenant_count}" if status.tenant_count > len(status.tenants) else ""
    )
    table = _table(("tenant", "#sessions", "#kept", "#in DRAM", "#limit"), map(row, status.tenants))
    return _card("Tenants", table if status.tenants else _nothing("Nobody has anything yet."), class_="wide", more=more)  # fmt: skip


def _sessions(status: Status) -> list[Html]:
    if status.sessions is None:
        return [_card("Sessions", _nothing(NOT_SHOWN), class_="wide")]
    seen = status.sessions.seen_count
    more = f"of the {words.count(seen)} newest" if seen < status.session_count else ""
    return [
        _card("Hottest sessions", _session_table(status.sessions.hottest), more=more or "accesses, half of them every 10 min"),
        _card("Largest sessions", _session_table(status.sessions.largest), more=more),
    ]  # fmt: skip


def _session_table(sessions: Sequence[Listed]) -> Html:
    if not sessions:
        return _nothing("None yet.")
    most = max(max(each.dram_bytes, each.ssd_bytes) for each in sessions) or 1

    def row(each: Listed) -> Sequence[object]:
        bars = joined(
            meter([(each.dram_bytes / most, "dram")], label=f"DRAM {words.size(each.dram_bytes)}"),
            meter([(each.ssd_bytes / most, "ssd")], label=f"SSD {words.size(each.ssd_bytes)}"),
        )
        name = element(
            "span", each.session_id, class_="name", title=f"{each.tenant} / {each.session_id}, {each.model}"
        )
        size_bytes = max(each.dram_bytes, each.ssd_bytes)
        return (
            name,
            each.tenant,
            words.count(each.tokens),
            words.size(size_bytes),
            f"{each.heat:.1f}",
            words.span(each.idle_s),
            bars,
        )

    return _table(
        ("session", "tenant", "#tokens", "#size", "#heat", "#idle", "DRAM, SSD"), map(row, sessions)
    )


def _settings(status: Status) -> Html:
    if not status.settings:
        return _card("Settings", _nothing("All at their defaults."), class_="wide")
    rows = [(element("code", name), element("code", value)) for name, value in status.settings.items()]
    return _card("Settings", _table(("setting", "value"), rows), class_="wide", more="those that differ from their default")  # fmt: skip


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Columns whose head begins with # are numbers."""
    classes = ["right" if head.startswith("#") else None for head in heads]
    head = element("tr", *(element("th", h.lstrip("#"), class_=c, scope="col") for h, c in zip(heads, classes, strict=True)))  # fmt: skip
    body = [
        element("tr", *(element("td", cell, class_=c) for cell, c in zip(row, classes, strict=True)))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="table")
