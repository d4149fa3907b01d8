"""The ring on the device: rows that leave in one copy a pass are those that left layer by layer."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from recorded_graph import RecordedGraph
from sessions import all_streams
from tiny_models import VOCABULARY_SIZE, build
from torch import Tensor

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import IncompleteAppend, InvalidArgument, TooManyRequests
from ctxcache.format.packing import packing_of
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import ShapeMismatch
from gpu_worker.families.generation import Capture
from gpu_worker.forms.rows import stored_dtype
from gpu_worker.kernels.libcuda import Libcuda, _Planes
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.saving import CapturedPass, Saver, Slice, device_ring
from gpu_worker.saving.device_ring import DeviceRing
from gpu_worker.saving.staging import (
    Copies,
    CudaCopies,
    HostCopies,
    Mark,
    RingRun,
    RowRun,
    StagedPass,
    StagingBuffers,
)
from lab.studies.saving import StaticSteps

CPU = torch.device("cpu")
SIZE = 32
LAYERS = 4


def _spec(layer: int, kind: StateKind, dtype: DType, size: int = SIZE) -> StreamSpec:
    if dtype is DType.PACKED:
        return StreamSpec(Stream(layer, kind), packing_of(kind).row_bytes(size), dtype)
    return StreamSpec(Stream(layer, kind), size * dtype.size_bytes, dtype)


def _layers(kind: StateKind, dtype: DType) -> list[StreamSpec]:
    return [_spec(layer, kind, dtype) for layer in range(LAYERS)]


LAYOUTS = {
    "hidden-bf16": _layers(StateKind.HIDDEN, DType.BFLOAT16),
    "kv-fp32": _layers(StateKind.KV, DType.FLOAT32),
    "odd-rows": [_spec(layer, StateKind.KV, DType.FLOAT16, 5 + 2 * layer) for layer in range(LAYERS)],
    "both-kinds": [
        _spec(layer, kind, DType.FLOAT16, size)
        for layer in range(LAYERS)
        for kind, size in ((StateKind.HIDDEN, SIZE), (StateKind.KV, 24))
    ],
    "hidden-int8": _layers(StateKind.HIDDEN_INT8, DType.PACKED),
    "deltas": [
        _spec(0, StateKind.HIDDEN_INT8, DType.PACKED),
        *(_spec(layer, StateKind.HIDDEN_DELTA_INT4, DType.PACKED) for layer in range(1, LAYERS)),
    ],
}


def _buffers(
    specs: Sequence[StreamSpec], rows: int, ring_rows: int | None, copies: Copies | None = None
) -> StagingBuffers:
    state = sum(spec.row_bytes for spec in specs)
    return StagingBuffers(
        (TOKENS_SPEC, *specs),
        copies or HostCopies(),
        size_bytes=rows * (state + 4),
        is_pinned=False,
        make_ring=None
        if ring_rows is None
        else lambda groups: DeviceRing(groups, CPU, size_bytes=ring_rows * state),
    )


def _wide(spec: StreamSpec, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + spec.stream.layer * 2 + spec.stream.kind)
    if spec.dtype is DType.PACKED:
        return torch.randn(count, SIZE, generator=generator)
    dtype = stored_dtype(spec)
    return torch.randn(count, spec.row_bytes // dtype.itemsize, generator=generator).to(dtype)


def _passed(buffers: StagingBuffers, specs: Sequence[StreamSpec], count: int, seed: int) -> StagedPass:
    frame = buffers.take(np.full(count, seed, np.int32))
    assert frame is not None
    ring = buffers.device_ring
    if ring is not None and ring.holds(count):
        frame.in_ring = ring.take(count)
    for spec in specs:
        buffers.put(frame, spec.stream, _wide(spec, count, seed))
    buffers.seal(frame)
    return frame


def _staged(buffers: StagingBuffers, frame: StagedPass, stream: Stream) -> bytes:
    rows = slice(frame.rows.begin, frame.rows.end)
    return buffers.view(stream, rows, np.empty(0, np.uint8)).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_copy_a_pass_is_what_layers_by_themselves_were(layout: str) -> None:
    """Bit for bit, for every stream, while the ring comes round, and for a pass that is longer than it."""
    specs = LAYOUTS[layout]
    plain, ringed = _buffers(specs, 64, None), _buffers(specs, 64, 7)
    assert ringed.device_ring is not None
    ring_rows = ringed.device_ring.row_count

    for seed, count in enumerate([3, 2, 4, 1, 5, 3, 7, 6, 20, 2]):
        frames = [_passed(each, specs, count, seed) for each in (plain, ringed)]
        assert (frames[1].in_ring is not None) == (count <= ring_rows)
        for stream in (TOKENS, *(spec.stream for spec in specs)):
            assert _staged(plain, frames[0], stream) == _staged(ringed, frames[1], stream)
        for each, frame in zip((plain, ringed), frames, strict=True):
            each.ring.free(frame.rows)


def test_rows_are_copied_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are."""
    copied: list[list[int]] = []
    copy = HostCopies.copy

    def counted(copies: HostCopies, target: Tensor, rows: Tensor) -> None:
        copied.append(list(rows.shape))
        copy(copies, target, rows)

    monkeypatch.setattr(HostCopies, "copy", counted)
    for layout in ("hidden-bf16", "both-kinds"):
        _passed(_buffers(LAYOUTS[layout], 64, 8), LAYOUTS[layout], 3, 1)

    assert copied == [[LAYERS, 3, SIZE], [LAYERS, 3, SIZE], [LAYERS, 3, 24]]


