"""`ctxcache fleet`: the stores of a fleet, as one of them sees it. Nothing here changes anything."""

import typer

from ctxcache.cli.call import CliCall, watched
from ctxcache.cli.documents import examples

app = typer.Typer()
fleet = typer.Typer(no_args_is_help=True, help="Look at the stores of a fleet.")
app.add_typer(fleet, name="fleet")


@fleet.command("status", epilog=examples("ctxcache fleet status", "ctxcache fleet status --output json"))
@watched
def status(call: CliCall) -> None:
    """Show this store's place in its fleet, and the others: who answers, and what moved since it started."""
    with call.client() as client:
        call.show(client.admin.fleet())
