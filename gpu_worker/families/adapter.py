"""Adapters: one model's layers, positions and row shapes in a family-independent form.

Knows torch modules and transformers' configuration and cache classes, not the store. Has what several
families share: sliding windows, position tables, canonical names of settings, and rotary embedding
exactly as transformers applies it, on K alone. The angles come from the model's own rotary module;
another order of operations would break bit equality. An adapter holds references into the model and
nothing of its own.

A projection is how a layer turns its normed input into the two halves of a row, and how to watch it: K then V
(or, for MLA, latent then rotary part), before positions. Modules are called through `forward`, so that hooks
which capture new tokens do not see restored ones. A fused projection also computes Q and throws it away (1.5x
the work for as many KV heads as query heads).

Worst case: a model that is edited after its adapter was built; build the adapter again. A position scheme
whose angles change with the session's length is refused, because restored keys would not be those first
computed.
"""

import copy
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, cat, mul, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.configuration_utils import PreTrainedConfig

from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture

# By their names: importing a family's module only to compare its class would load it in every worker.
_LINEAR = (
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
)
_TENSORS = (Tensor, nn.Parameter)


def cache_classes(*names: str) -> tuple[type, ...]:
    """Transformers' classes of one layer's cache, those that this version has: older ones have fewer."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


STATE_LAYERS = cache_classes("LinearAttentionCacheLayerMixin")
"""Caches of layers that keep recurrent or convolution state."""
NOTHING_LAYERS = cache_classes("DummyLayer")
"""Caches of layers that keep nothing: they read others' keys and values, or attend to nothing."""
INDEXED_LAYERS = cache_classes("DynamicIndexedLayer")
"""Caches of layers that keep an index key of each token beside its keys and values (DeepSeek V3.2)."""
# The shapes of a layer's state on its way, where [H, C] and [H_v, C_v] are the two HalfShapes:
#
#     hidden  [T, D]              the layer's input, saved as HIDDEN
#        │ normed
#     x       [1, T, D]           what attention takes
#        │ projection
#     halves  [T, H, C]           K before positions  │  MLA: the latent, H = 1
#             [T, H_v, C_v]       V                   │       the rotary part, H_v = 1
#        │ pack: one row [T, H * C + H_v * C_v], saved as KV or LATENT; unpack is a view
#        │ embed: positions turn K (MLA: the rotary part)
#     cache   [1, H, T, C], [1, H_v, T, C_v]      as transformers keeps it
#
# Rows are from before positions: a session that loses its first tokens is moved by other angles alone.
Halves = tuple[Tensor, Tensor]
Emit = Callable[[Tensor, Tensor], None]
"""Takes the halves of the tokens a pass brought: [T, H, C], [T, H, C_v]."""


@dataclass(frozen=True, slots=True)
class HalfShape:
    """Heads and dimensions per head of one half of a row."""

    head_count: int
    head_size: int

    @property
    def size(self) -> int:
        """Elements of this half."""
        return self.head_count * self.head_size

    def heads(self, flat: Tensor) -> Tensor:
        """[..., H*C] -> [T, H, C], a view where possible."""
        return flat.reshape(-1, self.head_count, self.head_size)


class Handle(Protocol):
    """The handle that ends a watch."""

    def remove(self) -> None:
        """End it."""
        ...


