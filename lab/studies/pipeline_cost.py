#!/usr/bin/env python3
"""The host's part of a restore: processor time for each batch, of this process and of each of its threads.

    python -m lab.studies.pipeline_cost                     # batches of 128 KiB on a device that is none
    python -m lab.studies.pipeline_cost --timeline          # what each thread did, and when, in one restore
    python -m lab.studies.pipeline_cost --device cuda --way arena   # 64 MiB of Llama-2-7B's rows on a GPU

The device that is none has CUDA's lanes: their streams and events are stand-ins that have passed at once,
and Triton's launches go as far as the driver's. Copying and computing are nothing there, so that what is
left is this project's Python, Triton's, and torch's calls on the CPU. Torch's own calls of CUDA are missing
from it. Rows lie in chunks, 32 to a batch, as 64 MiB of a GPU's batch do. Each case has the cost of the
pipeline alone: the lease is made here, without a store. On a GPU each has its share of a copy of its bytes.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.backends.compiler import GPUTarget

from ctxcache.client.arena import Bytes, SlotLayout, SlotRows, Verifier, spans_of_segments
from ctxcache.client.convert import stream_to_wire
from ctxcache.client.rows import LeasedRows
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import align
from ctxcache.format.streams import Stream
from gpu_worker.kernels.chunk_checksum import fused as sums
from gpu_worker.kernels.libcuda import Libcuda
from gpu_worker.model.proof import adapt
from gpu_worker.pipeline import pipeline as pipeline_module
from gpu_worker.pipeline import sources
from gpu_worker.pipeline.compute import Compute, Kernels, KernelWeights
from gpu_worker.pipeline.lane import Cuda, Deadline
from gpu_worker.pipeline.pipeline import BufferRing, Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.sources import ArenaPins, ArenaSource, BatchLanding, LeasedSource
from gpu_worker.pipeline.target import PagedTarget
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule

METHODS = (Method.KV, Method.HIDDEN)
LAYERS = 8
PAGE_TOKENS = 16
CHUNKS_OF_A_BATCH = 32
_CAPABILITY = 90
_COPIES = 20


class Size(NamedTuple):
    """A model's heads, and the tokens of a chunk and of a session."""

    heads: int
    head_size: int
    chunk_tokens: int
    token_count: int

    @property
    def hidden(self) -> int:
        """Elements of a layer's input."""
        return self.heads * self.head_size


SMALL = Size(1, 16, 64, 8192)
"""Chunks of K and V have 4 KiB, batches 128 KiB."""
LARGE = Size(32, 128, 128, 16384)
"""Llama-2-7B: chunks have 2 MiB, batches of K and V 64 MiB."""


# -- a device that is none -----------------------------------------------------------------------------


class _NoStream:
    cuda_stream = 0
    device_index = 0

    def __init__(self, _device: object = None) -> None:
        pass

    def wait_event(self, event: object) -> None:
        """All events have passed."""


class _NoEvent:
    def __init__(self, **_: bool) -> None:
        pass

    def record(self, stream: object) -> None:
        """Passed at once."""

    def query(self) -> bool:
        """Whether it has passed."""
        return True

    def elapsed_time(self, _other: object) -> float:
        """Milliseconds between two."""
        return 0.0


_NO_STREAM = _NoStream()


class NoGpu(Cuda):
    """CUDA's lanes, on memory of the host."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)


class NoDriver:
    """As much of Triton's driver as a launch asks for. `checksum` is what every chunk comes to."""

    checksum = 0

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (self, 0, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def get_current_device(self) -> int:
        """Any."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any."""
        return device

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", _CAPABILITY, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The stand-in for the driver's launch. Any: Triton has no types for these."""
        del metadata
        if source.fn.__name__ != "_chunk_ends":
            return lambda *_, **__: None
        return self._end

    def _end(self, *given: Any, **_: Any) -> None:
        checksums = next(each for each in reversed(given) if isinstance(each, Tensor))
        checksums.fill_(self.checksum)


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """Torch's streams and events, and Triton's driver, are stand-ins."""
    with ExitStack() as stack:
        for name, found in (
            ("Stream", _NoStream),
            ("Event", _NoEvent),
            ("stream", lambda _stream: contextlib.nullcontext()),
            ("set_stream", lambda _stream: None),
            ("current_stream", lambda _device=None: _NO_STREAM),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, found))
        triton.runtime.driver.set_active(NoDriver())
        device, driver = torch.device("cpu"), NoLibcuda()

        def chunk_sums(_device: torch.device) -> sources.SumsChunks:
            return sums.ChunkSums(device)

        def arena(rows: LeasedRows, sums: sources.SumsChunks, _bringer: object) -> ArenaSource:
            return ArenaSource(rows, sums, driver)

        stack.enter_context(mock.patch.object(sources, "chunk_sums", chunk_sums))
        stack.enter_context(mock.patch.object(sources, "ArenaSource", arena))
        # A product on the host is no launch, but computing.
        stack.enter_context(mock.patch.object(torch, "mm", lambda *_, out: out))
        yield


