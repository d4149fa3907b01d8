"""Runs: like layers that stand beside each other, taken at once.

Of two choices one is better first (Johnson's rule), and what is true of neighbours is true of all of
a run: so a run of n layers with two options has n + 1 ways that matter, not 2^n. Knows blocks and
bounds. Worst case: choices that no order suits; such layers are runs of one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker.planning.block import Block, State, in_order
from gpu_worker.planning.bound import Bound

Picks = tuple[tuple[int, int], ...]
"""(pick, layers in a row that take it), first layer first."""
Way = tuple[Picks, Block, bool]
"""The picks, what they do to the streams, and whether one of them is a split."""


class _Kind(NamedTuple):
    """What is true of all layers with the same choices."""

    orders: tuple[tuple[int, ...], ...] | None
    """The options in their better order, then for each split the order with it; None: there is none."""
    costs: tuple[tuple[float, ...], ...]
    """By bound, by pick: weighted seconds."""
    options: tuple[Way, ...]
    splits: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Layers [begin, end) with `option_count` options, and behind them in `blocks` the splits."""

    begin: int
    end: int
    blocks: tuple[Block, ...]
    option_count: int
    kind: _Kind
    powers: tuple[list[Block], ...]
    """By option: it once, twice, ...; empty where the run is one layer."""

    def ways(
        self, state: State, begin: int, limits: Sequence[Bound], best_s: float, *, may_split: bool
    ) -> Iterator[Way]:
        """Yield the ways through layers [begin, end) from `state` that may end before `best_s`."""
        if self.end - self.begin == 1:
            yield from self.kind.options
            yield from self.kind.splits if may_split else ()
            return
        count = self.end - begin
        slack = [best_s - bound.cost(state) - bound.rest_s[self.end] for bound in limits]
        yield from self._counts(count, slack, None)
        for split in range(self.option_count, len(self.blocks)) if may_split else ():
            left = [room - cost[split] for room, cost in zip(slack, self.kind.costs, strict=True)]
            yield from self._counts(count - 1, left, split)

    def sorted(self, taken: Sequence[int]) -> Picks:
        """Return picks in the better order, option i taken `taken[i]` times."""
        order = self.kind.orders[0] if self.kind.orders else range(self.option_count)
        return tuple((pick, taken[pick]) for pick in order if taken[pick])

    def block(self, picks: Picks) -> Block:
        """Return what layers that take these picks do to the streams."""
        block = self._power(*picks[0])
        for pick in picks[1:]:
            block = block.then(self._power(*pick))
        return block

    def _counts(self, count: int, slack: Sequence[float], split: int | None) -> Iterator[Way]:
        if min(slack) <= 0 or self.kind.orders is None:
            return
        order = self.kind.orders[0 if split is None else split - self.option_count + 1]
        options = [pick for pick in order if pick < self.option_count]
        first, last = options[0], options[-1]
        for first_count in self._range(count, slack, first, last):
            counts = {split: 1, last: count - first_count, first: first_count}
            picks = tuple((pick, counts[pick]) for pick in order if counts[pick])
            yield picks, self.block(picks), split is not None

    def _power(self, pick: int, count: int) -> Block:
        return self.blocks[pick] if count == 1 else self.powers[pick][count]

    def _range(self, count: int, slack: Sequence[float], first: int, last: int) -> range:
        """How often the first option may be taken: what the bounds, linear in it, leave."""
        low, high = (0, count) if first != last else (count, count)
        for room, cost in zip(slack, self.kind.costs, strict=True):
            left, gain = room - count * cost[last], cost[first] - cost[last]
            if gain > 0:
                high = min(high, math.floor(min(left / gain, count)))
            elif gain < 0:
                low = max(low, math.ceil(max(left / gain, 0)))
            elif left <= 0:
                return range(0)
        return range(low, high + 1)


def runs_of(
    choices: Sequence[tuple[Block, ...]], option_counts: Sequence[int], limits: Sequence[Bound]
) -> list[Run]:
    """Return the runs of layers whose choices are one object, in layer order."""
    begin = 0
    found: list[Run] = []
    kinds: dict[int, _Kind] = {}
    while begin < len(choices):
        blocks, option_count = choices[begin], option_counts[begin]
        if id(blocks) not in kinds:
            kinds[id(blocks)] = _kind(blocks, option_count, limits)
        kind = kinds[id(blocks)]
        end = begin + 1
        while kind.orders is not None and end < len(choices) and choices[end] is blocks:
            end += 1
        powers = (
            tuple(block.powers(end - begin) for block in blocks[:option_count]) if end > begin + 1 else ()
        )
        found.append(Run(begin, end, blocks, option_count, kind, powers))
        begin = end
    return found


def _kind(blocks: tuple[Block, ...], option_count: int, limits: Sequence[Bound]) -> _Kind:
    ways = [(((pick, 1),), block, pick >= option_count) for pick, block in enumerate(blocks)]
    return _Kind(
        orders=_orders(blocks, option_count),
        costs=tuple(tuple(bound.cost(block) for block in blocks) for bound in limits),
        options=tuple(ways[:option_count]),
        splits=tuple(ways[option_count:]),
    )


def _orders(blocks: tuple[Block, ...], option_count: int) -> tuple[tuple[int, ...], ...] | None:
    """The better order of the options, and of the options with each split; at most one is taken."""
    if not 0 < option_count <= 2:
        return None
    options = blocks[:option_count]
    orders = [in_order(options)]
    for pick in range(option_count, len(blocks)):
        order = in_order((*options, blocks[pick]))
        orders.append(order and [pick if i == option_count else i for i in order])
    return None if None in orders else tuple(tuple(order) for order in orders if order)