class Projection(Protocol):
    """From a layer's normed input to the halves of a row, in restore and in capture."""

    def project(self, normed: Tensor) -> Halves:
        """Normed [1, T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        ...

    def watch(self, emit: Emit) -> Sequence[Handle]:
        """Attach hooks that call `emit` once per forward pass of the layer; remove them to stop."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateProjection:
    """K and V each have a linear layer; K may be normed before positions.

    Each head by itself (Qwen3, Gemma3), or all heads as one row (OLMo 2).
    """

    k_proj: nn.Module
    v_proj: nn.Module
    key: HalfShape
    value: HalfShape
    k_norm: nn.Module | None = None
    is_normed_heads_first: bool = False
    """Gemma3 norms [1, H, T, C], Qwen3 [1, T, H, C]: each norms over C alone, only hooks differ."""
    is_normed_whole: bool = False
    """OLMo 2 norms [1, T, H * C]."""
    input_scale: float = 1.0
    key_scale: float = 1.0
    """Falcon-H1 multiplies what goes in, and K before positions."""

    @property
    def is_scaled(self) -> bool:
        """Whether there is more to K and V than weights."""
        return (self.input_scale, self.key_scale) != (1.0, 1.0)

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        if self.is_scaled:
            normed = normed * self.input_scale
        # `forward`, not a call: a call runs hooks, and those
        # that capture new tokens would save restored ones again.
        k, v = self.k_proj.forward(normed), self.value.heads(self.v_proj.forward(normed))
        if self.is_scaled:
            k = k * self.key_scale
        if self.k_norm is None:
            return self.key.heads(k), v
        if self.is_normed_whole:
            return self.key.heads(self.k_norm.forward(k)), v
        return self.k_norm.forward(self.key.heads(k)), v

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        join = _Join(emit)
        # Behind the norm of K: rows keep what positions are
        # applied to, so that a restore from rows norms nothing.
        last = self.k_proj if self.k_norm is None else self.k_norm
        return [
            _on_output(last, lambda out: join.first(self._heads_of_key(out))),
            _on_output(self.v_proj, lambda out: join.second(self.value.heads(out))),
        ]

    def _heads_of_key(self, out: Tensor) -> Tensor:
        # The scale comes behind `k_proj` in the model's code, so
        # that no module's output has it: it is repeated here.
        heads = self.key.heads(out.transpose(1, 2) if self.is_normed_heads_first else out)
        return heads * self.key_scale if self.is_scaled else heads


@dataclass(frozen=True, slots=True)
class FusedProjection:
    """One linear layer yields Q, K and V; `split` takes K and V out of its output [1, T, ...]."""

    qkv: nn.Module
    split: Callable[[Tensor], Halves]

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        return self.split(self.qkv.forward(normed))

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        return [_on_output(self.qkv, lambda out: emit(*self.split(out)))]


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """MLA: one linear layer yields latent and rotary part; the latent is normed (DeepSeek-V3)."""

    kv_a: nn.Module
    kv_a_norm: nn.Module
    latent: HalfShape
    rotary: HalfShape

    def project(self, normed: Tensor) -> Halves:
        """See Projection."""
        out = self.kv_a.forward(normed)
        # One linear layer's output: [latent | rotary part]. Only the
        # latent is normed; the rotary part is shared by all heads.
        return self.latent.heads(self.kv_a_norm.forward(out[..., : self.latent.size])), self._rotary_of(out)

    def watch(self, emit: Emit) -> list[RemovableHandle]:
        """See Projection."""
        join = _Join(emit)
        return [
            _on_output(self.kv_a_norm, lambda out: join.first(self.latent.heads(out))),
            _on_output(self.kv_a, lambda out: join.second(self._rotary_of(out))),
        ]

    def _rotary_of(self, out: Tensor) -> Tensor:
        return self.rotary.heads(out[..., self.latent.size :])


@dataclass(frozen=True, slots=True)
class NoRows:
    """A layer that keeps no row of a token: recurrent and convolution state only, or nothing at all."""

    def project(self, normed: Tensor) -> Halves:
        """There are no halves. Raises UnsupportedArchitecture."""
        del normed
        raise UnsupportedArchitecture(architecture="a layer", problem="it keeps no keys and values")

    def watch(self, emit: Emit) -> "Sequence[Handle]":
        """Nothing is ever emitted."""
        del emit
        return []


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
    """The tensors of a cache's layer that keeps a state, none where it has none yet. Views.

    Any: the class differs by version of transformers.
    """
    states: dict[str, Tensor] = {}
    for number in range(held.number_of_states):
        for name, kept in (("convolution", held.conv_states), ("recurrent", held.recurrent_states)):
            if kept[number] is not None:
                states[f"{name} {number}"] = kept[number]
    return states


