"""Assignments: every layer's way back, and the steps that this makes in the pipeline.

Worst case: none, it is bookkeeping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_worker.plan import Method
from gpu_worker.planning.block import Block
from gpu_worker.planning.option import LayerOptions, Option, Piece
from gpu_worker.planning.timeline import Step, Timeline, simulate

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
    assignment: Assignment, layers: Sequence[LayerOptions], new_tokens: Pass, token_ids: Block
) -> Timeline:
    """Let an assignment through the pipeline."""
    return simulate(_steps(assignment, layers, new_tokens, token_ids))


def _steps(
    assignment: Assignment, layers: Sequence[LayerOptions], new_tokens: Pass, token_ids: Block
) -> Iterator[Step]:
    if assignment.needs_token_ids:
        yield Step(-1, TOKEN_IDS, token_ids.read_s, token_ids.copy_s)
    for layer, pieces in enumerate(pieces_of(assignment, layers)):
        for piece in pieces:
            what = piece.method.value if piece.method else "nothing"
            yield Step(layer, what, piece.read_s, piece.copy_s, piece.device_s)
        if new_tokens.is_by_layer and new_tokens.seconds[layer]:
            yield Step(layer, PREFILL, compute_s=new_tokens.seconds[layer])
    if not new_tokens.is_by_layer:
        for layer, seconds in enumerate(new_tokens.seconds):
            if seconds:
                yield Step(layer, PREFILL, compute_s=seconds)


def pieces_of(assignment: Assignment, layers: Sequence[LayerOptions]) -> Iterator[tuple[Piece, ...]]:
    """Each layer's pieces, layer 0 first."""
    for layer in layers[: assignment.recomputed_count]:
        if layer.recompute is not None:
            yield (layer.recompute,)
    yield from (option.pieces for option in assignment.options)
