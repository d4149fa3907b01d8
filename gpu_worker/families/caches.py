"""What transformers' caches hold of a layer: states, index keys, and what a pass puts there.

`states_in` and `put_states` read and set a layer's recurrent state, `Recurrence` brings it forward, and
`CacheTap` watches the keys and values of passes. Classes and their fields differ by version of transformers.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cat, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, cache_utils

from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.projections import Emit, Halves, Handle, without_gradient


def cache_classes(*names: str) -> tuple[type, ...]:
    """Transformers' classes of one layer's cache, those that this version has: older ones have fewer."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


STATE_LAYERS = cache_classes("LinearAttentionCacheLayerMixin")
"""Caches of layers that keep recurrent or convolution state."""
NOTHING_LAYERS = cache_classes("DummyLayer")
"""Caches of layers that keep nothing: they read others' keys and values, or attend to nothing."""
INDEXED_LAYERS = cache_classes("DynamicIndexedLayer")
"""Caches of layers that keep an index key of each token beside its keys and values (DeepSeek V3.2)."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state in the engine's cache: its name, shape and element type."""

    name: str
    """`convolution` or `recurrent`, and its number within the layer."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


States = Mapping[str, Tensor]
"""The tensors of one layer's state by name."""


def states_in(held: Any) -> States:
    """The state tensors of a cache's layer, as views. None before the layer's first pass.

    Any: the class differs by version of transformers.
    """
    states: dict[str, Tensor] = {}
    for number in range(held.number_of_states):
        for name, kept in (("convolution", held.conv_states), ("recurrent", held.recurrent_states)):
            if kept[number] is not None:
                states[f"{name} {number}"] = kept[number]
    return states


def put_states(held: Any, states: States, device: torch.device) -> None:
    """Set the state of a cache's layer, which has none, to a copy of `states`. Any: as `states_in`."""
    for name, tensor in states.items():
        role, _, number = name.partition(" ")
        put = held.update_conv_state if role == "convolution" else held.update_recurrent_state
        put(tensor.to(device), state_idx=int(number))
        # transformers 5.23 sets this mark with a convolution state only. Without it a mixer starts anew.
        held.has_previous_state[int(number)] = True


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Brings a layer's recurrent and convolution state forward: runs its mixer over the normed inputs.

    Nothing else of the layer runs: no attention, no experts. The state lies in the engine's cache.
    """

    mixer: nn.Module
    layer: int
    cache_name: str
    """The mixer's name for the cache."""
    is_stepwise: bool = False
    """Whether the mixer takes one token at a time once it has a state (Jamba)."""
    states: tuple[StateTensor, ...] = ()
    """The tensors of its state, as the model's own pass left them."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the layer's state."""
        return sum(state.size_bytes for state in self.states)

    def advance(self, normed: Tensor, cache: Cache) -> None:
        """Bring the layer's state in `cache` forward by tokens [1, T, D]."""
        # Without a state every mixer takes a whole run of tokens.
        is_first = not cache.has_previous_state(self.layer)
        pieces = (normed,) if is_first or not self.is_stepwise else torch.split(normed, 1, dim=1)
        for piece in pieces:
            self.mixer.forward(piece, **{self.cache_name: cache})