def put_states(held: Any, states: States, device: torch.device) -> None:
    """Have a cache's layer, which has no state, go on from a copy of `states`. Any: as above."""
    for name, tensor in states.items():
        role, _, number = name.partition(" ")
        put = held.update_conv_state if role == "convolution" else held.update_recurrent_state
        put(tensor.to(device), state_idx=int(number))
        # transformers 5.23 sets the mark with a convolution
        # state only. Without it a mixer begins from zeros again.
        held.has_previous_state[int(number)] = True


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How a layer's recurrent and convolution state goes on: its mixer, run over the layer's normed inputs.

    Nothing else of the layer is run: no attention, no experts. The state is the engine's own, in its cache.
    """

    mixer: nn.Module
    layer: int
    cache_name: str
    """The mixer's name for the cache."""
    is_stepwise: bool = False
    """Whether only one token at a time goes on from a state (Jamba); all at once from none."""
    states: tuple[StateTensor, ...] = ()
    """The tensors of its state, as the model's own pass left them."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the layer's state."""
        return sum(state.size_bytes for state in self.states)

    def advance(self, normed: Tensor, cache: Cache) -> None:
        """Bring the layer's state in `cache` forward by tokens [1, T, D]."""
        # From no state every mixer takes a whole run at once: only going on is stepwise.
        is_first = not cache.has_previous_state(self.layer)
        pieces = (normed,) if is_first or not self.is_stepwise else torch.split(normed, 1, dim=1)
        for piece in pieces:
            self.mixer.forward(piece, **{self.cache_name: cache})


class CacheTap:
    """Watches what one model's passes put into their cache. Shared by all layers of an adapter.

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
                # Hooks only while somebody watches: an idle tap costs a pass nothing.
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
            # A watch may end within a pass, whose cache is wrapped still.
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
    found: Tensor | None = held.indexer_keys
    return found


def with_index(values: Tensor, index: Tensor) -> Tensor:
    """Values [T, 1, C_v] and index keys [T, I] as one half of a row, [T, 1, C_v + I]."""
    return cat((values, index.unsqueeze(1)), dim=-1)


# [1, H, T, C] -> [T, H, C], a view.
def _tokens_first(half: Tensor) -> Tensor:
    return without_gradient(half)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class AsCached:
    """K and V as a layer caches them, positions and all: nothing is known of how they come about."""

    tap: CacheTap
    layer: int

    def project(self, normed: Tensor) -> Halves:
        """Nothing leads from a layer's input to its rows. Raises UnsupportedArchitecture."""
        del normed
        raise UnsupportedArchitecture(
            architecture=f"layer {self.layer}",
            problem="its keys and values are known as they are cached only",
        )

    def watch(self, emit: Emit) -> "Sequence[Handle]":
        """See Projection."""
        return [self.tap.watch(self.layer, emit)]


class _Join:
    """Waits for both halves of one pass, in either order, then emits them."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._halves: list[Tensor | None] = [None, None]

    def first(self, half: Tensor) -> None:
        self._put(0, half)

    def second(self, half: Tensor) -> None:
        self._put(1, half)

    def _put(self, index: int, half: Tensor) -> None:
        self._halves[index] = half
        first, second = self._halves
        if first is not None and second is not None:
            self._halves = [None, None]
            self._emit(first, second)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes what `weight` and `bias` say: no adapter, packed weight, other method."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    # Exact types: packed weights of torchao and bitsandbytes are subclasses of Parameter with other bytes.
    is_known = kind in _LINEAR and type(getattr(module, "weight", None)) in _TENSORS
    return is_known and is_unpatched(module)


def is_unpatched(module: nn.Module) -> bool:
    """Whether a module's own class says how it computes."""
    # A method that was put on the object goes before that of its class.
    return "forward" not in module.__dict__


def without_gradient(tensor: Tensor) -> Tensor:
    """The tensor, detached where it has to be: as a rule there is no gradient, and asking is cheaper."""
    return tensor.detach() if tensor.requires_grad else tensor


