"""Commands that ask a server: the call, its printed answer, and names for shell completion.

A command takes a `CliCall` first. `online` gives it the options --target, --output and --timeout in that
parameter's place; `watched` adds --watch, which runs the command again and again; `of_tenant` adds --tenant.
One JSON document per command is for scripts, tables are for people; both go to standard output. As JSON a
fact has the contract's own field names, and every field is always there: see `convert.document`.

The client is imported when a server is asked: see `ctxcache.client`. Worst case of completion: the server
does not answer within a second, and nothing is offered.
"""

import functools
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, NoReturn, ParamSpec, Self, get_type_hints

import typer

import ctxcache.client
from ctxcache.cli.documents import Output
from ctxcache.cli.options import (
    CONTEXT,
    SHARED_OPTIONS,
    TENANT,
    Credentials,
    Shared,
    TenantOption,
    option,
    seconds,
    shared_of,
    with_signature,
)

if TYPE_CHECKING:
    from ctxcache.client import Client
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from ctxcache.cli import tables
from ctxcache.cli.documents import Plain, as_json, as_yaml
from ctxcache.client.types import (
    CollectedFleet,
    FleetView,
    HeldLease,
    InjectedFault,
    MissReport,
    ModelInfo,
    PrefixMatch,
    PublishedSessions,
    SessionInfo,
    StoreStats,
    TenantStats,
    TierStats,
)
from ctxcache.errors import CacheError

if TYPE_CHECKING:
    from ctxcache.client import Client


