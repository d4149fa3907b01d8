"""The target: the engine's cache that a restore fills, layer by layer, as the kernels' pages.

Knows where tokens go, not how keys and values come about. `PagedTarget` is blocks of an engine's own memory;
`CacheTarget` is a transformers cache, filled in place where it grows, and through its `update` elsewhere.

Worst case: a restore that fails while the engine's memory is half written. `invalid_blocks` names it, and
nothing of it was announced. A transformers cache of preallocated layers is filled from a second copy, and
the engine cannot begin to use it before all of it is there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ctxcache.errors import InvalidArgument
from gpu_worker.families import Adapter
from gpu_worker.families.caches import INDEXED_LAYERS, NOTHING_LAYERS, cache_classes
from gpu_worker.families.generation import is_empty
from gpu_worker.forms.snapshots import Snapshot
from gpu_worker.kernels.operands import Pages


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """Where some tokens of one layer go.

    `run_begin`: the tokens' first row, where they follow one another in one page: copying is then slicing.
    """

    pages: Pages
    run_begin: int | None = None
    cache: Cache | None = None
    """The engine's cache itself, for layers that keep a state; None: it has room for rows only."""

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Copy keys [t, H, C] and values [t, H_v, C_v], as the engine caches them."""
        # Assignment rounds nothing here: rows come in the cache's type.
        for cache, rows in ((self.pages.keys, keys), (self.pages.values, values)):
            if self.run_begin is not None:
                cache[0, self.run_begin : self.run_begin + len(rows)] = rows
            else:
                slots = self.pages.slots
                cache[slots // self.pages.page_tokens, slots % self.pages.page_tokens] = rows


class Target(ABC):
    """One session's room in an engine's cache. Belongs to one restore until that has ended."""

    token_count: int
    layer_count: int
    is_by_layer: bool
    """Whether the engine may begin while later layers are still filled."""

    @abstractmethod
    def first_token(self, layer: int) -> int:
        """The first token whose keys and values the layer needs: not 0 where a window has passed it."""

    @abstractmethod
    def room(self, layer: int, begin: int, end: int) -> LayerRoom:
        """Where tokens [begin, end) of a layer go."""

    def scratch(self) -> Cache | None:
        """A cache to recompute into that is the target's own; None: any will do, and its layers are put."""
        return None

    def adopt(self, layer: int, held: Any) -> None:
        """Take a cache's layer that keeps a state, with all tokens in it. Any: its class differs by version.

        Raises InvalidArgument(field="cache").
        """
        del held
        raise InvalidArgument(field="cache", problem=f"has no room for the state of layer {layer}")

    def finish(self, layer: int) -> None:
        """Called on the computing lane behind a layer's last write."""
        del layer

    def announced(self, layer: int) -> None:
        """Called when a layer is about to be announced. Must not wait."""
        del layer

    def failed(self) -> None:
        """Called when the restore has failed; writes may still be under way until the restore is drained."""
        return


