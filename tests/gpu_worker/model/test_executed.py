"""The fingerprint is of the executed model: no two models that compute otherwise share one."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from peft import LoraConfig
from tiny_models import CONFIGS, build
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, PreTrainedModel

from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch
from gpu_worker.errors import UnsupportedArchitecture, WeightsNotVisible
from gpu_worker.families.generation import Capture
from gpu_worker.families.projections import is_plain_linear
from gpu_worker.model.executed import digest_weights
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import digest_checkpoint, model_spec
from gpu_worker.sidecar.model import LazyWeights

Edit = Callable[[Any], object]
# Any: transformers types submodules as Tensor | Module, their attributes not at all.


def _fingerprint(model: PreTrainedModel) -> bytes:
    return model_spec(model, model_id="m").fingerprint()


def adapted(*names: str, model: PreTrainedModel | None = None, use_dora: bool = False) -> Any:
    """A tiny model with adapters of these names, each of its own weights, the last one active."""
    model = model or build("llama")
    for name in names:
        config = LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_dora=use_dora
        )
        torch.manual_seed(len(name))
        model.add_adapter(config, adapter_name=name)
    model.train(mode=False)
    return model


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class _Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class _Packed(nn.Parameter):
    """As bitsandbytes packs a weight: bytes, and a state beside them that says what they mean."""

    quant_state: "_State"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        scale = args[1].quant_state.absmax[0]
        return torch.zeros(*args[0].shape[:-1], 96) + scale


class _State:
    def __init__(self, absmax: Tensor) -> None:
        self.absmax, self.blocksize, self.dtype = absmax, 64, torch.float32


def _pack(model: Any, scale: float = 1.0) -> None:
    projection = model.model.layers[0].mlp.up_proj
    packed = nn.Parameter.__new__(_Packed, torch.zeros(8, dtype=torch.uint8), False)  # noqa: FBT003
    packed.quant_state = _State(torch.full((4,), scale))
    projection.weight = packed


def _dynamic(model: Any, scale: float = 1.0) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model.model.layers[1].mlp.up_proj.weight[0] *= scale
        for layer in model.model.layers:
            torch.ao.quantization.quantize_dynamic(layer.mlp, {nn.Linear}, torch.float16, inplace=True)  # type: ignore[no-untyped-call]


def _scaled_forward(model: Any, factor: float) -> None:
    mlp = model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x) * factor


def _edit(path: str, change: Callable[[Tensor], object]) -> Edit:
    def edit(model: Any) -> None:
        owner, _, leaf = path.rpartition(".")
        with torch.no_grad():
            change(getattr(model.get_submodule(owner), leaf))

    return edit


def _set(path: str, value: object) -> Edit:
    def edit(model: Any) -> None:
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, value)

    return edit


def _traced() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.SiLU(), torch.ones(2))  # type: ignore[no-untyped-call]


def _replaced_method(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    before = type(attention).forward

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> object:
        out, weights = before(self, *args, **kwargs)
        return out * 1.01, weights

    attention.forward = MethodType(forward, attention)


CASES: dict[str, tuple[str, Edit]] = {
    "learned routing bias": (
        "deepseek",
        _edit("model.layers.1.mlp.gate.e_score_correction_bias", lambda b: b.add_(1)),
    ),
    "inverse frequencies": ("llama", _edit("model.rotary_emb.inv_freq", lambda b: b.mul_(0.5))),
    "embedding scale": ("gemma3", _edit("model.embed_tokens.embed_scale", lambda b: b.mul_(2))),
    "attention scaling": ("llama", _set("model.layers.1.self_attn.scaling", 0.3)),
    "rotary scaling": ("llama", _set("model.rotary_emb.attention_scaling", 1.5)),
    "soft cap": ("gemma2", _set("model.layers.0.self_attn.attn_logit_softcapping", 10.0)),
    "window": ("gemma2", _set("model.layers.0.self_attn.sliding_window", 8)),
    "epsilon": ("llama", _set("model.layers.0.input_layernorm.variance_epsilon", 1e-3)),
    "activation": ("llama", _set("model.layers.0.mlp.act_fn", nn.ReLU())),
    "activation of ours": ("llama", _set("model.layers.0.mlp.act_fn", _Relu())),
    "routing": ("deepseek", _set("model.layers.1.mlp.gate.routed_scaling_factor", 1.0)),
    "configuration": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 3.0)),
    "configuration of a layer": (
        "gemma2",
        lambda model: setattr(
            model.model.layers[0].self_attn,
            "config",
            copy.deepcopy(model.config).__class__(final_logit_softcapping=9.0),
        ),
    ),
    "plain tensor": ("llama", _set("model.layers.0.mlp.steering", torch.ones(3))),
    "array": ("llama", _set("model.layers.0.mlp.steering", np.ones(3))),
    "list of modules": ("llama", lambda model: setattr(model.model.layers[0], "more", [nn.Linear(2, 2)])),
    "dropout": ("gpt2", lambda model: model.train()),
    "parametrization": (
        "llama",
        lambda model: parametrize.register_parametrization(
            model.model.layers[0].mlp.up_proj, "weight", _Halved()
        ),
    ),
    "packed weights": ("llama", _dynamic),
    "bytes with a state": ("llama", _pack),
    "patched instance": ("llama", lambda model: _scaled_forward(model, 1.01)),
    "wrapped method": ("llama", _replaced_method),
    "an adapter": ("llama", lambda model: adapted("a", model=model)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changes_a_pass_changes_the_fingerprint(case: str) -> None:
    """Be it no parameter: buffers, settings, packed weights, adapters, code."""
    family, edit = CASES[case]
    model = build(family)
    before = _fingerprint(model)

    edit(model)

    assert _fingerprint(model) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_dynamic, lambda model: _dynamic(model, 1.5)),
        (_pack, lambda model: _pack(model, 1.5)),
        (lambda model: _scaled_forward(model, 1.01), lambda model: _scaled_forward(model, 1.02)),
        (lambda model: adapted("a", model=model), lambda model: adapted("bb", model=model)),
        (lambda model: adapted("a", model=model), lambda model: adapted("a", model=model, use_dora=True)),
    ],
    ids=["packed weights", "bytes with a state", "closures", "adapters", "kinds of adapters"],
)
def test_what_is_packed_or_put_in_is_told_apart(one: Edit, other: Edit) -> None:
    """Two of a sort with other numbers are two models, and the same twice is one."""
    first, again, second = build("llama"), build("llama"), build("llama")
    one(first)
    one(again)
    other(second)

    assert _fingerprint(first) == _fingerprint(again)
    assert _fingerprint(first) != _fingerprint(second)


def test_only_adapters_that_take_part_count() -> None:
    """Another active one, another scale or none at all is another model; names and idle adapters are not."""
    plain = _fingerprint(build("llama"))
    model = adapted("a", "bb")
    second = _fingerprint(model)
    model.set_adapter("a")
    first = _fingerprint(model)
    model.set_adapter(["a", "bb"])
    both = _fingerprint(model)
    model.set_adapter("a")
    model.model.layers[0].self_attn.q_proj.scaling["a"] *= 1.5
    scaled = _fingerprint(model)
    model.disable_adapters()
    disabled = _fingerprint(model)

    assert len({plain, first, second, both, scaled}) == 5
    assert disabled == plain
    assert _fingerprint(adapted("a")) == first == _fingerprint(adapted("c"))


def test_merging_is_seen() -> None:
    """Merged weights are the model's; merged and disabled at once is refused, for the next pass unmerges."""
    model = adapted("a")
    active = _fingerprint(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.merge()
        layer.self_attn.v_proj.merge()
    merged = _fingerprint(model)

    assert merged not in (active, _fingerprint(build("llama")))
    with pytest.raises(InvalidArgument, match="adapters are merged"):
        model_spec(model, model_id="m", weights_digest="files:0")
    model.disable_adapters()
    with pytest.raises(WeightsNotVisible, match=r"self_attn.q_proj: .* merged and disabled"):
        _fingerprint(model)


def test_adapters_count_beside_a_given_digest() -> None:
    """Files say nothing of adapters: they are read whatever the weights' digest is."""
    found = {
        model_spec(model, model_id="m", weights_digest="files:0").fingerprint()
        for model in (build("llama"), adapted("a"), adapted("bb"))
    }

    assert len(found) == 3


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (
            _set("model.layers.0.mlp.up_proj.weight", nn.Parameter(torch.empty(96, 64, device="meta"))),
            "up_proj",
        ),
        (_set("model.layers.0.mlp.steering", torch.ones(3).to_sparse()), "mlp.steering"),
        (lambda model: model.model.layers[1].register_forward_hook(lambda *_: None), "layers.1"),
        (lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None), "layers.1"),
        (_set("model.layers.0.mlp.act_fn", _traced()), "mlp.act_fn"),
        (_set("model.layers.0.mlp.kept", iter([1])), "mlp.kept"),
    ],
    ids=["offloaded", "sparse", "hook", "hook before", "script", "opaque"],
)
def test_what_cannot_be_seen_is_refused(edit: Edit, where: str) -> None:
    """With the module's name, and nothing is left out silently."""
    model = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edit(model)

    with pytest.raises(WeightsNotVisible, match=where):
        _fingerprint(model)


