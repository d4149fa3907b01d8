"""The transformers cache as a target: filled in place where it grows, through its own `update` elsewhere.

Knows transformers' cache classes. Worst case: a cache of preallocated layers, which is filled layer by layer
from a second copy, and which the engine cannot begin to use before all of it is there.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ctxcache.errors import InvalidArgument
from gpu_worker.families import Adapter
from gpu_worker.kernels.operands import Pages
from gpu_worker.pipeline.target import Room, Target

_GROWING = (DynamicLayer, DynamicSlidingWindowLayer)


class CacheTarget(Target):
    """One empty cache. After a failure it is to be thrown away."""

    def __init__(self, adapter: Adapter, token_count: int, cache: Cache | None = None) -> None:
        """`cache`: an empty one with room, by default a new DynamicCache. Raises InvalidArgument(field="cache")."""
        self._adapter = adapter
        self.cache = DynamicCache(config=adapter.model.config) if cache is None else cache
        self.token_count, self.layer_count = token_count, len(adapter.layers)
        self._check_room()
        self.is_by_layer = all(type(layer) in _GROWING for layer in self.cache.layers)
        self._held = [self._allocate(layer) for layer in range(self.layer_count)]
        if self.is_by_layer:
            for layer in range(self.layer_count):
                self._place(layer)

    def first_token(self, layer: int) -> int:
        """See Target."""
        window = self._adapter.layers[layer].window
        if window is None or type(self.cache.layers[layer]) is not DynamicSlidingWindowLayer:
            return 0
        return max(0, self.token_count - max(window - 1, 1))

    def room(self, layer: int, begin: int, end: int) -> Room:
        """See Target. One page, whose first row is the layer's first token."""
        keys, values = (half.transpose(1, 2) for half in self._held[layer])
        first = self.first_token(layer)
        slots = torch.arange(begin - first, end - first, device=keys.device)
        return Room(Pages(keys, values, slots), begin - first)

    def scratch(self) -> Cache | None:
        """See Target: a preallocated cache is recomputed into as it is."""
        return None if self.is_by_layer else self.cache

    def finish(self, layer: int) -> None:
        """See Target."""
        if not self.is_by_layer and not int(self.cache.get_seq_length(layer)):
            self.cache.update(*self._held[layer], layer)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that are filled, [1, H, t, C], [1, H, t, C_v]."""
        return self._held[layer]

    def _allocate(self, layer: int) -> tuple[Tensor, Tensor]:
        adapter = self._adapter
        device, dtype = adapter.layers[layer].device, adapter.model.dtype
        empty = [
            torch.empty(1, half.head_count, 0, half.head_size, dtype=dtype, device=device)
            for half in (adapter.key, adapter.value)
        ]
        # As the engine caches them: some families repeat heads.
        keys, values = adapter.embed_halves(empty[0], empty[1], None)
        count = self.token_count - self.first_token(layer)
        return tuple(half.new_empty(1, half.shape[1], count, half.shape[3]) for half in (keys, values))  # type: ignore[return-value]

    def _place(self, layer: int) -> None:
        """Make the layer say that it has its tokens, so that masks and positions are right before they are there."""
        held = self.cache.layers[layer]
        keys, values = self._held[layer]
        if not isinstance(held, DynamicLayer):
            return
        held.lazy_initialization(keys, values)
        held.keys, held.values = keys, values
        if isinstance(held, DynamicSlidingWindowLayer):
            held.cumulative_length = self.token_count

    def _check_room(self) -> None:
        if int(self.cache.get_seq_length()):
            raise InvalidArgument(field="cache", problem="is not empty")
        for layer, decoder in enumerate(self._adapter.layers):
            limit = getattr(self.cache.layers[layer], "max_cache_len", None)
            if decoder.window is None and limit is not None and limit < self.token_count:
                problem = f"has room for {limit} of {self.token_count} tokens"
                raise InvalidArgument(field="cache", problem=problem)
