"""The engine with layouts in few bits, against a real store.

Sessions go on, in the bytes that they should take.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from server_process import ServerProcess
from tiny_models import build
from transformers import PreTrainedModel

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.routes import Access
from ctxcache.errors import ModelFingerprintMismatch
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import LOSSES_NATS, LOSSY_KINDS, PACKINGS
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.errors import RowNotRepresentable
from gpu_worker.families import Adapter
from gpu_worker.forms.rows import widen
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.profile import Link

TURNS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5]
REPLY_TOKENS = 4
LAYER_COUNT = 3


@cache
def _model() -> PreTrainedModel:
    return build("llama")


@cache
def _adapter() -> Adapter:
    return adapt(_model())


@cache
def _spec(*, is_packed: bool = True) -> ModelSpec:
    return model_spec(_model(), model_id=f"packed-{is_packed}", packed_kinds=LOSSY_KINDS if is_packed else ())


def _turns(
    client: Client, session_id: str, plan: RestorePlan, model: PreTrainedModel | None = None
) -> list[Turn]:
    """Each turn by an engine that lives for it alone."""
    turns = []
    for ids in TURNS:
        with TransformersEngine(model or _adapter(), client, _spec(), plan) as engine:
            turns.append(engine.turn(session_id, ids, max_new_tokens=REPLY_TOKENS))
            engine.wait(session_id)
    return turns


@pytest.mark.parametrize(
    "plan",
    [
        "hidden_int8:0-2",
        "kv_int8:0-2",
        "kv:0,hidden_int8:1,kv_int4:2",
        "tokens:0,hidden_int4:1-2",
        "hidden_int8:0,hidden_delta_int4:1-2",
        "tokens:0,hidden_delta_int4:1-2",
        "kv:0,hidden:1,hidden_delta_int3:2",
    ],
)
@pytest.mark.parametrize("access", ["local", "remote"])
def test_turns_are_restored_from_few_bits(
    server: ServerProcess, session_id: str, plan: str, access: Access
) -> None:
    """Every turn reuses all before it, and the store has the bytes of the layout, no more."""
    parsed = RestorePlan.parse(plan)
    with ctxcache.connect(server.target, access=access) as far:
        turns = _turns(far, session_id, parsed)
        session = far.sessions.get(f"sessions/{session_id}")

    lengths = [len(ids) + REPLY_TOKENS for ids in TURNS]
    assert [turn.reused_token_count for turn in turns] == [0, lengths[0], sum(lengths[:2])]
    assert [turn.miss_reason for turn in turns] == ["", "", ""]
    assert session.token_count == sum(lengths)
    assert {*session.streams()} >= set(parsed.streams())
    bound = max(LOSSES_NATS.get(stream.kind, 0.0) for stream in parsed.streams())
    assert bound > 0
    assert ([turn.loss_nats for turn in turns], session.loss_nats) == ([0.0, bound, bound], bound)


def test_a_reply_from_exact_rows_says_so(client: Client, session_id: str) -> None:
    """Of a model that may be packed, whose sessions are not."""
    turns = _turns(client, session_id, RestorePlan.parse("hidden:0-1,kv:2"))

    assert turns[2].reused_token_count > 0
    assert [turn.loss_nats for turn in turns] == [0.0, 0.0, 0.0]
    assert client.sessions.get(f"sessions/{session_id}").loss_nats == 0


def test_what_the_store_has_is_what_was_computed_but_for_packing(client: Client, session_id: str) -> None:
    """Rows that one forward pass captured, packed and exact, side by side in one store."""
    for kind in (StateKind.HIDDEN, StateKind.HIDDEN_INT8):
        plan = RestorePlan.uniform(Method[kind.name], LAYER_COUNT)
        with TransformersEngine(_adapter(), client, _spec(), plan) as engine:
            engine.turn(f"{session_id}-{kind}", TURNS[0], max_new_tokens=1)
    exact, packed = (Stream(1, kind) for kind in (StateKind.HIDDEN, StateKind.HIDDEN_INT8))
    with client.sessions.open(f"sessions/{session_id}-{exact.kind}", CallerModel(_spec())).read() as rows:
        wide = torch.from_numpy(rows.array(exact).copy()).view(torch.float32)
    with client.sessions.open(f"sessions/{session_id}-{packed.kind}", CallerModel(_spec())).read() as rows:
        stored = torch.from_numpy(rows.array(packed).copy())

    assert stored.shape == (len(TURNS[0]) + 1, PACKINGS[packed.kind].row_bytes(64))
    found = widen(stored, packed.kind, 64, torch.float32)
    steps = (wide.amax(1) - wide.amin(1)) / 255
    assert ((found - wide).abs().amax(1) <= steps).all()
    assert not torch.equal(found, wide)


def test_a_lossless_engine_does_not_take_packed_sessions(client: Client, session_id: str) -> None:
    """An engine that did not ask for packed kinds is another model to the store."""
    plan = RestorePlan.uniform(Method.HIDDEN_INT8, LAYER_COUNT)
    with TransformersEngine(_adapter(), client, _spec(), plan) as engine:
        engine.turn(session_id, TURNS[0], max_new_tokens=1)

    exact = RestorePlan.uniform(Method.HIDDEN, LAYER_COUNT)
    with TransformersEngine(_adapter(), client, _spec(is_packed=False), exact) as engine:
        turn = engine.turn(session_id, TURNS[1], max_new_tokens=1)
    assert (turn.miss_reason, turn.reused_token_count) == (ModelFingerprintMismatch.reason, 0)


def test_a_row_that_cannot_be_packed_ends_what_is_saved_not_the_turn(client: Client, session_id: str) -> None:
    """The reply is as it would be; the session keeps what came before, and says why it keeps no more."""
    # A model of its own: the hook stays on it.
    model, plan = build("llama"), RestorePlan.uniform(Method.KV_INT8, LAYER_COUNT)
    with TransformersEngine(model, client, _spec(), plan) as engine:
        engine.turn(session_id, TURNS[0], max_new_tokens=1)
        assert engine.wait(session_id) is None
        projection = model.model.layers[1].self_attn.v_proj
        spoils: list[object] = []

        def spoil(_token: int) -> None:
            # Within the turn: an engine takes none of a model that was changed before it.
            if not spoils:
                spoils.append(projection.register_forward_hook(lambda _module, _args, out: out * torch.inf))

        turn = engine.turn(session_id, TURNS[1], max_new_tokens=2, on_token=spoil)
        failure = engine.wait(session_id)

    assert len(turn.token_ids) == 2
    assert isinstance(failure, RowNotRepresentable)
    assert "kv_int8" in str(failure)
    # The prompt of the second turn was saved before its reply.
    assert client.sessions.get(f"sessions/{session_id}").token_count == len(TURNS[0]) + 1 + len(TURNS[1])


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_planner_saves_and_restores_in_few_bits_where_the_model_lists_them(
    client: Client,
    session_id: str,
    is_packed: bool,  # noqa: FBT001  # a case of the test
) -> None:
    """Over a slow bus: listing packed kinds is how a loss is allowed, and without them none is taken."""
    slow = replace(known_profile("h100"), copy=Link(1e5), gemm_flops_per_s=1e4, is_direct=False)
    lengths = [len(TURNS[0]) + 2, len(TURNS[1]) + 2]
    with TransformersEngine(_adapter(), client, _spec(is_packed=is_packed), profile=slow) as engine:
        turns = [engine.turn(session_id, ids, max_new_tokens=2) for ids in TURNS[:2]]
        assert engine.wait(session_id) is None
    session = client.sessions.get(f"sessions/{session_id}")

    kinds = {StateKind(item.kind) for item in session.layout} - {StateKind.TOKENS}
    assert kinds
    assert kinds <= (PACKINGS.keys() if is_packed else {StateKind.HIDDEN, StateKind.KV})
    assert [turn.reused_token_count for turn in turns] == [0, lengths[0]]
    assert session.token_count == sum(lengths)
