"""A server's answers as tables for people: human sizes, times relative to now. Not stable.

Scripts use JSON.

`why-miss` is a sentence, and a table of what happened to the session.
"""

import enum
import errno
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ctxcache.cli.units import counted, human_duration, human_size, human_time
from ctxcache.client.types import (
    CollectedFleet,
    DrainStatus,
    EngineUse,
    FleetNode,
    FleetView,
    HeldLease,
    HintResult,
    InjectedFault,
    MissEvent,
    MissReport,
    ModelInfo,
    PrefixMatch,
    PublishedSessions,
    SessionInfo,
    SharedPrefix,
    StoreStats,
    TenantStats,
    TierStats,
    instant,
)
from ctxcache.format.streams import StateKind, StreamRange

FINGERPRINT_DIGITS = 12
REASONS = {
    MissEvent.EVICTED: "was evicted",
    MissEvent.EXPIRED: "has expired",
    MissEvent.DELETED: "was deleted",
    MissEvent.MOVED: "goes on at another host of the fleet",
    MissEvent.OWNER_LOST: "is at another host of the fleet, which does not answer",
}


def session_grid(session: SessionInfo) -> RenderableType:
    """One session, a line per fact."""
    return grid(
        ("name", session.name),
        ("model", session.model),
        ("tokens", f"{session.token_count}, of which {session.durable_token_count} are durable"),
        ("generation", str(session.generation)),
        ("layout", _streams(session.layout)),
        ("loss", f"up to {session.loss_nats:g} nats a token" if session.loss_nats else "none"),
        ("created", when(session.create_time_ns)),
        ("last access", when(session.access_time_ns)),
        ("expires", _expiry(session)),
        ("pinned", _yes(session.is_pinned)),
        ("DRAM", human_size(session.dram_bytes)),
        ("SSD", human_size(session.ssd_bytes)),
        ("copies", str(session.copies)),
        ("labels", _labels(session) or "none"),
        ("tenant", session.tenant),
        ("uid", session.uid),
        ("fingerprint", session.model_fingerprint.hex()),
    )


def sessions_table(sessions: Sequence[SessionInfo]) -> RenderableType:
    """Sessions, one per line."""
    heads = ["NAME", "MODEL", ">TOKENS", ">DURABLE", "ACCESSED", "EXPIRES", "PINNED", ">DRAM", ">SSD"]
    drops = ("PINNED", "DURABLE", "DRAM", "MODEL", "EXPIRES", "ACCESSED")
    # Most stores have none.
    has_labels = any(session.labels for session in sessions)
    rows = table(*heads, *["LABELS"] * has_labels, drops=drops)
    for s in sessions:
        rows.add_row(
            session_id(s.name),
            s.model.removeprefix("models/"),
            str(s.token_count),
            str(s.durable_token_count),
            when(s.access_time_ns),
            when(s.expire_time_ns),
            _yes(s.is_pinned),
            human_size(s.dram_bytes),
            human_size(s.ssd_bytes),
            *[_labels(s)] * has_labels,
        )
    return rows


def _labels(session: SessionInfo) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(session.labels.items()))


def model_grid(model: ModelInfo) -> RenderableType:
    """One model, a line per fact."""
    per_token_bytes = sum(spec.row_bytes * _count(spec.streams) for spec in model.streams)
    return grid(
        ("name", model.name),
        ("architecture", model.architecture),
        ("revision", model.revision or "-"),
        ("dtype", _word(model.dtype)),
        ("shape", _shape(model)),
        ("streams", _streams(spec.streams for spec in model.streams)),
        ("all streams", f"{human_size(per_token_bytes)} per token"),
        ("relocatable", _yes(model.is_relocatable)),
        ("rope", model.rope or "-"),
        ("created", when(model.create_time_ns)),
        ("fingerprint", model.fingerprint.hex()),
    )


def models_table(models: Sequence[ModelInfo]) -> RenderableType:
    """Models, one per line."""
    drops = ("STREAMS", "DTYPE", "CREATED", "FINGERPRINT", "ARCHITECTURE")
    titles = ("NAME", "ARCHITECTURE", ">LAYERS", "DTYPE", ">STREAMS", "CREATED", "FINGERPRINT")
    rows = table(*titles, drops=drops)
    for model in models:
        rows.add_row(
            model.name.removeprefix("models/"),
            model.architecture,
            str(model.layer_count),
            _word(model.dtype),
            str(sum(_count(spec.streams) for spec in model.streams)),
            when(model.create_time_ns),
            model.fingerprint.hex()[:FINGERPRINT_DIGITS],
        )
    return rows