class CacheTap:
    """Watches the keys and values that a model's passes put into their cache, for all layers of an adapter.

    The cache of a pass has its `update` wrapped while the pass lasts, and no longer.
    """

    def __init__(self, base: nn.Module, indexed: Collection[int] = ()) -> None:
        """`indexed`: layers whose index keys are a part of the second half."""
        self._base, self._indexed = base, frozenset(indexed)
        self._emits: dict[int, list[Emit]] = {}
        self._hooks: list[RemovableHandle] = []
        self._tapped: object | None = None
        self._waiting: dict[int, Halves] = {}
        """Halves of layers whose index keys have yet to come in this pass."""

    def watch(self, layer: int, emit: Emit) -> "Handle":
        """Call `emit` with what each pass adds to a layer's cache, until the handle is removed."""
        if not self._emits:
            self._hooks = [
                # The hooks are there only while a watch is on: an idle tap costs a pass nothing.
                self._base.register_forward_pre_hook(self._begin, with_kwargs=True),
                self._base.register_forward_hook(self._end, always_call=True),
            ]
        self._emits.setdefault(layer, []).append(emit)
        return _TapHandle(self, layer, emit)

    def unwatch(self, layer: int, emit: Emit) -> None:
        """End one watch; does nothing if it is over."""
        emits = self._emits.get(layer, [])
        if emit not in emits:
            return
        emits.remove(emit)
        if not emits:
            del self._emits[layer]
        if not self._emits:
            # A watch may end within a pass: its cache is still wrapped.
            self._end(self._base, (), None)
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    # Any: a hook sees whatever the model passes, and caches are not typed for what is wrapped here.
    def _begin(self, _base: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if cache is None:
            return
        # A pass while a layer is watched:
        #
        #     _begin      cache.update = wrapper              an attribute of this one object
        #     layer 0     wrapper ──► emit(K, V), plain update
        #     layer 1     wrapper ──► ...
        #     _end        the attribute goes, the class's method is seen again; behind a failed pass too
        plain = cache.update
        # A pass that failed between a layer's rows and its index keys would leave the former here.
        self._waiting.clear()

        def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **more: Any) -> Any:
            halves = _tokens_first(keys), _tokens_first(values)
            # Index keys come in a call of their own, later in the same layer: the row is whole only then.
            if layer in self._indexed:
                self._waiting[layer] = halves
            else:
                self._emit(layer, *halves)
            return plain(keys, values, layer, *args, **more)

        cache.update = update
        if self._indexed:
            plain_index = cache.update_indexer

            def update_indexer(keys: Tensor, layer: int, *args: Any, **more: Any) -> Any:
                first, second = self._waiting.pop(layer)
                self._emit(layer, first, with_index(second, without_gradient(keys)[0]))
                return plain_index(keys, layer, *args, **more)

            cache.update_indexer = update_indexer
        self._tapped = cache

    def _emit(self, layer: int, first: Tensor, second: Tensor) -> None:
        for emit in self._emits.get(layer, ()):
            emit(first, second)

    def _end(self, _base: nn.Module, _args: object, _output: object) -> None:
        cache, self._tapped = self._tapped, None
        if cache is not None:
            vars(cache).pop("update", None)
            vars(cache).pop("update_indexer", None)


@dataclass(frozen=True, slots=True)
class _TapHandle:
    tap: CacheTap
    layer: int
    emit: Emit

    def remove(self) -> None:
        self.tap.unwatch(self.layer, self.emit)


def index_keys(held: Any) -> Tensor | None:
    """The index keys [1, T, I] that an indexed layer's cache holds. Any: older versions have no such class.

    Raises ValueError where it holds positions of them too.
    """
    if held.indexer_position_ids is not None:
        raise ValueError("a layer of the cache holds positions of index keys")
    keys: Tensor | None = held.indexer_keys
    return keys


def with_index(values: Tensor, index: Tensor) -> Tensor:
    """Values [T, 1, C_v] and index keys [T, I] as one half of a row, [T, 1, C_v + I]."""
    return cat((values, index.unsqueeze(1)), dim=-1)


# [1, H, T, C] -> [T, H, C], a view.
def _tokens_first(half: Tensor) -> Tensor:
    return without_gradient(half)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class AsCached:
    """K and V as a layer caches them, with positions, where their computation is not known."""

    tap: CacheTap
    layer: int

    def project(self, normed: Tensor) -> Halves:
        """Raises UnsupportedArchitecture, since the way from input to rows is not known."""
        del normed
        raise UnsupportedArchitecture(
            architecture=f"layer {self.layer}",
            problem="its keys and values are known as they are cached only",
        )

    def watch(self, emit: Emit) -> "Sequence[Handle]":
        """See Projection."""
        return [self.tap.watch(self.layer, emit)]
