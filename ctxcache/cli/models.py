"""`ctxcache model`: which models the server knows. Engines register them; nobody changes them."""

from typing import Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.names import model_name

app = typer.Typer(no_args_is_help=True, help="Look at registered models.")


@app.command("list")
@online
def list_models(call: Call) -> None:
    """List models by name."""
    with call.client() as client:
        call.show_list("models", client.list_models(), None)


@app.command("show")
@online
def show_model(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME", help="ID or models/ID.", show_default=False)],
) -> None:
    """Show one model."""
    with call.client() as client:
        call.show(client.get_model(model_name(name)))
