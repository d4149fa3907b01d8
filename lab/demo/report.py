"""Results for people, as tables, and for programs, as one JSON document (`--json`).

Names in the document are stable; times are seconds, sizes bytes.

    ctxcache, machine{...}          the version, and what figures depend on
    mode                            "conversation" or "history"
    identical, problems[]           whether everything went as without dropping state; if not, what did not
    models[]                        model, path, architecture, sizes, ssd_io_mode, kill_count
    turns[]                         model, turn, user, reply, and runs[]: method, source ("none", "dram",
                                    "ssd"), *_token_count, restore_s, first_token_s, identical
    methods[]                       model, method, bytes_per_token, stored_bytes_per_token
    windows[]                       a turn over the context window, by model and method
    history[]                       model, method, source, history_token_count; median, lowest, highest

In `turns[].runs[]` the run that never drops its state has the method "reference".
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

from gpu_worker.planning.plan import Method
from lab.demo.machine import Machine
from lab.demo.results import (
    HistoryPoint,
    ModelResult,
    ReferenceTurn,
    RestoredTurn,
    Source,
    Spread,
    Stored,
    TurnResult,
    WindowTurn,
)
from lab.demo.subject import METHOD_TITLES
from lab.demo.view import duration, source_words


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


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | dict[str, Json] | None"


def document(results: Sequence[ModelResult], machine: Machine, *, mode: str) -> dict[str, Json]:
    """Return what `json.dumps` takes."""
    problems = [problem for result in results for problem in result.problems]
    return {
        "ctxcache": version("ctxcache"),
        "machine": asdict(machine),
        "mode": mode,
        "identical": not problems,
        "problems": problems,
        "models": [_model(result) for result in results],
        "turns": [{"model": r.title, **_turn(turn)} for r in results for turn in r.turns],
        "methods": [{"model": r.title, **_stored(kept)} for r in results for kept in r.stored],
        "windows": [{"model": r.title, **_window(turn)} for r in results for turn in r.windows],
        "history": [{"model": r.title, **_point(point)} for r in results for point in r.history],
    }


def _model(result: ModelResult) -> dict[str, Json]:
    return {
        "model": result.title,
        "path": result.path,
        "architecture": result.architecture,
        "dtype": "float32",
        "layer_count": result.layer_count,
        "hidden_size": result.hidden_size,
        "head_count": result.head_count,
        "kv_head_count": result.kv_head_count,
        "head_size": result.head_size,
        "parameter_count": result.parameter_count,
        "ssd_io_mode": result.ssd_io_mode,
        "kill_count": result.kill_count,
        "window_refusal": result.window_refusal,
        "identical": not result.problems,
    }


def _turn(turn: TurnResult) -> dict[str, Json]:
    return {
        "turn": turn.number,
        "user": turn.user_text,
        "reply": turn.reference.text,
        "runs": [_reference(turn.reference), *map(_restored, turn.restored)],
    }


def _reference(turn: ReferenceTurn) -> dict[str, Json]:
    return {
        "method": "reference",
        "source": "engine",
        "history_token_count": turn.history_token_count,
        "prefilled_token_count": len(turn.new_token_ids),
        "first_token_s": turn.first_token_ns / 1e9,
        "token_ids": turn.token_ids,
        "identical": True,
    }


def _restored(turn: RestoredTurn) -> dict[str, Json]:
    return {
        "method": turn.method.value,
        "source": turn.source.value,
        "history_token_count": turn.history_token_count,
        "reused_token_count": turn.reused_token_count,
        "prefilled_token_count": turn.prefilled_token_count,
        "restore_s": turn.restore_ns / 1e9,
        "first_token_s": turn.first_token_ns / 1e9,
        "token_ids": turn.token_ids,
        "identical": turn.is_identical,
        "first_difference": turn.first_difference,
        "problem": turn.problem,
    }


def _stored(kept: Stored) -> dict[str, Json]:
    return {
        "method": kept.method.value,
        "bytes_per_token": kept.bytes_per_token,
        "token_count": kept.token_count,
        "ssd_bytes": kept.ssd_bytes,
        "stored_bytes_per_token": kept.ssd_bytes / max(kept.token_count, 1),
    }


def _window(turn: WindowTurn) -> dict[str, Json]:
    return {
        "method": turn.method.value,
        "window": turn.window,
        "sink_count": turn.sink_count,
        "history_token_count": turn.history_token_count,
        "dropped_token_count": turn.dropped_token_count,
        "reused_token_count": turn.reused_token_count,
        "new_token_count": turn.new_token_count,
        "prefilled_token_count": turn.prefilled_token_count,
        "restore_s": turn.restore_ns / 1e9,
        "first_token_s": turn.first_token_ns / 1e9,
        "reply": turn.text,
        "problem": turn.problem,
    }


def _point(point: HistoryPoint) -> dict[str, Json]:
    return {
        "method": point.method.value,
        "source": point.source.value,
        "history_token_count": point.history_token_count,
        **dict(_spread("first_token", point.first_token)),
        **dict(_spread("restore", point.restore)),
        "problem": point.problem,
    }


def _spread(name: str, times: Spread) -> Iterator[tuple[str, Json]]:
    yield f"{name}_median_s", times.median_ns / 1e9
    yield f"{name}_lowest_s", times.lowest_ns / 1e9
    yield f"{name}_highest_s", times.highest_ns / 1e9
