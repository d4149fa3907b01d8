"""Computing by kernels: norm, projection, rotation and scatter in one pass over the rows.

Fused on a GPU, the reference elsewhere. The model's own modules compute what the kernels do not know:
latents, and caches that repeat heads. `KernelWeights` takes a model's layers through its adapter once,
for all restores. It finds a fused projection's rows for K and V by splitting the weight as its output is
split, without arithmetic.

Worst case: arithmetic that rounds once where the engine rounds after every step, equal within the bounds of
docs/kernels.md and not bit by bit; and a second copy of K's and V's weights where they are fused.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ctxcache.format.streams import StateKind
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import DecoderLayer, Rope
from gpu_worker.families.projection import (
    FusedProjection,
    SeparateProjection,
    is_plain_linear,
    is_unpatched,
)
from gpu_worker.kernels.kv_projection import reference as projection_reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import (
    NO_NORM,
    HeadNorm,
    Norm,
    NormKind,
    Pages,
    ProjectionWeights,
    Rotation,
    Rows,
)
from gpu_worker.kernels.rope_scatter import reference as scatter_reference
from gpu_worker.pipeline.compute import Compute, Modules
from gpu_worker.pipeline.schedule import RestoreSchedule
from gpu_worker.pipeline.target import LayerRoom, Target
from gpu_worker.plan import Method
from gpu_worker.rows import quantized

_ONE_PLUS_WEIGHT = "rmsnorm+1"


class KernelWeights:
    """Weights by layer. One thread at a time."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._known: dict[int, LayerWeights | None] = {}

    def of(self, layer: int) -> LayerWeights | None:
        """One layer's norm and projections.

        None where the kernels have no such projection: latents, adapters, packed weights.
        """
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


def _linear(linear: nn.Module, head_count: int) -> ProjectionWeights:
    weight: Tensor = linear.weight  # type: ignore[assignment]  # a Linear, as its family's builder says
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return ProjectionWeights(weight, head_count, bias)


def _split(projection: FusedProjection, adapter: Adapter) -> tuple[ProjectionWeights, ProjectionWeights]:
    weight: Tensor = projection.qkv.weight  # type: ignore[assignment]
    bias: Tensor | None = projection.qkv.bias  # type: ignore[assignment]
    # The module's output for unit vectors, one row for each input: [1, D, out].
    units = weight if isinstance(projection.qkv, Conv1D) else weight.T
    columns = projection.split(units.detach().unsqueeze(0))
    biases = (None, None) if bias is None else projection.split(bias.detach().view(1, 1, -1))
    halves = zip(columns, biases, (adapter.key, adapter.value), strict=True)
    first, second = (
        ProjectionWeights(
            half.flatten(1).T.contiguous(),
            shape.head_count,
            None if own is None else own.flatten().contiguous(),
        )
        for half, own, shape in halves
    )
    return first, second


Project = Callable[[Rows, LayerWeights, Rotation | None, Pages], None]
Scatter = Callable[[Rows, Rotation | None, Pages], None]


class Kernels:
    """One session's positions on one model's kernel weights."""

    def __init__(self, weights: KernelWeights, positions: Tensor, *, is_fused: bool | None = None) -> None:
        """`is_fused`: by Triton; by default where the model is on a GPU."""
        adapter = self._adapter = weights.adapter
        self._weights, self._modules = weights, Modules(adapter, positions)
        self._rotations = {key: _rotation(rope) for key, rope in adapter.ropes(positions).items()}
        wants_fused = adapter.layers[0].device.type == "cuda" if is_fused is None else is_fused
        self._project, self._scatter = _fused() if wants_fused else _reference()

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom) -> None:
        """See Compute."""
        is_hidden = method.unpacked is Method.HIDDEN
        weights = self._weights.of(layer) if is_hidden else None
        if not self._fits(room) or (is_hidden and weights is None):
            self._modules.restore(layer, method, data, begin, room)
            return
        rows, rotation = self._rows(method, data), self._rotation_at(layer, begin, begin + len(data))
        if weights is not None:
            self._project(rows, weights, rotation, room.pages)
        else:
            self._scatter(rows, rotation, room.pages)

    def recompute(self, schedule: RestoreSchedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        self._modules.recompute(schedule, token_ids, target)

    def _fits(self, room: LayerRoom) -> bool:
        adapter = self._adapter
        if adapter.kind is not StateKind.KV:
            return False
        caches = ((room.pages.keys, adapter.key), (room.pages.values, adapter.value))
        return all(tuple(cache.shape[2:]) == (half.head_count, half.head_size) for cache, half in caches)

    def _rows(self, method: Method, data: Tensor) -> Rows:
        adapter = self._adapter
        if method.is_exact:
            return data.view(adapter.model.dtype)
        size = adapter.hidden_size if method.unpacked is Method.HIDDEN else adapter.row_size
        return quantized(data, method.kind, size)

    def _rotation_at(self, layer: int, begin: int, end: int) -> Rotation | None:
        whole = self._rotations.get(self._adapter.layers[layer].rope_key)
        return None if whole is None else Rotation(whole.cos[begin:end], whole.sin[begin:end], whole.pairing)


def compute_for(adapter: Adapter, weights: KernelWeights, positions: Tensor) -> Compute:
    """Kernels on a GPU; the model's own modules elsewhere, which are the engine's bit for bit."""
    if adapter.layers[0].device.type == "cuda":
        return Kernels(weights, positions)
    return Modules(adapter, positions)


def _rotation(rope: Rope) -> Rotation:
    """Tables [1, T, R], whose halves are alike -> [T, R/2]."""
    half = rope.cos.shape[-1] // 2
    with torch.no_grad():
        return Rotation(rope.cos[0, :, :half].contiguous(), rope.sin[0, :, :half].contiguous())


def _reference() -> tuple[Project, Scatter]:
    return projection_reference.kv_projection, scatter_reference.rope_scatter


def _fused() -> tuple[Project, Scatter]:
    # Triton is there only where it is used.
    from gpu_worker.kernels.kv_projection import fused as projection  # noqa: PLC0415
    from gpu_worker.kernels.rope_scatter import fused as scatter  # noqa: PLC0415

    return projection.kv_projection, scatter.rope_scatter