def _on_output(module: nn.Module, take: Callable[[Tensor], None]) -> RemovableHandle:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        take(without_gradient(output))

    return module.register_forward_hook(hook)


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosine and sine of each position: [1, T, R] in the model's element type, R rotated dimensions."""

    cos: Tensor
    sin: Tensor

    def at(self, begin: int, end: int) -> "Rope":
        """The positions of rows [begin, end)."""
        return Rope(self.cos[:, begin:end], self.sin[:, begin:end])

    def to(self, device: object) -> "Rope":
        """The same on `device`."""
        return Rope(self.cos.to(device), self.sin.to(device))  # type: ignore[call-overload]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R of C dimensions of x, pairing i with i + R/2.

    Shapes: x [1, H, T, C] -> the same. Source: RoFormer, arXiv:2104.09864, in the half-split form
    of `apply_rotary_pos_emb`; dimensions from R on pass unchanged (GPT-NeoX, Phi-3).
    """
    cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
    size = cos.shape[-1]
    turned = _turn(x[..., :size], cos, sin)
    return turned if size == x.shape[-1] else cat((turned, x[..., size:]), dim=-1)


def rotate_interleaved(x: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of x and lay the result out half-split.

    Shapes: x [1, H, T, R] -> the same. Source: `apply_rotary_pos_emb_interleave` of DeepSeek-V3.
    """
    half = rope.cos.shape[-1] // 2
    cos, sin = rope.cos[..., :half].unsqueeze(1), rope.sin[..., :half].unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn by the angles: x * cos + (-second half, first half) * sin.

    Rounds after the same steps as transformers, with half the passes over fresh memory.
    """
    half = x.shape[-1] // 2
    # out = x * cos + rotated(x) * sin, where rotated(x) = [-x2 | x1] of x = [x1 | x2]:
    #
    #     out[first half]  = x1 * cos - x2 * sin
    #     out[second half] = x2 * cos + x1 * sin
    #
    # Products are rounded before the sum, as in transformers: fused, the last bit would differ. `crossed`
    # serves both halves: fresh memory is slow (30 layers, 2,048 tokens: 80.2 -> 62.0 ms).
    out = x * cos
    crossed = x[..., half:] * sin[..., :half]
    out[..., :half].sub_(crossed)
    mul(x[..., :half], sin[..., half:], out=crossed)
    out[..., half:].add_(crossed)
    return out


Halves_ = tuple["HalfShape", "HalfShape"]
Embed = Callable[[Tensor, Tensor, Rope | None], Halves]
"""Halves [1, H, T, C], [1, H, T, C_v] before positions -> the engine's keys and values."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer: where its input arrives, and the way from it to the engine's cache."""

    block: nn.Module
    norm: nn.Module | None
    projection: Projection
    rope_key: str
    """Which of the model's position tables this layer uses; layers of one type share one."""
    window: int | None
    """Tokens a sliding-window layer attends to; None where it attends to all."""
    recurrence: Recurrence | None = None
    """A layer that keeps state beside rows of tokens, or instead of them."""
    halves: Halves_ | None = None
    """Shapes of its own halves, where layers differ."""
    index_size: int = 0
    """Elements of an index key, which are the last ones of its second half."""

    @property
    def has_rows(self) -> bool:
        """Whether the layer keeps keys and values."""
        return not isinstance(self.projection, NoRows)

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are."""
        return next(self.block.parameters()).device

    def project(self, hidden: Tensor) -> Halves:
        """Layer input [T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        return self.projection.project(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Layer input [T, D] -> what attention or the mixer takes, [1, T, D]."""
        x = hidden.unsqueeze(0)
        return x if self.norm is None else self.norm.forward(x)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model as restore and capture need it; built by `adapt`.

    `kind` is what a projected row is (KV or LATENT), `key` and `value` the shapes of its halves,
    `norm_name` and `rope_name` the canonical strings of the fingerprint.
    """

    model: PreTrainedModel
    base: nn.Module
    """The module whose forward pass runs all layers, and which the model with its head calls."""
    layers: tuple[DecoderLayer, ...]
    kind: StateKind
    key: HalfShape
    value: HalfShape
    embed_halves: Embed
    rotary: Callable[[Tensor, Tensor], Mapping[str, Rope]] | None
    """(something of the model's dtype and device, positions [1, T]) -> tables; None: learned positions."""
    norm_name: str
    rope_name: str
    is_half_split: bool = True
    """Whether positions enter K as `rotate` has it, which is what the kernels know."""
    refused: Mapping[StateKind, str] = field(default_factory=dict)
    """Kinds of state that this model cannot be restored by, with the reason."""
    has_token_inputs: bool = False
    """Whether token ids and their positions alone give layer 0's input, as the loaded model has shown."""
    snapshot_problem: str = ""
    """Why states do not go on from a kept copy; empty where they do, and where there are none."""

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of wide rows that layers can be saved by; a recurrent one by its inputs only."""
        return tuple(kind for kind in (StateKind.HIDDEN, self.kind) if kind not in self.refused)

    def kinds_of(self, layer: int) -> tuple[StateKind, ...]:
        """The kinds of wide rows that one layer can be saved by; none of one that keeps nothing."""
        # A state follows from inputs alone: rows of K and V of the same layer would leave it unknown.
        if self.layers[layer].recurrence is not None:
            return (StateKind.HIDDEN,)
        return self.kinds if self.layers[layer].has_rows else ()

    def kind_of(self, layer: int, kind: StateKind) -> StateKind | None:
        """The kind by which a layer comes back where others do by `kind`: a recurrent one by its inputs.

        None: it keeps nothing.
        """
        kinds = self.kinds_of(layer)
        return kind if kind in kinds else next(iter(kinds), None)

    def halves_of(self, layer: int) -> Halves_:
        """Shapes of the halves of a layer's row."""
        return self.layers[layer].halves or (self.key, self.value)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps recurrent or convolution state."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep recurrent or convolution state."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.recurrence is not None)

    @property
    def is_stepwise(self) -> bool:
        """Whether a pass behind others takes one token at a time."""
        return any(layer.recurrence is not None and layer.recurrence.is_stepwise for layer in self.layers)

    @property
    def architecture(self) -> str:
        """The model's class name."""
        return type(self.model).__name__

    @property
    def is_relocatable(self) -> bool:
        """False where positions enter at the embedding, or a layer's state has taken all tokens in."""
        return self.rotary is not None and not self.is_recurrent

    @property
    def hidden_size(self) -> int:
        """Elements of a HIDDEN row, D."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def row_size(self) -> int:
        """Elements of a row of the model's own kind, where layers do not differ."""
        return self.key.size + self.value.size

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep rows, of one size, and nothing else of a token."""
        return all(each.has_rows and each.halves is None and not each.index_size for each in self.layers)

    def element_count(self, kind: StateKind, layer: int) -> int | None:
        """Elements of a layer's row of `kind`, or of what it packs; None for a kind that it does not have."""
        wide = unpacked(kind)
        if wide not in self.kinds_of(layer):
            return None
        return (
            self.hidden_size if wide is StateKind.HIDDEN else sum(half.size for half in self.halves_of(layer))
        )

    def ropes(self, positions: Tensor) -> Mapping[str, Rope]:
        """Position tables for positions [T], by `rope_key`; empty where positions are learned."""
        if self.rotary is None:
            return {}
        device = self.layers[0].device
        # Rotary modules take a tensor for its type and device
        # only: tables are rounded as in the model's own pass.
        example = torch.empty(0, dtype=self.model.dtype, device=device)
        return self.rotary(example, positions.to(device).unsqueeze(0))

    def pack(self, first: Tensor, second: Tensor) -> Tensor:
        """Halves [T, H, C], [T, H, C_v] -> rows [T, row_size], a copy."""
        return cat((first.flatten(1), second.flatten(1)), dim=1)

    def unpack(self, rows: Tensor, layer: int) -> Halves:
        """A layer's rows [T, row_size] -> halves [T, H, C], [T, H, C_v], views."""
        key, value = self.halves_of(layer)
        return key.heads(rows[:, : key.size]), value.heads(rows[:, key.size :])

    def embed(self, halves: Halves, rope: Rope | None) -> Halves:
        """Halves -> keys and values as the engine caches them, [1, H, T, C], [1, H, T, C_v]."""
        # [T, H, C] -> [1, H, T, C], a view; the embedding decides whether anything is copied.
        first, second = (half.transpose(0, 1).unsqueeze(0) for half in halves)
        return self.embed_halves(first, second, rope)


_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
ONE_ROPE = ""
"""The rope key of families with one position table for all layers."""
NO_ROPE = "none"
"""The rope key of layers that positions do not enter: no table has it."""


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, as the engine's own cache sets it up."""
    return tuple(getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers)


def refuse(model: PreTrainedModel, problem: str) -> UnsupportedArchitecture:
    """The error to raise for a setting of a family that is not supported."""
    return UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)


