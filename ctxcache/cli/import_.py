"""`ctxcache import`: sessions out of an archive that `ctxcache export` wrote, into a store that runs or into a new one.

Worst case: some sessions come in and others do not. Each is reported, and none is there in part. A new store that is not
whole is none that a server starts on.
"""

import inspect
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ctxcache.archive.outcomes import OnConflict, Outcome, Status, Wishes
from ctxcache.cli.call import CONTEXT, SHARED_OPTIONS, Call, call_of
from ctxcache.cli.examples import examples
from ctxcache.cli.names import parsed
from ctxcache.cli.settings import load_settings, setting_options
from ctxcache.cli.signature import with_signature
from ctxcache.cli.transfers import PIPE, Bar, bar, counted, no_terminal, raise_first, show_outcomes
from ctxcache.cli.units import human_size, human_time, parse_duration_s
from ctxcache.errors import SessionAlreadyExists

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxcache.archive.contents import ArchivedSession
    from ctxcache.archive.laying_out import Restored
    from ctxcache.cli.plain import Plain
    from ctxcache.client import Client

EXAMPLES = examples(
    "ctxcache import chat-17.ctxarchive --on-conflict skip",
    "ctxcache import chat-17.ctxarchive --rename chat-17=chat-18 --ttl 2h",
    "ctxcache import all.ctxarchive --check",
    "ctxcache import monday.ctxarchive --new-store --data-directory /new",
)
SHOWN_SETTINGS = ("data_directory", "ssd_directories", "ssd_size_bytes")
"""Settings that --help shows; a new store may be given all others that `serve` will get."""


def import_command() -> "Callable[..., None]":
    """Return `import`, with an option for every setting beside its own."""
    own = list(inspect.signature(import_sessions).parameters.values())[2:]
    settings = setting_options(SHOWN_SETTINGS)
    names = {one.name for one in settings}

    def command(context: typer.Context, **given: Any) -> None:
        call = call_of(context, given)
        import_sessions(call, {name: given.pop(name) for name in names}, **given)

    return with_signature(
        command,
        [
            CONTEXT,
            *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own),
            *settings,
            *SHARED_OPTIONS,
        ],
        name="import",
        doc=import_sessions.__doc__,
        hints=get_type_hints(import_sessions, include_extras=True),
    )


