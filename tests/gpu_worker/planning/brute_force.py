"""Every plan of a small instance, through the pipeline written out: what the search must equal.

Knows nothing of blocks, bounds or runs. Layers are small whole numbers and fractions, so that ties,
streams with nothing to do and layers that are alike all happen.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, permutations, product

from gpu_worker.planning.assignment import Step, simulate
from gpu_worker.planning.block import NOTHING, StreamBlock, step
from gpu_worker.planning.search import Choices

Seconds = tuple[float, float, float]
"""Reading, copying, computing."""
Way = tuple[Seconds, ...]
"""One choice: its pieces."""


@dataclass(frozen=True)
class Layer:
    """One layer's possible times, as `Choices` but in plain numbers."""

    options: tuple[Way, ...]
    splits: tuple[Way, ...]
    recompute_s: float | None
    frontier: tuple[Way, ...]

    def choices(self) -> Choices:
        """The same for the search."""
        return Choices(
            options=tuple(map(block, self.options)),
            splits=tuple(map(block, self.splits)),
            recompute=None if self.recompute_s is None else step(compute_s=self.recompute_s),
            frontier=tuple(map(block, self.frontier)),
        )


@dataclass(frozen=True)
class Instance:
    """A small problem."""

    layers: tuple[Layer, ...]
    token_ids_s: float

    def least_s(self) -> float:
        """The end of the best plan; infinite where there is none."""
        return min((_end_s(steps) for steps in self._plans()), default=math.inf)

    def _plans(self) -> Iterator[list[Seconds]]:
        for count in range(len(self.layers) + 1):
            if count and self.layers[count - 1].recompute_s is None:
                return
            before = [(0.0, 0.0, layer.recompute_s or 0.0) for layer in self.layers[:count]]
            for picks in product(
                *(_ways(layer, is_first=i == 0) for i, layer in enumerate(self.layers[count:]))
            ):
                if sum(is_split for _, is_split, _ in picks) <= 1:
                    needs_ids = bool(count) or any(recomputes for _, _, recomputes in picks)
                    ids = [(0.0, self.token_ids_s, 0.0)] if needs_ids else []
                    yield [*ids, *before, *chain.from_iterable(way for way, _, _ in picks)]


def any_order_least_s(options: Sequence[Seconds], layer_count: int) -> float:
    """The best end of like layers over all their methods and all orders of layers."""
    mixes = product(options, repeat=layer_count)
    return min(
        _end_s(list(order)) for mix in {tuple(sorted(mix)) for mix in mixes} for order in permutations(mix)
    )


def instance(generator: random.Random) -> Instance:
    """A random one, of up to five layers of up to three kinds."""
    has_reads, empty = generator.random() < 0.4, generator.choice([0.0, 0.2])
    recompute_s = generator.random() * 8 if generator.random() < 0.7 else None

    def seconds() -> Seconds:
        most = [
            0.0
            if generator.random() < empty
            else generator.choice([generator.randint(1, 6), generator.random() * 6])
            for _ in range(3)
        ]
        return (most[0] * has_reads, most[1], most[2])

    def ways(most: int, pieces: int) -> tuple[Way, ...]:
        return tuple(tuple(seconds() for _ in range(pieces)) for _ in range(generator.randint(0, most)))

    kinds = [
        Layer(ways(3, 1), ways(2, 2), recompute_s, ways(2, 1) if recompute_s is not None else ())
        for _ in range(generator.randint(1, 3))
    ]
    layers = tuple(generator.choice(kinds) for _ in range(generator.randint(1, 5)))
    return Instance(layers, generator.choice([0.0, 0.1]))


def block(way: Way) -> StreamBlock:
    """A way as one block."""
    whole = NOTHING
    for read_s, copy_s, compute_s in way:
        whole = whole.then(step(read_s=read_s, copy_s=copy_s, compute_s=compute_s))
    return whole


def _ways(layer: Layer, *, is_first: bool) -> list[tuple[Way, bool, bool]]:
    """(way, is a split, recomputes)."""
    ways = [(way, False, False) for way in layer.options] + [(way, True, False) for way in layer.splits]
    return ways + [(way, True, True) for way in layer.frontier if is_first]


def _end_s(steps: Sequence[Seconds]) -> float:
    return simulate(Step(0, "", *seconds) for seconds in steps).end_s
