"""Snapshots of states: a restore goes on from one at its own count, and from no other; gone, rows do."""

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hybrids import LENGTH, NAMES, NEXT, distance, hybrid_adapter, hybrid_ids, layer_inputs, prefilled
from server_process import ServerProcess
from transformers import DynamicCache

import ctxcache
from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.errors import IncompleteRestore, SnapshotMismatch, UnsupportedDtype
from gpu_worker.families.generation import Stops, continue_greedy, pieces, prefill
from gpu_worker.forms.snapshots import Identity, Snapshot, Snapshots, decoded, encoded, identities, states_of
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.layout import Return, snapshot_every, snapshot_every_by_bytes
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.planner import Plan, PlanRequest, plan
from gpu_worker.planning.profile import StatePlace
from gpu_worker.planning.shape import LayerKind, LayerShape, ModelShape

SMALLEST = "lfm2"


def _at(name: str, count: int) -> DynamicCache:
    """The model's own cache of the first tokens."""
    cache = DynamicCache(config=hybrid_adapter(name).model.config)
    prefilled(hybrid_adapter(name), cache, hybrid_ids()[:count])
    return cache


def _from(name: str, snapshot: Snapshot, count: int) -> DynamicCache:
    """The first `count` tokens from a snapshot and the rows behind it."""
    adapter = hybrid_adapter(name)
    target = CacheTarget(adapter, count, snapshot=snapshot)
    modules = Modules(adapter, torch.arange(count), standing=target.standing)
    for layer, rows in enumerate(layer_inputs(name)):
        for begin, end in pairwise(sorted({target.first_token(layer), count // 2, count})):
            if begin >= target.first_token(layer):
                data = rows[begin:end].contiguous().view(torch.uint8)
                modules.restore(layer, Method.HIDDEN, data, begin, target.room(layer, begin, end))
        target.finish(layer)
    assert isinstance(target.cache, DynamicCache)
    return target.cache


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_from_a_snapshot(name: str) -> None:
    """At random counts, through its bytes; and the state of a token less, passed off as it, is seen."""
    adapter, dice = hybrid_adapter(name), random.Random(name)
    (identity,) = identities(bytes(32), hybrid_ids(), [60])
    cache = _at(name, 60)
    states = {
        layer: decoded(identity, layer, encoded(identity, layer, states_of(cache, layer)))
        for layer in adapter.state_layers
    }
    for count in (60, *dice.sample(range(61, LENGTH), 2)):
        expected = prefilled(adapter, _at(name, count), NEXT)
        found = prefilled(adapter, _from(name, Snapshot(60, states), count), NEXT)
        assert distance(found, expected) < 1e-5

    stale = replace(Snapshot.of(adapter, _at(name, 59), 59), token_count=60)
    wrong = prefilled(adapter, _from(name, stale, 60), NEXT)
    assert distance(wrong, prefilled(adapter, _at(name, 60), NEXT)) > 1e-3


def test_a_block_is_of_one_model_one_count_and_one_layer() -> None:
    """Bytes that are another's, cut, longer or not bytes of a snapshot at all are refused with the reason."""
    ids, cache = hybrid_ids(), _at(SMALLEST, 60)
    one, other = identities(bytes(32), ids, [60, 64])
    layer = hybrid_adapter(SMALLEST).state_layers[0]
    block = encoded(one, layer, states_of(cache, layer))
    (tokens,) = identities(bytes(32), [*ids[:59], ids[59] + 1], [60])
    (model,) = identities(bytes(31) + b"1", ids, [60])

    assert decoded(one, layer, block).keys() == states_of(cache, layer).keys()
    for wanted, of, problem in (
        (other, layer, "token count is 60, not 64"),
        (Identity(bytes(32), one.digest, 59), layer, "token count is 60, not 59"),
        (one, layer + 2, f"layer is {layer}, not {layer + 2}"),
        (tokens, layer, "digest of tokens"),
        (model, layer, "model is"),
    ):
        with pytest.raises(SnapshotMismatch, match=problem):
            decoded(wanted, of, block)
    for bad in (block[:-16], np.append(block, np.zeros(16, np.uint8)), block[:50], np.zeros(400, np.uint8)):
        with pytest.raises(SnapshotMismatch):
            decoded(one, layer, bad)
    # Each byte of the head counts, and of the tensor's line as far as it has axes: lfm2 keeps one of three.
    for place in range(92 + 4 + 16 + 4 * 3):
        bad = block.copy()
        bad[place] ^= 0x41
        with pytest.raises((SnapshotMismatch, UnsupportedDtype)):
            Snapshot(60, {layer: decoded(one, layer, bad)}).check(hybrid_adapter(SMALLEST), 60)


def test_a_cache_takes_no_state_that_is_not_its_own() -> None:
    """A state of too many tokens, of another model, of a layer that keeps none; it stays empty."""
    adapter = hybrid_adapter(SMALLEST)
    snapshot = Snapshot.of(adapter, _at(SMALLEST, 60), 60)
    foreign = Snapshot.of(hybrid_adapter("jamba"), _at("jamba", 60), 60)
    cache = DynamicCache(config=adapter.model.config)
    for wrong, count, problem in (
        (snapshot, 59, "of 60 tokens, the session has 59"),
        (snapshot, 1, "of 60 tokens, the session has 1"),
        (replace(snapshot, token_count=0), 60, "of 0 tokens"),
        (Snapshot(60, {0: foreign.layers[0]}), 60, "the model's is"),
        (Snapshot(60, {1: snapshot.layers[0]}), 60, "the layer keeps none"),
        (Snapshot(60, {0: snapshot.layers[0], 9: snapshot.layers[0]}), 60, "the layer keeps none"),
    ):
        with pytest.raises(SnapshotMismatch, match=problem):
            CacheTarget(adapter, count, cache, snapshot=wrong)
        assert not cache.has_previous_state()


@pytest.mark.parametrize("begin", [0, 59, 61, 70])
def test_rows_go_on_where_the_snapshot_stands_only(begin: int) -> None:
    """Rows that are in it already, and rows behind a gap, are refused."""
    adapter = hybrid_adapter(SMALLEST)
    snapshot = Snapshot.of(adapter, _at(SMALLEST, 60), 60)
    target = CacheTarget(adapter, 80, snapshot=snapshot)
    modules = Modules(adapter, torch.arange(80), standing=target.standing)
    data = layer_inputs(SMALLEST)[0][begin:80].contiguous().view(torch.uint8)

    assert [target.first_token(layer) for layer in range(4)] == [60, 0, 60, 0]
    with pytest.raises(IncompleteRestore):
        modules.restore(0, Method.HIDDEN, data, begin, target.room(0, begin, 80))


def test_passes_end_where_snapshots_are_taken() -> None:
    """At each multiple of the distance in the session, whatever the cache holds."""
    ends = [end for _, end in pieces(300, 100, is_stepwise=False, is_first=False, stops=Stops(50, 128))]
    assert ends == [78, 178, 206, 300]


# -- through a store -----------------------------------------------------------------------------------


class _Chat:
    """Turns of a session on an engine that is made anew each time, each compared to a fresh run."""

    def __init__(self, name: str, client: Client, session_id: str, every: int | None = 64) -> None:
        self.adapter, self.client, self.id, self.every = hybrid_adapter(name), client, session_id, every
        # Tokens of its own: another test's snapshots of the same tokens would be found.
        self.ids = random.Random(session_id).choices(range(60), k=200)
        self.spec = model_spec(self.adapter.model, model_id=f"{name}-{session_id}")
        kinds = [self.adapter.kind_of(layer, StateKind.KV) for layer in range(self.spec.layer_count)]
        self.plan = RestorePlan(tuple(Method[kind.name] for kind in kinds if kind))
        self.said: list[int] = []

    def turn(self, ids: Sequence[int], *, of: str = "", count: int | None = None) -> Turn:
        """One turn behind the first `count` tokens of what was said."""
        history = self.said if count is None else self.said[:count]
        model, session_id = self.adapter.model, of or self.id
        with TransformersEngine(
            self.adapter, self.client, self.spec, self.plan, window=512, snapshot_every=self.every
        ) as engine:
            found = engine.turn(session_id, ids, max_new_tokens=3, history=history, eos_token_ids=())
            assert engine.wait(session_id) is None
        fresh = DynamicCache(config=model.config)
        expected = continue_greedy(
            model,
            fresh,
            [*history, *ids],
            max_new_tokens=3,
            eos_token_ids=(),
            is_stepwise=self.adapter.is_stepwise,
        )
        assert found.token_ids == expected.token_ids
        assert (found.miss_reason, found.reused_token_count) == ("", len(history))
        if not of:
            self.said = [*history, *ids, *found.token_ids]
        return found

    def snapshots(self) -> Snapshots:
        return Snapshots(self.client, self.adapter, self.spec.fingerprint())


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_a_conversation_goes_on_from_snapshots(name: str, client: Client, session_id: str) -> None:
    """A turn from where the last one ended; a fork and a cut from the last one before, and none behind."""
    chat = _Chat(name, client, session_id)
    first = chat.turn(chat.ids[:100])
    second = chat.turn(chat.ids[100:130])

    assert (first.snapshot_token_count, second.snapshot_token_count) == (0, 103)
    client.sessions.open(f"sessions/{chat.id}").fork(id=f"{chat.id}-fork", token_count=102)
    assert chat.turn(NEXT, of=f"{chat.id}-fork", count=102).snapshot_token_count == 64
    # A cut keeps what is of the tokens that stay; the snapshot behind it serves no other tokens.
    assert chat.snapshots().latest(chat.said) == 128
    client.sessions.open(f"sessions/{chat.id}").keep_first(110)
    assert chat.turn(chat.ids[:22], count=110).snapshot_token_count == 64
    assert chat.snapshots().latest(chat.said) == 128
    assert chat.snapshots().latest(chat.said[:127]) == 64
    client.sessions.open(f"sessions/{chat.id}").keep_first(63)
    assert chat.turn(NEXT, count=63).snapshot_token_count == 0


def test_what_is_gone_or_wrong_is_rebuilt_from_rows(client: Client, session_id: str) -> None:
    """A layer's block is missing; then it has another layer's bytes. Replies are the same."""
    chat = _Chat("qwen3_next", client, session_id)
    chat.turn(chat.ids[:100])
    space = BlockSpace(model_fingerprint=chat.spec.fingerprint(), layout_tag="ctxcache.state.v1")
    (identity,) = identities(chat.spec.fingerprint(), chat.said, [103])
    (other,) = client.blocks.load(space, [identity.key(1)])
    assert other is not None
    assert client.blocks.delete(space, [identity.key(2)]) == 1

    assert chat.snapshots().latest(chat.said) == 103
    assert chat.snapshots().load(chat.said, 103, [0, 1, 2]) is None
    assert chat.turn(NEXT).snapshot_token_count == 0
    client.blocks.put(space, {identity.key(2): other[0]})
    assert chat.snapshots().load(chat.said, 103, [0, 1, 2]) is None
    with pytest.raises(InvalidArgument, match="token_count"):
        chat.snapshots().load(chat.said, len(chat.said) + 1, [0])


def test_a_salt_and_a_model_keep_states_apart(client: Client, session_id: str) -> None:
    """Snapshots of one user's session are not offered to another's, nor to another model."""
    chat = _Chat(SMALLEST, client, session_id)
    chat.turn(chat.ids[:100])
    own = chat.snapshots()

    assert own.latest(chat.said) == 103
    assert own.latest(chat.said, salt=b"user 17") == 0
    assert Snapshots(client, chat.adapter, bytes(32)).latest(chat.said) == 0
    assert own.latest([chat.said[0] + 1, *chat.said[1:]]) == 0


def test_a_stranger_finds_a_snapshot_by_the_documents_alone(
    server: ServerProcess, client: Client, session_id: str
) -> None:
    """Another client, over gRPC, with hashlib and struct: the state is that of the model's own pass."""
    chat = _Chat("qwen3_next", client, session_id)
    chat.turn(chat.ids[:100])
    ids = chat.said[:64]
    fingerprint = chat.spec.fingerprint()
    digest = hashlib.sha256(
        b"ctxcache.state.v1" + fingerprint + struct.pack("<64iq", *ids, len(ids))
    ).digest()
    key = hashlib.sha256(digest + struct.pack("<i", 2)).digest()
    space = BlockSpace(model_fingerprint=fingerprint, layout_tag="ctxcache.state.v1")
    with ctxcache.connect(server.target, access="remote") as stranger:
        (answer,) = stranger.blocks.look_up(space, [key])
        (block,) = stranger.blocks.load(space, [key])
    assert answer.state is LookupState.HIT
    assert block is not None
    data = block[0].tobytes()

    assert struct.unpack_from("<8sIiq32s32sII", data) == (
        b"CTXCSTA\0", 1, 2, 64, fingerprint, digest, 2, 0,
    )  # fmt: skip
    assert struct.unpack_from("<10I", data, 96) == (1, 0, 2, 3, 1, 64, 4, 0, 0, 0)
    assert struct.unpack_from("<10I", data, 136) == (2, 0, 2, 4, 1, 4, 8, 8, 0, 0)
    state = np.frombuffer(data, "<f4", 4 * 8 * 8, 176 + 4 * 64 * 4).reshape(1, 4, 8, 8)
    fresh = DynamicCache(config=chat.adapter.model.config)
    prefill(chat.adapter.model, fresh, ids)
    expected = states_of(fresh, 2)["recurrent 0"].numpy()
    assert np.abs(state - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_engine_says_which_distances_it_takes(client: Client, session_id: str) -> None:
    """No others than multiples of 32; at 0, nothing is taken."""
    with pytest.raises(InvalidArgument, match="33 is no multiple of 32"):
        _Chat(SMALLEST, client, session_id, every=33).turn(NEXT)
    chat = _Chat(SMALLEST, client, session_id, every=0)
    chat.turn(chat.ids[:100])
    assert chat.snapshots().latest(chat.said) == 0


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_a_session_s_cost_knows_its_snapshots(client: Client, session_id: str, name: str) -> None:
    """Less than without them, where computing is slow; asking reads token ids, and is no access."""
    adapter = hybrid_adapter(name)
    spec = model_spec(adapter.model, model_id=f"cost-{name}")
    slow = replace(known_profile("cpu"), gemm_flops_per_s=1e5, memory_bytes_per_s=1e12)
    costs = {}
    for every in (32, 0):
        with TransformersEngine(
            adapter, client, spec, profile=slow, snapshot_every=every, window=512
        ) as engine:
            if every:
                engine.turn(session_id, hybrid_ids()[:90], max_new_tokens=0, eos_token_ids=())
                engine.wait(session_id)
            before = client.sessions.get(f"sessions/{session_id}")
            costs[every] = engine.cost(session_id)
            assert client.sessions.get(f"sessions/{session_id}") == before
    assert (costs[32].snapshot_token_count, costs[0].snapshot_token_count) == (64, 0)
    assert costs[32].token_count == costs[0].token_count == 90
    assert costs[32].restored_s < costs[0].restored_s
    assert costs[32].device_s < costs[0].device_s


# -- planning ------------------------------------------------------------------------------------------


def _planned(layer: LayerShape, snapshot_tokens: int, history: int = 8192) -> Plan:
    spans = (HeldSpan(StatePlace.SSD, 0, history),)
    holding = Holding((LayerHolding(((StateKind.HIDDEN, spans),), snapshot_tokens),) * 4)
    return plan(
        PlanRequest(
            ModelShape("m", (layer,) * 4),
            holding,
            history,
            known_profile("h100"),
            engine=EngineAbilities(can_recompute=False),
        )
    )


def test_a_planner_takes_snapshots_where_they_pay() -> None:
    """A late one, not one of the first tokens, whose bytes are more than those of the rows before it."""
    layer = replace(known_model("qwen3-next-80b").layers[0], has_own_rows=False)
    late, early = _planned(layer, 8000), _planned(layer, 100)

    assert [piece.snapshot_tokens for piece in late.layers[0]] == [8000]
    assert (late.layers[0][0].begin, late.layers[0][0].end) == (8000, 8192)
    assert late.layers[0][0].size_bytes == layer.state_bytes + 192 * layer.hidden_row_bytes
    assert [piece.snapshot_tokens for piece in early.layers[0]] == [0]
    assert late.end_s < early.end_s == _planned(layer, 0).end_s
    assert _planned(layer, 8192).layers[0][0].size_bytes == layer.state_bytes
    # A layer with K and V as well needs its inputs for these.
    beside = replace(layer, state_flops=layer.project_flops / 2)
    assert _planned(beside, 8000).layers[0][0].begin == 0


def test_snapshots_are_as_often_as_they_are_worth() -> None:
    """More seldom where they are large, more often where sessions return often; never for a short one."""
    model, profile = known_model("qwen3-next-80b"), known_profile("h100")
    linear = next(layer for layer in model.layers if layer.kind is LayerKind.LINEAR)
    large = ModelShape("large", (replace(linear, state_bytes=64 * linear.state_bytes),))

    def every(of: ModelShape, count: float, history: int = 1 << 16) -> int:
        return snapshot_every(of, profile, [Return(history, place=StatePlace.SSD, count=count)])

    assert 0 < every(model, 16) < every(model, 1)
    assert every(large, 16) > every(model, 16)
    assert every(model, 1, history=64) == 0
    assert every(known_model("llama-2-7b"), 16) == 0
    assert every(model, 0) == 0
    assert snapshot_every_by_bytes(known_model("llama-2-7b")) == 0
    distance = snapshot_every_by_bytes(model)
    assert distance // 2 * linear.hidden_row_bytes < linear.state_bytes <= distance * linear.hidden_row_bytes
