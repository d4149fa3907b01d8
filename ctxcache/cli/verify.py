"""`ctxcache verify`: every record and every segment, of a running server or of a directory without one.

Worst case: something is bad, which is listed, and the exit code is that of DATA_LOSS.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ctxcache.cli.call import CliCall, online
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.units import human_size, parsed
from ctxcache.client.convert import document
from ctxcache.client.messages import read_verify_progress
from ctxcache.client.types import BadSegment, VerifyProgress
from ctxcache.runtime.files import keep_private
from ctxcache.server.lifecycle import verify_directory
from ctxcache.service.admin import verify_message
from ctxcache.settings.config import load
from ctxcache.settings.knobs.knob import parse_size_bytes

app = typer.Typer()


@dataclass(slots=True)
class Sum:
    """The damage of one session.

    It tells how much is bad, between which positions of the log, and the first problem.
    """

    bad_segment_count: int = 0
    mended_segment_count: int = 0
    bad_token_count: int = 0
    position_begin: int = 0
    position_end: int = 0
    problem: str = ""

    def add(self, segment: BadSegment, copy: str) -> None:
        """Count a segment, of which the copy `copy` is bad."""
        if not self.bad_segment_count or segment.position_begin < self.position_begin:
            self.position_begin, self.problem = segment.position_begin, f"{copy}: {segment.problem}"
        self.position_end = max(self.position_end, segment.position_end)
        self.bad_segment_count += 1
        self.mended_segment_count += segment.is_mended
        self.bad_token_count += segment.position_end - segment.position_begin


@app.command(
    "verify",
    epilog=examples(
        "ctxcache verify --rate-limit 100MiB", "ctxcache verify --data-directory /var/lib/ctxcache"
    ),
)
@online
def verify(
    call: CliCall,
    rate_limit: Annotated[
        str, typer.Option("--rate-limit", metavar="SIZE", help="Most bytes a second, such as 100MiB.")
    ] = "0",
    *,
    release: Annotated[
        bool, typer.Option("--release", help="First test quarantined places, and use the good ones again.")
    ] = False,
    data_directory: Annotated[
        str, typer.Option("--data-directory", metavar="DIR", help="This one, which no server holds.")
    ] = "",
    ssd_directories: Annotated[
        list[str] | None, typer.Option("--ssd-directories", metavar="DIR", help="Of that data directory.")
    ] = None,
) -> None:
    """Verify every record and every segment, in memory as on SSD; sessions end before what is bad.

    Rows that were bad in memory alone are SSD's again. Exits with 0 when nothing is lost, with 8 when
    something is.
    """
    rate = parsed(parse_size_bytes, rate_limit, "--rate-limit")
    if data_directory:
        reports = _offline(data_directory, ssd_directories or [], rate)
        facts = _follow(reports, call)
    else:
        with call.client() as client:
            facts = _follow(client.admin.verify(bytes_per_second=rate, release=release), call)
    if facts["lost_segment_count"]:
        raise typer.Exit(ExitCode.DATA_LOSS)


def _offline(data_directory: str, ssd_directories: list[str], rate: int) -> Iterator[VerifyProgress]:
    keep_private()
    settings = load({"data_directory": data_directory, "ssd_directories": tuple(ssd_directories) or None})
    # One loop runs all steps, since the generator is bound to it. The bar moves between two steps.
    with asyncio.Runner() as runner:
        reports = verify_directory(settings, bytes_per_second=rate)
        while (report := runner.run(anext(reports, None))) is not None:
            yield read_verify_progress(verify_message(report))


def _follow(reports: Iterable[VerifyProgress], call: CliCall) -> dict[str, Plain]:
    bad: list[Plain] = []
    lost = set[int]()
    sums: dict[tuple[str, str], Sum] = {}
    last: VerifyProgress | None = None
    released = 0
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("verifying")
        for last in reports:
            released += last.released_slot_count
            for segment in last.bad:
                # A segment of several sessions is lost once, and bad in each. A lost record names no segment.
                if not segment.is_mended:
                    lost.add(segment.segment_id or -1 - len(bad))
                bad.append(plain := document(segment))
                copy = "in memory" if plain["tier"] == "TIER_DRAM" else "on SSD"
                for session in segment.sessions or [""]:
                    sums.setdefault((segment.tenant, session), Sum()).add(segment, copy)
            bar.update(task, total=last.segment_count, completed=last.checked_segment_count)
    facts: dict[str, Plain] = {
        "checked_segment_count": last.checked_segment_count if last else 0,
        "checked_bytes": last.checked_bytes if last else 0,
        "record_count": last.record_count if last else 0,
        "released_slot_count": released,
        "lost_segment_count": len(lost),
        "sessions": [
            {"session": session, "tenant": tenant, **asdict(total)}
            for (tenant, session), total in sums.items()
        ],
        "bad": bad,
    }
    call.show_facts(facts, _text(facts, sums, len(bad)))
    return facts


def _text(facts: dict[str, Plain], sums: dict[tuple[str, str], Sum], bad_count: int) -> str:
    size = human_size(int(str(facts["checked_bytes"])))
    counts = f"{facts['record_count']} records and {facts['checked_segment_count']} segments ({size})"
    lines = [f"{counts} verified, {bad_count} bad, {facts['lost_segment_count']} of them lost"]
    for (tenant, session), total in sums.items():
        name = f"{session or 'no session'}, tenant {tenant!r}"
        many = "1 segment" if total.bad_segment_count == 1 else f"{total.bad_segment_count} segments"
        mended = f", {total.mended_segment_count} mended from SSD" if total.mended_segment_count else ""
        where = f"positions {total.position_begin} to {total.position_end}"
        lines.append(f"  {name}: {many} bad{mended}, {where}; the first: {total.problem}")
    return "\n".join(lines)
