"""What every online command shares: where the server is, how long to wait, how to print.

A command takes a `Call` first; `online` gives it the options --target, --output and --timeout in
its place. The same options before the command's name are defaults for it.
"""

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from ctxcache.cli.credentials import NO_CREDENTIALS, Credentials
from ctxcache.cli.output import Output
from ctxcache.cli.signature import option, with_signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.message import Message

    from ctxcache.cli.plain import Plain
    from ctxcache.client import Client

DEFAULT_TARGET = "127.0.0.1:7420"
DEFAULT_TIMEOUT_S = 30.0
WATCH_INTERVAL_S = 2.0
WHOSE = "whose"
"""The parameter behind --tenant, where that says for whom an operator calls."""
CLEAR = "\x1b[H\x1b[2J"
"""What empties a terminal."""


TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Server, host:port or unix:PATH; also CTXCACHE_TARGET.",
        show_default="127.0.0.1:7420",
        metavar="TARGET",
    ),
]
OutputOption = Annotated[Output | None, typer.Option("--output", "-o", help="How to print.")]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", help="Longest wait for an answer, in seconds.", min=0.001)
]
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
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="Whose; for operators.", show_default="yours"),
]
WATCHING = (option("watch", WatchOption), option("interval", IntervalOption))
SHARED_OPTIONS = (
    option("target", TargetOption),
    option("output", OutputOption),
    option("timeout", TimeoutOption),
)


@dataclass(frozen=True, slots=True)
class Call:
    """The shared options of one command, resolved."""

    target: str = DEFAULT_TARGET
    output: Output = Output.TABLE
    timeout_s: float = DEFAULT_TIMEOUT_S
    credentials: Credentials = NO_CREDENTIALS
    tenant: str = ""

    def but(self, target: str | None, output: Output | None, timeout_s: float | None) -> "Call":
        """Return this with those options changed that are given."""
        changed = replace(self, target=target or self.target, output=output or self.output)
        return changed if timeout_s is None else replace(changed, timeout_s=timeout_s)

    @contextmanager
    def client(self, *, moves_rows: bool = False) -> Iterator["Client"]:
        """Open a client; one that moves no rows maps no memory."""
        from ctxcache.client import Client  # noqa: PLC0415  grpc is half the start time of --help

        with Client(
            self.target,
            timeout_s=self.timeout_s,
            access="auto" if moves_rows else "remote",
            tls=self.credentials.tls(),
            token_file=self.credentials.token_file,
            tenant=self.tenant,
        ) as client:
            yield client

    def show(self, message: "Message") -> None:
        """Print one message."""
        from ctxcache.cli.printers import print_message  # noqa: PLC0415  --help prints no tables

        print_message(message, self.output)

    def show_list(self, noun: str, messages: "Iterable[Message]", limit: int | None) -> None:
        """Print at most `limit` messages under `noun`; None is all."""
        from ctxcache.cli.printers import print_list  # noqa: PLC0415  --help prints no tables

        shown = list(islice(messages, limit if limit is None else limit + 1))
        has_more = limit is not None and len(shown) > limit
        print_list(noun, shown[:limit], has_more=has_more, output=self.output)

    def show_facts(self, facts: "Mapping[str, Plain]", text: str, *, to_stderr: bool = False) -> None:
        """Print facts for scripts, or `text` for people."""
        from ctxcache.cli.documents import as_json, as_yaml  # noqa: PLC0415  it imports protobuf

        match self.output:
            case Output.JSON:
                typer.echo(as_json(facts), err=to_stderr)
            case Output.YAML:
                typer.echo(as_yaml(facts), err=to_stderr)
            case Output.TABLE:
                typer.echo(text, err=to_stderr)


P = ParamSpec("P")
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def call_of(context: typer.Context, given: dict[str, Any]) -> Call:
    """Take the shared options out of what a command was given; those before its name fill the gaps."""
    shared: Call = context.obj or Call()
    call = shared.but(given.pop("target", None), given.pop("output", None), given.pop("timeout", None))
    return replace(call, tenant=given.pop(WHOSE, None) or "")


def online(function: Callable[Concatenate[Call, P], None]) -> Callable[..., None]:
    """Give a command the shared options in place of its first parameter."""
    return _with_options(function, ())


def watched(function: Callable[Concatenate[Call, P], None]) -> Callable[..., None]:
    """As `online`, and --watch, with which the command is run again and again."""
    return _with_options(_repeated(function), WATCHING)


def of_tenant(function: Callable[Concatenate[Call, P], None]) -> Callable[..., None]:
    """As `online`, and --tenant."""
    return _with_options(function, (option(WHOSE, TenantOption),))


def watched_of_tenant(function: Callable[Concatenate[Call, P], None]) -> Callable[..., None]:
    """As `watched`, and --tenant."""
    return _with_options(_repeated(function), (option(WHOSE, TenantOption), *WATCHING))


def _repeated(function: Callable[Concatenate[Call, P], None]) -> Callable[..., None]:
    @functools.wraps(function)
    def command(call: Call, /, *arguments: P.args, **given: P.kwargs) -> None:
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
    function: Callable[Concatenate[Call, P], None], more: Sequence[inspect.Parameter]
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
