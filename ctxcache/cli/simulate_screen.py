"""Tables of figures and bars of progress that `ctxcache simulate` draws in a terminal.

Imported where something is drawn: rich takes as long to import as all the rest of the command.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ctxcache.cli.documents import Plain
from ctxcache.cli.units import human_size
from ctxcache.simulate.study import StudyOutcome
from ctxcache.simulate.sweeps import Sweep, SweepRow
from ctxcache.simulate.tally import Census

TITLES = (
    "policy",
    "capacity",
    ">hit rate",
    ">in DRAM",
    ">on SSD",
    ">by tokens",
    ">of all prompts",
    ">promoted",
    ">SSD writes/day",
    ">prefetched",
    ">in time",
)
FORM_TITLES = ("form", ">GPU", ">bytes kept", ">GB hours", ">forms changed", ">of both")
COST_TITLES = (
    "policy",
    "capacity",
    ">hit rate",
    ">regret",
    ">GPU saved",
    ">money saved",
    ">of",
    ">TTFT p50",
    ">p95",
    ">drive writes/day",
    ">write lag",
    ">prefetches late",
)


def show(outcomes: Sequence[StudyOutcome], *, are_costs: bool) -> None:
    """Print a line for each replay."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in COST_TITLES if are_costs else TITLES:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    for outcome in outcomes:
        table.add_row(*(_cost_cells(outcome) if are_costs else _cells(outcome)))
    _console().print(table)


def _cells(outcome: StudyOutcome) -> tuple[str, ...]:
    figures = outcome.tally.figures()
    rates = (
        figures[name]
        for name in ("hit_rate", "dram_hit_rate", "ssd_hit_rate", "token_hit_rate", "prompt_hit_rate")
    )
    in_time = f"{figures['prefetch_in_time_share']:.1%}" if outcome.tally.prefetches else "-"
    return (
        outcome.policy,
        _capacity(outcome),
        *(f"{rate:.1%}" for rate in rates),
        human_size(figures["promoted_bytes"]),
        human_size(figures["ssd_written_bytes_per_day"]),
        str(outcome.tally.prefetches),
        in_time,
    )


def _cost_cells(outcome: StudyOutcome) -> tuple[str, ...]:
    figures, costs = outcome.tally.figures(), outcome.tally.costs(outcome.load)
    return (
        outcome.policy,
        _capacity(outcome),
        f"{figures['hit_rate']:.1%}",
        f"{figures['regret_rate']:.1%}",
        f"{costs['gpu_saved_s'] / 3600:.2f} h",
        f"{costs['cost_saved']:,.2f} $",
        f"{costs['cost_without']:,.2f} $",
        f"{figures['ttft_p50_s']:.3g} s",
        f"{figures['ttft_p95_s']:.3g} s",
        f"{costs['drive_writes_per_day']:.3g}",
        f"{figures['most_write_lag_s']:.3g} s",
        str(outcome.tally.prefetches_late),
    )


def _capacity(outcome: StudyOutcome) -> str:
    sizes = f"{human_size(outcome.load.dram_bytes)} + {human_size(outcome.load.ssd_bytes)}"
    return sizes if outcome.multiple is None else f"{outcome.multiple:g}x ({sizes})"


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
    _console().print(table)


@contextmanager
def progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Draw on stderr: a bar over the replays, and the turns of this one."""
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("replays", total=run_count)
        state = {"runs": 0, "turns": 0}

        def step(what: str, done: int) -> None:
            # The count starts again with each replay; that of the footprint is none of those asked for.
            if done < state["turns"] and what != "footprint":
                state["runs"] += 1
            state["turns"] = done
            bars.update(task, description=f"{what}, {done} turns", completed=state["runs"])

        yield step


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
    console = _console()
    console.print(f"{sweep.title}" + (f" (the paper's {sweep.source})" if sweep.source else ""))
    console.print(table)
    console.print(census.sentence())


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
        self._progress.update(self._task, total=run_count, description="replays", completed=0)

    def step(self, what: str, turn_count: int) -> None:
        """One has come so far."""
        self._progress.update(self._task, description=f"{what}, {turn_count} turns")

    def done(self) -> None:
        """One is over."""
        self._progress.advance(self._task)


@contextmanager
def sweep_progress() -> Iterator[SweepBar]:
    """Draw on stderr."""
    with Progress(console=Console(stderr=True), transient=True) as bars:
        yield SweepBar(bars)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
