"""Detection: a model's layers by what its modules are, not by what its family is called.

A layer's attention is its one module with K and V projections: apart, fused with Q, or compressed (MLA).
Its norm, its head layout and how positions enter K are few choices; a module's looks leave some open.
`candidates` gives the adapters that could be right, the likeliest first; `proof.py` says which one is. Knows
transformers' names of modules and settings. Worst case: a model of none of these ways, which has no candidate
but its cache as it is.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, cat, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ctxcache.format.streams import StateKind
from gpu_worker.families.adapter import Adapter, DecoderLayer, refuse
from gpu_worker.families.caches import (
    INDEXED_LAYERS,
    NOTHING_LAYERS,
    STATE_LAYERS,
    AsCached,
    CacheTap,
    Recurrence,
    cache_classes,
)
from gpu_worker.families.norms import norm_name
from gpu_worker.families.positions import (
    NO_ROPE,
    ONE_ROPE,
    Embed,
    Rope,
    check_rope,
    embed_rotated,
    one_table,
    rope_name,
    rotate,
    rotate_interleaved,
    table_per_type,
)
from gpu_worker.families.projections import (
    FusedProjection,
    HalfShape,
    Halves,
    LatentProjection,
    NoRows,
    Projection,
    SeparateProjection,
)

# How K and V lie in the output of a fused projection, H query and G KV heads of C dimensions:
#
#     by kind    [ Q of all H heads | K of all G heads | V of all G heads ]
#     by head    [ Q ... Q K V | Q ... Q K V | ... ]      one group per KV head, H / G queries in each
#
# A name does not tell for sure: both are tried, the likelier first, and the proof decides.
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "W_pack", "att_proj")
_BY_HEAD = ("query_key_value",)
"""Fused projections that lay K and V out head by head; the others have all of Q, of K, of V."""
_LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm")
_NORMS = (
    "ln_attn",
    "input_layernorm",
    "input_norm",
    "ln_1",
    "norm_1",
    "norm1",
    "self_attn_layer_norm",
    "attention_norm",
    "attention_layernorm",
    "pre_attention_layernorm",
    "operator_norm",
    "norm",
)
_K_NORMS = ("k_norm", "key_layernorm", "k_layernorm", "key_norm")
_KNOWN_CACHES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *cache_classes("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
    *NOTHING_LAYERS,
    *INDEXED_LAYERS,
)
_CACHE_NAMES = ("cache_params", "past_key_values")
_HEADS_KNOWN_TO_KERNELS = "halves"

Any_ = Any
"""transformers types submodules as Tensor | Module, their attributes and settings not at all."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a model's layers are."""

    base: nn.Module
    blocks: tuple[nn.Module, ...]
    windows: tuple[int | None, ...]
    has_rows: tuple[bool, ...]
    """Which layers keep keys and values."""
    recurrences: tuple[Recurrence | None, ...]
    """Which layers keep a state, and how it goes on."""


def anatomy(model: PreTrainedModel) -> Anatomy:
    """The layers of a model that keeps K and V, or recurrent state. Raises UnsupportedArchitecture."""
    config: Any_ = model.config.get_text_config(decoder=True)
    # The configuration has parts beside text: rows of pictures do not follow from token ids.
    if config is not model.config:
        raise refuse(model, "it takes more than text")
    if getattr(config, "add_cross_attention", False) or getattr(config, "is_encoder_decoder", False):
        raise refuse(model, "cross-attention is not supported")
    count = int(config.num_hidden_layers)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # A list within another list's layers (experts of a block, say) may have as many entries by chance.
    outer = [
        (name, module) for name, module in lists if not any(name.startswith(f"{of}.") for of, _ in lists)
    ]
    # A list within a list of another length has a number in its name.
    outer = [found for found in outer if not any(part.isdigit() for part in found[0].split("."))]
    # Two lists of one length (an encoder beside a decoder) leave open which one is cached.
    if len(outer) != 1:
        raise refuse(model, f"it has {len(outer)} lists of {count} layers, not one")
    name, blocks = outer[0]
    path = name.rpartition(".")[0]
    # Recomputation gives the base token ids: a stack that takes embedded ones alone (BERT's) is a part of it.
    while path and "input_ids" not in signature(model.get_submodule(path).forward).parameters:
        path = path.rpartition(".")[0]
    base = model.get_submodule(path)
    caches = _caches(model, count)
    return Anatomy(
        base,
        tuple(blocks),
        tuple(getattr(held, "sliding_window", None) for held in caches),
        tuple(isinstance(held, CacheLayerMixin) for held in caches),
        tuple(
            _recurrence(model, layer, block, has_rows=isinstance(held, CacheLayerMixin))
            if isinstance(held, STATE_LAYERS)
            else None
            for layer, (block, held) in enumerate(zip(blocks, caches, strict=True))
        ),
    )


