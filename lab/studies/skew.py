#!/usr/bin/env python3
"""Time to first token with the engine's last caches kept in front of the store, by skew.

HCache, section 6.4.

    python -m lab.studies.skew --model DIR --ids IDS.json.gz --sessions 100 --kept 15 --skews 0,1,2 --json
    python -m lab.studies.skew --shapes llama-2-7b --layers 8 --device cuda --kept 3   # 9 GB of DRAM
    python -m lab.studies.skew --shapes tiny --sessions 8 --kept 2 --rounds 2     # in seconds; no figures
    python -m lab.studies.skew --plot lab/notes/skew.png FILE...                              # no measurement

Every session is a real one in a store of its own; requests are drawn by Zipf's law; the caches of the
sessions used last stay where the engine computes, and every other request is a restore from DRAM, the engine
starting at its lead. Contexts are of one length, from places of the text that are apart where it is long
enough. Figures are medians over rounds, ratios are taken within a round. A cache, restored or kept, or a
prediction that is not recomputation's leaves no figures and an exit status of 1.
"""

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from gpu_worker.families.model_shape import model_shape
from gpu_worker.model.proof import adapt
from gpu_worker.planning.baselines import HIDDEN, KV, RECOMPUTE
from gpu_worker.planning.profile import StatePlace
from gpu_worker.profiling.measure import Stopwatch, measure
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count
from lab.restoring.bed import SAVED_KINDS, Bed, Case
from lab.restoring.figures import LEAD, PLANNED
from lab.restoring.models import SHAPES, Subject, subjects
from lab.restoring.plot import plot_skew
from lab.restoring.rounds import Row, calibrated, plans
from lab.restoring.skewed import Skewed

_SEGMENT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setup:
    """Tokens of sessions and behind them, sessions, caches kept, requests in a round, rounds that count."""

    history: int
    new_tokens: int
    sessions: int
    kept: int
    requests: int
    count_of_rounds: int


