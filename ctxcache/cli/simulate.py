"""`ctxcache simulate`: replays a trace through placement policies and prints what they reach.

Thin: traces, the clock and the counts are `ctxcache.simulate`, imported when the command runs.
Worst case: a line of the trace is wrong; the sentence names file, line and field.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ctxcache.cli.signature import taking
from ctxcache.cli.simulate_options import Options
from ctxcache.cli.simulate_sweep import run_sweep
from ctxcache.cli.units import human_size

if TYPE_CHECKING:
    from ctxcache.simulate.study import Outcome

TITLES = (
    "policy", "capacity", ">hit rate", ">in DRAM", ">on SSD", ">by tokens", ">promoted", ">SSD writes/day",
    ">prefetched", ">in time",
)  # fmt: skip
COST_TITLES = (
    "policy", "capacity", ">hit rate", ">regret", ">GPU saved", ">money saved", ">of", ">TTFT p50", ">p95",
    ">drive writes/day", ">write lag", ">prefetches late",
)  # fmt: skip


def simulate_command() -> Callable[..., None]:
    """Return the command; its parameters are the fields of `Options`."""
    return taking(Options, simulate)


def simulate(options: Options) -> None:
    """Replay a trace of sessions through placement policies on a virtual clock, and say what each keeps.

    Hit rates are over turns of sessions that had one before. `belady` knows the future; no store can have it.
    """
    from ctxcache.simulate.load import Load  # noqa: PLC0415  --help needs none of it
    from ctxcache.simulate.study import ALL_POLICIES, study  # noqa: PLC0415  as above
    from ctxcache.simulate.trace import Trace  # noqa: PLC0415  as above

    if options.sweep is not None:
        run_sweep(options)
        return
    options.refuse_those_of_sweeps()
    load, capacities = options.load(Load()), options.capacities()
    chosen = options.chosen(ALL_POLICIES, ALL_POLICIES)
    trace = Trace(options.trace, arrivals_times=options.arrivals(), pace=options.pace())
    outcomes = []
    with _progress(len(chosen) * len(capacities)) as step:
        for outcome in study(trace, load, chosen, capacities, step=step):
            outcomes.append(outcome)
            if options.as_json:
                typer.echo(json.dumps(outcome.to_dict()))
    if not options.as_json:
        _show(outcomes, are_costs=options.costs)


def _show(outcomes: "Sequence[Outcome]", *, are_costs: bool) -> None:
    from rich.console import Console  # noqa: PLC0415  --help prints no tables
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in COST_TITLES if are_costs else TITLES:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    for outcome in outcomes:
        table.add_row(*(_cost_cells(outcome) if are_costs else _cells(outcome)))
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def _cells(outcome: "Outcome") -> tuple[str, ...]:
    figures = outcome.tally.figures()
    rates = (figures[name] for name in ("hit_rate", "dram_hit_rate", "ssd_hit_rate", "token_hit_rate"))
    in_time = f"{figures['prefetch_in_time_share']:.1%}" if outcome.tally.prefetches else "-"
    return (
        outcome.policy, _capacity(outcome), *(f"{rate:.1%}" for rate in rates), human_size(figures["promoted_bytes"]),
        human_size(figures["ssd_written_bytes_per_day"]), str(outcome.tally.prefetches), in_time,
    )  # fmt: skip


def _cost_cells(outcome: "Outcome") -> tuple[str, ...]:
    figures, costs = outcome.tally.figures(), outcome.tally.costs(outcome.load)
    return (
        outcome.policy, _capacity(outcome), f"{figures['hit_rate']:.1%}", f"{figures['regret_rate']:.1%}",
        f"{costs['gpu_saved_s'] / 3600:.2f} h", f"{costs['cost_saved']:,.2f} $",
        f"{costs['cost_without']:,.2f} $", f"{figures['ttft_p50_s']:.3g} s", f"{figures['ttft_p95_s']:.3g} s",
        f"{costs['drive_writes_per_day']:.3g}", f"{figures['most_write_lag_s']:.3g} s", str(outcome.tally.prefetches_late),
    )  # fmt: skip


def _capacity(outcome: "Outcome") -> str:
    sizes = f"{human_size(outcome.load.dram_bytes)} + {human_size(outcome.load.ssd_bytes)}"
    return sizes if outcome.multiple is None else f"{outcome.multiple:g}x ({sizes})"


@contextmanager
def _progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Draw on stderr where a person is looking: a bar over the replays, and the turns of this one."""
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("replays", total=run_count)
        state = {"runs": 0, "turns": 0}

        def step(what: str, done: int) -> None:
            # The count starts again with each replay; that of the footprint is none of those asked for.
            if done < state["turns"] and what != "footprint":
                state["runs"] += 1
            state["turns"] = done
            bars.update(task, description=f"{what}, {done} turns", completed=state["runs"])

        yield step