class _Steps:
    """Marks that are done when they are let, or after so many looks."""

    def __init__(self) -> None:
        self.done_count = self.begun_count = self.look_count = 0
        self.looks_needed: int | None = None

    def copy(self, target: Tensor, rows: Tensor) -> None:
        target.copy_(rows)

    def mark(self) -> Mark:
        self.begun_count += 1
        number = self.begun_count

        class _Mark:
            def is_done(mark) -> bool:  # noqa: N805
                self.look_count += 1
                if self.looks_needed is not None and self.look_count >= self.looks_needed:
                    self.done_count = self.begun_count
                return self.done_count >= number

        return _Mark()


def test_a_run_is_not_written_to_before_its_copy_has_ended() -> None:
    """Rows of the next passes lie elsewhere, however slow the copies are; then there is no room."""
    specs = LAYOUTS["kv-fp32"]
    ring, steps = DeviceRing([specs], CPU, size_bytes=4 * LAYERS * SIZE * 4, wait_s=0.0), _Steps()
    assert ring.row_count == 4
    kept = []
    for seed in range(2):
        run = ring.take(2)
        assert run is not None
        for spec in specs:
            ring.put(spec.stream, _wide(spec, 2, seed), count=2)
        (rows,) = ring.leave(run)
        run.mark = steps.mark()
        kept.append((rows, rows.clone()))

    assert ring.take(1) is None
    assert all(torch.equal(rows, then) for rows, then in kept)
    steps.done_count = 1
    run = ring.take(2)
    assert run is not None
    ring.leave(run)
    assert ring.take(1) is None


def test_a_full_ring_is_waited_for() -> None:
    """A copy that ends meanwhile costs a pass nothing but the wait."""
    specs = LAYOUTS["kv-fp32"]
    ring, steps = DeviceRing([specs], CPU, size_bytes=4 * LAYERS * SIZE * 4, wait_s=60.0), _Steps()
    run = ring.take(4)
    assert run is not None
    run.mark = steps.mark()
    steps.looks_needed = 5

    assert ring.take(3) is not None
    assert steps.look_count == 5


def test_a_pass_whose_end_is_not_known_is_not_waited_for() -> None:
    """The device failed at its mark: nothing will free its rows."""
    ring = DeviceRing([LAYOUTS["kv-fp32"]], CPU, size_bytes=1 << 12, wait_s=600.0)
    run = ring.take(ring.row_count)
    assert run is not None
    ring.leave(run)
    assert ring.take(1) is None


def test_a_replay_that_raises_saves_nothing(client: Client, model: Any, session_id: str) -> None:
    """The ring has rows of an older pass there, and every stream has its rows as far as anybody counts."""
    kept = _Kept(client, model, session_id, staging_bytes=1 << 20, ring_bytes=1 << 18)
    before, session = kept.session("before"), kept.session("raises")
    with kept.saver.capturing(PADDED) as captured, kept.capture():
        _forward(model, torch.tensor([_ids(0, PADDED)]))
    with kept.saver.passing([Slice(before.name, 0, 2)], _ids(1, 2), replayed=captured):
        pass
    with (
        pytest.raises(ZeroDivisionError),
        kept.saver.passing([Slice(session.name, 0, 2)], _ids(2, 2), replayed=captured),
    ):
        _ = 1 // kept.saver.saved_token_count
    failure = kept.saver.wait(session.name)
    kept.saver.close()

    assert failure is not None
    assert failure.reason == "INCOMPLETE_APPEND"
    assert client.sessions.get(session.name).token_count == 0


