"""A packed batch: tokens of many sequences in one pass of a transformers model, each with a cache of its own.

Prefill chunks and decode steps go through the model side by side in one row of tokens, as serving engines
pack them; attention alone looks at each sequence by itself, with the windows, soft caps and sinks of the
model. Knows models whose attention goes through transformers' interface. Any other model, and whatever else a
model hands to its attention, is refused when a PackedModel is made. Worst case: scores of all heads in
memory, where a cap or sinks ask for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxcache.errors import InvalidArgument
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.adapter import refuse, windows
from gpu_worker.families.positions import check_rope

ATTENTION = "ctxcache_packed"
_HARMLESS = (
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
"""Arguments that models hand through and that do not change how tokens attend.

Positions are in queries and keys.
"""


# A pass over three sequences, t new tokens of each (a prefill chunk and two decode steps), in one row:
#
#     input ids    [1, 512 + 1 + 1]   [ A A A ... A │ B │ C ]
#     everything but attention        one product for all tokens
#     attention                       [ A over A's cache │ B over B's │ C over C's ]
#     logits       [3, V]             behind the last token of each
class SequenceCache:
    """Keys and values of one sequence, room for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token_count = 0
        """Tokens that whole passes brought."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values [1, H, capacity, C] of each layer that has any."""

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's [1, H, t, C] behind `token_count`; all of that layer's, as views."""
        if layer not in self.layers:
            self.layers[layer] = (self._empty(keys), self._empty(values))
        end = self.token_count + keys.shape[2]
        # In place: room for all tokens was made at once, and a step copies only its own.
        for cache, new in zip(self.layers[layer], (keys, values), strict=True):
            cache[:, :, self.token_count : end] = new
        first, second = self.layers[layer]
        return first[:, :, :end], second[:, :, :end]

    @classmethod
    def continuing(cls, cache: Cache, token_count: int, capacity: int) -> "SequenceCache":
        """A copy of a transformers cache that holds so many tokens; of windows, what they still see."""
        own = cls(capacity)
        own.token_count = token_count
        # Any: layers of what is no attention have no keys, and are refused when the model is.
        layers: Sequence[Any] = cache.layers if token_count else ()
        for layer, held in enumerate(layers):
            kept = held.keys.shape[2]
            halves: list[Tensor] = []
            for half in (held.keys, held.values):
                # Not left as it comes: what is masked is multiplied by zero.
                room = half.new_zeros(*half.shape[:2], capacity, half.shape[3])
                # A sliding layer holds its last tokens only: they lie
                # at their own places, so that windows mask as usual.
                room[:, :, token_count - kept : token_count] = half
                halves.append(room)
            own.layers[layer] = (halves[0], halves[1])
        return own

    def fork(self) -> "SequenceCache":
        """Another sequence with the same tokens, and as much room."""
        other = SequenceCache(self.capacity)
        other.token_count = self.token_count
        other.layers = {
            layer: (keys.clone(), values.clone()) for layer, (keys, values) in self.layers.items()
        }
        return other

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_empty(*like.shape[:2], self.capacity, like.shape[3])


@dataclass(frozen=True, slots=True)
class Work:
    """The next tokens of one sequence in a pass."""

    cache: SequenceCache
    token_ids: Sequence[int]


class PackedModel:
    """Passes of one model over packed batches; its attention is ours from here on."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedArchitecture for a model that packed passes would get wrong, unchanged."""
        check_rope(model)
        self.model, self._windows = model, _windows(model)
        self.layer_shapes: dict[int, tuple[int, int, int]] = {}
        """Heads of each layer's cache, and how wide its keys and values are."""
        # Registered for the process, as transformers has it; a model is switched by its own setting.
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        before = model.config._attn_implementation  # noqa: SLF001  transformers has a way to set it, none to ask
        model.set_attn_implementation(ATTENTION)
        try:
            self._try()
        except BaseException:
            model.set_attn_implementation(before)
            raise

    def _try(self) -> None:
        """A pass of two tokens by itself: every layer's attention must have come here."""
        own = refuse(self.model, "its attention does not go through transformers' interface")
        if self.model.config._attn_implementation != ATTENTION:  # noqa: SLF001  as above
            raise own
        cache = SequenceCache(2)
        try:
            self.step([Work(cache, [0, 0])])
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise refuse(self.model, f"a packed pass fails: {' '.join(str(error).split())[:200]}") from error
        self.layer_shapes = {
            layer: (keys.shape[1], keys.shape[3], values.shape[3])
            for layer, (keys, values) in cache.layers.items()
        }
        missed = [layer for layer in range(len(self._windows)) if layer not in cache.layers]
        if missed:
            raise refuse(
                self.model, f"attention of layer {missed[0]} does not go through transformers' interface"
            )

    def step(self, batch: Sequence[Work]) -> Tensor:
        """Run every sequence's next tokens in one pass; the logits behind each one's last, [B, V].

        Raises InvalidArgument where a sequence has no tokens, or no room for them.
        """
        for work in batch:
            if not 0 < len(work.token_ids) <= work.cache.capacity - work.cache.token_count:
                raise InvalidArgument(field="token_ids", problem=f"{len(work.token_ids)} do not fit")
        device = self.model.device
        ids = torch.tensor([[token for work in batch for token in work.token_ids]], device=device)
        positions = torch.cat(
            [
                torch.arange(work.cache.token_count, work.cache.token_count + len(work.token_ids))
                for work in batch
            ]
        )
        # The head runs over the last token of each sequence alone.
        lasts = torch.tensor([len(work.token_ids) for work in batch]).cumsum(0) - 1
        with torch.no_grad():
            output = self.model(
                input_ids=ids,
                position_ids=positions[None].to(device),
                past_key_values=_Packed(),
                use_cache=True,
                logits_to_keep=lasts.to(device),
                # Unknown to transformers: models hand such arguments
                # through to their attention, which is `_attend`.
                packed=batch,
                windows=self._windows,
            )
        for work in batch:
            work.cache.token_count += len(work.token_ids)
        logits: Tensor = output.logits[0]
        return logits


