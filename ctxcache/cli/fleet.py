"""`ctxcache fleet`: the stores of a fleet, as one of them sees it, and what their bucket has."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ctxcache.cli.call import CliCall, online, watched
from ctxcache.cli.documents import examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.units import parse_span, parsed
from ctxcache.client.types import CollectedFleet, PublishedSessions

app = typer.Typer()
fleet = typer.Typer(no_args_is_help=True, help="Look at the stores of a fleet, and tidy up their bucket.")
app.add_typer(fleet, name="fleet")


@fleet.command("status", epilog=examples("ctxcache fleet status", "ctxcache fleet status --output json"))
@watched
def status(call: CliCall) -> None:
    """Show this store's place in its fleet, and the others: who answers, and what moved since it started."""
    with call.client() as client:
        call.show(client.admin.fleet())


@fleet.command("publish", epilog=examples("ctxcache fleet publish", "ctxcache fleet publish --rows"))
@online
def publish(
    call: CliCall,
    *,
    rows: Annotated[
        bool, typer.Option("--rows", help="Put their rows into the bucket, too: the store may go then.")
    ] = False,
) -> None:
    """Have the bucket know of every session of this store.

    A store that was alone is asked so before others are added. Exits with 6 where the bucket does not know of
    one at the end.
    """
    last = PublishedSessions()
    with (
        call.client() as client,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar,
    ):
        task = bar.add_task("publishing")
        for last in client.admin.publish_sessions(has_rows=rows):
            bar.update(task, total=last.session_count, completed=last.done_count)
    call.show(last)
    if last.failed_count:
        raise typer.Exit(ExitCode.UNAVAILABLE)


@fleet.command(
    "collect", epilog=examples("ctxcache fleet collect --dry-run", "ctxcache fleet collect --grace 6h")
)
@online
def collect(
    call: CliCall,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="SPAN", help="Leave alone what is younger; an hour at least.")
    ] = "24h",
) -> None:
    """Remove from the bucket what no session names, and sessions that have expired with a lost host.

    Each day one store of the fleet does so unasked.
    """
    last, least = CollectedFleet(), parsed(parse_span, grace, "--grace")
    with (
        call.client() as client,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar,
    ):
        task = bar.add_task("collecting", total=100)
        for last in client.admin.collect_fleet(is_dry_run=dry_run, grace=least):
            bar.update(task, completed=last.done_percent)
    call.show(last)
