"""Perplexity under truncation: how well a model predicts text after its context was cut, by each way to cut it.

Source: CachedAttention, USENIX ATC '24, section 4.3.5 and Table 1, at a window and a text of one's own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.families import Adapter
from gpu_worker.quality.context import Context, Cut


@dataclass(frozen=True, slots=True)
class Predicted:
    """How well tokens were predicted: the sum of -ln p over `token_count` of them."""

    loss_nats: float
    token_count: int

    @property
    def perplexity(self) -> float:
        """E to the mean loss."""
        return math.exp(self.loss_nats / self.token_count)


def perplexities(
    adapter: Adapter, token_ids: Sequence[int], cuts: Sequence[Cut], *, window: int, sink_count: int,
    step: Callable[[Cut, int], None] = lambda _cut, _count: None,
) -> dict[Cut, Predicted]:  # fmt: skip
    """Feed a text half a window at a time, cutting whenever the window is full; score what follows the first cut.

    The same tokens are scored for every cut: all but the first of each half window. `step` hears how many
    tokens a cut has seen. Raises ValueError unless a whole half window follows the first full one.
    """
    half = window // 2
    if len(token_ids) < window + half or half <= sink_count + 1:
        raise ValueError(
            f"{len(token_ids)} tokens, a window of {window} and {sink_count} sinks leave nothing to score"
        )
    begun = Context.empty(adapter, Cut.NONE, sink_count=sink_count)
    for begin in range(0, window, half):
        begun.feed(token_ids[begin : begin + half])
    found = {}
    for cut in cuts:
        context, loss_nats, token_count = begun.fork(cut), 0.0, 0
        for begin in range(window, len(token_ids) - half + 1, half):
            context.halve()
            new = token_ids[begin : begin + half]
            loss_nats += _loss_nats(context.feed(new), new)
            token_count += half - 1
            step(cut, begin + half)
        found[cut] = Predicted(loss_nats, token_count)
    return found


def _loss_nats(logits: Tensor, token_ids: Sequence[int]) -> float:
    losses = functional.cross_entropy(logits[:-1].float(), torch.tensor(token_ids[1:]), reduction="sum")
    return float(losses)
