"""Adapters: one model's layers, positions and row shapes in a family-independent form.

Knows torch modules and transformers' configuration and cache classes, not the store. Has what several
families share: sliding windows, position tables, canonical names of settings, and rotary embedding
exactly as transformers applies it, on K alone. The angles come from the model's own rotary module;
another order of operations would break bit equality. An adapter holds references into the model and
nothing of its own.

A projection is how a layer turns its normed input into the two halves of a row, and how to watch it: K then V
(or, for MLA, latent then rotary part), before positions. Modules are called through `forward`, so that hooks
which capture new tokens do not see restored ones. A fused projection also computes Q and throws it away (1.5x
the work for as many KV heads as query heads).

Worst case: a model that is edited after its adapter was built; build the adapter again. A position scheme
whose angles change with the session's length is refused, because restored keys would not be those first
computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, cat, mul, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture

_LINEAR = (
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
)
_TENSORS = (Tensor, nn.Parameter)
Halves = tuple[Tensor, Tensor]
Emit = Callable[[Tensor, Tensor], None]
"""Takes the halves of the tokens a pass brought: [T, H, C], [T, H, C_v]."""


@dataclass(frozen=True, slots=True)
class HalfShape:
    """Heads and dimensions per head of one half of a row."""

    head_count: int
    head_size: int

    @property
    def size(self) -> int:
        """Elements of this half."""
        return self.head_count * self.head_size

    def heads(self, flat: Tensor) -> Tensor:
        """[..., H*C] -> [T, H, C], a view where possible."""
        return flat.reshape(-1, self.head_count, self.head_size)


class Projection(Protocol):
    """From a layer's normed input to the halves of a row, in restore and in capture."""

    def project(self, normed: Tensor) -> Halves:
        """Normed [1, T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        ...

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """Attach hooks that call `emit` once per forward pass of the layer; remove them to stop."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateProjection:
    """K and V each have a linear layer; K may be normed per head before positions (Qwen3, Gemma3)."""

    k_proj: nn.Module
    v_proj: nn.Module
    key: HalfShape
    value: HalfShape
    k_norm: nn.Module | None = None
    is_normed_heads_first: bool = False
    """Gemma3 norms [1, H, T, C], Qwen3 [1, T, H, C]: each norms over C alone, only hooks differ."""

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        k = self.key.heads(self.k_proj.forward(normed))
        v = self.value.heads(self.v_proj.forward(normed))
        return (k if self.k_norm is None else self.k_norm.forward(k)), v

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        join = _Join(emit)
        last = self.k_proj if self.k_norm is None else self.k_norm
        return [
            _on_output(last, lambda out: join.first(self._heads_of_key(out))),
            _on_output(self.v_proj, lambda out: join.second(self.value.heads(out))),
        ]

    def _heads_of_key(self, out: Tensor) -> Tensor:
        return self.key.heads(out.transpose(1, 2) if self.is_normed_heads_first else out)


@dataclass(frozen=True, slots=True)
class FusedProjection:
    """One linear layer yields Q, K and V; `split` takes K and V out of its output [1, T, ...]."""

    qkv: nn.Module
    split: Callable[[Tensor], Halves]

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        return self.split(self.qkv.forward(normed))

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        return [_on_output(self.qkv, lambda out: emit(*self.split(out)))]


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """MLA: one linear layer yields latent and rotary part; the latent is normed (DeepSeek-V3)."""

    kv_a: nn.Module
    kv_a_norm: nn.Module
    latent: HalfShape
    rotary: HalfShape

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        out = self.kv_a.forward(normed)
        return self.latent.heads(self.kv_a_norm.forward(out[..., : self.latent.size])), self._rotary_of(out)

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        join = _Join(emit)
        return [
            _on_output(self.kv_a_norm, lambda out: join.first(self.latent.heads(out))),
            _on_output(self.kv_a, lambda out: join.second(self._rotary_of(out))),
        ]

    def _rotary_of(self, out: Tensor) -> Tensor:
        return self.rotary.heads(out[..., self.latent.size :])


class _Join:
    """Waits for both halves of one pass, in either order, then emits them."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._halves: list[Tensor | None] = [None, None]

    def first(self, half: Tensor) -> None:
        self._put(0, half)

    def second(self, half: Tensor) -> None:
        self._put(1, half)

    def _put(self, index: int, half: Tensor) -> None:
        self._halves[index] = half
        first, second = self._halves
        if first is not None and second is not None:
            self._halves = [None, None]
            self._emit(first, second)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes what `weight` and `bias` say: no adapter, packed weight, other method."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    is_known = kind in _LINEAR and type(getattr(module, "weight", None)) in _TENSORS
    return is_known and is_unpatched(module)


def is_unpatched(module: nn.Module) -> bool:
    """Whether a module's own class says how it computes."""
    return "forward" not in module.__dict__


def without_gradient(tensor: Tensor) -> Tensor:
    """The tensor, detached where it has to be: as a rule there is no gradient, and asking is cheaper."""
    return tensor.detach() if tensor.requires_grad else tensor


def _on_output(module: nn.Module, take: Callable[[Tensor], None]) -> RemovableHandle:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        take(without_gradient(output))

    return module.register_forward_hook(hook)


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
