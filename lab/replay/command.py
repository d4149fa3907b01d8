"""`ctxcache trace replay`: a recording played against another store, and both side by side."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.call import CliCall, online
from ctxcache.cli.documents import examples

if TYPE_CHECKING:
    from ctxcache.cli.documents import Plain

ASKED = (("lookups", "look-ups"), ("reads", "reads"))
RESULTS = (
    ("dram", "in DRAM"),
    ("ssd", "on SSD"),
    ("missed", "not there"),
    ("empty", "without tokens"),
    ("refused", "refused"),
)
COUNTS = (
    ("read_tokens", "tokens read"),
    ("dram_tokens", "of those in DRAM"),
    ("appended_tokens", "tokens appended"),
    ("evicted", "sessions evicted"),
    ("expired", "sessions expired"),
    ("cut", "sessions cut"),
    ("lost_calls", "calls lost"),
)
QUANTILES = ("p50_ms", "p95_ms", "p99_ms")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FileArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A recording, .gz too.", show_default=False),
]


@app.command(
    epilog=examples(
        "ctxcache trace replay calls.jsonl --speed 0",
        "ctxcache trace replay calls.jsonl --speed 60 --concurrency 4",
    ),
)
@online
def replay(
    call: CliCall,
    file: FileArgument,
    speed: Annotated[
        float,
        typer.Option("--speed", metavar="TIMES", min=0, help="As fast as recorded; 0: without a pause."),
    ] = 1.0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, max=64, help="Calls at a time, one a session.")
    ] = 4,
) -> None:
    """Ask another store what was recorded, with rows made up of the same sizes, and compare.

    It is for stores that hold nothing else: sessions and models named `replay-...` stay there. Times to live
    shrink with --speed. One call at a time is exact in the order of calls; more hold each session's.
    """
    from lab.replay.replay import replay as play  # noqa: PLC0415  it imports numpy

    with _progress() as step:
        outcome = play(
            file, lambda: call.client(moves_rows=True), speed=speed, concurrency=concurrency, step=step
        )
    figures = outcome.figures()
    call.show_facts(figures, comparison(figures))


def comparison(figures: "Mapping[str, Plain]") -> str:
    """Both sides, and how long calls took."""
    recorded, replayed = _mapping(figures["recorded"]), _mapping(figures["replayed"])
    rows = [("", "recorded", "replayed"), *_hits(recorded, replayed)]
    rows += [(title, str(recorded[name]), str(replayed[name])) for name, title in COUNTS]
    rows.append(("seconds", str(recorded["elapsed_s"]), str(replayed["elapsed_s"])))
    took: list[Sequence[str]] = [("call", "count", "p50 ms", "p95 ms", "p99 ms")]
    for kind, one in _mapping(figures["latencies"]).items():
        took.append((kind, *(str(_mapping(one)[name]) for name in ("count", *QUANTILES))))
    for side, values in (("recorded", recorded), ("replayed", replayed)):
        inside = _mapping(values["read_in_store"])
        took.append((f"read, in the store, {side}", *(str(inside[name]) for name in ("count", *QUANTILES))))
    errors = [
        f"{kind}: {count} x {reason}"
        for kind, reasons in _mapping(figures["errors"]).items()
        for reason, count in _mapping(reasons).items()
    ]
    late = f"at most {figures['most_late_s']} s late; {figures['primed_sessions']} sessions were there before"
    cut = [] if figures["is_whole"] else ["the recording has no end: it was cut off"]
    return "\n".join([*_columns(rows), "", *_columns(took), "", late, *errors, *cut])


def _hits(
    recorded: "Mapping[str, Plain]", replayed: "Mapping[str, Plain]"
) -> "Iterator[tuple[str, str, str]]":
    for name, title in ASKED:
        for result, words in RESULTS:
            left, right = _mapping(recorded[name])[result], _mapping(replayed[name])[result]
            if left or right:
                yield f"{title} {words}", str(left), str(right)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def _mapping(value: "Plain") -> "dict[str, Plain]":
    if not isinstance(value, dict):
        raise TypeError("is no mapping")
    return value


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("reading")

        def step(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield step
