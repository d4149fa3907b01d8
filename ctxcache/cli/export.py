"""`ctxcache export`: sessions into a file, docs/export_format.md.

Worst case: nothing is under the file's name, and the sentence says why.
"""

import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.completion import session_names
from ctxcache.cli.examples import examples
from ctxcache.cli.names import session_name
from ctxcache.cli.transfers import PIPE, Bar, bar, no_terminal, raise_first, show_outcomes

if TYPE_CHECKING:
    from ctxcache.client import Client
    from ctxcache.portable.outcomes import Outcome

EXAMPLES = examples(
    "ctxcache export chat-17 --to chat-17.ctxexport --force",
    "ctxcache export --all --to all.ctxexport --force",
)


@online
def export(
    call: Call,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="IDs or sessions/IDs.", show_default=False, autocompletion=session_names
        ),
    ] = None,
    *,
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to; - for standard output.")],
    all_: Annotated[
        bool, typer.Option("--all", help="Every session; one that goes meanwhile is left out.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write sessions to a file that `import` reads, for this store or another.

    The file has its name when it is whole, and not before.
    """
    if bool(names) == all_:
        raise typer.BadParameter("give either names or --all")
    if to == PIPE and sys.stdout.isatty():
        raise no_terminal("standard output")
    with call.client(moves_rows=True) as client, bar() as progress:
        wanted = _wanted(client, [session_name(name) for name in names or ()], progress)
        outcomes = _export(client, wanted, to, progress, is_forced=force, skips_gone=all_)
    show_outcomes(call, to, outcomes, to_stderr=to == PIPE)
    raise_first(outcomes)


def _wanted(client: "Client", names: list[str], progress: Bar) -> list[str]:
    """Their names, each once, all where none are given. Raises SessionNotFound."""
    sessions = map(client.get_session, names) if names else client.list_sessions(page_size=1000)
    found = {session.name: session.token_count for session in sessions}
    progress.begin("exporting", sum(found.values()))
    return list(found)


def _export(
    client: "Client", names: list[str], to: str, progress: Bar, *, is_forced: bool, skips_gone: bool
) -> "list[Outcome]":
    from ctxcache.portable.exporting import Exporter  # noqa: PLC0415  numpy and grpc: --help exports nothing
    from ctxcache.portable.files import destination  # noqa: PLC0415
    from ctxcache.portable.frame_writer import FrameWriter  # noqa: PLC0415
    from ctxcache.portable.layout import FILE_ID_BYTES  # noqa: PLC0415
    from ctxcache.portable.outcomes import Status  # noqa: PLC0415

    with destination(to, is_forced=is_forced) as fd:
        writer = FrameWriter(fd, to, secrets.token_bytes(FILE_ID_BYTES), time.time_ns())
        outcomes = list(Exporter(client, writer, progress.step, skips_gone=skips_gone).export(names))
        if outcomes and all(one.status is Status.FAILED for one in outcomes):
            # A file without any of them would be in the way of the next attempt.
            raise_first(outcomes)
    return outcomes
