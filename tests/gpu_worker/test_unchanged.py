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

from ctxcache.client import Client
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.errors import ModelChanged
from gpu_worker.model_spec import model_spec
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.unchanged import ModelSnapshot, Unchanged

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
}


@pytest.mark.parametrize("name", SEEN)
def test_each_change_is_seen_by_the_look_before_a_turn(name: str) -> None:
    """The state that a pass could depend on is compared before each turn.

    Only what differs is looked into.
    """
    model = adapted()
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
