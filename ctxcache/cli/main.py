"""The entry point: puts the commands together and turns every failure into a sentence and a code.

Knows no server, no gRPC and no torch: those are imported by the command that needs them, when it
runs. Worst case: a bug of ours, which is a traceback and exit code 1.
"""

import errno
import importlib.metadata
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ctxcache.cli import (
    drain,
    export,
    faults,
    hints,
    import_,
    leases,
    models,
    quotas,
    sessions,
    tiers,
    tokens,
    top,
    trace,
)
from ctxcache.cli.call import Call, OutputOption, TargetOption, TimeoutOption, of_tenant, online, watched
from ctxcache.cli.completion import session_names
from ctxcache.cli.config import config_app
from ctxcache.cli.credentials import (
    CaOption,
    CertificateOption,
    Credentials,
    KeyOption,
    TokenFileOption,
)
from ctxcache.cli.doctor.command import doctor_command
from ctxcache.cli.examples import examples
from ctxcache.cli.exit_codes import ExitCode, exit_code_of
from ctxcache.cli.failures import UsageFailure, asked_output, error_document, usage_document
from ctxcache.cli.names import parse_trace, parsed, session_name
from ctxcache.cli.output import Output
from ctxcache.cli.plugins import add_plugins
from ctxcache.cli.rebuild import rebuild_command
from ctxcache.cli.sentences import sentence
from ctxcache.cli.serve import serve_command
from ctxcache.cli.simulate import simulate_command
from ctxcache.cli.verify import verify
from ctxcache.errors import CacheError, FileFull

if TYPE_CHECKING:
    from ctxcache.cli.plain import Plain