def main(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Results to show or plot; nothing is measured.")
    ] = None,
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    twin: Annotated[bool, typer.Option(help="Its multi-head twin.")] = False,
    ids: Annotated[Path | None, typer.Option(help="Token ids as a JSON list, .gz too, for --model.")] = None,
    shapes: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "",
    layers: Annotated[int, typer.Option(help="Of a shape, at most; 0: all.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    history: Annotated[int, typer.Option(help="Tokens of each session.", min=1)] = 224,
    new_tokens: Annotated[int, typer.Option(help="Tokens behind it.", min=1)] = 16,
    sessions: Annotated[int, typer.Option(help="Of them in the store.", min=1)] = 100,
    kept: Annotated[int, typer.Option(help="Of them kept as caches, by each method.", min=0)] = 15,
    skews: Annotated[str, typer.Option(help="Exponents; 0: all sessions alike.")] = "0,0.5,1,1.5,2",
    requests: Annotated[int, typer.Option(help="In a round.", min=1)] = 60,
    rounds: Annotated[int, typer.Option(help="Rounds that count.", min=2)] = 3,
    threads: Annotated[int, typer.Option(help="Of torch; 0: one for each core.")] = 0,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure, check, print; exits with 1 where a cache is not recomputation's."""
    if files:
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
    else:
        # So that the store's server ends with a run that is ended from outside.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        torch.set_num_threads(threads or physical_core_count())
        setup = Setup(history, new_tokens, sessions, kept, requests, rounds)
        token_count = sessions * (history + new_tokens)
        rows = []
        for subject in subjects(
            shapes, model, ids, torch.device(device), twin=twin, layers=layers, token_count=token_count
        ):
            for row in measured(subject, setup, [float(skew) for skew in skews.split(",")]):
                rows.append(row)
                if as_json:
                    print(json.dumps(row), flush=True)
    if picture is not None:
        plot_skew(rows, picture)
    elif not as_json:
        show(rows)
    if red := [row for row in rows if row.get("problem")]:
        sys.exit(
            f"{len(red)} rows are not as recomputation has them: {red[0]['method']}, {red[0]['problem']}"
        )


def measured(subject: Subject, setup: Setup, skews: Sequence[float]) -> Iterator[Row]:
    """Rows of one model. Raises BadParameter."""
    history, new_tokens = setup.history, setup.new_tokens
    adapter = adapt(subject.model)
    shape = model_shape(adapter, subject.name)
    command = shlex.join(["python", "-m", "lab.studies.skew", *sys.argv[1:]])
    facts = subject.facts(command) | asdict(setup)
    texts = contexts(subject, history + new_tokens, setup.sessions)
    row_bytes = sum(layer.row_bytes(kind) for layer in shape.layers for kind in SAVED_KINDS)
    stored_tokens = setup.sessions * -(-history // _SEGMENT_TOKENS) * _SEGMENT_TOKENS
    size_bytes = int(2 * stored_tokens * row_bytes) // 4096 * 4096 + (128 << 20)
    profile = measure(
        adapter,
        name=subject.name,
        hardware=facts["device"],
        lengths=sorted({min(64, history), history}),
        stopwatch=Stopwatch(adapter.layers[0].device, repeat_count=1),
    ).profile
    with embedded_store(size_bytes) as store, Bed(subject.model, store, is_random=subject.is_random) as bed:
        saved = []
        for ids in texts:
            saved.append(bed.add(ids[:history], ids[history:]))
            # Its sessions have all streams that any method reads.
            saved[-1].stored.clear()
        known = calibrated(bed, profile, history, new_tokens)
        found = plans(shape, known, history, new_tokens, StatePlace.DRAM)
        cases = {name: Case(found[name], StatePlace.DRAM, LEAD) for name in (KV, HIDDEN, PLANNED)}
        skewed = Skewed(bed, saved, {RECOMPUTE: Case(None), **cases}, setup.kept, facts)
        for skew in skews:
            yield from skewed.measure(skew, setup.requests, setup.count_of_rounds)


def contexts(subject: Subject, token_count: int, session_count: int) -> list[list[int]]:
    """Token ids of each session: parts of the text that begin as far apart as it allows.

    Raises BadParameter.
    """
    step = min(token_count, (len(subject.token_ids) - token_count) // max(session_count - 1, 1))
    if token_count > subject.model.config.max_position_embeddings or step < 1 < session_count or step < 0:
        raise typer.BadParameter(
            f"{subject.name} or its text is too short for {session_count} x {token_count} tokens"
        )
    return [
        subject.token_ids[begin : begin + token_count]
        for begin in range(0, session_count * step or 1, step or 1)
    ]


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print times and ratios."""
    out = console or Console(width=160)
    times = Table(
        "model",
        "skew",
        "method",
        "hits",
        "mean ms",
        "median ms",
        "hit ms",
        "miss ms",
        "cache off by",
        "plan",
        box=None,
    )
    ratios = Table("model", "skew", "figure", "here", "paper", box=None)
    for row in rows:
        head = [row["model"], f"{row['skew']:g}"]
        if row["what"] == "compared":
            ratios.add_row(*head, row["figure"], _told(row["ratio"], 1, 2), row["paper"])
        elif row["problem"]:
            times.add_row(*head, row["method"], *["RED"] * 5, f"{row['cache_error']:.1e}", row["problem"])
        else:
            seconds = (_told(row[f"{name}_ttft_s"], 1e3, 1) for name in ("mean", "median", "hit", "miss"))
            times.add_row(
                *head,
                row["method"],
                f"{row['hit_rate']['median']:.0%}",
                *seconds,
                f"{row['cache_error']:.1e}",
                row["plan"],
            )
    out.print(times)
    out.print(ratios)


def _told(found: dict[str, float] | None, scale: float, digits: int) -> str:
    if found is None:
        return "-"
    low, middle, high = (found[name] * scale for name in ("low", "median", "high"))
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


if __name__ == "__main__":
    typer.run(main)
