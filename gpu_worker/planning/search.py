"""The search: for every layer one of its choices, so that the pipeline ends first.

Knows blocks, not what they stand for. Layers are taken in order:

```
   layer      0  1  2  3 | 4  5  6  7  8  9 10 11
              recomputed | one option each, and one layer of the plan may be split
              (waits for |    └──── run ────┘  like layers beside each other are one run
               nothing)
```

Runs: of two choices one is better first (Johnson's rule). A fact about neighbours is a fact about a run, so
that a run of n layers with two options has n + 1 ways that matter, and not 2^n.

Bounds: weights over the three streams that add up to 1 give a bound each. The pipeline ends no earlier
than the weighted sum of when the streams are free plus, for each layer left, the least weighted work of
any of its choices. That is the Lagrangian dual of the relaxed problem in which a layer may be split at
will.

Ways that another one beats on every stream are dropped, and so are those that no rest of the plan can
bring below the best end known. The answer is then exact. Worst case: more than `front_limit` ways that
cannot be told apart. The most promising are kept, and the solution says that it is not exact, and by how
much at most.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, combinations
from operator import attrgetter
from typing import NamedTuple

from gpu_worker.planning.block import NOTHING, START, State, StreamBlock, in_order

_STREAMS = (0, 1, 2)
_MOST_BALANCES = 9

Weights = tuple[float, float, float]


class SearchBound(NamedTuple):
    """One set of weights, and what each layer and all after it cost at least by them."""

    read: float
    copy: float
    compute: float
    rest_s: Sequence[float]
    """Entry i: weighted seconds of layers i and later; the last entry is 0."""

    def cost(self, seconds: Sequence[float]) -> float:
        """Weighted seconds of a block or a state: of its first three numbers."""
        return self.read * seconds[0] + self.copy * seconds[1] + self.compute * seconds[2]


# The bound by weights (a, b, c) >= 0 with a + b + c = 1, from a state (read, copy, compute):
#
#     end >= a read + b copy + c compute + sum over layers left of min over choices of (a r + b c' + c p)
#
# Each stream ends no earlier than it is free plus its work, and the end is no earlier than any of the three.
def least_end_s(
    bounds: Sequence[SearchBound], state: State, layer: int, too_late_s: float = math.inf
) -> float:
    """Return the seconds before which the pipeline cannot end when layers from `layer` on are left.

    From `too_late_s` on any bound will do: the first that is no earlier is returned.
    """
    free_read, free_copy, free_compute = state
    least = 0.0
    for read, copy, compute, rest_s in bounds:
        end_s = read * free_read + copy * free_copy + compute * free_compute + rest_s[layer]
        if end_s > least:
            least = end_s
            # The tightest bound comes first: most ways fall at the first one.
            if least >= too_late_s:
                break
    return least


def bounds(
    choices: Sequence[tuple[StreamBlock, ...]], option_counts: Sequence[int]
) -> tuple[SearchBound, ...]:
    """Return bounds for layers with these choices each, the tightest from the start first.

    Weights are those that tell the first `option_counts` choices of a layer apart. A layer without choices
    counts nothing.
    """
    options = {id(blocks): blocks[:count] for blocks, count in zip(choices, option_counts, strict=True)}
    kinds = {id(blocks): blocks for blocks in choices}
    layers = [id(blocks) for blocks in choices]
    # One list of sums for each set of weights, made once: a bound in the search is then three products.
    limits = (
        SearchBound(*weights, _rest(layers, kinds, weights)) for weights in _all_weights(options.values())
    )
    return tuple(sorted(limits, key=lambda bound: -bound.rest_s[0]))


def _rest(
    layers: Sequence[int], kinds: Mapping[int, tuple[StreamBlock, ...]], weights: Weights
) -> list[float]:
    least = {
        kind: min((_work(block, weights) for block in blocks), default=0.0) for kind, blocks in kinds.items()
    }
    # The last layer's work ends only after it went through the streams behind.
    last = min((_way(block, weights) for block in kinds[layers[-1]]), default=0.0)
    from_last = accumulate((least[kind] for kind in reversed(layers[:-1])), initial=last)
    return [*reversed(list(from_last)), 0.0]


def _work(block: StreamBlock, weights: Weights) -> float:
    return weights[0] * block.read_s + weights[1] * block.copy_s + weights[2] * block.compute_s


def _way(block: StreamBlock, weights: Weights) -> float:
    read, copy, compute = weights
    return read * block.read_to_compute_s + copy * block.copy_to_compute_s + compute * block.compute_s


def _all_weights(kinds: Collection[tuple[StreamBlock, ...]]) -> list[Weights]:
    # One stream by itself is a bound too; reading only where anything is read.
    streams: list[Weights] = [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    if any(block.read_s for blocks in kinds for block in blocks):
        streams.append((1.0, 0.0, 0.0))
    balances = sorted({weights for blocks in kinds for weights in _balances(blocks)})
    # An even selection where there are very many: bounds of neighbours differ little.
    return streams + balances[:: -(-len(balances) // _MOST_BALANCES) or 1]


def _balances(blocks: Iterable[StreamBlock]) -> Iterable[Weights]:
    """Weights by which two choices of a layer cost the same: at one of them the relaxed optimum lies."""
    for one, other in combinations(blocks, 2):
        for first, second in combinations(_STREAMS, 2):
            gain, loss = one[first] - other[first], other[second] - one[second]
            if gain * loss > 0:
                weights = [0.0, 0.0, 0.0]
                weights[first], weights[second] = loss / (gain + loss), gain / (gain + loss)
                yield (weights[0], weights[1], weights[2])


Picks = tuple[tuple[int, int], ...]
"""(pick, layers in a row that take it), first layer first."""
Way = tuple[Picks, StreamBlock, bool]
"""The picks, what they do to the streams, and whether one of them is a split."""


class _Kind(NamedTuple):
    """Facts shared by all layers with the same choices."""

    orders: tuple[tuple[int, ...], ...] | None
    """The options in their better order, then for each split the order with it; None: there is none."""
    costs: tuple[tuple[float, ...], ...]
    """By bound, by pick: weighted seconds."""
    options: tuple[Way, ...]
    splits: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class LikeLayers:
    """Layers [begin, end) with `option_count` options, and behind them in `blocks` the splits."""

    begin: int
    end: int
    blocks: tuple[StreamBlock, ...]
    option_count: int
    kind: _Kind
    powers: tuple[list[StreamBlock], ...]
    """By option: its block once, twice, ...; empty where the run is one layer."""

    def ways(
        self, state: State, begin: int, limits: Sequence[SearchBound], best_s: float, *, may_split: bool
    ) -> Iterator[Way]:
        """Yield the ways through layers [begin, end) from `state` that may end before `best_s`."""
        if self.end - self.begin == 1:
            yield from self.kind.options
            yield from self.kind.splits if may_split else ()
            return
        count = self.end - begin
        # By bound, the weighted seconds that these layers may take at most; negative: nothing here can win.
        slack = [best_s - bound.cost(state) - bound.rest_s[self.end] for bound in limits]
        yield from self._counts(count, slack, None)
        for split in range(self.option_count, len(self.blocks)) if may_split else ():
            left = [room - cost[split] for room, cost in zip(slack, self.kind.costs, strict=True)]
            yield from self._counts(count - 1, left, split)

    def sorted(self, taken: Sequence[int]) -> Picks:
        """Return picks in the better order, option i taken `taken[i]` times."""
        order = self.kind.orders[0] if self.kind.orders else range(self.option_count)
        return tuple((pick, taken[pick]) for pick in order if taken[pick])

    def block(self, picks: Picks) -> StreamBlock:
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
        # In the better order only one number is open: how many layers take the first option.
        for first_count in self._range(count, slack, first, last):
            counts = {split: 1, last: count - first_count, first: first_count}
            picks = tuple((pick, counts[pick]) for pick in order if counts[pick])
            yield picks, self.block(picks), split is not None

    def _power(self, pick: int, count: int) -> StreamBlock:
        return self.blocks[pick] if count == 1 else self.powers[pick][count]

    def _range(self, count: int, slack: Sequence[float], first: int, last: int) -> range:
        """How often the first option may be taken within the bounds."""
        low, high = (0, count) if first != last else (count, count)
        # Each bound is linear in that number, and leaves an interval of it.
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
    choices: Sequence[tuple[StreamBlock, ...]], option_counts: Sequence[int], limits: Sequence[SearchBound]
) -> list[LikeLayers]:
    """Return the runs of layers whose choices are one object, in layer order."""
    begin = 0
    runs: list[LikeLayers] = []
    kinds: dict[int, _Kind] = {}
    while begin < len(choices):
        blocks, option_count = choices[begin], option_counts[begin]
        if id(blocks) not in kinds:
            kinds[id(blocks)] = _kind(blocks, option_count, limits)
        # A run whose choices have no better order is cut into single layers, which are decided one by one.
        kind = kinds[id(blocks)]
        end = begin + 1
        # By identity: `_Search` shares one object among equal layers.
        while kind.orders is not None and end < len(choices) and choices[end] is blocks:
            end += 1
        powers = (
            tuple(block.powers(end - begin) for block in blocks[:option_count]) if end > begin + 1 else ()
        )
        runs.append(LikeLayers(begin, end, blocks, option_count, kind, powers))
        begin = end
    return runs


def _kind(blocks: tuple[StreamBlock, ...], option_count: int, limits: Sequence[SearchBound]) -> _Kind:
    ways = [(((pick, 1),), block, pick >= option_count) for pick, block in enumerate(blocks)]
    return _Kind(
        orders=_orders(blocks, option_count),
        costs=tuple(tuple(bound.cost(block) for block in blocks) for bound in limits),
        options=tuple(ways[:option_count]),
        splits=tuple(ways[option_count:]),
    )


def _orders(blocks: tuple[StreamBlock, ...], option_count: int) -> tuple[tuple[int, ...], ...] | None:
    """The better order of the options, and of the options with each split; at most one is taken."""
    # Three options in order leave two numbers open: ways of a run would grow with the square of its length.
    if not 0 < option_count <= 2:
        return None
    options = blocks[:option_count]
    orders = [in_order(options)]
    for pick in range(option_count, len(blocks)):
        order = in_order((*options, blocks[pick]))
        orders.append(order and [pick if i == option_count else i for i in order])
    return None if None in orders else tuple(tuple(order) for order in orders if order)


STEP_LIMIT = 192
"""Ways that are looked at before the search keeps but a few; some microseconds each."""
LEAST_FRONT = 2


class Choices(NamedTuple):
    """The choices of one layer. Layers whose options and splits are equal are alike."""

    options: tuple[StreamBlock, ...]
    splits: tuple[StreamBlock, ...] = ()
    """Choices of which the whole plan takes one at most."""
    recompute: StreamBlock | None = None
    """To recompute the layer, all before it recomputed; None: the engine does not."""
    frontier: tuple[StreamBlock, ...] = ()
    """Splits that recompute a part: only for the layer right behind the recomputed ones."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best way found.

    `picks` has an entry per layer that is not recomputed: an option's index, or from the count of
    options on a split's, or from there on a frontier split's. No plan ends before `bound_s`.
    `is_exact`: none of the searched ones ends before this. `step_count`: ways looked at.
    """

    end_s: float
    recomputed_count: int
    picks: tuple[int, ...]
    bound_s: float
    is_exact: bool
    step_count: int


class _Way(NamedTuple):
    """A way through the layers before `layer`; `picks` are those since `before`. A root has none before it.

    No plan that goes on from here ends before `bound_s`.
    """

    bound_s: float
    layer: int
    state: State
    has_split: bool
    recomputed_count: int
    picks: Picks
    before: "_Way | None"

    @property
    def end_s(self) -> float:
        """When its last computation is done."""
        return self.state[-1]


_BOUND_S = attrgetter("bound_s")
_STATE_AND_SPLIT = attrgetter("state", "has_split")


def solve(
    layers: Sequence[Choices], *, token_ids: StreamBlock = NOTHING, step_limit: int = STEP_LIMIT
) -> Solution | None:
    """Return the best plan for one layer at least; None if one can neither be restored nor recomputed.

    `token_ids` is what precedes recomputation, if anything is recomputed.
    """
    return _Search(layers, token_ids, step_limit).run()


class _Search:
    """One problem, the best way so far, and what was counted."""

    def __init__(self, layers: Sequence[Choices], token_ids: StreamBlock, step_limit: int) -> None:
        # One object per kind of layer: whether layers are alike is then a question of identity.
        shared: dict[object, tuple[StreamBlock, ...]] = {}
        known = {id(layer): layer for layer in layers}
        blocks = {
            key: shared.setdefault(layer[:2], (*layer.options, *layer.splits)) for key, layer in known.items()
        }
        self._layers, self._token_ids, self._step_limit = layers, token_ids, step_limit
        self._choices = [blocks[id(layer)] for layer in layers]
        option_counts = [len(layer.options) for layer in layers]
        self._bounds = bounds(self._choices, option_counts)
        self._bound_s = partial(least_end_s, self._bounds)
        self._runs = runs_of(self._choices, option_counts, self._bounds)
        self._best: _Way | None = None
        self._best_s = math.inf
        self._dropped_s = math.inf
        self._step_count = 0

    def run(self) -> Solution | None:
        """Search once."""
        # A root is a count of recomputed layers, with the streams as they are behind them:
        #
        #     root 0   START
        #     root r   token ids, then r recomputed layers      they keep the computing stream busy alone
        roots = sorted(self._roots())
        # A good end first: all later bounds prune by it.
        for root in roots[:2]:
            self._descend(root)
        splits = sorted(self._split_roots())
        # By the run at which a root enters. Roots in the last list need no run.
        entering: list[list[_Way]] = [[] for _ in range(len(self._runs) + 1)]
        ends = [run.end for run in self._runs]
        for root in sorted(chain(roots, splits)):
            entering[bisect_right(ends, root.layer)].append(root)
        # A way in the front stands behind run i - 1. Roots enter at the run in which they begin.
        front: list[_Way] = []
        for i, run in enumerate(self._runs):
            front = self._through(run, front, entering[i], len(self._runs) - i)
        for root in entering[-1]:
            self._finish(root)
        if self._best is None:
            return None
        return self._solution(self._best, min(root.bound_s for root in (*roots[:1], *splits[:1])))

    # -- where plans begin -------------------------------------------------------------------------

    def _prefixes(self) -> Iterator[tuple[int, State, State]]:
        """After 0, 1, ... recomputed layers: when the streams are free, and when with token ids there."""
        begun = self._token_ids.after(START)
        yield 0, START, begun
        for count, layer in enumerate(self._layers, 1):
            if layer.recompute is None:
                return
            begun = layer.recompute.after(begun)
            yield count, begun, begun

    def _first(self) -> int:
        """Layers that must be recomputed, since the last of them has no choice."""
        # Recomputed layers are a prefix: all layers before one without a choice are recomputed too.
        return max((i + 1 for i, blocks in enumerate(self._choices) if not blocks), default=0)

    def _roots(self) -> Iterator[_Way]:
        first = self._first()
        for count, state, _ in self._prefixes():
            if count >= first:
                yield _Way(self._bound_s(state, count), count, state, False, count, (), None)  # noqa: FBT003

    def _split_roots(self) -> Iterator[_Way]:
        """Roots whose last layer is recomputed in part; only those that may beat what is known."""
        first = self._first()
        least: dict[int, list[float]] = {}
        for count, _, begun in self._prefixes():
            if not first - 1 <= count < len(self._layers) or not self._layers[count].frontier:
                continue
            frontier = self._layers[count].frontier
            if id(frontier) not in least:
                least[id(frontier)] = [min(map(bound.cost, frontier)) for bound in self._bounds]
            # No root is made where even the cheapest split cannot beat the best end.
            if all(
                bound.cost(begun) + cost + bound.rest_s[count + 1] < self._best_s
                for bound, cost in zip(self._bounds, least[id(frontier)], strict=True)
            ):
                yield from self._split_at(count, begun, frontier)

    def _split_at(self, count: int, begun: State, frontier: Sequence[StreamBlock]) -> Iterator[_Way]:
        for pick, block in enumerate(frontier, len(self._choices[count])):
            state = block.after(begun)
            bound_s = self._bound_s(state, count + 1)
            if bound_s < self._best_s:
                yield _Way(bound_s, count + 1, state, True, count, ((pick, 1),), None)  # noqa: FBT003

    def _descend(self, way: _Way) -> None:
        """Follow the bounds down from one way, like layers in their better order: a first end to beat."""
        at: _Way | None = way
        for run in self._runs:
            if at is not None and at.layer < run.end:
                at = self._descend_run(at, run)
        if at is not None:
            self._finish(at)

    def _descend_run(self, way: _Way, run: LikeLayers) -> _Way | None:
        """None where the best end known cannot be beaten that way."""
        state, taken = way.state, [0] * run.option_count
        options = run.blocks[: run.option_count]
        for layer in range(way.layer, run.end):
            step = self._most_promising(options, state, layer + 1)
            if step is None:
                return None
            pick, state = step
            taken[pick] += 1
        picks = run.sorted(taken)
        # The same picks in their better order end no later.
        if run.end - way.layer > 1:
            state = run.block(picks).after(way.state)
        return _Way(way.bound_s, run.end, state, way.has_split, way.recomputed_count, picks, way)

    def _most_promising(
        self, options: Sequence[StreamBlock], state: State, layer: int
    ) -> tuple[int, State] | None:
        """The option behind which the bound is least before `layer`, and the state there.

        None: no option may be best.
        """
        least_s, best = self._best_s, None
        for pick, block in enumerate(options):
            after = block.after(state)
            bound_s = self._bound_s(after, layer, least_s)
            if bound_s < least_s:
                least_s, best = bound_s, (pick, after)
        return best

    # -- through the layers ------------------------------------------------------------------------

    def _through(self, run: LikeLayers, front: list[_Way], roots: list[_Way], runs_left: int) -> list[_Way]:
        """Return the ways past a run; none behind the last one."""
        ways: list[_Way] = []
        is_last = run.end == len(self._layers)
        for way in chain(front, self._entering(roots)):
            may_split = not way.has_split and self._may_split(way)
            for picks, block, is_split in run.ways(
                way.state, way.layer, self._bounds, self._best_s, may_split=may_split
            ):
                self._step_count += 1
                state = block.after(way.state)
                # Behind the last layer the bound is the end itself.
                bound_s = state[-1] if is_last else self._bound_s(state, run.end, self._best_s)
                if bound_s >= self._best_s:
                    continue
                has_split = way.has_split or is_split
                # A way keeps its own picks and a link to the way
                # before it: thousands of them share their beginnings.
                after = _Way(bound_s, run.end, state, has_split, way.recomputed_count, picks, way)
                if is_last:
                    self._finish(after)
                else:
                    ways.append(after)
        return self._kept(_undominated(ways), runs_left)

    def _entering(self, roots: list[_Way]) -> Iterator[_Way]:
        """Roots that enter here, the most promising first; beyond the step limit that one alone."""
        for i, root in enumerate(roots):
            if root.bound_s >= self._best_s:
                return
            if i and self._step_count >= self._step_limit:
                self._dropped_s = min(self._dropped_s, root.bound_s)
                return
            yield root

    def _may_split(self, way: _Way) -> bool:
        if self._step_count < self._step_limit:
            return True
        if self._layers[way.layer].splits:
            self._dropped_s = min(self._dropped_s, way.bound_s)
        return False

    def _kept(self, front: list[_Way], runs_left: int) -> list[_Way]:
        steps_left = max(0, self._step_limit - self._step_count)
        # Steps that are left are shared out among the runs
        # that are left, so that the last ones are not starved.
        limit = max(LEAST_FRONT, steps_left // runs_left)
        if len(front) <= limit:
            return front
        front.sort(key=_BOUND_S)
        # No dropped way ends before this: it tells whether the result is exact.
        self._dropped_s = min(self._dropped_s, front[limit].bound_s)
        return front[:limit]

    def _finish(self, way: _Way) -> None:
        if way.end_s < self._best_s:
            self._best, self._best_s = way, way.end_s

    def _solution(self, way: _Way, floor_s: float) -> Solution:
        parts: list[Picks] = []
        at: _Way | None = way
        while at is not None:
            parts.append(at.picks)
            at = at.before
        return Solution(
            end_s=self._best_s,
            recomputed_count=way.recomputed_count,
            picks=tuple(_spelled(chain.from_iterable(reversed(parts)))),
            bound_s=min(floor_s, self._best_s),
            is_exact=self._dropped_s >= self._best_s,
            step_count=self._step_count,
        )


def _spelled(picks: Iterable[tuple[int, int]]) -> Iterator[int]:
    return (pick for pick, count in picks for _ in range(count))


def _undominated(ways: list[_Way]) -> list[_Way]:
    """Drop every way that another one beats or equals on all streams, with the split no less open."""
    if len(ways) <= 1:
        return ways
    # A way that has not used its split drops ways of both sorts; one that has, its own sort only.
    ways.sort(key=_STATE_AND_SPLIT)
    kept: list[_Way] = []
    if ways[0].state[0] == ways[-1].state[0]:
        # Ascending by when copies end: only the least computation so far decides.
        least_s = unsplit_least_s = math.inf
        for way in ways:
            end_s = way.end_s
            if end_s < (least_s if way.has_split else unsplit_least_s):
                kept.append(way)
                least_s = min(least_s, end_s)
                if not way.has_split:
                    unsplit_least_s = end_s
        return kept
    for way in ways:
        if not any(_beats(other, way) for other in reversed(kept)):
            kept.append(way)
    return kept


def _beats(one: _Way, other: _Way) -> bool:
    # Reading is compared by the order of sorting.
    return one.state[1] <= other.state[1] and one.end_s <= other.end_s and one.has_split <= other.has_split
