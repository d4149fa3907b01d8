"""K before positions and V, row by row: hooks see them in a pass, and put them back with their positions.

K is taken before the rotary embedding turns it, V as attention gets it, by hooks, which eager passes alone
call. Rows belong to the session that has their block: slots say which block a row goes to, and positions
which token it is.
"""

import functools
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context

from ctxcache.client import SessionRows
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.settings import Refused
from gpu_worker.engines.vllm.plan import BlockLoad, BlockSave
from gpu_worker.saving import Saver, Slice


class AttentionLayer(NamedTuple):
    """A layer's attention as vLLM has it, and what turns its keys."""

    attention: nn.Module
    rotary: nn.Module
    cache: Tensor


class KvRows:
    """Rows of an engine whose model has these layers. Listens to its passes from the start on."""

    def __init__(
        self, modules: Mapping[str, Any], caches: Mapping[str, Tensor], block_tokens: int, dtype: torch.dtype
    ) -> None:
        """`modules`: the engine's layers by name. Raises Refused."""
        self._block_tokens, self._dtype = block_tokens, dtype
        self._layers: list[AttentionLayer] = []
        self._saver: Saver | None = None
        self._owners: dict[int, str] = {}
        """Sessions by the block that their requests write to."""
        self._ends: dict[str, int] = {}
        """The next token of each session that is saved."""
        self._pass: AbstractContextManager[None] | None = None
        self._key: Tensor | None = None
        self._listen(modules, caches)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._layers[0].cache.device

    def follow(self, saver: Saver) -> None:
        """See EngineState."""
        self._saver = saver

    def opened(self, name: str, token_count: int) -> None:
        """See EngineState."""
        self._ends[name] = token_count

    def own(self, name: str, block_ids: Iterable[int]) -> None:
        """See EngineState."""
        if name in self._ends:
            self._owners.update(dict.fromkeys(block_ids, name))

    def disown(self, name: str) -> None:
        """See EngineState."""
        self._owners = {block: owner for block, owner in self._owners.items() if owner != name}

    def closed(self, name: str) -> None:
        """See EngineState."""
        self.disown(name)
        self._ends.pop(name, None)

    def load(self, rows: SessionRows, streams: Sequence[Stream], item: BlockLoad) -> None:
        """Put rows of K and V into the request's blocks, K with its positions."""
        positions = torch.arange(item.begin, item.end)
        blocks = torch.tensor(item.block_ids)[positions // self._block_tokens]
        slots = blocks * self._block_tokens + positions % self._block_tokens
        for layer, stream in zip(self._layers, streams, strict=True):
            both = torch.from_numpy(rows.array(stream)).view(self._dtype)
            self._place(layer, both.to(layer.cache.device), positions, slots)

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Nothing: the rows of the pass are in staging."""

    def _place(self, layer: AttentionLayer, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention: Any = layer.attention
        head_count, size, value_size = attention.num_kv_heads, attention.head_size, attention.head_size_v
        key = rows[:, : head_count * size].contiguous()
        value = rows[:, head_count * size :].contiguous()
        device = layer.cache.device
        turned = layer.rotary(positions.to(device), key)[0]
        attention.impl.do_kv_cache_update(
            attention,
            turned.view(-1, head_count, size),
            value.view(-1, head_count, value_size),
            layer.cache,
            slots.to(device),
        )

    def _listen(self, modules: Mapping[str, Any], caches: Mapping[str, Tensor]) -> None:
        model = _model_with(modules[next(iter(caches))])
        rotaries = {
            attention: rotary
            for module in model.modules()
            for name, rotary in module.named_children()
            if name == "rotary_emb"
            for attention in module.children()
        }
        for name, cache in caches.items():
            attention = modules[name]
            if attention not in rotaries:
                raise Refused(f"layer {name} has no rotary embedding of its own: {type(attention).__name__}")
            attention.register_forward_pre_hook(functools.partial(self._value_comes, len(self._layers)))
            self._layers.append(AttentionLayer(attention, rotaries[attention], cache))
        for rotary in {id(layer.rotary): layer.rotary for layer in self._layers}.values():
            rotary.register_forward_pre_hook(self._key_comes)
        model.register_forward_pre_hook(self._pass_begins, with_kwargs=True)
        model.register_forward_hook(self._pass_ends, always_call=True)

    def _pass_begins(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saver, slots = self._saver, _slots_of(get_forward_context())
        if saver is None or slots is None or not self._owners:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        if ids is None or positions is None or positions.ndim != 1:
            return
        slices = list(self._slices(slots.cpu().numpy(), positions.cpu().numpy(), len(ids)))
        if any(part.session_name for part in slices):
            self._pass = saver.passing(slices, ids.cpu().numpy())
            self._pass.__enter__()

    def _slices(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], row_count: int
    ) -> Iterator[Slice]:
        """The sessions' rows of a pass, in its order; rows that are nobody's or are saved have no name."""
        blocks = slots[:row_count] // self._block_tokens
        # A run: rows of one request, whose positions follow one another.
        owners = [self._owners.get(int(block), "") for block in blocks]
        row = 0
        while row < len(owners):
            end = row + 1
            while (
                end < len(owners)
                and owners[end] == owners[row]
                and positions[end] - positions[row] == end - row
            ):
                end += 1
            yield from self._slices_of(owners[row], int(positions[row]), end - row)
            row = end
        if row_count > len(owners):
            yield Slice("", 0, row_count - len(owners))

    def _slices_of(self, name: str, begin: int, count: int) -> Iterator[Slice]:
        saved_count = min(count, max(0, self._ends.get(name, 0) - begin)) if name else count
        if saved_count:
            yield Slice("", begin, saved_count)
        if count > saved_count:
            self._ends[name] = begin + count
            yield Slice(name, begin + saved_count, count - saved_count)

    def _key_comes(self, _rotary: nn.Module, args: tuple[Any, ...]) -> None:
        if self._pass is not None and len(args) > 2 and args[2] is not None:
            # A copy: positions are put into it where it lies.
            self._key = args[2].clone()

    def _value_comes(self, number: int, _attention: nn.Module, args: tuple[Any, ...]) -> None:
        if self._pass is None or self._saver is None or self._key is None:
            return
        key, self._key = self._key, None
        rows = torch.cat((key.flatten(1), args[2].flatten(1)), dim=1)
        self._saver.put(number, StateKind.KV, rows)

    def _pass_ends(self, _model: nn.Module, _args: object, _output: object) -> None:
        passing, self._pass = self._pass, None
        if passing is not None:
            passing.__exit__(None, None, None)


def _slots_of(context: ForwardContext) -> Tensor | None:
    """Where the rows of a pass go: block * block tokens + place in it. None for a pass without rows."""
    metadata = context.attn_metadata
    if isinstance(metadata, list):
        raise Refused("passes of several micro-batches are not supported")
    first = next(iter(metadata.values()), None) if metadata else None
    return None if first is None else first.slot_mapping


def _model_with(attention: nn.Module) -> nn.Module:
    """The model that an attention layer belongs to: the module that has most others in it.

    vLLM gives a connector the layers and not the model.
    """
    holders = [
        module
        for module in gc.get_objects()
        if isinstance(module, nn.Module)
        and hasattr(module, "compute_logits")
        and any(part is attention for part in module.modules())
    ]
    if not holders:
        raise Refused("the model of the K/V caches was not found")
    return max(holders, key=lambda module: sum(1 for _ in module.modules()))
