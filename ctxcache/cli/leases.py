"""`ctxcache lease`: who keeps what in memory, and for how long already."""

from typing import Annotated

import typer

from ctxcache.cli.call import Call, online, watched
from ctxcache.cli.examples import examples
from ctxcache.errors import LeaseNotFound

app = typer.Typer(no_args_is_help=True, help="Look at leases, which keep bytes in memory, and end them.")
Id = Annotated[int, typer.Argument(metavar="LEASE", help="Its number.", min=1, show_default=False)]


@app.command(
    "list", epilog=examples("ctxcache lease list", "ctxcache lease list --tenant default --older-than 60")
)
@watched
def list_leases(
    call: Call,
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Only this one's.")] = "",
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="SECONDS", min=0, help="Only those held for longer.")
    ] = 0,
) -> None:
    """List leases, the oldest first."""
    with call.client() as client:
        found = [
            lease
            for lease in client.list_leases(tenant=tenant)
            if lease.age.ToTimedelta().total_seconds() >= older_than
        ]
    call.show_list("leases", found, None)


@app.command("show", epilog=examples("ctxcache lease show 17"))
@watched
def show_lease(call: Call, lease: Id) -> None:
    """Show one lease."""
    with call.client() as client:
        found = next((one for one in client.list_leases() if one.lease_id == lease), None)
    if found is None:
        raise LeaseNotFound(lease_id=lease)
    call.show(found)


@app.command("revoke", epilog=examples("ctxcache lease revoke 17"))
@online
def revoke_lease(call: Call, lease: Id) -> None:
    """End a lease that its reader does not give back.

    A local client is cut off, and loses all its leases and reservations: only so it knows in time that what it reads may
    become another's. A stream fails.
    """
    with call.client() as client:
        ended = client.revoke_lease(lease).ended_lease_count
    call.show_facts({"ended_lease_count": ended}, f"{ended} leases ended")