# -- sessions -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama. Any: a model of transformers."""
    return build("llama")


class _Kept:
    """A saver's sessions of a tiny model."""

    def __init__(
        self, client: Client, model: Any, session_id: str, copies: HostCopies | None = None, **settings: Any
    ) -> None:
        self.adapter = adapt(model)
        self.streams = [stream for stream in all_streams(self.adapter) if stream != TOKENS]
        self.client, self.model = client, model
        self.own = CallerModel(model_spec(model, model_id="ringed"))
        client.models.register(self.own.spec)
        self.copies = copies or HostCopies()
        self.saver = Saver(client, self.own, self.streams, copies=self.copies, **settings)
        self._id = session_id

    def session(self, suffix: str) -> SessionInfo:
        """A new session that is being saved."""
        found = self.client.sessions.create(
            self.own, id=f"{self._id}-{suffix}", layout=[TOKENS, *self.streams]
        ).info
        self.saver.open(found)
        return found

    def capture(self) -> Capture:
        """Hooks for the saver."""
        return Capture(self.adapter, self.streams, self.saver.put, is_on_host=False)

    def rows(self, session: SessionInfo) -> dict[Stream, np.ndarray[Any, Any]]:
        """All that the store has."""
        with self.client.sessions.open(session.name, self.own).read() as rows:
            return {stream: rows.array(stream).copy() for stream in (TOKENS, *self.streams)}


def _ids(step: int, count: int) -> list[int]:
    return [(7 * step + 13 * row + 1) % VOCABULARY_SIZE for row in range(count)]


# Any: a model of transformers.
def _forward(model: Any, inputs: Tensor) -> None:
    """A pass that attends by a mask of its own: transformers would look at positions on the host."""
    count = inputs.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    model(input_ids=inputs, attention_mask=seen, use_cache=False)


PADDED = 6
STEPS = 40


class _Lagging(HostCopies):
    """Copies that are carried out when the next one is begun: behind what an engine did in between."""

    def __init__(self) -> None:
        self._next: list[tuple[Tensor, Tensor]] = []
        self.begun_count = self.done_count = 0

    def copy(self, target: Tensor, rows: Tensor) -> None:
        self.let()
        self._next.append((target, rows))
        self.begun_count += 1

    def let(self) -> None:
        """Carry out what was begun."""
        for target, rows in self._next:
            super().copy(target, rows)
        self._next.clear()
        self.done_count = self.begun_count

    def mark(self) -> Mark:
        return _LagMark(self, self.begun_count)


class _LagMark:
    def __init__(self, copies: _Lagging, count: int) -> None:
        self._copies, self._count = copies, count

    def is_done(self) -> bool:
        return self._copies.done_count >= self._count


def _run(
    kept: _Kept, compute: Callable[[list[int]], object], captured: CapturedPass | None = None
) -> list[dict[Stream, np.ndarray[Any, Any]]]:
    """Steps of three sequences, of which one is nobody's, between passes that nobody saves."""
    sessions = [kept.session("first"), kept.session("second")]
    ends = [0, 0]
    for number in range(STEPS):
        one = 1 + number % 3
        ids = _ids(number, one + 2)
        slices = [
            Slice(sessions[0].name, ends[0], one),
            Slice("", 0, 1),
            Slice(sessions[1].name, ends[1], 1),
        ]
        with kept.saver.passing(slices, ids, replayed=captured):
            compute(ids)
        if number % 5 == 0:
            compute(_ids(1000 + number, PADDED))
        ends = [ends[0] + one, ends[1] + 1]
    if isinstance(kept.copies, _Lagging):
        kept.copies.let()
    assert [kept.saver.wait(session.name) for session in sessions] == [None, None]
    kept.saver.close()
    return [kept.rows(session) for session in sessions]


def _eager(client: Client, model: Any, session_id: str) -> list[dict[Stream, np.ndarray[Any, Any]]]:
    """The same steps by today's way on the host. Padded too, so that products have the same shape."""
    kept = _Kept(client, model, f"{session_id}-eager")
    count = 0

    def put(layer: int, kind: StateKind, rows: Tensor) -> None:
        kept.saver.put(layer, kind, rows[:count])

    def compute(ids: list[int]) -> None:
        nonlocal count
        count = len(ids)
        with torch.no_grad():
            _forward(kept.model, torch.tensor([[*ids, *[0] * (PADDED - len(ids))]]))

    with Capture(kept.adapter, kept.streams, put, is_on_host=False):
        return _run(kept, compute)


