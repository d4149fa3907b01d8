"""Probes of models.

Rounding passes, whatever computes something else is refused, also where fingerprints agree.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batched_engine import BatchedEngine
from peft import LoraConfig
from tiny_models import CONFIGS, build
from transformers import DynamicCache, PreTrainedModel

from ctxcache.client import Client
from ctxcache.errors import ModelFingerprintMismatch, ModelProbeMismatch
from ctxcache.format.model import Difference, ModelProbe, ModelSpec
from ctxcache.format.streams import DType
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_packed import PackedModel, SequenceCache, Work
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.generation import prefill
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.saving import Saver

PLAN = RestorePlan.uniform(Method.KV, 3)
PROMPT = list(range(5, 75))
Edit = Callable[[Any], object]
# Any: transformers types submodules as Tensor | Module, their attributes not at all.


def _probe(model: PreTrainedModel, spec: ModelSpec) -> ModelProbe:
    return probe_of(adapt(model), spec, lambda ids: prefill(model, DynamicCache(config=model.config), ids))


def _packed_probe(model: PreTrainedModel, spec: ModelSpec) -> ModelProbe:
    adapter, packed = adapt(model), PackedModel(model)
    return probe_of(adapter, spec, lambda ids: packed.step([Work(SequenceCache(len(ids)), ids)]))


def _difference(one: ModelProbe, other: ModelProbe) -> Difference:
    found = one.difference(other)
    assert found is not None
    return found


def _scaled(factor: float) -> Edit:
    """A pass that scales what one layer's MLP puts out."""

    def edit(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        before = mlp.forward
        mlp.forward = lambda x: before(x) * factor

    return edit


def _with_adapter(name: str) -> Edit:
    def edit(model: Any) -> None:
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(len(name))
        model.add_adapter(config, adapter_name=name)

    return edit


def _rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_rounding_is_no_difference(family: str) -> None:
    """One or two threads, either implementation of attention, packed passes, and types of 16 bits."""
    model = build(family)
    spec = model_spec(model, model_id="m", weights_digest="w")
    kept, threads = _probe(model, spec), torch.get_num_threads()
    same = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            same.append(_probe(model, spec))
    finally:
        torch.set_num_threads(threads)
    if not family.startswith("falcon"):
        model.set_attn_implementation("eager")
        same.append(_probe(model, spec))
        same.append(_packed_probe(model, spec))
    coarse = [_probe(_rounded(build(family), dtype), spec) for dtype in (torch.float16, torch.bfloat16)]

    assert (len(kept.token_ids), kept.problem(), kept.dtype) == (16, "", DType.FLOAT32)
    for other in (*same, *coarse):
        assert _difference(other, kept).measured < _difference(other, kept).allowed
        assert _difference(kept, other).measured < _difference(kept, other).allowed
    # A wide control: what is allowed is far from what was measured.
    assert max(_difference(other, kept).measured for other in same) < 1e-5
    assert [other.dtype for other in coarse] == [DType.FLOAT16, DType.BFLOAT16]


@pytest.mark.parametrize(
    ("family", "edit"),
    [
        ("llama", _scaled(1.01)),
        ("qwen3", _scaled(0.99)),
        ("llama", _with_adapter("a")),
        ("llama", lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.26)),
        ("llama", lambda model: model.model.rotary_emb.inv_freq.mul_(0.9)),
        (
            "deepseek",
            lambda model: model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0)),
        ),
        ("gemma2", lambda model: setattr(model.model.layers[0].self_attn, "attn_logit_softcapping", 5.0)),
    ],
    ids=["layer scaled", "layer scaled down", "adapter", "attention", "frequencies", "routing", "soft cap"],
)
def test_what_computes_otherwise_lies_apart(family: str, edit: Edit) -> None:
    """A layer that is changed slightly is seen, whatever changed it."""
    model = build(family)
    spec = model_spec(model, model_id="m", weights_digest="w")
    kept = _probe(model, spec)

    edit(model)

    assert _difference(_probe(model, spec), kept).measured > _difference(_probe(model, spec), kept).allowed


