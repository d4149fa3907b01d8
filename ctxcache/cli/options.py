"""The options that commands share: which server, as whom, how long to wait, and how to print.

    ctxcache --target A --output json session list --target B
             └── before the command: defaults ──┘  └── after it: they win

Imports neither gRPC nor protobuf, for `ctxcache --help` and commands that ask no server. Reads no file: the
client reads tokens and certificates. Worst case: a file that cannot be used, which the client's error names.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_type_hints

import typer

from ctxcache.cli.documents import Output, Plain, as_json, as_yaml
from ctxcache.settings.knobs.knob import parse_seconds

Options = TypeVar("Options")
DEFAULT_TARGET = "127.0.0.1:7420"
DEFAULT_TIMEOUT_S = 30.0
TENANT = "whose"
"""The parameter behind --tenant, where that says for whom an operator calls."""


def option(name: str, annotation: Any) -> inspect.Parameter:
    """Return a parameter that is None unless it is given. `annotation` is typer's, an Annotated."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_signature(
    function: Callable[..., None],
    parameters: Iterable[inspect.Parameter],
    *,
    name: str,
    doc: str | None,
    hints: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Return `function` as typer shall see it; it is called with every parameter by its name."""

    # typer reads a command's signature and annotations; this one has those that it is given, made of many
    # parts.
    def command(**given: Any) -> None:  # Any: typer has checked each against the signature
        function(**given)

    shown = list(parameters)
    command.__name__, command.__doc__ = name, doc
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # inspect looks for it
    command.__annotations__ = {p.name: (hints or {}).get(p.name, p.annotation) for p in shown}
    return command


def taking(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorate a command whose parameters are the fields of `kind`, a dataclass of Annotated."""
    if not dataclasses.is_dataclass(kind):
        raise TypeError(kind)
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]

    def decorated(function: Callable[[Options], None]) -> Callable[..., None]:
        return with_signature(
            lambda **given: function(kind(**given)), fields, name=function.__name__, doc=function.__doc__
        )

    return decorated


def seconds(least: float) -> Callable[[str | float], float]:
    """What reads an option's time, as all options read one: `90`, `90s`, `15min`, `2h`, `30d`."""

    def time(given: str | float) -> float:
        try:
            value = given if isinstance(given, float) else parse_seconds(str(given))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if not math.isfinite(value):
            raise typer.BadParameter("is not a finite number")
        if value < least:
            raise typer.BadParameter(f"{least:g} is the least")
        return value

    return time


TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Server, host:port or unix:PATH; also CTXCACHE_TARGET.",
        show_default=DEFAULT_TARGET,
        metavar="TARGET",
    ),
]
OutputOption = Annotated[Output | None, typer.Option("--output", "-o", help="How to print.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="TIME", help="Longest wait for an answer: 5, or 2min.", parser=seconds(0.001)
    ),
]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="Whose; for operators.", show_default="yours"),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="CTXCACHE_TOKEN_FILE", metavar="FILE", help="Token that says who calls."
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        envvar="CTXCACHE_TLS_CA",
        metavar="FILE",
        help="TLS, with a server whose certificate these authorities signed; `system` for the machine's.",
    ),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-certificate",
        envvar="CTXCACHE_TLS_CLIENT_CERTIFICATE",
        metavar="FILE",
        help="Certificate to show.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--tls-client-key", envvar="CTXCACHE_TLS_CLIENT_KEY", metavar="FILE", help="Its key."),
]
ServerNameOption = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        envvar="CTXCACHE_TLS_SERVER_NAME",
        metavar="NAME",
        help="Name in the server's certificate, where it is not the target's host.",
    ),
]
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
SHARED_OPTIONS = (
    option("target", TargetOption),
    option("output", OutputOption),
    option("timeout", TimeoutOption),
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a command shows to the server, and the authorities it trusts."""

    token_file: Path | None = None
    ca: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True)
class Shared:
    """The shared options of one command, resolved."""

    target: str = DEFAULT_TARGET
    output: Output = Output.TABLE
    timeout_s: float = DEFAULT_TIMEOUT_S
    credentials: Credentials = Credentials()
    tenant: str = ""

    # Each of them may be given before the command's name and behind it, and behind it wins.
    def but(self, target: str | None, output: Output | None, timeout_s: float | None) -> Self:
        """Return this with those options changed that are given."""
        changed = replace(self, target=target or self.target, output=output or self.output)
        return changed if timeout_s is None else replace(changed, timeout_s=timeout_s)

    def show_facts(self, facts: Mapping[str, Plain], text: str, *, to_stderr: bool = False) -> None:
        """Print facts for scripts, or `text` for people."""
        match self.output:
            case Output.JSON:
                typer.echo(as_json(facts), err=to_stderr)
            case Output.YAML:
                typer.echo(as_yaml(facts), err=to_stderr)
            case Output.TABLE:
                typer.echo(text, err=to_stderr)


def before_the_command(
    credentials: Credentials, target: str | None, output: Output | None, timeout_s: float | None
) -> Shared:
    """The options that were given before a command's name.

    The environment names the target where they do not.
    """
    return Shared(credentials=credentials).but(target or os.environ.get("CTXCACHE_TARGET"), output, timeout_s)


def shared_of(context: typer.Context, given: dict[str, Any]) -> Shared:
    """Take the shared options out of what a command was given; those before its name fill the gaps."""
    before: Shared = context.obj or Shared()
    shared = before.but(given.pop("target", None), given.pop("output", None), given.pop("timeout", None))
    return replace(shared, tenant=given.pop(TENANT, None) or "")
