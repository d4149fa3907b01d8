"""Proof: three tokens saved, dropped, restored and compared, on the loaded model, for each kind of state.

A pass of two tokens and a step of one are captured. Each kind's rows must give back the cache that was kept,
within the rounding of the model's type, and the next token's logits with it. The first
candidate that gives back K and V from its rows is the adapter, one that does so from layer inputs too before
others. Without a candidate, K and V are kept as they are cached. A model that did not pass is not served.

Worst case: five passes of a few tokens for each candidate, at each description of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.errors import CacheError
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.adapter import Adapter, refuse
from gpu_worker.families.caches import (
    INDEXED_LAYERS,
    STATE_LAYERS,
    Recurrence,
    StateTensor,
    index_keys,
    states_in,
)
from gpu_worker.families.detection import Anatomy, anatomy, as_cached, candidates, without
from gpu_worker.families.generation import Capture, count_positions, run_pass
from gpu_worker.families.projections import HalfShape
from gpu_worker.forms.snapshots import Snapshot
from gpu_worker.pipeline.compute import Modules, inputs_of, recompute_layers
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method

# The comparison, for each candidate and kind:
#
#     pass of 2 tokens, step of 1     with hooks: rows [3, row] of each layer, and the cache `own`
#     the same without hooks          the cache `kept`; own must equal it bit by bit
#     rows ──restore──► `restored`    must equal own within the type's rounding, keys, values and states
#     one more token on each          logits of both must be equal within rounding
#
# Two tokens and one: a pass and a step take different ways through models, and positions must go on. Before
# any candidate, the same three tokens go through in one pass: rows must not depend on how turns were cut.
TOKEN_COUNT = 3
_ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The largest difference over the largest value: sums of another order, in the type's own steps."""
_ROW_ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""The largest difference of keys and values out of their own rows: two steps, nothing is summed."""
_WAY_ROUNDING = {torch.float32: 1e-3, torch.float16: 1.5e-2, torch.bfloat16: 1e-1}
"""The median difference over the median value of passes that are cut otherwise, as probes have it."""
_LIKE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, CacheError)
"""Errors of a model's own code for a candidate that does not fit it."""

Cached = list[dict[str, Tensor]]
"""The tensors of each layer by name: keys and values [1, H, T, C], states of any shape."""


def check_whole(model: PreTrainedModel) -> None:
    """Raise UnsupportedArchitecture for what wraps a model."""
    if not isinstance(model, PreTrainedModel):
        problem = "it wraps a model: hand over the one in it, which peft's get_base_model() returns"
        raise UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)


def adapt(model: PreTrainedModel) -> Adapter:
    """Describe `model` for capture and restore, by what it proves where all of it is in memory.

    Elsewhere the likeliest candidate is returned, not proven. The fingerprint names the way: compare it with
    that of an engine that proved it. Raises UnsupportedArchitecture with the reason.
    """
    check_whole(model)
    try:
        return _adapted(model)
    except CacheError:
        raise
    except Exception as error:
        # Its modules are foreign code: whatever that raises, the model is not served, and the reason is told.
        raise refuse(model, f"it cannot be described: {_line(error)}") from error


def _adapted(model: PreTrainedModel) -> Adapter:
    parts = anatomy(model)
    if _is_loaded(model):
        # An engine may have torch make tensors on its GPU (`torch.set_default_device`); passes and probes
        # here name a device where they need one, and compare on the host.
        with _resting(model), torch.device("cpu"):
            proven = _proven(model, parts)
            _check_recomputed(proven)
            return proven
    if any(parts.recurrences) or not all(parts.has_rows):
        raise refuse(model, "its layers without keys and values are not proven, as it is not loaded")
    adapter = next(_trials(model, parts), "no projections of K and V were found")
    if isinstance(adapter, str):
        raise refuse(model, f"it is not loaded, and its cache does not say how it comes about ({adapter})")
    return adapter


