"""Computing by kernels: norm, projection, rotation and scatter in one pass over the rows.

Fused on a GPU, the reference elsewhere. What the kernels do not know is left to the model's modules: latents, and
caches that repeat heads. Worst case: arithmetic that rounds once where the engine rounds after every step; equal
within the bounds of docs/kernels.md, not bit by bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ctxcache.format.streams import StateKind
from gpu_worker.families import Adapter
from gpu_worker.families.rotary import Rope
from gpu_worker.kernels.kv_projection import reference as projection_reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import Pages, Rotation, Rows
from gpu_worker.kernels.rope_scatter import reference as scatter_reference
from gpu_worker.packed_rows import quantized
from gpu_worker.pipeline.compute import Compute, Modules
from gpu_worker.pipeline.kernel_weights import KernelWeights
from gpu_worker.pipeline.schedule import Schedule
from gpu_worker.pipeline.target import Room, Target
from gpu_worker.plan import Method

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

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: Room) -> None:
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

    def recompute(self, schedule: Schedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        self._modules.recompute(schedule, token_ids, target)

    def _fits(self, room: Room) -> bool:
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
