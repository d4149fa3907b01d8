#!/usr/bin/env python3
"""The cost of saving to a decoding batch.

Time between tokens without it, in two stages, and written directly.

    python -m lab.studies.saving                                # SmolLM2-135M on this machine's CPU
    python -m lab.studies.saving --model DIR --batch 1,4,16 --kind kv --json
    python -m lab.studies.saving --shape llama-2-7b --history 512 --rounds 15 --json   # a GPU, random weights
    python -m lab.studies.saving --shape llama-2-7b --replayed 100 --json              # also as a CUDA graph
    python -m lab.studies.saving --shape tiny --steps 4 --rounds 2                     # in seconds

A server in a process of its own keeps the sessions. `direct` writes each session's row to its place in the
arena within the layer's hook, as HCache's DirectIO (EuroSys '25, section 6.3.3) does to its disks; both
commit where a segment ends. Ways take turns block by block; a figure is the median over rounds of a block's
mean, with the quartiles, and ratios are within a round. CPU time is the engine thread's own: with `--threads
1` it is all that a step computes, whoever else uses the machine. With --replayed, decoding is captured as a
CUDA graph and replayed so many times, saved and not; stored rows are compared with those of a graph that is
not saved (on a CPU, nothing is captured: the steps are eager, by way of a ring). Sessions begin at different
places of their segments, so that each block has its share of commits.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxcache
from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.client.types import SessionInfo
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.engines.transformers_packed import PackedModel, SequenceCache, Work
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, Sink
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.saving import CapturedPass, Saver, Slice
from gpu_worker.saving.device_ring import RING_BYTES
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
        # First: models are proven by passes that attend as they do by themselves.
        self.adapter = adapt(model)
        self._packed = PackedModel(model)
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
        with Capture(self.adapter, streams, way.put, is_on_host=False):
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
            self._client.sessions.open(session.name).delete()
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


STATIC = "ctxcache_static"


class StaticSteps:
    """Decode steps of a Llama at addresses that stay: a token of each sequence, in caches of one size."""

    def __init__(self, model: PreTrainedModel, batch: int, history: int, steps: int) -> None:
        ALL_ATTENTION_FUNCTIONS.register(STATIC, _attend_static)
        model.set_attn_implementation(STATIC)
        self.model, self._history = model, history
        config = model.config
        device, dtype = model.device, model.dtype
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, history + steps, head_size)
        draw = torch.Generator(device).manual_seed(1)
        self.caches = [
            (
                torch.randn(shape, dtype=dtype, device=device, generator=draw),
                torch.randn(shape, dtype=dtype, device=device, generator=draw),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.table = torch.randint(0, config.vocab_size, (steps, batch), generator=draw, device=device)
        """Token ids of each step."""
        self._ids = torch.zeros(1, batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, batch, dtype=torch.int64, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """The next step is the first."""
        self.positions.fill_(self._history)
        self._next.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """One step: nothing in it comes from the host."""
        self._ids.copy_(self.table.index_select(0, self._next))
        self.model(
            input_ids=self._ids,
            position_ids=self.positions,
            use_cache=False,
            caches=self.caches,
            positions=self.positions[0],
        )
        self.positions.add_(1)
        self._next.add_(1)


# Any: transformers hands over whatever a model has.
def _attend_static(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    caches: Sequence[tuple[Tensor, Tensor]] = (),
    positions: Tensor | None = None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one token of each sequence [1, H, B, C] -> [1, B, H, C]."""
    if positions is None:
        raise ValueError("attention is not told where its tokens are")
    keys, values = caches[module.layer_idx]
    for cache, new in ((keys, key), (values, value)):
        rows = new[0].transpose(0, 1).unsqueeze(2)
        cache.scatter_(2, positions[:, None, None, None].expand(rows.shape), rows)
    seen = torch.arange(keys.shape[2], device=keys.device) <= positions[:, None]
    own = query[0].transpose(0, 1).unsqueeze(2)
    mixed = scaled_dot_product_attention(
        own, keys, values, seen[:, None, None], scale=scaling, enable_gqa=True
    )
    return mixed.squeeze(2)[None], None