def check_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedArchitecture where the angles depend on the session's length."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # Gemma 3 has one table of settings for each type of layer, others one for all.
    tables = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    for table in tables:
        if table.get("rope_type") in _LENGTH_DEPENDENT_ROPES:
            raise refuse(
                model, f"rotary angles of type {table['rope_type']!r} depend on the session's length"
            )


def rope_name(model: PreTrainedModel, *extra: str) -> str:
    """The canonical string of the model's rotary settings, `extra` included. Raises as `check_rope` does."""
    check_rope(model)
    config = model.config.get_text_config(decoder=True)
    settings = getattr(config, "rope_parameters", None) or {}
    return " ".join(("rope", json.dumps(_canonical(settings), sort_keys=True), *extra))


def norm_kind(norm: nn.Module) -> str:
    """The use that a norm makes of its weight: `rmsnorm`, `rmsnorm+1` for 1 + w, `layernorm`, or `own`.

    A copy of the module says so, with a weight of its own: the model's need not be in memory.
    """
    weight = getattr(norm, "weight", None)
    if isinstance(norm, nn.LayerNorm) and is_unpatched(norm):
        return "layernorm"
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not is_unpatched(norm):
        return "own"
    # Mean 0.5 and not 0: an RMS norm and a layer norm must differ on it.
    x = torch.linspace(-1.0, 2.0, len(weight), device="cpu").unsqueeze(0)
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in probe.parameters():
            # 0.5 and not 1: `w` gives half of the normed row, `1 + w` one and a half of it.
            parameter.fill_(0.5)
        out = probe.forward(x)
    normed = x * torch.rsqrt(x.pow(2).mean() + norm_epsilon(norm))
    centred = nn.functional.layer_norm(x, (len(weight),), eps=norm_epsilon(norm))
    for name, expected in (("rmsnorm", normed / 2), ("rmsnorm+1", normed * 1.5), ("layernorm", centred / 2)):
        # A norm that is none of these is the model's own; kernels leave it to its module.
        if torch.allclose(out, expected, rtol=1e-4, atol=1e-5):
            return name
    return "own"


