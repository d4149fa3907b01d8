"""Commands that ask a server. Such a command takes a `CliCall` first.

Neither this module nor a command's own imports the client before a server is asked: see `ctxcache.client`.
`online` gives a command the options --target, --output and --timeout in place of that parameter. `watched`
adds --watch, which runs the command again and again; `of_tenant` adds --tenant.
"""

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

import ctxcache.client
from ctxcache.cli.documents import Output
from ctxcache.cli.options import CONTEXT, SHARED_OPTIONS, TENANT, Credentials, Shared, TenantOption, shared_of
from ctxcache.cli.printers import print_fact, print_list
from ctxcache.cli.signature import option, with_signature

if TYPE_CHECKING:
    from ctxcache.client import Client, ClientTls

WATCH_INTERVAL_S = 2.0
CLEAR = "\x1b[H\x1b[2J"
"""What empties a terminal."""
SYSTEM = "system"
"""The machine's own authorities, as --tls-ca names them."""

WatchOption = Annotated[
    bool | None, typer.Option("--watch", help="Show it again and again, until Ctrl-C.", show_default=False)
]
IntervalOption = Annotated[
    float | None,
    typer.Option(
        "--interval",
        metavar="SECONDS",
        help="How often, with --watch.",
        min=0.01,
        show_default=f"{WATCH_INTERVAL_S:g}",
    ),
]
WATCHING = (option("watch", WatchOption), option("interval", IntervalOption))


class CliCall(Shared):
    """The shared options of a command that asks a server, and what it does with them."""

    @contextmanager
    def client(self, *, moves_rows: bool = False) -> "Iterator[Client]":
        """Open a client; one that moves no rows maps no memory."""
        with ctxcache.client.connect(
            self.target,
            timeout_s=self.timeout_s,
            access="auto" if moves_rows else "remote",
            tls=_tls(self.credentials),
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


def _tls(credentials: Credentials) -> "ClientTls | None":
    """What the client takes; None for plaintext."""
    if credentials.ca is None and credentials.certificate is None:
        return None
    ca = None if credentials.ca in (None, SYSTEM) else Path(credentials.ca)
    return ctxcache.client.ClientTls(ca, credentials.certificate, credentials.key)


def _repeated(function: Callable[Concatenate[CliCall, P], None]) -> Callable[..., None]:
    @functools.wraps(function)
    def command(call: CliCall, /, *arguments: P.args, **given: P.kwargs) -> None:
        is_watched, interval_s = given.pop("watch", None), given.pop("interval", None)
        if not is_watched:
            if interval_s is not None:
                raise typer.BadParameter("goes with --watch", param_hint="--interval")
            function(call, *arguments, **given)
            return
        # Ctrl-C is how it ends.
        with suppress(KeyboardInterrupt):
            while True:
                if call.output is Output.TABLE and sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                function(call, *arguments, **given)
                sys.stdout.flush()
                time.sleep(interval_s if isinstance(interval_s, float) else WATCH_INTERVAL_S)

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
        # Keyword-only all of them: typer passes every one by its name.
        [CONTEXT, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *more, *SHARED_OPTIONS],
        name=function.__name__,
        doc=function.__doc__,
        hints=get_type_hints(function, include_extras=True),
    )