class Replays:
    """Blocks of captured decode steps, saved and not."""

    def __init__(
        self,
        adapter: Adapter,
        client: Client,
        own: CallerModel,
        streams: Sequence[Stream],
        saver: Saver,
    ) -> None:
        self._adapter, self._model = adapter, adapter.model
        self._client, self._own, self._streams, self._saver = client, own, streams, saver

    def compare(self, batch: int, history: int, steps: int, rounds: int) -> dict[str, object]:
        """One row of figures."""
        attention = self._model.config._attn_implementation  # noqa: SLF001  there is a way to set it, none to ask
        static = StaticSteps(self._model, batch, history, steps)
        tokens = static.table.tolist()
        plain, _ = self._captured(static, batch, is_saved=False)
        with self._capture(self._saver.put):
            replay, captured = self._captured(static, batch, is_saved=True)
            wall_s: dict[str, list[float]] = {"none": [], "replayed": []}
            engine_s: list[float] = []
            stored: list[dict[Stream, Tensor]] = []
            for number in range(rounds + 1):
                wall_s["none"].append(self._timed(static, [plain] * steps))
                sessions = [
                    self._client.sessions.create(self._own, layout=self._streams).info for _ in range(batch)
                ]
                for session in sessions:
                    self._saver.open(session)
                calls = [
                    _Saved(self._saver, sessions, step, ids, replay, captured)
                    for step, ids in enumerate(tokens)
                ]
                wall_s["replayed"].append(self._timed(static, calls))
                engine_s += [call.engine_s for call in calls] if number else []
                for session in sessions:
                    if (failure := self._saver.wait(session.name)) is not None:
                        raise failure
                if number == rounds:
                    stored = [self._rows(session) for session in sessions]
                for session in sessions:
                    self._client.sessions.open(session.name).delete()
        judged = self._judged(static, stored, steps)
        self._model.set_attn_implementation(attention)
        return {
            "way": "replayed",
            "is_captured": captured is not None,
            "over_none": _over(wall_s["replayed"][1:], wall_s["none"][1:]),
            "time_between_tokens_s": _spread(wall_s["replayed"][1:]),
            "none_s": _spread(wall_s["none"][1:]),
            "saving_on_engine_s": statistics.median(engine_s),
            **judged,
        }

    def _capture(self, sink: Sink) -> Capture:
        return Capture(self._adapter, self._streams, sink, is_on_host=False)

    def _captured(
        self, static: StaticSteps, batch: int, *, is_saved: bool
    ) -> tuple[Callable[[], None], CapturedPass | None]:
        if self._model.device.type != "cuda":
            return static.step, None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                static.begin()
                static.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph, captured = torch.cuda.CUDAGraph(), None
        static.begin()
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.graph(graph))
            if is_saved:
                captured = stack.enter_context(self._saver.capturing(batch))
            static.step()
        return graph.replay, captured

    def _timed(self, static: StaticSteps, calls: Sequence[Callable[[], None]]) -> float:
        """Seconds of a step."""
        static.begin()
        self._synchronize()
        begin_s = time.perf_counter()
        for call in calls:
            call()
        self._synchronize()
        return (time.perf_counter() - begin_s) / len(calls)

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()

    def _rows(self, session: SessionInfo) -> dict[Stream, Tensor]:
        with self._client.sessions.open(session.name, self._own).read() as rows:
            return {
                stream: torch.from_numpy(rows.array(stream).copy()).view(self._model.dtype)
                for stream in self._streams
                if stream != TOKENS
            }

    def _judged(
        self, static: StaticSteps, stored: Sequence[Mapping[Stream, Tensor]], steps: int
    ) -> dict[str, object]:
        """How stored rows differ from unsaved ones, and unsaved ones from those of another pass over them.

        On a GPU unsaved steps are a graph too: products that are captured may be summed up in another order.
        """
        held: dict[Stream, Tensor] = {}
        streams = list(stored[0])

        def hold(layer: int, kind: StateKind, rows: Tensor) -> None:
            held[Stream(layer, kind)] = rows.clone()

        def unsaved() -> dict[Stream, Tensor]:
            seen: dict[Stream, list[Tensor]] = {stream: [] for stream in streams}
            static.begin()
            for _ in range(steps):
                replay()
                for stream, pieces in seen.items():
                    pieces.append(held[stream].clone())
            return {stream: torch.stack(pieces).cpu().float() for stream, pieces in seen.items()}

        with self._capture(hold):
            replay, _ = self._captured(static, len(stored), is_saved=False)
            expected, again = unsaved(), unsaved()
        found = {stream: torch.stack([rows[stream] for rows in stored], 1).float() for stream in streams}
        (equal, worst, by_layer), (_, noise, _) = _compared(found, expected), _compared(again, expected)
        return {
            "equal_rows": equal,
            "equal_rows_by_layer": by_layer,
            "worst_difference": worst,
            "noise": noise,
            "is_right": worst <= noise,
        }


