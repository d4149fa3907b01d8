"""Bounds: what no way of restoring the remaining layers can beat.

Weights over the three streams that add up to 1 give a bound each: the pipeline ends no earlier than
the weighted sum of when the streams are free plus, for each layer left, the least weighted work of
any of its choices. That is the Lagrangian dual of the relaxed problem in which a layer may be split
at will. Worst case: a bound that is too low, which costs steps, never a wrong plan.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

from gpu_worker.planning.block import Block, State

_STREAMS = (0, 1, 2)
_MOST_BALANCES = 9

Weights = tuple[float, float, float]


class Bound(NamedTuple):
    """One set of weights, and what each layer and all after it cost at least by them."""

    read: float
    copy: float
    compute: float
    rest_s: Sequence[float]
    """Entry i: weighted seconds of layers i and later; the last entry is 0."""

    def cost(self, seconds: Sequence[float]) -> float:
        """Weighted seconds of a block or a state: of its first three numbers."""
        return self.read * seconds[0] + self.copy * seconds[1] + self.compute * seconds[2]


def least_end_s(bounds: Sequence[Bound], state: State, layer: int, too_late_s: float = math.inf) -> float:
    """Return the seconds before which the pipeline cannot end when layers from `layer` on are left.

    From `too_late_s` on any bound will do: the first that is no earlier is returned.
    """
    free_read, free_copy, free_compute = state
    least = 0.0
    for read, copy, compute, rest_s in bounds:
        end_s = read * free_read + copy * free_copy + compute * free_compute + rest_s[layer]
        if end_s > least:
            least = end_s
            if least >= too_late_s:
                break
    return least


def bounds(choices: Sequence[tuple[Block, ...]], option_counts: Sequence[int]) -> tuple[Bound, ...]:
    """Return bounds for layers with these choices each, the tightest from the start first.

    Weights are those that tell the first `option_counts` choices of a layer apart. A layer without choices
    counts nothing.
    """
    options = {id(blocks): blocks[:count] for blocks, count in zip(choices, option_counts, strict=True)}
    kinds = {id(blocks): blocks for blocks in choices}
    layers = [id(blocks) for blocks in choices]
    found = (Bound(*weights, _rest(layers, kinds, weights)) for weights in _all_weights(options.values()))
    return tuple(sorted(found, key=lambda bound: -bound.rest_s[0]))


def _rest(layers: Sequence[int], kinds: Mapping[int, tuple[Block, ...]], weights: Weights) -> list[float]:
    least = {
        kind: min((_work(block, weights) for block in blocks), default=0.0) for kind, blocks in kinds.items()
    }
    # The last layer's work ends only after it went through the streams behind.
    last = min((_way(block, weights) for block in kinds[layers[-1]]), default=0.0)
    from_last = accumulate((least[kind] for kind in reversed(layers[:-1])), initial=last)
    return [*reversed(list(from_last)), 0.0]


def _work(block: Block, weights: Weights) -> float:
    return weights[0] * block.read_s + weights[1] * block.copy_s + weights[2] * block.compute_s


def _way(block: Block, weights: Weights) -> float:
    read, copy, compute = weights
    return read * block.read_to_compute_s + copy * block.copy_to_compute_s + compute * block.compute_s


def _all_weights(kinds: Collection[tuple[Block, ...]]) -> list[Weights]:
    streams: list[Weights] = [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    if any(block.read_s for blocks in kinds for block in blocks):
        streams.append((1.0, 0.0, 0.0))
    balances = sorted({weights for blocks in kinds for weights in _balances(blocks)})
    # Of very many an even selection: between neighbours the bounds differ little.
    return streams + balances[:: -(-len(balances) // _MOST_BALANCES) or 1]


def _balances(blocks: Iterable[Block]) -> Iterable[Weights]:
    """Weights by which two choices of a layer cost the same: at one of them the relaxed optimum lies."""
    for one, other in combinations(blocks, 2):
        for first, second in combinations(_STREAMS, 2):
            gain, loss = one[first] - other[first], other[second] - one[second]
            if gain * loss > 0:
                weights = [0.0, 0.0, 0.0]
                weights[first], weights[second] = loss / (gain + loss), gain / (gain + loss)
                yield (weights[0], weights[1], weights[2])
