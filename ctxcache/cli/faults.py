"""`ctxcache fault`: devices made slow, made to refuse, or to give back wrong bits, on servers that were started for it."""

import enum
import errno
from typing import Annotated

import typer

from ctxcache.cli.call import Call, online, watched
from ctxcache.cli.completion import ssd_paths
from ctxcache.cli.examples import examples
from ctxcache.cli.names import parsed
from ctxcache.cli.units import parse_duration_s

app = typer.Typer(no_args_is_help=True, help="Inject faults into a server for tests.")


class Kind(enum.StrEnum):
    """What can go wrong."""

    READ_DELAY = "read-delay"
    WRITE_DELAY = "write-delay"
    READ_ERROR = "read-error"
    WRITE_ERROR = "write-error"
    BIT_FLIP = "bit-flip"
    COMMIT_DELAY = "commit-delay"

    @property
    def on_wire(self) -> str:
        """The name of the proto's FaultKind."""
        return {Kind.BIT_FLIP: "SSD_READ_BIT_FLIP", Kind.COMMIT_DELAY: "COMMIT_DELAY"}.get(
            self, f"SSD_{self.name}"
        )


DELAYS = (Kind.READ_DELAY, Kind.WRITE_DELAY, Kind.COMMIT_DELAY)
ERRORS = (Kind.READ_ERROR, Kind.WRITE_ERROR)


@app.command("list", epilog=examples("ctxcache fault list"))
@watched
def list_faults(call: Call) -> None:
    """List the faults that may strike yet."""
    with call.client() as client:
        call.show_list("faults", client.list_faults(), None)


@app.command(
    "inject",
    epilog=examples(
        "ctxcache fault inject read-delay --delay 0.05s --count 100 --duration 5min",
        "ctxcache fault inject write-error --errno ENOSPC --path /ssd", "ctxcache fault inject bit-flip",
    ),
)  # fmt: skip
@online
def inject(
    call: Call,
    kind: Annotated[Kind, typer.Argument(help="What goes wrong.", show_default=False)],
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="TIME", help="Of delays: how much longer it takes, 10s at most."),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--errno", metavar="NAME", help="Of errors: how it is refused.", show_default="EIO"),
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            "--path",
            metavar="PATH",
            help="Only on this SSD file, or the one in this directory.",
            autocompletion=ssd_paths,
            show_default="every one",
        ),
    ] = "",
    count: Annotated[int, typer.Option("--count", metavar="N", help="How often it strikes.")] = 1,
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="Until when, however seldom it has; 1h at most.")
    ] = "1min",
) -> None:
    """Let something go wrong, a number of times and for a time.

    The server refuses unless it was started with --fault-injection true, which is for tests alone.
    """
    if (delay is not None) != (kind in DELAYS):
        raise typer.BadParameter(f"{kind} {'needs' if kind in DELAYS else 'takes no'} --delay")
    if error is not None and kind not in ERRORS:
        raise typer.BadParameter(f"{kind} takes no --errno")
    with call.client() as client:
        call.show(
            client.inject_fault(
                kind.on_wire,
                count=count,
                duration_s=parsed(parse_duration_s, duration, "--duration"),
                path=path,
                delay_s=None if delay is None else parsed(parse_duration_s, delay, "--delay"),
                error_number=parsed(_error_number, error or "EIO", "--errno") if kind in ERRORS else 0,
            )
        )


@app.command("clear", epilog=examples("ctxcache fault clear"))
@online
def clear(call: Call) -> None:
    """Let no fault strike any more. A path that was fenced stays so until a restart."""
    with call.client() as client:
        count = client.clear_faults()
    call.show_facts({"cleared_fault_count": count}, f"{count} faults would have struck yet")


def _error_number(name: str) -> int:
    """Raises ValueError."""
    for number, known in errno.errorcode.items():
        if known == name.upper():
            return number
    raise ValueError(f"{name!r} is no error such as EIO or ENOSPC")
