"""A packed batch: tokens of many sequences in one pass of a transformers model, each with a cache of its own.

Prefill chunks and decode steps go through the model side by side in one row of tokens, as serving engines pack
them; attention alone looks at each sequence by itself. Knows models whose attention goes through transformers'
interface and whose positions are rotary. Worst case: a model that does not, which fails at its first pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxcache.errors import InvalidArgument

ATTENTION = "ctxcache_packed"


class SequenceCache:
    """Keys and values of one sequence, room for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token_count = 0
        """Tokens that whole passes brought."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's [1, H, t, C] behind `token_count`; all of that layer's, as views."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        end = self.token_count + keys.shape[2]
        for cache, new in zip(self._layers[layer], (keys, values), strict=True):
            cache[:, :, self.token_count : end] = new
        first, second = self._layers[layer]
        return first[:, :, :end], second[:, :, :end]

    def fork(self) -> "SequenceCache":
        """Another sequence with the same tokens, and as much room."""
        other = SequenceCache(self.capacity)
        other.token_count = self.token_count
        other._layers = {
            layer: (keys.clone(), values.clone()) for layer, (keys, values) in self._layers.items()
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
        self.model = model
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)

    def step(self, batch: Sequence[Work]) -> Tensor:
        """Run every sequence's next tokens in one pass; the logits behind each one's last, [B, V].

        Raises InvalidArgument where a sequence has no tokens, or no room for them.
        """
        for work in batch:
            if not 0 < len(work.token_ids) <= work.cache.capacity - work.cache.token_count:
                raise InvalidArgument(field="token_ids", problem=f"{len(work.token_ids)} do not fit")
        device = self.model.device
        ids = torch.tensor([[token for work in batch for token in work.token_ids]], device=device)
        positions = torch.cat([
            torch.arange(work.cache.token_count, work.cache.token_count + len(work.token_ids))
            for work in batch
        ])  # fmt: skip
        lasts = torch.tensor([len(work.token_ids) for work in batch]).cumsum(0) - 1
        with torch.no_grad():
            output = self.model(
                input_ids=ids, position_ids=positions[None].to(device), past_key_values=_Packed(),
                use_cache=True, logits_to_keep=lasts.to(device), packed=batch,
            )  # fmt: skip
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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None,
    *, packed: Sequence[Work], scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    # Any: whatever else a model hands to its attention. Shapes [1, H, T, C]; returns [1, T, H, C].
    parts = []
    begin = 0
    for work in packed:
        end = begin + len(work.token_ids)
        keys, values = work.cache.add(
            int(module.layer_idx),  # type: ignore[arg-type]
            key[:, :, begin:end], value[:, :, begin:end],
        )  # fmt: skip
        mask = _causal(end - begin, keys.shape[2], query.device)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, begin:end], keys, values, mask, scale=scaling, enable_gqa=True
            )
        )
        begin = end
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(new_count: int, token_count: int, device: torch.device) -> Tensor | None:
    """Who attends to whom, [new, all]; None where one token attends to all."""
    if new_count == 1:
        return None
    every = torch.ones(new_count, token_count, dtype=torch.bool, device=device)
    return every.tril(token_count - new_count)