def _caches(model: PreTrainedModel, count: int) -> list[object]:
    """The cache layer of each layer, as transformers sets it up."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refuse(model, f"its cache is not known: {' '.join(str(error).split())[:120]}") from error
    if layers and len(layers) != count:
        raise refuse(model, f"its cache has {len(layers)} layers for its {count}")
    for layer, held in enumerate(layers):
        # The exact class: a subclass may keep more, and what is not known would not be restored.
        if type(held) not in _KNOWN_CACHES:
            problem = f"layer {layer} keeps more than keys and values of tokens ({type(held).__name__})"
            raise refuse(model, problem)
    # Where all layers are alike, transformers' cache makes them as they come.
    return list(layers) or [DynamicLayer.__new__(DynamicLayer)] * count


def _recurrence(model: PreTrainedModel, layer: int, block: nn.Module, *, has_rows: bool) -> Recurrence:
    """The block's one module that takes a cache; attention does not count beside keys and values."""
    takers = [
        (child, name)
        for child in block.children()
        # A layer with both takes the cache twice: attention for its rows, the mixer for its state.
        if not (has_rows and _is_attention(child))
        for name in _CACHE_NAMES
        if name in signature(child.forward).parameters
    ]
    if len(takers) != 1:
        # None takes a cache: the state lies in the modules themselves, out of reach (Griffin).
        kept = f"{len(takers)} of its modules take a cache" if takers else "no module of it takes a cache"
        raise refuse(model, f"layer {layer} keeps a state, and {kept}")
    return Recurrence(_for_state(takers[0][0]), layer, takers[0][1])


def _for_state(mixer: nn.Module) -> nn.Module:
    """The mixer with the same weights and without its last projection, which no state needs."""
    # A shallow copy: the same tensors, another table of submodules. The model's own mixer stays whole.
    lean = copy.copy(mixer)
    if isinstance(getattr(mixer, "out_proj", None), nn.Module):
        lean._modules = {**mixer._modules, "out_proj": nn.Identity()}  # noqa: SLF001  torch has no other way
    return lean


# -- what is known without running the model -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embedding:
    """One way in which positions enter rows."""

    name: str
    embed: Embed


def candidates(model: PreTrainedModel, anatomy: Anatomy) -> Iterator[Adapter]:
    """Adapters whose rows are from before positions, the likeliest first. None: no such way is known.

    Raises UnsupportedArchitecture for rotary angles that depend on a session's length.
    """
    check_rope(model)
    _check_angles(model, anatomy.base)
    if not any(anatomy.has_rows):
        yield from _without_rows(model, anatomy)
        return
    attentions = [
        _attention(block) for block, has in zip(anatomy.blocks, anatomy.has_rows, strict=True) if has
    ]
    # One layer that is not understood refuses the way for all: a plan may ask any layer for its rows.
    if any(attention is None for attention in attentions):
        return
    known = [attention for attention in attentions if attention is not None]
    config: Any_ = model.config
    # Order of the trials, the likeliest first; each is a whole adapter that `proof.py` runs:
    #
    #     norm before attention, or none
    #       └─ projection: apart (K's norm before or behind the transpose), fused (two layouts), latent
    #            └─ positions: by halves, by the model's own function, on a part; all layers, or some bare
    # Clipped values look like any other until they are large, so that no trial would show them.
    if any(getattr(of, "clip_qkv", None) is not None for of in (config, *known)):
        return
    for norms in _norms(anatomy.blocks):
        for projections, key, value in _projections(model, known):
            scaled = iter(_scaled(anatomy, projections))
            whole = [next(scaled) if has else NoRows() for has in anatomy.has_rows]
            yield from _positioned(model, anatomy, known, norms, whole, key, value)


