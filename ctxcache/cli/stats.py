"""A server in a few lines: `ctxcache stats`, `tenants`, `why-miss`, `version` and `health`."""

import importlib.metadata
from typing import Annotated

import typer

from ctxcache.cli.call import CliCall, of_tenant, online, session_names, watched
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.units import parse_trace, parsed, session_name

app = typer.Typer()


@app.command("stats", epilog=examples("ctxcache stats", "ctxcache stats --output json"))
@watched
def stats(call: CliCall) -> None:
    """Show what the server holds and has done since it started."""
    with call.client() as client:
        call.show(client.admin.stats())


@app.command("tenants", epilog=examples("ctxcache tenants"))
@watched
def tenants(call: CliCall) -> None:
    """Show what each tenant has, and what is its share."""
    with call.client() as client:
        call.show_list("tenants", client.admin.list_tenants(), None)


@app.command(
    "why-miss",
    epilog=examples(
        "ctxcache why-miss chat-17",
        "ctxcache why-miss --request 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
)
@of_tenant
def why_miss(
    call: CliCall,
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
            call.show(
                client.admin.why_miss(tenant=call.tenant, trace_id=parsed(parse_trace, request, "--request"))
            )
        else:
            call.show(client.admin.why_miss(session_name(name), tenant=call.tenant))


@app.command("version", epilog=examples("ctxcache version", "ctxcache version --server"))
@online
def version(
    call: CliCall,
    *,
    server: Annotated[bool, typer.Option("--server", help="The server's as well, which is asked.")] = False,
) -> None:
    """Show the version of this program, and of the server."""
    number = importlib.metadata.version("ctxcache")
    facts: dict[str, Plain] = {"version": number}
    lines = [f"ctxcache {number}"]
    if server:
        with call.client() as client:
            facts["server_version"] = client.admin.stats().version
        lines.append(f"server {facts['server_version']}")
    call.show_facts(facts, "\n".join(lines))


@app.command("health", epilog=examples("ctxcache health", "ctxcache health --timeout 2 --output json"))
@online
def health(call: CliCall) -> None:
    """Say whether the server takes work, as probes ask it; exits with 6 where it does not.

    It asks without a token, and finds a server that drains, or opens, not serving.
    """
    with call.client() as client:
        is_serving = client.admin.health()
    call.show_facts({"is_serving": is_serving}, "serving" if is_serving else "not serving")
    if not is_serving:
        raise typer.Exit(ExitCode.UNAVAILABLE)