def import_sessions(
    call: Call,
    settings: dict[str, Any],
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
    from_tenant: Annotated[
        str | None,
        typer.Option("--from-tenant", metavar="TENANT", help="Whose, of a file with those of several."),
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
    new_store: Annotated[
        bool,
        typer.Option(
            "--new-store",
            help="Make a new store of the file, for `ctxcache serve` with the same settings; asks no server.",
        ),
    ] = False,
) -> None:
    """Bring in sessions that `export` wrote: each whole, or not at all.

    A file is verified before anything of it is sent; from a pipe, sessions come in as they are verified.
    """
    wishes = Wishes(
        on_conflict=on_conflict,
        names=dict(_pair(text) for text in rename or ()),
        only=frozenset(name.removeprefix("sessions/") for name in only or ()),
        tenant=from_tenant,
        ttl_s=None if ttl is None else parsed(parse_duration_s, ttl, "--ttl"),
        keeps_pins=pins,
    )
    if file == PIPE and (check or new_store):
        raise typer.BadParameter(f"--{'check' if check else 'new-store'} needs a file")
    if new_store:
        if wishes != Wishes():
            raise typer.BadParameter("--new-store takes all of the file as it is")
        _import_store(call, file, settings, is_check=check)
        return
    if given := [name for name, value in settings.items() if value and name != "config"]:
        option = given[0].replace("_", "-")
        raise typer.BadParameter(f"--{option} goes with --new-store")
    if file == PIPE and sys.stdin.isatty():
        raise no_terminal("standard input")
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
        # Ctrl-C, above all: these sessions are there.
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


def _survey(file: str, wishes: Wishes, progress: Bar) -> "list[ArchivedSession]":
    """What of a file is wanted. Raises FileDamaged, FormatTooNew, FileUnusable, BadParameter."""
    from ctxcache.archive.files import source  # noqa: PLC0415  numpy, as below: --help imports nothing
    from ctxcache.archive.reader import survey  # noqa: PLC0415

    with source(file) as opened:
        progress.begin("verifying", opened.size_bytes)
        contents = survey(opened, lambda count: progress.step("verifying", count, count))
    sessions = [one for one, _ in contents.sessions if wishes.tenant in (None, one.model.tenant)]
    tenants = sorted({one.model.tenant for one in sessions})
    if len(tenants) > 1:
        raise typer.BadParameter(f"{file} has sessions of {', '.join(tenants)}: --from-tenant says whose")
    ids = {one.session_id for one in sessions}
    for name in (*wishes.names, *sorted(wishes.only)):
        if name not in ids:
            raise typer.BadParameter(f"{name} is not in {file}")
    wanted = [one for one in sessions if wishes.wants(one.model.tenant, one.session_id)]
    if len({wishes.target(one.session_id) for one in wanted}) < len(wanted):
        raise typer.BadParameter("--rename gives two sessions one name")
    return wanted


def _import(
    client: "Client",
    file: str,
    found: "list[ArchivedSession]",
    wishes: Wishes,
    progress: Bar,
    outcomes: list[Outcome],
) -> None:
    from ctxcache.archive.files import source  # noqa: PLC0415  as above
    from ctxcache.archive.importing import Importer, present  # noqa: PLC0415
    from ctxcache.archive.reader import ArchiveReader  # noqa: PLC0415

    if wishes.on_conflict is OnConflict.FAIL:
        for target in (wishes.target(one.session_id) for one in found):
            if present(client, target) is not None:
                raise SessionAlreadyExists(session=f"sessions/{target}")
    progress.begin("importing", sum(one.token_count for one in found) or None)
    with source(file) as opened:
        reader = ArchiveReader(opened)
        outcomes.extend(Importer(client, wishes, reader.begin_time_ns, progress.step).take(reader.sessions()))


def _import_store(call: Call, file: str, given: dict[str, Any], *, is_check: bool) -> None:
    from ctxcache.archive.files import source  # noqa: PLC0415  as above
    from ctxcache.archive.laying_out import lay_out, look  # noqa: PLC0415  it imports RocksDB
    from ctxcache.runtime.files import keep_private  # noqa: PLC0415
    from ctxcache.storage.opening import ssd_directories_of  # noqa: PLC0415

    settings = load_settings(given)
    keep_private()
    with source(file) as opened, bar() as progress:
        progress.begin("checking", opened.size_bytes)
        if is_check:
            found = look(opened, now_ns=time.time_ns(), step=progress.at)
        else:
            found = lay_out(
                opened,
                settings.data_directory,
                ssd_directories_of(settings),
                ssd_size_bytes=settings.ssd_size_bytes,
                now_ns=time.time_ns(),
                created_by=f"ctxcache {version('ctxcache')}",
                step=progress.at,
            )
    place = None if is_check else str(settings.data_directory)
    call.show_facts(_store_facts(found, place), _store_text(found, place))


def _store_facts(found: "Restored", place: str | None) -> "dict[str, Plain]":
    facts: dict[str, Plain] = asdict(found)
    created = datetime.fromtimestamp(found.create_time_ns / 10**9, UTC)
    del facts["create_time_ns"]
    return {"data_directory": place, **facts, "create_time": created.isoformat().replace("+00:00", "Z")}


def _store_text(found: "Restored", place: str | None) -> str:
    created = datetime.fromtimestamp(found.create_time_ns / 10**9, UTC)
    told = counted(found.session_count, found.token_count, found.segment_count)
    lines = [
        f"{told} ({human_size(found.segment_bytes)}) in {place or 'it'}",
        f"  as of {created:%Y-%m-%d %H:%M:%S} UTC, {human_time(created, datetime.now(UTC))}, by {found.created_by}",
    ]
    if found.expired_session_count:
        lines.append(f"  {found.expired_session_count} sessions have expired since")
    return "\n".join(lines)


def _listed(one: "ArchivedSession", wishes: Wishes) -> Outcome:
    source, target = f"sessions/{one.session_id}", f"sessions/{wishes.target(one.session_id)}"
    return Outcome(source, target, Status.WHOLE, one.token_count, one.size_bytes)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise typer.BadParameter(f"--rename: {text!r} is not OLD=NEW")
    return old.removeprefix("sessions/"), new.removeprefix("sessions/")