def _trials(model: PreTrainedModel, parts: Anatomy) -> Iterator[Adapter | str]:
    """Adapters that may be right. Where modules are not as expected, the last item says why."""
    try:
        yield from candidates(model, parts)
    except CacheError:
        raise
    except _LIKE as error:
        yield f"its modules are not understood: {_line(error)}"


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """Switch modules from training to use: what drops out would differ from pass to pass."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _proven(model: PreTrainedModel, parts: Anatomy) -> Adapter:
    # The cache is kept before any hook is there: capture must not change what the model computes.
    kept = _kept(model)
    if any(parts.recurrences):
        parts = _going_on(model, parts)
        # The pass is made once more: by now it has the positions that recurrences need.
        kept = _kept(model)
    _check_cut(model, kept)
    reasons = "no projections of K and V were found"
    rows_alone: Adapter | None = None
    for adapter in _trials(model, parts):
        if isinstance(adapter, str):
            reasons = adapter
            continue
        has_own_rows = adapter.kind not in adapter.refused
        # Rows are compared first: a candidate whose rows do not come back
        # has misread the projection, and inputs would fail too.
        problem = difference(adapter, adapter.kind, kept) if has_own_rows else ""
        if problem:
            reasons = problem
            continue
        hidden = difference(adapter, StateKind.HIDDEN, kept)
        if not hidden:
            return _with_snapshots(adapter) if adapter.is_recurrent else _with_inputs(adapter)
        if has_own_rows and not adapter.is_recurrent:
            # The first such candidate is kept: a later one may come back from inputs too, and is better.
            rows_alone = rows_alone or without(adapter, StateKind.HIDDEN, hidden)
        reasons = hidden
    if rows_alone is not None:
        return rows_alone
    if not any(parts.has_rows):
        raise refuse(model, f"its states do not come back ({reasons})")
    return _as_cached(model, parts, kept, reasons)


def _as_cached(model: PreTrainedModel, parts: Anatomy, kept: Cached, reasons: str) -> Adapter:
    """The adapter that keeps rows as they are cached. Raises UnsupportedArchitecture with the reason."""
    rows = {layer: held for layer, held in enumerate(kept) if parts.has_rows[layer]}
    index_sizes = {layer: held["index"].shape[2] for layer, held in rows.items() if "index" in held}
    # An index key is one per token: behind several heads it would be repeated or be cut up.
    if any(kept[layer]["values"].shape[1] != 1 for layer in index_sizes):
        raise refuse(model, f"index keys beside several heads of values are not known ({reasons})")
    halves = {layer: (_half(held["keys"]), _half(held["values"])) for layer, held in rows.items()}
    for layer, size in index_sizes.items():
        key, value = halves[layer]
        halves[layer] = key, HalfShape(1, value.size + size)
    adapter = as_cached(model, parts, halves, index_sizes)
    problem = difference(adapter, adapter.kind, kept)
    if problem:
        raise refuse(model, f"its keys and values do not come back as they are cached: {problem}")
    return adapter


def _going_on(model: PreTrainedModel, parts: Anatomy) -> Anatomy:
    """How states go on: by several tokens at a time, or by one. Raises UnsupportedArchitecture."""
    # Passes over four tokens, whose last logits must be those of one pass:
    #
    #     2 + 2      the second pass of two tokens goes on from a state: not stepwise
    #     2 + 1 + 1  one token at a time: stepwise (Jamba in transformers 5.23 begins anew otherwise)
    #     again      both with positions, as `generate` gives them: without, Bamba counts each pass from 0
    ids = [*token_ids(model), token_ids(model)[0]]
    count_positions(model, is_counting_anew=False)
    whole = run(model, DynamicCache(config=model.config), ids)
    together, stepwise = (False, (ids[:2], ids[2:])), (True, (ids[:2], ids[2:3], ids[3:]))
    ways = [(is_counting, *way) for is_counting in (False, True) for way in (together, stepwise)]
    for is_counting_anew, is_stepwise, passes in ways:
        if is_counting_anew and not _takes_positions(model, parts):
            continue
        count_positions(model, is_counting_anew=is_counting_anew)
        cache = DynamicCache(config=model.config)
        logits = [run(model, cache, part) for part in passes][-1]
        if not _far("logits", logits, whole, _ROUNDING[model.dtype]):
            known = (
                each and replace(each, is_stepwise=is_stepwise, states=_described(each, cache))
                for each in parts.recurrences
            )
            return replace(parts, recurrences=tuple(known))
    count_positions(model, is_counting_anew=False)
    raise refuse(model, "its states do not go on from one pass to the next")


def _takes_positions(model: PreTrainedModel, parts: Anatomy) -> bool:
    return any(parts.has_rows) and "position_ids" in signature(model.forward).parameters


def _described(recurrence: Recurrence, cache: DynamicCache) -> tuple[StateTensor, ...]:
    held = states_in(cache.layers[recurrence.layer])
    return tuple(StateTensor(name, tuple(one.shape), one.dtype) for name, one in held.items())


def _is_loaded(model: nn.Module) -> bool:
    # A model with tensors on `meta` cannot run.
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def difference(adapter: Adapter, kind: StateKind, kept: Cached | None = None) -> str:
    """Why rows of `kind` do not give back the adapter's cache; empty where they do."""
    try:
        rows, own = _saved(adapter, kind)
        restored = _restored(adapter, kind, rows)
        kinds = [adapter.kind_of(layer, kind) for layer in range(len(adapter.layers))]
        bounds = [
            (_ROUNDING if each is StateKind.HIDDEN else _ROW_ROUNDING)[adapter.model.dtype] for each in kinds
        ]
        problem = _unequal(contents(restored), contents(own), bounds)
        # Bit by bit: these are the same passes of the same model, with hooks and without.
        problem = problem or (kept and _unequal(contents(own), kept, [0.0] * len(kept))) or ""
        if problem:
            return problem
        nexts = [_next_logits(adapter.model, cache) for cache in (restored, own)]
    except _LIKE as error:
        return _line(error)
    return _far("logits", nexts[0], nexts[1], _ROUNDING[adapter.model.dtype])


