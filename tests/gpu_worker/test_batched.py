"""Packed batches: each sequence as if it were alone, and each session saved as the passes computed it."""

from collections import defaultdict

import pytest
import torch
from tiny_models import build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ctxcache.client import Client
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.capture import Capture
from gpu_worker.engines.batched import BatchedEngine
from gpu_worker.engines.packed import PackedModel, SequenceCache, Work
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families import adapt
from gpu_worker.generation import continue_greedy, prefill
from gpu_worker.model_spec import model_spec
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.rows import token_ids_of, unpack_rows
from gpu_worker.saving import Saver, Slice

PROMPTS = [list(range(5, 75)), [3, 4, 5] * 9, [60, 8, 7] * 5, list(range(90, 10, -2)), [11]]
REPLY_TOKENS = 20


def _alone(model: PreTrainedModel, prompt: list[int], reply_count: int) -> list[int]:
    return continue_greedy(
        model, DynamicCache(config=model.config), prompt, max_new_tokens=reply_count
    ).token_ids


class _Seen:
    """A sink between capture and saver that keeps what went through, by the slices of each pass."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.rows: dict[tuple[str, Stream], list[Tensor]] = defaultdict(list)
        self._slices: list[Slice] = []
        self._passing = saver.passing
        saver.passing = self._watch  # type: ignore[method-assign, assignment]

    def _watch(self, slices: list[Slice], token_ids: list[int]) -> object:
        self._slices = slices
        return self._passing(slices, token_ids)

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        begin = 0
        for part in self._slices:
            self.rows[part.session_name, Stream(layer, kind)].append(rows[begin : begin + part.count].clone())
            begin += part.count
        self._saver.put(layer, kind, rows)


@pytest.mark.parametrize("method", ["kv", "hidden"])
def test_sessions_of_a_batch_are_saved_and_go_on_alone(client: Client, session_id: str, method: str) -> None:
    """Chunks and steps of five sessions share passes; each is stored bit for bit, and continues as one never dropped."""
    packed, alone = build("llama"), build("llama")
    spec, adapter = model_spec(packed, model_id="llama"), adapt(packed)
    plan = RestorePlan.uniform(Method(method), spec.layer_count)
    model, streams = client.register_model(spec), plan.streams()
    names = [f"{session_id}-{i}" for i in range(len(PROMPTS))]
    with Saver(client, model, streams) as saver:
        seen = _Seen(saver)
        engine = BatchedEngine(packed, saver, pass_tokens=32)
        with Capture(adapter, streams, seen.put, is_on_host=False):
            running = []
            for name, prompt in zip(names, PROMPTS, strict=True):
                session = client.create_session(model.name, session_id=name, layout=streams)
                running.append(engine.add(session, prompt, reply_count=REPLY_TOKENS))
                engine.step()
            engine.run()
        failures = [saver.wait(f"sessions/{name}") for name in names]

    assert failures == [None] * len(PROMPTS)
    assert saver.shed_token_counts == {}
    for one, prompt in zip(running, PROMPTS, strict=True):
        assert one.reply == _alone(alone, prompt, REPLY_TOKENS)
        with client.read(one.session.name, model) as rows:
            assert token_ids_of(rows.array(TOKENS)) == [*prompt, *one.reply]
            for item in spec.resolve(streams)[1:]:
                found = unpack_rows(rows.array(item.stream).data.cast("B"), item)
                assert torch.equal(found, torch.cat(seen.rows[one.session.name, item.stream]))
    with TransformersEngine(alone, client, spec, plan) as engine_alone:
        turn = engine_alone.turn(names[0], [9, 8, 7], max_new_tokens=8)
    kept = DynamicCache(config=alone.config)
    prefill(alone, kept, [*PROMPTS[0], *running[0].reply])
    assert turn.reused_token_count == len(PROMPTS[0]) + REPLY_TOKENS
    assert turn.token_ids == continue_greedy(alone, kept, [9, 8, 7], max_new_tokens=8).token_ids


def test_a_sequence_without_room_is_refused() -> None:
    """More tokens than the cache was made for are refused before the pass."""
    model = PackedModel(build("llama"))

    with pytest.raises(InvalidArgument, match="3 do not fit"):
        model.step([Work(SequenceCache(2), [1, 2, 3])])
