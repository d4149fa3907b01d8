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
class Folded:
    """K's and V's weights together, with the norm's gain in them; see product.py.

    `weight` [N, D] of the weights' type, `bias` and `sums` [N] float32: of the norm and the projections, and
    of each row of `weight`. A second copy of K's and V's weights.
    """

    weight: Tensor
    bias: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's way from its input to its rows of K and V; `folded` for products of long runs."""

    norm: Norm
    key: ProjectionWeights
    value: ProjectionWeights
    key_norm: HeadNorm | None = None
    folded: Folded | None = None


def fold(layer: LayerWeights) -> Folded | None:
    """K's and V's weights with the norm's gain in them; None where they do not round into their type.

    With gain g, mean m and spread s of a row, norm(x) @ W' = s (x @ Wg' - m sum(Wg)) + b W', where Wg is
    W diag(g), made in float32 and rounded once. A layer norm's Wg is centred, so that a row's mean falls out
    of the product and does not drown it; `sums` has what rounding leaves of that.
    """
    dtype = layer.key.weight.dtype
    # Float32 until the one rounding below: products of weight and gain in 16 bits would be rounded twice.
    halves, sums, biases = [], [], []
    for projection in (layer.key, layer.value):
        weight = projection.weight.float()
        bias = torch.zeros(len(weight), device=weight.device)
        if layer.norm.bias is not None:
            bias = weight @ layer.norm.bias.float()
        if projection.bias is not None:
            bias += projection.bias.float()
        # The bias passes the weights as they are: the norm adds it behind its gain.
        if layer.norm.weight is not None:
            weight = weight * layer.norm.weight.float()
        # Each row of Wg sums to 0 then, so that x and x - mean have the same product.
        if layer.norm.kind is NormKind.LAYER:
            weight = weight - weight.mean(1, keepdim=True)
        rounded = weight.to(dtype)
        # Half a last place, of each row: more is off where numbers are too small, or too large, for the type.
        off = (rounded.float() - weight).norm(dim=1)
        if not bool((off <= torch.finfo(dtype).eps / 2 * weight.norm(dim=1)).all()):
            return None
        halves.append(rounded)
        # Sums are of the rounded weights: the product multiplies a row's mean by these.
        sums.append(rounded.float().sum(1))
        biases.append(bias)
    return Folded(torch.cat(halves), torch.cat(biases), torch.cat(sums))


# The way of T tokens through one layer, all in float32:
#
#     hidden [T, D] ── norm ──► x [T, D] ──┬── key.weight   [H * C, D]     ──► keys   [T, H, C]
#                                          └── value.weight [H_v * C_v, D] ──► values [T, H_v, C_v]
#     keys ── head norm over C, where the model has one ── rotation ──► pages.keys   [slot]
#     values ──────────────────────────────────────────────────────────► pages.values [slot]
#
# Queries are not computed: a restored token asks nothing, it is only attended to.
def kv_projection(hidden: Rows, layer: LayerWeights, rotation: Rotation | None, pages: Pages) -> None:
    """Layer input [T, D] -> K rotated and V, [T, H, C] and [T, H_v, C_v], into the pages.

    Source: HCache, EuroSys'25, section 3.1 (K and V are projections of the layer's input, which is half of
    them). Raises ValueError where shapes do not belong together.
    """
    check(hidden, layer, rotation, pages)
    x = dequantize(hidden) if isinstance(hidden, Quantized) else hidden.float()
    x = normed(x, layer.norm)
    keys, values = project(x, layer.key), project(x, layer.value)
    # Before the rotation, as Qwen3 and Gemma 3 do: the gain of each dimension does not turn with it.
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
