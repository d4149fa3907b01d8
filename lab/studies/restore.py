#!/usr/bin/env python3
"""Time to first token: a restored history beside a recomputed one, by method, place and length.

    python -m lab.studies.restore --history 512,2048                   # SmolLM2-135M on this machine's CPU
    python -m lab.studies.restore --twin --history 512,2048 --json     # its multi-head twin
    python -m lab.studies.restore --shapes llama-2-7b,opt-30b --device cuda --layers 8 --json
    python -m lab.studies.restore --shapes tiny --device cpu --history 96   # in seconds; no figures
    python -m lab.studies.restore --plot lab/notes/restore.png FILE...          # no measurement

A store of its own; rows as the model computed them; ceilings first, then a profile of the machine and what
each stage takes in the pipeline, then plans. Ways take turns round by round; a figure is the median with the
quartiles, ratios are taken within a round. A case whose cache or logits are not those of recomputation within
the bounds has no figure, and the exit status is 1. Random weights: of as many layers as --layers says, which
each row names.
"""

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gpu_worker.families.model_shape import model_shape
from gpu_worker.model.proof import adapt
from gpu_worker.planning.datasheets import MODEL_NAMES
from gpu_worker.profiling.measure import Stopwatch, measure
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count
from lab.restoring.bed import SAVED_KINDS, Bed
from lab.restoring.ceilings import ceilings
from lab.restoring.figures import compared, storage
from lab.restoring.models import SHAPES, Subject, subjects
from lab.restoring.plot import plot
from lab.restoring.rounds import Rounds
from lab.restoring.table import show

_SHORT = 64
_MIB = 1 << 20


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
    history: Annotated[str, typer.Option(help="Lengths of history.")] = "512,2048",
    new_tokens: Annotated[int, typer.Option(help="Tokens behind it.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds that count.", min=2)] = 5,
    ssd_tokens: Annotated[int, typer.Option(help="Longest history that comes from SSD, too.")] = 4096,
    budget_s: Annotated[float, typer.Option(help="No length is begun behind this.")] = 1e9,
    threads: Annotated[int, typer.Option(help="Of torch; 0: one for each core.")] = 0,
    directory: Annotated[Path | None, typer.Option(help="Where the store keeps its data.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure, check, print; exits with 1 where a restored cache is not recomputation's."""
    if files:
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
        if picture is not None:
            plot(rows, picture)
        else:
            show(rows)
        return
    # So that the store's server ends with a run that is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(threads or physical_core_count())
    where = torch.device(device)
    lengths = sorted(map(int, history.split(",")))
    token_count = lengths[-1] + new_tokens
    begin = time.monotonic()
    rows = []
    for subject in subjects(shapes, model, ids, where, twin=twin, layers=layers, token_count=token_count):
        for row in _measured(subject, lengths, new_tokens, rounds, ssd_tokens, directory, begin + budget_s):
            rows.append(row)
            if as_json:
                print(json.dumps(row), flush=True)
    if not as_json:
        show(rows)
    if picture is not None:
        plot(rows, picture)
    if red := [row for row in rows if row.get("problem")]:
        sys.exit(
            f"{len(red)} cases are not as recomputation has them: {red[0]['method']}, {red[0]['problem']}"
        )


def _measured(
    subject: Subject,
    lengths: list[int],
    new_tokens: int,
    rounds: int,
    ssd_tokens: int,
    directory: Path | None,
    until: float,
) -> Iterator[dict[str, Any]]:
    model, adapter = subject.model, adapt(subject.model)
    shape = model_shape(adapter, subject.name)
    is_cuda = model.device.type == "cuda"
    command = shlex.join(["python", "-m", "lab.studies.restore", *sys.argv[1:]])
    facts = subject.facts(command) | {"count_of_rounds": rounds}
    if subject.name in MODEL_NAMES:
        yield {"what": "storage", **storage(subject.name)}
    room = [
        length
        for length in lengths
        if length + new_tokens <= min(len(subject.token_ids), model.config.max_position_embeddings)
    ]
    saved_bytes = sum(layer.row_bytes(kind) for layer in shape.layers for kind in SAVED_KINDS)
    from_ssd_bytes = max((length for length in room if length <= ssd_tokens), default=0) * 2 * saved_bytes
    size_bytes = int(2 * (max(room, default=0) * saved_bytes + from_ssd_bytes)) // 4096 * 4096 + (128 << 20)
    with ExitStack() as stack:
        store = stack.enter_context(embedded_store(size_bytes, directory))
        bed = stack.enter_context(Bed(model, store, is_random=subject.is_random))
        is_small = shape.layers[0].hidden_row_bytes < 1024
        limits = ceilings(
            model.device,
            model.dtype,
            directory or Path.cwd(),
            size_bytes=(4 if is_small else 512 if is_cuda else 64) * _MIB,
            order=512 if is_small else 8192 if is_cuda else 2048,
        )
        yield {"what": "ceilings", **facts, **asdict(limits)}
        for length in room:
            if time.monotonic() > until:
                yield {"what": "left out", **facts, "history": length}
                continue
            known = sorted({min(_SHORT, length), max(length // 4, 1), length})
            profile = measure(
                adapter,
                name=subject.name,
                hardware=facts["device"],
                lengths=known,
                ssd_directory=directory,
                stopwatch=Stopwatch(adapter.layers[0].device, repeat_count=1),
            ).profile
            ids = subject.token_ids[: length + new_tokens]
            found = list(
                Rounds(bed, limits, rounds, facts).measure(
                    ids[:length], ids[length:], profile, with_ssd=length <= ssd_tokens
                )
            )
            yield from found
            for each in compared(found):
                yield {"what": "compared", **facts, "history": length, **each}


if __name__ == "__main__":
    typer.run(main)