def _replayed(
    client: Client, model: Any, session_id: str, **settings: Any
) -> tuple[list[dict[Stream, np.ndarray[Any, Any]]], RecordedGraph]:
    """The steps as replays of one graph that was captured of a padded pass."""
    kept = _Kept(client, model, f"{session_id}-graph", _Lagging(), **settings)
    inputs = torch.zeros(1, PADDED, dtype=torch.int64)
    graph = RecordedGraph()
    with (
        torch.no_grad(),
        kept.capture(),
        graph,
        kept.saver.capturing(PADDED) as captured,
    ):
        _forward(kept.model, inputs)

    def compute(ids: list[int]) -> None:
        inputs.copy_(torch.tensor([[*ids, *[0] * (PADDED - len(ids))]]))
        graph.replay()

    return _run(kept, compute, captured), graph


def _ring_bytes(model: Any, rows: int) -> int:
    spec = model_spec(model, model_id="ringed")
    streams = [stream for stream in all_streams(adapt(model)) if stream != TOKENS]
    return rows * sum(item.row_bytes for item in spec.resolve(streams) if item.stream != TOKENS)


def _differing(one: list[dict[Stream, Any]], other: list[dict[Stream, Any]]) -> int:
    return sum(
        not np.array_equal(first[stream], second[stream])
        for first, second in zip(one, other, strict=True)
        for stream in first
    )


def test_replays_of_a_graph_save_their_own_rows(client: Client, model: Any, session_id: str) -> None:
    """40 replays of one captured pass, of which no Python runs: each token has the rows that it had eagerly.

    Padding, a sequence that nobody saves and whole replays that nobody saves leave no trace; the ring comes
    round several times.
    """
    eager = _eager(client, model, session_id)
    found, graph = _replayed(client, model, session_id, ring_bytes=_ring_bytes(model, 16))

    assert [len(each[TOKENS]) for each in found] == [sum(1 + n % 3 for n in range(STEPS)), STEPS]
    assert _differing(eager, found) == 0
    # One write for all layers: their rows are of one size.
    assert (graph.names.count("stack"), graph.names.count("index_copy_")) == (1, 1)


