"""Printing: one JSON document per command for scripts, tables for people. Both to standard output."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.text import Text

from ctxcache.cli import tables
from ctxcache.cli.plain import Plain, to_plain
from ctxcache.cli.why_miss import why_miss_view
from ctxcache.v1.admin_pb2 import Stats, WhyMissResponse
from ctxcache.v1.model_pb2 import Model
from ctxcache.v1.session_pb2 import Session

PIPE_WIDTH = 10_000
"""Columns to lay a table out in where nobody's terminal limits it: names must never be cut."""
# Any message type by its class; each view takes its own.
_VIEWS: Mapping[type[Message], Callable[..., RenderableType]] = {
    Session: tables.session_grid,
    Model: tables.model_grid,
    Stats: tables.stats_view,
    WhyMissResponse: why_miss_view,
}
_LISTS: Mapping[str, Callable[..., RenderableType]] = {
    "sessions": tables.sessions_table,
    "models": tables.models_table,
    "tenants": tables.tenants_table,
}


def print_json(document: Mapping[str, Plain]) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def print_table(table: RenderableType) -> None:
    """Print for a person, or for a pipe that a person looks at later."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    console.print(table)


def print_message(message: Message, *, is_json: bool) -> None:
    """Print one message."""
    if is_json:
        print_json(to_plain(message))
    else:
        print_table(_VIEWS[type(message)](message))


def print_list(noun: str, messages: Sequence[Message], *, has_more: bool, is_json: bool) -> None:
    """Print messages under `noun`, and whether there are more of them than were asked for."""
    if is_json:
        print_json({noun: [to_plain(message) for message in messages], "has_more": has_more})
        return
    print_table(_LISTS[noun](messages))
    if has_more:
        print_table(Text(f"there are more {noun}: --limit or --all shows them", style="dim"))
