"""Faults of system calls and devices, at every point of a server's life.

    python -m tests.faults.syscalls [--every] [--json] [--seed N] [--control BUG]

A real server runs with `interpose.c` between it and the C library. For every phase of its life, every
kind of file, every call and every error, the Nth such call fails, for N = 1, 2, ... until a run has
fewer. After each run a clean server starts on what is left, and every promise is checked. `--every`
takes every point; without, some of each, drawn with the seed, and `fdatasync` and ENOSPC always.
"""

import argparse
import random
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ctxcache
from ctxcache.client.types import PathState
from tests.faults import planted, scenarios, shortages
from tests.faults.endings import check_refusal, last_line, stop
from tests.faults.harness import Harness, Report, progress
from tests.faults.interposed import FOR_EVER, Interposer
from tests.faults.lifecycle import DEADLINE_S, Lifecycle
from tests.faults.points import ALWAYS, Point, every_series
from tests.nursery import Nursery
from tests.server_process import COMMAND_LINE, ServerDidNotStart, ServerProcess

SIZES = ("--arena-size-bytes", "8MiB", "--ssd-size-bytes", "4MiB")


class Run:
    """One server's directories and faults."""

    def __init__(self, root: Path, forge: "Forge", control: str | None) -> None:
        self.root = self.home = root
        self.arena = Path("/dev/shm") / f"ctxcache-faults-{uuid.uuid4().hex[:12]}"  # noqa: S108  # a tmpfs
        self.arena.mkdir()
        self.faults, self._nursery = forge.faults, forge.nursery
        self._plants = control or ""

    @property
    def data(self) -> Path:
        """The data directory; SSD directories lie beside it."""
        return self.home / "data"

    def server(self, *, is_faulty: bool) -> ServerProcess:
        """A server on this run's directories, not started."""
        plants = [self._plants] if self._plants and is_faulty else []
        return ServerProcess(
            self.data,
            *self._options(),
            environment=self.faults.environment,
            program=planted.forked(plants),
            nursery=self._nursery,
        )

    def unforked_server(self, *, wrapper: Sequence[str] = ()) -> ServerProcess:
        """A server of its own process, where libraries may be loaded before all others."""
        program = planted.command([self._plants]) if self._plants else COMMAND_LINE
        return ServerProcess(self.data, *self._options(), wrapper=wrapper, program=program)

    def _options(self) -> tuple[str, ...]:
        ssd = (part for number in (1, 2) for part in ("--ssd-directories", str(self.home / f"ssd{number}")))
        return ("--arena-directory", str(self.arena), "--unix-socket", "", *SIZES, *ssd)

    def prefixes(self, place: str) -> Sequence[str]:
        """The beginnings of a place's paths."""
        return {
            "directory": [str(self.data / name) for name in ("LOCK", "FORMAT", "RUNS", "PATHS")],
            "metadata": [str(self.data / "metadata")],
            "ssd": [str(self.home / path / "segments.dat") for path in ("ssd1", "ssd2")],
            "copies": [
                str(self.home / path / name) for path in ("ssd1", "ssd2") for name in ("WITNESS", "catalog")
            ],
            "arena": [str(self.arena)],
        }[place]

    def arm(self, point: Point) -> None:
        """Let the point's call fail from now on."""
        is_short = point.error == "short"
        self.faults.arm(
            point.call, self.prefixes(point.place), first=point.number, times=point.times, is_short=is_short,
            error="" if is_short else point.error,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forge:
    """Where servers come from."""

    faults: Interposer
    nursery: Nursery


@contextmanager
def forge() -> Iterator[Forge]:
    """Servers with faults, for one run of the harness."""
    with tempfile.TemporaryDirectory(prefix="ctxcache-faults-") as directory:
        faults = Interposer(Path(directory) / "control")
        with Nursery(planted.MODULES, faults.environment) as nursery:
            yield Forge(faults, nursery)


@contextmanager
def a_run(servers: Forge, control: str | None = None) -> Iterator[Run]:
    """Directories of one run, removed at its end."""
    root = Path(tempfile.mkdtemp(prefix="ctxcache-faults-"))
    servers.faults.reset()
    run = Run(root, servers, control)
    try:
        yield run
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(run.arena, ignore_errors=True)


def visit(servers: Forge, point: Point, report: Report) -> bool:
    """Let a server meet one fault; False when its life has no such point."""
    with a_run(servers, report.control) as run:
        problems: list[str] = []
        life = Lifecycle(problems.append)
        is_met = _live(run, point, life, problems)
        if is_met:
            _check_after(run, life, problems)
            report.count("points")
            report.count("refused_calls", life.refused_count)
            report.count("acknowledged_calls", life.acknowledged_count)
        for problem in problems:
            report.find(f"{point} ({run.faults.where.replace(str(run.root), '')}): {problem}")
        return is_met


def _check_paths(point: Point, server: ServerProcess, run: Run, life: Lifecycle, problems: list[str]) -> None:
    """A path whose device refused a write or a sync is out, the other one serves all that comes."""
    if point.place != "ssd" or run.faults.hit_count == 0 or point.error not in ("EIO", "ENOSPC"):
        return
    if point.call in ("write", "fdatasync"):
        with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as client:
            tiers = {tier.path: tier for tier in client.admin.stats().tiers}
        hit = tiers[run.faults.where.split()[-1]]
        if point.error == "EIO" or point.call == "fdatasync":
            if hit.state is not PathState.FENCED or not hit.problem:
                problems.append("the path is not fenced, or nobody says why")
            if server.stderr.count("path_fenced") != 1:
                problems.append("the log does not say once that the path is fenced")
        if life.refused_count:
            problems.append(f"{life.refused_count} calls were refused though another path takes writes")


def _wipe_what_was_never_synced(point: Point, run: Run) -> None:
    """After a path's first sync failed nothing on it is durable: a device may have none of it."""
    if (point.place, point.call, point.number) == ("ssd", "fdatasync", 1) and run.faults.hit_count:
        path = Path(run.faults.where.split()[-1])
        path.write_bytes(bytes(path.stat().st_size))


def _live(run: Run, point: Point, life: Lifecycle, problems: list[str]) -> bool:
    server = run.server(is_faulty=True)
    try:
        if point.phase == "restart":
            server.start()
            life.run(server.target)
            server.kill9()
        if point.phase in ("first start", "restart"):
            run.arm(point)
        server.start()
        if point.phase in ("first start", "restart"):
            run.faults.disarm()
        if point.phase == "life":
            run.arm(point)
        if point.phase == "restart":
            life.verify(server.target)
        else:
            life.run(server.target)
        if point.phase == "life":
            _check_paths(point, server, run, life, problems)
        if point.phase == "stop":
            run.arm(point)
        stop(server, problems, is_faulty=point.phase in ("stop", "life"))
    except ServerDidNotStart as error:
        check_refusal(error, problems)
    finally:
        is_met = run.faults.hit_count > 0
        run.faults.disarm()
        server.close()
    _wipe_what_was_never_synced(point, run)
    return is_met


def _check_after(run: Run, life: Lifecycle, problems: list[str]) -> None:
    server = run.server(is_faulty=False)
    try:
        server.start()
        life.verify(server.target)
        stop(server, problems, is_faulty=False)
    except ServerDidNotStart as error:
        problems.append(f"no clean start afterwards, exit code {error.returncode}: {last_line(error.stderr)}")
    finally:
        server.close()


SAMPLE_COUNT = 2
NUMBERS = range(1, 4)
SCENARIO_CONTROLS = {
    "room_unchecked": "full",
    "address_space_unchecked": "memory",
}
CONTROLS = {
    "sync_errors_ignored": ALWAYS[0],
    "sync_retried": ALWAYS[0],
    "failed_path_in_rotation": ALWAYS[0],
    # All of them: a tail that is cut short once is written anew before anybody reads it.
    "short_write_is_whole": ALWAYS[1],
    # All of them: a single one may be a line of RocksDB's own log, which nobody misses.
    "refused_record_acknowledged": Point("life", "metadata", "write", "ENOSPC", 1, times=FOR_EVER),
}
"""The point at which each control shows, whatever comes first on a busy machine."""


def _last(servers: Forge, report: Report, names: Sequence[str]) -> None:
    """Meet the faults that last."""
    for name in names:
        problems: list[str] = []
        with a_run(servers, report.control) as run:
            if name in ("full", "memory"):
                _shortage(name, run, report, problems)
            else:
                _scenario(name, run, problems.append)
        report.count("scenarios")
        for problem in problems:
            report.find(f"{name}: {problem}")


def _shortage(name: str, run: Run, report: Report, problems: list[str]) -> None:
    if name == "memory":
        shortages.refused_memory(
            run.unforked_server,
            lambda limit_bytes: run.unforked_server(wrapper=("prlimit", f"--as={limit_bytes}")),
            problems,
        )
        return
    run.home = run.root / "disk"
    with shortages.small_disk(run.home, run.root / "disk.img") as kind:
        report.figures["small_disk"] = kind
        shortages.full_disk(lambda: run.server(is_faulty=True), run.home / "ballast", problems)


def _scenario(name: str, run: Run, problem: scenarios.Problem) -> None:
    with run.server(is_faulty=True) as server:
        if name == "hang":
            scenarios.hanging_device(server, run.faults, run.prefixes("ssd"), problem)
        else:
            scenarios.no_descriptors(server, problem)


SCENARIOS = ("hang", "full", "memory", "descriptors")


def run(options: argparse.Namespace, report: Report) -> None:
    """Visit points until there are no more, or those of a sample."""
    with forge() as servers:
        if report.control:
            if report.control in CONTROLS:
                visit(servers, CONTROLS[report.control], report)
            else:
                _last(servers, report, [SCENARIO_CONTROLS[report.control]])
        elif options.every:
            _visit_every(servers, report, options.only)
        elif options.scenarios:
            _last(servers, report, SCENARIOS)
        else:
            _visit_some(servers, report, options.points)
            _last(servers, report, ["hang", "full", "memory"])


def _visit_every(servers: Forge, report: Report, only: str) -> None:
    series = [point for point in every_series() if str(point).startswith(only)]
    for done, first in enumerate(series):
        number = 1
        while visit(servers, replace(first, number=number), report):
            number += 1
        progress(done + 1, len(series), f"series, {report.figures.get('points', 0)} points")


def _visit_some(servers: Forge, report: Report, count: int) -> None:
    choice = random.Random(report.seed)
    for point in ALWAYS:
        if not visit(servers, point, report):
            report.find(f"{point}: there is no such point")
    series = every_series()
    choice.shuffle(series)
    met = 0
    for first in series:
        met += visit(servers, replace(first, number=choice.choice(NUMBERS)), report)
        if met >= count:
            break


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", action="store_true", help="every point: about 40 minutes")
    parser.add_argument(
        "--scenarios", action="store_true", help="faults that last, all of them and nothing else"
    )
    parser.add_argument("--only", default="", help="with --every: series that begin so, e.g. 'life, open'")
    parser.add_argument(
        "--points",
        type=int,
        default=SAMPLE_COUNT,
        help=f"points to draw without --every (default {SAMPLE_COUNT})",
    )


HARNESS = Harness(
    name="syscalls",
    description="The Nth system call fails, for every N: proper refusals, nothing lost, a clean start after.",
    run=run,
    controls={
        "sync_errors_ignored": "a failed fdatasync of an SSD file is taken for success",
        "sync_retried": "a failed fdatasync is called again until it succeeds",
        "short_write_is_whole": "a write of fewer bytes than asked for is taken for all of them",
        "refused_record_acknowledged": "a record that found no room is acknowledged",
        "room_unchecked": "records may use up the last of the disk",
        "address_space_unchecked": "a bound on memory is met by whichever library comes to it first",
        "failed_path_in_rotation": "a path that failed is still handed out",
    },
    options=_options,
)


if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