def _scaled(anatomy: Anatomy, projections: Sequence[Projection]) -> Iterator[Projection]:
    """Projections with the scales that their blocks and attentions have."""
    blocks = (block for block, has in zip(anatomy.blocks, anatomy.has_rows, strict=True) if has)
    for block, projection in zip(blocks, projections, strict=True):
        if isinstance(projection, SeparateProjection):
            scales = (
                float(getattr(block, "attention_in_multiplier", None) or 1.0),
                float(getattr(_attention(block), "key_multiplier", None) or 1.0),
            )
            yield replace(projection, input_scale=scales[0], key_scale=scales[1])
        else:
            yield projection


def _without_rows(model: PreTrainedModel, anatomy: Anatomy) -> Iterator[Adapter]:
    """A model whose layers all keep states alone: layer inputs are what it comes back from."""
    # Rows of no elements: `refused` keeps anybody from asking for them.
    nothing = HalfShape(0, 0)
    for norms in _norms(anatomy.blocks):
        yield Adapter(
            model=model,
            base=anatomy.base,
            layers=tuple(
                DecoderLayer(block, norm, NoRows(), NO_ROPE, None, recurrence)
                for block, norm, recurrence in zip(anatomy.blocks, norms, anatomy.recurrences, strict=True)
            ),
            kind=StateKind.KV,
            key=nothing,
            value=nothing,
            embed_halves=embed_rotated(),
            rotary=None,
            norm_name=norm_name(norms[0]),
            rope_name="none",
            is_half_split=False,
            refused={StateKind.KV: "no layer keeps keys and values"},
        )


def as_cached(
    model: PreTrainedModel,
    anatomy: Anatomy,
    halves: Mapping[int, tuple[HalfShape, HalfShape]],
    index_sizes: Mapping[int, int],
) -> Adapter:
    """The adapter of a model of which only the cache is known: rows do not move.

    `halves`: of each layer that keeps rows; `index_sizes`: of those that keep index keys in them. Raises
    UnsupportedArchitecture for a layer that keeps a state beside such rows.
    """
    tap = CacheTap(anatomy.base, index_sizes)
    key, value = next(iter(halves.values()))
    differ = len(set(halves.values())) > 1
    for layer, (has_rows, recurrence) in enumerate(zip(anatomy.has_rows, anatomy.recurrences, strict=True)):
        # The rows could be kept, but the state needs layer
        # inputs, and nothing leads from those to these rows.
        if has_rows and recurrence is not None:
            raise refuse(model, f"layer {layer} keeps a state beside keys and values that are not understood")
    norms = next(_norms(anatomy.blocks))
    return Adapter(
        model=model,
        base=anatomy.base,
        layers=tuple(
            DecoderLayer(
                block,
                None,
                AsCached(tap, layer),
                NO_ROPE,
                window,
                halves=halves[layer] if differ else None,
                index_size=index_sizes.get(layer, 0),
            )
            if layer in halves
            else DecoderLayer(block, norm, NoRows(), NO_ROPE, None, recurrence)
            for layer, (block, norm, window, recurrence) in enumerate(
                zip(anatomy.blocks, norms, anatomy.windows, anatomy.recurrences, strict=True)
            )
        ),
        kind=StateKind.KV_AS_CACHED,
        key=key,
        value=value,
        embed_halves=embed_rotated(),
        rotary=None,
        norm_name="as cached",
        rope_name=rope_name(model, "as cached"),
        is_half_split=False,
        refused={StateKind.HIDDEN: "no way from a layer's input to its keys and values was found"},
    )


def _check_angles(model: PreTrainedModel, base: nn.Module) -> None:
    """Refuse rotary modules whose angles at a position change with the positions beside it."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None or "position_ids" not in signature(rotary.forward).parameters:
        return
    # Tables by type of layer come from settings, which `check_rope` has seen.
    if "layer_type" in signature(rotary.forward).parameters:
        return
    # A copy is tried: such a module may keep what it saw.
    rotary = copy.deepcopy(rotary)
    device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
    if device.type == "meta":
        return
    example = torch.empty(0, dtype=torch.float32, device=device)
    # Far beyond the model's length: schemes that stretch with the session begin to do so at its end.
    far = 8 * int(getattr(model.config, "max_position_embeddings", 0) or 4096)
    with torch.no_grad():
        near_table = rotary.forward(example, torch.tensor([[0, 1, 2]], device=device))
        far_table = rotary.forward(example, torch.tensor([[0, 1, 2, far]], device=device))
    for near, wide in zip(_tables(near_table), _tables(far_table), strict=True):
        # Compared bit by bit: the same angles computed by the same code have no reason to differ.
        if not torch.equal(near, wide[:, : near.shape[1]]):
            raise refuse(model, "its rotary angles depend on the session's length")


def _tables(found: Any_) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _attention(block: nn.Module) -> nn.Module | None:
    """The block's one module with K and V projections."""
    attentions = [module for _, module in block.named_modules() if _is_attention(module)]
    # A block with cross-attention has two: nothing says which one the cache is of.
    return attentions[0] if len(attentions) == 1 else None


