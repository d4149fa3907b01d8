"""Models that no list names: what they prove is served and comes back; faults in what is found are seen."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from sessions import RELATIVE_BOUND, relative_error, restored_cache
from tiny_models import VOCABULARY_SIZE, build, heat, random_model
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    CohereConfig,
    DynamicCache,
    Gemma3TextConfig,
    GlmConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, prefill
from gpu_worker.families.positions import Rope
from gpu_worker.model.proof import adapt, contents, difference
from gpu_worker.planning.plan import Method, RestorePlan
from lab.studies.families import build as build_study

WINDOW = 24
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
KV, HIDDEN, AS_CACHED = StateKind.KV, StateKind.HIDDEN, StateKind.KV_AS_CACHED
TOKENS = StateKind.TOKENS
MODELS: Mapping[str, tuple[Callable[[], PreTrainedConfig], tuple[StateKind, ...]]] = {
    "norm of all heads, none before": (lambda: Olmo2Config(**_SHAPE), (HIDDEN, KV)),
    "pairs of neighbours": (lambda: CohereConfig(**_SHAPE), (HIDDEN, KV)),
    "pairs in a part": (lambda: GlmConfig(**_SHAPE, head_dim=16), (HIDDEN, KV)),
    "layers without positions": (lambda: SmolLM3Config(**_SHAPE), (HIDDEN, KV)),
    "experts": (lambda: MixtralConfig(**_SHAPE, **_EXPERTS), (HIDDEN, KV)),
    "attention sinks": (
        lambda: GptOssConfig(**{**_SHAPE, **_EXPERTS, "head_dim": 16, "sliding_window": WINDOW}),
        (HIDDEN, KV),
    ),
    "values cut off": (lambda: OlmoConfig(**_SHAPE, clip_qkv=1.0), (AS_CACHED,)),
    "alibi": (
        lambda: BloomConfig(vocab_size=VOCABULARY_SIZE, hidden_size=64, n_head=4, n_layer=4),
        (AS_CACHED,),
    ),
    "chunks": (
        lambda: Llama4TextConfig(
            **_SHAPE, **_EXPERTS, head_dim=16, intermediate_size_mlp=96, attention_chunk_size=WINDOW
        ),
        (AS_CACHED,),
    ),
    "layers that share, streams": (lambda: build_study("gemma3n_text", torch.float32).config, (AS_CACHED,)),
    "layers that share, sizes": (lambda: build_study("gemma4_text", torch.float32).config, (AS_CACHED,)),
    "projections of other names": (lambda: build_study("roformer", torch.float32).config, (AS_CACHED,)),
    "streams of each token": (lambda: build_study("hy_v4", torch.float32).config, (AS_CACHED,)),
    "an indexer": (lambda: build_study("deepseek_v32", torch.float32).config, (AS_CACHED,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_proves_the_same_wherever_torch_makes_tensors(name: str) -> None:
    """An engine may have its GPU as torch's default device; here a device that has no bytes at all."""
    config, kinds = MODELS[name]
    model = heat(random_model(config()))
    expected = adapt(model)
    with torch.device("meta"):
        found = adapt(model)
    assert (found.kinds, found.architecture) == (kinds, expected.architecture)
    assert [found.kinds_of(layer) for layer in range(len(found.layers))] == [
        expected.kinds_of(layer) for layer in range(len(expected.layers))
    ]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_proves_comes_back(name: str) -> None:
    """Rows of each proven kind, of two passes past every window, give back the cache that was kept."""
    config, kinds = MODELS[name]
    torch.set_num_threads(1)
    model = heat(random_model(config()))
    adapter = adapt(model)
    rows, kept = _saved(adapter)
    restored = {
        kind: restored_cache(
            adapter,
            RestorePlan(tuple(_method(adapter, layer, kind) for layer in range(len(adapter.layers)))),
            rows.__getitem__,
            positions=torch.arange(sum(PASSES)),
            token_ids=torch.tensor(_token_ids()),
        )
        for kind in (*adapter.kinds, TOKENS)
    }
    errors = {kind: _worst(cache, kept) for kind, cache in restored.items()}
    expected = prefill(model, kept, [5, 3, 8])

    assert adapter.kinds == kinds
    assert adapter.is_relocatable is (AS_CACHED not in kinds)
    for kind, cache in restored.items():
        assert errors[kind] < (RELATIVE_BOUND if kind in (HIDDEN, TOKENS) else 1e-7)
        assert torch.allclose(prefill(model, cache, [5, 3, 8]), expected, atol=1e-3, rtol=1e-4)


