"""Descriptions of small models: tests say what matters to them, and the rest is the same everywhere."""

from typing import Any

from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StreamSpec

USUAL: dict[str, Any] = {
    "model_id": "tiny",
    "architecture": "TinyForCausalLM",
    "revision": "",
    "weights_digest": "",
    "tokenizer_digest": "",
    "dtype": DType.FLOAT16,
    "layer_count": 1,
    "kv_head_count": 1,
    "rope": "",
    "norm": "",
    "is_relocatable": True,
}


def small_model(
    *streams: StreamSpec, hidden_size: int, head_size: int, layer_count: int = 1, **facts: Any
) -> ModelSpec:
    """A model that has these streams; `facts` are fields that differ from the usual ones."""
    sizes = {"layer_count": layer_count, "hidden_size": hidden_size, "head_size": head_size}
    return ModelSpec(**(USUAL | sizes | facts), streams=streams)