class NoLibcuda(Libcuda):
    """Calls that go nowhere."""

    def __init__(self) -> None:
        self._contexts = {0: ctypes.c_void_p()}

    def _call(self, name: str, *arguments: object) -> None:
        pass


# -- a session in an arena -----------------------------------------------------------------------------


class Bed:
    """A session's rows, all zero, a model's layers, and an engine's cache for them."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        config = LlamaConfig(
            hidden_size=size.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            intermediate_size=16,
            vocab_size=64,
            max_position_embeddings=size.token_count,
        )
        with torch.no_grad(), device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        self.adapter = adapt(model.eval())
        self.weights = KernelWeights(self.adapter)
        # Rotary tables are the session's, not the batch's.
        with torch.no_grad():
            self.compute = Kernels(self.weights, torch.arange(size.token_count), is_fused=True)
        shape = size.token_count // PAGE_TOKENS, PAGE_TOKENS, size.heads, size.head_size
        cache = [
            (
                torch.empty(shape, dtype=torch.bfloat16, device=device),
                torch.empty(shape, dtype=torch.bfloat16, device=device),
            )
            for _ in range(LAYERS)
        ]
        self.cache, self.slots = cache, torch.arange(size.token_count)
        self._lease()

    def row_bytes(self, method: Method) -> int:
        """Bytes of one token's row."""
        return self.size.hidden * 2 * (2 if method is Method.KV else 1)

    def checksum(self, method: Method) -> int:
        """Of every chunk."""
        return rows_checksum(bytes(self.size.chunk_tokens * self.row_bytes(method)))

    def rows(self, method: Method, *, is_verified: bool) -> LeasedRows:
        """A lease of all rows."""
        streams = [Stream(layer, method.kind) for layer in range(LAYERS)]
        hold: Any = SimpleNamespace(check=_nothing, check_known=_nothing, release_soon=_nothing)
        verifier = None
        if is_verified:
            verifier = Verifier(self.arena, self.layout, self.segments, _nothing, _nothing)
        spans = spans_of_segments(self.segments, 0, self.size.token_count)
        return LeasedRows(SlotRows(self.arena, self.layout, spans), hold, self.lease, streams, verifier)

    def _lease(self) -> None:
        size, at, chunks, checksums = self.size, 4096, [], []
        for layer in range(LAYERS):
            for method in METHODS:
                row_bytes = self.row_bytes(method)
                stream = stream_to_wire(Stream(layer, method.kind))
                # As in a slot of 64 rows; one of more is laid out by the same rule.
                chunks.append(SimpleNamespace(stream=stream, offset_bytes=at, row_bytes=row_bytes))
                checksums.append(self.checksum(method))
                at += align(64 * row_bytes)
        # Any: as the server's messages are, which are not the lab's to make.
        layout: Any = chunks
        self.layout = SlotLayout(layout)
        slot = align(self.layout.of(size.chunk_tokens).end_bytes(size.chunk_tokens))
        count = size.token_count // size.chunk_tokens
        # On a page, as a mapped arena is, and written to: unwritten pages would all be one page.
        self.arena: Bytes = np.frombuffer(mmap.mmap(-1, count * slot), np.uint8)
        self.arena[:] = 0
        self.segments: Any = [_Segment(number, slot, size.chunk_tokens, checksums) for number in range(count)]
        self.lease: Any = SimpleNamespace(
            session=None, range=SimpleNamespace(begin=0, end=size.token_count), segments=self.segments
        )


class _Segment:
    """A segment in the arena, as a lease says it."""

    def __init__(self, number: int, slot_bytes: int, token_count: int, checksums: Sequence[int]) -> None:
        self.segment_id, self.offset_bytes = number + 1, number * slot_bytes
        self.token_count = self.row_capacity = token_count
        self.checksums = checksums
        self.rows = [SimpleNamespace(row_begin=0, row_end=token_count, token_begin=number * token_count)]

    def HasField(self, name: str) -> bool:  # noqa: N802  as of a message
        """Whether it was left on SSD."""
        del name
        return False


def _nothing() -> None:
    return


# -- restores --------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One way of restoring."""

    method: Method
    is_pinned: bool
    """Rows are copied out of the arena by the device; else by way of staging."""
    is_verified: bool

    @property
    def way(self) -> str:
        """By its name."""
        return "arena" if self.is_pinned else "staging"

    @property
    def facts(self) -> dict[str, object]:
        """As a row of results has them."""
        return {"rows": self.method.value, "way": self.way, "is_verified": self.is_verified}


