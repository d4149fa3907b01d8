"""The reference of `kv_projection`, in plain torch: float32 throughout, rounded once."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.kernels.operands import (
    HeadNorm,
    Norm,
    NormKind,
    Pages,
    ProjectionWeights,
    Quantized,
    Rotation,
    Rows,
)
from gpu_worker.kernels.quantization import dequantize
from gpu_worker.kernels.rope_scatter.reference import check_tokens, rotate, scatter


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's way from its input to its rows of K and V."""

    norm: Norm
    key: ProjectionWeights
    value: ProjectionWeights
    key_norm: HeadNorm | None = None


def kv_projection(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """Layer input [T, D] -> K rotated and V, [T, H, C] and [T, H_v, C_v], into the pages.

    Source: HCache, EuroSys'25, section 3.1 (K and V are projections of the layer's input, which is half of
    them). Raises ValueError where shapes do not belong together.
    """
    check(hidden, layer, rotation, pages)
    x = dequantize(hidden) if isinstance(hidden, Quantized) else hidden.float()
    x = normed(x, layer.norm)
    keys, values = project(x, layer.key), project(x, layer.value)
    if layer.key_norm:
        keys = _rms(keys, layer.key_norm.epsilon) * layer.key_norm.weight.float()
    scatter(keys if rotation is None else rotate(keys, rotation), values, pages)


def check(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """Raise ValueError unless hidden states, weights, tables and pages belong together."""
    size = hidden.row_size if isinstance(hidden, Quantized) else hidden.shape[1]
    for projection, cache in ((layer.key, pages.keys), (layer.value, pages.values)):
        if projection.weight.shape[1] != size:
            raise ValueError(f"hidden states of {size} elements, weights of {projection.weight.shape[1]}")
        if (projection.head_count, projection.head_size) != tuple(cache.shape[2:]):
            raise ValueError(
                f"{projection.head_count} heads of {projection.head_size}, pages of {list(cache.shape[2:])}"
            )
    check_tokens(len(hidden), rotation, pages)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Float32 [T, D] after the layer's input norm."""
    match norm.kind:
        case NormKind.NONE:
            return x
        case NormKind.RMS:
            x = _rms(x, norm.epsilon)
        case NormKind.LAYER:
            x = functional.layer_norm(x, x.shape[-1:], eps=norm.epsilon)
    x = x if norm.weight is None else x * norm.weight.float()
    return x if norm.bias is None else x + norm.bias.float()


def project(x: Tensor, projection: ProjectionWeights) -> Tensor:
    """Float32 [T, D] -> [T, H, C]."""
    bias = None if projection.bias is None else projection.bias.float()
    out = functional.linear(x, projection.weight.float(), bias)
    return out.view(-1, projection.head_count, projection.head_size)


def _rms(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
