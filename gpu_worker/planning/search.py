"""The search: for every layer one of its choices, so that the pipeline ends first.

Knows blocks, not what they stand for. Layers are taken in order. A prefix of them may be recomputed;
it comes first, since it waits for nothing. After it every layer takes one of its options, and one
layer of the plan may take a split instead. Ways that another one beats on every stream are dropped,
and those that no rest of the plan can bring below the best end known; what is left is exact.
Worst case: unlike layers in great number, with more than `front_limit` ways that cannot be told
apart. The most promising are kept, and the solution says that it is not exact, and by how much at most.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
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
        self._bound_s = partial(least_end_s, self._bounds)
        self._runs = runs_of(self._choices, option_counts, self._bounds)
        self._best: _Way | None = None
        self._best_s = math.inf
        self._dropped_s = math.inf
        self._step_count = 0

    def run(self) -> Solution | None:
        """Search once."""
        roots = sorted(self._roots())
        for root in roots[:2]:
            self._descend(root)
        splits = sorted(self._split_roots())
        # By run, and behind the last one what needs none.
        entering: list[list[_Way]] = [[] for _ in range(len(self._runs) + 1)]
        ends = [run.end for run in self._runs]
        for root in sorted(chain(roots, splits)):
            entering[bisect_right(ends, root.layer)].append(root)
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
            if all(
                bound.cost(begun) + cost + bound.rest_s[count + 1] < self._best_s
                for bound, cost in zip(self._bounds, least[id(frontier)], strict=True)
            ):
                yield from self._split_at(count, begun, frontier)

    def _split_at(self, count: int, begun: State, frontier: Sequence[Block]) -> Iterator[_Way]:
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

    def _descend_run(self, way: _Way, run: Run) -> _Way | None:
        """None where the best end known cannot be beaten that way."""
        state, taken = way.state, [0] * run.option_count
        options = run.blocks[: run.option_count]
        for layer in range(way.layer, run.end):
            found = self._most_promising(options, state, layer + 1)
            if found is None:
                return None
            pick, state = found
            taken[pick] += 1
        picks = run.sorted(taken)
        if run.end - way.layer > 1:
            state = run.block(picks).after(way.state)
        return _Way(way.bound_s, run.end, state, way.has_split, way.recomputed_count, picks, way)

    def _most_promising(self, options: Sequence[Block], state: State, layer: int) -> tuple[int, State] | None:
        """The option behind which, before `layer`, the bound is least, and the state there; None: none may be best."""
        least_s, found = self._best_s, None
        for pick, block in enumerate(options):
            after = block.after(state)
            bound_s = self._bound_s(after, layer, least_s)
            if bound_s < least_s:
                least_s, found = bound_s, (pick, after)
        return found

    # -- through the layers ------------------------------------------------------------------------

    def _through(self, run: Run, front: list[_Way], roots: list[_Way], runs_left: int) -> list[_Way]:
        """Return the ways past a run; none behind the last one."""
        found: list[_Way] = []
        is_last = run.end == len(self._layers)
        for way in chain(front, self._entering(roots)):
            may_split = not way.has_split and self._may_split(way)
            for picks, block, is_split in run.ways(
                way.state, way.layer, self._bounds, self._best_s, may_split=may_split
            ):
                self._step_count += 1
                state = block.after(way.state)
                bound_s = state[-1] if is_last else self._bound_s(state, run.end, self._best_s)
                if bound_s >= self._best_s:
                    continue
                has_split = way.has_split or is_split
                after = _Way(bound_s, run.end, state, has_split, way.recomputed_count, picks, way)
                if is_last:
                    self._finish(after)
                else:
                    found.append(after)
        return self._kept(_undominated(found), runs_left)

    def _entering(self, roots: list[_Way]) -> Iterator[_Way]:
        """Where plans begin here, the most promising first; only that one when there were too many steps."""
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
        limit = max(LEAST_FRONT, steps_left // runs_left)
        if len(front) <= limit:
            return front
        front.sort(key=_BOUND_S)
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
    return one.state[1] <= other.state[1] and one.end_s <= other.end_s and one.has_split <= other.has_split
