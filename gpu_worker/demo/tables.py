"""Results as tables for people: what a method costs to keep, and what it saves. Knows rich."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from gpu_worker.demo.results import HistoryPoint, ModelResult, RestoredTurn, Source, Stored, TurnResult
from gpu_worker.demo.subject import METHOD_TITLES
from gpu_worker.demo.words import duration, source_words
from gpu_worker.plan import Method


def conversation_table(result: ModelResult) -> Table:
    """Time to first token by method and turn; the first turn has nothing to restore and is left out."""
    turns = result.turns[1:]
    table = _table(f"{result.title}: time to first token (of which restoring)", result.stored)
    for turn in turns:
        origin = source_words(turn.restored[-1].source)
        table.add_column(f"{turn.reference.history_token_count:,} tokens\nfrom {origin}", justify="right")
    table.add_column("tokens\nreused", justify="right")
    table.add_column("identical", justify="right")
    kept = [duration(turn.reference.first_token_ns) for turn in turns]
    table.add_row("never dropped", "in the engine", "", *kept, "", "")
    for index, stored in enumerate(result.stored):
        runs = [turn.restored[index] for turn in turns]
        reused = f"{sum(run.reused_token_count for run in runs):,}"
        cells = map(_cell, turns, runs)
        table.add_row(
            *_cost(stored), *cells, reused, _verdict([turn.restored[index] for turn in result.turns])
        )
    return table


def history_table(result: ModelResult) -> Table:
    """Median, lowest and highest time to first token by method, tier and length of history."""
    lengths = sorted({point.history_token_count for point in result.history})
    table = _table(f"{result.title}: time to first token, median (lowest to highest)", result.stored)
    table.add_column("from")
    for length in lengths:
        table.add_column(f"{length:,} tokens", justify="right")
    base = {p.history_token_count: p.first_token.median_ns for p in _of(result, Method.TOKENS, Source.DRAM)}
    for stored in result.stored:
        for source in (Source.DRAM, Source.SSD):
            points = _of(result, stored.method, source)
            cells = [_point_cell(point, base[point.history_token_count]) for point in points]
            where = source_words(source) if stored.method is not Method.TOKENS else "either"
            if cells:
                table.add_row(*_cost(stored), where, *cells)
    return table


def _table(title: str, stored: Sequence[Stored]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", row_styles=["", "on grey11"])
    table.add_column("state comes back by")
    table.add_column("bytes/token", justify="right")
    whole = max((kept.token_count for kept in stored), default=0)
    table.add_column(f"on SSD for\n{whole:,} tokens", justify="right")
    return table


def _cost(stored: Stored) -> tuple[str, str, str]:
    return METHOD_TITLES[stored.method], f"{stored.bytes_per_token:,}", f"{stored.ssd_bytes / 1e6:,.1f} MB"


def _cell(turn: TurnResult, run: RestoredTurn) -> Text:
    slower = _run_of(turn, Method.TOKENS).first_token_ns / run.first_token_ns
    gain = "" if run.method is Method.TOKENS else f", {slower:.1f}x"
    return Text(
        f"{duration(run.first_token_ns)}{gain}\n({duration(run.restore_ns)})",
        "" if run.is_identical else "bold red",
    )


def _point_cell(point: HistoryPoint, base_ns: int) -> Text:
    times = point.first_token
    gain = "" if point.method is Method.TOKENS else f", {base_ns / times.median_ns:.1f}x"
    text = f"{duration(times.median_ns)}{gain}\n({duration(times.lowest_ns)} to {duration(times.highest_ns)})"
    return Text(text, "bold red" if point.problem else "")


def _verdict(runs: Sequence[RestoredTurn]) -> Text:
    good = sum(run.is_identical for run in runs)
    return Text(f"{good} of {len(runs)}\nturns", "green" if good == len(runs) else "bold red")


def _run_of(turn: TurnResult, method: Method) -> RestoredTurn:
    return next(run for run in turn.restored if run.method is method)


def _of(result: ModelResult, method: Method, source: Source) -> list[HistoryPoint]:
    found: Iterator[HistoryPoint] = (
        point for point in result.history if (point.method, point.source) == (method, source)
    )
    return sorted(found, key=lambda point: point.history_token_count)
