"""Printing: one JSON document per command for scripts, tables for people. Both to standard output.

`why-miss` is printed for people as a sentence, and a table of what happened to the session.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ctxcache.cli import operation_tables, tables
from ctxcache.cli.documents import as_json, as_yaml
from ctxcache.cli.output import Output
from ctxcache.cli.plain import Plain, to_plain
from ctxcache.cli.units import human_time
from ctxcache.v1.admin_pb2 import MissEvent, Stats, TenantUse, TierStats, WhyMissResponse
from ctxcache.v1.faults_pb2 import Fault
from ctxcache.v1.model_pb2 import Model
from ctxcache.v1.operations_pb2 import HeldLease
from ctxcache.v1.session_pb2 import Session

REASONS = {
    MissEvent.MISS_EVENT_EVICTED: "was evicted",
    MissEvent.MISS_EVENT_EXPIRED: "has expired",
    MissEvent.MISS_EVENT_DELETED: "was deleted",
}


def why_miss_view(answer: WhyMissResponse) -> RenderableType:
    """One session that somebody missed, or what a request missed and the last session of that."""
    if answer.trace_id and not answer.misses:
        return Text(
            f"no miss of {answer.trace_id} by tenant {answer.tenant} is remembered: it missed nothing, did not send"
            f" its trace, or did so before the server began to remember ({_when(answer.remembered_since)}) or long ago."
        )
    parts: list[RenderableType] = [_misses(answer), Text()] if answer.trace_id else []
    parts.append(Text(_sentence(answer)))
    if answer.happenings:
        parts += [Text(), _happenings(answer)]
    return Group(*parts)


def _misses(answer: WhyMissResponse) -> Table:
    table = _table("LAST", "TIMES", "SESSION", "ASKED BY", "FOUND")
    for one in answer.misses:
        found = one.result.replace("_", " ")
        table.add_row(_when(one.time), str(one.count), one.session, one.access, found)
    return table


def _happenings(answer: WhyMissResponse) -> Table:
    table = _table("LAST", "FIRST", "TIMES", "EVENT", "TOKENS", "BY", "IN TRACE")
    for one in answer.happenings:
        event = MissEvent.Name(one.event).removeprefix("MISS_EVENT_").lower().replace("_", " ")
        table.add_row(
            _when(one.last_time),
            _when(one.first_time),
            str(one.count),
            event,
            str(one.token_count or "-"),
            one.detail,
            one.trace_id or "-",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in ("TIMES", "TOKENS") else "left")
    return table


def _sentence(answer: WhyMissResponse) -> str:
    whose = f"{answer.name} of tenant {answer.tenant}"
    if answer.is_there:
        kept = f"{answer.token_count} tokens, of which {answer.durable_token_count} are durable"
        if answer.withheld_token_count:
            paths = ", ".join(answer.lost_paths)
            return f"{whose} is there: {kept}. {answer.withheld_token_count} more are lost, until this is back: {paths}."
        return f"{whose} is there: {kept}." + ("" if answer.happenings else " Nothing was taken from it.")
    if answer.reason in REASONS:
        return f"{whose} is not there: it {REASONS[answer.reason]}."
    since = _when(answer.remembered_since)
    return (
        f"{whose} was never stored, or ended before the server began to remember ({since}), or very long ago."
    )


def _when(instant: Timestamp) -> str:
    return human_time(instant.ToDatetime(tzinfo=UTC), datetime.now(UTC))


PIPE_WIDTH = 10_000
"""Columns to lay a table out in where nobody's terminal limits it: names must never be cut."""
# Any message type by its class; each view takes its own.
_VIEWS: Mapping[type[Message], Callable[..., RenderableType]] = {
    Session: tables.session_grid,
    Model: tables.model_grid,
    Stats: tables.stats_view,
    WhyMissResponse: why_miss_view,
    TenantUse: lambda use: tables.tenants_table([use]),
    TierStats: lambda tier: operation_tables.paths_table([tier]),
    HeldLease: operation_tables.lease_grid,
    Fault: lambda fault: operation_tables.faults_table([fault]),
}
_LISTS: Mapping[str, Callable[..., RenderableType]] = {
    "sessions": tables.sessions_table,
    "models": tables.models_table,
    "tenants": tables.tenants_table,
    "paths": operation_tables.paths_table,
    "leases": operation_tables.leases_table,
    "engines": operation_tables.engines_table,
    "hints": operation_tables.hints_table,
    "faults": operation_tables.faults_table,
}


def print_document(document: Mapping[str, Plain], output: Output) -> None:
    """Print what scripts read."""
    sys.stdout.write((as_yaml if output is Output.YAML else as_json)(document) + "\n")


def print_table(table: RenderableType) -> None:
    """Print for a person, or for a pipe that a person looks at later."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    console.print(table)


def print_message(message: Message, output: Output) -> None:
    """Print one message."""
    if output is Output.TABLE:
        print_table(_VIEWS[type(message)](message))
    else:
        print_document(to_plain(message), output)


def print_list(noun: str, messages: Sequence[Message], *, has_more: bool, output: Output) -> None:
    """Print messages under `noun`, and whether there are more of them than were asked for."""
    if output is not Output.TABLE:
        document: dict[str, Plain] = {noun: [to_plain(message) for message in messages], "has_more": has_more}
        print_document(document, output)
        return
    print_table(_LISTS[noun](messages))
    if has_more:
        print_table(Text(f"there are more {noun}: --limit or --all shows them", style="dim"))
