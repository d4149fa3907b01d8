"""The assembler: gathers keys and values per layer and fills the engine's cache once all are there.

Knows transformers' cache classes, not how keys and values came about. Worst case: a sliding-window
layer filled with its window only, whose token count must then be set by hand or every later mask
is wrong.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from ctxcache.errors import InvalidArgument
from gpu_worker.errors import IncompleteRestore, RowsOutOfOrder, ShapeMismatch
from gpu_worker.families import Adapter


@dataclass(slots=True)
class _Pending:
    """What one layer has so far: tokens [first, end) of keys and values with room to the last token."""

    keys: Tensor
    values: Tensor
    first: int
    end: int


class CacheAssembler:
    """Fills one cache with one session; owned by the caller, used once.

    Layers arrive in any order and may interleave; the pieces of a layer arrive in token order.
    """

    def __init__(self, adapter: Adapter, *, token_count: int, cache: Cache | None = None) -> None:
        """`cache` must be empty and have room; it belongs to the assembler until `finish` returns it."""
        self._adapter = adapter
        self.token_count = token_count
        self._cache = DynamicCache(config=adapter.model.config) if cache is None else cache
        if int(self._cache.get_seq_length()):
            raise InvalidArgument(field="cache", problem="is not empty")
        self._check_room()
        self._pending: dict[int, _Pending] = {}
        self._claimed_count = 0

    def first_token(self, layer: int) -> int:
        """The first token whose keys and values the layer needs: not 0 where a window has passed it."""
        window = self._adapter.layers[layer].window
        if window is None or not isinstance(self._cache.layers[layer], DynamicSlidingWindowLayer):
            return 0
        return max(0, self.token_count - max(window - 1, 1))

    def claim(self, layer_count: int) -> Cache:
        """The cache itself, for code that runs the first `layer_count` layers and fills them thereby.

        To be called before any `put`: masks of a running layer are wrong while later layers are full.
        """
        if self._pending:
            raise InvalidArgument(field="layer_count", problem="layers are claimed before any is put")
        self._claimed_count = layer_count
        return self._cache

    def put(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> None:
        """Add tokens [begin, begin + t): keys [1, H, t, C], values [1, H, t, C_v].

        Raises RowsOutOfOrder unless `begin` is where the layer ends, ShapeMismatch past the last
        token, InvalidArgument(field="layer") for a claimed layer.
        """
        if layer < self._claimed_count:
            raise InvalidArgument(field="layer", problem=f"layer {layer} is recomputed")
        pending = self._pending.get(layer) or self._open(layer, keys, values)
        end = begin + keys.shape[2]
        if begin != pending.end:
            raise RowsOutOfOrder(layer=layer, expected=pending.end, actual=begin)
        if end > self.token_count:
            raise ShapeMismatch(
                what=f"layer {layer} at token {begin}",
                expected=f"at most {self.token_count - begin} tokens",
                actual=f"{keys.shape[2]}",
            )
        pending.keys[:, :, begin - pending.first : end - pending.first] = keys
        pending.values[:, :, begin - pending.first : end - pending.first] = values
        pending.end = end

    def finish(self) -> Cache:
        """The filled cache. Raises IncompleteRestore, naming the first layer that is short."""
        if self.token_count:
            self._check_complete()
        for layer in sorted(self._pending):
            pending = self._pending.pop(layer)
            self._cache.update(pending.keys, pending.values, layer)
            self._set_length(layer)
        return self._cache

    def _open(self, layer: int, keys: Tensor, values: Tensor) -> _Pending:
        first = self.first_token(layer)
        room = self.token_count - first
        pending = _Pending(_room_for(keys, room), _room_for(values, room), first, first)
        self._pending[layer] = pending
        return pending

    def _check_complete(self) -> None:
        for layer in range(len(self._adapter.layers)):
            pending = self._pending.get(layer)
            held = int(self._cache.get_seq_length(layer)) if pending is None else pending.end
            if held != self.token_count:
                raise IncompleteRestore(layer=layer, row_count=held, token_count=self.token_count)

    def _check_room(self) -> None:
        for layer, decoder in enumerate(self._adapter.layers):
            limit = getattr(self._cache.layers[layer], "max_cache_len", None)
            if decoder.window is None and limit is not None and limit < self.token_count:
                problem = f"has room for {limit} of {self.token_count} tokens"
                raise InvalidArgument(field="cache", problem=problem)

    def _set_length(self, layer: int) -> None:
        # Tokens that the window has passed were never put, but masks and positions count them.
        filled = self._cache.layers[layer]
        if isinstance(filled, DynamicSlidingWindowLayer):
            filled.cumulative_length = self.token_count


def _room_for(piece: Tensor, token_count: int) -> Tensor:
    batch, heads, _, size = piece.shape
    return torch.empty(batch, heads, token_count, size, dtype=piece.dtype, device=piece.device)