class _Packed:
    """In place of a cache of transformers: attention puts keys and values where they belong."""

    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, _layer: int, *_: object) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    packed: Sequence[Work] | None = None,
    windows: Sequence[int | None] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention of each sequence by itself. Shapes [1, H, T, C]; returns [1, T, H, C].

    Raises UnsupportedArchitecture.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    # An argument that is ignored gives other tokens than
    # transformers, and rows saved under a true fingerprint.
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if packed is None:
        raise _refused(module, "its attention is not told which sequences are in a pass")
    if unknown:
        raise _refused(module, f"its attention takes {unknown[0]!r}, which packed passes do not know")
    if dropout or is_causal is False or not getattr(module, "is_causal", True):
        raise _refused(module, "its attention drops out, or looks ahead")
    # Both are used elsewhere: the configuration's by restores, the module's by its own attention.
    if sliding_window not in (None, windows[layer]):
        problem = f"layer {layer} attends to {sliding_window} tokens, its configuration says {windows[layer]}"
        raise _refused(module, problem)
    parts = []
    begin = 0
    for work in packed:
        end = begin + len(work.token_ids)
        keys, values = work.cache.add(layer, key[:, :, begin:end], value[:, :, begin:end])
        mask = _visible(end - begin, keys.shape[2], windows[layer], query.device)
        own = query[:, :, begin:end]
        if softcap is None and s_aux is None:
            part = scaled_dot_product_attention(own, keys, values, mask, scale=scaling, enable_gqa=True)
        else:
            part = _scored(own, keys, values, mask, scaling=scaling, softcap=softcap, sinks=s_aux)
        parts.append(part)
        begin = end
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _scored(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by its scores [1, H, t, T], capped by `softcap`, with `sinks` [H] that take weight alone."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (half.repeat_interleave(repeats, dim=1) for half in (keys, values))
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    # float32 as in the models' own attention, which rounds at the same place.
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    # A sink takes weight and has no value.
    return weights[..., : keys.shape[2]] @ values


def _visible(new_count: int, token_count: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens attend to which, [new, all]; None where one token attends to all."""
    if new_count == 1 and (window is None or token_count <= window):
        return None
    every = torch.ones(new_count, token_count, dtype=torch.bool, device=device)
    seen = every.tril(token_count - new_count)
    # Two new tokens behind three, window 2; x is seen:
    #
    #     token        0 1 2 3 4
    #     new token 3  . . x x .
    #     new token 4  . . . x x
    return seen if window is None else seen.triu(token_count - new_count - window + 1)


def _windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """How many tokens each layer attends to. Raises UnsupportedArchitecture for other limits than windows."""
    config = model.config
    unknown = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if unknown:
        raise refuse(model, f"layers of type {min(unknown)!r} attend in a way that packed passes do not know")
    if getattr(config, "use_bidirectional_attention", None):
        raise refuse(model, "its attention looks ahead")
    found = windows(config)
    # Where all layers are alike, transformers' cache makes them as they come.
    return found or (None,) * int(config.num_hidden_layers)


def _refused(module: nn.Module, problem: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(architecture=type(module).__name__, problem=problem)
