"""The expected cache of a session: the engine's own after its last turn, moved and cut as the session was.

Knows rotary models of transformers, no store and no restore: keys move by transformers' own rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sessions import contents, relative_error
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gpu_worker.families.generation import prefill

Halves = tuple[Tensor, Tensor]
"""Keys and values [1, H, T, C] of one layer."""


@dataclass(frozen=True)
class Kept:
    """One session between two turns."""

    token_ids: list[int]
    layers: list[Halves]

    @classmethod
    def of_cache(cls, token_ids: Sequence[int], cache: Cache) -> "Kept":
        """All that a cache holds."""
        return cls(list(token_ids), [contents(cache, layer) for layer in range(len(cache.layers))])

    def first(self, count: int) -> "Kept":
        """The first tokens alone."""
        return Kept(self.token_ids[:count], [(k[:, :, :count], v[:, :, :count]) for k, v in self.layers])

    def and_then(self, longer: "Kept") -> "Kept":
        """With what a longer one has behind it."""
        count = len(self.token_ids)
        if not count:
            return longer
        layers = [
            (torch.cat([keys, k[:, :, count:]], dim=2), torch.cat([values, v[:, :, count:]], dim=2))
            for (keys, values), (k, v) in zip(self.layers, longer.layers, strict=True)
        ]
        return Kept(longer.token_ids, layers)

    def only(self, indexes: Sequence[int], model: PreTrainedModel) -> "Kept":
        """Some tokens alone, as if the others had never been there: at positions 0, 1, and so on."""
        layers = []
        for keys, values in self.layers:
            at, to = torch.tensor([list(indexes)], dtype=torch.long), torch.arange(len(indexes))[None]
            moved = _rotated(_rotated(keys[:, :, at[0]], at, model, sign=-1), to, model)
            layers.append((moved, values[:, :, at[0]]))
        return Kept([self.token_ids[index] for index in indexes], layers)

    def cache(self, model: PreTrainedModel) -> DynamicCache:
        """A cache that holds it."""
        cache = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(self.layers):
            if self.token_ids:
                cache.update(keys, values, layer)
        return cache

    def errors(self, cache: Cache) -> list[float]:
        """By layer, by how much a cache's first tokens differ from these.

        Largest difference over largest magnitude.
        """
        count = len(self.token_ids)
        return [
            max(
                relative_error(mine[:, :, :count], theirs)
                for mine, theirs in zip(contents(cache, layer), halves, strict=True)
            )
            for layer, halves in enumerate(self.layers if count else [])
        ]


def fresh(model: PreTrainedModel, token_ids: Sequence[int]) -> Kept:
    """The cache that a prefill of these tokens leaves."""
    cache = DynamicCache(config=model.config)
    prefill(model, cache, token_ids)
    return Kept.of_cache(token_ids, cache)


def _rotated(keys: Tensor, positions: Tensor, model: PreTrainedModel, *, sign: int = 1) -> Tensor:
    # Any: transformers types submodules as Tensor | Module.
    base: Any = model.model
    cos, sin = base.rotary_emb(keys, positions)
    found: Tensor = apply_rotary_pos_emb(keys, keys, cos, sign * sin)[1]
    return found