def _with_snapshots(adapter: Adapter) -> Adapter:
    """The adapter, and why if states at two tokens and the rows behind do not give those at three."""
    try:
        cache = DynamicCache(config=adapter.model.config)
        run(adapter.model, cache, token_ids(adapter.model)[:2])
        snapshot = Snapshot.of(adapter, cache, 2)
        rows, own = _saved(adapter, StateKind.HIDDEN)
        restored = _restored(adapter, StateKind.HIDDEN, rows, snapshot)
        bounds = [_ROUNDING[adapter.model.dtype]] * len(adapter.layers)
        problem = _unequal(contents(restored), contents(own), bounds)
        nexts = [_next_logits(adapter.model, cache) for cache in (restored, own)]
        problem = problem or _far("logits", nexts[0], nexts[1], _ROUNDING[adapter.model.dtype])
    except _LIKE as error:
        problem = _line(error)
    return replace(adapter, snapshot_problem=problem)


def _with_inputs(adapter: Adapter) -> Adapter:
    """The adapter, with whether token ids by themselves give layer 0's inputs in passes."""
    ids, positions = torch.tensor(token_ids(adapter.model)), torch.arange(TOKEN_COUNT)
    # Rows that may be moved are deltas to the same inputs elsewhere.
    positions += TOKEN_COUNT * adapter.is_relocatable
    seen: list[Tensor] = []
    cache = DynamicCache(config=adapter.model.config)
    try:
        with Capture(adapter, [Stream(0, StateKind.HIDDEN)], lambda *given: seen.append(given[2].clone())):
            for part in (ids[:2], ids[2:]):
                run(adapter.model, cache, part.tolist())
        # Tokens are cut otherwise than in the passes, the last first, so that each has other neighbours.
        alone = [dict(inputs_of(adapter, ids[at], positions[at]))[0] for at in (slice(1, 3), slice(0, 1))]
        problem = _far(
            "inputs", torch.cat(alone[::-1]).cpu(), torch.cat(seen), _ROW_ROUNDING[adapter.model.dtype]
        )
    except _LIKE as error:
        problem = str(error) or type(error).__name__
    return replace(adapter, has_token_inputs=not problem)