def tenants_table(tenants: Sequence[TenantStats]) -> RenderableType:
    """Tenants, one per line."""
    sizes = (">DRAM", ">OF ITS OWN", ">SSD", ">OF ITS OWN", ">LIMIT", ">RETAINED", ">PINNED")
    rows = table(
        "TENANT", ">SESSIONS", *sizes, ">READ", ">APPENDED",
        drops=("APPENDED", "READ", "PINNED", "RETAINED", "LIMIT"),
    )  # fmt: skip
    for use in tenants:
        amounts = (
            use.dram_bytes,
            use.guaranteed_dram_bytes,
            use.ssd_bytes,
            use.guaranteed_ssd_bytes,
        )
        rows.add_row(
            use.tenant,
            str(use.session_count),
            *map(human_size, amounts),
            "-" if use.limit_bytes is None else human_size(use.limit_bytes),
            human_size(use.retained_bytes),
            human_size(use.pinned_bytes),
            f"{use.read_token_count:,}",
            f"{use.appended_token_count:,}",
        )
    return rows


def stats_view(stats: StoreStats) -> RenderableType:
    """The server's contents and counts."""
    head = grid(
        ("version", stats.version),
        ("started", when(stats.start_time_ns)),
        ("data", stats.data_directory),
        ("listens on", ", ".join(stats.listen_addresses)),
        ("sessions", f"{stats.session_count:,} of {counted(stats.model_count, 'model')}"),
        ("segments", _segments(stats)),
        ("unwritten", _unwritten(stats)),
        (
            "open now",
            f"{counted(stats.lease_count, 'lease')}, {counted(stats.reservation_count, 'reservation')}",
        ),
        ("appended", counted(stats.appended_token_count, "token")),
        ("read", f"{counted(stats.read_token_count, 'token')}, {_share(stats)} from DRAM"),
        ("saved", _saved(stats)),
        ("ended", _ended(stats)),
    )
    tiers = table("TIER", ">USED", ">CAPACITY", ">SEGMENTS", "STATE", "/PATH", drops=("SEGMENTS",))
    for tier in stats.tiers:
        tiers.add_row(
            tier.tier.name,
            human_size(tier.used_bytes),
            human_size(tier.capacity_bytes),
            str(tier.segment_count),
            _word(tier.state),
            tier.path,
        )
    return Group(head, Text(), tiers)


def _saved(stats: StoreStats) -> str:
    """The prefill of what was read, and its price where one is set."""
    hours = f"{stats.saved_prefill_seconds / 3600:,.2f} engine hours of prefill"
    return hours if stats.saved_dollars is None else f"{hours}, {stats.saved_dollars:,.2f} $"


def paths_table(tiers: Sequence[TierStats]) -> RenderableType:
    """Where bytes lie, one place per line."""
    titles = (
        "TIER",
        ">USED",
        ">CAPACITY",
        ">FULL",
        ">FRAGMENTED",
        ">SEGMENTS",
        ">WRITTEN",
        "STATE",
        "/PATH",
        "WHY",
    )
    rows = table(*titles, drops=("SEGMENTS", "FRAGMENTED", "WRITTEN"))
    for tier in tiers:
        rows.add_row(
            tier.tier.name,
            human_size(tier.used_bytes),
            human_size(tier.capacity_bytes),
            f"{tier.used_bytes / max(tier.capacity_bytes, 1):.0%}",
            f"{fragmented(tier):.0%}",
            str(tier.segment_count),
            human_size(tier.written_bytes),
            _word(tier.state),
            tier.path,
            tier.problem or "-",
        )
    return rows


def fragmented(tier: TierStats) -> float:
    """The part of the free bytes that is outside their largest run."""
    # Where nothing is free, no part is scattered.
    free_bytes = tier.capacity_bytes - tier.used_bytes
    return 1 - tier.largest_free_bytes / free_bytes if free_bytes > 0 else 0.0


