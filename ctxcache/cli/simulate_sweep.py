"""`ctxcache simulate --sweep`: plays what a figure compares, prints the table and draws the picture.

Thin: sweeps, processes and pictures are `ctxcache.simulate`, imported when a sweep runs.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.simulate_options import Options
from ctxcache.cli.units import human_size

if TYPE_CHECKING:
    from rich.progress import Progress

    from ctxcache.simulate.census import Census
    from ctxcache.simulate.sweep import Row, Sweep

_NEEDS_PLOT = "ctxcache: --plot needs matplotlib, which is not installed; pip install 'ctxcache[plot]'\n"
SUFFIXES = (".png", ".svg")
Draw = Callable[["Sweep", "Sequence[Row]", "Census"], None]


def run_sweep(options: Options) -> None:
    """Play the sweep that was named."""
    from ctxcache.simulate.pace import PacedTrace  # noqa: PLC0415  --help needs none of it
    from ctxcache.simulate.runs import play, prepare  # noqa: PLC0415  as above
    from ctxcache.simulate.study import ALL_POLICIES  # noqa: PLC0415  as above

    sweep = _named(options.sweep or "")
    draw = _drawer(options.plot)
    load, policies = options.load(sweep.preset), options.chosen(ALL_POLICIES, sweep.policies)
    trace = PacedTrace(options.trace, arrivals_times=options.arrivals(), pace=options.pace())
    rows = []
    with _progress() as bar:
        census, runs = prepare(sweep, trace, load, policies, live_bytes=options.live_bytes(), step=bar.step)
        bar.begin(len(runs))
        for row in play(trace, runs, job_count=options.jobs, step=bar.step, done=bar.done):
            rows.append(row)
            if options.as_json:
                typer.echo(json.dumps(row.to_dict(sweep, census)))
    if not options.as_json:
        _show(sweep, rows, census)
    if draw is not None:
        draw(sweep, rows, census)


def _named(name: str) -> "Sweep":
    from ctxcache.simulate.sweeps import SWEEPS  # noqa: PLC0415  as above

    if name not in SWEEPS:
        raise typer.BadParameter(
            f"no sweep is named {name!r}; there are {', '.join(SWEEPS)}", param_hint="--sweep"
        )
    return SWEEPS[name]


def _drawer(path: Path | None) -> Draw | None:
    """Find matplotlib before anything is replayed."""
    if path is None:
        return None
    if path.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{path.name!r} ends in neither .png nor .svg", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}", param_hint="--plot")
    try:
        from ctxcache.simulate.plot import plot  # noqa: PLC0415  matplotlib is optional
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.stderr.write(_NEEDS_PLOT)
        raise typer.Exit(ExitCode.USAGE) from error
    return lambda sweep, rows, census: plot(sweep, rows, census, path)


def _show(sweep: "Sweep", rows: "Sequence[Row]", census: "Census") -> None:
    from rich.console import Console  # noqa: PLC0415  --help prints no tables
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in (sweep.x_title, "series"):
        table.add_column(title)
    titles = (
        "of all turns", "the paper's", "of later turns", "in DRAM", "on SSD", "by tokens", "SSD writes/day", "DRAM",
        "SSD",
    )  # fmt: skip
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(f"{sweep.title}" + (f" (the paper's {sweep.source})" if sweep.source else ""))
    console.print(table)
    console.print(census.sentence())


def _cells(row: "Row") -> tuple[str, ...]:
    rates = (row.number(name) for name in ("hit_rate", "dram_hit_rate", "ssd_hit_rate", "token_hit_rate"))
    load, known = row.run.load, row.run.paper.get("all_hit_rate", row.run.paper.get("hit_rate"))
    return (
        f"{row.run.x:g}" if isinstance(row.run.x, (int, float)) else row.run.x, row.run.series,
        f"{row.number('all_hit_rate'):.1%}", "" if known is None else f"{known:.1%}", *(f"{rate:.1%}" for rate in rates),
        human_size(row.number("ssd_written_bytes_per_day")), human_size(load.dram_bytes), human_size(load.ssd_bytes),
    )  # fmt: skip


class _Bar:
    """The runs that are done, and what the one that is being played has come to."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=None)

    def begin(self, run_count: int) -> None:
        self._progress.update(self._task, total=run_count, description="replays", completed=0)

    def step(self, what: str, turn_count: int) -> None:
        self._progress.update(self._task, description=f"{what}, {turn_count} turns")

    def done(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def _progress() -> Iterator[_Bar]:
    """Draw on stderr where a person is looking."""
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        yield _Bar(bars)
