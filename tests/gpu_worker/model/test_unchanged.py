"""A model that is changed under a living engine.

Adapters switched, merged or off, weights and settings edited.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import build
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from ctxcache.client import Client
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.errors import ModelChanged, WeightsNotVisible
from gpu_worker.model.spec import model_spec
from gpu_worker.model.unchanged import ModelSnapshot, Unchanged
from gpu_worker.planning.plan import Method, RestorePlan

PLAN = RestorePlan.uniform(Method.KV, 3)
PROMPT = list(range(5, 75))
Edit = Callable[[Any], object]
# Any: transformers and peft type what they add to a model not at all.


def adapted() -> PreTrainedModel:
    """A model with two adapters, the first of which is used."""
    model: Any = build("llama")
    for name in ("one", "two"):
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(len(name) + ord(name[0]))
        model.add_adapter(config, adapter_name=name)
    model.set_adapter("one")
    model.eval()
    return model  # type: ignore[no-any-return]


def _merge(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "merge") and hasattr(module, "merged_adapters"):
            module.merge()


def _unmerge(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "unmerge") and hasattr(module, "merged_adapters"):
            module.unmerge()


def _weight(model: Any) -> torch.Tensor:
    return model.model.layers[1].mlp.down_proj.weight  # type: ignore[no-any-return]


def _edit_weight(model: Any) -> None:
    with torch.no_grad():
        _weight(model)[3, 5] *= 2


def _edit_weight_back(model: Any) -> None:
    with torch.no_grad():
        _weight(model)[3, 5] /= 2


def _stretch(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def _shrink(model: Any) -> None:
    model.model.rotary_emb.inv_freq.div_(2)


CHANGES: dict[str, tuple[Edit, Edit]] = {
    "another adapter": (lambda model: model.set_adapter("two"), lambda model: model.set_adapter("one")),
    "adapters off": (lambda model: model.disable_adapters(), lambda model: model.enable_adapters()),
    "both adapters": (
        lambda model: model.set_adapter(["one", "two"]),
        lambda model: model.set_adapter("one"),
    ),
    "merged": (_merge, _unmerge),
    "a weight": (_edit_weight, _edit_weight_back),
    "angles": (_stretch, _shrink),
    "training": (lambda model: model.train(), lambda model: model.eval()),
}


PLAIN: dict[str, tuple[str, str, float]] = {
    "scale of scores": ("llama", "model.layers.1.self_attn.scaling", 0.5),
    "epsilon of a norm": ("llama", "model.layers.2.input_layernorm.variance_epsilon", 0.3),
    "scale of angles": ("llama", "model.rotary_emb.attention_scaling", 1.5),
    "window": ("gemma2", "model.layers.0.self_attn.sliding_window", 3),
    "cap of scores": ("gemma2", "model.layers.0.self_attn.attn_logit_softcapping", 0.5),
    "dropout": ("llama", "model.layers.0.self_attn.attention_dropout", 0.5),
    "heads to a group": ("llama", "model.layers.0.self_attn.num_key_value_groups", 1),
}
"""Numbers that a pass reads from modules: the model, the attribute, another value."""


@pytest.mark.parametrize("name", PLAIN)
def test_a_number_that_was_changed_takes_no_turn(client: Client, session_id: str, name: str) -> None:
    """Plain attributes of modules, of which torch knows nothing; with the former number it goes on."""
    family, path, value = PLAIN[name]
    owner, _, attribute = path.rpartition(".")
    model = build(family)
    module = model.get_submodule(owner)
    former = getattr(module, attribute)
    with TransformersEngine(model, client, model_spec(model, model_id=session_id), PLAN) as engine:
        engine.turn(session_id, PROMPT, max_new_tokens=4)
        engine.wait(session_id)
        count = client.sessions.get(f"sessions/{session_id}").token_count
        setattr(module, attribute, value)
        with pytest.raises(ModelChanged, match="was changed since it was described"):
            engine.turn(session_id, [7, 8], max_new_tokens=4)
        assert client.sessions.get(f"sessions/{session_id}").token_count == count
        setattr(module, attribute, former)
        assert engine.turn(session_id, [7, 8], max_new_tokens=4).reused_token_count == count


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_takes_no_turn(client: Client, session_id: str, name: str) -> None:
    """Neither does it restore rows that it would not compute, nor save any; as it was before, it goes on."""
    change, undo = CHANGES[name]
    model = adapted()
    # Floats that are merged and taken out again are not what they were.
    is_undone = name != "merged"
    with TransformersEngine(model, client, model_spec(model, model_id=session_id), PLAN) as engine:
        engine.turn(session_id, PROMPT, max_new_tokens=4)
        engine.wait(session_id)
        count = client.sessions.get(f"sessions/{session_id}").token_count
        change(model)
        with pytest.raises(ModelChanged, match="was changed since it was described"):
            engine.turn(session_id, [7, 8], max_new_tokens=4)
        engine.wait(session_id)
        assert client.sessions.get(f"sessions/{session_id}").token_count == count
        undo(model)
        if is_undone:
            turn = engine.turn(session_id, [7, 8], max_new_tokens=4)
            assert turn.reused_token_count == count
            engine.wait(session_id)


def test_what_changes_nothing_is_no_change() -> None:
    """A weight written with what it had, and one that lies elsewhere: all is read once, and not again."""
    model = adapted()
    unchanged = Unchanged(model, model_spec(model, model_id="m"))
    with torch.no_grad():
        _weight(model).mul_(1)
    unchanged.check()
    _weight(model).data = _weight(model).data.clone()
    unchanged.check()


def test_another_way_to_attend_is_accepted() -> None:
    """The rows are the same but for rounding; a hook that may change them is named."""
    model: Any = build("llama")
    unchanged = Unchanged(model, model_spec(model, model_id="m"))
    model.set_attn_implementation("eager")
    unchanged.check()
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(WeightsNotVisible, match=r"model\.layers\.1: has the hook"):
        unchanged.check()
    hook.remove()
    unchanged.check()


def test_weights_of_files_cannot_be_changed_back() -> None:
    """A digest of files says nothing of memory: one that was written to is refused, whatever it holds."""
    model = adapted()
    unchanged = Unchanged(model, model_spec(model, model_id="m", weights_digest=f"files:{'0' * 64}"))
    unchanged.check()
    with torch.no_grad():
        _weight(model).mul_(1)
    with pytest.raises(ModelChanged, match="changed in memory"):
        unchanged.check()


def _replace_weight(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    shape = layer.weight.shape
    # The old one is gone first: the new one may lie where it lay, and have its id.
    del layer.weight
    layer.weight = torch.nn.Parameter(torch.zeros(shape))


def _forward_elsewhere(model: Any) -> None:
    block = model.model.layers[2]
    block.forward = block.forward


def _keep_a_table(model: Any) -> None:
    model.model.rotary_emb._non_persistent_buffers_set.clear()


SEEN: dict[str, Edit] = {
    **{name: change for name, (change, _) in CHANGES.items()},
    "a weight that is another": _replace_weight,
    "a weight that lies elsewhere": lambda model: setattr(_weight(model), "data", _weight(model).clone()),
    "a bias more": lambda model: model.lm_head.register_parameter("bias", torch.nn.Parameter(torch.ones(1))),
    "a buffer more": lambda model: model.model.register_buffer("more", torch.ones(1)),
    "a buffer that is another": lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(4)),
    "a table that is stored": _keep_a_table,
    "a module that is another": lambda model: setattr(model.model.layers[0], "mlp", torch.nn.Identity()),
    "a layer less": lambda model: model.model.layers.pop(2),
    "a hook before": lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "a hook behind": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
    "a method put in": _forward_elsewhere,
    "an adapter's scale": lambda model: model.model.layers[0].self_attn.q_proj.scale_layer(2.0),
    "one module in training": lambda model: model.model.layers[1].self_attn.train(),
    "a number more": lambda model: setattr(model.model, "more", 1),
    "a number less": lambda model: delattr(model.model.layers[0].self_attn, "scaling"),
    "another activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
    "another type": lambda model: model.double(),
    "a setting": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a setting within one": lambda model: model.config.rope_parameters.update(rope_theta=5.0),
    "another way to attend": lambda model: model.set_attn_implementation("eager"),
    "a list that a module holds": lambda model: model.model.kept[1].append(2),
    "an equal list in its place": lambda model: model.model.kept.__setitem__(1, [1]),
    "a set that a module holds": lambda model: model.model.names.add("b"),
    "a tensor that is no buffer": lambda model: model.model.table.mul_(2),
    "an object that a module holds": lambda model: setattr(model.model.object, "scale", 2.0),
    "an object with slots": lambda model: setattr(model.model.slotted, "scale", 2.0),
    "a module in a list": lambda model: setattr(model.model.hidden[0], "eps", 1.0),
    "a variable of a method put in": lambda model: model.model.scale_of_method(2.0),
}


class _Holder:
    """Holds a number that a pass could read."""

    scale = 1.0


class _Slotted:
    """Holds one besides its attributes."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def holding() -> PreTrainedModel:
    """A model whose modules hold all sorts of things besides tensors and modules."""
    model: Any = adapted()
    base = model.model
    base.kept, base.names, base.table = {1: [1]}, {"a"}, torch.ones(3)
    base.object, base.slotted = _Holder(), _Slotted()
    # A plain list: torch does not know of the module in it.
    base.hidden = [torch.nn.LayerNorm(4)]
    norm, scale = base.norm, 1.0
    plain = norm.forward

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return plain(rows) * scale  # type: ignore[no-any-return]

    def rescale(other: float) -> None:
        nonlocal scale
        scale = other

    norm.forward, base.scale_of_method = forward, rescale
    return model  # type: ignore[no-any-return]


