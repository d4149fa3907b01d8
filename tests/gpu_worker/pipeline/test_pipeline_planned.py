"""Planned restores: the read buffer beside the paper's, and a profile that follows what restores take."""

from typing import Any

import pytest
from sessions import saved_session
from slow_pipelines import poisoned_target, slowed, start

from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.pipeline.planned import Chooser, lead
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding
from gpu_worker.planning.option import LayerOptions, layer_options
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.planner import Plan, PlanRequest, plan
from gpu_worker.planning.profile import StatePlace
from gpu_worker.planning.shape import LayerShape
from lab.restoring.papers import read_buffer_bytes

KV_ONLY = EngineAbilities(can_recompute=False, starts_by_layer=True)


def _plan(history: int, new_tokens: int, model: str = "llama-2-13b") -> Plan:
    shape = known_model(model)
    holding = Holding.alike(len(shape.layers), [StateKind.KV], [HeldSpan(StatePlace.DRAM, 0, history)])
    return plan(PlanRequest(shape, holding, history, known_profile("a100-40gb"), new_tokens, KV_ONLY))


@pytest.mark.parametrize("new_tokens", [1, 100, 400, 1600])
def test_the_read_buffer_is_the_papers(new_tokens: int) -> None:
    """For like layers it is S = B (T_load L_hist - T_pref L_new), to two layers.

    One arrives before the start in any case.
    """
    planned = _plan(4096, new_tokens)
    request = planned.request
    layers = request.model.layers
    load_s = sum(piece.copy_s for pieces in planned.layers for piece in pieces)
    prefill_s = sum(request.profile.recompute_s(layer, 4096, 4096 + new_tokens) for layer in layers)
    total_bytes = sum(piece.size_bytes for pieces in planned.layers for piece in pieces)
    paper = read_buffer_bytes(
        bytes_per_s=total_bytes / load_s,
        load_s=load_s / 4096,
        history_tokens=4096,
        prefill_s=prefill_s / new_tokens,
        new_tokens=new_tokens,
    )

    assert abs(lead(planned).size_bytes - paper) <= 2 * total_bytes / len(layers)


@pytest.mark.parametrize("model", ["llama-2-7b", "gemma-3-270m"])
@pytest.mark.parametrize("new_tokens", [0, 64, 1024])
def test_no_layer_is_late_after_the_lead(model: str, new_tokens: int) -> None:
    """From the start that it gives, each layer's restore ends before the pass gets there.

    A little earlier, one does not.
    """
    planned = _plan(2048, new_tokens, model)
    request, found = planned.request, lead(planned)
    ends, at, copies_s, computes_s = [], found.start_s, 0.0, 0.0
    for layer, pieces in zip(request.model.layers, planned.layers, strict=True):
        for piece in pieces:
            copies_s += piece.copy_s
            computes_s = max(computes_s, copies_s) + piece.compute_s
        ends.append(computes_s - at)
        at += request.profile.recompute_s(layer, 2048, 2048 + new_tokens)

    assert max(ends) == pytest.approx(0, abs=1e-9)
    assert 1 <= found.layer_count <= len(planned.layers)


def test_like_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's layers that are held alike are one to the planner, however many they are."""
    looked_at: list[object] = []

    def counted(layer: LayerShape, *arguments: Any) -> LayerOptions:  # Any: as layer_options takes them
        looked_at.append(layer)
        return layer_options(layer, *arguments)

    monkeypatch.setattr("gpu_worker.planning.planner.layer_options", counted)
    session = saved_session("llama", layer_count=5)
    chooser = Chooser(session.adapter, None, known_profile("h100"))
    held = [Stream(layer, kind) for layer in range(5) for kind in (StateKind.KV, StateKind.HIDDEN)]

    chooser.choose([TOKENS, *held], 512, 16)
    assert len(looked_at) == 1

    chooser.choose([TOKENS, *held[:-1]], 512, 16)
    assert len(looked_at) == 3


def test_a_profile_follows_what_restores_take() -> None:
    """A machine that is slower than its datasheet is predicted better after some restores."""
    session = saved_session("llama")
    chooser = Chooser(session.adapter, None, known_profile("h100"))
    held = [Stream(layer, StateKind.KV) for layer in range(3)]
    chooser._planner._engine = KV_ONLY  # type: ignore[union-attr]
    first = chooser.choose(held, session.token_count, 16)
    with slowed(is_unified=True) as pipeline:
        for _ in range(20):
            target = poisoned_target(session)
            with start(pipeline, session, target) as restoration:
                restoration.wait_all()
            chooser.observe(chooser.choose(held, session.token_count, 16), restoration)
    last = chooser.choose(held, session.token_count, 16)
    taken_s = restoration.restored_s

    assert chooser.profile is not None
    assert chooser.profile.factor(Stage.EMBED) > 1
    assert abs(last.predicted_s - taken_s) < abs(first.predicted_s - taken_s)
