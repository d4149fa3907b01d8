"""`ctxcache export` and `import`: sessions into an archive and out of it, docs/archive_format.md.

Worst case of an export: there is no file of that name, and the sentence says why. Worst case of an import:
some sessions come in and others do not. Each is reported, the first failure gives the sentence and the exit
code, and no session is there in part. A server does not start on a new store that is not whole.
"""

import inspect
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ctxcache.archive.contents import ArchivedSession, ArchiveOutcome, ArchiveStatus, ImportWishes, OnConflict
from ctxcache.archive.frames import FILE_ID_BYTES, FrameWriter, destination, source
from ctxcache.archive.laying_out import Restored, lay_out, look
from ctxcache.archive.reader import ArchiveReader, survey
from ctxcache.archive.transfer import Exporter, Importer, present, receive
from ctxcache.cli.call import CliCall, call_of, online, session_names
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.options import CONTEXT, SHARED_OPTIONS, with_signature
from ctxcache.cli.settings import load_settings, setting_options
from ctxcache.cli.units import counted, human_size, human_time, parsed, session_name
from ctxcache.client import Client
from ctxcache.client.types import BackupPart
from ctxcache.errors import CacheError, SessionAlreadyExists
from ctxcache.runtime.files import keep_private
from ctxcache.settings.knobs.knob import parse_duration_s, parse_size_bytes
from ctxcache.storage.opening import ssd_directories_of

PIPE = "-"
app = typer.Typer()


class Bar:
    """A bar of one task after the other; draws nothing where standard error is no terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._size_bytes = 0

    def begin(self, what: str, total: int | None) -> None:
        """Begin a task of so many steps; None where that is not known."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task, self._size_bytes = self._bars.add_task(what, total=total, size=""), 0

    def step(self, name: str, count: int, size_bytes: int) -> None:
        """Count so many steps more, which moved so many bytes."""
        self._size_bytes += size_bytes
        if self._task is not None:
            self._bars.update(self._task, description=name, advance=count, size=human_size(self._size_bytes))

    def at(self, what: str, done: int, total: int) -> None:
        """Show that a task is at `done` of `total`."""
        if self._task is not None:
            self._bars.update(self._task, description=what, completed=min(done, total), total=total)


