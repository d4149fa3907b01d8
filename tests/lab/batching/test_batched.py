"""Packed batches: each sequence as if it were alone, and each session saved as the passes computed it."""

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from batched_engine import BatchedEngine
from sessions import rows_of
from tiny_models import CONFIGS, SINKS, build
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxcache.client import Client
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_packed import ATTENTION, PackedModel, SequenceCache, Work
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.generation import Capture, continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
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


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "kv"), ("llama", "hidden"), ("gemma2", "kv"), ("mistral-sliding", "hidden")],
)
def test_sessions_of_a_batch_are_saved_and_go_on_alone(
    client: Client, session_id: str, family: str, method: str
) -> None:
    """Chunks and steps of five sessions share passes.

    Each is stored bit for bit, and continues as one never dropped.
    """
    packed, alone = build(family), build(family)
    spec, adapter = model_spec(packed, model_id=family), adapt(packed)
    plan = RestorePlan.uniform(Method(method), spec.layer_count)
    model, streams = client.models.register(spec), plan.streams()
    names = [f"{session_id}-{i}" for i in range(len(PROMPTS))]
    with Saver(client, model, streams) as saver:
        seen = _Seen(saver)
        engine = BatchedEngine(packed, saver, pass_tokens=32)
        with Capture(adapter, streams, seen.put, is_on_host=False):
            running = []
            for name, prompt in zip(names, PROMPTS, strict=True):
                session = client.sessions.create(model, id=name, layout=streams).info
                running.append(engine.add(session, prompt, reply_count=REPLY_TOKENS))
                engine.step()
            engine.run()
        failures = [saver.wait(f"sessions/{name}") for name in names]

    assert failures == [None] * len(PROMPTS)
    assert saver.shed_token_counts == {}
    for one, prompt in zip(running, PROMPTS, strict=True):
        assert one.reply == _alone(alone, prompt, REPLY_TOKENS)
        with client.sessions.open(one.session.name, model).read() as rows:
            assert rows.token_ids() == [*prompt, *one.reply]
            for item in spec.resolve(streams)[1:]:
                found = rows_of(rows.array(item.stream).data.cast("B"), item)
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


FALCONS = [name for name in CONFIGS if name.startswith("falcon")]


@pytest.mark.parametrize("family", [*(name for name in CONFIGS if name not in FALCONS), *SINKS])
def test_a_packed_sequence_is_what_transformers_generates(family: str) -> None:
    """Windows, soft caps and sinks included.

    Beside others, chunk by chunk, it says what `generate` says alone.
    """
    model, alone = PackedModel(build(family)), build(family)
    prompts = PROMPTS[:3]
    caches = [SequenceCache(len(prompt) + REPLY_TOKENS) for prompt in prompts]
    waiting, replies = [list(prompt) for prompt in prompts], [[] for _ in prompts]  # type: list[list[int]], list[list[int]]
    while any(len(reply) < REPLY_TOKENS for reply in replies):
        chosen = [i for i, reply in enumerate(replies) if len(reply) < REPLY_TOKENS]
        taken = [waiting[i][:17] for i in chosen]
        logits = model.step([Work(caches[i], ids) for i, ids in zip(chosen, taken, strict=True)])
        for i, ids, token in zip(chosen, taken, logits.argmax(dim=-1).tolist(), strict=True):
            del waiting[i][: len(ids)]
            if not waiting[i]:
                replies[i].append(token)
                waiting[i].append(token)

    for prompt, reply in zip(prompts, replies, strict=True):
        out = alone.generate(torch.tensor([prompt]), max_new_tokens=REPLY_TOKENS, do_sample=False)  # type: ignore[operator]
        assert reply == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FALCONS)
def test_attention_of_a_models_own_is_refused(family: str) -> None:
    """Where attention does not ask transformers' interface, sequences would see each other."""
    model = build(family)
    before = model.config._attn_implementation

    with pytest.raises(UnsupportedArchitecture, match="does not go through transformers' interface"):
        PackedModel(model)

    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"position_bias": torch.zeros(1)}, "takes 'position_bias'"),
        ({"sliding_window": 5}, "attends to 5 tokens"),
        ({"dropout": 0.5}, "drops out"),
        ({"is_causal": False}, "looks ahead"),
    ],
)
def test_what_attention_would_swallow_is_refused(given: dict[str, object], problem: str) -> None:
    """Whatever a model hands to its attention is computed with, or the model is refused before a pass."""
    model = build("llama")
    attention: nn.Module = model.model.layers[1].self_attn
    attention.forward = _handing(attention.forward, given)

    with pytest.raises(UnsupportedArchitecture, match=problem):
        PackedModel(model)

    assert model.config._attn_implementation == "sdpa"


def _handing(forward: Callable[..., object], given: dict[str, object]) -> Callable[..., object]:
    """An attention that gives its implementation something besides."""

    def handing(*args: object, **kwargs: object) -> object:
        impl = ALL_ATTENTION_FUNCTIONS[ATTENTION]

        def called(*inner: object, **named: object) -> object:
            return impl(*inner, **{**named, **given})

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, called)
        try:
            return forward(*args, **kwargs)
        finally:
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION, impl)

    return handing


def test_layers_that_attend_otherwise_are_refused() -> None:
    """Attention in chunks, angles that depend on the length, and attention that looks ahead."""
    chunked, longer, both_ways = build("gemma2"), build("llama"), build("gemma3")
    chunked.config.layer_types = ["chunked_attention"] * 3
    longer.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    both_ways.config.use_bidirectional_attention = True

    for model, problem in ((chunked, "chunked_attention"), (longer, "dynamic"), (both_ways, "looks ahead")):
        with pytest.raises(UnsupportedArchitecture, match=problem):
            PackedModel(model)