PASSES = (58, 7)


def _method(adapter: Adapter, layer: int, kind: StateKind) -> Method:
    if kind is TOKENS:
        return Method.TOKENS
    own = adapter.kind_of(layer, kind)
    return Method.NOTHING if own is None else Method[own.name]


def _worst(cache: Any, kept: DynamicCache) -> float:
    """The worst error in all that the cache holds: keys, values, and index keys."""
    pairs = zip(contents(cache), contents(kept), strict=True)
    return max(relative_error(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs)


def _token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return [
        token
        for count in PASSES
        for token in torch.randint(VOCABULARY_SIZE, (count,), generator=generator).tolist()
    ]


def _saved(adapter: Adapter) -> tuple[dict[Stream, Tensor], DynamicCache]:
    model = adapter.model
    pieces: dict[Stream, list[Tensor]] = {
        Stream(layer, kind): [] for layer in range(len(adapter.layers)) for kind in adapter.kinds_of(layer)
    }
    kept = DynamicCache(config=model.config)
    ids = _token_ids()
    with Capture(adapter, pieces, lambda layer, kind, rows: pieces[Stream(layer, kind)].append(rows)):
        for part in (ids[: PASSES[0]], ids[PASSES[0] :]):
            prefill(model, kept, part)
    return {stream: torch.cat(found) for stream, found in pieces.items()}, kept


def _shifted(adapter: Adapter) -> Adapter:
    rotary = adapter.rotary
    assert rotary is not None

    def shifted(example: Tensor, positions: Tensor) -> Mapping[str, Rope]:
        return rotary(example, positions + 1)

    return replace(adapter, rotary=shifted)


def _louder(adapter: Adapter) -> Adapter:
    norm = copy.deepcopy(adapter.layers[1].norm)
    assert norm is not None
    with torch.no_grad():
        norm.get_parameter("weight")[7] *= 1.01
    layers = list(adapter.layers)
    layers[1] = replace(layers[1], norm=norm)
    return replace(adapter, layers=tuple(layers))


def _swapped(adapter: Adapter) -> Adapter:
    first, second, *rest = adapter.layers
    swapped = (
        replace(first, projection=second.projection),
        replace(second, projection=first.projection),
    )
    return replace(adapter, layers=(*swapped, *rest))


@pytest.mark.parametrize(
    ("plant", "kind"),
    [(_shifted, KV), (_shifted, HIDDEN), (_louder, HIDDEN), (_swapped, KV), (_swapped, HIDDEN)],
)
def test_a_fault_in_what_was_found_is_seen(plant: Callable[[Adapter], Adapter], kind: StateKind) -> None:
    """Positions off by one, one element of a gain off by a percent, layers swapped: no proof passes."""
    adapter = adapt(build("llama"))

    assert difference(adapter, kind) == ""
    assert "differ" in difference(plant(adapter), kind)


def test_a_family_that_is_close_to_another_is_kept_as_cached() -> None:
    """A model with Llama's modules that does more to its keys is not taken for a Llama."""
    model: Any = build("llama")
    for layer in model.model.layers:
        _edit_keys(layer.self_attn, lambda keys: keys * 1.25)

    adapter = adapt(model)

    assert adapter.kinds == (AS_CACHED,)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (1.0, "depend on how passes are cut.*: most keys of layer 0 differ"),
        (1e-5, "do not come back as they are cached: keys of layer 0 differ"),
    ],
)
def test_a_model_whose_cache_is_not_what_it_attends_to_is_refused(size: float, reason: str) -> None:
    """Keys that depend on when they were cached do not come back, and the reason is told."""
    model: Any = build("llama")
    noise = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        _edit_keys(layer.self_attn, lambda keys: keys + size * torch.randn(keys.shape, generator=noise))

    with pytest.raises(UnsupportedArchitecture, match=reason):
        adapt(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_whose_tokens_see_those_behind_them_is_refused(dtype: torch.dtype) -> None:
    """Its rows depend on how turns were cut, which no restore knows."""
    settings = {**_SHAPE, "head_dim": 16, "sliding_window": WINDOW}
    causal, other = (
        heat(random_model(Gemma3TextConfig(**settings, use_bidirectional_attention=is_other))).to(dtype)  # type: ignore[arg-type]
        for is_other in (False, True)
    )

    assert adapt(causal).kinds == (HIDDEN, KV)
    with pytest.raises(UnsupportedArchitecture, match="depend on how passes are cut"):
        adapt(other)


@pytest.mark.parametrize(
    "name", ["bert", "bert-generation", "big_bird", "rembert", "roformer", "dots3_note_text", "moshi"]
)
def test_an_encoder_is_refused_and_its_decoder_is_served(name: str) -> None:
    """Where a setting says which it is, rows say it too; no foreign error comes out."""
    model: Any = build_study(name, torch.float32)
    assert adapt(model).kinds
    if getattr(model.config, "is_decoder", False):
        model.config.is_decoder = False
        with pytest.raises(UnsupportedArchitecture, match="depend on how passes are cut"):
            adapt(random_model(model.config))


@pytest.mark.parametrize("name", ["roberta", "camembert", "xlm-roberta-xl", "xmod"])
def test_a_model_that_counts_positions_its_own_way_is_refused(name: str) -> None:
    """Layers that are computed again from token ids would stand at other positions."""
    with pytest.raises(UnsupportedArchitecture, match="do not come back from token ids"):
        adapt(build_study(name, torch.float32))


def _no_count(model: Any) -> None:
    vars(model.config)["num_hidden_layers"] = None


def _no_vocabulary(model: Any) -> None:
    model.get_input_embeddings = lambda: None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_no_count, "cannot be described: TypeError"), (_no_vocabulary, "cannot be described: AttributeError")],
)
def test_a_description_that_fails_is_a_refusal(damage: Callable[[Any], None], reason: str) -> None:
    """Whatever the model's own code raises, the reason has it."""
    model = build("llama")
    damage(model)

    with pytest.raises(UnsupportedArchitecture, match=reason):
        adapt(model)


