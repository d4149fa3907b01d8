"""Rows of tokens that an eager engine computes, pass by pass: what all kinds of rows share.

Hooks see a pass from inside. Rows belong to the session that has their block: slots say which block a row
goes to, and positions which token it is. How rows become K and V again is proven on the loaded model before
it serves: a few tokens are computed, saved, dropped from the cache, restored, and compared. Worst case: a
model of another structure, which is refused at the start with the layer and the difference.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context, set_forward_context
from vllm.model_executor.models.utils import extract_layer_index

from ctxcache.client import SessionRows
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.link import Refused
from gpu_worker.engines.vllm.engine_blocks import grouped_blocks
from gpu_worker.engines.vllm.plan import BlockLoad, BlockSave, Writing, first_kept
from gpu_worker.saving import Saver, Slice

if TYPE_CHECKING:
    from vllm.config import VllmConfig
import functools

Halves = tuple[Tensor, Tensor]
"""K with its positions and V, as attention gets them: [T, H, C], [T, H, C_v]."""
PROOF_TOKENS = 8
PROOF_BEGIN = 3
"""The first position of the proof: at 0 a rotary embedding changes nothing."""
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a restored value, as a part of the largest value."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer's attention as vLLM has it, the modules around it, and its cache."""

    name: str
    attention: Any
    parent: nn.Module
    """The module that computes Q, K and V and calls attention."""
    block: nn.Module
    """The decoder layer."""
    cache: Tensor

    def halves(self, key: Tensor, value: Tensor) -> Halves:
        """K and V of any shape, by head."""
        count, sizes = self.attention.num_kv_heads, (self.attention.head_size, self.attention.head_size_v)
        return key.reshape(-1, count, sizes[0]), value.reshape(-1, count, sizes[1])


