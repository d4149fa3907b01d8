"""The profiler: measures tiny models by a clock of the test's own, keeps and finds what it measured."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from sessions import restored_cache, saved_session
from tiny_models import LAYER_COUNT, WINDOW, build

from ctxcache.client.arena import Bytes
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families.model_shape import model_shape, representatives
from gpu_worker.model.proof import adapt
from gpu_worker.planning.adaptive import AdaptivePlanner, stage_seconds
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding
from gpu_worker.planning.plan import Method, Stage
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import NO_LIMIT, StatePlace
from gpu_worker.planning.shape import LayerKind
from gpu_worker.profiling.measure import (
    LENGTHS,
    Stopwatch,
    copy_bytes_per_s,
    measure,
    read_bytes_per_s,
)
from gpu_worker.profiling.profile_file import Measured, profile_path, read_profile, write_profile
from lab.quality.restoring import HeldRows
from lab.restoring.papers import hcache_profile

CPU = torch.device("cpu")
HISTORY = 1024
SIZE_BYTES = 2 << 20


def _ticks(step_ns: int = 1_000_000) -> Callable[[], int]:
    """A clock that goes on by a millisecond whenever it is asked."""
    times: Iterator[int] = count(0, step_ns)
    return lambda: next(times)


def _measured(name: str, ssd_directory: Path | None = None) -> Measured:
    return measure(
        adapt(build(name)),
        name=name,
        hardware="a machine",
        lengths=(8, 32),
        ssd_directory=ssd_directory,
        transfer_bytes=SIZE_BYTES,
        stopwatch=Stopwatch(CPU, 2, _ticks()),
    )


def test_a_profile_begins_at_one_token() -> None:
    """Before its first length a profile is level.

    The times of short sessions would be far from it, and pass for drift.
    """
    measured = measure(
        adapt(build("llama")),
        name="llama",
        hardware="a machine",
        lengths=[each for each in LENGTHS if each <= 64],
        transfer_bytes=SIZE_BYTES,
        stopwatch=Stopwatch(CPU, 2, _ticks()),
    )

    assert {curve.points[0][0] for curve in measured.profile.curves.values()} == {1}


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek", "opt"])
def test_every_stage_of_every_sort_of_layer_is_measured(name: str) -> None:
    """At each length: projection, embedding, recomputation, by the clock that was given."""
    measured = _measured(name)
    sorts = set(measured.model.layers)

    assert set(measured.profile.curves) == {
        (stage, layer)
        for layer in sorts
        for stage in (Stage.RECOMPUTE, *(Stage.of(Method[kind.name]) for kind in layer.kinds))
    }
    kind_counts = {LayerKind.LATENT: 2, LayerKind.SLIDING: 6, LayerKind.FULL: 9}
    assert all(len(layer.kinds) == kind_counts[layer.kind] for layer in sorts)
    assert {curve.points for curve in measured.profile.curves.values()} == {((8, 1e-3), (32, 1e-3))}
    assert measured.profile.is_measured


def test_shape_is_that_of_the_streams() -> None:
    """Row sizes of the planner's model are those of the rows that capture saves."""
    session = saved_session("gemma3")
    shape = model_shape(session.adapter, "gemma3")

    assert [layer.kind for layer in shape.layers] == [LayerKind.SLIDING, LayerKind.FULL, LayerKind.SLIDING]
    assert shape.layers[0].window == WINDOW
    for stream, rows in session.rows.items():
        layer = shape.layers[stream.layer]
        row_bytes = layer.hidden_row_bytes if stream.kind is StateKind.HIDDEN else layer.kv_row_bytes
        assert rows.shape[1] * rows.itemsize == row_bytes