def _saved(adapter: Adapter, kind: StateKind) -> tuple[list[Tensor], DynamicCache]:
    """Rows [3, row] of each layer as capture sees them, in two tokens and one; and the cache that is kept.

    A layer that keeps nothing has no rows.
    """
    kinds = [adapter.kind_of(layer, kind) for layer in range(len(adapter.layers))]
    streams = [Stream(layer, each) for layer, each in enumerate(kinds) if each is not None]
    pieces: list[list[Tensor]] = [[] for _ in adapter.layers]
    cache = DynamicCache(config=adapter.model.config)
    ids = token_ids(adapter.model)
    with Capture(adapter, streams, lambda layer, _, rows: pieces[layer].append(rows.clone())):
        for part in (ids[:2], ids[2:]):
            run(adapter.model, cache, part)
    # A module that runs twice in a pass, or not at all, would give rows of wrong tokens later.
    if any(len(pieces[stream.layer]) != 2 for stream in streams):
        raise ValueError("rows of a layer are not seen once in each pass")
    return [torch.cat(found) if found else torch.empty(0) for found in pieces], cache


def _restored(
    adapter: Adapter, kind: StateKind, rows: list[Tensor], snapshot: Snapshot | None = None
) -> DynamicCache:
    target = CacheTarget(adapter, TOKEN_COUNT, snapshot=snapshot)
    modules = Modules(adapter, torch.arange(TOKEN_COUNT), standing=target.standing)
    for layer, layer_rows in enumerate(rows):
        own_kind = adapter.kind_of(layer, kind)
        if own_kind is None:
            continue
        # A window that is shorter than the three tokens has dropped the first ones.
        method, first = Method[own_kind.name], target.first_token(layer)
        # A state has to go on: it is restored in two pieces.
        cuts = (first, 2, TOKEN_COUNT) if adapter.layers[layer].recurrence else (first, TOKEN_COUNT)
        for begin, end in pairwise(sorted(set(cuts))):
            data = layer_rows[begin:end].contiguous().view(torch.uint8)
            modules.restore(layer, method, data, begin, target.room(layer, begin, end))
        target.finish(layer)
    cache = target.cache
    if not isinstance(cache, DynamicCache):
        raise TypeError("a restored cache is of another class")
    return cache


def token_ids(model: PreTrainedModel) -> list[int]:
    """Three different tokens of any vocabulary."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    return [number % vocabulary for number in (vocabulary // 2 + 1, vocabulary // 3 + 2, vocabulary - 1)]


def contents(cache: DynamicCache) -> Cached:
    """The contents of each layer. Raises ValueError for a layer that lacks something."""
    layers: Cached = []
    for layer, held in enumerate(cache.layers):
        halves = {"keys": held.keys, "values": held.values} if isinstance(held, CacheLayerMixin) else {}
        if any(half is None for half in halves.values()):
            raise ValueError(f"layer {layer} of the cache holds no keys and values")
        states = states_in(held) if isinstance(held, STATE_LAYERS) else {}
        if isinstance(held, STATE_LAYERS) and not states:
            raise ValueError(f"layer {layer} of the cache holds no state")
        index = {"index": index_keys(held)} if isinstance(held, INDEXED_LAYERS) else {}
        layers.append({name: one for name, one in {**halves, **states, **index}.items() if one is not None})
    return layers


def _kept(model: PreTrainedModel) -> Cached:
    """The model's cache of the three tokens, with no hook in place."""
    ids = token_ids(model)
    kept = _contents_of(model, (ids[:2], ids[2:]))
    for layer, held in enumerate(kept):
        for half in (held[name] for name in ("keys", "values") if name in held):
            if half.ndim != 4 or half.shape[0] != 1 or not 0 < half.shape[2] <= TOKEN_COUNT:
                raise refuse(model, f"layer {layer} caches {list(half.shape)}, not a row for each token")
            if half.dtype is not model.dtype:
                raise refuse(model, f"layer {layer} caches {half.dtype}, the model is {model.dtype}")
    return kept


