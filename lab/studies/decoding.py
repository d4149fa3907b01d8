#!/usr/bin/env python3
"""Decoding with K and V on the host: time between tokens, by how much of each layer is projected (KVPR).

    python -m lab.studies.decoding --bus-mb-per-s 150         # SmolLM2's multi-head twin, this machine's CPU
    python -m lab.studies.decoding --shapes llama-2-7b --layers 8 --device cuda --history 4096 --json

On a CPU the bus is a stand-in: copies sleep until they took as long as `--bus-mb-per-s` says, and leave the
cores to the model meanwhile, as a GPU's copy engine does. On a GPU it is the GPU's. Ways take turns round by
round: `copied` is K and V alone, as offloading does it, `projected` layer inputs alone; `closed form` is
KVPR's split of one layer, `search` the one that is best for all layers. Rates are measured first. A figure is
the median of a round's steps, ratios are within a round, and the exit status is 1 where a token is not that
of a cache on the device.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from gpu_worker.engines.transformers_host import HostCache, transfer
from gpu_worker.families.generation import prefill, stream_greedy
from gpu_worker.model.proof import adapt
from gpu_worker.planning.decoding import DecodeRates, closed_split, searched_split, step_s
from lab.demo.machine import physical_core_count
from lab.restoring.models import SHAPES, subjects


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="A local transformers model directory.")] = None,
    shapes: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "",
    layers: Annotated[int, typer.Option(help="Of a shape, at most; 0: all.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    history: Annotated[str, typer.Option(help="Tokens before the reply.")] = "512,1024",
    steps: Annotated[int, typer.Option(help="Tokens of a reply.", min=3)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    bus_mb_per_s: Annotated[float, typer.Option(help="Of a CPU's stand-in for a bus.")] = 150.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure, check, print."""
    torch.set_num_threads(physical_core_count())
    lengths = sorted(map(int, history.split(",")))
    is_cpu = device == "cpu"
    copy = paced(bus_mb_per_s * 1e6) if is_cpu else transfer
    is_right = True
    for subject in subjects(
        shapes, model, None, torch.device(device), twin=True, layers=layers, token_count=lengths[-1]
    ):
        for length in lengths:
            row = measured(subject.model, subject.token_ids[:length], steps, rounds, copy)
            row = {"model": subject.name, "history": length, **row}
            if is_cpu:
                row["bus"] = f"stand-in, {bus_mb_per_s:g} MB/s"
            is_right = is_right and row["is_right"]
            print(json.dumps(row) if as_json else _shown(row), flush=True)
    sys.exit(0 if is_right else 1)


def paced(bytes_per_s: float) -> Callable[[Tensor, Tensor], None]:
    """A transfer that takes as long as on such a bus, with the cores free while it waits."""

    def copy(rows: Tensor, place: Tensor) -> None:
        begin_s = time.perf_counter()
        transfer(rows, place)
        time.sleep(max(0.0, rows.nbytes / bytes_per_s - (time.perf_counter() - begin_s)))

    return copy


def measured(
    model: PreTrainedModel,
    prompt: list[int],
    steps: int,
    rounds: int,
    copy: Callable[[Tensor, Tensor], None],
) -> dict[str, Any]:
    """One length: rates, splits, seconds of a step by way, ratios to copying alone."""
    adapter, count = adapt(model), len(prompt)
    on_device = DynamicCache(config=model.config)
    prefill(model, on_device, prompt[:-1])
    layer_s = min(_steps_s(model, on_device, prompt[-1:], steps)[1]) / len(adapter.layers)
    expected, _ = _steps_s(model, _again(model, prompt), prompt[-1:], steps)
    seconds: dict[str, list[float]] = {}
    splits: dict[str, int] = {}
    is_right = True
    with HostCache(adapter, count + steps + 1, transfer=copy) as held:
        prefill(model, held, prompt[:-1])
        # As it is with the model's other work on the same cores.
        rates: DecodeRates = replace(held.measured(), layer_s=layer_s)
        ways: dict[str, Callable[[int], int]] = {
            "copied": lambda _count: 0,
            "projected": lambda tokens: tokens,
            "closed form": lambda tokens: closed_split(rates, tokens),
            "search": lambda tokens: searched_split(rates, tokens, len(adapter.layers)),
        }
        splits = {way: split(count - 1) for way, split in ways.items()}
        for _ in range(rounds):
            for way, split in ways.items():
                held.forget(count - 1)
                held.split = split
                reply, taken = _steps_s(model, held, prompt[-1:], steps)
                seconds.setdefault(way, []).append(statistics.median(taken))
                is_right = is_right and reply == expected
    return {
        "rates_us": {name: round(each * 1e6, 3) for name, each in asdict(rates).items()},
        "splits": splits,
        "step_ms": {way: round(statistics.median(each) * 1e3, 2) for way, each in seconds.items()},
        "over_copied": {
            way: sorted(round(one / other, 3) for one, other in zip(each, seconds["copied"], strict=True))
            for way, each in seconds.items()
            if way != "copied"
        },
        "predicted_over_copied": {
            way: round(
                _predicted(rates, count, splits[way], adapter) / _predicted(rates, count, 0, adapter), 3
            )
            for way in ("closed form", "search")
        },
        "is_right": is_right,
    }


def _predicted(rates: DecodeRates, count: int, split: int, adapter: Any) -> float:
    return step_s(rates, count - 1, split, len(adapter.layers))


def _again(model: PreTrainedModel, prompt: list[int]) -> Cache:
    held = DynamicCache(config=model.config)
    prefill(model, held, prompt[:-1])
    return held


def _steps_s(
    model: PreTrainedModel, held: Cache, last: list[int], steps: int
) -> tuple[list[int], list[float]]:
    """A reply, and the seconds between its tokens."""
    reply, ends = [], []
    for token in stream_greedy(model, held, last, max_new_tokens=steps, eos_token_ids=()):
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        reply.append(token)
        ends.append(time.perf_counter())
    return reply, [after - before for before, after in pairwise(ends)]


def _shown(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


if __name__ == "__main__":
    typer.run(main)
