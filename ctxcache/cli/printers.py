"""Printing: one JSON document per command for scripts, tables for people. Both go to standard output.

As JSON a message has the proto's own field names, and every field is always there. An int64 is a number, an
enum its name, bytes are hexadecimal. Times and durations are as protobuf's own JSON writes them
(`2030-01-31T12:00:00Z`, `3600s`). A message or optional field that is unset is null.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType
from rich.text import Text

from ctxcache.cli import tables
from ctxcache.cli.documents import Output, Plain, as_json, as_yaml
from ctxcache.v1.admin_pb2 import Stats, TenantUse, TierStats, WhyMissResponse
from ctxcache.v1.faults_pb2 import Fault
from ctxcache.v1.model_pb2 import Model
from ctxcache.v1.operations_pb2 import HeldLease
from ctxcache.v1.session_pb2 import Session

PIPE_WIDTH = 10_000
"""Columns of a table where no terminal limits it: names must never be cut."""
# Any message type by its class; each view takes its own.
_VIEWS: Mapping[type[Message], Callable[..., RenderableType]] = {
    Session: tables.session_grid,
    Model: tables.model_grid,
    Stats: tables.stats_view,
    WhyMissResponse: tables.why_miss_view,
    TenantUse: lambda use: tables.tenants_table([use]),
    TierStats: lambda tier: tables.paths_table([tier]),
    HeldLease: tables.lease_grid,
    Fault: lambda fault: tables.faults_table([fault]),
}
_LISTS: Mapping[str, Callable[..., RenderableType]] = {
    "sessions": tables.sessions_table,
    "models": tables.models_table,
    "tenants": tables.tenants_table,
    "paths": tables.paths_table,
    "leases": tables.leases_table,
    "engines": tables.engines_table,
    "hints": tables.hints_table,
    "faults": tables.faults_table,
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


def to_plain(message: Message) -> dict[str, Plain]:
    """Return the message as what `json.dumps` takes."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


# Any: protobuf has two classes of descriptors, and which one it is depends on how it was built.
def _field(message: Message, field: Any) -> Plain:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: object, field: Any) -> Plain:
    match value:
        case Timestamp() | Duration():
            return value.ToJsonString()
        case Message():
            return to_plain(value)
        case bytes():
            return value.hex()
        case int() if field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            return known.name if known else value
        case bool() | int() | float() | str():
            return value
    raise TypeError(f"{field.full_name} is a {type(value).__name__}")
