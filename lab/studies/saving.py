#!/usr/bin/env python3
"""The cost of saving to a decoding batch.

Time between tokens without it, in two stages, and written directly.

    python -m lab.studies.saving                                # SmolLM2-135M on this machine's CPU
    python -m lab.studies.saving --model DIR --batch 1,4,16 --kind kv --json
    python -m lab.studies.saving --shape llama-2-7b --history 512 --rounds 15 --json   # a GPU, random weights
    python -m lab.studies.saving --shape tiny --steps 4 --rounds 2                     # in seconds

A server in a process of its own keeps the sessions. `direct` writes each session's row to its place in the
arena within the layer's hook, as HCache's DirectIO (EuroSys '25, section 6.3.3) does to its disks; both
commit where a segment ends. Ways take turns block by block; a figure is the median over rounds of a block's
mean, with the quartiles, and ratios are within a round. CPU time is the engine thread's own: with `--threads
1` it is all that a step computes, whoever else uses the machine. Sessions begin at different places of their
segments, so that each block has its share of commits.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import ctxcache
from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.client.types import SessionInfo
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.generation import Capture
from gpu_worker.model_spec import model_spec
from gpu_worker.packed import PackedModel, SequenceCache, Work
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.proof import adapt
from gpu_worker.saving import Saver, Slice
from lab.bench.server import serving
from lab.demo.machine import physical_core_count, this_machine

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 32000,
    },
}
ARENA_BYTES = 6 << 30
WAYS = ("none", "two-stage", "direct")


class Way(Protocol):
    """One way to save a batch's steps. `engine_s` is what it took of the engine's thread."""

    engine_s: float

    def open(self, sessions: Sequence[SessionInfo]) -> None:
        """These are the batch's sessions."""

    def passing(self, slices: Sequence[Slice], token_ids: Sequence[int]) -> AbstractContextManager[None]:
        """Around a step."""

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """A stream's rows of the step."""

    def close(self) -> None:
        """The block is over: what is left is saved."""


