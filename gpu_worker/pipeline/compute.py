"""Computing: rows on the device into keys and values where the engine keeps them, and layers over token ids.

Called on the computing lane alone. `Modules` runs the model's own modules, equal to the engine bit for
bit. Recomputing runs the first layers over the token ids, and nothing after them. Worst case: a prefill of
the recomputed layers, in pieces that bound the memory of activations.

Kernels do norm, projection, rotation and scatter in one pass over the rows: fused on a GPU, the reference
elsewhere. The model's own modules compute what the kernels do not know: latents, and caches that repeat
heads. `KernelWeights` takes a model's layers through its adapter once, for all restores. It finds a fused
projection's rows for K and V by splitting the weight as its output is split, without arithmetic. Kernels
round where the modules do: rows of K and V come back bit by bit, hidden states but for the order in which a
product is summed up.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.pytorch_utils import Conv1D

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import LOSSY_KINDS, packing_of
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import IncompleteRestore, ShapeMismatch, UnsupportedDtype
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import DecoderLayer
from gpu_worker.families.caches import INDEXED_LAYERS, NOTHING_LAYERS, STATE_LAYERS, index_keys, with_index
from gpu_worker.families.generation import cache_argument, is_empty, layer_input, pieces
from gpu_worker.families.norms import norm_epsilon, norm_kind, rounds_before_gain
from gpu_worker.families.positions import Rope
from gpu_worker.families.projections import (
    FusedProjection,
    Halves,
    SeparateProjection,
    is_plain_linear,
    is_unpatched,
)
from gpu_worker.forms.deltas import Chain
from gpu_worker.forms.rows import quantized, widen
from gpu_worker.kernels.kv_projection import reference as projection_reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import (
    NO_NORM,
    HeadNorm,
    Norm,
    NormKind,
    Pages,
    ProjectionWeights,
    Rotation,
    Rows,
)
from gpu_worker.kernels.rope_scatter import reference as scatter_reference
from gpu_worker.pipeline.target import LayerRoom, Target
from gpu_worker.planning.plan import Method, RestoreSchedule

log = logging.getLogger(__name__)

PIECE_TOKENS = 512
"""Tokens per forward pass; bounds activations, costs one more pass per piece."""


class _Stop(Exception):
    """Ends a forward pass at the first layer that is not wanted; no error."""


# A plan that recomputes 2 layers and the first tokens of the third:
#
#     tokens      0 ........ cut ............... T
#     layer 0     │ run      │ run              │
#     layer 1     │ run      │ run              │     needs layer 0's output of the same tokens
#     layer 2     │ run      │ rows of the store│     its first tokens hide the read of the others
#     layer 3 ..  │ rows of the store           │
#
# Tokens before `cut` pass through one layer more: two passes, both from the left, as a cache is filled.
def recompute_layers(
    adapter: Adapter,
    cache: Cache,
    token_ids: Tensor,
    positions: Tensor,
    layer_count: int,
    *,
    piece_tokens: int = PIECE_TOKENS,
) -> None:
    """Fill layers [0, layer_count) of an empty `cache` from `token_ids` [T] at `positions` [T].

    Raises ShapeMismatch unless both have T entries; on any error the cache is to be thrown away.
    """
    if token_ids.shape != positions.shape or token_ids.ndim != 1:
        raise ShapeMismatch(
            what="token ids", expected=str(list(positions.shape)), actual=str(list(token_ids.shape))
        )
    device = adapter.layers[0].device
    ids, at = token_ids.to(device).long().unsqueeze(0), positions.to(device).unsqueeze(0)
    # The second of two passes goes on from a state, which some models do by one token at a time only.
    is_first = not adapter.is_stepwise or is_empty(cache)
    for begin, end in pieces(
        len(token_ids), piece_tokens, is_stepwise=adapter.is_stepwise, is_first=is_first
    ):
        _run(adapter, cache, ids[:, begin:end], at[:, begin:end], layer_count)


def _run(adapter: Adapter, cache: Cache, ids: Tensor, positions: Tensor, layer_count: int) -> None:
    # The layer behind the last one that is wanted ends the pass; behind the model's last layer nothing does.
    stops = (
        decoder.block.register_forward_pre_hook(_stop)
        for decoder in adapter.layers[layer_count : layer_count + 1]
    )
    _until(adapter, cache, ids, positions, *stops)


def _until(adapter: Adapter, cache: Cache, ids: Tensor, positions: Tensor, *stops: RemovableHandle) -> None:
    """A pass that a hook ends; the hooks are removed."""
    try:
        with torch.no_grad():
            # Not `base(...)`: capture listens there, and recomputed tokens are not new ones.
            adapter.base.forward(
                input_ids=ids,
                use_cache=True,
                **cache_argument(adapter.base, cache),
                **_at(adapter.base, positions),
            )
    except _Stop:
        pass
    finally:
        for stop in stops:
            stop.remove()


def inputs_of(
    adapter: Adapter, token_ids: Tensor, positions: Tensor, *, piece_tokens: int = PIECE_TOKENS
) -> Iterator[tuple[int, Tensor]]:
    """Layer 0's inputs of tokens [T] at positions [T], in pieces: each one's first token, and rows [t, D].

    Rows are of the model's type, and no layer is run. For adapters that have token inputs.
    """
    block, device, inputs = adapter.layers[0].block, adapter.layers[0].device, list[Tensor]()

    # Any: a hook sees whatever the model passes to its layer.
    def take(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(layer_input(args, kwargs)[0])
        raise _Stop

    for begin in range(0, len(token_ids), piece_tokens):
        piece = slice(begin, begin + piece_tokens)
        ids, at = (part[piece].to(device).long().unsqueeze(0) for part in (token_ids, positions))
        cache = DynamicCache(config=adapter.model.config)
        # Whatever the model does ahead of its layers is done: scales, learned positions, a norm.
        _until(adapter, cache, ids, at, block.register_forward_pre_hook(take, with_kwargs=True))
        yield begin, inputs.pop().to(adapter.model.dtype)


def _at(base: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """Positions for a model that takes any; others count what their cache holds (BLOOM, MPT)."""
    # Each model is asked: a position that it does not take would be an error.
    known = inspect.signature(base.forward).parameters
    return {"position_ids": positions} if "position_ids" in known else {}


def _stop(_block: nn.Module, _args: object) -> None:
    raise _Stop


Decode = Callable[[Stream, Tensor], Tensor]
"""(stream, bytes [t, row_bytes] on the device) -> rows [t, D] of the model's type; packed rows stay."""