def _is_attention(module: nn.Module) -> bool:
    children = {name for name, child in module.named_children() if child is not None}
    return (
        {"k_proj", "v_proj"} <= children
        or {"key", "value"} <= children
        or set(_LATENT) <= children
        or bool(children & set(_FUSED))
    )


def _norms(blocks: Sequence[nn.Module]) -> Iterator[list[nn.Module | None]]:
    """The norm before attention; none where the block norms behind it (OLMo 2, some OPT)."""
    known = [
        next((child for name in _NORMS if isinstance(child := getattr(block, name, None), nn.Module)), None)
        for block in blocks
    ]
    nothing: list[nn.Module | None] = [None] * len(blocks)
    is_before = all(getattr(block, "do_layer_norm_before", True) for block in blocks)
    # Both are tried: a flag may say something else than the code does, and proofs are cheap.
    yield from (known, nothing) if is_before else (nothing, known)


def _projections(
    model: PreTrainedModel, attentions: Sequence[nn.Module]
) -> Iterator[tuple[list[Projection], HalfShape, HalfShape]]:
    first: Any_ = attentions[0]
    config: Any_ = model.config
    if all(hasattr(first, name) for name in _LATENT):
        # One head each: all query heads read the same latent and the same rotary part.
        latent = HalfShape(1, int(config.kv_lora_rank))
        rotary = HalfShape(1, int(config.qk_rope_head_dim))
        yield [_latent(attention, latent, rotary) for attention in attentions], latent, rotary
        return
    head_size = _head_size(config, first)
    if not head_size:
        return
    if hasattr(first, "k_proj"):
        head_count = _width(first.k_proj) // head_size
        if not head_count or _width(first.v_proj) % head_count:
            return
        key, value = (
            HalfShape(head_count, head_size),
            HalfShape(head_count, _width(first.v_proj) // head_count),
        )
        # Where K is normed, hooks see [1, T, H, C] or [1, H, T, C]. Both reshape to heads without an error,
        # one of them with tokens mixed up.
        for heads_first in (False, True):
            separate = [_separate(attention, key, value, heads_first=heads_first) for attention in attentions]
            yield list(separate), key, value
            if all(each.k_norm is None for each in separate):
                return
        return
    yield from _fused(config, attentions, head_size)


def _fused(
    config: Any_, attentions: Sequence[nn.Module], head_size: int
) -> Iterator[tuple[list[Projection], HalfShape, HalfShape]]:
    name = next((name for name in _FUSED if hasattr(attentions[0], name)), "")
    # Projections of other names (BERT's `key` and `value`): rows are known as they are cached.
    if not name:
        return
    query_count = int(config.num_attention_heads)
    head_count, rest = divmod(_width(getattr(attentions[0], name)) - query_count * head_size, 2 * head_size)
    if rest or head_count <= 0:
        return
    half = HalfShape(head_count, head_size)
    # Falcon's name is `query_key_value` for both layouts: multi-query models have K and V behind all of Q.
    ways = [_by_head, _by_kind] if name in _BY_HEAD else [_by_kind, _by_head]
    # With one KV head both layouts are [Q ... Q K V]: the second trial would be the first again.
    if head_count == 1 and query_count > 1:
        ways = [_by_kind]
    for way in ways:
        yield [FusedProjection(getattr(attention, name), way(half)) for attention in attentions], half, half


def _head_size(config: Any_, attention: Any_) -> int:
    for owner, name in ((attention, "head_dim"), (attention, "head_size"), (config, "head_dim")):
        if isinstance(size := getattr(owner, name, None), int) and size:
            return size
    return int(config.hidden_size) // int(config.num_attention_heads)


def _width(linear: Any_) -> int:
    if hasattr(linear, "out_features"):
        return int(linear.out_features)
    # An adapter's wrapper has the linear layer within; Conv1D calls its width `nf`.
    own: Any_ = getattr(linear, "base_layer", linear)
    return int(getattr(own, "out_features", 0) or getattr(own, "nf", 0) or own.weight.shape[-1])


def _separate(attention: Any_, key: HalfShape, value: HalfShape, *, heads_first: bool) -> SeparateProjection:
    norm: Any_ = next(
        (found for name in _K_NORMS if (found := getattr(attention, name, None)) is not None), None
    )
    weight = getattr(norm, "weight", None)
    # A norm as wide as all heads together is over the whole row (OLMo 2), one of C over each head.
    is_whole = isinstance(weight, Tensor) and weight.ndim == 1 and weight.numel() == key.size != key.head_size
    return SeparateProjection(
        k_proj=attention.k_proj,
        v_proj=attention.v_proj,
        key=key,
        value=value,
        k_norm=norm,
        is_normed_heads_first=heads_first and not is_whole,
        is_normed_whole=is_whole,
    )


def _latent(attention: Any_, latent: HalfShape, rotary: HalfShape) -> LatentProjection:
    return LatentProjection(attention.kv_a_proj_with_mqa, attention.kv_a_layernorm, latent, rotary)


def _by_head(half: HalfShape) -> Callable[[Tensor], Halves]:
    # Queries of a group come first in it, then one K and one V; a group may be one head.
    def split(out: Tensor) -> Halves:
        groups = out.reshape(out.shape[-2], half.head_count, -1, half.head_size)
        # [T, G, H / G + 2, C]: queries, then K, then V, of each group.
        return groups[:, :, -2], groups[:, :, -1]

    return split


def _by_kind(half: HalfShape) -> Callable[[Tensor], Halves]:
    def split(out: Tensor) -> Halves:
        # Counted from the end: the width of Q does not matter then.
        return half.heads(out[..., -2 * half.size : -half.size]), half.heads(out[..., -half.size :])

    return split


# -- positions -----------------------------------------------------------------------------------------


def _positioned(
    model: PreTrainedModel,
    anatomy: Anatomy,
    attentions: Sequence[nn.Module],
    norms: Sequence[nn.Module | None],
    projections: Sequence[Projection],
    key: HalfShape,
    value: HalfShape,
) -> Iterator[Adapter]:
    """Adapters by how positions enter K."""
    config: Any_ = model.config
    is_latent = any(isinstance(projection, LatentProjection) for projection in projections)
    kind = StateKind.LATENT if is_latent else StateKind.KV
    has_own_rows = any(
        has and recurrence is None
        for has, recurrence in zip(anatomy.has_rows, anatomy.recurrences, strict=True)
    )
    rotary = getattr(anatomy.base, "rotary_emb", None)
    tables = _rotary_of(rotary, config)
    group_count = int(config.num_attention_heads) // key.head_count
    # Falcon repeats KV heads before it caches them; rows are kept without the copies.
    repeats = group_count if getattr(config, "new_decoder_architecture", False) else 1

    def made(way: Embedding, keys: Sequence[str], name: str, *, is_rotated: bool) -> Adapter:
        return Adapter(
            model=model,
            base=anatomy.base,
            layers=tuple(
                DecoderLayer(block, norm, projection, rope_key, window, recurrence)
                for block, norm, projection, rope_key, window, recurrence in zip(
                    anatomy.blocks,
                    norms,
                    projections,
                    keys,
                    anatomy.windows,
                    anatomy.recurrences,
                    strict=True,
                )
            ),
            kind=kind,
            key=key,
            value=value,
            embed_halves=way.embed,
            rotary=tables if is_rotated else None,
            norm_name=norm_name(norms[0]),
            rope_name=name,
            is_half_split=way.name == _HEADS_KNOWN_TO_KERNELS,
            refused={} if has_own_rows else {kind: "its layers keep states beside their keys and values"},
        )

    unrotated = Embedding(_HEADS_KNOWN_TO_KERNELS, embed_rotated(repeats))
    nothing = [NO_ROPE] * len(norms)
    if tables is None:
        # Positions enter at the embedding, so that K of a layer needs no turning, and rows do not move.
        if rotary is None and not is_latent and _has_learned_positions(model):
            yield made(unrotated, nothing, f"learned {config.max_position_embeddings}", is_rotated=False)
        elif rotary is None and not is_latent and any(anatomy.recurrences):
            # States know the order of tokens: such models have no positions (Jamba).
            yield made(unrotated, nothing, "none", is_rotated=False)
        return
    keys = _rope_keys(rotary, config, len(norms))
    # The model's own function comes last: by halves is what the kernels know, and most models pass it.
    ways = _latent_ways(config) if is_latent else _key_ways(attentions[0], repeats)
    for way in ways:
        # The way enters the fingerprint, but for the common one:
        # an engine that takes another finds other sessions.
        extra = (way.name,) if is_latent or way.name != _HEADS_KNOWN_TO_KERNELS else ()
        yield made(way, keys, rope_name(model, *extra), is_rotated=True)
        some_bare = iter(_unrotated_layers(config, attentions))
        bare = [has and next(some_bare) for has in anatomy.has_rows]
        if any(bare):
            some = [NO_ROPE if is_bare else rope_key for is_bare, rope_key in zip(bare, keys, strict=True)]
            named = f"without {','.join(str(layer) for layer, is_bare in enumerate(bare) if is_bare)}"
            yield made(way, some, rope_name(model, *extra, named), is_rotated=True)


def _has_learned_positions(model: PreTrainedModel) -> bool:
    """Whether positions enter at the embedding: ALiBi and the like are relative, and are not this."""
    tables = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings")
    ]
    return bool(tables) and bool(getattr(model.config, "max_position_embeddings", 0))