@dataclass(slots=True)
class Witness:
    """The evidence of a proof's pass.

    Rows as they would be saved, K and V as attention got them, by layer.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)
    halves: dict[int, Halves] = field(default_factory=dict)


# One pass of an eager engine over two requests, blocks of 16 tokens; alice owns blocks 7 and 2, bob block 5:
#
#     row             0    1    2    3    4    5
#     slot           112  113  114   89   33   34         by vLLM's attention metadata
#     block            7    7    7    5    2    2         slot // 16
#     position         0    1    2    9   17   18
#     owner         alice ...     bob  alice ...          rows 0-2, 3 and 4-5 are three slices
#
# Rows of blocks that nobody owns have no name, and are passed over by the saver.
class PassRows(ABC):
    """Rows of an engine whose model has these layers. Listens to its passes from the start on."""

    kind: StateKind

    def __init__(
        self, modules: Mapping[str, Any], caches: Mapping[str, Tensor], config: "VllmConfig", block_count: int
    ) -> None:
        """`modules`: the engine's layers by name. Raises Refused."""
        self._block_tokens: int = config.cache_config.block_size
        self._dtype: torch.dtype = config.model_config.dtype
        self._saver: Saver | None = None
        self._owners: dict[int, str] = {}
        """Sessions by the block that their requests write to."""
        self._ends: dict[str, int] = {}
        """The next token of each session that is saved."""
        self._pass: AbstractContextManager[None] | None = None
        self._witness: Witness | None = None
        model = model_with(modules[next(iter(caches))])
        self._layers = list(_layers_of(model, modules, caches))
        model.register_forward_pre_hook(self._pass_begins, with_kwargs=True)
        model.register_forward_hook(self._pass_ends, always_call=True)
        self._listen()
        with torch.inference_mode():
            self._prove(model, config, block_count)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._layers[0].cache.device

    @abstractmethod
    def _listen(self) -> None:
        """Attach hooks that call `_emit` for each layer of a pass. Raises Refused."""

    @abstractmethod
    def _halves(self, layer: AttentionLayer, rows: Tensor, positions: Tensor) -> Halves:
        """K and V of saved rows, on the layer's device, at these positions."""

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

    def parts(self, item: BlockLoad) -> Mapping[int, Sequence[int]]:
        """See EngineState."""
        (block_ids,) = item.block_ids
        first = first_kept(block_ids[item.begin // self._block_tokens :])
        begin = item.end if first is None else item.begin + first * self._block_tokens
        return {begin: range(len(self._layers))} if begin < item.end else {}

    def load(
        self, rows: SessionRows, streams: Mapping[int, Stream], item: BlockLoad, writing: Writing
    ) -> None:
        """Put rows of each layer into the request's blocks, as K and V with their positions."""
        positions = torch.arange(rows.begin, item.end)
        (block_ids,) = item.block_ids
        blocks = torch.tensor(block_ids)[positions // self._block_tokens]
        slots = blocks * self._block_tokens + positions % self._block_tokens
        for number, stream in streams.items():
            self._place(self._layers[number], torch.from_numpy(rows.array(stream)), positions, slots, writing)

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Nothing: the rows of the pass are in staging."""
        del saves

    def renewed(self) -> None:
        """See EngineState: nothing is made of weights here."""
        return

    def _place(
        self, layer: AttentionLayer, stored: Tensor, positions: Tensor, slots: Tensor, writing: Writing
    ) -> None:
        device = layer.cache.device
        rows = stored.view(self._dtype).to(device)
        halves = self._halves(layer, rows, positions.to(device))
        with writing():
            self._write(layer, halves, slots)

    def _write(self, layer: AttentionLayer, halves: Halves, slots: Tensor) -> None:
        slots = slots.to(layer.cache.device)
        layer.attention.impl.do_kv_cache_update(layer.attention, *halves, layer.cache, slots)

    @property
    def _is_listening(self) -> bool:
        return self._pass is not None or self._witness is not None

    def _emit(self, number: int, rows: Tensor) -> None:
        """Rows of a pass [T, row], of one layer."""
        if self._witness is not None:
            self._witness.rows[number] = rows.clone()
        elif self._pass is not None and self._saver is not None:
            # A device's copy may still be under way when a fused norm writes to the engine's own tensor.
            self._saver.put(number, self.kind, rows if rows.device.type == "cpu" else rows.clone())

    def _prove(self, model: nn.Module, config: "VllmConfig", block_count: int) -> None:
        """Save, drop and restore a few tokens of the loaded model. Raises Refused where that differs."""
        device = self.device
        vocabulary = config.model_config.get_vocab_size()
        # A prime step spreads tokens over any vocabulary, so that no two rows are alike.
        ids = torch.tensor([(7919 * (i + 1)) % vocabulary for i in range(PROOF_TOKENS)], device=device)
        positions = torch.arange(PROOF_BEGIN, PROOF_BEGIN + PROOF_TOKENS, device=device)
        self._witness = witness = Witness()
        # Attention without a request returns memory as it happens to be: the hook returns zeros instead.
        hooks = [layer.attention.register_forward_hook(_nothing_seen) for layer in self._layers]
        hooks += [
            layer.attention.register_forward_pre_hook(_attention_seen(witness, number, layer))
            for number, layer in enumerate(self._layers)
        ]
        try:
            # Without metadata the pass writes to no request's block.
            with set_forward_context(None, config, num_tokens=PROOF_TOKENS):
                model(input_ids=ids, positions=positions)
        except (RuntimeError, TypeError, ValueError) as error:
            raise Refused(f"a pass of {PROOF_TOKENS} tokens fails: {error}: save state=blocks") from error
        finally:
            self._witness = None
            for hook in hooks:
                hook.remove()
        # Block 0 is no request's and may hold anything: use block 1 where there is one.
        blocks = torch.arange(PROOF_TOKENS, device=device) // self._block_tokens + min(1, block_count - 1)
        slots = blocks * self._block_tokens + torch.arange(PROOF_TOKENS, device=device) % self._block_tokens
        for number, layer in enumerate(self._layers):
            if number not in witness.rows or number not in witness.halves:
                raise Refused(
                    f"layer {layer.name}: its rows or its K and V do not show in a pass: save state=blocks"
                )
            self._compare(layer, witness.rows[number], witness.halves[number], positions, slots, block_count)

    def _compare(
        self,
        layer: AttentionLayer,
        rows: Tensor,
        halves: Halves,
        positions: Tensor,
        slots: Tensor,
        block_count: int,
    ) -> None:
        restored = self._halves(layer, rows, positions)
        for name, expected, actual in zip("KV", halves, restored, strict=True):
            _check(layer, name, expected, actual, ALLOWED[self._dtype])
        # A quantised cache has scales of its own: only what attention is given is compared.
        if not layer.cache.dtype.is_floating_point:
            return
        # The engine itself writes and reads: an order of heads or elements that differs would show here.
        page = grouped_blocks(layer.cache, block_count)[min(1, block_count - 1)]
        self._write(layer, halves, slots)
        saved = page.clone()
        page.zero_()
        stored = rows.cpu().contiguous().view(torch.uint8).clone()
        self._place(layer, stored, positions, slots, nullcontext)
        _check(layer, "cache", saved, page, ALLOWED[self._dtype])
        page.zero_()

    def _pass_begins(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The proof's pass belongs to no request.
        if self._witness is not None:
            return
        # vLLM keeps the metadata of a pass in a context of the thread that runs it.
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
        """The sessions' rows of a pass, in its order. Rows without an owner or saved before have no name."""
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
        # A preempted request computes tokens again that are saved already.
        saved_count = min(count, max(0, self._ends.get(name, 0) - begin)) if name else count
        if saved_count:
            yield Slice("", begin, saved_count)
        if count > saved_count:
            self._ends[name] = begin + count
            yield Slice(name, begin + saved_count, count - saved_count)

    def _pass_ends(self, _model: nn.Module, _args: object, _output: object) -> None:
        passing, self._pass = self._pass, None
        if passing is not None:
            passing.__exit__(None, None, None)


def _attention_seen(witness: Witness, number: int, layer: AttentionLayer) -> Any:
    def hook(_attention: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) > 2 and args[1] is not None and args[2] is not None:
            key, value = layer.halves(args[1], args[2])
            witness.halves[number] = key.clone(), value.clone()

    return hook


def _nothing_seen(_attention: nn.Module, _args: object, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def _check(layer: AttentionLayer, what: str, expected: Tensor, actual: Tensor, allowed: float) -> None:
    expected, actual = expected.float(), actual.float()
    largest = float(expected.abs().max())
    error = float((expected - actual).abs().max()) / largest if largest else float(actual.abs().max())
    # Not a number is not within any bound.
    if not error <= allowed:
        problem = f"{what} restored from saved rows differs by {error:.1e} of its largest value"
        raise Refused(f"layer {layer.name}: {problem}; {allowed:.0e} is allowed: save state=blocks")


def _layers_of(
    model: nn.Module, modules: Mapping[str, Any], caches: Mapping[str, Tensor]
) -> Iterator[AttentionLayer]:
    """The model's layers in its order."""
    # torch's modules know their children and not their parents.
    parents = {child: module for module in model.modules() for child in module.children()}
    for name in sorted(caches, key=extract_layer_index):
        attention = modules[name]
        parent = block = parents.get(attention)
        while block is not None and not isinstance(parents.get(block), nn.ModuleList):
            block = parents.get(block)
        if parent is None or block is None:
            raise Refused(f"layer {name} is not in the model's list of layers: save state=blocks")
        yield AttentionLayer(name, attention, parent, block, caches[name])


def _slots_of(context: ForwardContext) -> Tensor | None:
    """Where the pass writes each token's K and V; None for a pass without a request."""
    metadata = context.attn_metadata
    if isinstance(metadata, list):
        raise Refused("passes of several micro-batches are not supported")
    first = next(iter(metadata.values()), None) if metadata else None
    return None if first is None else first.slot_mapping


def model_with(attention: nn.Module) -> nn.Module:
    """The model that an attention layer belongs to: the module with the most modules in it.

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
    # A wrapper of several models, such as one with pictures, runs the pass as a whole.
    return max(holders, key=lambda module: sum(1 for _ in module.modules()))


class KvRows(PassRows):
    """Rows of K and V of an engine whose layers each have a rotary embedding beside their attention."""

    kind = StateKind.KV

    def _listen(self) -> None:
        self._key: Tensor | None = None
        self._rotaries: dict[str, nn.Module] = {}
        for number, layer in enumerate(self._layers):
            rotary = getattr(layer.parent, "rotary_emb", None)
            if not isinstance(rotary, nn.Module):
                kind = type(layer.attention).__name__
                raise Refused(f"layer {layer.name} has no rotary embedding of its own: {kind}")
            self._rotaries[layer.name] = rotary
            layer.attention.register_forward_pre_hook(functools.partial(self._value_comes, number))
        for rotary in dict.fromkeys(self._rotaries.values()):
            rotary.register_forward_pre_hook(self._key_comes)

    def _halves(self, layer: AttentionLayer, rows: Tensor, positions: Tensor) -> Halves:
        key_size = layer.attention.num_kv_heads * layer.attention.head_size
        key = rows[:, :key_size].contiguous()
        turned = self._rotaries[layer.name](positions, key)[0]
        return layer.halves(turned, rows[:, key_size:].contiguous())

    def _key_comes(self, _rotary: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_listening and len(args) > 2 and args[2] is not None:
            # Copy K: the rotary embedding writes positions into it in place.
            self._key = args[2].clone()

    def _value_comes(self, number: int, _attention: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_listening or self._key is None:
            return
        key, self._key = self._key, None
        self._emit(number, torch.cat((key.flatten(1), args[2].flatten(1)), dim=1))