def leases_table(leases: Sequence[HeldLease]) -> RenderableType:
    """Leases, one per line."""
    titles = (">LEASE", "TENANT", "SESSION", "TOKENS", ">HOLDS", "READER", ">AGE", "EXPIRES")
    rows = table(*titles, drops=("AGE", "TENANT", "READER", "TOKENS"))
    for lease in leases:
        rows.add_row(
            str(lease.lease_id),
            lease.tenant,
            session_id(lease.session),
            f"{lease.token_begin}:{lease.token_end}",
            human_size(lease.pinned_bytes),
            _reader(lease),
            duration(lease.age_ns),
            _expires(lease),
        )
    return rows


def lease_grid(lease: HeldLease) -> RenderableType:
    """One lease, a line per fact."""
    return grid(
        ("lease", str(lease.lease_id)),
        ("tenant", lease.tenant),
        ("session", lease.session),
        ("tokens", f"{lease.token_begin} to {lease.token_end}, the end excluded"),
        ("holds", f"{human_size(lease.pinned_bytes)} in DRAM"),
        ("reader", _reader(lease)),
        ("age", duration(lease.age_ns)),
        ("expires", _expires(lease)),
    )


def engines_table(engines: Sequence[EngineUse]) -> RenderableType:
    """Engines' queues, one per line."""
    rows = table("ENGINE", "TENANT", ">WAITING", ">SESSIONS", "CONNECTED")
    for engine in engines:
        connected = "yes" if engine.is_connected else "no"
        rows.add_row(
            engine.engine, engine.tenant, str(engine.waiting_count), str(engine.session_count), connected
        )
    return rows


def fleet_view(fleet: FleetView) -> RenderableType:
    """A fleet as one of its stores sees it."""
    heard = "heard" if fleet.is_sure else f"not heard: {fleet.problem}"
    owned, private = fleet.owned_session_count, fleet.private_session_count
    came, moved = counted(fleet.arrived_session_count, "session"), counted(fleet.arrived_token_count, "token")
    borrowed = counted(fleet.borrowed_token_count, "token")
    reads, changes = fleet.head_read_count, fleet.head_change_count
    unsure = f"{fleet.unsure_session_count} to be confirmed"
    facts = grid(
        ("bucket", f"{fleet.bucket}, {heard}"),
        ("sessions", f"{owned} owned, {private} not announced yet, {unsure}"),
        ("guests", f"{fleet.guest_count} copies of sessions that went on elsewhere"),
        ("came here", f"{came}, {moved}, {human_size(fleet.arrived_bytes)}"),
        ("out of the bucket", counted(fleet.restored_session_count, "session")),
        ("borrowed", f"{fleet.borrowed_prefix_count:,} prefixes, {borrowed}"),
        ("lent", f"{fleet.lent_prefix_count:,} prefixes"),
        ("shared", _shared(fleet)),
        ("went on elsewhere", f"{fleet.yielded_session_count}, and {fleet.superseded_session_count} unasked"),
        ("owner silent", f"{counted(fleet.owner_lost_count, 'session')} begun anew"),
        ("heads", f"{reads} read, {changes} changed, {fleet.no_answer_count} without an answer"),
    )
    rows = table("NODE", "ADDRESS", "STATE", ">TAKEN FROM IT", "PROBLEM")
    for node in fleet.nodes:
        taken = str(node.taken_session_count)
        rows.add_row(node.node[:FINGERPRINT_DIGITS], node.address, _node_state(node), taken, node.problem)
    return Group(facts, "", rows)


def published_view(published: PublishedSessions) -> RenderableType:
    """What became of a store's sessions."""
    known = f"{published.published_count} of {counted(published.session_count, 'session')}"
    failed = counted(published.failed_count, "session")
    return grid(
        ("known to the bucket", known),
        ("gone or elsewhere", counted(published.elsewhere_count, "session")),
        ("failed", f"{failed}: {published.problem}" if published.failed_count else failed),
    )


