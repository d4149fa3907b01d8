"""`ctxcache hint`: what engines say to the server, said by hand, and what they have said."""

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, of_tenant, watched
from ctxcache.cli.completion import session_names
from ctxcache.cli.examples import examples
from ctxcache.cli.names import parsed, session_name
from ctxcache.cli.units import parse_duration_s

if TYPE_CHECKING:
    from ctxcache.client import Client
    from ctxcache.v1.hints_pb2 import HintResult

app = typer.Typer(no_args_is_help=True, help="Give hints, and look at engines' queues.")


class Hint(enum.StrEnum):
    """What can be said of a session."""

    SHARE = "share"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    PIN = "pin"
    RETAIN = "retain"
    RELEASE = "release"
    EXPECT = "expect"


TTL_KINDS = (Hint.PIN, Hint.RETAIN)


@app.command(
    "send",
    epilog=examples(
        "ctxcache hint send prefetch chat-17", "ctxcache hint send pin chat-17 --ttl 10min",
        "ctxcache hint send expect chat-17 --ttl 5min",
    ),
)  # fmt: skip
@of_tenant
def send_hint(
    call: Call,
    kind: Annotated[Hint, typer.Argument(help="What to say.", show_default=False)],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="ID or sessions/ID.", show_default=False, autocompletion=session_names
        ),
    ],
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="For how long; `expect`: when it returns.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=0, help="Of `share`, `prefetch`: the first N.")
    ] = None,
) -> None:
    """Say what is to come of a session. The server may take less, or nothing: it answers what came of it."""
    if kind in TTL_KINDS and ttl is None:
        raise typer.BadParameter(f"{kind} needs --ttl")
    ttl_s = None if ttl is None else parsed(parse_duration_s, ttl, "--ttl")
    with call.client() as client:
        call.show_list("hints", [_send(client, kind, session_name(name), ttl_s, tokens)], None)


@app.command("queues", epilog=examples("ctxcache hint queues"))
@watched
def list_queues(call: Call) -> None:
    """List the engines that say what waits."""
    with call.client() as client:
        call.show_list("engines", client.list_engines(), None)


def _send(client: "Client", kind: Hint, name: str, ttl_s: float | None, tokens: int | None) -> "HintResult":
    sent = {
        Hint.SHARE: lambda: client.share(name, token_count=tokens),
        Hint.PREFETCH: lambda: client.prefetch(name, token_count=tokens, ttl_s=ttl_s),
        Hint.DEMOTE: lambda: client.demote(name),
        Hint.PIN: lambda: client.pin(name, ttl_s=ttl_s or 0),
        Hint.RETAIN: lambda: client.retain(name, ttl_s=ttl_s or 0),
        Hint.RELEASE: lambda: client.release(name),
        Hint.EXPECT: lambda: client.expect(name, ttl_s),
    }
    return sent[kind]()
