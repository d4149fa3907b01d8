"""Keys and values on the host while a model decodes: a cache that does not fit the device (KVPR).

The host holds every layer's inputs, and its K and V as attention takes them. The device holds two layers.
When a layer begins, what the layer behind it needs is already on its way:

```
   copying lane   [layer 0: inputs | K, V][layer 1: inputs | K, V][layer 2: ...
   this thread            [project][attend ...   ][project][attend ...
                            tokens [0, l) from inputs, [l, n) as they are
```

Any pass of the model may use it as its cache, prefill too: new tokens are appended on the host. One sequence,
full attention, one thread. On a GPU the host's memory is pinned, and copies go into a stream of their own.
Worst case: a pass that breaks midway. Then the cache refuses further passes, and is thrown away.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ctxcache.client import SessionRows
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import IncompleteRestore, UnsupportedBatch
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import refuse
from gpu_worker.families.projections import Halves
from gpu_worker.pipeline.compute import Restorer
from gpu_worker.pipeline.lane import Deadline, LaneEvent, device_of
from gpu_worker.planning.decoding import DecodeRates, searched_split
from gpu_worker.planning.plan import Method

Splitter = Callable[[int], int]
"""Tokens of history -> how many of them each layer of a pass projects from layer inputs."""
Transfer = Callable[[Tensor, Tensor], None]
"""(rows on the host, where they go on the device): called on the copying lane."""
COPY_TIMEOUT_S = 60.0


def transfer(rows: Tensor, place: Tensor) -> None:
    """Copy rows. A GPU does so without a wait."""
    place.copy_(rows, non_blocking=True)


# Two slots on the device, by turns; layer i + 1 comes while layer i is computed:
#
#     slot 0    layer 0: rows [l, n) copied, [0, l) projected from inputs    │ layer 2 ...
#     slot 1    layer 1 on its way ─────────────────────────────────────────►│ layer 1 computed
#
#     a slot    inputs [capacity, D]            tokens 0 .. l from the host
#               rows [capacity, H C + H C_v]    tokens 0 .. l projected here, l .. n from the host, n .. new
class _Slot(NamedTuple):
    """One layer on the device: inputs [capacity, D], rows [capacity, H C + H C_v]."""

    inputs: Tensor
    rows: Tensor


class _Coming(NamedTuple):
    """A layer that is on its way into a slot."""

    slot: _Slot
    token_count: int
    split: int
    inputs: LaneEvent
    rows: LaneEvent


def check_host(adapter: Adapter) -> None:
    """Raise UnsupportedArchitecture for models whose layers are not all full attention with K and V.

    The model has two layers at least.
    """
    if adapter.is_recurrent:
        raise refuse(adapter.model, "its layers keep states, for which a cache on the host has no room")
    if not adapter.is_uniform:
        raise refuse(adapter.model, "its layers keep different rows, or none")
    if any(decoder.window is not None for decoder in adapter.layers):
        raise refuse(adapter.model, "a layer with a window keeps few tokens, which fit the device")
    if adapter.kind is not StateKind.KV or StateKind.HIDDEN not in adapter.kinds:
        raise refuse(adapter.model, "its K and V do not come back from its layers' inputs")
    # The next layer comes while one is computed. If both were the same layer, its new rows would be missing.
    if len(adapter.layers) < 2:
        raise refuse(adapter.model, "it has no second layer that could come while the first is computed")


class HostCache(Cache):
    """A transformers cache. A context manager: within it the model's layers are watched."""

    def __init__(
        self,
        adapter: Adapter,
        capacity: int,
        *,
        split: Splitter = lambda _count: 0,
        transfer: Transfer = transfer,
    ) -> None:
        """Room for `capacity` tokens; `split` may be set at any time between passes.

        Raises UnsupportedArchitecture for models whose layers are not all full attention with K and V, and
        InvalidArgument(field="capacity").
        """
        check_host(adapter)
        if capacity < 1:
            raise InvalidArgument(field="capacity", problem="at least one token")
        self.adapter, self.capacity, self.split = adapter, capacity, split
        self.token_count = 0
        """Tokens that whole passes brought."""
        self.copied_bytes = 0
        self._transfer = transfer
        self._device = device_of(adapter.layers[0].device)
        self._key_size, self._value_size, self._key_heads, self._value_heads = _sizes(adapter)
        dtype, width = adapter.model.dtype, self._key_size + self._value_size

        def rows(make: Callable[[int], Tensor], size: int) -> Tensor:
            return make(capacity * size * dtype.itemsize).view(dtype).view(capacity, size)

        host, device = self._device.host_buffer, self._device.device_buffer
        count, hidden_size = len(adapter.layers), adapter.hidden_size
        self._inputs = [rows(host, hidden_size) for _ in range(count)]
        self._rows = [rows(host, width) for _ in range(count)]
        self._slots = [_Slot(rows(device, hidden_size), rows(device, width)) for _ in range(2)]
        self._restorer = Restorer(adapter, torch.arange(capacity))
        self._lane = self._device.lane("decode-copy")
        self._turn = 0
        self._coming: _Coming | None = None
        self._current: _Coming | None = None
        self._layer = -1
        self._hooks: list[RemovableHandle] = []
        super().__init__(layers=[_HostLayer(self, layer) for layer in range(count)])

    def __enter__(self) -> Self:
        for layer, decoder in enumerate(self.adapter.layers):
            hook = decoder.block.register_forward_pre_hook(self._begin_of(layer), with_kwargs=True)
            self._hooks.append(hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._lane.close(Deadline.after_s(COPY_TIMEOUT_S))

    def load(self, layer: int, inputs: Tensor, halves: Halves) -> None:
        """Put a restored layer in: inputs [t, D]; keys and values [1, H, t, C] with their positions.

        Before the first pass, all layers with equally many tokens. Raises InvalidArgument(field="tokens").
        """
        keys, values = halves
        count = len(inputs)
        # `_layer` is at -1 until the first pass begins.
        if self._layer >= 0 or count > self.capacity or keys.shape[2] != count or values.shape[2] != count:
            raise InvalidArgument(field="tokens", problem=f"{count} of a layer cannot be put into this cache")
        self._inputs[layer][:count] = inputs
        # The halves have their positions, unlike rows of the store: attention takes them as they are at every
        # step.
        self._rows[layer][:count] = self._joined(keys, values)
        self.token_count = count

    def restore(self, rows: SessionRows, token_count: int) -> None:
        """Put the first tokens of a session in, from its layer inputs, and from K and V where it has them.

        The whole cache is on the host. The caller keeps the lease until this returns. Raises what reading
        raises, and InvalidArgument(field="streams") for a session without layer inputs.
        """
        held = set(rows.session.streams())
        for layer in range(len(self.layers)):
            streams = (Stream(layer, StateKind.HIDDEN), Stream(layer, StateKind.KV))
            if streams[0] not in held:
                raise InvalidArgument(field="streams", problem=f"the session holds no {streams[0]}")
            states = [
                torch.from_numpy(rows.array(stream)[:token_count].copy()).view(self.adapter.model.dtype)
                for stream in streams
                if stream in held
            ]
            method = Method.KV if len(states) == len(streams) else Method.HIDDEN
            self.load(layer, states[0], self._restorer.layer(layer, method, states[-1]))
        rows.check()

    def forget(self, token_count: int) -> None:
        """Keep the first tokens alone, between passes. Raises InvalidArgument(field="token_count")."""
        if not 0 <= token_count <= self.token_count:
            raise InvalidArgument(field="token_count", problem=f"{token_count} of {self.token_count}")
        self._settle()
        self.token_count = token_count

    def measured(self, *, repeat_count: int = 5) -> DecodeRates:
        """The times of one layer, copied and projected with the present tokens.

        The least of `repeat_count` times counts: other users of the machine only add to it. `layer_s` and
        `attention_s` are 0: they are not measured. Raises IncompleteRestore for an empty cache.
        """
        count = self.token_count
        if not count:
            raise IncompleteRestore(layer=0, row_count=0, token_count=1)
        self._settle()
        slot = self._slots[0]
        ways: tuple[Callable[[], None], ...] = (
            lambda: self._copied(self._inputs[0][:count], slot.inputs[:count]),
            lambda: self._copied(self._rows[0][:count], slot.rows[:count]),
            lambda: self._project(0, slot, count),
        )
        seconds = []
        for way in ways:
            way()
            seconds.append(min(self._timed(way) for _ in range(repeat_count)))
        inputs_s, rows_s, project_s = (max(each / count, 1e-12) for each in seconds)
        return DecodeRates(inputs_s, rows_s, project_s)

    # -- within a pass -----------------------------------------------------------------------------

    def _begin_of(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        # Any: a hook sees whatever the model passes to its layer, and families name the cache in their way.
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The pass may be over another cache.
            if any(value is self for value in (*args, *kwargs.values())):
                self._begin(layer, args[0] if args else kwargs["hidden_states"])

        return hook

    def _begin(self, layer: int, inputs: Tensor) -> None:
        """Begin a layer: project its share, and have the next layer come."""
        if len(inputs) != 1:
            raise UnsupportedBatch(batch_size=len(inputs))
        new_count = inputs.shape[1]
        # The layer follows the one before, or the last one. A pass that broke midway leaves another number
        # for good.
        if self._layer not in (layer - 1, layer - 1 + len(self.layers)):
            raise IncompleteRestore(layer=layer, row_count=self._layer, token_count=self.token_count)
        if self.token_count + new_count > self.capacity:
            problem = f"room for {self.capacity} tokens, {self.token_count} and {new_count} come"
            raise InvalidArgument(field="capacity", problem=problem)
        self._layer = layer
        current = self._coming or self._have_come(layer, self.token_count)
        self._current = current
        # New rows go to the host before the next layer's copy is ordered behind it (`mark`).
        self._inputs[layer][self.token_count : self.token_count + new_count].copy_(
            inputs[0], non_blocking=True
        )
        is_last = layer + 1 == len(self.layers)
        # Behind the last layer the next pass begins, with the new tokens of this one.
        after = self.token_count + (new_count if is_last else 0)
        self._coming = self._have_come(0 if is_last else layer + 1, after)
        # The projection runs on the engine's stream: it waits for the inputs alone, while K and V still come.
        if current.split:
            current.inputs.wait(Deadline.after_s(COPY_TIMEOUT_S))
            self._project(layer, current.slot, current.split)

    def _have_come(self, layer: int, token_count: int) -> _Coming:
        """Begin to copy a layer into the slot whose layer has been computed."""
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        # Each layer asks: the rates may have been measured anew between two passes.
        split = self.split(token_count)
        if not 0 <= split <= token_count:
            raise InvalidArgument(field="split", problem=f"{split} of {token_count} tokens")
        # The write of the host's rows, and the read of the slot, were issued before.
        before, deadline = self._device.mark(), Deadline.after_s(COPY_TIMEOUT_S)

        def copy(source: Tensor, place: Tensor) -> Callable[[], None]:
            return lambda: self._transfer(source, place) if len(source) else None

        inputs, rows = self._inputs[layer][:split], self._rows[layer][split:token_count]
        self.copied_bytes += inputs.nbytes + rows.nbytes
        return _Coming(
            slot,
            token_count,
            split,
            self._lane.submit(copy(inputs, slot.inputs[:split]), after=[before], deadline=deadline),
            # The rows follow the inputs on one lane: the projection begins while they are under way.
            self._lane.submit(copy(rows, slot.rows[split:token_count]), deadline=deadline),
        )

    def _project(self, layer: int, slot: _Slot, count: int) -> None:
        keys, values = self._restorer.layer(layer, Method.HIDDEN, slot.inputs[:count])
        slot.rows[:count] = self._joined(keys, values)

    def _joined(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [1, H, t, C] as rows [t, H C + H C_v]."""
        return torch.cat([half[0].transpose(0, 1).flatten(1) for half in (keys, values)], dim=1)

    def _attended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens. Those of the new tokens are kept."""
        current = self._current
        if current is None or layer != self._layer:
            raise IncompleteRestore(layer=layer, row_count=0, token_count=self.token_count)
        begin, end = self.token_count, self.token_count + keys.shape[2]
        # The wait comes here, since the projection has had the time of the copy.
        current.rows.wait(Deadline.after_s(COPY_TIMEOUT_S))
        rows = current.slot.rows
        rows[begin:end] = self._joined(keys, values)
        self._rows[layer][begin:end].copy_(rows[begin:end], non_blocking=True)
        # All layers have the new tokens: a pass that breaks before this point has brought none.
        if layer + 1 == len(self.layers):
            self.token_count = end
        first, second = rows[:end, : self._key_size], rows[:end, self._key_size :]
        return (
            first.view(end, self._key_heads, -1).transpose(0, 1)[None],
            second.view(end, self._value_heads, -1).transpose(0, 1)[None],
        )

    # -- measuring ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until nothing is under way. The next pass copies its first layer anew."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.rows.wait(Deadline.after_s(COPY_TIMEOUT_S))

    def _copied(self, source: Tensor, place: Tensor) -> None:
        deadline = Deadline.after_s(COPY_TIMEOUT_S)
        before = self._device.mark()
        self._lane.submit(lambda: self._transfer(source, place), after=[before], deadline=deadline).wait(
            deadline
        )

    def _timed(self, work: Callable[[], None]) -> float:
        deadline = Deadline.after_s(COPY_TIMEOUT_S)
        self._device.mark().wait(deadline)
        begin_ns = time.perf_counter_ns()
        work()
        self._device.mark().wait(deadline)
        return (time.perf_counter_ns() - begin_ns) / 1e9


class _HostLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a HostCache, as transformers asks for it."""

    def __init__(self, cache: HostCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._layer = cache, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See CacheLayerMixin: there is nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """See CacheLayerMixin."""
        return self._cache._attended(self._layer, key_states, value_states)  # noqa: SLF001  one class in two parts

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See CacheLayerMixin."""
        # (keys that attention sees, offset of the first): full attention sees all from token 0 on.
        return self._cache.token_count + query_length, 0

    def get_seq_length(self) -> int:
        """See CacheLayerMixin."""
        return self._cache.token_count

    def get_max_length(self) -> int:
        """See CacheLayerMixin."""
        return self._cache.capacity


def _sizes(adapter: Adapter) -> tuple[int, int, int, int]:
    """Elements of a token's keys and of its values as the engine caches them, and their heads."""
    first, second = (
        torch.empty(1, half.head_count, 0, half.head_size, dtype=adapter.model.dtype)
        for half in (adapter.key, adapter.value)
    )
    keys, values = adapter.embed_halves(first, second, None)
    return keys.shape[1] * keys.shape[3], values.shape[1] * values.shape[3], keys.shape[1], values.shape[1]


class HostCaches:
    """The caches of one turn at a time that hold K and V on the host. Close it."""

    def __init__(self, adapter: Adapter) -> None:
        """Raises UnsupportedArchitecture."""
        check_host(adapter)
        self._adapter = adapter
        self._capacity = 1
        self._open = ExitStack()
        self._rates: DecodeRates | None = None
        self.streams = frozenset(Stream(layer, StateKind.HIDDEN) for layer in range(len(adapter.layers)))
        """The streams from which such a cache comes back."""

    def begin(self, capacity: int) -> None:
        """Begin a turn of so many tokens at most. The caches of the turn before are gone."""
        self.close()
        self._capacity = max(capacity, 1)

    def empty(self) -> HostCache:
        """A cache without tokens; passes on it are watched until the turn ends."""
        cache = self._open.enter_context(HostCache(self._adapter, self._capacity))
        if self._rates is not None:
            cache.split = self._splitter(self._rates)
        return cache

    def measure(self, cache: HostCache) -> None:
        """Measure once what to copy and what to project, from the first restored cache."""
        if self._rates is None:
            self._rates = cache.measured()
            cache.split = self._splitter(self._rates)

    def close(self) -> None:
        """End the watch on passes."""
        self._open.close()

    def _splitter(self, rates: DecodeRates) -> Callable[[int], int]:
        layer_count = len(self._adapter.layers)
        # Every layer of a step asks for the same count.
        return lru_cache(4)(lambda count: searched_split(rates, count, layer_count))
