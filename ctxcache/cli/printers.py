"""Printing: one JSON document per command for scripts, tables for people. Both to standard output."""

import sys
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.text import Text

from ctxcache.cli import operation_tables, tables
from ctxcache.cli.documents import as_json, as_yaml
from ctxcache.cli.output import Output
from ctxcache.cli.plain import Plain, to_plain
from ctxcache.cli.why_miss import why_miss_view
from ctxcache.v1.admin_pb2 import Stats, TenantUse, TierStats, WhyMissResponse
from ctxcache.v1.faults_pb2 import Fault
from ctxcache.v1.model_pb2 import Model
from ctxcache.v1.operations_pb2 import HeldLease
from ctxcache.v1.session_pb2 import Session

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