def collected_view(collected: CollectedFleet) -> RenderableType:
    """The outcome of a collection."""
    objects = f"{counted(collected.object_count, 'object')}, {human_size(collected.size_bytes)}"
    garbage = f"{counted(collected.garbage_object_count, 'object')}, {human_size(collected.garbage_bytes)}"
    return grid(
        ("the bucket has", f"{counted(collected.shared_session_count, 'session')}, {objects}"),
        ("named by nothing", garbage),
        ("expired", f"{counted(collected.expired_session_count, 'session')} of lost hosts"),
        ("dead heads", f"{collected.dead_head_count}, unchanged for a month"),
        ("away", f"{counted(collected.away_store_count, 'store')}, silent for a month"),
        ("left alone", f"{counted(collected.busy_session_count, 'session')} that changed meanwhile"),
        *(("not read", problem) for problem in collected.problems),
    )


def _shared(fleet: FleetView) -> str:
    put = f"{counted(fleet.shared_object_count, 'object')}, {human_size(fleet.shared_bytes)}"
    return f"{put}; {fleet.unshared_session_count} waiting, {fleet.share_failure_count} failed"


def _node_state(node: FleetNode) -> str:
    if node.is_self:
        return "this store"
    return "answers" if node.is_answering else "silent"


def hints_table(results: Sequence[HintResult]) -> RenderableType:
    """The outcomes of hints."""
    rows = table("OUTCOME", ">BYTES", "UNTIL", "WHY")
    for result in results:
        until = "-" if result.valid_until_ns is None else when(result.valid_until_ns)
        rows.add_row(_word(result.outcome), human_size(result.granted_bytes), until, result.reason or "-")
    return rows


def prefix_grid(prefix: PrefixMatch) -> RenderableType:
    """The part of a prompt that sessions have."""
    return grid(
        ("state", _word(prefix.state)),
        ("tokens", f"{prefix.token_count}, of which {prefix.dram_token_count} are in DRAM"),
        ("in DRAM in", "-" if prefix.ready_in_ns is None else human_duration(prefix.ready_in_ns / 10**9)),
        ("why not more", prefix.reason or "-"),
    )


def prefixes_table(prefixes: Sequence[SharedPrefix]) -> RenderableType:
    """Prefixes that sessions share, one per line."""
    rows = table(">TOKENS", ">SESSIONS", ">SAVED", "ONE OF THEM", "KEY", drops=("KEY", "SAVED"))
    for prefix in prefixes:
        rows.add_row(
            str(prefix.token_count),
            str(prefix.session_count),
            human_size(prefix.saved_bytes),
            session_id(prefix.session),
            prefix.key.hex()[:FINGERPRINT_DIGITS] or "-",
        )
    return rows


def faults_table(faults: Sequence[InjectedFault]) -> RenderableType:
    """Faults that may strike yet, one per line."""
    rows = table(">FAULT", "KIND", "/PATH", "HOW", ">TIMES", ">FOR")
    for fault in faults:
        kind = _word(fault.kind)
        rows.add_row(
            str(fault.fault_id),
            kind,
            fault.path or "-",
            _how(fault),
            str(fault.left_count),
            duration(fault.left_duration_ns),
        )
    return rows


def drain_line(status: DrainStatus) -> str:
    """How far a drain is, in a sentence."""
    if status.is_done:
        return f"drained: no client is left, everything is on SSD{_spared(status)}"
    left = (
        f"{counted(status.running_rpc_count, 'rpc')}, {counted(status.local_client_count, 'local client')}, "
        f"{counted(status.lease_count, 'lease')}, {counted(status.reservation_count, 'reservation')}, "
        f"{human_size(status.dirty_bytes)} to be written"
    )
    return f"draining: {left}" + (f"; {status.problem}" if status.problem else "")


def why_miss_view(answer: MissReport) -> RenderableType:
    """One session that somebody missed, or what a request missed and the last session of that."""
    if answer.trace_id and not answer.misses:
        return Text(
            f"no miss of {answer.trace_id} by tenant {answer.tenant} is remembered: it missed nothing, did "
            "not send its trace, or did so before the server began to remember "
            f"({when(answer.remembered_since_ns)}) or long ago."
        )
    parts: list[RenderableType] = [_misses(answer), Text()] if answer.trace_id else []
    parts.append(Text(_sentence(answer)))
    if answer.happenings:
        parts += [Text(), _happenings(answer)]
    return Group(*parts)


