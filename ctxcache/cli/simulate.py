"""`ctxcache simulate`: replays a trace through placement policies and prints what they reach.

With --sweep it plays what a figure compares, prints the table and draws the picture. Thin: traces, the clock,
the counts and the pictures are `ctxcache.simulate`. Worst case: a line of the trace is wrong; the sentence
names file, line and field.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import typer

from ctxcache.cli.documents import Output, Plain, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.options import Shared, taking
from ctxcache.cli.simulate_options import Options
from ctxcache.errors import InvalidArgument
from ctxcache.simulate.forms import forms_of, keep
from ctxcache.simulate.load import Load
from ctxcache.simulate.recorded import contents, is_recording
from ctxcache.simulate.study import ALL_POLICIES, study
from ctxcache.simulate.sweeps import SWEEPS, Sweep, SweepRow, by_capacity, play, prepare
from ctxcache.simulate.trace import PacedTrace, Trace

if TYPE_CHECKING:
    from ctxcache.cli.simulate_screen import SweepBar

SUFFIXES = (".png", ".svg")
Draw = Callable[[Sweep, Sequence[SweepRow], str], None]
_NEEDS_PLOT = "ctxcache: --plot needs matplotlib, which is not installed; pip install 'ctxcache[plot]'\n"
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
        _screen().show(outcomes, are_costs=options.costs)
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
    _screen().show_forms(cast("Sequence[Mapping[str, Plain]]", figures))


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
        _screen().show_sweep(sweep, rows, census)
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
        # matplotlib is optional.
        plot = import_module("ctxcache.simulate.plot").plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.stderr.write(_NEEDS_PLOT)
        raise typer.Exit(ExitCode.USAGE) from error
    return lambda sweep, rows, caption: plot(sweep, rows, caption, path)


def _screen() -> ModuleType:
    from ctxcache.cli import simulate_screen  # noqa: PLC0415  rich takes as long as all the rest

    return simulate_screen


def _unseen(_what: str, _done: int) -> None:
    """Standard error is no terminal."""


@contextmanager
def _progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Where a person is looking a bar over the replays, and the turns of this one."""
    if not sys.stderr.isatty():
        yield _unseen
        return
    with _screen().progress(run_count) as step:
        yield step


class _NoBar:
    """Standard error is no terminal."""

    def begin(self, run_count: int) -> None:
        """See SweepBar."""

    def step(self, what: str, turn_count: int) -> None:
        """See SweepBar."""

    def done(self) -> None:
        """See SweepBar."""


@contextmanager
def _sweep_progress() -> "Iterator[SweepBar | _NoBar]":
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    with _screen().sweep_progress() as bar:
        yield bar
