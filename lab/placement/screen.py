"""Tables of sweeps and of forms in a terminal, and the bar of a sweep."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from rich.progress import Progress
from rich.table import Table

from ctxcache.cli.documents import Plain
from ctxcache.cli.simulate_screen import bars, console
from ctxcache.cli.units import human_size
from lab.placement.census import Census
from lab.placement.sweeps import Sweep, SweepRow

FORM_TITLES = ("form", ">GPU", ">bytes kept", ">GB hours", ">forms changed", ">of both")


def show_forms(figures: Sequence[Mapping[str, Plain]]) -> None:
    """Print a line for each form of state."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in FORM_TITLES:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    for each in figures:
        numbers = cast("Mapping[str, float]", each)
        table.add_row(
            str(each["strategy"]),
            f"{numbers['gpu_s'] / 3600:.2f} h",
            human_size(numbers["mean_bytes"]),
            f"{numbers['gb_hours']:,.1f}",
            f"{numbers['changed_count']:,}",
            f"{numbers['cost']:,.2f} $",
        )
    console().print(table)


class _NoBar:
    """Standard error is no terminal."""

    def begin(self, run_count: int) -> None:
        """See SweepBar."""

    def step(self, what: str, turn_count: int) -> None:
        """See SweepBar."""

    def done(self) -> None:
        """See SweepBar."""


def show_sweep(sweep: Sweep, rows: Sequence[SweepRow], census: Census) -> None:
    """Print a line for each replay of a sweep, and what the trace was like."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in (sweep.x_title, "series"):
        table.add_column(title)
    titles = (
        "of all turns",
        "the paper's",
        "of later turns",
        "in DRAM",
        "on SSD",
        "by tokens",
        "SSD writes/day",
        "DRAM",
        "SSD",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*_sweep_cells(row))
    shown = console()
    shown.print(f"{sweep.title}" + (f" (the paper's {sweep.source})" if sweep.source else ""))
    shown.print(table)
    shown.print(census.sentence())


def _sweep_cells(row: SweepRow) -> tuple[str, ...]:
    rates = (row.number(name) for name in ("hit_rate", "dram_hit_rate", "ssd_hit_rate", "token_hit_rate"))
    load, known = row.run.load, row.run.paper.get("all_hit_rate", row.run.paper.get("hit_rate"))
    return (
        f"{row.run.x:g}" if isinstance(row.run.x, (int, float)) else row.run.x,
        row.run.series,
        f"{row.number('all_hit_rate'):.1%}",
        "" if known is None else f"{known:.1%}",
        *(f"{rate:.1%}" for rate in rates),
        human_size(row.number("ssd_written_bytes_per_day")),
        human_size(load.dram_bytes),
        human_size(load.ssd_bytes),
    )


class SweepBar:
    """The runs that are done, and what the one that is being played has come to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=None)

    def begin(self, run_count: int) -> None:
        """So many replays begin."""
        # What went before has another pace.
        self._progress.reset(self._task, total=run_count, description="replays")

    def step(self, what: str, turn_count: int) -> None:
        """One has come so far."""
        self._progress.update(self._task, description=f"{what}, {turn_count} turns")

    def done(self) -> None:
        """One is over."""
        self._progress.advance(self._task)


@contextmanager
def sweep_progress() -> Iterator[SweepBar | _NoBar]:
    """Draw on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    with bars() as drawn:
        yield SweepBar(drawn)