class Compute(Protocol):
    """One model's way from rows to its cache, for one session's positions."""

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom) -> None:
        """Rows [t, row_bytes] uint8 of tokens [begin, begin + t) into `room`.

        Raises ShapeMismatch, UnsupportedDtype.
        """
        ...

    def chain(self, layers: frozenset[int]) -> None:
        """Keep these layers' wide rows for the layer above each, which is a delta; before any is restored."""
        ...

    def recompute(self, schedule: RestoreSchedule, token_ids: Tensor, target: Target) -> None:
        """Run the layers that the schedule recomputes over `token_ids` [T], into the target."""
        ...


class Restorer:
    """Turns rows of one session into keys and values, any layer and any piece in any order.

    Holds the position tables of the whole session, shared by all layers.
    """

    def __init__(
        self, adapter: Adapter, positions: Tensor, *, standing: Mapping[int, int] | None = None
    ) -> None:
        """`positions` [T] int64: where each token of the session stands now (0..T-1 as a rule).

        `standing`: at which token the state of a layer stands in the cache already.
        """
        self._adapter = adapter
        self._positions, self._token_count = positions, len(positions)
        self._chain: Chain | None = None
        self._advanced = dict(standing or {})

    @cached_property
    def ropes(self) -> Mapping[str, Rope]:
        """Position tables, by `rope_key`. Made where they are first used: rows come meanwhile."""
        return self._adapter.ropes(self._positions)

    def chain(self, layers: frozenset[int]) -> None:
        """See Compute: these layers come in order, each whole before the one above it."""
        self._chain = Chain(layers, self._token_count, self._adapter.hidden_size)

    def layer(self, layer: int, method: Method, rows: Tensor, *, begin: int = 0) -> Halves:
        """Keys and values of one layer as the engine caches them: [1, H, t, C], [1, H, t, C_v].

        `rows` [t, row] are tokens [begin, begin + t): HIDDEN [t, D] or KV/LATENT [t, row_size] in the model's
        element type, on any device; or [t, row_bytes] uint8 of a packed kind. K rows restore bit for bit.
        HIDDEN rows restore bit for bit in the shapes they were computed in, else to rounding. Raises
        ShapeMismatch, UnsupportedDtype, InvalidArgument(field="layer" | "method").
        Source: HCache, arXiv:2410.05004, section 3.2.
        """
        self._check(layer, method, rows, begin)
        decoder = self._adapter.layers[layer]
        with torch.no_grad():
            rows = self.wide(layer, method, rows.to(decoder.device), begin)
            is_hidden = method.unpacked is Method.HIDDEN
            halves = decoder.project(rows) if is_hidden else self._adapter.unpack(rows, layer)
            # No tables: positions are in the layer's input already, in rows as they are cached, or nowhere.
            if self._adapter.rotary is None:
                return self._adapter.embed(halves, None)
            # No table: a layer that positions do not enter, beside layers that they do.
            table = self.ropes.get(decoder.rope_key)
            rope = None if table is None else table.at(begin, begin + len(rows)).to(decoder.device)
            return self._adapter.embed(halves, rope)

    def advance(self, layer: int, method: Method, rows: Tensor, cache: Cache, *, begin: int = 0) -> None:
        """Bring a layer's state in `cache` forward over its inputs [t, D], those of tokens from `begin` on.

        Tokens come in order, each once: a state that stands at another token is not one to go on from.
        Raises IncompleteRestore, ShapeMismatch, UnsupportedDtype, InvalidArgument(field="layer" | "method").
        """
        self._check(layer, method, rows, begin)
        decoder, done = self._adapter.layers[layer], self._advanced.get(layer, 0)
        if decoder.recurrence is None:
            raise InvalidArgument(field="layer", problem=f"{layer} keeps no state")
        # Two books of one fact: the cache's own mark, and how far this restore has come. A cache that
        # somebody else filled, or reset, differs from it.
        if begin != done or cache.has_previous_state(layer) != (done > 0):
            raise IncompleteRestore(layer=layer, row_count=done, token_count=begin)
        with torch.no_grad():
            wide = self.wide(layer, method, rows.to(decoder.device), begin)
            decoder.recurrence.advance(decoder.normed(wide), cache)
        self._advanced[layer] = begin + len(rows)

    def base(self, token_ids: Tensor, rows: Tensor, begin: int) -> None:
        """Keep layer 0's inputs [t, D] of tokens [t] from `begin` on as the base of layer 1's deltas."""
        if self._chain is not None:
            self._chain.take_inputs(token_ids, rows, begin)

    def _check(self, layer: int, method: Method, rows: Tensor, begin: int) -> None:
        adapter = self._adapter
        if not 0 <= layer < len(adapter.layers):
            raise InvalidArgument(field="layer", problem=f"{layer} is not within [0, {len(adapter.layers)})")
        size = None if method is Method.TOKENS else adapter.element_count(method.kind, layer)
        if size is None:
            problem = f"{method.value} rows cannot be restored for {adapter.architecture}"
            raise InvalidArgument(field="method", problem=problem)
        # Packed rows are checked by their bytes here, and by their marks and places when they are made wide.
        dtype = adapter.model.dtype if method.is_exact else torch.uint8
        width = size if method.is_exact else packing_of(method.kind).row_bytes(size)
        what = f"layer {layer} {method.value} rows at token {begin}"
        room = self._token_count - begin
        if rows.ndim != 2 or rows.shape[1] != width or begin < 0 or len(rows) > room:
            expected = f"[up to {max(room, 0)}, {width}]"
            raise ShapeMismatch(what=what, expected=expected, actual=str(list(rows.shape)))
        if rows.dtype != dtype:
            raise UnsupportedDtype(what=what, expected=str(dtype), actual=str(rows.dtype))

    def wide(self, layer: int, method: Method, rows: Tensor, begin: int) -> Tensor:
        """Rows of tokens from `begin` on as the model has them. Raises ShapeMismatch, BaseMismatch."""
        if method.is_delta or self.is_chained(layer):
            # A delta without a chain has no base: the empty chain refuses it by name.
            chain = self._chain or Chain(frozenset(), self._token_count, self._adapter.hidden_size)
            return chain.wide(layer, method.kind, rows, begin).to(self._adapter.model.dtype)
        size = None if method.is_exact else self._adapter.element_count(method.kind, layer)
        return rows if size is None else widen(rows, method.kind, size, self._adapter.model.dtype)

    def is_chained(self, layer: int) -> bool:
        """Whether a layer's wide rows are needed by the one above."""
        return self._chain is not None and layer in self._chain.layers


