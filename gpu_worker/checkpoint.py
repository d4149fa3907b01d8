"""A model described from its directory, as transformers loads it: what engines that load it themselves need.

Two engines that serve the same files have the same fingerprint, whatever they made of the weights. Worst
case: the whole model is loaded once on the host, and freed again.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelProbe, ModelSpec
from gpu_worker.generation import prefill
from gpu_worker.model_spec import model_spec
from gpu_worker.probe import probe_of
from gpu_worker.proof import adapt


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as the store knows it, and its output for a few tokens."""

    spec: ModelSpec
    probe: ModelProbe


def describe_directory(
    directory: str | Path, *, model_id: str = "", dtype: torch.dtype | None = None
) -> DescribedModel:
    """Describe the model whose configuration and weights lie in `directory`.

    `model_id` defaults to the directory's name, `dtype` to that of the weights. Raises
    InvalidArgument(field="directory"), UnsupportedArchitecture, UnsupportedDtype, WeightsNotVisible, and what
    transformers does for files that it cannot read.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise InvalidArgument(field="directory", problem=f"{path} holds no model: there is no config.json")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", local_files_only=True
    )
    model.train(mode=False)
    spec = model_spec(model, model_id=model_id or path.resolve().name)
    probe = probe_of(adapt(model), spec, lambda ids: prefill(model, DynamicCache(config=model.config), ids))
    return DescribedModel(spec, probe)


def spec_from_directory(
    directory: str | Path, *, model_id: str = "", dtype: torch.dtype | None = None
) -> ModelSpec:
    """The store's description of the model in `directory`: see `describe_directory`."""
    return describe_directory(directory, model_id=model_id, dtype=dtype).spec
