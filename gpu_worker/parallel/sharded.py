"""Sharded adapters: a model as one tensor-parallel rank sees it, with its own K/V heads only.

Weights are narrowed where they are used, without a copy. Worst case: a fused projection, which computes all
heads and throws those of other ranks away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctxcache.errors import InvalidArgument
from gpu_worker.families import Adapter
from gpu_worker.families.projections import (
    Emit,
    HalfShape,
    Halves,
    Handle,
    Projection,
    SeparateProjection,
    is_plain_linear,
)
from gpu_worker.parallel.share import ModelShare


@dataclass(frozen=True, slots=True)
# Rows are whole on every rank, K and V are of its own heads (H = 4, 2 ranks):
#
#     k_proj.weight [4 * C, D]   rank 0: rows 0 .. 2C     rank 1: rows 2C .. 4C      views
#     x [T, D]                   the same on both
#     keys of own heads          [T, 2, C]                [T, 2, C]
class ShardedProjection:
    """Some heads of a layer's projection."""

    whole: Projection
    heads: slice

    def project(self, normed: Tensor) -> Halves:
        """See Projection: normed [1, T, D] -> halves [T, own heads, C]."""
        whole = self.whole
        # Fused and adapted projections do not say which rows
        # are whose: all heads are computed, and some kept.
        if not _is_linear(whole):
            first, second = whole.project(normed)
            return first[:, self.heads], second[:, self.heads]
        keys = self._linear(whole.k_proj, normed, whole.key)
        values = self._linear(whole.v_proj, normed, whole.value)
        return (keys if whole.k_norm is None else whole.k_norm.forward(keys)), values

    def watch(self, emit: Emit) -> Sequence[Handle]:
        """See Projection."""
        return self.whole.watch(lambda first, second: emit(first[:, self.heads], second[:, self.heads]))

    def _linear(self, linear: nn.Module, normed: Tensor, half: HalfShape) -> Tensor:
        rows = slice(self.heads.start * half.head_size, self.heads.stop * half.head_size)
        weight: Tensor = linear.weight  # type: ignore[assignment]  # a Linear, see _is_linear
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        out = functional.linear(normed, weight[rows], None if bias is None else bias[rows])
        return out.reshape(-1, self.heads.stop - self.heads.start, half.head_size)


@dataclass(frozen=True, slots=True)
class ShardedAdapter(Adapter):
    """An adapter whose rows are whole and whose keys and values are of some heads."""

    heads: slice = field(default_factory=lambda: slice(None))

    def unpack(self, rows: Tensor, layer: int) -> Halves:
        """See Adapter."""
        first, second = Adapter.unpack(self, rows, layer)
        return first[:, self.heads], second[:, self.heads]


def shard(adapter: Adapter, share: ModelShare) -> Adapter:
    """The adapter of one rank; `adapter` itself where the rank has all heads. Raises InvalidArgument."""
    if share.tensor_ranks == 1:
        return adapter
    # A state has heads of its own sorts, which models lay out in their own ways.
    if adapter.is_recurrent:
        raise InvalidArgument(field="tensor_ranks", problem="states are not shared among ranks")
    if not adapter.is_uniform:
        raise InvalidArgument(field="tensor_ranks", problem="layers that keep different rows are not shared")
    heads = share.heads(adapter.key.head_count)
    layers = tuple(
        replace(layer, projection=ShardedProjection(layer.projection, heads)) for layer in adapter.layers
    )
    known: dict[str, Any] = {each.name: getattr(adapter, each.name) for each in fields(adapter)}
    return ShardedAdapter(**{**known, "layers": layers}, heads=heads)


def cached_heads(adapter: Adapter, share: ModelShare) -> int:
    """Heads that a rank's cache has per token and layer, as the engine repeats them."""
    own = share.heads(adapter.key.head_count)
    empty = [
        torch.empty(1, own.stop - own.start, 0, half.head_size, dtype=adapter.model.dtype)
        for half in (adapter.key, adapter.value)
    ]
    return adapter.embed_halves(empty[0], empty[1], None)[0].shape[1]


def _is_linear(projection: Projection) -> TypeGuard[SeparateProjection]:
    return isinstance(projection, SeparateProjection) and all(
        isinstance(each, nn.Linear) and is_plain_linear(each)
        for each in (projection.k_proj, projection.v_proj)
    )