def rounds_before_gain(norm: nn.Module) -> bool:
    """Whether an RMS norm in 16 bits rounds a normed row before its gain (Llama), not only behind (OLMo 2).

    A copy of the module says so, as in `norm_kind`.
    """
    size = len(norm.weight)  # type: ignore[arg-type]  # a norm that `norm_kind` knows has a weight [D]
    x = torch.linspace(-1.0, 2.0, size, device="cpu").unsqueeze(0).bfloat16()
    probe = copy.deepcopy(norm).to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for parameter in probe.parameters():
            # Of many bits, so that rounding twice shows.
            parameter.fill_(0.7)
        out = probe.forward(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean() + norm_epsilon(norm))
    gain = torch.tensor(0.7, device="cpu").bfloat16()
    twice, once = normed.bfloat16() * gain, (normed * gain.float()).bfloat16()
    return int((out != twice).sum()) < int((out != once).sum())


def norm_epsilon(norm: nn.Module) -> float:
    """The epsilon that a norm adds to the variance, 0 where it has none."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


def norm_name(norm: nn.Module | None) -> str:
    """The canonical string of a norm: its kind and its epsilon."""
    if norm is None:
        return "none"
    kind = norm_kind(norm)
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return f"{kind if kind != 'own' else type(norm).__name__} eps={epsilon!r}"


def one_table(rotary: nn.Module) -> Callable[[Tensor, Tensor], Mapping[str, Rope]]:
    """Position tables of a rotary module that serves all layers alike."""
    return lambda example, positions: {ONE_ROPE: Rope(*rotary.forward(example, positions))}


def table_per_type(
    rotary: nn.Module, layer_types: Sequence[str]
) -> Callable[[Tensor, Tensor], Mapping[str, Rope]]:
    """Position tables of a rotary module with other angles per layer type (Gemma3)."""
    keys = sorted(set(layer_types))
    return lambda example, positions: {key: Rope(*rotary.forward(example, positions, key)) for key in keys}


def embed_rotated(group_count: int = 1) -> Embed:
    """Rotate K; repeat each KV head `group_count` times where the engine's cache holds them so."""

    def embed(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
        keys = first if rope is None else rotate(first, rope)
        if group_count == 1:
            return keys, second
        return keys.repeat_interleave(group_count, dim=1), second.repeat_interleave(group_count, dim=1)

    return embed


def _canonical(value: object) -> object:
    """Numbers as floats, so that 10000 and 10000.0 are the same setting."""
    if isinstance(value, dict):
        # A setting that is None says as much as one that is not there.
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
