"""`ctxcache top`: a server as it runs, looked at again and again. Asks `GetStats` and `GetActivity`, nothing else.

Worst case: the server does not answer, which is said until it does.
"""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.examples import examples
from ctxcache.cli.output import Output
from ctxcache.cli.sentences import sentence
from ctxcache.errors import Unavailable

if TYPE_CHECKING:
    from ctxcache.cli.top_rates import Look
    from ctxcache.client import Client

PIPE_WIDTH = 120
EXAMPLES = examples("ctxcache top --once", "ctxcache top --once --output json")


@online
def top(
    call: Call,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="How often to look.")
    ] = 2.0,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, and say what was since the start.")
    ] = False,
    width: Annotated[
        int | None,
        typer.Option("--width", metavar="COLUMNS", min=60, help="As if the terminal were so wide."),
    ] = None,
) -> None:
    """Show what goes on: tiers, hit rates, calls and how long they take, who is busy, what needs a look.

    Ctrl-C ends it. With --output json or yaml: one document, of what `GetStats` and `GetActivity` answer.
    """
    with call.client() as client:
        if call.output is not Output.TABLE:
            _document(call, _look(client))
        elif once:
            _print(_look(client), call.target, width)
        else:
            with suppress(KeyboardInterrupt):
                _live(client, call.target, interval, width)


def _look(client: "Client") -> "Look":
    from ctxcache.cli.top_rates import Look  # noqa: PLC0415  it imports protobuf

    return Look(client.stats(), client.activity())


def _document(call: Call, look: "Look") -> None:
    from ctxcache.cli.plain import to_plain  # noqa: PLC0415  as above

    call.show_facts({"stats": to_plain(look.stats), "activity": to_plain(look.activity)}, "")


def _print(look: "Look", target: str, width: int | None) -> None:
    from rich.console import Console  # noqa: PLC0415  --help draws nothing

    from ctxcache.cli.top_view import frame  # noqa: PLC0415  as above

    console = Console(highlight=False, width=width or (None if sys.stdout.isatty() else PIPE_WIDTH))
    console.print(frame(look, None, target, console.width))


def _live(client: "Client", target: str, interval_s: float, width: int | None) -> None:
    from rich.console import Console  # noqa: PLC0415  as above
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from ctxcache.cli.top_view import frame  # noqa: PLC0415

    console = Console(highlight=False, width=width)
    before: Look | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = _look(client)
                live.update(frame(now, before, target, console.width), refresh=True)
                before = now
            except Unavailable as error:
                live.update(Text(sentence(error), style="bold red"), refresh=True)
            time.sleep(interval_s)
