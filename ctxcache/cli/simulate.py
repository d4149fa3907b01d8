"""`ctxcache simulate`: replays a trace through placement policies and prints what they reach.

Thin: traces, the clock and the counts are `ctxcache.simulate`. Worst case: a line of the trace is wrong; the
sentence names file, line and field.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import typer

from ctxcache.cli.documents import Output, Plain, examples
from ctxcache.cli.options import Shared, taking
from ctxcache.cli.simulate_options import Options
from ctxcache.simulate.load import Load
from ctxcache.simulate.recorded import contents, is_recording
from ctxcache.simulate.study import PolicyOf, StudyOutcome, served, study
from ctxcache.simulate.trace import Trace

app = typer.Typer()


@app.command(
    "simulate",
    epilog=examples(
        "ctxcache simulate trace.csv --policies lru,belady --footprint 0.5,1",
        "ctxcache simulate trace.csv --dram 64GiB --ssd 1TiB --costs",
        "ctxcache simulate trace.csv --blocks --footprint 0.25,0.5,1 -o json",
    ),
)
@taking(Options)
def simulate(options: Options) -> None:
    """Replay a trace of sessions through placement policies on a virtual clock, and say what each keeps.

    Hit rates are over turns of sessions that had one before. `belady` knows the future; no store can have it.
    """
    before: Shared = options.invoked.obj or Shared()
    shared = before.but(None, options.output, None)
    options.check(shared.output)
    replayed(options, shared)


def replayed(options: Options, shared: Shared, policy_of: PolicyOf = served) -> list[StudyOutcome]:
    """Replay the trace under every policy at every capacity, and print what each came to.

    Raises BadParameter, InvalidTrace.
    """
    capacities, chosen = options.capacities(), options.chosen()
    load = options.load(of_recording(options, options.preset()))
    trace = trace_at(options, options.trace)
    teacher = None if options.learned_from is None else trace_at(options, options.learned_from)
    outcomes = []
    with progress(len(chosen) * len(capacities)) as step:
        for outcome in study(
            trace,
            load,
            chosen,
            capacities,
            step=step,
            block_tokens=options.block_tokens if options.blocks else None,
            is_space=options.spaces,
            teacher=teacher,
            policy_of=policy_of,
        ):
            outcomes.append(outcome)
            if shared.output is not Output.TABLE:
                shared.show_facts(cast("Mapping[str, Plain]", outcome.to_dict()), "")
    if shared.output is Output.TABLE:
        _screen().show(outcomes, are_costs=options.costs)
    return outcomes


def of_recording(options: Options, load: Load) -> Load:
    """The load, with the bytes a token of the store that was recorded, where the trace is a recording."""
    if options.token_bytes is not None or options.model is not None or not is_recording(options.trace):
        return load
    return replace(load, token_bytes=contents(options.trace).token_bytes)


def trace_at(options: Options, path: Path) -> Trace:
    """The trace in a file, at the pace of the options."""
    return Trace(
        path, arrivals_times=options.arrivals(), pace=options.pace(), block_tokens=options.block_tokens
    )


def _screen() -> ModuleType:
    from ctxcache.cli import simulate_screen  # noqa: PLC0415  rich takes as long as all the rest

    return simulate_screen


def _unseen(_what: str, _done: int) -> None:
    """Standard error is no terminal."""


@contextmanager
def progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Where a person is looking a bar over the replays, and the turns of this one."""
    if not sys.stderr.isatty():
        yield _unseen
        return
    with _screen().progress(run_count) as step:
        yield step