@pytest.mark.parametrize("planted", ["stale", "left"])
def test_rows_at_a_stale_position_are_found(
    client: Client, model: Any, session_id: str, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """The control of the test above: positions that are set once, or that a pass leaves behind."""
    eager = _eager(client, model, session_id)
    point_to, leave = DeviceRing._point_to, DeviceRing.leave
    pointed: list[RowRun] = []

    def once(ring: DeviceRing, rows: RowRun) -> None:
        pointed.append(rows)
        point_to(ring, pointed[0])

    def staying(ring: DeviceRing, run: RingRun) -> list[Tensor]:
        found = leave(ring, run)
        point_to(ring, run.rows)
        return found

    if planted == "stale":
        monkeypatch.setattr(DeviceRing, "_point_to", once)
    else:
        monkeypatch.setattr(DeviceRing, "leave", staying)
    found, _ = _replayed(client, model, session_id, ring_bytes=_ring_bytes(model, 16))

    assert _differing(eager, found) > 0


def test_rows_beyond_the_ring_are_shed_and_counted(client: Client, model: Any, session_id: str) -> None:
    """A copy that does not end fills the ring; the session keeps what came before, and the pass goes on."""
    copies = _Lagging()
    kept = _Kept(client, model, session_id, copies, ring_bytes=_ring_bytes(model, 4))
    session = kept.session("one")
    with kept.capture():
        for begin in range(0, 6, 3):
            ids = _ids(begin, 3)
            with kept.saver.passing([Slice(session.name, begin, 3)], ids), torch.no_grad():
                kept.model(input_ids=torch.tensor([ids]), use_cache=False)
    copies.let()
    failure = kept.saver.wait(session.name)
    kept.saver.close()

    assert isinstance(failure, TooManyRequests)
    assert "on the device" in str(failure)
    assert kept.saver.shed_token_counts == {"TOO_MANY_REQUESTS": 3}
    assert len(kept.rows(session)[TOKENS]) == 3


def test_rows_that_an_engine_writes_to_are_a_gap(client: Client, model: Any, session_id: str) -> None:
    """Kept until the pass ends, they would be stored as what they became: the save fails, not the pass."""
    kept = _Kept(client, model, session_id, ring_bytes=1 << 20)
    session = kept.session("one")
    with kept.capture(), kept.saver.passing([Slice(session.name, 0, 2)], [1, 2]), torch.no_grad():
        hook = kept.adapter.layers[1].block.register_forward_pre_hook(lambda _, args: args[0].mul_(2))
        kept.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
        hook.remove()
    failure = kept.saver.wait(session.name)
    kept.saver.close()

    assert isinstance(failure, InvalidArgument)
    assert failure.field == "rows"
    assert kept.saver.shed_token_counts == {"INVALID_FIELD": 2}


def test_long_passes_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept part of a pass is bounded."""
    specs = LAYOUTS["kv-fp32"]
    monkeypatch.setattr(device_ring, "KEPT_BYTES", 2 * 5 * SIZE * 4)
    plain, ringed = _buffers(specs, 16, None), _buffers(specs, 16, 8)
    frames = [_passed(each, specs, 5, 1) for each in (plain, ringed)]
    for spec in specs:
        assert _staged(plain, frames[0], spec.stream) == _staged(ringed, frames[1], spec.stream)


def test_nothing_of_a_pass_waits_for_the_device_or_moves() -> None:
    """Positions, rows and the ring's end are operations that a graph could capture, on memory that stays."""
    specs = LAYOUTS["both-kinds"]
    buffers = _buffers(specs, 64, 16)
    ring = buffers.device_ring
    assert isinstance(ring, DeviceRing)
    memory = ring.memory
    addresses = [each.data_ptr() for each in memory]
    rows = [[_wide(spec, 3, seed) for spec in specs] for seed in range(9)]
    with RecordedGraph() as graph:
        for each in rows:
            run = ring.take(3)
            assert run is not None
            for spec, found in zip(specs, each, strict=True):
                ring.put(spec.stream, found, count=3)
            ring.leave(run)
            run.mark = HostCopies().mark()

    assert [each.data_ptr() for each in memory] == addresses
    assert {name for name in graph.names if name.endswith("_")} <= {"index_copy_", "fill_", "resize_"}
    with pytest.raises(RuntimeError, match="not permitted"), RecordedGraph():
        bool(memory[0].sum() == 0)


@pytest.mark.parametrize(
    ("layout", "ring_rows", "rows", "field"),
    [
        ("kv-fp32", None, 2, "ring_bytes"),
        ("kv-fp32", 4, 5, "row_count"),
        ("kv-fp32", 4, 0, "row_count"),
        ("hidden-int8", 4, 2, "streams"),
    ],
)
def test_a_capture_that_could_not_be_replayed_is_refused(
    layout: str, ring_rows: int | None, rows: int, field: str
) -> None:
    """Before anything is captured, by the field that is wrong."""
    buffers = _buffers(LAYOUTS[layout], 64, ring_rows)
    with pytest.raises(InvalidArgument) as refused, buffers.capturing(rows):
        pytest.fail("it was entered")
    assert refused.value.field == field


def test_a_capture_without_all_rows_is_refused(client: Client, model: Any, session_id: str) -> None:
    """A stream that no layer brings, rows of another shape, and a replay of more tokens than rows."""
    kept = _Kept(client, model, session_id, ring_bytes=1 << 20)
    with pytest.raises(IncompleteAppend), kept.saver.capturing(2):
        pass
    with pytest.raises(ShapeMismatch), kept.saver.capturing(2), kept.capture(), torch.no_grad():
        kept.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    with kept.saver.capturing(2) as captured, kept.capture(), torch.no_grad():
        kept.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    session = kept.session("one")
    with (
        pytest.raises(InvalidArgument, match="has 2 rows, this one 3"),
        kept.saver.passing([Slice(session.name, 0, 3)], [1, 2, 3], replayed=captured),
    ):
        pass
    assert kept.saver.wait(session.name) is None
    kept.saver.close()


def test_the_step_that_a_gpu_captures_is_one_that_can_be(model: Any) -> None:
    """The study's decode step waits for nothing, and replays go on from token to token as eager steps do."""
    attention = model.config._attn_implementation
    eager, recorded = (StaticSteps(model, 3, 5, 6) for _ in range(2))
    for each in (eager, recorded):
        each.begin()
    with RecordedGraph() as graph:
        recorded.step()
    for number in range(5):
        eager.step()
        if number:
            graph.replay()
    model.set_attn_implementation(attention)

    for one, other in zip(eager.caches, recorded.caches, strict=True):
        for half, expected in zip(other, one, strict=True):
            assert torch.equal(half, expected)
    assert torch.equal(recorded.positions, torch.full((1, 3), 10))


# -- the driver ---------------------------------------------------------------------------------------


class _FakePlanes:
    """The driver's copy on memory of the host."""

    def __init__(self, problem: str = "") -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._problem = problem

    def use(self, device: int) -> None:
        """See PlaneCopier."""
        assert device == 0

    def copy_planes(self, *places: int, plane_bytes: int, plane_count: int, stream: int) -> None:
        """See PlaneCopier."""
        if self._problem:
            raise OSError(700, self._problem)
        target, target_pitch, source, source_pitch = places
        self.calls.append((plane_bytes, plane_count, stream))
        for plane in range(plane_count):
            ctypes.memmove(target + plane * target_pitch, source + plane * source_pitch, plane_bytes)


class _Stream:
    """A stream whose work is done at once."""

    device_index, cuda_stream = 0, 77

    def __init__(self, *_: object) -> None:
        self.waits = 0

    def wait_stream(self, _other: object) -> None:
        self.waits += 1


class _Event:
    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[_FakePlanes], CudaCopies]:
    """CUDA's copies, on streams of the host."""
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: _Stream())
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    return lambda planes: CudaCopies(CPU, planes)


