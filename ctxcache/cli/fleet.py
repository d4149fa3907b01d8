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
from ctxcache.client import Client
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


@fleet.command("publish", epilog=examples("ctxcache fleet publish"))
@online
def publish(call: CliCall) -> None:
    """Have the bucket know of every session of this store.

    A store that was alone is asked so before others are added. Exits with 6 where the bucket does not know of
    one at the end.
    """
    with call.client() as client, _bar() as bar:
        last = _published(client, bar, has_rows=False)
    _show(call, last)


@fleet.command("leave", epilog=examples("ctxcache fleet leave"))
@online
def leave(call: CliCall) -> None:
    """Put every session of this store into the bucket, and take no more work: before it goes for good.

    The store serves until its rows are there, and drains while the last ones follow. Exits with 6 where the
    bucket lacks a session. If that was so before the drain, the store serves on.
    """
    with call.client() as client, _bar() as bar:
        last = _published(client, bar, has_rows=True)
        if not last.failed_count:
            task = bar.add_task("draining", total=None)
            for _ in client.admin.drain():
                bar.update(task)
            last = _published(client, bar, has_rows=True)
    _show(call, last)


def _bar() -> Progress:
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _published(client: Client, bar: Progress, *, has_rows: bool) -> PublishedSessions:
    last, task = PublishedSessions(), bar.add_task("publishing")
    for last in client.admin.publish_sessions(has_rows=has_rows):
        bar.update(task, total=last.session_count, completed=last.done_count)
    return last


def _show(call: CliCall, published: PublishedSessions) -> None:
    call.show(published)
    if published.failed_count:
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
    with call.client() as client, _bar() as bar:
        task = bar.add_task("collecting", total=100)
        for last in client.admin.collect_fleet(is_dry_run=dry_run, grace=least):
            bar.update(task, completed=last.done_percent)
    call.show(last)
