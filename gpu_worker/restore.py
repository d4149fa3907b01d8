"""Restore: saved rows to the engine's own cache, layer by layer, piece by piece.

Knows one model through its adapter, not where rows come from. The cache is handed out only when
every layer holds every token, so a failure leaves nothing half filled. Worst case in memory: the
whole KV plus one layer, while pieces that were gathered are copied into the engine's cache.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import Cache

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import Stream
from gpu_worker.assemble import CacheAssembler
from gpu_worker.errors import ShapeMismatch, UnsupportedDtype
from gpu_worker.families import Adapter
from gpu_worker.families.projection import Halves
from gpu_worker.packed_rows import widen
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.recompute import recompute_layers

ReadRows = Callable[[Stream, int, int], Iterable[Tensor]]
"""(stream, begin, end) -> pieces [t, row] that together are the rows [begin, end), in order."""


class Restorer:
    """Turns rows of one session into keys and values, any layer and any piece in any order.

    Holds the position tables of the whole session, shared by all layers.
    """

    def __init__(self, adapter: Adapter, positions: Tensor) -> None:
        """`positions` [T] int64: where each token of the session stands now (0..T-1 as a rule)."""
        self._adapter = adapter
        self._token_count = len(positions)
        self._ropes = adapter.ropes(positions)

    def layer(self, layer: int, method: Method, rows: Tensor, *, begin: int = 0) -> Halves:
        """Keys and values of one layer as the engine caches them: [1, H, t, C], [1, H, t, C_v].

        `rows` [t, row] are tokens [begin, begin + t), HIDDEN [t, D] or KV/LATENT [t, row_size], in the
        model's element type on any device, or [t, row_bytes] uint8 of a packed kind. K rows restore bit for bit; HIDDEN rows restore bit for
        bit in the shapes they were computed in, else to rounding. Raises ShapeMismatch,
        UnsupportedDtype, InvalidArgument(field="layer" | "method"). Source: HCache,
        arXiv:2410.05004, section 3.2.
        """
        self._check(layer, method, rows, begin)
        decoder = self._adapter.layers[layer]
        with torch.no_grad():
            rows = self._wide(method, rows.to(decoder.device))
            is_hidden = method.unpacked is Method.HIDDEN
            halves = decoder.project(rows) if is_hidden else self._adapter.unpack(rows)
            if not self._adapter.is_relocatable:
                return self._adapter.embed(halves, None)
            rope = self._ropes[decoder.rope_key].at(begin, begin + len(rows))
            return self._adapter.embed(halves, rope.to(decoder.device))

    def _check(self, layer: int, method: Method, rows: Tensor, begin: int) -> None:
        adapter = self._adapter
        if not 0 <= layer < len(adapter.layers):
            raise InvalidArgument(field="layer", problem=f"{layer} is not within [0, {len(adapter.layers)})")
        size = None if method is Method.TOKENS else adapter.element_count(method.kind)
        if size is None:
            problem = f"{method.value} rows cannot be restored for {adapter.architecture}"
            raise InvalidArgument(field="method", problem=problem)
        dtype = adapter.model.dtype if method.is_exact else torch.uint8
        width = size if method.is_exact else PACKINGS[method.kind].row_bytes(size)
        what = f"layer {layer} {method.value} rows at token {begin}"
        room = self._token_count - begin
        if rows.ndim != 2 or rows.shape[1] != width or begin < 0 or len(rows) > room:
            expected = f"[up to {max(room, 0)}, {width}]"
            raise ShapeMismatch(what=what, expected=expected, actual=str(list(rows.shape)))
        if rows.dtype != dtype:
            raise UnsupportedDtype(what=what, expected=str(dtype), actual=str(rows.dtype))

    def _wide(self, method: Method, rows: Tensor) -> Tensor:
        size = self._adapter.element_count(method.kind)
        if method.is_exact or size is None:
            return rows
        return widen(rows, method.kind, size, self._adapter.model.dtype)


def restore_cache(
    adapter: Adapter,
    plan: RestorePlan,
    read: ReadRows,
    *,
    positions: Tensor,
    token_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Cache:
    """Restore one whole session and hand out the cache it continues from.

    `positions` [T] int64; `token_ids` [T] are needed where `plan` recomputes layers; `cache` is an
    empty cache to fill (a StaticCache with room), by default a new DynamicCache, and must be thrown
    away after an error. Layers are read in order; sliding-window layers only as far back as they
    attend. Raises what Restorer.layer and CacheAssembler raise, and InvalidArgument(field="plan" |
    "token_ids"), and whatever `read` raises.
    """
    if plan.layer_count != len(adapter.layers):
        problem = f"{plan.layer_count} layers, the model has {len(adapter.layers)}"
        raise InvalidArgument(field="plan", problem=problem)
    assembler = CacheAssembler(adapter, token_count=len(positions), cache=cache)
    if plan.recomputed_layer_count:
        if token_ids is None:
            raise InvalidArgument(field="token_ids", problem="the plan recomputes layers")
        recompute_layers(
            adapter,
            assembler.claim(plan.recomputed_layer_count),
            token_ids,
            positions,
            plan.recomputed_layer_count,
        )
    restorer = Restorer(adapter, positions)
    for layer in range(plan.recomputed_layer_count, plan.layer_count):
        _restore_layer(restorer, assembler, read, layer, plan.methods[layer])
    return assembler.finish()


def _restore_layer(
    restorer: Restorer, assembler: CacheAssembler, read: ReadRows, layer: int, method: Method
) -> None:
    begin = assembler.first_token(layer)
    for rows in read(Stream(layer, method.kind), begin, assembler.token_count):
        assembler.put(layer, begin, *restorer.layer(layer, method, rows, begin=begin))
        begin += len(rows)
