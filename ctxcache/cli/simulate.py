"""`ctxcache simulate`: replays a trace through placement policies and prints what they reach.

With --sweep it plays what a figure compares, prints the table and draws the picture. Thin: traces, the clock,
the counts and the pictures are `ctxcache.simulate`. Worst case: a line of the trace is wrong; the sentence
names file, line and field.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ctxcache.cli.documents import Output, Plain, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.options import Shared, taking
from ctxcache.cli.simulate_options import Options
from ctxcache.cli.units import human_size
from ctxcache.errors import InvalidArgument
from ctxcache.simulate.forms import forms_of, keep
from ctxcache.simulate.load import Load
from ctxcache.simulate.recorded import contents, is_recording
from ctxcache.simulate.study import ALL_POLICIES, StudyOutcome, study
from ctxcache.simulate.sweeps import SWEEPS, Sweep, SweepRow, by_capacity, play, prepare
from ctxcache.simulate.tally import Census
from ctxcache.simulate.trace import PacedTrace, Trace

SUFFIXES = (".png", ".svg")
Draw = Callable[[Sweep, Sequence[SweepRow], str], None]
_NEEDS_PLOT = "ctxcache: --plot needs matplotlib, which is not installed; pip install 'ctxcache[plot]'\n"
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

app = typer.Typer()


@app.command(
    "simulate",
    epilog=examples(
        "ctxcache simulate trace.csv --policies lru,belady --footprint 0.5,1",
        "ctxcache simulate trace.csv --dram 64GiB --ssd 1TiB --costs",
        "ctxcache simulate trace.csv --forms kv=1:0,kv_int4=0.31:0.01,tokens=0:1",
        "ctxcache simulate trace.csv --blocks --footprint 0.25,0.5,1 -o json",
    ),
)
@taking(Options)
def simulate(options: Options) -> None:
    """Replay a trace of sessions through placement policies on a virtual clock, and say what each keeps.

    Hit rates are over turns of sessions that had one before. `belady` knows the future; no store can have it.
    """
    shared: Shared = options.invoked.obj or Shared()
    shared = shared.but(None, options.output, None)
    sweep = None if options.sweep is None else _named(options.sweep)
    options.check(sweep, shared.output)
    if sweep is not None:
        run_sweep(sweep, options, shared.output)
        return
    if options.forms is not None:
        run_forms(options, options.forms, shared)
        return
    draw = _drawer(options.plot)
    capacities, chosen = options.capacities(), options.chosen(ALL_POLICIES, ALL_POLICIES)
    load = options.load(_of_recording(options, options.realistic()))
    trace = _trace(options, options.trace)
    teacher = None if options.learned_from is None else _trace(options, options.learned_from)
    block_tokens = options.block_tokens if options.blocks else None
    outcomes = []
    with _progress(len(chosen) * len(capacities)) as step:
        for outcome in study(
            trace,
            load,
            chosen,
            capacities,
            step=step,
            block_tokens=block_tokens,
            teacher=teacher,
        ):
            outcomes.append(outcome)
            if shared.output is not Output.TABLE:
                shared.show_facts(cast("Mapping[str, Plain]", outcome.to_dict()), "")
    if shared.output is Output.TABLE:
        _show(outcomes, are_costs=options.costs)
    if draw is not None:
        draw(*by_capacity(outcomes), f"{options.trace.name}, blocks of {options.block_tokens} tokens")


def _of_recording(options: Options, load: Load) -> Load:
    """The load, with the bytes a token of the store that was recorded, where the trace is a recording."""
    if options.token_bytes is not None or options.model is not None or not is_recording(options.trace):
        return load
    return replace(load, token_bytes=contents(options.trace).token_bytes)


def _trace(options: Options, path: Path) -> Trace:
    return Trace(
        path, arrivals_times=options.arrivals(), pace=options.pace(), block_tokens=options.block_tokens
    )


def _show(outcomes: Sequence[StudyOutcome], *, are_costs: bool) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in COST_TITLES if are_costs else TITLES:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    for outcome in outcomes:
        table.add_row(*(_cost_cells(outcome) if are_costs else _cells(outcome)))
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


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
def _progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Draw on stderr where a person is looking: a bar over the replays, and the turns of this one."""
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


def run_forms(options: Options, text: str, shared: Shared) -> None:
    """Compare the forms that were named. Raises BadParameter, InvalidTrace."""
    load = options.load(_of_recording(options, options.realistic()))
    try:
        forms = forms_of(text, load.token_bytes)
        with _progress(1) as step:
            kept, span_s = keep(_trace(options, options.trace), load, forms, lambda done: step("forms", done))
    except InvalidArgument as error:
        if error.facts.get("field") != "forms":
            raise
        raise typer.BadParameter(str(error.facts["problem"]), param_hint="--forms") from error
    figures = [one.to_dict(load, span_s) for one in kept]
    if shared.output is not Output.TABLE:
        for one in figures:
            shared.show_facts(cast("Mapping[str, Plain]", one), "")
        return
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
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def run_sweep(sweep: Sweep, options: Options, output: Output) -> None:
    """Play the sweep."""
    draw = _drawer(options.plot)
    load = options.load(_of_recording(options, sweep.preset))
    policies = options.chosen(ALL_POLICIES, sweep.policies)
    trace = PacedTrace(options.trace, arrivals_times=options.arrivals(), pace=options.pace())
    rows = []
    with _sweep_progress() as bar:
        census, runs = prepare(sweep, trace, load, policies, live_bytes=options.live_bytes(), step=bar.step)
        bar.begin(len(runs))
        for row in play(trace, runs, job_count=options.jobs, step=bar.step, done=bar.done):
            rows.append(row)
            if output is not Output.TABLE:
                facts = cast("Mapping[str, Plain]", row.to_dict(sweep, census))
                Shared(output=output).show_facts(facts, "")
    if output is Output.TABLE:
        _show_sweep(sweep, rows, census)
    if draw is not None:
        draw(sweep, rows, census.sentence())


def _named(name: str) -> Sweep:
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
    return lambda sweep, rows, caption: plot(sweep, rows, caption, path)


def _show_sweep(sweep: Sweep, rows: Sequence[SweepRow], census: Census) -> None:
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
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
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


class _Bar:
    """The runs that are done, and what the one that is being played has come to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=None)

    def begin(self, run_count: int) -> None:
        self._progress.update(self._task, total=run_count, description="replays", completed=0)

    def step(self, what: str, turn_count: int) -> None:
        self._progress.update(self._task, description=f"{what}, {turn_count} turns")

    def done(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def _sweep_progress() -> Iterator[_Bar]:
    """Draw on stderr where a person is looking."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        yield _Bar(bars)
