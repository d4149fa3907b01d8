"""Tables of figures and bars of progress that `ctxcache simulate` draws in a terminal.

Imported where something is drawn: rich takes as long to import as all the rest of the command.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from ctxcache.cli.units import human_duration, human_size
from ctxcache.simulate.study import FOOTPRINT, StudyOutcome

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
    ">drive writes",
    ">prefetched",
    ">in time",
)
SATURATED = 0.9
"""The share of the time from which on reads wait for reads most of the time."""
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
    ">worn",
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
    for note in dict.fromkeys(note for outcome in outcomes for note in notes(outcome)):
        console().print(note, soft_wrap=True)


def notes(outcome: StudyOutcome) -> Iterator[str]:
    """What a reader would take for a lack of capacity, or would not see; one sentence each."""
    load, tally = outcome.load, outcome.tally
    if tally.overflows and load.context_tokens is not None:
        yield (
            f"{tally.overflows:,} turns overflowed the context of {load.context_tokens:,} tokens "
            "and lost their beginning: --context says another."
        )
    busy_share = tally.figures()["ssd_read_busy_share"]
    if busy_share >= SATURATED and (load.is_timed or load.slot_count is not None):
        yield (
            f"{outcome.policy}, {_capacity(outcome)}: SSD reads kept it busy {busy_share:.0%} of the time. "
            "Its speed is short, not its size: --ssd-read."
        )


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
        f"{outcome.tally.costs(outcome.load)['drive_writes_per_day']:.3g}",
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
        f"{costs['wear_cost']:,.2f} $",
        f"{costs['drive_writes_per_day']:.3g}",
        f"{figures['most_write_lag_s']:.3g} s",
        str(outcome.tally.prefetches_late),
    )


def _capacity(outcome: StudyOutcome) -> str:
    sizes = f"{human_size(outcome.load.dram_bytes)} + {human_size(outcome.load.ssd_bytes)}"
    return sizes if outcome.multiple is None else f"{outcome.multiple:g}x ({sizes})"


class _End(ProgressColumn):
    """When it ends, by its mean pace so far: rich's own forgets what took longer than half a minute."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """See ProgressColumn."""
        if not task.total or not task.completed or not task.elapsed:
            return Text("")
        left_s = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"ends in {human_duration(left_s)}", style="progress.remaining")


@contextmanager
def bars() -> Iterator[Progress]:
    """Bars on stderr, with an estimate of their ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), _End())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        yield drawn


class _Replays:
    """How far several replays of one trace are, in turns: the first one to end says how many each has."""

    def __init__(self, drawn: Progress, run_count: int) -> None:
        self._drawn, self._run_count = drawn, run_count
        self._task = drawn.add_task("reading", total=None)
        self._what, self._turn_count = "", 0
        self._ended_count = self._run_turns = 0

    def step(self, what: str, turn_count: int) -> None:
        """A replay has come so far."""
        if what != self._what or turn_count < self._turn_count:
            self._run_turns = self._turn_count
            if self._what == FOOTPRINT:
                # It is none of the replays, and has another pace.
                self._drawn.reset(self._task)
            elif self._what:
                self._ended_count += 1
        self._what, self._turn_count = what, turn_count
        self._drawn.update(self._task, description=f"{what}, {turn_count:,} turns")
        if self._run_turns:
            done = self._ended_count * self._run_turns + min(turn_count, self._run_turns)
            self._drawn.update(self._task, total=self._run_count * self._run_turns, completed=done)


@contextmanager
def progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Draw on stderr: a bar over all replays, the turns of this one, and when the last one ends."""
    with bars() as drawn:
        yield _Replays(drawn, run_count).step


def console() -> Console:
    """Where figures are printed: as wide as the terminal, or wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
