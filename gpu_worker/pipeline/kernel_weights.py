"""Kernel weights: a model's layers as the kernels take them, made once and shared by all restores.

Knows the model through its adapter. A fused projection's rows for K and V are found by splitting the weight as its
output is split, without arithmetic. Worst case: a second copy of K's and V's weights where they are fused.
"""

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.families import Adapter
from gpu_worker.families.adapter import DecoderLayer
from gpu_worker.families.projection import (
    FusedProjection,
    SeparateProjection,
    is_plain_linear,
    is_unpatched,
)
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import NO_NORM, HeadNorm, Norm, NormKind, Projection

_ONE_PLUS_WEIGHT = "rmsnorm+1"


class KernelWeights:
    """Weights by layer. One thread at a time."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._known: dict[int, LayerWeights | None] = {}

    def of(self, layer: int) -> LayerWeights | None:
        """One layer's norm and projections; None where the kernels have no such projection (latents, adapters, packed weights)."""
        if layer not in self._known:
            self._known[layer] = self._made(layer)
        return self._known[layer]

    def _made(self, layer: int) -> LayerWeights | None:
        decoder = self.adapter.layers[layer]
        projection = decoder.projection
        if not _is_known(decoder):
            return None
        norm = self._norm(decoder.norm)
        if isinstance(projection, SeparateProjection):
            return LayerWeights(
                norm,
                _linear(projection.k_proj, projection.key.head_count),
                _linear(projection.v_proj, projection.value.head_count),
                self._head_norm(projection.k_norm),
            )
        if isinstance(projection, FusedProjection):
            return LayerWeights(norm, *_split(projection, self.adapter))
        return None

    def _norm(self, norm: nn.Module | None) -> Norm:
        if norm is None:
            return NO_NORM
        if isinstance(norm, nn.LayerNorm):
            return Norm(NormKind.LAYER, norm.eps, norm.weight, norm.bias)
        return Norm(NormKind.RMS, _epsilon(norm), self._gain(norm))

    def _head_norm(self, norm: nn.Module | None) -> HeadNorm | None:
        return None if norm is None else HeadNorm(self._gain(norm), _epsilon(norm))

    def _gain(self, norm: nn.Module) -> Tensor:
        weight: Tensor = norm.weight  # type: ignore[assignment]  # transformers does not type its norms
        return weight.float() + 1 if self.adapter.norm_name.startswith(_ONE_PLUS_WEIGHT) else weight


def _is_known(decoder: DecoderLayer) -> bool:
    """Whether weights are all there is to know of a layer's projections and norms."""
    projection = decoder.projection
    if isinstance(projection, SeparateProjection):
        linear, norms = [projection.k_proj, projection.v_proj], [decoder.norm, projection.k_norm]
    elif isinstance(projection, FusedProjection):
        linear, norms = [projection.qkv], [decoder.norm]
    else:
        return False
    return all(map(is_plain_linear, linear)) and all(norm is None or is_unpatched(norm) for norm in norms)


def _epsilon(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return float(epsilon or 0.0)


def _linear(linear: nn.Module, head_count: int) -> Projection:
    weight: Tensor = linear.weight  # type: ignore[assignment]  # a Linear, as its family's builder says
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return Projection(weight, head_count, bias)


def _split(projection: FusedProjection, adapter: Adapter) -> tuple[Projection, Projection]:
    weight: Tensor = projection.qkv.weight  # type: ignore[assignment]
    bias: Tensor | None = projection.qkv.bias  # type: ignore[assignment]
    # What the module would put out for unit vectors, one row for each input: [1, D, out].
    units = weight if isinstance(projection.qkv, Conv1D) else weight.T
    columns = projection.split(units.detach().unsqueeze(0))
    biases = (None, None) if bias is None else projection.split(bias.detach().view(1, 1, -1))
    halves = zip(columns, biases, (adapter.key, adapter.value), strict=True)
    first, second = (
        Projection(
            half.flatten(1).T.contiguous(),
            shape.head_count,
            None if own is None else own.flatten().contiguous(),
        )
        for half, own, shape in halves
    )
    return first, second
