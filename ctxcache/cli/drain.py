"""`ctxcache drain`: a server that takes no more work, until it ends or is told otherwise.

Worst case: clients that give nothing back, or a device that refuses: it is said, again and again, until Ctrl-C.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.examples import examples

if TYPE_CHECKING:
    from ctxcache.v1.operations_pb2 import DrainStatus

EXAMPLES = examples("ctxcache drain", "ctxcache drain --no-wait", "ctxcache drain --undrain")


@online
def drain(
    call: Call,
    *,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until no client is left and all is on SSD.")
    ] = True,
    undrain: Annotated[bool, typer.Option("--undrain", help="Take work again.")] = False,
) -> None:
    """Take no more work, and write everything: before a node goes.

    Health and readiness say no at once. Ctrl-C ends the waiting, not the drain.
    """
    with call.client() as client:
        if undrain:
            client.undrain()
            call.show_facts({"is_draining": False}, "work is taken again")
            return
        last: DrainStatus | None = None
        with suppress(KeyboardInterrupt):
            for last in client.drain():
                if not wait:
                    break
                _report(last)
        if last is not None:
            _show(call, last)


def _report(status: "DrainStatus") -> None:
    """For whom waits at a terminal."""
    if sys.stderr.isatty():
        from ctxcache.cli.operation_tables import drain_line  # noqa: PLC0415  it imports rich

        sys.stderr.write(f"\r\x1b[K{drain_line(status)}" + ("\r\x1b[K" if status.is_done else ""))
        sys.stderr.flush()


def _show(call: Call, status: "DrainStatus") -> None:
    from ctxcache.cli.operation_tables import drain_line  # noqa: PLC0415  as above
    from ctxcache.cli.plain import to_plain  # noqa: PLC0415

    call.show_facts(to_plain(status), drain_line(status))
