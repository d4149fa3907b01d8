"""`ctxcache demo`: a real model continues a conversation from restored state, token for token.

Knows options, streams and exit codes; imports the models' libraries only when it runs, so that
--help is quick. Exit codes are ctxcache's, and 1 when a reply differs. Worst case: an interrupted
run, which ends its server and removes its files first.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ctxcache.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from lab.demo.machine import Machine
    from lab.demo.results import ModelResult
    from lab.demo.run import Options
    from lab.demo.view import View

_DIFFERENT = 1


Model = Annotated[
    Path | None,
    typer.Option(help="Any local transformers model directory.", show_default="SmolLM2-135M-Instruct"),
]
Twin = Annotated[bool, typer.Option("--twin/--no-twin", help="Also run the multi-head twin of a GQA model.")]
Turns = Annotated[int, typer.Option(help="Turns of the conversation.", min=2)]
OpeningTokens = Annotated[
    int | None, typer.Option(help="Tokens of the first text.", show_default="512, or what fits", min=16)
]
TurnTokens = Annotated[int, typer.Option(help="Tokens of each later text.", min=16)]
ReplyTokens = Annotated[int, typer.Option(help="Most tokens of each reply.", min=1)]
Window = Annotated[
    int | None,
    typer.Option(
        help="Context window of the last, truncated turn.", show_default="the conversation's length"
    ),
]
History = Annotated[
    str, typer.Option(help="Instead: measure at these lengths, such as 512,2048,4096.", show_default=False)
]
Repeats = Annotated[int, typer.Option(help="Measurements per point with --history.", min=1)]
Threads = Annotated[
    int | None, typer.Option(help="Threads for the model.", show_default="physical cores", min=1)
]
DataDirectory = Annotated[
    Path | None, typer.Option(help="Keep the store here, by model.", show_default="removed afterwards")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a picture.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def demo(
    *,
    model: Model = None,
    twin: Twin = True,
    turns: Turns = 5,
    opening_tokens: OpeningTokens = None,
    turn_tokens: TurnTokens = 64,
    reply_tokens: ReplyTokens = 32,
    window: Window = None,
    history: History = "",
    repeats: Repeats = 3,
    threads: Threads = None,
    data_directory: DataDirectory = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Hold a conversation with a real model, drop all its state after every turn, and restore it.

    Starts a store of its own and kills it on the way. Exits with 1 when a restored reply differs
    from that of a run which never dropped its state.
    """
    from lab.demo.run import Options  # noqa: PLC0415  see the module's docstring

    options = Options(
        turn_count=turns,
        opening_tokens=opening_tokens,
        turn_tokens=turn_tokens,
        reply_tokens=reply_tokens,
        window=window,
        history=_lengths(history),
        repeat_count=repeats,
        data_directory=data_directory,
    )
    if plot is not None:
        _require_writable(plot)
    with _ended_by_sigterm():
        machine = _prepare(threads)
        results = _run(model, options, with_twin=twin, as_json=as_json)
    if plot is not None:
        _plot(results, machine, plot)
    _print(results, machine, as_json=as_json)
    if any(result.problems for result in results):
        raise typer.Exit(_DIFFERENT)


def _run(model: Path | None, options: "Options", *, with_twin: bool, as_json: bool) -> "list[ModelResult]":
    from lab.demo.run import run_model  # noqa: PLC0415
    from lab.demo.subject import subjects  # noqa: PLC0415

    results = []
    with _view(as_json=as_json) as view:
        for subject in subjects(model, with_twin=with_twin, progress=_progress(view)):
            results.append(run_model(subject, options, view))
            # Before the next is loaded: one model in memory at a time.
            del subject
    return results


def _prepare(threads: int | None) -> "Machine":
    import torch  # noqa: PLC0415

    from lab.demo.machine import physical_core_count, this_machine  # noqa: PLC0415

    torch.set_num_threads(threads or physical_core_count())
    return this_machine()


@contextmanager
def _view(*, as_json: bool) -> "Iterator[View]":
    from lab.demo.view import LineView, LiveView  # noqa: PLC0415

    console = _console()
    if as_json or not console.is_terminal:
        yield LineView(sys.stderr if as_json else sys.stdout)
        return
    with LiveView(console) as view:
        yield view


def _progress(view: "View") -> "Callable[[str, int, int], None]":
    def show(step: str, done_bytes: int, total_bytes: int, /) -> None:
        size = f", {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB" if total_bytes else ""
        view.doing(f"{step}{size}")

    return show


def _print(results: "list[ModelResult]", machine: "Machine", *, as_json: bool) -> None:
    from lab.demo.report import (  # noqa: PLC0415
        conversation_table,
        document,
        history_table,
    )

    if as_json:
        mode = "history" if results[0].history else "conversation"
        typer.echo(json.dumps(document(results, machine, mode=mode), indent=1))
        return
    console = _console()
    for result in results:
        console.print()
        console.print(history_table(result) if result.history else conversation_table(result))
    console.print(f"\n{machine.title}, fp32", style="dim", highlight=False)
    for sentence, style in _verdict(results):
        console.print(sentence, style=style, highlight=False, markup=False)


def _verdict(results: "list[ModelResult]") -> Iterator[tuple[str, str]]:
    problems = [problem for result in results for problem in result.problems]
    yield from ((f"DIFFERENT: {problem}", "bold red") for problem in problems)
    if not problems:
        kills = sum(result.kill_count for result in results)
        killed = f", with the server killed {kills} times on the way" if kills else ""
        yield (
            f"Identical: every restored reply is that of the run that never dropped its state{killed}.",
            "green",
        )


def _plot(results: "list[ModelResult]", machine: "Machine", path: Path) -> None:
    from lab.demo.plot import plot  # noqa: PLC0415

    plot(results, machine, path)
    sys.stderr.write(f"picture: {path}\n")


def _console() -> "Console":
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    # In a file nobody's terminal limits the width, and a cut cell says nothing.
    return console if console.is_terminal else Console(width=160)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise typer.BadParameter(f"--history: {text!r} is not a list such as 512,2048") from error


def _require_writable(path: Path) -> None:
    """Refuse a picture that cannot be written before an hour is spent on what it shows."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidArgument(field="--plot", problem=f"{path} cannot be written")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does, so that nothing stays behind."""

    def stop(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
