#!/usr/bin/env python3
"""The kernels beside the device's limits, and beside the same work by cuBLAS and torch operations.

    python -m lab.studies.kernels --json > lab/results/DATE-kernels.jsonl      # on a GPU, about three minutes
    TRITON_INTERPRET=1 python -m lab.studies.kernels --tiny                  # the same code on a CPU

Limits are measured first: copies on the device, pinned copies to it, a large product. Each figure is the
median of rounds in which the ways take turns, with the quartiles; what is not equal to its reference is not
timed at all.
"""

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn import functional

from gpu_worker.kernels.chunk_checksum import fused as checksum_fused
from gpu_worker.kernels.chunk_checksum import reference as checksum_reference
from gpu_worker.kernels.chunk_checksum.reference import ChunkPiece
from gpu_worker.kernels.kv_projection import fused as projection_fused
from gpu_worker.kernels.kv_projection import reference as projection_reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.libcuda import Libcuda
from gpu_worker.kernels.operands import Norm, NormKind, Pages, ProjectionWeights, Rotation
from gpu_worker.kernels.quantization import quantize
from gpu_worker.kernels.rope_scatter import fused as scatter_fused
from gpu_worker.kernels.rope_scatter import reference as scatter_reference

GIGA = 1e9
PAGE_TOKENS = 16
TOLERANCE = 1.5e-2
"""Largest difference over largest value that bfloat16 may show."""


@dataclass(frozen=True)
class Shape:
    """One model's layer."""

    name: str
    hidden: int
    kv_heads: int
    head_size: int
    kind: NormKind


SHAPES = (
    Shape("Llama-2-7B", 4096, 32, 128, NormKind.RMS),
    Shape("Llama-2-13B", 5120, 40, 128, NormKind.RMS),
    Shape("OPT-30B", 7168, 56, 128, NormKind.LAYER),
    Shape("Llama-3-8B", 4096, 8, 128, NormKind.RMS),
    Shape("Qwen2.5-7B", 3584, 4, 128, NormKind.RMS),
)
TINY = (Shape("tiny", 64, 2, 16, NormKind.RMS), Shape("tiny-layer-norm", 64, 2, 16, NormKind.LAYER))


