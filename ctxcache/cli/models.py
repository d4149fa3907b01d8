"""`ctxcache model`: which models the server knows. Engines register them; nobody changes them."""

from typing import Annotated

import typer

from ctxcache.cli.call import Call, of_tenant, watched_of_tenant
from ctxcache.cli.completion import model_names
from ctxcache.cli.examples import examples
from ctxcache.cli.names import model_name

app = typer.Typer(no_args_is_help=True, help="Look at registered models.")
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="ID or models/ID.", show_default=False, autocompletion=model_names),
]


@app.command("list", epilog=examples("ctxcache model list", "ctxcache model list --output yaml"))
@watched_of_tenant
def list_models(call: Call) -> None:
    """List models by name."""
    with call.client() as client:
        call.show_list("models", client.list_models(), None)


@app.command("show", epilog=examples("ctxcache model show llama"))
@watched_of_tenant
def show_model(call: Call, name: Name) -> None:
    """Show one model."""
    with call.client() as client:
        call.show(client.get_model(model_name(name)))


@app.command("delete", epilog=examples("ctxcache model delete llama"))
@of_tenant
def delete_model(call: Call, name: Name) -> None:
    """Forget a model that no session is of."""
    target = model_name(name)
    with call.client() as client:
        client.delete_model(target)
    call.show_facts({"deleted": [target]}, f"deleted {target}")
