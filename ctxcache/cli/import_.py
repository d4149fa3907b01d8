"""`ctxcache import`: sessions out of a file that `ctxcache export` wrote.

Worst case: some come in and others do not; each is told, and none is there in part.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.examples import examples
from ctxcache.cli.names import parsed
from ctxcache.cli.transfers import PIPE, Bar, bar, no_terminal, raise_first, show_outcomes
from ctxcache.cli.units import parse_duration_s
from ctxcache.errors import SessionAlreadyExists
from ctxcache.portable.outcomes import Outcome, Status
from ctxcache.portable.wishes import OnConflict, Wishes

if TYPE_CHECKING:
    from ctxcache.client import Client
    from ctxcache.portable.session_reader import Found

EXAMPLES = examples(
    "ctxcache import chat-17.ctxexport --on-conflict skip",
    "ctxcache import chat-17.ctxexport --rename chat-17=chat-18 --ttl 2h",
    "ctxcache import all.ctxexport --check",
)


@online
def import_sessions(
    call: Call,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="From where; - for standard input.", show_default=False)
    ],
    on_conflict: Annotated[
        OnConflict, typer.Option("--on-conflict", help="What to do where a session of that name is there.")
    ] = OnConflict.FAIL,
    rename: Annotated[
        list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="Import one by another name.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this one; repeat for more.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="How long all of them live after an access: 2h, 7d."),
    ] = None,
    *,
    pins: Annotated[bool, typer.Option("--pins", help="Pin those that were pinned; for operators.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Verify the file and list what is in it; asks no server.")
    ] = False,
) -> None:
    """Bring in sessions that `export` wrote: each whole, or not at all.

    A file is verified before anything of it is sent; what comes by a pipe is as it comes.
    """
    if file == PIPE and check:
        raise typer.BadParameter("--check needs a file")
    if file == PIPE and sys.stdin.isatty():
        raise no_terminal("standard input")
    wishes = Wishes(
        on_conflict=on_conflict,
        names=dict(_pair(text) for text in rename or ()),
        only=frozenset(name.removeprefix("sessions/") for name in only or ()),
        ttl_s=None if ttl is None else parsed(parse_duration_s, ttl, "--ttl"),
        keeps_pins=pins,
    )
    outcomes: list[Outcome] = []
    try:
        with bar() as progress:
            found = [] if file == PIPE else _survey(file, wishes, progress)
            if check:
                outcomes = [_listed(one, wishes) for one in found]
            else:
                with call.client(moves_rows=True) as client:
                    _import(client, file, found, wishes, progress, outcomes)
    except BaseException:
        # Ctrl-C, above all: these are there.
        if outcomes:
            show_outcomes(call, file, outcomes)
        raise
    tried = {one.session for one in outcomes}
    rest = (one for one in found if f"sessions/{one.session_id}" not in tried)
    outcomes += [
        replace(_listed(one, wishes), status=Status.UNTRIED, token_count=0, size_bytes=0) for one in rest
    ]
    show_outcomes(call, file, outcomes)
    raise_first(outcomes)


def _survey(file: str, wishes: Wishes, progress: Bar) -> "list[Found]":
    """What of a file is wanted. Raises FileDamaged, FormatTooNew, FileUnusable, BadParameter."""
    from ctxcache.portable.files import source  # noqa: PLC0415  numpy, as below: --help imports nothing
    from ctxcache.portable.session_reader import survey  # noqa: PLC0415

    with source(file) as opened:
        progress.begin("verifying", opened.size_bytes)
        found = survey(opened, lambda count: progress.step("verifying", count, count))
    ids = {one.session_id for one in found}
    for name in (*wishes.names, *sorted(wishes.only)):
        if name not in ids:
            raise typer.BadParameter(f"{name} is not in {file}")
    wanted = [one for one in found if wishes.wants(one.session_id)]
    if len({wishes.target(one.session_id) for one in wanted}) < len(wanted):
        raise typer.BadParameter("--rename gives two sessions one name")
    return wanted


def _import(
    client: "Client", file: str, found: "list[Found]", wishes: Wishes, progress: Bar, outcomes: list[Outcome]
) -> None:
    from ctxcache.portable.files import source  # noqa: PLC0415  as above
    from ctxcache.portable.importing import Importer, present  # noqa: PLC0415
    from ctxcache.portable.session_reader import SessionReader  # noqa: PLC0415

    if wishes.on_conflict is OnConflict.FAIL:
        for target in (wishes.target(one.session_id) for one in found):
            if present(client, target) is not None:
                raise SessionAlreadyExists(session=f"sessions/{target}")
    progress.begin("importing", sum(one.token_count for one in found) or None)
    with source(file) as opened:
        reader = SessionReader(opened)
        outcomes.extend(Importer(client, wishes, reader.begin_time_ns, progress.step).take(reader.sessions()))


def _listed(one: "Found", wishes: Wishes) -> Outcome:
    source, target = f"sessions/{one.session_id}", f"sessions/{wishes.target(one.session_id)}"
    return Outcome(source, target, Status.WHOLE, one.token_count, one.size_bytes)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise typer.BadParameter(f"--rename: {text!r} is not OLD=NEW")
    return old.removeprefix("sessions/"), new.removeprefix("sessions/")