@contextmanager
def bar() -> Iterator[Bar]:
    """Draw on standard error, if that is a terminal, until the block ends."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bars:
        yield Bar(bars)


def show_outcomes(
    call: CliCall, path: str, outcomes: Sequence[ArchiveOutcome], *, to_stderr: bool = False
) -> None:
    """Print the outcome of each session."""
    sessions: list[Plain] = [_plain(one) for one in outcomes if one.session]
    text = "\n".join([*(_line(one) for one in outcomes if one.session), _sum(path, outcomes)])
    call.show_facts({"file": path, "sessions": sessions}, text, to_stderr=to_stderr)


def raise_first(outcomes: Sequence[ArchiveOutcome]) -> None:
    """Raise the first failure, and tell how many there are."""
    failed = [outcome for outcome in outcomes if outcome.status is ArchiveStatus.FAILED]
    # The exit code is that of one failure, so that the first one gives it. The list shows all of them.
    if not failed:
        return
    # A failure of the file itself stands in no session's line.
    first = next((outcome for outcome in failed if not outcome.session), failed[0])
    error = first.error
    if error is None or len(outcomes) == 1 or not first.session:
        raise error or CacheError()
    untried = sum(outcome.status is ArchiveStatus.UNTRIED for outcome in outcomes)
    rest = f", {untried} were not tried" if untried else ""
    told = f"{len(failed)} of {len(outcomes)} sessions failed{rest}; {first.session}"
    raise type(error)(f"{told}: {error}")


def contents_text(session_count: int, token_count: int, segment_count: int) -> str:
    """The contents of a backup, for people."""
    sessions = counted(session_count, "session")
    return f"{sessions} with {counted(token_count, 'token')} in {counted(segment_count, 'segment')}"


def no_terminal(stream_name: str) -> typer.BadParameter:
    """The error for a terminal in the place of a pipe."""
    return typer.BadParameter(f"{stream_name} is a terminal: give a file, or a pipe")


def _plain(outcome: ArchiveOutcome) -> Plain:
    return {
        "session": outcome.session,
        "target": outcome.target,
        "status": outcome.status,
        "token_count": outcome.token_count,
        "size_bytes": outcome.size_bytes,
        "reason": outcome.error.reason if outcome.error else "",
        "problem": " ".join(str(outcome.error).split()) if outcome.error else "",
    }


def _line(outcome: ArchiveOutcome) -> str:
    name = outcome.session if outcome.target == outcome.session else f"{outcome.session} as {outcome.target}"
    if outcome.error:
        return f"{outcome.status:9} {name}: {' '.join(str(outcome.error).split())} ({outcome.error.reason})"
    tokens = counted(outcome.token_count, "token")
    return f"{outcome.status:9} {name}: {tokens}, {human_size(outcome.size_bytes)}"


def _sum(path: str, outcomes: Sequence[ArchiveOutcome]) -> str:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.session:
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
    size = human_size(sum(outcome.size_bytes for outcome in outcomes))
    told = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no sessions"
    return f"{path}: {told}, {size}"


@app.command(
    "export",
    epilog=examples(
        "ctxcache export chat-17 --to chat-17.ctxarchive --force",
        "ctxcache export --all --to all.ctxarchive --force",
        "ctxcache export --store --to monday.ctxarchive --rate-limit 100MiB",
    ),
)
@online
def export(
    call: CliCall,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="IDs or sessions/IDs.", show_default=False, autocompletion=session_names
        ),
    ] = None,
    *,
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to; - for standard output.")],
    all_: Annotated[
        bool, typer.Option("--all", help="Every session of yours; one that goes meanwhile is left out.")
    ] = False,
    store: Annotated[
        bool, typer.Option("--store", help="A backup: what SSD has, of all tenants; for operators.")
    ] = False,
    rate_limit: Annotated[
        str,
        typer.Option("--rate-limit", metavar="SIZE", help="With --store: most bytes a second, as 100MiB."),
    ] = "0",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write sessions to a file that `import` reads, for this store or another.

    The file has its name when it is whole, and not before. With --store, exits with 4 when sessions changed
    too fast to be copied; the others are in the file.
    """
    if bool(names) + all_ + store != 1:
        raise typer.BadParameter("give names, or --all, or --store")
    rate = parsed(parse_size_bytes, rate_limit, "--rate-limit")
    if rate and not store:
        raise typer.BadParameter("--rate-limit goes with --store")
    if to == PIPE and sys.stdout.isatty():
        raise no_terminal("standard output")
    if store:
        _export_store(call, to, rate, is_forced=force)
        return
    with call.client(moves_rows=True) as client, bar() as progress:
        wanted = _wanted(client, [session_name(name) for name in names or ()], progress)
        outcomes = _export(client, wanted, to, progress, is_forced=force, skips_gone=all_)
    show_outcomes(call, to, outcomes, to_stderr=to == PIPE)
    raise_first(outcomes)


def _wanted(client: Client, names: list[str], progress: Bar) -> list[str]:
    """Names of the wanted sessions, each once; all where none are given. Raises SessionNotFound."""
    sessions = map(client.sessions.get, names) if names else client.sessions.list(page_size=1000)
    found = {session.name: session.token_count for session in sessions}
    progress.begin("exporting", sum(found.values()))
    return list(found)


def _export(
    client: Client, names: list[str], to: str, progress: Bar, *, is_forced: bool, skips_gone: bool
) -> list[ArchiveOutcome]:
    with destination(to, is_forced=is_forced) as fd:
        writer = FrameWriter(fd, to, secrets.token_bytes(FILE_ID_BYTES), time.time_ns())
        outcomes = list(Exporter(client, writer, progress.step, skips_gone=skips_gone).export(names))
        if outcomes and all(one.status is ArchiveStatus.FAILED for one in outcomes):
            # A file without sessions would be in the way of the next attempt.
            raise_first(outcomes)
    return outcomes


def _export_store(call: CliCall, to: str, rate: int, *, is_forced: bool) -> None:
    began_s = time.monotonic()
    with call.client() as client, bar() as progress, destination(to, is_forced=is_forced) as fd:
        progress.begin("exporting", None)
        answers = _Answers(client.admin.backup(bytes_per_second=rate), progress.at)
        size_bytes = receive(answers, fd, to)
    facts: dict[str, Plain] = {
        "file": to,
        "size_bytes": size_bytes,
        "duration_s": round(time.monotonic() - began_s, 3),
        **answers.counts(),
    }
    call.show_facts(facts, _store_text(facts), to_stderr=to == PIPE)
    if facts["left_out_session_count"]:
        raise typer.Exit(ExitCode.CONFLICT)