class Nothing:
    """Saves nothing."""

    engine_s = 0.0

    def open(self, sessions: Sequence[SessionInfo]) -> None:
        """See Way."""

    def passing(self, slices: Sequence[Slice], token_ids: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        """See Way."""
        return nullcontext()

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """See Way."""

    def close(self) -> None:
        """See Way."""


class TwoStage:
    """The saver."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._sessions: Sequence[SessionInfo] = ()
        self.engine_s = 0.0

    def open(self, sessions: Sequence[SessionInfo]) -> None:
        """See Way."""
        self._sessions = sessions
        for session in sessions:
            self._saver.open(session)

    @contextmanager
    def passing(self, slices: Sequence[Slice], token_ids: Sequence[int]) -> Iterator[None]:
        """See Way."""
        begin_s = time.perf_counter()
        with self._saver.passing(slices, token_ids):
            self.engine_s += time.perf_counter() - begin_s
            yield
            begin_s = time.perf_counter()
        self.engine_s += time.perf_counter() - begin_s

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """See Way."""
        begin_s = time.perf_counter()
        self._saver.put(layer, kind, rows)
        self.engine_s += time.perf_counter() - begin_s

    def close(self) -> None:
        """See Way."""
        for session in self._sessions:
            if (failure := self._saver.wait(session.name)) is not None:
                raise failure
        if self._saver.shed_token_counts:
            sys.exit(f"saves were shed: {self._saver.shed_token_counts}")


class Direct:
    """Each session's row goes to its place in the arena in the layer's hook, and commits within the step."""

    def __init__(self, client: Client, model: CallerModel) -> None:
        self._client, self._model = client, model
        self._writers: list[SessionWriter] = []
        self._row = 0
        self.engine_s = 0.0

    def open(self, sessions: Sequence[SessionInfo]) -> None:
        """See Way."""
        self._row = 0
        self._writers = [
            self._client.sessions.open(session, self._model).writer(4 * SEGMENT_TOKENS)
            for session in sessions
        ]

    @contextmanager
    def passing(self, slices: Sequence[Slice], token_ids: Sequence[int]) -> Iterator[None]:  # noqa: ARG002
        """See Way."""
        yield
        begin_s = time.perf_counter()
        self._row += 1
        for writer, token in zip(self._writers, token_ids, strict=True):
            writer.write(TOKENS, self._row - 1, np.array([token], "<i4"))
            end = writer.write_offset + self._row
            if end % SEGMENT_TOKENS == 0:
                writer.commit(end, keep_open=True)
        self.engine_s += time.perf_counter() - begin_s

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """See Way."""
        begin_s = time.perf_counter()
        stream = Stream(layer, kind)
        for number, writer in enumerate(self._writers):
            row = rows[number : number + 1].cpu().contiguous().view(torch.uint8)
            writer.write(stream, self._row, row.numpy())
        self.engine_s += time.perf_counter() - begin_s

    def close(self) -> None:
        """See Way."""
        for writer in self._writers:
            writer.close()


class Blocks:
    """Blocks of decode steps of one batch, each from the same history on sessions of its own."""

    def __init__(self, model: PreTrainedModel, client: Client, spec: ModelSpec, plan: RestorePlan) -> None:
        self._packed, self._adapter = PackedModel(model), adapt(model)
        self._client, self._plan, self._spec = client, plan, spec
        self._own = client.models.register(spec)
        self._caches: list[SequenceCache] = []
        self._history = 0

    def prepare(self, batch: int, history: int, steps: int) -> None:
        """Caches of `history` tokens each, all of them copies of one."""
        self._history = history
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(0, self._spec_vocabulary, (history,), generator=generator).tolist()
        first = SequenceCache(history + steps + 1)
        self._packed.step([Work(first, ids)])
        self._caches = [first, *(first.fork() for _ in range(batch - 1))]

    def run(self, way: Way, steps: int) -> list[tuple[float, float]]:
        """Seconds of each step and of the engine thread's CPU in it.

        The first, which warms up, is left out.
        """
        sessions = [self._session(number) for number in range(len(self._caches))]
        way.open(sessions)
        for cache in self._caches:
            cache.token_count = self._history
        ids = [1] * len(self._caches)
        times = []
        streams = () if isinstance(way, Nothing) else self._plan.streams()
        with Capture(self._adapter, streams, way.put, is_on_host=False):
            for step in range(steps + 1):
                begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
                slices = [Slice(session.name, session.token_count + step, 1) for session in sessions]
                with way.passing(slices, ids):
                    logits = self._packed.step(
                        [Work(cache, [token]) for cache, token in zip(self._caches, ids, strict=True)]
                    )
                ids = logits.argmax(dim=-1).tolist()
                times.append((time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s))
        way.close()
        for session in sessions:
            self._client.sessions.delete(session.name)
        return times[1:]

    @property
    def _spec_vocabulary(self) -> int:
        return int(self._packed.model.config.vocab_size)

    def _session(self, number: int) -> SessionInfo:
        """A session whose growing segment holds some rows already: not all reach its end at once."""
        session = self._client.sessions.create(self._own, layout=self._plan.streams()).info
        count = number * SEGMENT_TOKENS // len(self._caches)
        if not count:
            return session
        specs = self._spec.resolve(self._plan.streams())
        return self._client.sessions.open(session, self._own).append(
            {spec.stream: np.zeros((count, spec.row_bytes), np.uint8) for spec in specs}
        )


def main(
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"Random weights of a shape: {', '.join(SHAPES)}.")] = "",
    batch: Annotated[str, typer.Option(help="Sequences of a step.")] = "16",
    history: Annotated[int, typer.Option(help="Tokens of each before the first step.", min=1)] = 128,
    kind: Annotated[str, typer.Option(help="What is saved: hidden or kv.")] = "hidden",
    steps: Annotated[int, typer.Option(help="Steps of a block.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Blocks of each way.", min=2)] = 7,
    threads: Annotated[int, typer.Option(help="Of torch; 0: one for each core.")] = 0,
    directory: Annotated[Path | None, typer.Option(help="Where the server keeps its data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure, print; exits with 1 where a save was lost."""
    torch.set_num_threads(threads or physical_core_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded, name = _load(model, shape, device)
    spec = model_spec(loaded, model_id="saving")
    plan = RestorePlan.uniform(Method(kind), spec.layer_count)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        server = stack.enter_context(serving(root / "data", arena_bytes=ARENA_BYTES, ssd_bytes=ARENA_BYTES))
        client = stack.enter_context(ctxcache.connect(server.target("tcp"), access="local"))
        saver = stack.enter_context(Saver(client, CallerModel(spec), plan.streams(), device=device))
        blocks = Blocks(loaded, client, spec, plan)
        for count in map(int, batch.split(",")):
            blocks.prepare(count, history, steps)
            figures = _compare(
                blocks,
                {
                    "none": Nothing(),
                    "two-stage": TwoStage(saver),
                    "direct": Direct(client, CallerModel(spec)),
                },
                steps,
                rounds,
            )
            facts = {
                "model": name,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else this_machine().title,
                "threads": torch.get_num_threads(),
                "kind": kind,
                "batch": count,
                "history": history,
                "steps": steps,
                "rounds": rounds,
                "bytes_per_step": count * sum(item.row_bytes for item in spec.resolve(plan.streams())),
            }
            for row in figures:
                _report({**facts, **row}, as_json=as_json)


def _load(path: Path | None, shape: str, device: torch.device) -> tuple[PreTrainedModel, str]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if shape:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096)
        with device:
            loaded = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        return loaded.train(mode=False), shape
    # Its other requirements are not on every machine with a GPU.
    from lab.demo.models import load_model, smollm2  # noqa: PLC0415

    path = path or smollm2()
    return load_model(path, dtype)[0].to(device), path.name  # type: ignore[arg-type]


def _compare(blocks: Blocks, ways: dict[str, Way], steps: int, rounds: int) -> Iterator[dict[str, object]]:
    wall_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    thread_s = 0.0
    for number in range(rounds + 1):
        order = list(ways.items())[number % len(ways) :] + list(ways.items())[: number % len(ways)]
        for name, way in order:
            before_s = _saving_threads_s()
            times = blocks.run(way, steps)
            if number == 0:
                way.engine_s = 0.0
                continue
            thread_s += _saving_threads_s() - before_s
            wall_s[name].append(statistics.fmean(wall for wall, _ in times))
            cpu_s[name].append(statistics.fmean(cpu for _, cpu in times))
    for name, way in ways.items():
        done = rounds * (steps + 1)
        yield {
            "way": name,
            "time_between_tokens_s": _spread(wall_s[name]),
            "over_none": _over(wall_s[name], wall_s["none"]),
            "engine_cpu_s": _spread(cpu_s[name]),
            "engine_cpu_over_none": _over(cpu_s[name], cpu_s["none"]),
            "saving_on_engine_s": way.engine_s / done,
            "saving_threads_cpu_s": thread_s / done if name == "two-stage" else 0.0,
            "blocks_s": wall_s[name],
        }


def _over(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    return _spread([value / other - 1 for value, other in zip(values, others, strict=True)])


def _saving_threads_s() -> float:
    """CPU seconds of the second stage so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("ctxcache-save") and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "low": low, "high": high}


def _report(row: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    mean, over = row["time_between_tokens_s"], row["over_none"]
    engine_us = 1e6 * row["saving_on_engine_s"]  # type: ignore[operator]
    threads_us = 1e6 * row["saving_threads_cpu_s"]  # type: ignore[operator]
    print(
        f"batch {row['batch']:>3}  {row['way']:<10} {1e3 * mean['median']:9.2f} ms a token"  # type: ignore[index]
        f"  {over['median']:+7.2%} [{over['low']:+.2%}, {over['high']:+.2%}]"  # type: ignore[index]
        f"  CPU {row['engine_cpu_over_none']['median']:+7.2%}"  # type: ignore[index]
        f"  of it on the engine {engine_us:7.0f} us, threads {threads_us:6.0f} us a step",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
