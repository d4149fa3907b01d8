"""The command: asks every probe, prints what they found, exits as `ctxcache serve` would.

Takes the settings that `serve` takes, so that it speaks of the same directories and sizes.
"""

import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxcache.cli.call import CliCall, call_of
from ctxcache.cli.config import doubts
from ctxcache.cli.doctor import Finding, degraded, disks, fatal, machine, ok
from ctxcache.cli.doctor.bucket import bucket
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.options import SHARED_OPTIONS, option
from ctxcache.cli.settings import load_settings, taking_settings
from ctxcache.errors import CacheError, CorruptMetadata
from ctxcache.server.starting import Check, checks_beside
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import holder
from ctxcache.storage.opening import ssd_directories_of

app = typer.Typer()


class Part(enum.StrEnum):
    """A part of the examination that can be asked for by itself."""

    BUCKET = "bucket"


PART = option(
    "part",
    Annotated[
        Part | None,
        typer.Argument(help="Look at this alone: `bucket` tries that of a fleet.", show_default=False),
    ],
)


@app.command(
    "doctor",
    epilog=examples(
        "ctxcache doctor",
        "ctxcache doctor --config ctxcache.toml --output json",
        "ctxcache doctor bucket --fleet-bucket s3://kv/fleet",
    ),
)
@taking_settings(PART, shared=SHARED_OPTIONS)
def doctor(context: typer.Context, **given: Any) -> None:
    """Say what this machine offers a server, what is used instead of what is missing, and what to do.

    Exits with 0, or with the code that `ctxcache serve` would fail with.
    """
    part = given.pop("part")
    settings = load_settings(given)
    call = call_of(context, given)
    findings = list(bucket(settings) if part is Part.BUCKET else examine(settings, call))
    # All probes are asked, also behind one that is fatal: one run shows all there is to do.
    failures = [finding.failure for finding in findings if finding.failure is not None]
    call.show_facts(_facts(findings), _text(findings))
    if failures:
        # Standard output is buffered, and the error is written to the other stream.
        sys.stdout.flush()
        raise failures[0]


def examine(settings: Settings, call: CliCall) -> Iterator[Finding]:
    """Ask every check of a start, and then every probe of what is there and how well it is."""
    server, data_directory = machine.server(call)
    pid = holder(settings.data_directory)
    # A server that runs by these settings is not in its own way.
    is_running = bool(pid) and _is_same(data_directory, settings.data_directory)
    for check in checks_beside(is_running=is_running):
        yield _checked(check, settings)
    yield disks.metadata(settings, pid if is_running else "")
    yield from disks.modes(settings)
    for directory in ssd_directories_of(settings):
        yield disks.space(settings, directory)
        yield disks.direct_io(directory)
        yield disks.disk_kind(directory)
        yield disks.health(directory)
    yield machine.shared_memory(settings)
    yield machine.huge_pages(settings)
    yield machine.locked_memory()
    yield machine.swap()
    yield machine.memory_nodes()
    yield machine.open_files(settings)
    yield machine.clock()
    yield machine.store_time(settings)
    yield machine.odd_settings(doubts(settings))
    if settings.fleet_bucket:
        yield from bucket(settings)
    yield server
    yield machine.gpu()
    yield machine.reads_into_gpu()
    yield machine.torch()


def _checked(check: Check, settings: Settings) -> Finding:
    try:
        check.run(settings)
    except CorruptMetadata as error:
        if settings.rebuild_metadata:
            return degraded(check.subject, str(error), "metadata that the start makes anew", check.advice)
        return fatal(check.subject, error, check.advice)
    except CacheError as error:
        return fatal(check.subject, error, check.advice)
    return ok(check.subject, check.well, "as it is")


def _is_same(told: str, directory: Path) -> bool:
    """Whether the data directory that a server tells is that one."""
    try:
        return bool(told) and Path(told).samefile(directory)
    except OSError:
        return False


def _facts(findings: list[Finding]) -> dict[str, Plain]:
    return {
        "can_serve": all(finding.failure is None for finding in findings),
        "findings": [
            {"name": f.name, "status": f.status.value, "found": f.found, "used": f.used, "advice": f.advice}
            for f in findings
        ],
    }


def _text(findings: list[Finding]) -> str:
    return "\n".join(_lines(finding) for finding in findings)


def _lines(finding: Finding) -> str:
    lines = [f"{finding.status.value:8}  {finding.name}: {finding.found}", f"{'':10}used: {finding.used}"]
    return "\n".join([*lines, f"{'':10}do: {finding.advice}"] if finding.advice else lines)
