"""A model that is trained between and within turns: nothing of other weights is restored, saved or found."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_process import ServerProcess
from tiny_models import build
from transformers import DynamicCache, PreTrainedModel

import ctxcache
from ctxcache.client import Client
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.errors import ModelChanged
from gpu_worker.families.generation import continue_greedy
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan

REPLY_TOKENS = 80
"""More than a segment: some are committed while the turn goes on."""
PROMPT = [(7 * i) % 61 + 3 for i in range(100)]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A store of the test's own."""
    with ServerProcess(tmp_path / "data") as server, ctxcache.connect(server.target) as connected:
        yield connected


def train(model: PreTrainedModel, *, is_seen: bool) -> None:
    """A step that torch counts, or one that it does not see at all, as another process's."""
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.full_like(parameter, 0.02) * torch.sign(parameter)
            if is_seen:
                parameter.add_(step)
            else:
                made = (parameter + step).contiguous()
                ctypes.memmove(parameter.data_ptr(), made.data_ptr(), made.nbytes)


def engine_for(model: PreTrainedModel, client: Client, version: str) -> TransformersEngine:
    """An engine for the weights as they are."""
    spec = model_spec(model, model_id="policy", weights_version=version)
    plan = RestorePlan.uniform(Method.KV, spec.layer_count)
    return TransformersEngine(model, client, spec, plan)


def computed(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The reply of a model that has no store."""
    return continue_greedy(model, DynamicCache(config=model.config), ids, max_new_tokens=count).token_ids


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen by torch", "unseen"])
def test_a_step_between_turns_ends_the_engine(
    client: Client,
    is_seen: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    """And the next one finds nothing of the old weights, under one id; the old ones find theirs again."""
    model, old = build("llama"), build("llama")
    with engine_for(model, client, "step-0") as engine:
        reply = engine.turn("chat", PROMPT, max_new_tokens=REPLY_TOKENS).token_ids
        engine.wait("chat")
        train(model, is_seen=is_seen)
        before = client.sessions.get("sessions/chat")
        with pytest.raises(ModelChanged):
            engine.turn("chat", [7, 8, 9], max_new_tokens=4)
        assert client.sessions.get("sessions/chat") == before
    history = [*PROMPT, *reply]
    with engine_for(model, client, "step-1") as engine:
        turn = engine.turn("chat-1", [7, 8, 9], max_new_tokens=8, history=history)
        assert turn.reused_token_count == 0
        assert turn.token_ids == computed(model, [*history, 7, 8, 9], 8)
    with engine_for(old, client, "step-0") as engine:
        turn = engine.turn("chat", [7, 8, 9], max_new_tokens=8, history=history)
        assert turn.reused_token_count == len(history)
        assert turn.token_ids == computed(old, [*history, 7, 8, 9], 8)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen by torch", "unseen"])
def test_a_step_within_a_turn_publishes_nothing_mixed(
    client: Client,
    is_seen: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    """What a healthy engine finds is what it would have computed, however far the turn had come."""
    model, old = build("llama"), build("llama")
    count = 0

    def heard(_token: int) -> None:
        nonlocal count
        count += 1
        if count == REPLY_TOKENS // 2:
            train(model, is_seen=is_seen)

    with engine_for(model, client, "") as engine:
        reply = engine.turn("chat", PROMPT, max_new_tokens=REPLY_TOKENS, on_token=heard).token_ids
        engine.wait("chat")
    history = [*PROMPT, *reply]
    with engine_for(old, client, "") as engine:
        turn = engine.turn("chat", [7, 8, 9], max_new_tokens=8, history=history)
        assert turn.token_ids == computed(old, [*history, 7, 8, 9], 8)
        assert turn.reused_token_count <= len(PROMPT) + REPLY_TOKENS // 2


def test_versions_of_one_id_share_by_what_they_are_called(client: Client) -> None:
    """The same version of the same weights is one model, in any process; another one is another model."""
    model = build("llama")
    specs = [model_spec(model, model_id="policy", weights_version=one) for one in ("", "a", "a", "b")]
    assert len({one.fingerprint() for one in specs}) == 3
    assert specs[1] == specs[2]
    for spec in specs:
        client.models.register(spec)
    listed = [one.name for one in client.models.list()]
    assert len(listed) == 3
    assert all(one.startswith("models/policy") for one in listed)
