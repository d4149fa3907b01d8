"""Recompute: the first layers run over the token ids, and nothing after them.

Knows the model's forward pass through its adapter. Worst case: a prefill of those layers, in pieces
that bound the memory of activations.
"""

import torch
from torch import Tensor, nn
from transformers import Cache

from gpu_worker.errors import ShapeMismatch
from gpu_worker.families import Adapter

PIECE_TOKENS = 512
"""Tokens per forward pass; bounds activations, costs one more pass per piece."""


class _Stop(Exception):
    """Ends a forward pass at the first layer that is not wanted; no error."""


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
    for begin in range(0, len(token_ids), piece_tokens):
        piece = slice(begin, begin + piece_tokens)
        _run(adapter, cache, ids[:, piece], at[:, piece], layer_count)


def _run(adapter: Adapter, cache: Cache, ids: Tensor, positions: Tensor, layer_count: int) -> None:
    stops = [
        decoder.block.register_forward_pre_hook(_stop)
        for decoder in adapter.layers[layer_count : layer_count + 1]
    ]
    try:
        with torch.no_grad():
            # Not `base(...)`: capture listens there, and recomputed tokens are not new ones.
            adapter.base.forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except _Stop:
        pass
    finally:
        for stop in stops:
            stop.remove()


def _stop(_block: nn.Module, _args: object) -> None:
    raise _Stop