def test_modules_that_are_not_understood_leave_the_cache() -> None:
    """A model that runs, and that does not say how many heads it has, is served as it caches."""
    model = build("llama")
    vars(model.config)["num_attention_heads"] = None

    assert adapt(model).kinds == (AS_CACHED,)


_REFUSED: Mapping[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "angles of a length": (
        lambda: LlamaConfig(
            **_SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "'dynamic' depend on the session's length",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_rows_of_tokens_do_not_hold_is_refused(name: str) -> None:
    """Angles that change with the length: the reason names it."""
    config, reason = _REFUSED[name]
    with pytest.raises(UnsupportedArchitecture, match=reason):
        adapt(random_model(config()))


def _edit_keys(attention: Any, edit: Callable[[Tensor], Tensor]) -> None:
    plain = attention.forward

    def forward(*args: Any, past_key_values: Any = None, **more: Any) -> Any:
        return plain(*args, past_key_values=_Edited(past_key_values, edit), **more)

    attention.forward = forward


class _Edited:
    """A cache that takes other keys than it is given."""

    def __init__(self, cache: Any, edit: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._edit = cache, edit

    def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        return self._cache.update(self._edit(keys), values, *args, **more)


def test_a_watch_leaves_a_cache_as_it_was() -> None:
    """A cache that was watched during a pass has its own `update` again, also where the pass broke."""
    model = heat(random_model(MODELS["alibi"][0]()))
    adapter = adapt(model)
    cache = DynamicCache(config=model.config)
    broken = adapter.layers[2].block.register_forward_pre_hook(_break)

    with Capture(adapter, [Stream(0, AS_CACHED)], lambda *_: None):
        with pytest.raises(ArithmeticError):
            prefill(model, cache, [1, 2])
        broken.remove()
        assert "update" not in vars(cache)
        prefill(model, DynamicCache(config=model.config), [1, 2])

    assert not adapter.base._forward_pre_hooks


def _break(_module: nn.Module, _args: object) -> None:
    raise ArithmeticError