def _compared(
    found: Mapping[Stream, Tensor], expected: Mapping[Stream, Tensor]
) -> tuple[float, float, list[float]]:
    """The share of equal rows [steps, B, D], the largest relative difference, and each stream's share."""
    shares = [float((rows == expected[stream]).all(-1).float().mean()) for stream, rows in found.items()]
    differences = (
        float((rows - expected[stream]).abs().max() / expected[stream].abs().max())
        for stream, rows in found.items()
    )
    return statistics.fmean(shares), max(differences), shares


class _Saved:
    """A step that is saved; `engine_s` of it were the saver's."""

    def __init__(
        self,
        saver: Saver,
        sessions: Sequence[SessionInfo],
        step: int,
        ids: Sequence[int],
        replay: Callable[[], None],
        captured: CapturedPass | None,
    ) -> None:
        self._slices = [Slice(session.name, step, 1) for session in sessions]
        self._saver, self._ids, self._replay, self._captured = saver, ids, replay, captured
        self.engine_s = 0.0

    def __call__(self) -> None:
        begin_s = time.perf_counter()
        with self._saver.passing(self._slices, self._ids, replayed=self._captured):
            entered_s = time.perf_counter()
            self._replay()
            left_s = time.perf_counter()
        self.engine_s = entered_s - begin_s + time.perf_counter() - left_s


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
    replayed: Annotated[
        int, typer.Option(help="Steps of a block of a CUDA graph's replays; 0: none.", min=0)
    ] = 0,
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
        saver = stack.enter_context(
            Saver(
                client,
                CallerModel(spec),
                plan.streams(),
                device=device,
                ring_bytes=RING_BYTES if replayed else None,
            )
        )
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
            if replayed:
                row = Replays(blocks.adapter, client, CallerModel(spec), plan.streams(), saver).compare(
                    count, history, replayed, rounds
                )
                _report_replays({**facts, **row, "steps": replayed}, as_json=as_json)


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


def _report_replays(row: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    mean, over = row["time_between_tokens_s"], row["over_none"]
    how = "replayed" if row["is_captured"] else "eager, not captured"
    print(
        f"batch {row['batch']:>3}  {how:<10} {1e3 * mean['median']:9.2f} ms a token"  # type: ignore[index]
        f"  {over['median']:+7.2%} [{over['low']:+.2%}, {over['high']:+.2%}]"  # type: ignore[index]
        f"  of it on the engine {1e6 * row['saving_on_engine_s']:.0f} us a step"  # type: ignore[operator]
        f"  rows as unsaved ones {row['equal_rows']:.1%}, off by {row['worst_difference']:.1e},"
        f" unsaved ones by {row['noise']:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
