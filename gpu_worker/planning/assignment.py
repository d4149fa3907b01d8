"""Assignments: every layer's way back, and the timeline that its steps make in the pipeline.

```
   read     [layer 0][layer 1][layer 2]
   copy              [layer 0][layer 1][layer 2]
   compute                    [layer 0 ][layer 1 ][layer 2 ]
```

Steps go through the three streams in the order of layers. A step enters a stream when the stream is free
and the step has left the stream before. `simulate` is the definition of a plan's time. Worst case: none,
it is arithmetic.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker.planning.block import StreamBlock
from gpu_worker.planning.option import LayerOptions, LayerPiece, Option
from gpu_worker.planning.plan import Method


class Step(NamedTuple):
    """Work on one layer that passes all streams; 0 seconds where a stream has nothing to do."""

    layer: int
    what: str
    read_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0


class Timed(NamedTuple):
    """A step and when it leaves each stream, in seconds from the start."""

    step: Step
    read_end_s: float
    copy_end_s: float
    compute_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each step began and ended."""

    steps: tuple[Timed, ...]

    @property
    def end_s(self) -> float:
        """When the last step has left the last stream."""
        return self.steps[-1].compute_end_s if self.steps else 0.0

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each stream works: the stages' predicted times."""
        return {
            "read": sum(timed.step.read_s for timed in self.steps),
            "copy": sum(timed.step.copy_s for timed in self.steps),
            "compute": sum(timed.step.compute_s for timed in self.steps),
        }

    def restored_s(self, layer: int, *, besides: str = "") -> float:
        """When the layer has left the pipeline, steps called `besides` not counted."""
        ends = (
            timed.compute_end_s
            for timed in self.steps
            if timed.step.layer == layer and timed.step.what != besides
        )
        return max(ends, default=0.0)


# In seconds, for each step in order (r, c, p: its reading, copying, computing):
#
#     read'    = read + r
#     copy'    = max(copy, read') + c            a stream waits for itself, and for the step's bytes
#     compute' = max(compute, copy') + p
#
# Buffers are taken to be unlimited: the real pipeline reads at most four batches ahead.
def simulate(steps: Iterable[Step]) -> Timeline:
    """Let the steps through, in order."""
    read_s = copy_s = compute_s = 0.0
    timed: list[Timed] = []
    for step in steps:
        read_s += step.read_s
        copy_s = max(copy_s, read_s) + step.copy_s
        compute_s = max(compute_s, copy_s) + step.compute_s
        timed.append(Timed(step, read_s, copy_s, compute_s))
    return Timeline(tuple(timed))


TOKEN_IDS, PREFILL = "token ids", "prefill"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The first `recomputed_count` layers are recomputed, the others come back by `options`."""

    recomputed_count: int
    options: tuple[Option, ...]

    @property
    def needs_token_ids(self) -> bool:
        """Whether anything is recomputed."""
        return self.recomputed_count > 0 or any(
            piece.method is Method.TOKENS for option in self.options for piece in option.pieces
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """The new tokens' pass: seconds per layer, and whether it follows layer by layer."""

    seconds: tuple[float, ...]
    is_by_layer: bool

    def behind(self, layer: int) -> float:
        """Seconds that come right behind a layer's restoration."""
        return self.seconds[layer] if self.is_by_layer else 0.0


def timeline(
    assignment: Assignment, layers: Sequence[LayerOptions], new_tokens: Pass, token_ids: StreamBlock
) -> Timeline:
    """Let an assignment through the pipeline."""
    return simulate(_steps(assignment, layers, new_tokens, token_ids))


def _steps(
    assignment: Assignment, layers: Sequence[LayerOptions], new_tokens: Pass, token_ids: StreamBlock
) -> Iterator[Step]:
    # Token ids come before all layers: 4 bytes a token, for which recomputation alone waits.
    if assignment.needs_token_ids:
        yield Step(-1, TOKEN_IDS, token_ids.read_s, token_ids.copy_s)
    for layer, pieces in enumerate(pieces_of(assignment, layers)):
        for piece in pieces:
            what = piece.method.value if piece.method else "nothing"
            yield Step(layer, what, piece.read_s, piece.copy_s, piece.device_s)
        # Behind each layer, or behind all of them:
        #
        #     by layer   [restore 0][pass 0][restore 1][pass 1] ...
        #     otherwise  [restore 0][restore 1] ...   [pass 0][pass 1] ...
        if new_tokens.is_by_layer and new_tokens.seconds[layer]:
            yield Step(layer, PREFILL, compute_s=new_tokens.seconds[layer])
    if not new_tokens.is_by_layer:
        for layer, seconds in enumerate(new_tokens.seconds):
            if seconds:
                yield Step(layer, PREFILL, compute_s=seconds)


def pieces_of(assignment: Assignment, layers: Sequence[LayerOptions]) -> Iterator[tuple[LayerPiece, ...]]:
    """Each layer's pieces, layer 0 first."""
    for layer in layers[: assignment.recomputed_count]:
        if layer.recompute is not None:
            yield (layer.recompute,)
    yield from (option.pieces for option in assignment.options)