class Bench:
    """Rounds of several ways to do the same, in turns."""

    def __init__(
        self, device: torch.device, rounds: int, report: Callable[[dict[str, object]], None]
    ) -> None:
        self.device, self.rounds, self.report = device, rounds, report
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def compare(
        self,
        ways: Mapping[str, Callable[[], object]],
        facts: Mapping[str, object],
        *,
        bytes_moved: float = 0,
        flops: float = 0,
        limits: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Medians in seconds by way; reports each, with its part of the limit where limits are given."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        timed = {name: self._captured(way) for name, way in ways.items()}
        for number in range(self.rounds + 2):
            for name, (way, _) in timed.items():
                taken_s = self._time(way)
                if number >= 2:
                    times[name].append(taken_s)
        medians = {name: statistics.median(values) for name, values in times.items()}
        limit_s = 0.0
        if limits:
            limit_s = max(bytes_moved / limits["copy_bytes_per_s"], flops / limits["flops_per_s"])
        for name, values in times.items():
            low, _, high = statistics.quantiles(values, n=4)
            self.report(
                {
                    **facts,
                    "way": name,
                    "is_graph": timed[name][1],
                    "median_s": medians[name],
                    "quartiles_s": [low, high],
                    "gigabytes_per_s": bytes_moved / medians[name] / GIGA,
                    "teraflops": flops / medians[name] / 1e12,
                    "share_of_limit": limit_s / medians[name] if limit_s else None,
                }
            )
        return medians

    def _captured(self, way: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        """The same work as a CUDA graph, whose replay has no launches from Python in it.

        As it is, and False, where it cannot be captured: it waits for the host, say.
        """
        if self._stream is None:
            return way, False
        # Compiled, and allocated, before it is captured: on a stream of its own, as torch asks for.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                way()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                way()
        except RuntimeError:
            torch.cuda.synchronize()
            return way, False
        return graph.replay, True

    def _time(self, way: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            way()
            return time.perf_counter() - begin
        begin_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin_event.record()
        way()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1000


def main(
    *,
    tokens: Annotated[str, typer.Option(help="Lengths of history.")] = "1024,4096,16384",
    rounds: Annotated[int, typer.Option(help="Rounds that count.", min=2)] = 15,
    tiny: Annotated[
        bool, typer.Option(help="Small shapes on a CPU: the code runs, the figures mean nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure limits, then each kernel; exits with 1 where one is not as its reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        sys.exit("no GPU: --tiny runs the same code on a CPU, in Triton's interpreter")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted"

    def report(fact: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"device": name, "torch": torch.__version__, **fact}), flush=True)
        else:
            share = f"  {fact['share_of_limit']:.2f} of the limit" if fact.get("share_of_limit") else ""
            print(f"{fact['what']:<32} {fact['way']:<22} {1e3 * fact['median_s']:9.3f} ms{share}", flush=True)

    bench = Bench(device, 2 if tiny else rounds, report)
    limits = _limits(bench, tiny=tiny)
    lengths = [37] if tiny else [int(part) for part in tokens.split(",")]
    for shape in TINY if tiny else SHAPES:
        for token_count in lengths:
            _projection(bench, shape, token_count, limits)
            _scatter(bench, shape, token_count, limits)
            _restore(bench, shape, token_count, limits)
    _checksums(bench, limits, tiny=tiny)
    _arena(bench, tiny=tiny)


def _limits(bench: Bench, *, tiny: bool) -> dict[str, float]:
    size = (1 << 20) if tiny else (1 << 30)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    order = 64 if tiny else 8192
    one, other = (torch.randn(order, order, device=bench.device).bfloat16() for _ in range(2))
    copied = bench.compare(
        {"copy on the device": lambda: target.copy_(source)}, {"what": "limit"}, bytes_moved=2 * size
    )
    pinned = bench.compare(
        {"pinned copy to it": lambda: target.copy_(host, non_blocking=True)},
        {"what": "limit"},
        bytes_moved=size,
    )
    product = bench.compare({"bf16 product": lambda: one @ other}, {"what": "limit"}, flops=2 * order**3)
    return {
        "copy_bytes_per_s": 2 * size / copied["copy on the device"],
        "pinned_bytes_per_s": size / pinned["pinned copy to it"],
        "flops_per_s": 2 * order**3 / product["bf16 product"],
    }


def _operands(
    shape: Shape, token_count: int, device: torch.device
) -> tuple[Tensor, LayerWeights, Rotation, Pages]:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator).bfloat16()

    size = shape.kv_heads * shape.head_size
    is_layer = shape.kind is NormKind.LAYER
    norm = Norm(
        shape.kind, 1e-5, normal(shape.hidden).abs() + 0.5, normal(shape.hidden) if is_layer else None
    )
    key, value = (
        ProjectionWeights(normal(size, shape.hidden) / shape.hidden**0.5, shape.kv_heads) for _ in range(2)
    )
    rates = 10000 ** -(torch.arange(shape.head_size // 2, device=device) / (shape.head_size // 2))
    angles = torch.arange(token_count, device=device)[:, None] * rates
    page_count = -(-token_count // PAGE_TOKENS) + 8
    caches = [
        torch.full(
            (page_count, PAGE_TOKENS, shape.kv_heads, shape.head_size), torch.nan, device=device
        ).bfloat16()
        for _ in range(2)
    ]
    slots = torch.randperm(page_count * PAGE_TOKENS, device=device, generator=generator)[:token_count]
    return (
        normal(token_count, shape.hidden),
        LayerWeights(norm, key, value),
        Rotation(angles.cos().bfloat16(), angles.sin().bfloat16()),
        Pages(caches[0], caches[1], slots),
    )


def _projection(bench: Bench, shape: Shape, token_count: int, limits: Mapping[str, float]) -> None:
    hidden, layer, rotation, pages = _operands(shape, token_count, bench.device)
    few_bits = quantize(hidden, bits=8)
    ways: dict[str, Callable[[Pages], object]] = {
        "fused": lambda to: projection_fused.kv_projection(hidden, layer, rotation, to),
        "fused, 8 bits": lambda to: projection_fused.kv_projection(few_bits, layer, rotation, to),
        "separate": lambda to: _separate(hidden, layer, rotation, to),
    }
    _check(
        "kv_projection",
        pages,
        lambda to: projection_reference.kv_projection(hidden, layer, rotation, to),
        ways["fused"],
    )
    weight = torch.cat((layer.key.weight, layer.value.weight))
    row_bytes = 2 * shape.kv_heads * shape.head_size * 2
    out = torch.empty(token_count, len(weight), dtype=hidden.dtype, device=bench.device)
    bench.compare(
        {
            "product alone": lambda: torch.mm(hidden, weight.T, out=out),
            **{name: partial(way, pages) for name, way in ways.items()},
        },
        {"what": f"kv_projection {shape.name} {token_count}", "tokens": token_count, "shape": shape.name},
        bytes_moved=token_count * (2 * shape.hidden + row_bytes) + shape.hidden * row_bytes,
        flops=token_count * shape.hidden * row_bytes,
        limits=limits,
    )


def _separate(hidden: Tensor, layer: LayerWeights, rotation: Rotation, pages: Pages) -> None:
    """The same by torch's own operations, as an engine has them."""
    norm = layer.norm
    if norm.kind is NormKind.LAYER:
        x = functional.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.epsilon)
    else:
        x = functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.epsilon)
    heads = (len(hidden), layer.key.head_count, layer.key.head_size)
    keys = functional.linear(x, layer.key.weight).view(heads)
    values = functional.linear(x, layer.value.weight).view(heads)
    _separate_scatter(keys, values, rotation, pages)


def _separate_scatter(keys: Tensor, values: Tensor, rotation: Rotation, pages: Pages) -> None:
    cos, sin = (table.bfloat16().unsqueeze(1) for table in (rotation.cos, rotation.sin))
    first, second = keys.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    pages.keys.flatten(0, 1)[pages.slots] = turned
    pages.values.flatten(0, 1)[pages.slots] = values


def _scatter(bench: Bench, shape: Shape, token_count: int, limits: Mapping[str, float]) -> None:
    _, _, rotation, pages = _operands(shape, token_count, bench.device)
    size = shape.kv_heads * shape.head_size
    rows = torch.randn(token_count, 2 * size, device=bench.device).bfloat16()
    _check(
        "rope_scatter",
        pages,
        lambda to: scatter_reference.rope_scatter(rows, rotation, to),
        lambda to: scatter_fused.rope_scatter(rows, rotation, to),
    )
    heads = (token_count, shape.kv_heads, shape.head_size)
    bench.compare(
        {
            "fused": lambda: scatter_fused.rope_scatter(rows, rotation, pages),
            "separate": lambda: _separate_scatter(
                rows[:, :size].reshape(heads), rows[:, size:].reshape(heads), rotation, pages
            ),
        },
        {"what": f"rope_scatter {shape.name} {token_count}", "tokens": token_count, "shape": shape.name},
        bytes_moved=token_count * 2 * size * 2 * 2,
        limits=limits,
    )


def _restore(bench: Bench, shape: Shape, token_count: int, limits: Mapping[str, float]) -> None:
    """Eight layers from pinned memory: each copied on one stream and projected on another, two in flight."""
    hidden, layer, rotation, pages = _operands(shape, token_count, bench.device)
    is_cuda = bench.device.type == "cuda"
    layer_count = 8 if is_cuda else 2
    host = torch.zeros(hidden.shape, dtype=hidden.dtype, pin_memory=is_cuda).copy_(hidden)
    staging = [torch.empty_like(hidden) for _ in range(2)]

    def one_after_the_other() -> None:
        for _ in range(layer_count):
            staging[0].copy_(host, non_blocking=True)
            projection_fused.kv_projection(staging[0], layer, rotation, pages)

    ways: dict[str, Callable[[], object]] = {"one stream": one_after_the_other}
    if is_cuda:
        copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def overlapped() -> None:
            computing = torch.cuda.current_stream()
            copies.wait_stream(computing)
            is_read: list[torch.cuda.Event | None] = [None, None]
            for number in range(layer_count):
                place = number % 2
                with torch.cuda.stream(copies):
                    # Nothing is written over what a kernel still reads.
                    if (before := is_read[place]) is not None:
                        copies.wait_event(before)
                    staging[place].copy_(host, non_blocking=True)
                    is_there = copies.record_event()
                computing.wait_event(is_there)
                projection_fused.kv_projection(staging[place], layer, rotation, pages)
                is_read[place] = computing.record_event()

        ways["two streams"] = overlapped
    row_bytes = 2 * shape.kv_heads * shape.head_size * 2
    bench.compare(
        ways,
        {"what": f"restore {shape.name} {token_count}", "tokens": token_count, "shape": shape.name},
        bytes_moved=layer_count * token_count * 2 * shape.hidden,
        flops=layer_count * token_count * shape.hidden * row_bytes,
        limits={"copy_bytes_per_s": limits["pinned_bytes_per_s"], "flops_per_s": limits["flops_per_s"]},
    )


def _checksums(bench: Bench, limits: Mapping[str, float], *, tiny: bool) -> None:
    """As many short chunks as a batch has, and one long chunk: both read their bytes once."""
    for chunk_bytes, count in ((4096, 4),) if tiny else ((64 * 8192, 64), (4096 * 8192, 1), (4096 * 8192, 8)):
        data = torch.randint(0, 256, (chunk_bytes * count,), dtype=torch.uint8, device=bench.device)
        pieces = [ChunkPiece(i, i * chunk_bytes, chunk_bytes, 0, chunk_bytes) for i in range(count)]
        fused, right = checksum_fused.ChunkSums(bench.device), checksum_reference.ChunkSums()
        found = fused.add(data, pieces)
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        if found() != right.add(data, pieces)():
            sys.exit("chunk_checksum is not as its reference")
        bench.compare(
            {"fused": partial(fused.add, data, pieces)},
            {"what": f"chunk_checksum {count} x {chunk_bytes}"},
            bytes_moved=chunk_bytes * count,
            limits=limits,
        )


def _arena(bench: Bench, *, tiny: bool) -> None:
    """Shared memory that is mapped to be read, pinned by the driver: what a restore copies from."""
    if bench.device.type != "cuda":
        return
    size = (1 << 20) if tiny else (1 << 30)
    with NamedTemporaryFile(dir="/dev/shm") as file:  # where arenas are
        file.truncate(size)
        os.pwrite(file.fileno(), os.urandom(1 << 20), 0)
        mapping = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        arena = np.frombuffer(mapping, np.uint8)
        driver = Libcuda()
        driver.use(bench.device.index or 0)
        began_s = time.perf_counter()
        driver.register_host(arena.ctypes.data, size)
        pinned_s = time.perf_counter() - began_s
        host, target = torch.from_numpy(arena), torch.zeros(size, dtype=torch.uint8, device=bench.device)
        ends = range(0, size, 1 << 19)
        pieces = [(target[at : at + (1 << 19)], host[at : at + (1 << 19)]) for at in ends]
        bench.compare(
            {
                "pinned arena to it": lambda: target.copy_(host, non_blocking=True),
                "pinned arena, 512 KiB pieces": lambda: torch._foreach_copy_(
                    [to for to, _ in pieces], [part for _, part in pieces], non_blocking=True
                ),
            },
            {"what": "limit", "pinning_s": pinned_s},
            bytes_moved=size,
        )
        torch.cuda.synchronize()
        if not torch.equal(target[: 1 << 20].cpu(), host[: 1 << 20]):
            sys.exit("copies from the pinned arena gave other bytes")
        driver.unregister_host(arena.ctypes.data)


def _check(
    name: str, pages: Pages, right: Callable[[Pages], object], fast: Callable[[Pages], object]
) -> None:
    expected, found = (
        Pages(torch.full_like(pages.keys, torch.nan), torch.full_like(pages.values, torch.nan), pages.slots)
        for _ in range(2)
    )
    right(expected)
    fast(found)
    for one, other in ((found.keys, expected.keys), (found.values, expected.values)):
        same_places = torch.equal(torch.isnan(one), torch.isnan(other))
        off = (
            one.float() - other.float()
        ).nan_to_num().abs().amax() / other.float().nan_to_num().abs().amax()
        if not same_places or off > TOLERANCE:
            sys.exit(f"{name} is not as its reference: off by {float(off):.2g}, same places: {same_places}")


if __name__ == "__main__":
    typer.run(main)
