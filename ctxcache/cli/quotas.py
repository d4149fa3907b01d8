"""`ctxcache quota`: what tenants have, and what is their share of it."""

from typing import Annotated

import typer

from ctxcache.cli.call import Call, online, watched
from ctxcache.cli.completion import tenant_names
from ctxcache.cli.examples import examples

app = typer.Typer(no_args_is_help=True, help="Look at tenants' shares and change them.")


@app.command("list", epilog=examples("ctxcache quota list", "ctxcache quota list --output json"))
@watched
def list_quotas(call: Call) -> None:
    """Show what each tenant has, and what is its share."""
    with call.client() as client:
        call.show_list("tenants", client.list_tenants(), None)


@app.command("set", epilog=examples("ctxcache quota set default --share 0.25 --limit 0.75"))
@online
def set_quota(
    call: Call,
    tenant: Annotated[
        str,
        typer.Argument(
            metavar="TENANT", help="One that has a share.", show_default=False, autocompletion=tenant_names
        ),
    ],
    share: Annotated[
        float | None,
        typer.Option("--share", metavar="PART", min=0, max=1, help="What others' need does not touch."),
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="PART", min=0, max=1, help="The most of SSD it keeps.")
    ] = None,
) -> None:
    """Change a tenant's share, until settings are read again: `tenant_shares` is where it lasts."""
    if share is None and limit is None:
        raise typer.BadParameter("give --share or --limit")
    with call.client() as client:
        call.show(client.update_tenant(tenant, guaranteed=share, limit=limit))
