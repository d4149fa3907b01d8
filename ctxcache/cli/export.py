"""`ctxcache export`: sessions, or all that a store has, into an archive, docs/archive_format.md.

Worst case: there is no file of that name, and the sentence says why.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import Call, online
from ctxcache.cli.completion import session_names
from ctxcache.cli.examples import examples
from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.names import parse_size_bytes, parsed, session_name
from ctxcache.cli.transfers import PIPE, Bar, bar, counted, no_terminal, raise_first, show_outcomes
from ctxcache.cli.units import human_size

if TYPE_CHECKING:
    from ctxcache.archive.outcomes import Outcome
    from ctxcache.cli.plain import Plain
    from ctxcache.client import Client
    from ctxcache.v1.operations_pb2 import BackupResponse

EXAMPLES = examples(
    "ctxcache export chat-17 --to chat-17.ctxarchive --force",
    "ctxcache export --all --to all.ctxarchive --force",
    "ctxcache export --store --to monday.ctxarchive --rate-limit 100MiB",
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

    The file has its name when it is whole, and not before. With --store, exits with 4 when sessions changed too fast to
    be copied; the others are in the file.
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


def _wanted(client: "Client", names: list[str], progress: Bar) -> list[str]:
    """Their names, each once, all where none are given. Raises SessionNotFound."""
    sessions = map(client.get_session, names) if names else client.list_sessions(page_size=1000)
    found = {session.name: session.token_count for session in sessions}
    progress.begin("exporting", sum(found.values()))
    return list(found)


def _export(
    client: "Client", names: list[str], to: str, progress: Bar, *, is_forced: bool, skips_gone: bool
) -> "list[Outcome]":
    from ctxcache.archive.exporting import Exporter  # noqa: PLC0415  numpy and grpc: --help exports nothing
    from ctxcache.archive.files import destination  # noqa: PLC0415
    from ctxcache.archive.frames import FILE_ID_BYTES, FrameWriter  # noqa: PLC0415
    from ctxcache.archive.outcomes import Status  # noqa: PLC0415

    with destination(to, is_forced=is_forced) as fd:
        writer = FrameWriter(fd, to, secrets.token_bytes(FILE_ID_BYTES), time.time_ns())
        outcomes = list(Exporter(client, writer, progress.step, skips_gone=skips_gone).export(names))
        if outcomes and all(one.status is Status.FAILED for one in outcomes):
            # A file without any of them would be in the way of the next attempt.
            raise_first(outcomes)
    return outcomes


def _export_store(call: Call, to: str, rate: int, *, is_forced: bool) -> None:
    from ctxcache.archive.exporting import receive  # noqa: PLC0415  as above
    from ctxcache.archive.files import destination  # noqa: PLC0415

    began_s = time.monotonic()
    with call.client() as client, bar() as progress, destination(to, is_forced=is_forced) as fd:
        progress.begin("exporting", None)
        answers = _Answers(client.backup(bytes_per_second=rate), progress.at)
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
    """A backup's bytes as they come. The counts of the last answer are kept."""

    def __init__(self, answers: "Iterable[BackupResponse]", at: Callable[[str, int, int], None]) -> None:
        self._answers, self._at = answers, at
        self._last: BackupResponse | None = None

    def __iter__(self) -> Iterator[bytes]:
        for answer in self._answers:
            yield answer.data
            self._at("exporting", answer.copied_bytes, answer.total_bytes)
            answer.ClearField("data")
            self._last = answer

    def counts(self) -> dict[str, int]:
        """The counts of the whole."""
        names = ("session", "segment", "token", "unwritten_token", "left_out_session")
        return {f"{name}_count": int(getattr(self._last, f"{name}_count", 0)) for name in names}


def _store_text(facts: "dict[str, Plain]") -> str:
    size, duration_s = int(str(facts["size_bytes"])), float(str(facts["duration_s"]))
    counts = (int(str(facts[f"{name}_count"])) for name in ("session", "token", "segment"))
    rate = human_size(size / max(duration_s, 0.001))
    lines = [counted(*counts), f"  {facts['file']}: {human_size(size)} in {duration_s:.1f} s, {rate}/s"]
    if facts["unwritten_token_count"]:
        lines.append(f"  {facts['unwritten_token_count']} tokens that only memory had are not in it")
    if facts["left_out_session_count"]:
        lines.append(f"  {facts['left_out_session_count']} sessions changed too fast and are not in it")
    return "\n".join(lines)