def test_products_of_a_coarser_type_are_said() -> None:
    """Where float32 products may be rounded, the probe is compared as one of the coarser type."""
    model = build("llama")
    spec = model_spec(model, model_id="m", weights_digest="w")
    try:
        torch.set_float32_matmul_precision("high")
        found = _probe(model, spec)
    finally:
        torch.set_float32_matmul_precision("highest")

    assert found.dtype is DType.FLOAT16


CHANGES: dict[str, tuple[str, Edit]] = {
    "routing bias": (
        "deepseek",
        lambda model: model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0)),
    ),
    "frequencies": ("llama", lambda model: model.model.rotary_emb.inv_freq.mul_(0.9)),
    "another adapter": ("llama", lambda model: model.set_adapter("a")),
    "no adapter": ("llama", lambda model: model.disable_adapters()),
}


@pytest.mark.parametrize("case", CHANGES)
def test_rows_of_one_model_are_never_restored_into_another(
    client: Client, session_id: str, case: str
) -> None:
    """Under any id, and also by an engine that keeps the description from before the change."""
    family, change = CHANGES[case]
    model = build(family)
    if "adapter" in case:
        _with_adapter("a")(model)
        _with_adapter("bb")(model)
        model.train(mode=False)
    plan = RestorePlan.uniform(Method.LATENT if family == "deepseek" else Method.KV, 3)
    before = model_spec(model, model_id=session_id)
    with TransformersEngine(model, client, before, plan) as engine:
        engine.turn(session_id, PROMPT, max_new_tokens=4)
        engine.wait(session_id)

    with torch.no_grad():
        change(model)
    after = model_spec(model, model_id=session_id)
    with pytest.raises(ModelFingerprintMismatch, match="they differ in"):
        TransformersEngine(model, client, after, plan)
    other = model_spec(model, model_id=f"{session_id}-other")
    with TransformersEngine(model, client, other, plan) as engine:
        turn = engine.turn(session_id, [3, 4, 5], max_new_tokens=1)
    assert (turn.miss_reason, turn.reused_token_count) == (ModelFingerprintMismatch.reason, 0)
    with pytest.raises(ModelProbeMismatch) as refused:
        TransformersEngine(model, client, before, plan)

    assert refused.value.model == f"models/{session_id}"
    assert float(str(refused.value.measured)) > float(str(refused.value.allowed)) == 0.001
    assert client.sessions.get(f"sessions/{session_id}").token_count == len(PROMPT) + 4


def test_packed_weights_are_another_model(client: Client, session_id: str) -> None:
    """A quantised model takes neither the rows of its original nor those of one with other weights."""
    plain, packed = build("llama"), build("llama")
    for layer in packed.model.layers:
        torch.ao.quantization.quantize_dynamic(layer.mlp, {torch.nn.Linear}, torch.float16, inplace=True)  # type: ignore[no-untyped-call]
    with TransformersEngine(plain, client, model_spec(plain, model_id=session_id), PLAN) as engine:
        engine.turn(session_id, PROMPT, max_new_tokens=1)
        engine.wait(session_id)

    with pytest.raises(ModelFingerprintMismatch, match="weights_digest"):
        TransformersEngine(packed, client, model_spec(packed, model_id=session_id), PLAN)
    other = model_spec(packed, model_id=f"{session_id}-packed")
    with TransformersEngine(packed, client, other, PLAN) as engine:
        turn = engine.turn(session_id, [3], max_new_tokens=1)
    assert (turn.miss_reason, turn.reused_token_count) == (ModelFingerprintMismatch.reason, 0)


def test_packed_passes_are_compared_too(client: Client, session_id: str) -> None:
    """A batch that saves must compute what the model's other engines do.

    One that saves nothing may do anything.
    """
    spec = model_spec(build("llama"), model_id=session_id)
    alone = build("llama")
    with TransformersEngine(alone, client, spec, PLAN):
        pass
    with Saver(client, client.models.register(spec), PLAN.streams()) as saver:
        BatchedEngine(build("llama"), saver)
        changed = build("llama")
        _scaled(1.05)(changed)
        with pytest.raises(ModelProbeMismatch, match=r"group \d of its probe lies"):
            BatchedEngine(changed, saver)
        BatchedEngine(changed, None)
        with pytest.raises(UnsupportedArchitecture):
            BatchedEngine(build("falcon-new"), saver)
