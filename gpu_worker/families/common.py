"""What several families share: sliding windows, position tables, canonical names of settings.

Knows transformers' configuration objects. Worst case: a position scheme whose angles change with
the session's length, which is refused because restored keys would not be those first computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.adapter import Embed
from gpu_worker.families.projection import Halves
from gpu_worker.families.rotary import Rope, rotate

_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
ONE_ROPE = ""
"""The rope key of families with one position table for all layers."""


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, as the engine's own cache sets it up."""
    return tuple(getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers)


def refuse(model: PreTrainedModel, problem: str) -> UnsupportedArchitecture:
    """The error to raise for a setting of a family that is not supported."""
    return UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)


def check_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedArchitecture where the angles depend on the session's length."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    tables = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    for table in tables:
        if table.get("rope_type") in _LENGTH_DEPENDENT_ROPES:
            raise refuse(
                model, f"rotary angles of type {table['rope_type']!r} depend on the session's length"
            )


def rope_name(model: PreTrainedModel, *extra: str) -> str:
    """The canonical string of the model's rotary settings, `extra` included. Raises as `check_rope` does."""
    check_rope(model)
    return " ".join(("rope", json.dumps(_canonical(model.config.rope_parameters), sort_keys=True), *extra))


def norm_name(kind: str, norm: nn.Module | None) -> str:
    """The canonical string of a norm: its kind and its epsilon."""
    if norm is None:
        return "none"
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return f"{kind} eps={epsilon!r}"


def one_table(rotary: nn.Module) -> Callable[[Tensor, Tensor], Mapping[str, Rope]]:
    """Position tables of a rotary module that serves all layers alike."""
    return lambda example, positions: {ONE_ROPE: Rope(*rotary.forward(example, positions))}


def table_per_type(
    rotary: nn.Module, layer_types: Sequence[str]
) -> Callable[[Tensor, Tensor], Mapping[str, Rope]]:
    """Position tables of a rotary module with other angles per layer type (Gemma3)."""
    keys = sorted(set(layer_types))
    return lambda example, positions: {key: Rope(*rotary.forward(example, positions, key)) for key in keys}


def embed_rotated(group_count: int = 1) -> Embed:
    """Rotate K; repeat each KV head `group_count` times where the engine's cache holds them so."""

    def embed(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
        keys = first if rope is None else rotate(first, rope)
        if group_count == 1:
            return keys, second
        return keys.repeat_interleave(group_count, dim=1), second.repeat_interleave(group_count, dim=1)

    return embed


def _canonical(value: object) -> object:
    """Numbers as floats, so that 10000 and 10000.0 are the same setting."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
