"""`ctxcache tier`: where bytes lie, how full and how well it is, and SSD paths taken out of use and back."""

from typing import Annotated

import typer

from ctxcache.cli.call import Call, online, watched
from ctxcache.cli.completion import ssd_paths
from ctxcache.cli.examples import examples

app = typer.Typer(no_args_is_help=True, help="Look at tiers, and take SSD paths out of use.")
Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="An SSD file or its directory.", show_default=False, autocompletion=ssd_paths
    ),
]


@app.command("list", epilog=examples("ctxcache tier list", "ctxcache tier list --output yaml"))
@watched
def list_tiers(call: Call) -> None:
    """List the arena and every SSD path: how full, how fragmented, and whether it takes writes."""
    with call.client() as client:
        call.show_list("paths", client.stats().tiers, None)


@app.command("show", epilog=examples("ctxcache tier show /ssd"))
@watched
def show_tier(call: Call, path: Path) -> None:
    """Show one place."""
    with call.client() as client:
        tiers = list(client.stats().tiers)
    found = next((tier for tier in tiers if path in (tier.path, tier.path.rpartition("/")[0])), None)
    if found is None:
        raise typer.BadParameter(
            f"{path!r} is none of {', '.join(tier.path for tier in tiers)}", param_hint="PATH"
        )
    call.show(found)


@app.command("rest", epilog=examples("ctxcache tier rest /ssd"))
@online
def rest_path(call: Call, path: Path) -> None:
    """Write nothing more to an SSD path; what lies there is read as before. A restart takes it back."""
    with call.client() as client:
        call.show(client.update_path(path, resting=True))


@app.command("open", epilog=examples("ctxcache tier open /ssd"))
@online
def open_path(call: Call, path: Path) -> None:
    """Write to an SSD path again that was taken out of use."""
    with call.client() as client:
        call.show(client.update_path(path, resting=False))