def test_a_step_is_one_call_of_the_driver(copies: Callable[[_FakePlanes], CudaCopies]) -> None:
    """For all layers of a size, between memory whose planes lie at different distances."""
    planes, specs = _FakePlanes(), LAYOUTS["hidden-bf16"]
    plain, ringed = _buffers(specs, 32, None), _buffers(specs, 32, 8, copies(planes))
    frames = [_passed(each, specs, 5, 1) for each in (plain, ringed)]

    for spec in specs:
        assert _staged(plain, frames[0], spec.stream) == _staged(ringed, frames[1], spec.stream)
    assert planes.calls == [(5 * SIZE * 2, LAYERS, 77)]


def test_a_driver_that_refuses_is_a_gap(copies: Callable[[_FakePlanes], CudaCopies]) -> None:
    """As a device that failed is, with the driver's words; the pass has an end all the same."""
    refusing = _FakePlanes("an illegal memory access was encountered")
    buffers = _buffers(LAYOUTS["hidden-bf16"], 32, 8, copies(refusing))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _passed(buffers, LAYOUTS["hidden-bf16"], 5, 1)
    ring = buffers.device_ring
    assert isinstance(ring, DeviceRing)
    assert ring.is_emptying


def test_the_driver_is_told_both_sides_of_a_copy() -> None:
    """CUDA_MEMCPY2D as cuda.h has it: 128 bytes; from the device's memory (2) into the host's (1)."""
    told: list[bytes] = []

    class _Library:
        def cuMemcpy2DAsync_v2(self, planes: Any, stream: Any) -> int:  # noqa: N802
            told.append(bytes(planes._obj))
            assert stream.value == 77
            return 0

    libcuda = object.__new__(Libcuda)
    libcuda._library = _Library()
    libcuda.copy_planes(0x1000, 96, 0x2000, 160, plane_bytes=80, plane_count=3, stream=77)

    assert ctypes.sizeof(_Planes) == 128
    words = np.frombuffer(told[0], "<u8").tolist()
    assert words == [0, 0, 2, 0, 0x2000, 0, 160, 0, 0, 1, 0x1000, 0, 0, 96, 80, 3]


def test_what_a_refused_pass_kept_is_no_later_pass_s() -> None:
    """Rows that an engine wrote to are refused with all that was kept beside them; the next pass is whole."""
    first, second = LAYOUTS["kv-fp32"][0], LAYOUTS["kv-fp32"][1]
    ring = DeviceRing([[first], [second]], CPU, size_bytes=1 << 16, wait_s=0.0)
    run, rows = ring.take(2), torch.ones(2, SIZE)
    assert isinstance(run, RingRun)
    ring.put(first.stream, rows, count=2)
    ring.put(second.stream, rows, count=2)
    rows.add_(1)
    with pytest.raises(InvalidArgument):
        ring.leave(run)
    assert not any(group.kept for group in ring._groups)