app = typer.Typer(
    name="ctxcache", no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.command("serve", epilog=examples("ctxcache serve", "ctxcache serve --config ctxcache.toml"))(
    serve_command()
)
app.command(
    "rebuild",
    epilog=examples("ctxcache rebuild --dry-run", "ctxcache rebuild --data-directory /var/lib/ctxcache"),
)(rebuild_command())
app.command(
    "verify",
    epilog=examples(
        "ctxcache verify --rate-limit 100MiB", "ctxcache verify --data-directory /var/lib/ctxcache"
    ),
)(verify)
app.command(
    "doctor", epilog=examples("ctxcache doctor", "ctxcache doctor --config ctxcache.toml --output json")
)(doctor_command())
app.command(
    "simulate",
    epilog=examples(
        "ctxcache simulate trace.csv --policies lru,belady --footprint 0.5,1",
        "ctxcache simulate trace.csv --dram 64GiB --ssd 1TiB --costs",
    ),
)(simulate_command())
app.add_typer(sessions.app, name="session")
app.add_typer(models.app, name="model")
app.add_typer(tiers.app, name="tier")
app.add_typer(leases.app, name="lease")
app.add_typer(quotas.app, name="quota")
app.add_typer(hints.app, name="hint")
app.add_typer(trace.app, name="trace")
app.add_typer(faults.app, name="fault")
app.command("top", epilog=top.EXAMPLES)(top.top)
app.command("drain", epilog=drain.EXAMPLES)(drain.drain)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("import", epilog=import_.EXAMPLES)(import_.import_command())
app.add_typer(config_app(), name="config")
app.add_typer(tokens.app, name="token")


def _say_version(is_asked: bool | None) -> None:  # noqa: FBT001  as a callback is called
    if is_asked:
        typer.echo(f"ctxcache {importlib.metadata.version('ctxcache')}")
        raise typer.Exit


@app.callback(
    epilog=examples("ctxcache --install-completion", "ctxcache --target 127.0.0.1:7420 --output json stats")
)
def shared_options(
    context: typer.Context,
    target: TargetOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
    token_file: TokenFileOption = None,
    tls_ca: CaOption = None,
    tls_client_certificate: CertificateOption = None,
    tls_client_key: KeyOption = None,
    version: Annotated[  # noqa: ARG001  its callback ends the command
        bool | None,
        typer.Option(
            "--version",
            help="Say which version this is.",
            is_eager=True,
            callback=_say_version,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Keep sessions' state for LLM inference, and restore their KV cache from it."""
    credentials = Credentials(token_file, tls_ca, tls_client_certificate, tls_client_key)
    context.obj = Call(credentials=credentials).but(
        target or os.environ.get("CTXCACHE_TARGET"), output, timeout
    )


@app.command("stats", epilog=examples("ctxcache stats", "ctxcache stats --output json"))
@watched
def stats(call: Call) -> None:
    """Show what the server holds and has done since it started."""
    with call.client() as client:
        call.show(client.stats())


@app.command("tenants", epilog=examples("ctxcache tenants"))
@watched
def tenants(call: Call) -> None:
    """Show what each tenant has, and what is its share."""
    with call.client() as client:
        call.show_list("tenants", client.list_tenants(), None)


@app.command(
    "why-miss",
    epilog=examples(
        "ctxcache why-miss chat-17",
        "ctxcache why-miss --request 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
)
@of_tenant
def why_miss(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="ID or sessions/ID.", show_default=False, autocompletion=session_names
        ),
    ] = "",
    request: Annotated[
        str,
        typer.Option(
            "--request",
            metavar="TRACE",
            show_default=False,
            help="A request instead: its trace's id, or its W3C traceparent.",
        ),
    ] = "",
) -> None:
    """Say why a session is not there, or has less than was stored; or what a request missed, and why."""
    if bool(name) == bool(request):
        raise typer.BadParameter("give a NAME, or --request")
    with call.client() as client:
        if request:
            call.show(client.why_miss(tenant=call.tenant, trace_id=parsed(parse_trace, request, "--request")))
        else:
            call.show(client.why_miss(session_name(name), tenant=call.tenant))


@app.command("version", epilog=examples("ctxcache version", "ctxcache version --server"))
@online
def version(
    call: Call,
    *,
    server: Annotated[bool, typer.Option("--server", help="The server's as well, which is asked.")] = False,
) -> None:
    """Show the version of this program, and of the server."""
    number = importlib.metadata.version("ctxcache")
    facts: dict[str, Plain] = {"version": number}
    lines = [f"ctxcache {number}"]
    if server:
        with call.client() as client:
            facts["server_version"] = client.stats().version
        lines.append(f"server {facts['server_version']}")
    call.show_facts(facts, "\n".join(lines))


@app.command("health", epilog=examples("ctxcache health", "ctxcache health --timeout 2 --output json"))
@online
def health(call: Call) -> None:
    """Say whether the server takes work, as probes ask it; exits with 6 where it does not.

    It asks without a token, and finds a server that drains, or opens, not serving.
    """
    with call.client() as client:
        is_serving = client.health()
    call.show_facts({"is_serving": is_serving}, "serving" if is_serving else "not serving")
    if not is_serving:
        raise typer.Exit(ExitCode.UNAVAILABLE)


# Last: a plugin's name never hides one of ours, and --help lists it after them.
add_plugins(app, groups={"trace": trace.app})


def main() -> None:
    """Run the command line; ends the process with a code of `exit_codes.ExitCode`.

    Where the command is to print JSON or YAML, so is what goes wrong: a document on standard error.
    """
    # gRPC's C core writes its own lines to stderr, beside the one sentence that we owe.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    output = asked_output(sys.argv[1:])
    try:
        try:
            ended = app(prog_name="ctxcache", standalone_mode=output is Output.TABLE)
        finally:
            if sys.stdout:
                sys.stdout.flush()
        sys.exit(ended if isinstance(ended, int) else ExitCode.OK)
    except UsageFailure as error:
        sys.stderr.write(usage_document(error, output) + "\n")
        sys.exit(ExitCode.USAGE)
    except CacheError as error:
        _fail(error, output)
    except OSError as error:
        # Whoever opens a file says what was refused of it; what is printed has no name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        # What is still to be printed would be tried once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(FileFull(path="standard output", problem=os.strerror(error.errno)), output)


def _fail(error: CacheError, output: Output) -> NoReturn:
    text = f"ctxcache: {sentence(error)}" if output is Output.TABLE else error_document(error, output)
    # A log on a full disk takes no sentence; the exit code says it all the same.
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