def _rotary_of(
    rotary: nn.Module | None, config: Any_
) -> Callable[[Tensor, Tensor], Mapping[str, Rope]] | None:
    if rotary is None:
        return None
    names = signature(rotary.forward).parameters
    if "layer_type" in names:
        return table_per_type(rotary, config.layer_types)
    return one_table(rotary) if "position_ids" in names else None


def _rope_keys(rotary: Any_, config: Any_, count: int) -> list[str]:
    has_types = "layer_type" in signature(rotary.forward).parameters
    return list(config.layer_types) if has_types else [ONE_ROPE] * count


def _unrotated_layers(config: Any_, attentions: Sequence[Any_]) -> list[bool]:
    """Layers that may take no positions: by a flag of theirs, or those that see everything beside windows."""
    flags = [getattr(attention, "use_rope", None) for attention in attentions]
    # Llama 4 and SmolLM3 mark each layer; Cohere 2 has positions in sliding layers alone.
    if None not in flags:
        return [not flag for flag in flags]
    types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in types and len(types) == len(attentions):
        return [kind == "full_attention" for kind in types]
    return [False] * len(attentions)


def _latent_ways(config: Any_) -> list[Embedding]:
    ways = [Embedding("interleaved", _embed_interleaved), Embedding("halves", _embed_latent)]
    return ways if getattr(config, "rope_interleave", True) else ways[::-1]


