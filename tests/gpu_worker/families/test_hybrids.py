"""Recurrent layers: their state at any token, rebuilt from layer inputs by the mixer alone, or refused."""

import random
from collections.abc import Sequence

import pytest
import torch
from hybrids import LENGTH, NAMES, NEXT, distance, hybrid_adapter, hybrid_ids, layer_inputs, prefilled
from transformers import DynamicCache

from ctxcache.client import Client
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_host import HostCache
from gpu_worker.engines.transformers_packed import PackedModel
from gpu_worker.errors import IncompleteRestore, UnsupportedArchitecture
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.families.model_shape import model_shape
from gpu_worker.model.spec import model_spec
from gpu_worker.parallel.sharded import shard
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.compute import Modules, Restorer, recompute_layers
from gpu_worker.pipeline.target import CacheTarget, LayerRoom
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.shape import LayerKind


def _restored(name: str, count: int, cut: int) -> DynamicCache:
    """The first `count` tokens from rows alone, in two pieces."""
    adapter = hybrid_adapter(name)
    target, modules = CacheTarget(adapter, count), Modules(adapter, torch.arange(count))
    for layer, rows in enumerate(layer_inputs(name)):
        for begin, end in ((0, cut), (cut, count)):
            room = target.room(layer, begin, end)
            modules.restore(layer, Method.HIDDEN, rows[begin:end].view(torch.uint8), begin, room)
        target.finish(layer)
    assert isinstance(target.cache, DynamicCache)
    return target.cache


@pytest.mark.parametrize("name", NAMES)
def test_the_state_at_any_token_comes_back(name: str) -> None:
    """At random counts the next logits are a full prefill's; a token less is seen to give others."""
    adapter, dice = hybrid_adapter(name), random.Random(name)
    for count in dice.sample(range(3, LENGTH), 4):
        fresh = DynamicCache(config=adapter.model.config)
        expected = prefill(adapter.model, fresh, [*hybrid_ids()[:count], *NEXT])
        found = prefilled(adapter, _restored(name, count, dice.randrange(1, count)), NEXT)
        wrong = prefilled(adapter, _restored(name, count - 1, 1), NEXT)

        assert distance(found, expected) < 1e-5
        assert distance(wrong, expected) > 1e-3


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "nemotron_h", "bamba"])
def test_a_conversation_goes_on_from_a_store(name: str, client: Client, session_id: str) -> None:
    """Turn by turn, from a fork at any token, and cut anywhere: each reply as if nothing had been dropped."""
    adapter = hybrid_adapter(name)
    model = adapter.model
    spec = model_spec(model, model_id=f"{name}-{session_id}")
    kinds = [adapter.kind_of(layer, StateKind.KV) for layer in range(spec.layer_count)]
    plan = RestorePlan(tuple(Method[kind.name] if kind else Method.NOTHING for kind in kinds))
    turns = (hybrid_ids()[:70], hybrid_ids()[70:83])

    def turn(of: str, history: Sequence[int], ids: Sequence[int]) -> list[int]:
        with TransformersEngine(adapter, client, spec, plan, window=512) as engine:
            found = engine.turn(of, ids, max_new_tokens=4, eos_token_ids=())
            assert engine.wait(of) is None
        assert (found.reused_token_count, found.miss_reason) == (len(history), "")
        fresh = DynamicCache(config=model.config)
        assert (
            found.token_ids
            == continue_greedy(
                model,
                fresh,
                [*history, *ids],
                max_new_tokens=4,
                eos_token_ids=(),
                is_stepwise=adapter.is_stepwise,
            ).token_ids
        )
        return [*history, *ids, *found.token_ids]

    said = turn(session_id, [], turns[0])
    said = turn(session_id, said, turns[1])
    client.sessions.open(f"sessions/{session_id}").fork(id=f"{session_id}-fork", token_count=37)
    turn(f"{session_id}-fork", said[:37], turns[1])
    client.sessions.open(f"sessions/{session_id}").keep_first(53)
    turn(session_id, said[:53], NEXT)

    assert spec.is_relocatable is False
    assert set(kinds) - {None} == {StateKind.HIDDEN, StateKind.KV}


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_recomputed_hand_their_state_over(name: str) -> None:
    """The first layers run over token ids, by one token at a time where only that goes on."""
    adapter = hybrid_adapter(name)
    ids = torch.tensor(hybrid_ids())
    cache = DynamicCache(config=adapter.model.config)
    recompute_layers(adapter, cache, ids, torch.arange(LENGTH), len(adapter.layers), piece_tokens=64)
    fresh = DynamicCache(config=adapter.model.config)
    expected = prefill(adapter.model, fresh, [*hybrid_ids(), *NEXT])

    assert distance(prefilled(adapter, cache, NEXT), expected) < 1e-5
    assert adapter.is_stepwise is (name == "jamba")


@pytest.mark.parametrize(("begin", "end"), [(9, 20), (10, 20), (12, 20), (0, 11)])
def test_a_state_goes_on_where_it_stands_only(begin: int, end: int) -> None:
    """Behind token 11, neither a gap, nor tokens that are in it, nor all over again."""
    adapter = hybrid_adapter("qwen3_next")
    rows, cache = layer_inputs("qwen3_next")[0], DynamicCache(config=adapter.model.config)
    restorer = Restorer(adapter, torch.arange(20))
    restorer.advance(0, Method.HIDDEN, rows[:11], cache)

    with pytest.raises(IncompleteRestore):
        restorer.advance(0, Method.HIDDEN, rows[begin:end], cache, begin=begin)
    with pytest.raises(IncompleteRestore):
        # A cache that holds a state of which this restore knows nothing.
        Restorer(adapter, torch.arange(20)).advance(0, Method.HIDDEN, rows[:20], cache)


def test_what_has_no_room_for_a_state_is_refused() -> None:
    """Packed rows and packed passes, shares of heads, an engine's pages, K/V of a layer that has none."""
    adapter = hybrid_adapter("falcon_h1")
    room = CacheTarget(adapter, 4).room(0, 0, 4)
    data = layer_inputs("falcon_h1")[0][:4].view(torch.uint8)

    with pytest.raises(InvalidArgument, match="no room for the state of layer 0"):
        Modules(adapter, torch.arange(4)).restore(0, Method.HIDDEN, data, 0, LayerRoom(room.pages))
    with pytest.raises(InvalidArgument, match="kv rows cannot be restored"):
        Restorer(adapter, torch.arange(4)).layer(0, Method.KV, torch.zeros(4, adapter.row_size))
    with pytest.raises(UnsupportedArchitecture, match="packed passes do not know"):
        PackedModel(adapter.model)
    with pytest.raises(UnsupportedArchitecture, match="for which a cache on the host has no room"):
        HostCache(hybrid_adapter("lfm2"), capacity=8)
    with pytest.raises(InvalidArgument, match="would add up"):
        model_spec(adapter.model, model_id="m", packed_kinds=[StateKind.HIDDEN_INT8])
    with pytest.raises(InvalidArgument, match="states are not shared"):
        shard(adapter, ModelShare(0, 4, tensor_ranks=2))


def test_a_planner_knows_what_a_state_costs() -> None:
    """Layers with states are rebuilt from their inputs, by mixers' matrices and not by experts'."""
    layers = model_shape(hybrid_adapter("qwen3_next"), "m").layers

    assert [layer.kind for layer in layers] == [LayerKind.LINEAR] * 3 + [LayerKind.FULL]
    assert layers[0].kinds == (StateKind.HIDDEN,)
    assert 0 < layers[0].project_flops < layers[0].linear_flops / 2
