"""Adapters: one model's layers, positions and row shapes in a family-independent form.

Knows torch modules and transformers' configuration and cache classes, not the store. Has what several
families share: sliding windows, position tables, canonical names of settings, and rotary embedding
exactly as transformers applies it, on K alone. The angles come from the model's own rotary module;
another order of operations would break bit equality. An adapter holds references into the model and
nothing of its own.

Worst case: a model that is edited after its adapter was built; build the adapter again. A position scheme
whose angles change with the session's length is refused, because restored keys would not be those first
computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, cat, mul, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.projection import HalfShape, Halves, Projection


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
    out = x * cos
    crossed = x[..., half:] * sin[..., :half]
    out[..., :half].sub_(crossed)
    mul(x[..., :half], sin[..., half:], out=crossed)
    out[..., half:].add_(crossed)
    return out


Embed = Callable[[Tensor, Tensor, Rope | None], Halves]
"""Halves [1, H, T, C], [1, H, T, C_v] before positions -> the engine's keys and values."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer: where its input arrives, and the way from it to the engine's cache."""

    block: nn.Module
    norm: nn.Module | None
    projection: Projection
    rope_key: str
    """Which of the model's position tables this layer uses; layers of one type share one."""
    window: int | None
    """Tokens a sliding-window layer attends to; None where it attends to all."""

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are."""
        return next(self.block.parameters()).device

    def project(self, hidden: Tensor) -> Halves:
        """Layer input [T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        x = hidden.unsqueeze(0)
        return self.projection.project(x if self.norm is None else self.norm.forward(x))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model as restore and capture need it; built by `adapt`.

    `kind` is what a projected row is (KV or LATENT), `key` and `value` the shapes of its halves,
    `norm_name` and `rope_name` the canonical strings of the fingerprint.
    """

    model: PreTrainedModel
    base: nn.Module
    """The module whose forward pass runs all layers, and which the model with its head calls."""
    layers: tuple[DecoderLayer, ...]
    kind: StateKind
    key: HalfShape
    value: HalfShape
    embed_halves: Embed
    rotary: Callable[[Tensor, Tensor], Mapping[str, Rope]] | None
    """(something of the model's dtype and device, positions [1, T]) -> tables; None: learned positions."""
    norm_name: str
    rope_name: str

    @property
    def architecture(self) -> str:
        """The model's class name."""
        return type(self.model).__name__

    @property
    def is_relocatable(self) -> bool:
        """False where positions enter at the embedding, so that saved state cannot be moved."""
        return self.rotary is not None

    @property
    def hidden_size(self) -> int:
        """Elements of a HIDDEN row, D."""
        return int(self.model.config.hidden_size)

    @property
    def row_size(self) -> int:
        """Elements of a KV or LATENT row."""
        return self.key.size + self.value.size

    def element_count(self, kind: StateKind) -> int | None:
        """Elements of a row of `kind`, or of the kind that it packs; None for one the model does not have."""
        return {StateKind.HIDDEN: self.hidden_size, self.kind: self.row_size}.get(unpacked(kind))

    def ropes(self, positions: Tensor) -> Mapping[str, Rope]:
        """Position tables for positions [T], by `rope_key`; empty where positions are learned."""
        if self.rotary is None:
            return {}
        device = self.layers[0].device
        example = torch.empty(0, dtype=self.model.dtype, device=device)
        return self.rotary(example, positions.to(device).unsqueeze(0))

    def pack(self, first: Tensor, second: Tensor) -> Tensor:
        """Halves [T, H, C], [T, H, C_v] -> rows [T, row_size], a copy."""
        return cat((first.flatten(1), second.flatten(1)), dim=1)

    def unpack(self, rows: Tensor) -> Halves:
        """Rows [T, row_size] -> halves [T, H, C], [T, H, C_v], views."""
        return self.key.heads(rows[:, : self.key.size]), self.value.heads(rows[:, self.key.size :])

    def embed(self, halves: Halves, rope: Rope | None) -> Halves:
        """Halves -> keys and values as the engine caches them, [1, H, T, C], [1, H, T, C_v]."""
        first, second = (half.transpose(0, 1).unsqueeze(0) for half in halves)
        return self.embed_halves(first, second, rope)


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