# Where a session's tokens lie in an engine's blocks of P tokens, here 4:
#
#     block table    [5, 0, 2]
#     tokens          0  1  2  3 │ 4  5  6  7 │ 8  9
#     slots          20 21 22 23 │ 0  1  2  3 │ 8  9         block * P + place in the block
#     layer's cache  [B, P, H, C]: a row is one token's heads
#
# A sliding layer needs the last tokens alone; its earlier slots are never written to:
#
#     0 ............ first_token ......... token_count
#                    [ window - 1 tokens   )             the next token attends to these and itself
class PagedTarget(Target):
    """Blocks of an engine's paged cache."""

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        *,
        windows: Sequence[int | None] | None = None,
        is_by_layer: bool = True,
    ) -> None:
        """`layers`: keys and values [B, P, H, C], any strides. `slots` [T] int64: where each token goes.

        `windows`: tokens that a layer's tokens see. Raises InvalidArgument for slots outside the cache.
        """
        self._layers = tuple(layers)
        # Slots lie where the kernels read them.
        self._slots = slots.to(self._layers[0][0].device)
        self.token_count, self.layer_count, self.is_by_layer = len(slots), len(self._layers), is_by_layer
        self._windows = windows or [None] * self.layer_count
        self._page_tokens = self._layers[0][0].shape[1]
        self._usable = torch.zeros(self.layer_count, dtype=torch.bool, device="cpu")
        # The smallest layer bounds all: one list of slots is used for every layer.
        capacity = min(keys.shape[0] * keys.shape[1] for keys, _ in self._layers)
        # Slots are checked once, here, where waiting for the device costs little: kernels do not check them.
        if self.token_count and not 0 <= int(slots.min()) <= int(slots.max()) < capacity:
            raise InvalidArgument(field="slots", problem=f"not within [0, {capacity})")
        if any(keys.shape[1] != self._page_tokens for keys, _ in self._layers):
            raise InvalidArgument(field="layers", problem="blocks of different sizes")

    def first_token(self, layer: int) -> int:
        """See Target."""
        window = self._windows[layer]
        # The next token sees itself and window - 1 before it; one is kept so that the layer is never empty.
        return 0 if window is None else max(0, self.token_count - max(window - 1, 1))

    def room(self, layer: int, begin: int, end: int) -> LayerRoom:
        """See Target."""
        keys, values = self._layers[layer]
        return LayerRoom(Pages(keys, values, self._slots[begin:end]))

    def announced(self, layer: int) -> None:
        """See Target."""
        self._usable[layer] = True

    def failed(self) -> None:
        """See Target."""
        self._usable.zero_()

    def invalid_blocks(self) -> list[int]:
        """Blocks of this session that the engine must not use: all of them until every layer is usable."""
        # An engine takes a session whole or not at all, so that one layer too few makes all blocks invalid.
        if bool(self._usable.all()):
            return []
        return sorted(set((self._slots // self._page_tokens).tolist()))


_GROWING = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *cache_classes("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
    *NOTHING_LAYERS,
    *INDEXED_LAYERS,
)


class CacheTarget(Target):
    """One empty cache. After a failure it is to be thrown away."""

    def __init__(
        self,
        adapter: Adapter,
        token_count: int,
        cache: Cache | None = None,
        *,
        snapshot: Snapshot | None = None,
    ) -> None:
        """`cache`: an empty one with room, by default a new DynamicCache.

        `snapshot`: states from which its layers go on. Raises InvalidArgument(field="cache"),
        SnapshotMismatch for a snapshot of more tokens, or of another model.
        """
        self._adapter = adapter
        self.cache = DynamicCache(config=adapter.model.config) if cache is None else cache
        self.token_count, self.layer_count = token_count, len(adapter.layers)
        self.standing: Mapping[int, int] = {} if snapshot is None else snapshot.standing
        """By layer, the token at which its state stands already."""
        # Before anything is allocated or put: a refusal leaves the caller's cache as it was.
        self._check_room()
        if snapshot is not None:
            snapshot.check(adapter, token_count)
        # Two sorts of transformers caches:
        #
        #     growing         `keys` and `values` are the engine's own tensors, filled in place by layers;
        #                    the cache says from the start how many tokens it will hold
        #     preallocated    filled apart, and put by `update` when the layer is whole
        self.is_by_layer = all(type(layer) in _GROWING for layer in self.cache.layers)
        self._held = [self._allocate(layer) for layer in range(self.layer_count)]
        if self.is_by_layer:
            for layer in range(self.layer_count):
                self._place(layer)
        if snapshot is not None:
            snapshot.put(adapter, self.cache)

    def first_token(self, layer: int) -> int:
        """See Target."""
        # Rows before a snapshot are not even read. A layer that
        # keeps K and V beside its state needs all of them.
        if layer in self.standing and not self._adapter.layers[layer].has_rows:
            return self.standing[layer]
        window = self._adapter.layers[layer].window
        # A cache that is preallocated for a window sorts out by itself which tokens stay.
        if window is None or type(self.cache.layers[layer]) is not DynamicSlidingWindowLayer:
            return 0
        return max(0, self.token_count - max(window - 1, 1))

    def room(self, layer: int, begin: int, end: int) -> LayerRoom:
        """See Target. One page, whose first row is the layer's first token."""
        keys, values = (half.transpose(1, 2) for half in self._held[layer])
        first = self.first_token(layer)
        slots = torch.arange(begin - first, end - first, device=keys.device)
        return LayerRoom(Pages(keys, values, slots), begin - first, self.cache)

    def adopt(self, layer: int, held: Any) -> None:
        """See Target."""
        self.cache.layers[layer] = held

    def scratch(self) -> Cache | None:
        """See Target: a preallocated cache is recomputed into as it is."""
        return None if self.is_by_layer else self.cache

    def finish(self, layer: int) -> None:
        """See Target."""
        # A layer that was recomputed into this cache is there
        # already: putting it again would double its tokens.
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
            for half in adapter.halves_of(layer)
        ]
        # As the engine caches them: some families repeat heads.
        keys, values = adapter.embed_halves(empty[0], empty[1], None)
        count = self.token_count - self.first_token(layer)
        # Tensors without elements: a layer with a state alone, or with nothing, has no room to fill.
        if not adapter.layers[layer].has_rows:
            nothing = torch.empty(1, 0, count, 0, dtype=dtype, device=device)
            return nothing, nothing
        first, second = (half.new_empty(1, half.shape[1], count, half.shape[3]) for half in (keys, values))
        return first, second

    def _place(self, layer: int) -> None:
        """Have the layer say that it holds its tokens: masks and positions are right from the start."""
        held = self.cache.layers[layer]
        keys, values = self._held[layer]
        if not isinstance(held, DynamicLayer):
            return
        if size := self._adapter.layers[layer].index_size:
            # Views of one allocation: the restore writes rows
            # whole, the engine finds both parts in their places.
            index, values = values[:, 0, :, -size:], values[..., :-size]
            held.lazy_initialization_indexer(index)  # type: ignore[attr-defined]  # of an indexed layer
            held.indexer_keys = index  # type: ignore[attr-defined]
        # Sets type and device, which transformers otherwise learns
        # from the first `update`; then the tensors are ours.
        held.lazy_initialization(keys, values)
        held.keys, held.values = keys, values
        if isinstance(held, DynamicSlidingWindowLayer):
            # A sliding layer counts the tokens that it has seen, and masks go by that.
            held.cumulative_length = self.token_count

    def _check_room(self) -> None:
        if not is_empty(self.cache):
            raise InvalidArgument(field="cache", problem="is not empty")
        for layer, decoder in enumerate(self._adapter.layers):
            if decoder.index_size and not isinstance(self.cache.layers[layer], INDEXED_LAYERS):
                raise InvalidArgument(field="cache", problem=f"has no room for layer {layer}'s index keys")
            limit = getattr(self.cache.layers[layer], "max_cache_len", None)
            if decoder.window is None and limit is not None and limit < self.token_count:
                problem = f"has room for {limit} of {self.token_count} tokens"
                raise InvalidArgument(field="cache", problem=problem)
