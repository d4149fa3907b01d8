"""Decoding with K and V on the host: the tokens of a cache on the device, by any split, on any bus."""

import random
import threading
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from server_process import ServerProcess
from tiny_models import LAYER_COUNT, build
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import ctxcache
from ctxcache.client.types import Durability
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_batch import TransformersBatchEngine
from gpu_worker.engines.transformers_host import HostCache, transfer
from gpu_worker.errors import IncompleteRestore, UnsupportedArchitecture, UnsupportedBatch
from gpu_worker.families import Adapter
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.lane import Host, HostEvent
from gpu_worker.planning.assignment import Step, simulate
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.decoding import DecodeRates, closed_split, searched_split, step_s
from gpu_worker.planning.plan import Method, RestorePlan

PROMPT = [(number * 37) % 90 + 3 for number in range(70)]
REPLY_TOKENS = 12
SPLITS: dict[str, Callable[[int], int]] = {
    "copied": lambda _count: 0,
    "projected": lambda count: count,
    "both": lambda count: count // 2,
    "changing": lambda count: count * (count % 3) // 3,
}


@cache
def _model(name: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    return build(name)


@cache
def _adapter(name: str) -> Adapter:
    return adapt(_model(name))


def _reply(name: str, held: Cache, prompt: list[int] = PROMPT) -> list[int]:
    return continue_greedy(
        _model(name), held, prompt, max_new_tokens=REPLY_TOKENS, eos_token_ids=(), piece_tokens=33
    ).token_ids


@cache
def _on_device(name: str) -> list[int]:
    return _reply(name, DynamicCache(config=_model(name).config))


@pytest.mark.parametrize(
    ("name", "split"),
    [*(("llama", split) for split in SPLITS), ("qwen3", "changing"), ("gpt2", "both"), ("phi3", "projected")],
)
def test_tokens_are_those_of_a_cache_on_the_device(name: str, split: str) -> None:
    """Prefill in pieces, too; and what goes over the bus is what the split says."""
    adapter = _adapter(name)
    with HostCache(adapter, 100, split=SPLITS[split]) as held:
        assert _reply(name, held) == _on_device(name)
        assert held.token_count == len(PROMPT) + REPLY_TOKENS - 1
    passes = [0, 33, 66, *range(70, 70 + REPLY_TOKENS - 1)]
    ends = [*passes[1:], held.token_count]
    element_bytes = _model(name).dtype.itemsize
    wide = adapter.row_size
    expected = 0
    for layer in range(LAYER_COUNT + 1):
        # Layer 0 of the pass that would come next is on its way already.
        counts = {0: [0], LAYER_COUNT: ends}.get(layer, passes)
        for count in counts:
            projected = SPLITS[split](count)
            expected += element_bytes * (projected * adapter.hidden_size + (count - projected) * wide)
    assert held.copied_bytes == expected


def test_rows_that_come_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a bus that brings wrong rows first; without the wait for them the reply is another."""
    generator = random.Random(3)

    def late(rows: Tensor, place: Tensor) -> None:
        place.fill_(torch.nan)
        for _ in range(generator.randint(0, 2000)):
            pass
        transfer(rows, place)

    with HostCache(_adapter("llama"), 100, split=SPLITS["both"], transfer=late) as held:
        assert _reply("llama", held) == _on_device("llama")

    # The control leaves nothing to luck: no row comes before the reply ends, and the device held none.
    is_over = threading.Event()

    def too_late(rows: Tensor, place: Tensor) -> None:
        is_over.wait(60.0)
        transfer(rows, place)

    fresh = Host.device_buffer
    monkeypatch.setattr(Host, "device_buffer", lambda self, size_bytes: fresh(self, size_bytes).fill_(0xFF))
    monkeypatch.setattr(HostEvent, "settle_by", lambda *_: True)
    with HostCache(_adapter("llama"), 100, split=SPLITS["both"], transfer=too_late) as held:
        reply = _reply("llama", held)
        is_over.set()
        monkeypatch.undo()
    assert reply != _on_device("llama")


def test_a_cache_says_what_it_does_not_take() -> None:
    """Windows, batches, more tokens than there is room for, a split that is none; it goes on where it can."""
    model = _model("llama")
    with pytest.raises(UnsupportedArchitecture, match="window"):
        HostCache(_adapter("gemma3"), 10)
    with pytest.raises(UnsupportedArchitecture, match="second layer"):
        HostCache(adapt(build("llama", layer_count=1)), 10)
    with pytest.raises(InvalidArgument) as raised:
        HostCache(_adapter("llama"), 0)
    assert raised.value.field == "capacity"

    def refused(ids: list[list[int]], held: HostCache) -> CacheError:
        with pytest.raises(CacheError) as found, torch.no_grad():
            model(input_ids=torch.tensor(ids), past_key_values=held)
        return found.value

    with HostCache(_adapter("llama"), 8) as held:
        prefill(model, held, PROMPT[:4])
        assert isinstance(refused([[1], [2]], held), UnsupportedBatch)
        assert "room for 8" in str(refused([[1] * 5], held))
        prefill(model, held, PROMPT[4:5])
        held.split = lambda _count: 9
        assert "9 of 5" in str(refused([[1]], held))
        held.split = lambda _count: 0
        # That pass was broken midway: what it left is nobody's.
        assert isinstance(refused([[1]], held), IncompleteRestore)
    with HostCache(_adapter("llama"), 8) as held, pytest.raises(IncompleteRestore):
        held.measured()


def test_rates_are_measured_between_passes() -> None:
    """And change nothing."""
    with HostCache(_adapter("llama"), 100, split=SPLITS["both"]) as held:
        prefill(_model("llama"), held, PROMPT[:-1])
        rates = held.measured()
        assert min(rates.activation_s, rates.kv_s, rates.recompute_s) > 0
        assert _reply("llama", held, PROMPT[-1:]) == _on_device("llama")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One store for all."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.mark.parametrize("plan", ["hidden:0-2", "kv:0-2"])
def test_a_session_goes_on_from_the_host(store: ServerProcess, plan: str) -> None:
    """Saved by an engine, restored onto the host, decoded from there; refused without layer inputs."""
    model = _model("llama")
    spec = model_spec(model, model_id=f"host-{plan[:2]}")
    with ctxcache.connect(store.target) as client:
        with TransformersEngine(
            model, client, spec, RestorePlan.parse(plan), durability=Durability.MEMORY
        ) as engine:
            engine.turn("host" + plan[:2], PROMPT[:-1], max_new_tokens=0)
        session = client.sessions.get("sessions/host" + plan[:2])
        own = client.models.register(spec)
        rows = client.sessions.open(session, own).read(streams=session.streams())
        with rows, HostCache(_adapter("llama"), 100, split=SPLITS["both"]) as held:
            if plan.startswith(Method.KV.value):
                with pytest.raises(InvalidArgument) as raised:
                    held.restore(rows, len(PROMPT) - 1)
                assert raised.value.field == "streams"
            else:
                held.restore(rows, len(PROMPT) - 1)
                assert _reply("llama", held, PROMPT[-1:]) == _on_device("llama")


def _rates(generator: random.Random) -> DecodeRates:
    activation_s, kv_s, recompute_s, attention_s, layer_s = (
        10 ** generator.uniform(-7, -5) for _ in range(5)
    )
    return DecodeRates(activation_s, kv_s, recompute_s, attention_s / 10, layer_s * 100)


def test_the_search_is_as_good_as_every_split_and_the_closed_form_as_every_one_of_a_layer() -> None:
    """Within a segment's tokens of the best split of all, and never worse than the papers'."""
    for seed in range(30):
        generator = random.Random(seed)
        rates, layers, tokens = _rates(generator), generator.randint(1, 40), generator.randint(1, 400)
        times = [step_s(rates, tokens, split, layers) for split in range(tokens + 1)]
        found = step_s(rates, tokens, searched_split(rates, tokens, layers), layers)
        granule_s = 64 * layers * (rates.activation_s + rates.kv_s + rates.recompute_s)
        assert min(times) <= found <= min(times) + granule_s
        assert found <= min(times[0], times[-1], times[closed_split(rates, tokens)])
        alone = [
            split * rates.activation_s + max(split * rates.recompute_s, (tokens - split) * rates.kv_s)
            for split in range(tokens + 1)
        ]
        assert alone[closed_split(rates, tokens)] == pytest.approx(min(alone))


def test_a_step_takes_what_its_layers_take_one_by_one() -> None:
    """The block of many layers is the pipeline written out."""
    for seed in range(10):
        generator = random.Random(seed)
        rates, layers, tokens = _rates(generator), generator.randint(1, 9), generator.randint(1, 300)
        split = generator.randint(0, tokens)
        rest_s = rates.layer_s + tokens * rates.attention_s
        steps = [
            each
            for layer in range(layers)
            for each in (
                Step(layer, "in", 0.0, split * rates.activation_s, split * rates.recompute_s),
                Step(layer, "kv", 0.0, (tokens - split) * rates.kv_s, rest_s),
            )
        ]
        assert step_s(rates, tokens, split, layers) == pytest.approx(simulate(steps).end_s)


def test_rates_that_are_none_are_refused() -> None:
    """Nothing is copied in no time."""
    for rates in ((0.0, 1.0, 1.0), (1.0, float("inf"), 1.0), (1.0, 1.0, float("nan"))):
        with pytest.raises(InvalidArgument):
            DecodeRates(*rates)


@pytest.mark.parametrize("by", ["plan", "profile"])
def test_an_engine_decodes_from_the_host(store: ServerProcess, by: str) -> None:
    """Three turns, each on an engine of its own; the replies are those of an engine without it."""
    model = _model("llama")
    spec = model_spec(model, model_id=f"on-host-{by}")
    plan = RestorePlan.parse("hidden:0-2") if by == "plan" else None
    profile = known_profile("cpu") if plan is None else None
    prompts = [PROMPT, PROMPT[:20], PROMPT[5:9]]
    replies: dict[bool, list[list[int]]] = {True: [], False: []}
    reused = []
    with ctxcache.connect(store.target) as client:
        for is_held, said in replies.items():
            for prompt in prompts:
                with TransformersEngine(
                    _adapter("llama"), client, spec, plan, profile=profile, holds_on_host=is_held
                ) as engine:
                    name = f"engine-{by}-{is_held}"
                    turn = engine.turn(name, prompt, max_new_tokens=4, eos_token_ids=())
                    said.append(turn.token_ids)
                    assert turn.miss_reason == ""
                    reused += [turn.reused_token_count] * is_held
        session = client.sessions.get(f"sessions/engine-{by}-True")
    kinds = {stream.kind for stream in session.streams()}
    assert replies[True] == replies[False]
    assert reused == [0, 74, 98]
    assert kinds == {StateKind.TOKENS, StateKind.HIDDEN}


def test_an_engine_says_what_it_cannot_hold_on_the_host(store: ServerProcess) -> None:
    """Windows, K/V plans, several sequences; a session without layer inputs is computed, and told."""
    model = _model("llama")
    spec, kv = model_spec(model, model_id="host-refused"), RestorePlan.parse("kv:0-2")
    with ctxcache.connect(store.target) as client:
        with pytest.raises(InvalidArgument) as raised:
            TransformersEngine(model, client, spec, kv, holds_on_host=True)
        assert (raised.value.field, "layer inputs" in str(raised.value)) == ("plan", True)
        with pytest.raises(InvalidArgument) as raised:
            TransformersBatchEngine(model, client, spec, kv, holds_on_host=True)
        assert raised.value.field == "holds_on_host"
        windows = _model("gemma3")
        with pytest.raises(UnsupportedArchitecture, match="window"):
            TransformersEngine(
                windows,
                client,
                model_spec(windows, model_id="host-windows"),
                profile=known_profile("cpu"),
                holds_on_host=True,
            )
        with TransformersEngine(model, client, spec, kv) as engine:
            engine.turn("host-kv", PROMPT[:-1], max_new_tokens=0)
            engine.wait("host-kv")
        hidden = RestorePlan.parse("hidden:0-2")
        with TransformersEngine(model, client, spec, hidden, holds_on_host=True) as engine:
            turn = engine.turn("host-kv", PROMPT[-1:], max_new_tokens=REPLY_TOKENS, eos_token_ids=())
    assert turn.token_ids == _on_device("llama")
    assert (turn.reused_token_count, turn.miss_reason) == (0, IncompleteRestore.reason)
