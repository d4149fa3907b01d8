"""Printing: one JSON document per command for scripts, tables for people. Both go to standard output.

As JSON a fact has the contract's own field names, and every field is always there: see `convert.document`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

import ctxcache.client
from ctxcache.cli import tables
from ctxcache.cli.documents import Output, Plain, as_json, as_yaml
from ctxcache.client.types import (
    HeldLease,
    InjectedFault,
    MissReport,
    ModelInfo,
    PrefixMatch,
    SessionInfo,
    StoreStats,
    TenantStats,
    TierStats,
)

PIPE_WIDTH = 10_000
"""Columns of a table where no terminal limits it: names must never be cut."""
# By the class of what is shown; each view takes its own.
_VIEWS: Mapping[type, Callable[..., RenderableType]] = {
    SessionInfo: tables.session_grid,
    ModelInfo: tables.model_grid,
    StoreStats: tables.stats_view,
    MissReport: tables.why_miss_view,
    PrefixMatch: tables.prefix_grid,
    TenantStats: lambda use: tables.tenants_table([use]),
    TierStats: lambda tier: tables.paths_table([tier]),
    HeldLease: tables.lease_grid,
    InjectedFault: lambda fault: tables.faults_table([fault]),
}
_LISTS: Mapping[str, Callable[..., RenderableType]] = {
    "sessions": tables.sessions_table,
    "models": tables.models_table,
    "tenants": tables.tenants_table,
    "paths": tables.paths_table,
    "leases": tables.leases_table,
    "engines": tables.engines_table,
    "hints": tables.hints_table,
    "prefixes": tables.prefixes_table,
    "faults": tables.faults_table,
}


def print_document(facts: Mapping[str, Plain], output: Output) -> None:
    """Print what scripts read."""
    sys.stdout.write((as_yaml if output is Output.YAML else as_json)(facts) + "\n")


def print_table(table: RenderableType) -> None:
    """Print for a person, or for a pipe that a person looks at later."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    console.print(table)


def print_fact(fact: object, output: Output) -> None:
    """Print one of the client's plain types."""
    if output is Output.TABLE:
        print_table(_VIEWS[type(fact)](fact))
    else:
        print_document(ctxcache.client.document(fact), output)


def print_list(noun: str, facts: Sequence[object], *, has_more: bool, output: Output) -> None:
    """Print facts under `noun`, and whether there are more of them than were asked for."""
    if output is not Output.TABLE:
        documents: list[Plain] = [ctxcache.client.document(fact) for fact in facts]
        print_document({noun: documents, "has_more": has_more}, output)
        return
    print_table(_LISTS[noun](facts))
    if has_more:
        print_table(Text(f"there are more {noun}: --limit or --all shows them", style="dim"))
