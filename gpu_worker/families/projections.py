"""Projections: how a layer turns its normed input into the two halves of a row, and how to watch it.

The halves are K then V (or, for MLA, latent then rotary part), before positions. Modules are called through
`forward`, so that hooks which capture new tokens do not see restored ones. A fused projection also computes Q
and throws it away (1.5x the work for as many KV heads as query heads). Knows modules, and no model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpu_worker.errors import UnsupportedArchitecture

# By their names: importing a family's module only to compare its class would load it in every worker.
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


class Handle(Protocol):
    """The handle that ends a watch."""

    def remove(self) -> None:
        """End the watch."""
        ...


class Projection(Protocol):
    """From a layer's normed input to the halves of a row, in restore and in capture."""

    def project(self, normed: Tensor) -> Halves:
        """Normed [1, T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        ...

    def watch(self, emit: Emit) -> Sequence[Handle]:
        """Attach hooks that call `emit` once per forward pass of the layer; remove them to stop."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateProjection:
    """K and V each have a linear layer; K may be normed before positions.

    Each head by itself (Qwen3, Gemma3), or all heads as one row (OLMo 2).
    """

    k_proj: nn.Module
    v_proj: nn.Module
    key: HalfShape
    value: HalfShape
    k_norm: nn.Module | None = None
    is_normed_heads_first: bool = False
    """Gemma3 norms [1, H, T, C], Qwen3 [1, T, H, C]: each norms over C alone, only hooks differ."""
    is_normed_whole: bool = False
    """OLMo 2 norms [1, T, H * C]."""
    input_scale: float = 1.0
    key_scale: float = 1.0
    """Falcon-H1 multiplies the normed input, and K before positions."""

    @property
    def is_scaled(self) -> bool:
        """Whether the input or K is multiplied by a scale."""
        return (self.input_scale, self.key_scale) != (1.0, 1.0)

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        if self.is_scaled:
            normed = normed * self.input_scale
        # `forward`, not a call: a call runs hooks, which would capture and save restored tokens again.
        k, v = self.k_proj.forward(normed), self.value.heads(self.v_proj.forward(normed))
        if self.is_scaled:
            k = k * self.key_scale
        if self.k_norm is None:
            return self.key.heads(k), v
        if self.is_normed_whole:
            return self.key.heads(self.k_norm.forward(k)), v
        return self.k_norm.forward(self.key.heads(k)), v

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        join = _Join(emit)
        # K is taken behind its norm, right before positions, so that a restore from rows norms nothing.
        last = self.k_proj if self.k_norm is None else self.k_norm
        return [
            _on_output(last, lambda out: join.first(self._heads_of_key(out))),
            _on_output(self.v_proj, lambda out: join.second(self.value.heads(out))),
        ]

    def _heads_of_key(self, out: Tensor) -> Tensor:
        # The model's code scales the output of `k_proj`. No module's output has the scaled K.
        heads = self.key.heads(out.transpose(1, 2) if self.is_normed_heads_first else out)
        return heads * self.key_scale if self.is_scaled else heads


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
        # The output is [latent | rotary part]. Only the latent is normed.
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


@dataclass(frozen=True, slots=True)
class NoRows:
    """A layer that keeps no row of a token: recurrent and convolution state only, or nothing at all."""

    def project(self, normed: Tensor) -> Halves:
        """Raises UnsupportedArchitecture, since there are no halves."""
        del normed
        raise UnsupportedArchitecture(architecture="a layer", problem="it keeps no keys and values")

    def watch(self, emit: Emit) -> "Sequence[Handle]":
        """Nothing is ever emitted."""
        del emit
        return []


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
    # Exact types: packed weights of torchao and bitsandbytes are subclasses of Parameter with other bytes.
    is_known = kind in _LINEAR and type(getattr(module, "weight", None)) in _TENSORS
    return is_known and is_unpatched(module)


def is_unpatched(module: nn.Module) -> bool:
    """Whether a module computes by its class's `forward`, and not by one that was put on the object."""
    return "forward" not in module.__dict__


def without_gradient(tensor: Tensor) -> Tensor:
    """The tensor, detached if it has a gradient. As a rule it has none, and to ask is cheaper."""
    return tensor.detach() if tensor.requires_grad else tensor


def _on_output(module: nn.Module, take: Callable[[Tensor], None]) -> RemovableHandle:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        take(without_gradient(output))

    return module.register_forward_hook(hook)


HalfShapes = tuple["HalfShape", "HalfShape"]
"""Shapes of a row's first and second half."""
