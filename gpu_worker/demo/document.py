"""The result as one JSON document, for `--json`. Names are stable; times are seconds, sizes bytes.

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

from gpu_worker.demo.machine import Machine
from gpu_worker.demo.results import (
    HistoryPoint,
    ModelResult,
    ReferenceTurn,
    RestoredTurn,
    Spread,
    Stored,
    TurnResult,
    WindowTurn,
)

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
