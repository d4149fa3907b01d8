"""The reference of `kv_projection`, in plain torch: rounded where an engine rounds."""

from dataclasses import dataclass

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
from gpu_worker.kernels.rope_scatter.reference import check_tokens, gained, head_normed, rms, rotate, scatter


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's way from its input to its rows of K and V."""

    norm: Norm
    key: ProjectionWeights
    value: ProjectionWeights
    key_norm: HeadNorm | None = None


# The way of T tokens through one layer; each step's result is of the weights' type, as an engine's is:
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
    dtype = layer.key.weight.dtype
    x = dequantize(hidden) if isinstance(hidden, Quantized) else hidden
    x = normed(x.to(dtype), layer.norm)
    keys, values = project(x, layer.key), project(x, layer.value)
    # Normed before the rotation, as Qwen3 and Gemma 3 do: the gain of each dimension does not turn with it.
    if layer.key_norm:
        keys = head_normed(keys, layer.key_norm)
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
    """Rows [T, D] after the layer's input norm, of the type that they came in."""
    wide = x.float()
    match norm.kind:
        case NormKind.NONE:
            return x
        case NormKind.RMS:
            return gained(rms(wide, norm.epsilon), norm.weight).to(x.dtype)
        case NormKind.LAYER:
            weight, bias = (None if each is None else each.float() for each in (norm.weight, norm.bias))
            return functional.layer_norm(wide, x.shape[-1:], weight, bias, norm.epsilon).to(x.dtype)


def project(x: Tensor, projection: ProjectionWeights) -> Tensor:
    """[T, D] -> [T, H, C]."""
    out = functional.linear(x, projection.weight, projection.bias)
    return out.view(-1, projection.head_count, projection.head_size)
