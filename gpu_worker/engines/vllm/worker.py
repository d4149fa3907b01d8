"""The worker's side: restores rows into the engine's blocks, and captures those that it computes.

Steps come from vLLM's worker thread. K is taken before the rotary embedding turns it, V as attention gets
it; a saver's threads commit them. Rows belong to the session that has their block: slots say which block a
row goes to, and positions which token it is. Worst case: a store that does not answer holds up the step that
restores from it, for `restore_timeout_s`.
"""

import functools
import gc
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.logger import init_logger

from ctxcache.client.types import Durability
from ctxcache.errors import CacheError, SessionNotFound
from ctxcache.format.streams import StateKind
from gpu_worker.engines.vllm.plan import BlockLoad, Opened, StepPlan
from gpu_worker.engines.vllm.settings import ConnectorSettings, Refused, kv_streams, link_for
from gpu_worker.rows import stored_dtype
from gpu_worker.saving import Saver, Slice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.ctxcache")

REST_S = 0.05
"""Without a step for so long an engine has no request."""


class AttentionLayer(NamedTuple):
    """A layer's attention as vLLM has it, and what turns its keys."""

    attention: nn.Module
    rotary: nn.Module
    cache: Tensor


class WorkerSide:
    """Restores rows into the engine's blocks, and captures those that it computes."""

    def __init__(self, config: "VllmConfig", settings: ConnectorSettings) -> None:
        self._config, self._settings = config, settings
        self._durability = Durability[settings.durability.upper()]
        self._block_tokens: int = config.cache_config.block_size
        self.link = link_for(config, settings, timeout_s=settings.restore_timeout_s)
        self._layers: list[AttentionLayer] = []
        self._saver: Saver | None = None
        self._waiters = ThreadPoolExecutor(2, "ctxcache-saved")
        self._endings: dict[str, Future[CacheError | None]] = {}
        self._not_saved: set[str] = set()
        self._owners: dict[int, str] = {}
        """Sessions by the block that their requests write to."""
        self._ends: dict[str, int] = {}
        """The next token of each session that is saved."""
        self._bad_blocks: set[int] = set()
        self._pass: AbstractContextManager[None] | None = None
        self._key: Tensor | None = None
        self._stepping = threading.Condition()
        """Held in what changes while the engine steps, and by the thread that ends sessions when it rests."""
        self._rested_s: float | None = None
        """When the last step ended; None within a step."""
        self._is_closed = False
        self._resting = threading.Thread(target=self._end_at_rest, name="ctxcache-at-rest", daemon=True)
        self._resting.start()

    def attach(self, caches: Mapping[str, Tensor]) -> None:
        """Find the model whose caches these are, and listen to its passes. Raises Refused."""
        context = self._config.compilation_config.static_forward_context
        model = _model_with(context[next(iter(caches))])
        rotaries = {
            attention: rotary
            for module in model.modules()
            for name, rotary in module.named_children()
            if name == "rotary_emb"
            for attention in module.children()
        }
        for name, cache in caches.items():
            attention = context[name]
            if attention not in rotaries:
                raise Refused(f"layer {name} has no rotary embedding of its own: {type(attention).__name__}")
            attention.register_forward_pre_hook(functools.partial(self._value_comes, len(self._layers)))
            self._layers.append(AttentionLayer(attention, rotaries[attention], cache))
        for rotary in {id(layer.rotary): layer.rotary for layer in self._layers}.values():
            rotary.register_forward_pre_hook(self._key_comes)
        model.register_forward_pre_hook(self._pass_begins, with_kwargs=True)
        model.register_forward_hook(self._pass_ends, always_call=True)

    def begin_step(self, plan: StepPlan) -> None:
        """Take over what the scheduler has planned."""
        with self._stepping:
            self._rested_s = None
            for name in plan.finished:
                self._end(name)
            for name in plan.lost_blocks:
                self._forget_blocks(name)
            for opened in plan.opened:
                self._open(opened)
            for name, block_ids in plan.blocks:
                if name in self._ends:
                    self._owners.update(dict.fromkeys(block_ids, name))

    def end_step(self) -> None:
        """Nothing of the step is under way any more."""
        with self._stepping:
            self._rested_s = time.monotonic()
            self._stepping.notify_all()

    def load(self, loads: Iterable[BlockLoad]) -> None:
        """Restore rows into blocks. A load that fails leaves its blocks to be computed."""
        for item in loads:
            try:
                self._load(item)
            except CacheError as error:
                logger.warning("%s is computed again: %s", item.session.name, error)
                self.link.failed(error)
                first = item.begin // self._block_tokens
                self._bad_blocks.update(item.block_ids[first : -(-item.end // self._block_tokens)])

    def take_bad_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_saved(self) -> set[str]:
        """Sessions whose saves ended since the last call."""
        saved = {name for name, ending in self._endings.items() if ending.done()}
        for name in saved:
            failure = self._endings.pop(name).result()
            if failure is not None:
                logger.warning("%s is not saved to its end: %s", name, failure)
        saved |= self._not_saved
        self._not_saved = set()
        return saved

    def close(self) -> None:
        """Save what is still in staging, then end the threads and the connection."""
        with self._stepping:
            self._is_closed = True
            self._stepping.notify_all()
        self._resting.join()
        if self._saver is not None:
            self._saver.close()
        self._waiters.shutdown()
        self.link.close()

    # -- restoring ----------------------------------------------------------------------------------------

    def _load(self, item: BlockLoad) -> None:
        use = self.link.use()
        if use is None:
            raise SessionNotFound(session=item.session.name)
        client, model = use
        streams = kv_streams(model)
        dtype = stored_dtype(model.specs(streams)[streams[0]])
        positions = torch.arange(item.begin, item.end)
        blocks = torch.tensor(item.block_ids)[positions // self._block_tokens]
        slots = blocks * self._block_tokens + positions % self._block_tokens
        with client.sessions.open(item.session, model).read(
            streams=streams,
            begin=item.begin,
            end=item.end,
            if_generation_match=item.session.generation,
        ) as rows:
            for layer, stream in zip(self._layers, streams, strict=True):
                both = torch.from_numpy(rows.array(stream)).view(dtype)
                self._place(layer, both.to(layer.cache.device), positions, slots)

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

    # -- saving -------------------------------------------------------------------------------------------

    def _open(self, opened: Opened) -> None:
        name = opened.session.name
        saver = self._usable_saver()
        try:
            if saver is None:
                raise SessionNotFound(session=name)
            saver.open(opened.session)
        except CacheError as error:
            logger.warning("%s is not saved: %s", name, error)
            self._not_saved.add(name)
            return
        self._ends[name] = opened.token_count

    def _usable_saver(self) -> Saver | None:
        use = self.link.use()
        if use is not None and self._saver is None:
            client, model = use
            device = self._layers[0].cache.device
            self._saver = Saver(client, model, kv_streams(model), device=device)
        return self._saver if use is not None else None

    def _end_at_rest(self) -> None:
        """End all sessions once the engine makes no steps: it has no request then, and tells nobody of it."""
        with self._stepping:
            while not self._is_closed:
                if self._rested_s is None or not self._ends:
                    self._stepping.wait()
                    continue
                left_s = self._rested_s + REST_S - time.monotonic()
                if left_s > 0:
                    self._stepping.wait(left_s)
                    continue
                for name in list(self._ends):
                    self._end(name)

    def _end(self, name: str) -> None:
        self._forget_blocks(name)
        if self._ends.pop(name, None) is None or self._saver is None:
            return
        self._saver.finish(name, durability=self._durability)
        self._endings[name] = self._waiters.submit(self._wait_for, self._saver, name)

    @staticmethod
    def _wait_for(saver: Saver, name: str) -> CacheError | None:
        try:
            return saver.wait(name)
        except CacheError as error:
            return error

    def _forget_blocks(self, name: str) -> None:
        self._owners = {block: owner for block, owner in self._owners.items() if owner != name}

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