class _Answers(Iterable[bytes]):
    """A backup's bytes as they come. It keeps the counts of the last answer."""

    def __init__(self, answers: Iterable[BackupPart], at: Callable[[str, int, int], None]) -> None:
        self._answers, self._at = answers, at
        self._last: BackupPart | None = None

    def __iter__(self) -> Iterator[bytes]:
        for answer in self._answers:
            yield answer.data
            self._at("exporting", answer.copied_bytes, answer.total_bytes)
            self._last = replace(answer, data=b"")

    def counts(self) -> dict[str, int]:
        """The counts of the whole backup."""
        names = ("session", "segment", "token", "unwritten_token", "left_out_session")
        return {f"{name}_count": int(getattr(self._last, f"{name}_count", 0)) for name in names}


def _store_text(facts: dict[str, Plain]) -> str:
    size, duration_s = int(str(facts["size_bytes"])), float(str(facts["duration_s"]))
    counts = (int(str(facts[f"{name}_count"])) for name in ("session", "token", "segment"))
    rate = human_size(size / max(duration_s, 0.001))
    lines = [contents_text(*counts), f"  {facts['file']}: {human_size(size)} in {duration_s:.1f} s, {rate}/s"]
    if facts["unwritten_token_count"]:
        lines.append(f"  {facts['unwritten_token_count']} tokens that only memory had are not in it")
    if facts["left_out_session_count"]:
        lines.append(f"  {facts['left_out_session_count']} sessions changed too fast and are not in it")
    return "\n".join(lines)


SHOWN_SETTINGS = ("data_directory", "ssd_directories", "ssd_size_bytes")
"""Settings that --help shows; a new store may be given all others that `serve` will get."""


