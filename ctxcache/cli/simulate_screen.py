"""Tables of figures and bars of progress that `ctxcache simulate` draws in a terminal.

Imported where something is drawn: rich takes as long to import as all the rest of the command.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ctxcache.cli.units import human_size
from ctxcache.simulate.study import StudyOutcome

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
    console().print(table)


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


def console() -> Console:
    """Where figures are printed: as wide as the terminal, or wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