def _contents_of(model: PreTrainedModel, passes: Sequence[list[int]]) -> Cached:
    """The cache behind some passes. Raises UnsupportedArchitecture where one fails."""
    cache = DynamicCache(config=model.config)
    try:
        for part in passes:
            run(model, cache, part)
        # The contents are copied: a step writes into states.
        return [{name: one.clone() for name, one in held.items()} for held in contents(cache)]
    except _LIKE as error:
        raise refuse(model, f"passes over three tokens fail: {_line(error)}") from error


def _check_cut(model: PreTrainedModel, kept: Cached) -> None:
    """Raise UnsupportedArchitecture where one pass of three tokens leaves another cache than two passes."""
    whole = _contents_of(model, (token_ids(model),))
    problem = _unequal(whole, kept, [_WAY_ROUNDING[model.dtype]] * len(kept), far=_mostly_far)
    if problem:
        raise refuse(model, f"its rows depend on how passes are cut, one of three tokens or two: {problem}")


def _check_recomputed(adapter: Adapter) -> None:
    """Raise UnsupportedArchitecture where token ids at their positions give another cache than passes do."""
    model = adapter.model
    ids, positions, cache = token_ids(model), torch.arange(TOKEN_COUNT), DynamicCache(config=model.config)
    try:
        recompute_layers(adapter, cache, torch.tensor(ids), positions, len(adapter.layers))
        recomputed = contents(cache)
    except _LIKE as error:
        raise refuse(model, f"its layers do not come back from token ids: {_line(error)}") from error
    # A model may count positions its own way unless it is told (RoBERTa's begin behind the padding's).
    bounds = [_WAY_ROUNDING[model.dtype]] * len(recomputed)
    problem = _unequal(recomputed, _contents_of(model, (ids,)), bounds, far=_mostly_far)
    if problem:
        raise refuse(model, f"its layers do not come back from token ids: {problem}")


def run(model: PreTrainedModel, cache: DynamicCache, ids: list[int]) -> Tensor:
    """Logits [V] behind the last of some tokens, which the cache takes."""
    return run_pass(model, cache, ids)


def _next_logits(model: PreTrainedModel, cache: DynamicCache) -> Tensor:
    return run(model, cache, token_ids(model)[:1])


def _half(half: Tensor) -> HalfShape:
    return HalfShape(half.shape[1], half.shape[3])


Far = Callable[[str, Tensor, Tensor, float], str]
"""(what, mine, theirs, bound) -> how they differ by more than the bound; empty where they do not."""


def _mostly_far(what: str, mine: Tensor, theirs: Tensor, bound: float) -> str:
    if mine.shape != theirs.shape:
        return _far(what, mine, theirs, bound)
    # Medians are compared: sums of another order round otherwise, more so with every layer, and may send one
    # token to another expert. Where tokens see those behind them, most elements differ.
    scale = float(theirs.float().abs().median())
    distance = float((mine.float() - theirs.float()).abs().median())
    return "" if distance <= bound * scale else f"most {what} differ by {distance / (scale or 1.0):.1e}"


def _far(what: str, mine: Tensor, theirs: Tensor, bound: float) -> str:
    if mine.shape != theirs.shape:
        return f"{what} have shape {list(mine.shape)}, not {list(theirs.shape)}"
    # Relative to the largest value: small elements carry the rounding of large sums.
    scale = float(theirs.float().abs().max())
    distance = float((mine.float() - theirs.float()).abs().max())
    return "" if distance <= bound * scale else f"{what} differ by {distance / (scale or 1.0):.1e}"


def _unequal(cached: Cached, kept: Cached, bounds: Sequence[float], *, far: Far = _far) -> str:
    if len(cached) != len(kept):
        return f"{len(cached)} layers of a cache of {len(kept)}"
    for layer, (mine, theirs, bound) in enumerate(zip(cached, kept, bounds, strict=True)):
        if mine.keys() != theirs.keys():
            return f"layer {layer} holds {sorted(mine)}, not {sorted(theirs)}"
        for name, kept_one in theirs.items():
            problem = far(f"{name} of layer {layer}", mine[name], kept_one, bound)
            if problem:
                return problem
    return ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
