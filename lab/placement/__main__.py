"""`python -m lab.placement`: `ctxcache simulate` with every policy of the literature, sweeps and pictures.

With --sweep it plays what a figure compares, prints the table and draws the picture; with --forms it compares
forms of state in place of policies. Worst case: a line of the trace is wrong; the sentence names file, line
and field.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import typer

from ctxcache.cli.documents import Output, Plain
from ctxcache.cli.failures import ExitCode, exit_code_of, sentence
from ctxcache.cli.options import Shared, taking
from ctxcache.cli.simulate import of_recording, progress, replayed, trace_at
from ctxcache.errors import CacheError, InvalidArgument
from lab.placement import screen
from lab.placement.census import PacedTrace
from lab.placement.forms import forms_of, keep
from lab.placement.options import PaperOptions
from lab.placement.policies import policy_of
from lab.placement.sweeps import Sweep, SweepRow, by_capacity, play, prepare

SUFFIXES = (".png", ".svg")
Draw = Callable[[Sweep, Sequence[SweepRow], str], None]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@taking(PaperOptions)
def replay(options: PaperOptions) -> None:
    """Replay a trace through placement policies, sweeps of the papers, or forms of state."""
    shared = Shared().but(None, options.output, None)
    options.check(shared.output)
    sweep = options.played()
    draw = _drawer(options.plot)
    if sweep is not None:
        _run_sweep(sweep, options, shared, draw)
    elif options.forms is not None:
        _run_forms(options, options.forms, shared)
    else:
        outcomes = replayed(options, shared, policy_of)
        if draw is not None:
            caption = f"{options.trace.name}, blocks of {options.block_tokens} tokens"
            draw(*by_capacity(outcomes), caption)


def _run_forms(options: PaperOptions, text: str, shared: Shared) -> None:
    """Compare the forms that were named. Raises BadParameter, InvalidTrace."""
    load = options.load(of_recording(options, options.preset()))
    try:
        forms = forms_of(text, load.token_bytes)
        with progress(1) as step:
            kept, span_s = keep(
                trace_at(options, options.trace), load, forms, lambda done: step("forms", done)
            )
    except InvalidArgument as error:
        if error.facts.get("field") != "forms":
            raise
        raise typer.BadParameter(str(error.facts["problem"]), param_hint="--forms") from error
    figures = [cast("Mapping[str, Plain]", form.to_dict(load, span_s)) for form in kept]
    if shared.output is Output.TABLE:
        screen.show_forms(figures)
        return
    for facts in figures:
        shared.show_facts(facts, "")


def _run_sweep(sweep: Sweep, options: PaperOptions, shared: Shared, draw: Draw | None) -> None:
    load = options.load(of_recording(options, sweep.preset))
    trace = PacedTrace(options.trace, arrivals_times=options.arrivals(), pace=options.pace())
    rows = []
    with screen.sweep_progress() as bar:
        census, runs = prepare(
            sweep, trace, load, options.chosen(), live_bytes=options.live_bytes(), step=bar.step
        )
        bar.begin(len(runs))
        for row in play(trace, runs, job_count=options.jobs, step=bar.step, done=bar.done):
            rows.append(row)
            if shared.output is not Output.TABLE:
                shared.show_facts(cast("Mapping[str, Plain]", row.to_dict(sweep, census)), "")
    if shared.output is Output.TABLE:
        screen.show_sweep(sweep, rows, census)
    if draw is not None:
        draw(sweep, rows, census.sentence())


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
        plot = import_module("lab.placement.plot").plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.stderr.write("lab.placement: --plot needs matplotlib, which is not installed\n")
        raise typer.Exit(ExitCode.USAGE) from error
    return lambda sweep, rows, caption: plot(sweep, rows, caption, path)


def main() -> None:
    """Run the command; an error of ours is a sentence and an exit code."""
    try:
        app(prog_name="python -m lab.placement")
    except CacheError as error:
        sys.stderr.write(f"lab.placement: {sentence(error)}\n")
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
