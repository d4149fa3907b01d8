"""Capture: what the sink sees, when, and at what cost once detached."""

import pytest
import torch
from sessions import all_streams, saved_session
from tiny_models import CONFIGS, LAYER_COUNT, build
from torch import nn
from transformers import DynamicCache

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.errors import UnsupportedBatch
from gpu_worker.families.generation import Capture, continue_greedy, prefill
from gpu_worker.model.proof import adapt


def _hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_each_pass_brings_every_stream_once_in_layer_order(name: str) -> None:
    """A prefill and a decode step each hand over all streams once, with as many rows as new tokens."""
    adapter = adapt(build(name))
    seen: list[tuple[int, StateKind, int]] = []

    with Capture(adapter, all_streams(adapter), lambda i, kind, rows: seen.append((i, kind, len(rows)))):
        continue_greedy(
            adapter.model, DynamicCache(config=adapter.model.config), [1, 2, 3, 4, 5], max_new_tokens=2
        )

    streams = [(s.layer, s.kind) for s in all_streams(adapter)]
    assert seen == [(*s, 5) for s in streams] + [(*s, 1) for s in streams]


def test_hidden_rows_are_what_the_model_reports() -> None:
    """The HIDDEN rows of layer i are the model's own hidden state i, bit for bit."""
    adapter = adapt(build("llama"))
    ids = torch.arange(9).unsqueeze(0)
    rows: dict[int, torch.Tensor] = {}

    with Capture(adapter, all_streams(adapter), lambda i, kind, r: rows.update({i: r} if kind == 2 else {})):
        states = adapter.model(ids, output_hidden_states=True).hidden_states

    assert all(torch.equal(rows[i], states[i][0]) for i in range(LAYER_COUNT))


def test_only_asked_streams_are_captured() -> None:
    """Streams outside the layout cost no call; token ids are the caller's own."""
    adapter = adapt(build("qwen3"))
    asked = [TOKENS, Stream(1, StateKind.HIDDEN), Stream(2, StateKind.KV)]
    seen: list[Stream] = []

    with Capture(adapter, asked, lambda layer, kind, _: seen.append(Stream(layer, kind))):
        prefill(adapter.model, DynamicCache(config=adapter.model.config), [1, 2, 3])

    assert seen == asked[1:]


@pytest.mark.parametrize("stream", [Stream(3, StateKind.HIDDEN), Stream(0, StateKind.LATENT)])
def test_streams_of_another_model_are_refused(stream: Stream) -> None:
    """A layer or kind the model does not have is refused before any hook is attached."""
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM has no layer"):
        Capture(adapt(build("llama")), [stream], lambda *_: None)


@pytest.mark.parametrize("name", ["gemma3", "neox", "deepseek"])
def test_nothing_stays_attached(name: str) -> None:
    """After the context ends, by an error too, the model has the hooks it had before."""
    adapter = adapt(build(name))
    before = _hook_count(adapter.model)

    with pytest.raises(KeyError), Capture(adapter, all_streams(adapter), lambda *_: None):
        raise KeyError

    assert _hook_count(adapter.model) == before


@pytest.mark.parametrize("kind", [StateKind.HIDDEN, StateKind.KV])
def test_a_batch_of_two_is_refused(kind: StateKind) -> None:
    """Two sequences in one pass raise UnsupportedBatch and feed no row to the sink."""
    adapter = adapt(build("llama"))
    seen: list[int] = []

    with (
        pytest.raises(UnsupportedBatch, match="batch size 1, the pass has 2"),
        Capture(adapter, [Stream(0, kind)], lambda layer, _kind, _rows: seen.append(layer)),
    ):
        adapter.model(torch.ones(2, 4, dtype=torch.long))

    assert seen == []


@pytest.mark.parametrize("plan", ["hidden:0-2", "kv:0-2", "tokens:0-1,hidden:2"])
def test_restoring_is_not_captured(plan: str) -> None:
    """Rows that a restore projects or recomputes while capture is attached are not new tokens."""
    session = saved_session("llama")
    seen: list[int] = []

    with Capture(session.adapter, all_streams(session.adapter), lambda layer, *_: seen.append(layer)):
        session.restore(plan)

    assert seen == []


def test_a_broken_pass_leaves_no_listener() -> None:
    """After a forward pass that raised, restoring within the same capture stays silent."""
    session = saved_session("llama")
    seen: list[int] = []

    with Capture(session.adapter, all_streams(session.adapter), lambda layer, *_: seen.append(layer)):
        with _failing(session.adapter.layers[0].block), pytest.raises(ZeroDivisionError):
            session.adapter.model(torch.ones(1, 2, dtype=torch.long))
        seen.clear()
        session.restore("hidden:0-2")

    assert seen == []


class _failing:  # noqa: N801
    """A context in which a module's forward pass raises."""

    def __init__(self, module: nn.Module) -> None:
        self._hook = module.register_forward_hook(lambda *_: 1 / 0)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
