"""Positions: the tables of a model's rotary embedding, and how they enter K.

Rotary embedding is exactly as transformers applies it, on K alone. The angles come from the model's own
rotary module; another order of operations would break bit equality. A scheme whose angles change with the
session's length is refused, because restored keys would not be those first computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, cat, mul, nn
from transformers import PreTrainedModel

from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.projections import Halves


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosine and sine of each position: [1, T, R] in the model's element type, R rotated dimensions."""

    cos: Tensor
    sin: Tensor

    def at(self, begin: int, end: int) -> "Rope":
        """The positions of rows [begin, end)."""
        return Rope(self.cos[:, begin:end], self.sin[:, begin:end])

    def to(self, device: object) -> "Rope":
        """The same on `device`."""
        return Rope(self.cos.to(device), self.sin.to(device))  # type: ignore[call-overload]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R of C dimensions of x, pairing i with i + R/2.

    Shapes: x [1, H, T, C] -> the same. Source: RoFormer, arXiv:2104.09864, in the half-split form
    of `apply_rotary_pos_emb`; dimensions from R on pass unchanged (GPT-NeoX, Phi-3).
    """
    cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
    size = cos.shape[-1]
    turned = _turn(x[..., :size], cos, sin)
    return turned if size == x.shape[-1] else cat((turned, x[..., size:]), dim=-1)


def rotate_interleaved(x: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of x and lay the result out half-split.

    Shapes: x [1, H, T, R] -> the same. Source: `apply_rotary_pos_emb_interleave` of DeepSeek-V3.
    """
    half = rope.cos.shape[-1] // 2
    cos, sin = rope.cos[..., :half].unsqueeze(1), rope.sin[..., :half].unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn by the angles: x * cos + (-second half, first half) * sin.

    Rounds after the same steps as transformers, with half the passes over fresh memory.
    """
    half = x.shape[-1] // 2
    # out = x * cos + rotated(x) * sin, where rotated(x) = [-x2 | x1] of x = [x1 | x2]:
    #
    #     out[first half]  = x1 * cos - x2 * sin
    #     out[second half] = x2 * cos + x1 * sin
    #
    # Products are rounded before the sum, as in transformers: fused, the last bit would differ. `crossed`
    # serves both halves: fresh memory is slow (30 layers, 2,048 tokens: 80.2 -> 62.0 ms).
    out = x * cos
    crossed = x[..., half:] * sin[..., :half]
    out[..., :half].sub_(crossed)
    mul(x[..., :half], sin[..., half:], out=crossed)
    out[..., half:].add_(crossed)
    return out


Embed = Callable[[Tensor, Tensor, Rope | None], Halves]
"""Halves [1, H, T, C], [1, H, T, C_v] before positions -> the engine's keys and values."""


_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
ONE_ROPE = ""
"""The rope key of families with one position table for all layers."""
NO_ROPE = "none"
"""The rope key of layers that positions do not enter: no table has it."""


def check_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedArchitecture where the angles depend on the session's length."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # Gemma 3 has one table of settings for each type of layer, others one for all.
    tables = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    for table in tables:
        if table.get("rope_type") in _LENGTH_DEPENDENT_ROPES:
            problem = f"rotary angles of type {table['rope_type']!r} depend on the session's length"
            raise UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)


def rope_name(model: PreTrainedModel, *extra: str) -> str:
    """The canonical string of the model's rotary settings, `extra` included. Raises as `check_rope` does."""
    check_rope(model)
    config = model.config.get_text_config(decoder=True)
    settings = getattr(config, "rope_parameters", None) or {}
    return " ".join(("rope", json.dumps(_canonical(settings), sort_keys=True), *extra))


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
        # A setting that is None says as much as one that is not there.
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