def test_window_of_the_shape_is_what_restoring_reads() -> None:
    """The planner counts a sliding layer's tokens as the restorer asks for them."""
    session = saved_session("gemma3")
    shape = model_shape(session.adapter, "gemma3")
    asked = []

    class Asked(HeldRows):
        def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
            asked.append((stream.layer, begin))
            super().fill(stream, begin, end, into)

    plan = AdaptivePlanner(shape, known_profile("cpu"), engine=EngineAbilities(can_recompute=False)).plan(
        Holding.alike(LAYER_COUNT, [StateKind.KV], [HeldSpan(StatePlace.DRAM, 0, session.token_count)]),
        session.token_count,
    )
    source = Asked(session.rows.__getitem__)
    restored_cache(session.adapter, plan.restore_plan(), source, positions=session.positions)

    assert asked == [(layer, pieces[0].begin) for layer, pieces in enumerate(plan.layers)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek", "gpt2"])
def test_what_is_planned_restores_what_was_saved(name: str) -> None:
    """A plan by measured times, recomputation included, goes on with the tokens of the cache that stayed."""
    session, measured = saved_session(name), _measured(name)
    kinds = [StateKind.HIDDEN, session.adapter.kind]
    held = Holding.alike(LAYER_COUNT, kinds, [HeldSpan(StatePlace.SSD, 0, session.token_count)])
    chosen = AdaptivePlanner(measured.model, measured.profile).plan(held, session.token_count)

    assert session.continue_on(session.restore(str(chosen.restore_plan()))) == session.expected_ids


def test_middle_layers_stand_for_their_sort() -> None:
    """First and last layers are often unlike the others in time."""
    assert list(representatives(known_model("llama-2-7b")).values()) == [16]
    assert sorted(representatives(known_model("gemma-3-270m")).values()) == [8, 11]


def test_more_tokens_are_never_measured_as_less_work() -> None:
    """A noisy time of a longer length is raised to that of the shorter one."""
    backwards = iter([*[0, 9_000_000] * 500])
    watch = Stopwatch(CPU, 1, lambda: next(backwards))
    measured = measure(
        adapt(build("llama")),
        name="m",
        hardware="h",
        lengths=(8, 16, 32),
        transfer_bytes=4096,
        stopwatch=watch,
    )

    for curve in measured.profile.curves.values():
        seconds = [point[1] for point in curve.points]
        assert seconds == sorted(seconds)


def test_bandwidths_are_bytes_by_the_clock(tmp_path: Path) -> None:
    """A copy and a read of 2 MiB in a millisecond each; nothing stays in the directory."""
    watch = Stopwatch(CPU, 2, _ticks())

    assert copy_bytes_per_s(CPU, watch, size_bytes=SIZE_BYTES) == pytest.approx(SIZE_BYTES * 1e3)
    assert read_bytes_per_s(tmp_path, watch, size_bytes=SIZE_BYTES) == pytest.approx(SIZE_BYTES * 1e3)
    assert list(tmp_path.iterdir()) == []


def test_ssd_is_measured_where_a_directory_is_given(tmp_path: Path) -> None:
    """Otherwise it is the datasheet's."""
    assert _measured("llama").profile.ssd == known_profile("cpu").ssd
    assert _measured("llama", ssd_directory=tmp_path).profile.ssd.bytes_per_s == pytest.approx(
        SIZE_BYTES * 1e3
    )


def test_profiles_come_back_from_their_files_as_they_were(tmp_path: Path) -> None:
    """Shape, curves, factors, and what has no limit; in a file that its names name."""
    tiny = _measured("gemma3")
    corrected = Measured(tiny.model, tiny.profile.corrected({Stage.COPY: 1.5}))
    endless = Measured(known_model("llama-2-7b"), hcache_profile("llama-2-7b"))
    path = profile_path(tmp_path / "new", hardware="NVIDIA H100 80GB HBM3", model="org/Model-7B")
    for each in (corrected, endless):
        write_profile(path, each)

        assert read_profile(path) == each
    assert endless.profile.memory_bytes_per_s == NO_LIMIT
    assert path.name == "nvidia-h100-80gb-hbm3--org-model-7b.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace('"format": 2', '"format": 1'), "has format 1, not 2"),
        (lambda text: text.replace('"copy"', '"kopy"'), "cannot be read"),
        (lambda text: text.replace('"bytes_per_s": ', '"bytes_per_s": -'), "cannot be read"),
        (lambda _text: json.dumps([1]), "cannot be read"),
    ],
)
def test_damaged_profiles_are_refused(tmp_path: Path, damage: Callable[[str], str], problem: str) -> None:
    """A file that is no profile, or another version's, is never planned by."""
    path = tmp_path / "profile.json"
    write_profile(path, Measured(known_model("llama-2-7b"), hcache_profile("llama-2-7b")))
    path.write_text(damage(path.read_text()))

    with pytest.raises(InvalidArgument, match=problem):
        read_profile(path)


def _plan_of(planner: AdaptivePlanner) -> Plan:
    held = Holding.alike(40, [StateKind.HIDDEN, StateKind.KV], [HeldSpan(StatePlace.SSD, 0, HISTORY)])
    return planner.plan(held, HISTORY)


def test_a_drifted_stage_makes_another_plan() -> None:
    """Projections twice as long as measured: after eight plans that were off, fewer layers are projected."""
    planner = AdaptivePlanner(known_model("llama-2-13b"), hcache_profile("llama-2-13b"))
    before = _plan_of(planner)
    drifts = [
        planner.observe(stage, predicted_s=seconds, observed_s=seconds * (2 if stage is Stage.PROJECT else 1))
        for _ in range(8)
        for stage, seconds in stage_seconds(_plan_of(planner)).items()
    ]
    after = _plan_of(planner)

    assert [drift.stage for drift in drifts if drift] == [Stage.PROJECT]
    assert planner.profile.factor(Stage.PROJECT) == pytest.approx(2)
    assert after.methods != before.methods
    assert stage_seconds(after)[Stage.PROJECT] > stage_seconds(before)[Stage.PROJECT]


def test_plans_are_kept_until_something_drifts() -> None:
    """The same request is planned once."""
    planner = AdaptivePlanner(known_model("llama-2-13b"), hcache_profile("llama-2-13b"))
    first = _plan_of(planner)
    planner.observe(Stage.COPY, predicted_s=1.0, observed_s=1.1)

    assert _plan_of(planner) is first


def test_stage_seconds_add_up_to_what_the_streams_do() -> None:
    """Predictions by stage are the plan's own times, none lost, none counted twice."""
    planner = AdaptivePlanner(
        known_model("llama-2-13b"), hcache_profile("llama-2-13b", ssd_bytes_per_s=6.9e9)
    )
    chosen = _plan_of(planner)
    seconds, busy_s = stage_seconds(chosen), chosen.timeline.busy_s
    computed_s = seconds[Stage.PROJECT] + seconds[Stage.EMBED] + seconds[Stage.RECOMPUTE]

    assert seconds[Stage.RECOMPUTE] > 0
    assert computed_s == pytest.approx(busy_s["compute"])
    # Token ids are copied as well, and belong to no layer.
    assert busy_s["copy"] - seconds[Stage.COPY] == pytest.approx(HISTORY * 4 / 6.9e9)
