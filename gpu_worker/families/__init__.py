"""Model families: how each Hugging Face family exposes the state that is saved and restored.

Knows transformers' module names and nothing of the store. Worst case: a family that changed its modules,
which the tests of the family show as an unequal cache. A family that is close to a supported one is refused:
nothing is guessed from module names.
"""

from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families import falcon, gpt2, llama, mla, neox, opt, phi3
from gpu_worker.families.adapter import Adapter

_BUILDERS: Mapping[str, Callable[[PreTrainedModel], Adapter]] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": llama.build,
    "qwen3": llama.build,
    "gemma2": llama.build,
    "gemma3_text": llama.build,
    "phi3": phi3.build,
    "gpt_neox": neox.build,
    "falcon": falcon.build,
    "opt": opt.build,
    "gpt2": gpt2.build,
    "deepseek_v3": mla.build,
}


def adapt(model: PreTrainedModel) -> Adapter:
    """Describe `model` for capture and restore.

    Raises UnsupportedArchitecture for a family, or a setting of it, that is not supported.
    """
    if not isinstance(model, PreTrainedModel):
        problem = "it wraps a model: hand over the one in it, which peft's get_base_model() returns"
        raise UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)
    model_type = str(model.config.model_type)
    if model_type not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        problem = f"model type {model_type!r} is not one of {known}"
        raise UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)
    return _BUILDERS[model_type](model)


__all__ = ["Adapter", "adapt"]