def _wrapped(plain: Any) -> Callable[..., Any]:
    """A function that does the same, and is no library's."""

    def put_in(*args: Any, **more: Any) -> Any:
        return plain(*args, **more)

    return put_in


PATCHES: dict[str, tuple[object, str]] = {
    "a class's method": (LlamaAttention, "forward"),
    "a function of the model's code": (modeling_llama, "apply_rotary_pos_emb"),
    "a function of torch": (torch.nn.functional, "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_code_that_was_put_in_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a class or of a Python module, as patches of libraries do it: then the digest decides."""
    owner, attribute = PATCHES[name]
    model = build("llama")
    unchanged = Unchanged(model, model_spec(model, model_id="m"))
    plain = getattr(owner, attribute)
    unchanged.check()
    monkeypatch.setattr(owner, attribute, _wrapped(plain))
    with pytest.raises(ModelChanged, match="its settings is executed:"):
        unchanged.check()


def test_attention_that_was_registered_is_seen() -> None:
    """A function under the name of the way in which the model attends."""
    model = build("llama")
    unchanged = Unchanged(model, model_spec(model, model_id="m"))
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _wrapped(plain)
    try:
        with pytest.raises(ModelChanged, match="its settings is executed:"):
            unchanged.check()
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-untyped-call]
    unchanged.check()


@pytest.mark.parametrize("name", SEEN)
def test_each_change_is_seen_by_the_look_before_a_turn(name: str) -> None:
    """The state that a pass could depend on is compared before each turn.

    Only what differs is looked into.
    """
    model = holding()
    snapshot = ModelSnapshot(model)
    assert snapshot.is_current()
    SEEN[name](model)
    assert not snapshot.is_current()


def test_tensors_without_versions_are_told_apart_by_where_they_are() -> None:
    """Weights made in inference mode count no writes.

    The same ones are the same model, others are another.
    """
    with torch.inference_mode():
        model: Any = build("llama")
    snapshot = ModelSnapshot(model)
    assert snapshot.is_current()
    with torch.inference_mode():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert not snapshot.is_current()