CASES = [
    Case(method, is_pinned, is_verified)
    for method in METHODS
    for is_pinned in (True, False)
    for is_verified in (False, True)
]


class Host:
    """Processor time, and how often each thread gave its processor away by itself."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.switch_count: dict[str, int] = {}
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            name = names.get(int(task.name), "others")
            with contextlib.suppress(OSError):
                cpu_ns = int((task / "schedstat").read_text().split()[0])
                status = dict(
                    line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line
                )
                self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu_ns / 1e9
                count = int(status["voluntary_ctxt_switches"])
                self.switch_count[name] = self.switch_count.get(name, 0) + count


def restore(
    bed: Bed, pipeline: Pipeline, pins: ArenaPins, case: Case, compute: Compute | None = None
) -> float:
    """Restore the session; seconds until its last layer was usable."""
    size = bed.size
    NoDriver.checksum = case_checksum(bed, case)
    target = PagedTarget(bed.cache, bed.slots)
    schedule = RestoreSchedule.of_methods(
        RestorePlan.uniform(case.method, LAYERS), size.token_count, [0] * LAYERS
    )
    rows = bed.rows(case.method, is_verified=case.is_verified)
    with ExitStack() as lent:
        source = lent.enter_context(pins.source(rows)) if case.is_pinned else LeasedSource(rows)
        restoration = lent.enter_context(
            pipeline.start(schedule, source, target, compute or bed.compute, deadline=Deadline.after_s(60))
        )
        restoration.wait_all()
    return restoration.restored_s


def case_checksum(bed: Bed, case: Case) -> int:
    """The checksum that a kernel would find, as a word with a sign."""
    found = bed.checksum(case.method)
    return found - (1 << 64) if found >> 63 else found


def batch_count(bed: Bed, pipeline: Pipeline, case: Case) -> int:
    """Batches of one restore."""
    room = pipeline.rings.staging.size_bytes // bed.row_bytes(case.method)
    tokens = min(room, pipeline.settings.batch_tokens or pipeline.device.batch_tokens)
    return LAYERS * -(-bed.size.token_count // tokens)


def measured(bed: Bed, pipeline: Pipeline, pins: ArenaPins, case: Case, restores: int) -> dict[str, float]:
    """Microseconds for each batch."""
    count = restores * batch_count(bed, pipeline, case)
    restore(bed, pipeline, pins, case)
    before, begin_ns, begin_cpu = Host(), time.perf_counter_ns(), time.process_time_ns()
    for _ in range(restores):
        restore(bed, pipeline, pins, case)
    cpu_us = (time.process_time_ns() - begin_cpu) / 1e3 / count
    wall_us, after = (time.perf_counter_ns() - begin_ns) / 1e3 / count, Host()
    switches = sum(after.switch_count.values()) - sum(before.switch_count.values())
    found = {"cpu_us": cpu_us, "wall_us": wall_us, "switches": switches / count}
    for name, cpu_s in after.cpu_s.items():
        found[f"cpu_us of {name}"] = (cpu_s - before.cpu_s.get(name, 0.0)) * 1e6 / count
    return found


# -- what each thread did ----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A piece of a thread's work, in nanoseconds since the begin: by the clock, and of its processor."""

    thread: str
    what: str
    begin_ns: int
    end_ns: int
    cpu_ns: int


@contextlib.contextmanager
def watched(compute: Compute) -> Iterator[list[Piece]]:
    """Note down each piece of work of a restore."""
    found: list[Piece] = []
    with ExitStack() as stack:
        for owner, name in (
            (BufferRing, "take"),
            (ArenaSource, "land"),
            (LeasedSource, "fill"),
            (BatchLanding, "bring"),
            (pipeline_module, "_copy"),
            (BatchLanding, "sum_up"),
            (compute, "restore"),
            (Restoration, "_announce"),
        ):
            inner = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _noted(found, name, inner)))
        yield found