def grid(*facts: tuple[str, str]) -> Table:
    """Lay out facts, one per line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(name, Text(value))
    return made


def table(*titles: str, drops: Sequence[str] = ()) -> "Rows":
    """Build an empty table, see `Rows`."""
    return Rows(titles, drops)


GAP = 2
"""Columns of the screen between two of a table."""
PATH_WIDTH = 24
"""The least of a path that is shown."""


class Rows:
    """A table of one fact per line, for a screen of any width: no name is wrapped.

    A title that begins with `>` is of numbers, one with `/` of paths, which are cut in the middle where the
    screen is too narrow. Before that, columns of `drops` are left out, one after the other.
    """

    def __init__(self, titles: Sequence[str], drops: Sequence[str]) -> None:
        self._titles, self._drops = titles, drops
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a line, with a cell for each title."""
        self._rows.append(cells)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a screen."""
        shown = [*range(len(self._titles))]
        for title in self._drops:
            if self._needed(shown) > options.max_width:
                shown = [i for i in shown if self._titles[i].lstrip(">/") != title]
        # Every path is cut to the same width, which is what the others leave.
        paths = [i for i in shown if self._titles[i].startswith("/")]
        left = options.max_width - self._needed([i for i in shown if i not in paths]) - GAP * len(paths)
        path_width = max(left // max(len(paths), 1), PATH_WIDTH)
        made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for i in shown:
            # A column without a least width would be cut where all of them are too wide.
            width = min(self._width(i), path_width) if i in paths else self._least(i)
            is_text = self._titles[i] in TEXTS
            made.add_column(
                self._titles[i].lstrip(">/"),
                justify="right" if self._titles[i].startswith(">") else "left",
                overflow="fold",
                no_wrap=not is_text,
                min_width=width,
            )
        for row in self._rows:
            made.add_row(*[Text(cut(row[i], path_width) if i in paths else row[i]) for i in shown])
        yield made

    def _width(self, column: int) -> int:
        return max(map(cell_len, [self._titles[column].lstrip(">/"), *(row[column] for row in self._rows)]))

    def _least(self, column: int) -> int:
        title, width = self._titles[column], self._width(column)
        if title in TEXTS:
            return min(width, TEXT_WIDTH)
        return min(width, PATH_WIDTH) if title.startswith("/") else width

    def _needed(self, columns: Sequence[int]) -> int:
        return sum(map(self._least, columns)) + GAP * max(len(columns) - 1, 0)


TEXTS, TEXT_WIDTH = ("WHY", "LABELS"), 20
"""Titles of texts, which may be wrapped, and the least width of one."""


def cut(path: str, width: int) -> str:
    """A path of at most so many characters, its middle left out. Its end tells more than its begin."""
    if len(path) <= width:
        return path
    end = (width - 1) * 2 // 3
    return f"{path[: width - 1 - end]}…{path[len(path) - end :]}"


def session_id(name: str) -> str:
    """A session as tables name it."""
    return name.removeprefix("sessions/")


def _count(streams: StreamRange) -> int:
    return streams.layer_end - streams.layer_begin


def _streams(ranges: Iterable[StreamRange]) -> str:
    """`tokens, hidden 0-30, kv 31`."""
    by_kind = groupby(sorted(ranges, key=lambda r: (r.kind, r.layer_begin)), key=lambda r: r.kind)
    return ", ".join(_layers(kind, list(group)) for kind, group in by_kind) or "-"


def _layers(kind: StateKind, ranges: Sequence[StreamRange]) -> str:
    word = _word(kind)
    if ranges[0].layer_begin < 0:
        return word
    runs = [[ranges[0].layer_begin, ranges[0].layer_end]]
    for streams in ranges[1:]:
        # Streams of different row sizes are ranges of their own, also where their layers follow one another.
        if streams.layer_begin == runs[-1][1]:
            runs[-1][1] = streams.layer_end
        else:
            runs.append([streams.layer_begin, streams.layer_end])
    return f"{word} {', '.join(str(a) if b - a == 1 else f'{a}-{b - 1}' for a, b in runs)}"


def _expiry(session: SessionInfo) -> str:
    kept = "" if session.ttl_ns is None else f", {duration(session.ttl_ns)} after each access"
    return when(session.expire_time_ns) + kept


def _shape(model: ModelInfo) -> str:
    heads = f"{model.kv_head_count} K/V heads of {model.head_size}"
    return f"{counted(model.layer_count, 'layer')}, hidden {model.hidden_size}, {heads}"


def _segments(stats: StoreStats) -> str:
    ahead = (
        f"{stats.prefetched_segment_count} ahead, {stats.prefetch_unused_segment_count} of these for nothing"
    )
    moved = f"{stats.flushed_segment_count} flushed, {stats.promoted_segment_count} promoted ({ahead})"
    return f"{stats.segment_count}; {moved}, {stats.corrupt_segment_count} corrupt"


def _ended(stats: StoreStats) -> str:
    evicted = f"{stats.evicted_session_count} evicted ({stats.unadmitted_session_count} never written)"
    return f"{stats.expired_session_count} expired, {evicted}"


def _open(stats: StoreStats) -> str:
    return f"{counted(stats.lease_count, 'lease')}, {counted(stats.reservation_count, 'reservation')}"


def _unwritten(stats: StoreStats) -> str:
    delayed = counted(stats.delayed_write_count, "write")
    return f"{human_size(stats.dirty_bytes)} not on SSD yet, {delayed} delayed"


def _share(stats: StoreStats) -> str:
    return f"{stats.dram_hit_token_count / max(stats.read_token_count, 1):.0%}"


def when(time_ns: int | None) -> str:
    """`in 59 min` or `3 min ago`. `time_ns`: nanoseconds since 1970."""
    return human_time(instant(time_ns or 0), datetime.now(UTC))


def _word(value: enum.IntEnum) -> str:
    # A newer server's kind or element type is a bare number.
    return value.name.lower() if isinstance(value, enum.IntEnum) else str(value)


def duration(span_ns: int | None) -> str:
    """`59 min`. `span_ns`: nanoseconds."""
    return human_duration((span_ns or 0) / 1e9)


def _yes(fact: bool) -> str:  # noqa: FBT001  it is the value itself
    return "yes" if fact else "no"


def _spared(status: DrainStatus) -> str:
    return (
        f", but {human_size(status.spared_bytes)} not worth their place there" if status.spared_bytes else ""
    )


def _how(fault: InjectedFault) -> str:
    if fault.delay_ns is not None:
        return f"{fault.delay_ns / 10**9:g} s"
    return errno.errorcode.get(fault.error_number, "-")


def _reader(lease: HeldLease) -> str:
    return "stream" if lease.client is None else f"local client {lease.client}"


def _expires(lease: HeldLease) -> str:
    return "on its way" if lease.expire_time_ns is None else when(lease.expire_time_ns)


def _misses(answer: MissReport) -> Table:
    rows = _history("LAST", "TIMES", "SESSION", "ASKED BY", "FOUND")
    for one in answer.misses:
        found = one.result.replace("_", " ")
        rows.add_row(when(one.time_ns), str(one.count), session_id(one.session), one.access, found)
    return rows


def _happenings(answer: MissReport) -> Table:
    rows = _history("LAST", "FIRST", "TIMES", "EVENT", "TOKENS", "BY", "IN TRACE")
    for happening in answer.happenings:
        event = _word(happening.event).replace("_", " ")
        rows.add_row(
            when(happening.last_time_ns),
            when(happening.first_time_ns),
            str(happening.count),
            event,
            str(happening.token_count or "-"),
            happening.detail,
            happening.trace_id or "-",
        )
    return rows


def _history(*columns: str) -> Table:
    rows = Table(box=None, pad_edge=False)
    for column in columns:
        rows.add_column(column, no_wrap=True, justify="right" if column in ("TIMES", "TOKENS") else "left")
    return rows


def _sentence(answer: MissReport) -> str:
    whose = f"{answer.name} of tenant {answer.tenant}"
    if answer.is_there:
        kept = f"{counted(answer.token_count, 'token')}, of which {answer.durable_token_count} are durable"
        if answer.withheld_token_count:
            paths = ", ".join(answer.lost_paths)
            return (
                f"{whose} is there: {kept}. {answer.withheld_token_count} more are lost, until this is "
                f"back: {paths}."
            )
        return f"{whose} is there: {kept}." + ("" if answer.happenings else " Nothing was taken from it.")
    if answer.reason in REASONS:
        return f"{whose} is not there: it {REASONS[answer.reason]}."
    since = when(answer.remembered_since_ns)
    return (
        f"{whose} was never stored, or ended before the server began to remember ({since}), or very long ago."
    )