# Two passes over a file, one over a pipe:
#
#     file   verify all of it ──► names and conflicts looked at ──► read again, imported
#     pipe   imported as it is verified: what came before a damage is there
def import_sessions(
    call: CliCall,
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
    wishes = ImportWishes(
        on_conflict=on_conflict,
        names=dict(_pair(text) for text in rename or ()),
        only=frozenset(name.removeprefix("sessions/") for name in only or ()),
        tenant=from_tenant,
        ttl_s=None if ttl is None else parsed(parse_duration_s, ttl, "--ttl"),
        keeps_pins=pins,
    )
    # A pipe cannot be read twice.
    if file == PIPE and (check or new_store):
        raise typer.BadParameter(f"--{'check' if check else 'new-store'} needs a file")
    if new_store:
        if wishes != ImportWishes():
            raise typer.BadParameter("--new-store takes all of the file as it is")
        _import_store(call, file, settings, is_check=check)
        return
    if given := [name for name, value in settings.items() if value and name != "config"]:
        option = given[0].replace("_", "-")
        raise typer.BadParameter(f"--{option} goes with --new-store")
    if file == PIPE and sys.stdin.isatty():
        raise no_terminal("standard input")
    outcomes: list[ArchiveOutcome] = []
    try:
        with bar() as progress:
            sessions = [] if file == PIPE else _survey(file, wishes, progress)
            if check:
                outcomes = [_listed(session, wishes) for session in sessions]
            else:
                with call.client(moves_rows=True) as client:
                    _import(client, file, sessions, wishes, progress, outcomes)
    except BaseException:
        # On Ctrl-C, above all, these sessions are there.
        if outcomes:
            show_outcomes(call, file, outcomes)
        raise
    # An error that ends all leaves sessions of the file untried.
    tried = {outcome.session for outcome in outcomes}
    rest = (session for session in sessions if f"sessions/{session.session_id}" not in tried)
    outcomes += [
        replace(_listed(session, wishes), status=ArchiveStatus.UNTRIED, token_count=0, size_bytes=0)
        for session in rest
    ]
    show_outcomes(call, file, outcomes)
    raise_first(outcomes)


def _survey(file: str, wishes: ImportWishes, progress: Bar) -> list[ArchivedSession]:
    """The wanted sessions of a file. Raises FileDamaged, FormatTooNew, FileUnusable, BadParameter."""
    with source(file) as opened:
        progress.begin("verifying", opened.size_bytes)
        contents = survey(opened, lambda count: progress.step("verifying", count, count))
    sessions = [session for session, _ in contents.sessions if wishes.tenant in (None, session.model.tenant)]
    tenants = sorted({session.model.tenant for session in sessions})
    if len(tenants) > 1:
        raise typer.BadParameter(f"{file} has sessions of {', '.join(tenants)}: --from-tenant says whose")
    ids = {session.session_id for session in sessions}
    for name in (*wishes.names, *sorted(wishes.only)):
        if name not in ids:
            raise typer.BadParameter(f"{name} is not in {file}")
    wanted = [session for session in sessions if wishes.wants(session.model.tenant, session.session_id)]
    if len({wishes.target(session.session_id) for session in wanted}) < len(wanted):
        raise typer.BadParameter("--rename gives two sessions one name")
    return wanted


def _import(
    client: Client,
    file: str,
    sessions: list[ArchivedSession],
    wishes: ImportWishes,
    progress: Bar,
    outcomes: list[ArchiveOutcome],
) -> None:
    # `fail` changes nothing where one name is taken, so that names are checked before the first import.
    if wishes.on_conflict is OnConflict.FAIL:
        for target in (wishes.target(session.session_id) for session in sessions):
            if present(client, target) is not None:
                raise SessionAlreadyExists(session=f"sessions/{target}")
    progress.begin("importing", sum(session.token_count for session in sessions) or None)
    with source(file) as opened:
        reader = ArchiveReader(opened)
        # `extend` takes outcomes one by one: those before an error are in the list when it is raised.
        outcomes.extend(Importer(client, wishes, reader.begin_time_ns, progress.step).take(reader.sessions()))


def _import_store(call: CliCall, file: str, given: dict[str, Any], *, is_check: bool) -> None:
    settings = load_settings(given)
    keep_private()
    with source(file) as opened, bar() as progress:
        progress.begin("checking", opened.size_bytes)
        if is_check:
            store = look(opened, now_ns=time.time_ns(), step=progress.at)
        else:
            store = lay_out(
                opened,
                settings.data_directory,
                ssd_directories_of(settings),
                ssd_size_bytes=settings.ssd_size_bytes,
                now_ns=time.time_ns(),
                created_by=f"ctxcache {version('ctxcache')}",
                step=progress.at,
            )
    place = None if is_check else str(settings.data_directory)
    call.show_facts(_new_store_facts(store, place), _new_store_text(store, place))


def _new_store_facts(found: Restored, place: str | None) -> dict[str, Plain]:
    facts: dict[str, Plain] = asdict(found)
    created = datetime.fromtimestamp(found.create_time_ns / 10**9, UTC)
    del facts["create_time_ns"]
    return {"data_directory": place, **facts, "create_time": created.isoformat().replace("+00:00", "Z")}


def _new_store_text(store: Restored, place: str | None) -> str:
    created = datetime.fromtimestamp(store.create_time_ns / 10**9, UTC)
    told = contents_text(store.session_count, store.token_count, store.segment_count)
    lines = [
        f"{told} ({human_size(store.segment_bytes)}) in {place or 'it'}",
        (
            f"  as of {created:%Y-%m-%d %H:%M:%S} UTC, {human_time(created, datetime.now(UTC))}, by "
            f"{store.created_by}"
        ),
    ]
    if store.expired_session_count:
        lines.append(f"  {store.expired_session_count} sessions have expired since")
    return "\n".join(lines)


def _listed(one: ArchivedSession, wishes: ImportWishes) -> ArchiveOutcome:
    source, target = f"sessions/{one.session_id}", f"sessions/{wishes.target(one.session_id)}"
    return ArchiveOutcome(source, target, ArchiveStatus.WHOLE, one.token_count, one.size_bytes)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise typer.BadParameter(f"--rename: {text!r} is not OLD=NEW")
    return old.removeprefix("sessions/"), new.removeprefix("sessions/")


def _import_command() -> Callable[..., None]:
    """`import`, with an option for every setting beside its own."""
    own = list(inspect.signature(import_sessions).parameters.values())[2:]
    settings = setting_options(SHOWN_SETTINGS)
    names = {setting.name for setting in settings}

    def command(context: typer.Context, **given: Any) -> None:
        call = call_of(context, given)
        import_sessions(call, {name: given.pop(name) for name in names}, **given)

    return with_signature(
        command,
        [
            CONTEXT,
            *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own),
            *settings,
            *SHARED_OPTIONS,
        ],
        name="import",
        doc=import_sessions.__doc__,
        hints=get_type_hints(import_sessions, include_extras=True),
    )


app.command(
    "import",
    epilog=examples(
        "ctxcache import chat-17.ctxarchive --on-conflict skip",
        "ctxcache import chat-17.ctxarchive --rename chat-17=chat-18 --ttl 2h",
        "ctxcache import all.ctxarchive --check",
        "ctxcache import monday.ctxarchive --new-store --data-directory /new",
    ),
)(_import_command())
