"""Small models with recurrent layers, and their layers' inputs: for tests of what rebuilds their state."""

import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import DynamicCache

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, prefill
from gpu_worker.model.proof import adapt
from lab.studies.families import VOCABULARY
from lab.studies.hybrids import remembering

NAMES = ("qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2")
LENGTH = 150
NEXT = [5, 3, 8]


@cache
def hybrid_adapter(name: str) -> Adapter:
    """The adapter of a small model."""
    torch.set_num_threads(1)
    return adapt(remembering(name))


def hybrid_ids(seed: int = 3) -> list[int]:
    """LENGTH token ids."""
    return random.Random(seed).choices(range(VOCABULARY), k=LENGTH)


@cache
def layer_inputs(name: str) -> tuple[Tensor, ...]:
    """Inputs [T, D] of each layer, as two passes bring them."""
    adapter = hybrid_adapter(name)
    pieces: list[list[Tensor]] = [[] for _ in adapter.layers]
    streams = [Stream(layer, StateKind.HIDDEN) for layer in range(len(pieces))]
    with Capture(adapter, streams, lambda layer, _, rows: pieces[layer].append(rows.clone())):
        prefilled(adapter, DynamicCache(config=adapter.model.config), hybrid_ids())
    return tuple(torch.cat(some) for some in pieces)


def prefilled(adapter: Adapter, cache: DynamicCache, ids: Sequence[int]) -> Tensor:
    """The last logits, with the cache filled."""
    return prefill(adapter.model, cache, ids, is_stepwise=adapter.is_stepwise)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, over the largest number."""
    return float((one - other).abs().max() / other.abs().max())
