"""`ctxcache bench`: measures each path beside its limit and its peer, and prints the table.

Thin: what is measured and how is `lab.bench`, imported when the command runs. Worst case: a row
fails and says so in its place; the others go on.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.documents import examples
from ctxcache.cli.failures import ExitCode

if TYPE_CHECKING:
    from lab.bench.row import Row
    from lab.bench.run import Run

ROUNDS, QUICK_ROUNDS = 15, 2
_NEEDS_PLOT = "ctxcache: --plot needs matplotlib, which is not installed; pip install './lab[bench]'\n"
Step = Callable[[str, int, int], None]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=examples("ctxcache bench --list", "ctxcache bench --rows lookup --quick"))
def bench(
    rows: Annotated[
        str, typer.Option(help="Only rows whose names begin so, separated by commas.", metavar="NAME,...")
    ] = "",
    list_rows: Annotated[bool, typer.Option("--list", help="Print the rows' names and end.")] = False,  # noqa: FBT002
    rounds: Annotated[int | None, typer.Option(help="Rounds of each row.", min=1, show_default="15")] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, 2 rounds: figures mean nothing.")] = False,  # noqa: FBT002
    check: Annotated[bool, typer.Option(help="Exit with 1 when a goal is missed or a row fails.")] = False,  # noqa: FBT002
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON with every round.")] = False,  # noqa: FBT002
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this file.", dir_okay=False)] = None,
    directory: Annotated[
        Path, typer.Option(help="On the disk to measure; what is made there is removed.", file_okay=False)
    ] = Path("/var/tmp"),  # noqa: S108  # a disk, where /tmp may be memory
    transport: Annotated[
        str, typer.Option(help="What rows beside Redis go over: tcp or unix.", metavar="tcp|unix")
    ] = "tcp",
) -> None:
    """Measure each path beside the machine's limit and beside a peer, interleaved, and check every byte.

    A row whose peer is not installed says how to get it. Exits with 0 even when goals are missed, unless
    --check.
    """
    from lab.bench.rows import ROWS  # noqa: PLC0415  numpy, grpc and RocksDB
    from lab.bench.run import Options, run_all  # noqa: PLC0415

    chosen = _chosen(ROWS, rows)
    if list_rows:
        typer.echo(
            "\n".join(f"{row.name:24} {row.path}  (beside: {row.beside}; {row.goal})" for row in chosen)
        )
        return
    draw = _plotter(plot)
    if transport not in ("tcp", "unix"):
        raise typer.BadParameter(f"{transport!r} is neither tcp nor unix", param_hint="--transport")
    options = Options(
        round_count=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        is_quick=quick,
        directory=directory.resolve(),
        transport=transport,
    )
    with _progress(len(chosen)) as step:
        run = run_all(chosen, options, command=_command(), date=datetime.now(UTC).isoformat(), step=step)
    _show(run, as_json=as_json)
    if draw is not None:
        draw(run)
    if check and not run.is_good:
        raise typer.Exit(ExitCode.INTERNAL)


def _chosen(rows: "dict[str, Row]", patterns: str) -> "Sequence[Row]":
    from lab.bench.row import named  # noqa: PLC0415  as above

    if not patterns:
        return list(rows.values())
    try:
        return named(rows, patterns)
    except KeyError as error:
        problem = f"no row's name begins with {error.args[0]!r}; see --list"
        raise typer.BadParameter(problem, param_hint="--rows") from error


def _plotter(path: Path | None) -> "Callable[[Run], None] | None":
    """Find matplotlib before anything is measured."""
    if path is None:
        return None
    try:
        from lab.bench.plot import plot  # noqa: PLC0415  matplotlib is optional
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.stderr.write(_NEEDS_PLOT)
        raise typer.Exit(ExitCode.USAGE) from error
    return lambda run: plot(run.rows, path)


def _show(run: "Run", *, as_json: bool) -> None:
    from rich.console import Console  # noqa: PLC0415  --help prints no tables
    from rich.table import Table  # noqa: PLC0415

    from lab.bench.report import TITLES, cells, remarks  # noqa: PLC0415

    if as_json:
        typer.echo(run.to_json())
        return
    table = Table(*TITLES, box=None, header_style="bold", pad_edge=False)
    for result in run.rows:
        table.add_row(*cells(result))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(table)
    console.print()
    for line in remarks(run.rows):
        console.print(line)
    console.print(
        f"{run.machine['cpu']}, {run.machine['core_count']} cores, {run.machine['disk']}, load"
        f" {run.load_at_start}"
    )


@contextmanager
def _progress(row_count: int) -> Iterator[Step]:
    """Draw a bar on stderr where a person is looking."""
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("rows", total=row_count)
        begun: list[str] = []

        def step(row: str, done: int, total: int) -> None:
            if row not in begun:
                begun.append(row)
            bars.update(
                task, description=f"{row} {done}/{total}", completed=len(begun) - 1 + done / max(total, 1)
            )

        yield step


def _command() -> str:
    return " ".join(["ctxcache", *sys.argv[1:]])