def test_wrappers_are_refused() -> None:
    """A wrapper around a model may do anything."""
    with pytest.raises(UnsupportedArchitecture, match="get_base_model"):
        model_spec(nn.Sequential(build("llama")), model_id="m")  # type: ignore[arg-type]


def test_what_changes_no_row_does_not_count() -> None:
    """Generation settings, attention's implementation, watching hooks, placement, others' training flags."""
    model: Any = build("llama")
    before = _fingerprint(model)
    model.generation_config.temperature = 0.3
    model.generation_config.max_new_tokens = 7
    model.set_attn_implementation("eager")
    model.requires_grad_(requires_grad=False)
    model.config.use_cache = False
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook(io_same_device=True))
    adapter = adapt(model)
    streams = [each.stream for each in model_spec(model, model_id="m").streams]
    with Capture(adapter, streams, lambda *_: None):
        watched = _fingerprint(model)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)

    assert watched == before
    assert _fingerprint(model) == before


def test_patched_library_functions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method or a function of transformers that somebody replaced for all models."""
    from transformers.models.llama import modeling_llama  # noqa: PLC0415

    model = build("llama")
    before = _fingerprint(model)
    rotate = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(
            modeling_llama, "apply_rotary_pos_emb", lambda *args, **kwargs: rotate(*args, **kwargs) or ()
        )
        function = _fingerprint(model)
    forward = modeling_llama.LlamaMLP.forward
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 2)  # type: ignore[no-untyped-call]
        method = _fingerprint(model)

    assert len({before, function, method}) == 3
    assert _fingerprint(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_loaded_model_is_what_its_files_say(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """However it was placed or loaded: the fingerprint is that of a worker that has files alone."""
    build(family).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    spec = model_spec(loaded, model_id="m", weights_digest=digest_checkpoint(tmp_path))

    LazyWeights(tmp_path, spec, torch.device("cpu"))

    if family in ("deepseek", "gemma3"):
        name = {
            "deepseek": "model.layers.1.mlp.gate.e_score_correction_bias",
            "gemma3": "model.rotary_emb.full_attention_inv_freq",
        }
        _edit(name[family], lambda buffer: buffer.add_(1))(loaded)
        edited = model_spec(loaded, model_id="m", weights_digest=spec.weights_digest)
        with pytest.raises(ModelFingerprintMismatch, match="settings"):
            LazyWeights(tmp_path, edited, torch.device("cpu"))


def test_the_digest_of_weights_does_not_depend_on_how_they_lie() -> None:
    """Strides, ties and order do not count; blocks are read one by one."""
    model, other = build("llama"), build("llama")
    weight: Any = other.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T
    layer = other.model.layers[0]
    layer._parameters = dict(reversed(layer._parameters.items()))
    layer._modules = dict(reversed(layer._modules.items()))
    tied: Any = build("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    untied: Any = build("llama")
    untied.lm_head.weight = nn.Parameter(untied.model.embed_tokens.weight.detach().clone())

    assert not weight.is_contiguous()
    assert digest_weights(other) == digest_weights(model)
    assert digest_weights(tied) == digest_weights(untied) != digest_weights(model)


def test_kernels_take_weights_only_where_weights_are_all() -> None:
    """A layer with an adapter, packed or patched, is projected by its own module."""
    model: Any = build("llama")
    projection = model.model.layers[0].self_attn.v_proj
    assert is_plain_linear(projection)
    projection.forward = lambda x: x
    assert not is_plain_linear(projection)
    assert not is_plain_linear(adapted("a").model.layers[0].self_attn.v_proj)