class Modules:
    """The model's own modules."""

    def __init__(
        self,
        adapter: Adapter,
        positions: Tensor,
        *,
        decode: Decode | None = None,
        standing: Mapping[int, int] | None = None,
    ) -> None:
        """`positions` [T] int64; `decode` for rows that are stored otherwise than the model computes.

        `standing`: see Restorer.
        """
        self._adapter, self._positions = adapter, positions
        self.restorer = Restorer(adapter, positions, standing=standing)
        self._standing = dict(standing or {})
        # Packed rows stay bytes: the restorer makes them wide.
        self._decode = decode or (
            lambda stream, data: data if stream.kind in LOSSY_KINDS else data.view(adapter.model.dtype)
        )

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom) -> None:
        """See Compute."""
        rows = self._decode(Stream(layer, method.kind), data)
        decoder = self._adapter.layers[layer]
        if decoder.recurrence is not None:
            if room.cache is None:
                raise InvalidArgument(field="cache", problem=f"has no room for the state of layer {layer}")
            # A layer with both; its state is a snapshot's of 512 tokens, the batch tokens 448 to 704:
            #
            #     rows     448 ....... 512 ............... 704
            #     state    has these   │ advance over these
            #     K, V     all of them: a snapshot has no rows
            #
            # A layer with a state alone is read from 512 on (`first_token`): nothing of its rows is known.
            known = max(self._standing.get(layer, 0) - begin, 0) if decoder.has_rows else 0
            if known < len(rows):
                self.restorer.advance(layer, method, rows[known:], room.cache, begin=begin + known)
        if not decoder.has_rows:
            return
        keys, values = self.restorer.layer(layer, method, rows, begin=begin)
        room.put(keys[0].transpose(0, 1), values[0].transpose(0, 1))

    def chain(self, layers: frozenset[int]) -> None:
        """See Compute."""
        self.restorer.chain(layers)

    def recompute(self, schedule: RestoreSchedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        if schedule.is_on_tokens:
            self._embed(token_ids, target)
            return
        scratch = target.scratch()
        is_apart = scratch is None
        cache = DynamicCache(config=self._adapter.model.config) if scratch is None else scratch
        cut, count = schedule.recomputed_tokens, schedule.recomputed_layers
        # Rows are put into such a cache by whole layers, and only
        # where the layer holds nothing yet (`CacheTarget.finish`).
        if cut and not is_apart:
            raise InvalidArgument(
                field="plan", problem="this cache takes no layer of which a part is recomputed"
            )
        recompute_layers(self._adapter, cache, token_ids[:cut], self._positions[:cut], count + 1)
        recompute_layers(self._adapter, cache, token_ids[cut:], self._positions[cut:], count)
        for layer in range(count + (cut > 0)) if is_apart else ():
            _take(cache, layer, cut if layer == count else schedule.token_count, target)

    def _embed(self, token_ids: Tensor, target: Target) -> None:
        """Layer 0 out of its inputs, which stay for the deltas of layer 1; no layer is run."""
        if not self._adapter.has_token_inputs:
            problem = f"layer 0's input of {self._adapter.architecture} does not follow from token ids alone"
            raise InvalidArgument(field="plan", problem=problem)
        for begin, rows in inputs_of(self._adapter, token_ids, self._positions):
            end = begin + len(rows)
            keys, values = self.restorer.layer(0, Method.HIDDEN, rows, begin=begin)
            target.room(0, begin, end).put(keys[0].transpose(0, 1), values[0].transpose(0, 1))
            # Called behind `restorer.layer`, which takes rows for stored ones: deltas are marked with ids.
            self.restorer.base(token_ids[begin:end], rows, begin)


def _take(cache: Cache, layer: int, end: int, target: Target) -> None:
    """Copy what a cache holds of tokens before `end` into the target; a window keeps the last ones only."""
    held = cache.layers[layer]
    if isinstance(held, NOTHING_LAYERS):
        return
    if isinstance(held, STATE_LAYERS):
        # A state of the first tokens cannot be joined with rows
        # behind them here: they come by the store's inputs.
        if end != target.token_count:
            raise InvalidArgument(field="plan", problem=f"a part of layer {layer}, which keeps a state")
        target.adopt(layer, held)
        return
    if not isinstance(held, CacheLayerMixin) or held.keys is None or held.values is None:
        raise IncompleteRestore(layer=layer, row_count=0, token_count=end)
    keys, values = held.keys[0].transpose(0, 1), held.values[0].transpose(0, 1)
    index = index_keys(held) if isinstance(held, INDEXED_LAYERS) else None
    if index is not None:
        # Rooms of such layers have index keys behind the values, as rows have.
        values = with_index(values, index[0])
    # held of a window:            [ end - len(keys) ......... end )
    # wanted by the target: [ first_token ..................... )
    # A cache of windows has only the last tokens; what it does not have, the next token does not see.
    begin = max(target.first_token(layer), end - len(keys))
    if begin < end:
        target.room(layer, begin, end).put(keys[begin - end :], values[begin - end :])


# -- by kernels --------------------------------------------------------------------------------------


_ONE_PLUS_WEIGHT = "rmsnorm+1"


class KernelWeights:
    """A model's weights as kernels take them, by layer. One thread at a time."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._known: dict[int, LayerWeights | None] = {}

    def of(self, layer: int) -> LayerWeights | None:
        """One layer's norm and projections.

        None where the kernels have no such projection: latents, adapters, packed weights.
        """
        if layer not in self._known:
            self._known[layer] = self._made(layer)
        return self._known[layer]

    def _made(self, layer: int) -> LayerWeights | None:
        decoder = self.adapter.layers[layer]
        projection = decoder.projection
        if not _is_known(decoder):
            return None
        norm = self._norm(decoder.norm)
        if isinstance(projection, SeparateProjection):
            return LayerWeights(
                norm,
                _linear(projection.k_proj, projection.key.head_count),
                _linear(projection.v_proj, projection.value.head_count),
                self._head_norm(projection.k_norm),
            )
        if isinstance(projection, FusedProjection):
            return LayerWeights(norm, *_split(projection, self.adapter))
        return None

    def _norm(self, norm: nn.Module | None) -> Norm:
        if norm is None:
            return NO_NORM
        if isinstance(norm, nn.LayerNorm):
            return Norm(NormKind.LAYER, norm.eps, norm.weight, norm.bias)
        # `_is_known` has tried the module: it computes what these two numbers say.
        return Norm(NormKind.RMS, norm_epsilon(norm), _gain(norm))

    def _head_norm(self, norm: nn.Module | None) -> HeadNorm | None:
        return None if norm is None else HeadNorm(_gain(norm), norm_epsilon(norm))


def _gain(norm: nn.Module) -> Tensor:
    """The gain of a norm; float32 where the module rounds once, behind it (see `Norm`)."""
    weight: Tensor = norm.weight  # type: ignore[assignment]  # transformers does not type its norms
    # Gemma stores w of 1 + w. The sum is made in float32: in bfloat16 small gains would be lost beside 1.
    if norm_kind(norm) == _ONE_PLUS_WEIGHT:
        return weight.float() + 1
    return weight if rounds_before_gain(norm) else weight.float()


def _is_known(decoder: DecoderLayer) -> bool:
    """Whether weights are all there is to know of a layer's projections and norms."""
    projection = decoder.projection
    if isinstance(projection, SeparateProjection):
        # Kernels norm each head of K by itself, and multiply by nothing but weights.
        if projection.is_normed_whole or projection.is_scaled or decoder.recurrence is not None:
            return False
        linear, norms = [projection.k_proj, projection.v_proj], [decoder.norm, projection.k_norm]
    elif isinstance(projection, FusedProjection):
        linear, norms = [projection.qkv], [decoder.norm]
    else:
        return False
    return all(map(is_plain_linear, linear)) and all(map(_is_known_norm, norms))


def _is_known_norm(norm: nn.Module | None) -> bool:
    if norm is None or (isinstance(norm, nn.LayerNorm) and is_unpatched(norm)):
        return True
    return norm_kind(norm) in ("rmsnorm", _ONE_PLUS_WEIGHT)


def _linear(linear: nn.Module, head_count: int) -> ProjectionWeights:
    weight: Tensor = linear.weight  # type: ignore[assignment]  # a plain linear layer, as `_is_known` says
    if isinstance(linear, Conv1D):
        # Conv1D keeps [D, out]; a square weight does not show it.
        weight = weight.detach().T.contiguous()
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return ProjectionWeights(weight, head_count, bias)


def _split(projection: FusedProjection, adapter: Adapter) -> tuple[ProjectionWeights, ProjectionWeights]:
    # The weight's rows go through the same `split` as its output's columns, whichever layout that is:
    #
    #     Linear  weight [out, D]  ──T──► [D, out] ── split ──► K [D, H, C], V [D, H, C] ──► [H * C, D] each
    #     Conv1D  weight [D, out]  ────────┘
    weight: Tensor = projection.qkv.weight  # type: ignore[assignment]
    bias: Tensor | None = projection.qkv.bias  # type: ignore[assignment]
    # The module's output for unit vectors, one row for each input: [1, D, out].
    units = weight if isinstance(projection.qkv, Conv1D) else weight.T
    columns = projection.split(units.detach().unsqueeze(0))
    biases = (None, None) if bias is None else projection.split(bias.detach().view(1, 1, -1))
    halves = zip(columns, biases, (adapter.key, adapter.value), strict=True)
    first, second = (
        ProjectionWeights(
            half.flatten(1).T.contiguous(),
            shape.head_count,
            None if own is None else own.flatten().contiguous(),
        )
        for half, own, shape in halves
    )
    return first, second


Project = Callable[[Rows, LayerWeights, Rotation | None, Pages], None]
Scatter = Callable[[Rows, Rotation | None, Pages], None]


class Kernels:
    """One session's positions on one model's kernel weights."""

    def __init__(
        self,
        weights: KernelWeights,
        positions: Tensor,
        *,
        is_fused: bool | None = None,
        standing: Mapping[int, int] | None = None,
    ) -> None:
        """`is_fused`: by Triton; by default where the model is on a GPU. `standing`: see Restorer."""
        adapter = self._adapter = weights.adapter
        self._weights, self._modules = weights, Modules(adapter, positions, standing=standing)
        # Asked once: a model looks for it among its parameters.
        self._dtype = adapter.model.dtype
        wants_fused = adapter.layers[0].device.type == "cuda" if is_fused is None else is_fused
        self._project, self._scatter = _fused() if wants_fused else _reference()

    @cached_property
    def _rotations(self) -> Mapping[str, Rotation]:
        return {key: _rotation(rope) for key, rope in self._modules.restorer.ropes.items()}

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom) -> None:
        """See Compute."""
        is_hidden = method.unpacked is Method.HIDDEN
        weights = self._weights.of(layer) if is_hidden else None
        # A layer without weights here may keep a state, which the modules bring forward.
        if not self._fits(room) or (is_hidden and weights is None):
            self._modules.restore(layer, method, data, begin, room)
            return
        rows, rotation = (
            self._rows(layer, method, data, begin),
            self._rotation_at(layer, begin, begin + len(data)),
        )
        if weights is not None:
            self._project(rows, weights, rotation, room.pages)
        else:
            self._scatter(rows, rotation, room.pages)

    def chain(self, layers: frozenset[int]) -> None:
        """See Compute."""
        self._modules.chain(layers)

    def recompute(self, schedule: RestoreSchedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        self._modules.recompute(schedule, token_ids, target)

    def _fits(self, room: LayerRoom) -> bool:
        adapter = self._adapter
        # MLA's row is no K and V, and pairs in another order would be turned wrongly, without an error.
        if adapter.kind is not StateKind.KV or not adapter.is_half_split:
            return False
        caches = ((room.pages.keys, adapter.key), (room.pages.values, adapter.value))
        return all(tuple(cache.shape[2:]) == (half.head_count, half.head_size) for cache, half in caches)

    def _rows(self, layer: int, method: Method, data: Tensor, begin: int) -> Rows:
        adapter, restorer = self._adapter, self._modules.restorer
        # Deltas are added before the kernels: they need the layer below as float32, which no kernel keeps.
        if method.is_delta or restorer.is_chained(layer):
            stored = data.view(self._dtype) if method.is_exact else data
            return restorer.wide(layer, method, stored, begin)
        if method.is_exact:
            return data.view(self._dtype)
        size = adapter.element_count(method.kind, layer) or 0
        # Views of the packed bytes. Kernels make them wide: in registers, or once in memory (long runs).
        return quantized(data, method.kind, size)

    def _rotation_at(self, layer: int, begin: int, end: int) -> Rotation | None:
        whole = self._rotations.get(self._adapter.layers[layer].rope_key)
        return None if whole is None else Rotation(whole.cos[begin:end], whole.sin[begin:end], whole.pairing)


def compute_for(
    adapter: Adapter,
    weights: KernelWeights,
    positions: Tensor,
    *,
    standing: Mapping[int, int] | None = None,
) -> Compute:
    """Kernels on a GPU; the model's own modules elsewhere, which are the engine's bit for bit."""
    if adapter.layers[0].device.type == "cuda":
        return Kernels(weights, positions, standing=standing)
    return Modules(adapter, positions, standing=standing)


def _rotation(rope: Rope) -> Rotation:
    """Tables [1, T, R], whose halves are alike -> [T, R/2]."""
    # transformers lays each angle out twice, for both halves; kernels read it once.
    half = rope.cos.shape[-1] // 2
    with torch.no_grad():
        return Rotation(rope.cos[0, :, :half].contiguous(), rope.sin[0, :, :half].contiguous())


def _reference() -> tuple[Project, Scatter]:
    return projection_reference.kv_projection, scatter_reference.rope_scatter


def _fused() -> tuple[Project, Scatter]:
    # Triton is there only where it is used.
    from gpu_worker.kernels.kv_projection import fused as projection  # noqa: PLC0415
    from gpu_worker.kernels.rope_scatter import fused as scatter  # noqa: PLC0415

    return projection.kv_projection, scatter.rope_scatter
