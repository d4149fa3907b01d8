"""`ctxcache backup`, of a running server into a file, and `ctxcache restore`, of such a file into new directories.

Worst case: one of them ends in the middle, which leaves no file and no directory that passes for whole.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxcache.cli.call import CONTEXT, Call, OutputOption, call_of, online
from ctxcache.cli.examples import examples
from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.names import parse_size_bytes, parsed
from ctxcache.cli.settings import load_settings, setting_options
from ctxcache.cli.signature import option, with_signature
from ctxcache.cli.units import human_size, human_time
from ctxcache.privacy import keep_private

if TYPE_CHECKING:
    from ctxcache.backup.laying_out import Restored
    from ctxcache.cli.plain import Plain
    from ctxcache.v1.operations_pb2 import BackupResponse

BACKUP_EXAMPLES = examples("ctxcache backup monday.ctxbackup --rate-limit 100MiB")
RESTORE_EXAMPLES = examples(
    "ctxcache restore monday.ctxbackup --dry-run", "ctxcache restore monday.ctxbackup --data-directory /new"
)
_FILE = Annotated[Path, typer.Argument(metavar="FILE", help="A backup.", show_default=False)]
_DRY_RUN = Annotated[
    bool | None, typer.Option("--dry-run", help="Verify it and say what is in it; write nothing.")
]


@online
def backup(
    call: Call,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file that is not there yet.", show_default=False)
    ],
    rate_limit: Annotated[
        str, typer.Option("--rate-limit", metavar="SIZE", help="Most bytes a second, such as 100MiB.")
    ] = "0",
) -> None:
    """Copy all sessions of a running store, as its SSD has them, into one file that `ctxcache restore` reads.

    Others go on meanwhile. `export` is for some sessions, into a store that runs; this is for all of a store.
    Exits with 4 when sessions changed too fast to be copied; the others are in the file.
    """
    from ctxcache.backup.receiving import receive  # noqa: PLC0415  --help reads no archives

    rate = parsed(parse_size_bytes, rate_limit, "--rate-limit")
    began_s = time.monotonic()
    with call.client() as client, _progress() as step:
        answers = _Answers(client.backup(bytes_per_second=rate), step)
        size_bytes = receive(answers, file)
    facts: dict[str, Plain] = {
        "file": str(file),
        "size_bytes": size_bytes,
        "duration_s": round(time.monotonic() - began_s, 3),
        **answers.facts(),
    }
    call.show_facts(facts, _backup_text(facts))
    if facts["left_out_session_count"]:
        raise typer.Exit(ExitCode.CONFLICT)


def restore_command() -> Callable[..., None]:
    """Return `restore` with an option for every setting."""
    file = inspect.Parameter("file", inspect.Parameter.KEYWORD_ONLY, annotation=_FILE)
    parameters = [CONTEXT, file, option("dry_run", _DRY_RUN), *setting_options()]
    parameters.append(option("output", OutputOption))
    return with_signature(restore, parameters, name="restore", doc=restore.__doc__)


def restore(context: typer.Context, **given: Any) -> None:
    """Make a new store of a backup: a data directory that was not there, for `ctxcache serve` with the same options.

    No server is asked. What it was killed at it begins anew, in the same directory. (Workers restore an engine's
    cache, of one session; this brings back a whole store's files.)
    """
    from ctxcache.backup.laying_out import lay_out, look  # noqa: PLC0415  it imports RocksDB
    from ctxcache.storage import ssd_directories_of  # noqa: PLC0415  as above

    archive: Path = given.pop("file")
    is_dry_run = bool(given.pop("dry_run"))
    settings = load_settings(given)
    call = call_of(context, given)
    keep_private()
    with _progress() as step:
        if is_dry_run:
            found = look(archive, now_ns=time.time_ns(), step=step)
        else:
            found = lay_out(
                archive, settings.data_directory, ssd_directories_of(settings),
                ssd_size_bytes=settings.ssd_size_bytes, now_ns=time.time_ns(),
                created_by=f"ctxcache {version('ctxcache')}", step=step,
            )  # fmt: skip
    place = None if is_dry_run else str(settings.data_directory)
    call.show_facts(_restore_facts(found, place), _restore_text(found, place))


class _Answers(Iterable[bytes]):
    """A backup's bytes as they come; what was said of it last is kept."""

    def __init__(self, answers: "Iterable[BackupResponse]", step: Callable[[str, int, int], None]) -> None:
        self._answers, self._step = answers, step
        self._last: BackupResponse | None = None

    def __iter__(self) -> Iterator[bytes]:
        for answer in self._answers:
            yield answer.data
            self._step("backing up", answer.copied_bytes, answer.total_bytes)
            answer.ClearField("data")
            self._last = answer

    def facts(self) -> "dict[str, Plain]":
        """The counts of the whole."""
        names = (
            "session_count", "segment_count", "token_count", "unwritten_token_count", "left_out_session_count",
        )  # fmt: skip
        return {name: int(getattr(self._last, name, 0)) for name in names}


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=min(done, total), total=total
        )


def _counted(session_count: int, token_count: int, segment_count: int) -> str:
    sessions = f"{session_count} session{'s' * (session_count != 1)}"
    return f"{sessions} with {token_count} tokens in {segment_count} segments"


def _backup_text(facts: "dict[str, Plain]") -> str:
    size, duration_s = int(str(facts["size_bytes"])), float(str(facts["duration_s"]))
    lines = [
        _counted(
            int(str(facts["session_count"])), int(str(facts["token_count"])), int(str(facts["segment_count"]))
        ),
        f"  {facts['file']}: {human_size(size)} in {duration_s:.1f} s, {human_size(size / duration_s)}/s",
    ]
    if facts["unwritten_token_count"]:
        lines.append(f"  {facts['unwritten_token_count']} tokens that only memory had are not in it")
    if facts["left_out_session_count"]:
        lines.append(f"  {facts['left_out_session_count']} sessions changed too fast and are not in it")
    return "\n".join(lines)


def _restore_facts(found: "Restored", place: str | None) -> "dict[str, Plain]":
    facts: dict[str, Plain] = asdict(found)
    created = datetime.fromtimestamp(found.create_time_ns / 10**9, UTC)
    del facts["create_time_ns"]
    return {"data_directory": place, **facts, "create_time": created.isoformat().replace("+00:00", "Z")}


def _restore_text(found: "Restored", place: str | None) -> str:
    created = datetime.fromtimestamp(found.create_time_ns / 10**9, UTC)
    size = human_size(found.segment_bytes)
    lines = [
        f"{_counted(found.session_count, found.token_count, found.segment_count)} ({size}) in {place or 'it'}",
        f"  as of {created:%Y-%m-%d %H:%M:%S} UTC, {human_time(created, datetime.now(UTC))}, by {found.created_by}",
    ]
    if found.expired_session_count:
        lines.append(f"  {found.expired_session_count} sessions have expired since")
    return "\n".join(lines)
