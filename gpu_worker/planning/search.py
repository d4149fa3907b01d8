"""The search: for every layer one of its choices, so that the pipeline ends first.

Knows blocks, not what they stand for. Layers are taken in order. A prefix of them may be recomputed;
it comes first, since it waits for nothing. After it every layer takes one of its options, and one
layer of the plan may take a split instead. Ways that another one beats on every stream are dropped,
and those that no rest of the plan can bring below the best end known; what is left is exact.
Worst case: unlike layers in great number, with more than `front_limit` ways that cannot be told
apart. The most promising are kept, and the solution says that it is not exact, and by how much at most.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from gpu_worker.planning.block import NOTHING, START, Block, State
from gpu_worker.planning.bound import bounds, least_end_s
from gpu_worker.planning.run import Picks, Run, runs_of

STEP_LIMIT = 192
"""Ways that are looked at before the search keeps but a few; some microseconds each."""
LEAST_FRONT = 2


class Choices(NamedTuple):
    """What one layer may take. Layers whose options and splits are equal are alike."""

    options: tuple[Block, ...]
    splits: tuple[Block, ...] = ()
    """Choices of which the whole plan takes one at most."""
    recompute: Block | None = None
    """To recompute the layer, all before it recomputed; None: the engine does not."""
    frontier: tuple[Block, ...] = ()
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
    """A way through the layers up to some layer; `picks` are those since `before`."""

    state: State
    has_split: bool
    recomputed_count: int
    picks: Picks
    before: "_Way | None"


_Root = tuple[float, int, _Way]
"""(bound, first layer that is open, the way there): recomputation and nothing else."""


def solve(
    layers: Sequence[Choices], *, token_ids: Block = NOTHING, step_limit: int = STEP_LIMIT
) -> Solution | None:
    """Return the best plan for one layer at least; None if one can neither be restored nor recomputed.

    `token_ids` is what precedes recomputation, if anything is recomputed.
    """
    return _Search(layers, token_ids, step_limit).run()


class _Search:
    """One problem, the best way so far, and what was counted."""

    def __init__(self, layers: Sequence[Choices], token_ids: Block, step_limit: int) -> None:
        # One object per kind of layer: whether layers are alike is then a question of identity.
        shared: dict[object, tuple[Block, ...]] = {}
        known = {id(layer): layer for layer in layers}
        blocks = {
            key: shared.setdefault(layer[:2], (*layer.options, *layer.splits)) for key, layer in known.items()
        }
        self._layers, self._token_ids, self._step_limit = layers, token_ids, step_limit
        self._choices = [blocks[id(layer)] for layer in layers]
        option_counts = [len(layer.options) for layer in layers]
        self._bounds = bounds(self._choices, option_counts)
        self._runs = runs_of(self._choices, option_counts, self._bounds)
        self._best: _Way | None = None
        self._best_s = math.inf
        self._dropped_s = math.inf
        self._step_count = 0

    def run(self) -> Solution | None:
        """Search once."""
        roots = sorted(self._roots())
        for _, begin, root in roots[:2]:
            self._descend(root, begin)
        splits = sorted(self._split_roots())
        entering: dict[int, list[_Root]] = defaultdict(list)
        for start in chain(roots, splits):
            entering[start[1]].append(start)
        front: list[_Way] = []
        for i, run in enumerate(self._runs):
            starts = sorted(each for begin in range(run.begin, run.end) for each in entering[begin])
            front = self._through(run, front, starts, len(self._runs) - i)
        for _, _, root in entering[len(self._layers)]:
            self._finish(root)
        if self._best is None:
            return None
        return self._solution(self._best, min(root[0] for root in (*roots[:1], *splits[:1])))

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
        return max((i + 1 for i, blocks in enumerate(self._choices) if not blocks), default=0)

    def _roots(self) -> Iterator[_Root]:
        first = self._first()
        for count, state, _ in self._prefixes():
            if count >= first:
                yield self._bound_s(state, count), count, _Way(state, False, count, (), None)  # noqa: FBT003

    def _split_roots(self) -> Iterator[_Root]:
        """Roots whose last layer is recomputed in part; only those that may beat what is known."""
        first = self._first()
        least: dict[int, list[float]] = {}
        for count, _, begun in self._prefixes():
            if not first - 1 <= count < len(self._layers) or not self._layers[count].frontier:
                continue
            frontier = self._layers[count].frontier
            if id(frontier) not in least:
                least[id(frontier)] = [min(map(bound.cost, frontier)) for bound in self._bounds]
            ends = (
                bound.cost(begun) + cost + bound.rest_s[count + 1]
                for bound, cost in zip(self._bounds, least[id(frontier)], strict=True)
            )
            if max(ends) < self._best_s:
                yield from self._split_at(count, begun, frontier)

    def _split_at(self, count: int, begun: State, frontier: Sequence[Block]) -> Iterator[_Root]:
        for pick, block in enumerate(frontier, len(self._choices[count])):
            state = block.after(begun)
            bound_s = self._bound_s(state, count + 1)
            if bound_s < self._best_s:
                yield bound_s, count + 1, _Way(state, True, count, ((pick, 1),), None)  # noqa: FBT003

    def _descend(self, way: _Way, begin: int) -> None:
        """Follow the bounds down from one way, like layers in their better order: a first end to beat."""
        for run in self._runs:
            start = max(begin, run.begin)
            if start < run.end:
                if not run.option_count:
                    return
                way = self._descend_run(way, run, start)
        self._finish(way)

    def _descend_run(self, way: _Way, run: Run, start: int) -> _Way:
        state, taken = way.state, [0] * run.option_count
        for layer in range(start, run.end):
            nexts = [block.after(state) for block in run.blocks[: run.option_count]]
            ends = [self._bound_s(after, layer + 1) for after in nexts]
            pick = ends.index(min(ends))
            taken[pick] += 1
            state = nexts[pick]
        picks = run.sorted(taken)
        return _Way(run.block(picks).after(way.state), way.has_split, way.recomputed_count, picks, way)

    # -- through the layers ------------------------------------------------------------------------

    def _through(self, run: Run, front: list[_Way], roots: list[_Root], runs_left: int) -> list[_Way]:
        """Return the ways past a run; none behind the last one."""
        found: list[_Way] = []
        is_last = run.end == len(self._layers)
        for begin, way in chain(((run.begin, way) for way in front), self._entering(roots)):
            may_split = not way.has_split and self._may_split(way, begin)
            for picks, block in run.ways(way.state, begin, self._bounds, self._best_s, may_split=may_split):
                self._step_count += 1
                state = block.after(way.state)
                has_split = way.has_split or picks_split(picks, run.option_count)
                if is_last and state.compute_s < self._best_s:
                    self._finish(_Way(state, has_split, way.recomputed_count, picks, way))
                elif not is_last and self._bound_s(state, run.end) < self._best_s:
                    found.append(_Way(state, has_split, way.recomputed_count, picks, way))
        return self._kept(_undominated(found), run.end, runs_left)

    def _entering(self, roots: list[_Root]) -> Iterator[tuple[int, _Way]]:
        """Where plans begin here, the most promising first; only that one when there were too many steps."""
        for i, (bound_s, begin, way) in enumerate(roots):
            if bound_s >= self._best_s:
                return
            if i and self._step_count >= self._step_limit:
                self._dropped_s = min(self._dropped_s, bound_s)
                return
            yield begin, way

    def _may_split(self, way: _Way, layer: int) -> bool:
        if self._step_count < self._step_limit:
            return True
        if self._layers[layer].splits:
            self._dropped_s = min(self._dropped_s, self._bound_s(way.state, layer))
        return False

    def _kept(self, front: list[_Way], layer: int, runs_left: int) -> list[_Way]:
        steps_left = max(0, self._step_limit - self._step_count)
        limit = max(LEAST_FRONT, steps_left // runs_left)
        if len(front) <= limit:
            return front
        front.sort(key=lambda way: self._bound_s(way.state, layer))
        self._dropped_s = min(self._dropped_s, self._bound_s(front[limit].state, layer))
        return front[:limit]

    def _bound_s(self, state: State, layer: int) -> float:
        return least_end_s(self._bounds, state, layer)

    def _finish(self, way: _Way) -> None:
        if way.state.compute_s < self._best_s:
            self._best, self._best_s = way, way.state.compute_s

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


def picks_split(picks: Picks, option_count: int) -> bool:
    """Whether one of the picks is a split."""
    return any(pick >= option_count for pick, _ in picks)


def _spelled(picks: Iterable[tuple[int, int]]) -> Iterator[int]:
    return (pick for pick, count in picks for _ in range(count))


def _undominated(ways: list[_Way]) -> list[_Way]:
    """Drop every way that another one beats or equals on all streams, with the split no less open."""
    ways.sort(key=lambda way: (way.state, way.has_split))
    kept: list[_Way] = []
    if all(way.state.read_s == ways[0].state.read_s for way in ways):
        # Ascending by when copies end: only the least computation so far decides.
        least = {False: math.inf, True: math.inf}
        for way in ways:
            if way.state.compute_s < least[way.has_split]:
                kept.append(way)
                least[True] = min(least[True], way.state.compute_s)
                if not way.has_split:
                    least[False] = way.state.compute_s
        return kept
    for way in ways:
        if not any(_beats(other, way) for other in reversed(kept)):
            kept.append(way)
    return kept


def _beats(one: _Way, other: _Way) -> bool:
    return (
        one.state.copy_s <= other.state.copy_s
        and one.state.compute_s <= other.state.compute_s
        and one.has_split <= other.has_split
    )
