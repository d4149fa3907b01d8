"""Bounds: what no way of restoring the remaining layers can beat.

Weights over the three streams that add up to 1 give a bound each: the pipeline ends no earlier than
the weighted sum of when the streams are free plus, for each layer left, the least weighted work of
any of its choices. That is the Lagrangian dual of the relaxed problem in which a layer may be split
at will. Worst case: a bound that is too low, which costs steps, never a wrong plan.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
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


def least_end_s(bounds: Sequence[Bound], state: State, layer: int) -> float:
    """Return the seconds before which the pipeline cannot end when layers from `layer` on are left."""
    free_read, free_copy, free_compute = state
    least = 0.0
    for read, copy, compute, rest_s in bounds:
        end_s = read * free_read + copy * free_copy + compute * free_compute + rest_s[layer]
        least = max(least, end_s)
    return least


def bounds(choices: Sequence[tuple[Block, ...]], option_counts: Sequence[int]) -> tuple[Bound, ...]:
    """Return bounds for layers with these choices each; a layer without any counts nothing.

    Weights are those that tell the first `option_counts` choices of a layer apart.
    """
    kinds = {id(blocks): blocks[:count] for blocks, count in zip(choices, option_counts, strict=True)}
    return tuple(Bound(*weights, _rest(choices, weights)) for weights in _all_weights(list(kinds.values())))


def _rest(choices: Sequence[tuple[Block, ...]], weights: Weights) -> list[float]:
    # The last layer's work ends only after it went through the streams behind.
    rest = [min((_way(block, weights) for block in choices[-1]), default=0.0)]
    least: dict[int, float] = {}
    for blocks in reversed(choices[:-1]):
        if id(blocks) not in least:
            least[id(blocks)] = min((_work(block, weights) for block in blocks), default=0.0)
        rest.append(rest[-1] + least[id(blocks)])
    return [*reversed(rest), 0.0]


def _work(block: Block, weights: Weights) -> float:
    return weights[0] * block.read_s + weights[1] * block.copy_s + weights[2] * block.compute_s


def _way(block: Block, weights: Weights) -> float:
    read, copy, compute = weights
    return read * block.read_to_compute_s + copy * block.copy_to_compute_s + compute * block.compute_s


def _all_weights(kinds: Sequence[tuple[Block, ...]]) -> list[Weights]:
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