def _embed_latent(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
    return first, second if rope is None else rotate(second, rope)


def _embed_interleaved(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
    return first, second if rope is None else rotate_interleaved(second, rope)


def _key_ways(attention: nn.Module, repeats: int) -> list[Embedding]:
    """How angles turn K: by halves, or by the module's own function, on all of K or its first part."""
    ways = [Embedding(_HEADS_KNOWN_TO_KERNELS, embed_rotated(repeats))]
    # Model files of transformers define the function beside the attention that uses it.
    own = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    if own is not None:
        ways += [
            Embedding("own", _embed_own(own, is_part=False)),
            Embedding("own part", _embed_own(own, is_part=True)),
        ]
    return ways


def _embed_own(own: Callable[..., Any_], *, is_part: bool) -> Embed:
    def embed(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
        if rope is None or not first.shape[2]:
            return first, second
        size = rope.cos.shape[-1] if is_part else first.shape[-1]
        part = first[..., :size]
        # K in Q's place too: the function wants both, and the second result is K.
        turned: Tensor = own(part, part, rope.cos, rope.sin)[1]
        return (turned if size == first.shape[-1] else cat((turned, first[..., size:]), dim=-1)), second

    return embed


def without(adapter: Adapter, kind: StateKind, reason: str) -> Adapter:
    """The adapter of a model whose proof a kind did not pass."""
    return replace(adapter, refused={**adapter.refused, kind: reason})