def _noted(found: list[Piece], what: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        begin_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return inner(*given, **named)
        finally:
            end_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns() - cpu_ns
            name = threading.current_thread().name
            found.append(Piece(name, what.strip("_"), begin_ns, end_ns, cpu_ns))

    return noted


def timeline(
    bed: Bed, pipeline: Pipeline, pins: ArenaPins, case: Case, most: int
) -> Iterator[dict[str, Any]]:
    """One restore's pieces of work: sums for each batch, and the first ones in their order."""
    restore(bed, pipeline, pins, case)
    before = Host()
    with watched(bed.compute) as pieces:
        begin_ns = time.perf_counter_ns()
        restored_s = restore(bed, pipeline, pins, case)
    after, count = Host(), batch_count(bed, pipeline, case)
    sums_of: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        sums_of[piece.thread, piece.what].append(piece)
    yield {"what": "restore", **case.facts, "batches": count, "wall_us": restored_s * 1e6 / count}
    for name, cpu_s in after.cpu_s.items():
        yield {
            "what": "thread",
            **case.facts,
            "thread": name,
            "cpu_us": (cpu_s - before.cpu_s.get(name, 0.0)) * 1e6 / count,
            "switches": (after.switch_count[name] - before.switch_count.get(name, 0)) / count,
        }
    for (thread, what), some in sums_of.items():
        yield {
            "what": "sum",
            **case.facts,
            "thread": thread,
            "work": what,
            "times": len(some),
            "cpu_us": sum(piece.cpu_ns for piece in some) / 1e3 / count,
            "wall_us": sum(piece.end_ns - piece.begin_ns for piece in some) / 1e3 / count,
        }
    for piece in sorted(pieces, key=lambda piece: piece.begin_ns)[:most]:
        yield {
            "what": "piece",
            "thread": piece.thread,
            "work": piece.what,
            "begin_us": (piece.begin_ns - begin_ns) / 1e3,
            "us": (piece.end_ns - piece.begin_ns) / 1e3,
            "cpu_us": piece.cpu_ns / 1e3,
        }


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--device", choices=("none", "cuda"), default="none")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--restores", type=int, default=5, help="of each case in a round")
    arguments.add_argument("--way", choices=("arena", "staging"), help="by default both")
    arguments.add_argument("--timeline", action="store_true", help="one restore, piece by piece")
    arguments.add_argument("--pieces", type=int, default=40, help="of a time line, how many are printed")
    arguments.add_argument(
        "--switch-intervals", default="", help="seconds, by commas; by default Python's own"
    )
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        is_gpu = given.device == "cuda"
        device: Cuda
        if is_gpu:
            size, device, pins = LARGE, Cuda(torch.device("cuda")), ArenaPins(torch.device("cuda"))
        else:
            stack.enter_context(no_gpu())
            size, device = SMALL, NoGpu(torch.device("cpu"))
            pins = ArenaPins(torch.device("cpu"), NoLibcuda())
        bed = Bed(size, device.device)
        stack.callback(pins.close)
        slot_bytes = CHUNKS_OF_A_BATCH * size.chunk_tokens * bed.row_bytes(Method.KV)
        tokens = CHUNKS_OF_A_BATCH * size.chunk_tokens
        settings = None if is_gpu else PipelineSettings(slot_bytes=slot_bytes, batch_tokens=tokens)
        pipeline = stack.enter_context(Pipeline(device, settings))
        own = sys.getswitchinterval()
        stack.callback(sys.setswitchinterval, own)
        cases = [case for case in CASES if given.way in (None, case.way)]
        for interval in [float(part) for part in given.switch_intervals.split(",") if part] or [own]:
            sys.setswitchinterval(interval)
            facts = {"device": given.device, "switch_interval_s": interval}
            if given.timeline:
                for case in cases:
                    for row in timeline(bed, pipeline, pins, case, given.pieces):
                        print(json.dumps({**facts, **_rounded(row)}), flush=True)
            else:
                _compare(bed, pipeline, pins, cases, given, facts)


def _compare(
    bed: Bed, pipeline: Pipeline, pins: ArenaPins, cases: Sequence[Case], given: Any, facts: dict[str, Any]
) -> None:
    taken: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(given.rounds):
        # In each round: it is the same bus, at the same time.
        for case in cases:
            found = measured(bed, pipeline, pins, case, given.restores)
            if bed.device.type == "cuda":
                size_bytes = LAYERS * bed.size.token_count * bed.row_bytes(case.method)
                copied_us = size_bytes / arena_bytes_per_s(bed) * 1e6
                found["share_of_copy"] = copied_us / batch_count(bed, pipeline, case) / found["wall_us"]
            taken[case].append(found)
    for case, rounds in taken.items():
        row = {"what": "pipeline", **facts, **case.facts, **_rounded(_medians(rounds))}
        print(json.dumps(row), flush=True)


def arena_bytes_per_s(bed: Bed) -> float:
    """Bytes a second that the device copies out of the arena, which a restore has pinned before.

    One copy behind the other, as a restore's are: the profile's rate is of single ones, out of other memory.
    """
    source = torch.from_numpy(bed.arena[: 64 << 20])
    target = torch.empty(len(source), dtype=torch.uint8, device=bed.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    took_s: float = begin.elapsed_time(end) / 1e3
    return _COPIES * len(source) / took_s


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for one in rounds for name in one}, key=lambda name: (" of " in name, name))
    medians = {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}
    low, high = min(one["cpu_us"] for one in rounds), max(one["cpu_us"] for one in rounds)
    return {**medians, "cpu_us least": low, "cpu_us most": high}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    main()