PIPE_WIDTH = 10_000
"""Columns of a table where no terminal limits it: names must never be cut."""
# The key is the class of what is shown. Each view takes its own class.
_VIEWS: Mapping[type, Callable[..., RenderableType]] = {
    SessionInfo: tables.session_grid,
    ModelInfo: tables.model_grid,
    StoreStats: tables.stats_view,
    MissReport: tables.why_miss_view,
    PrefixMatch: tables.prefix_grid,
    TenantStats: lambda use: tables.tenants_table([use]),
    TierStats: lambda tier: tables.paths_table([tier]),
    HeldLease: tables.lease_grid,
    FleetView: tables.fleet_view,
    CollectedFleet: tables.collected_view,
    PublishedSessions: tables.published_view,
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
    # A name that is longer than the screen goes on in the next line, and is not cut.
    console.print(table, crop=False)


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


WATCH_INTERVAL_S = 2.0
CLEAR = "\x1b[H\x1b[2J"
"""Escape codes that empty a terminal."""

WatchOption = Annotated[
    bool | None, typer.Option("--watch", help="Show it again and again, until Ctrl-C.", show_default=False)
]
IntervalOption = Annotated[
    float | None,
    typer.Option(
        "--interval",
        metavar="TIME",
        help="How often, with --watch.",
        parser=seconds(0.01),
        show_default=f"{WATCH_INTERVAL_S:g}",
    ),
]
WATCHING = (option("watch", WatchOption), option("interval", IntervalOption))


# How a command comes to be called:
#
#     words ──► typer ──► options before the name: `context.obj`  ──┐
#                         options behind it: `given`               ──┴► call_of ──► CliCall ──► the function
#                                                                       └ takes its own out of `given`
class CliCall(Shared):
    """The shared options of a command that asks a server, and what it does with them."""

    @contextmanager
    def client(self, *, moves_rows: bool = False) -> "Iterator[Client]":
        """Open a client; one that moves no rows maps no memory."""
        asked = self.credentials
        with ctxcache.client.connect(
            self.target,
            timeout_s=self.timeout_s,
            access="auto" if moves_rows else "remote",
            tls=ctxcache.client.ClientTls.of(asked.ca, asked.certificate, asked.key, asked.server_name),
            token_file=self.credentials.token_file,
            tenant=self.tenant,
        ) as client:
            yield client

    def show(self, fact: object) -> None:
        """Print one of the client's plain types."""
        print_fact(fact, self.output)

    def show_list(self, noun: str, facts: Iterable[object], limit: int | None) -> None:
        """Print at most `limit` facts under `noun`; None is all."""
        shown = list(islice(facts, limit if limit is None else limit + 1))
        has_more = limit is not None and len(shown) > limit
        print_list(noun, shown[:limit], has_more=has_more, output=self.output)


class CtrlC:
    """Ctrl-C as the good end of a `with` block: KeyboardInterrupt leaves it, and goes no further.

    Python drops a KeyboardInterrupt that comes while a `__del__` runs, as one of gRPC's channels does at
    the end of each call. So a loop asks `was_pressed` as well.
    """

    def __init__(self) -> None:
        self.was_pressed = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        signal.signal(signal.SIGINT, self._before)
        return kind is not None and issubclass(kind, KeyboardInterrupt)

    def rest(self, for_s: float) -> None:
        """Sleep, unless it was pressed before."""
        if not self.was_pressed:
            time.sleep(for_s)

    def _pressed(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self.was_pressed = True
        raise KeyboardInterrupt


P = ParamSpec("P")


def call_of(context: typer.Context, given: dict[str, Any]) -> CliCall:
    """Take the shared options out of what a command was given, see `shared_of`."""
    shared = shared_of(context, given)
    return CliCall(**{field.name: getattr(shared, field.name) for field in fields(shared)})


def online(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    """Give a command the shared options in place of its first parameter."""
    return _with_options(function, ())


def watched(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    """As `online`, and --watch, with which the command is run again and again."""
    return _with_options(_repeated(function), WATCHING)


def of_tenant(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    """As `online`, and --tenant."""
    return _with_options(function, (option(TENANT, TenantOption),))


def watched_of_tenant(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    """As `watched`, and --tenant."""
    return _with_options(_repeated(function), (option(TENANT, TenantOption), *WATCHING))


def _repeated(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    @functools.wraps(function)
    def command(call: CliCall, /, *arguments: P.args, **given: P.kwargs) -> None:
        is_watched, interval_s = given.pop("watch", None), given.pop("interval", None)
        if not is_watched:
            if interval_s is not None:
                raise typer.BadParameter("goes with --watch", param_hint="--interval")
            function(call, *arguments, **given)
            return
        with CtrlC() as ctrl_c:
            while not ctrl_c.was_pressed:
                if call.output is Output.TABLE and sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                function(call, *arguments, **given)
                sys.stdout.flush()
                ctrl_c.rest(interval_s if isinstance(interval_s, float) else WATCH_INTERVAL_S)

    return command


def _with_options(
    function: Callable[Concatenate[CliCall, P], None], more: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    bound: Callable[..., None] = function
    own = list(inspect.signature(function).parameters.values())[1:]

    def command(context: typer.Context, **given: Any) -> None:
        bound(call_of(context, given), **given)

    return with_signature(
        command,
        # Every parameter is keyword-only: typer passes each by its name.
        [CONTEXT, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *more, *SHARED_OPTIONS],
        name=function.__name__,
        doc=function.__doc__,
        hints=get_type_hints(function, include_extras=True),
    )


TIMEOUT_S = 1.0
LIMIT = 200
"""The most names that are looked at."""


def session_names(context: typer.Context, incomplete: str) -> list[str]:
    """IDs of sessions."""
    return _matching(context, incomplete, lambda client: (_id(s.name) for s in client.sessions.list()))


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """IDs of models."""
    return _matching(context, incomplete, lambda client: (_id(m.name) for m in client.models.list()))


def tenant_names(context: typer.Context, incomplete: str) -> list[str]:
    """Tenants."""
    return _matching(context, incomplete, lambda client: (t.tenant for t in client.admin.list_tenants()))


def ssd_paths(context: typer.Context, incomplete: str) -> list[str]:
    """SSD files."""
    return _matching(context, incomplete, _paths)


def _paths(client: "Client") -> Iterator[str]:
    return (tier.path for tier in client.admin.stats().tiers[1:])


def _matching(
    context: typer.Context, incomplete: str, names: "Callable[[Client], Iterable[str]]"
) -> list[str]:
    given = context.find_root().params
    # Options that are not given come from their variables, which are among the parameters.
    names_of = ("token_file", "tls_ca", "tls_client_certificate", "tls_client_key")
    # The call lacks what a command would need besides: whoever completes waits, so a second is all there is.
    call = CliCall(credentials=Credentials(*map(given.get, names_of)), timeout_s=TIMEOUT_S)
    target = given.get("target") or os.environ.get("CTXCACHE_TARGET")
    try:
        with call.but(target, None, None).client() as client:
            some_names = list(islice(names(client), LIMIT))
    except CacheError:
        return []
    return [name for name in some_names if name.startswith(incomplete)]


def _id(name: str) -> str:
    return name.partition("/")[2]
