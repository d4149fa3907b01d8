"""Schedules: what a pipeline is to do, layer by layer and part by part, in the order of the plan.

Pure: token ranges and methods, no tensor. Worst case: a plan for other layers than the target's, refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKENS, Stream
from gpu_worker.plan import Method, RestorePlan, check_below
from gpu_worker.planning.planner import Plan


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Tokens [begin, end) of a layer, from rows of `method`'s kind."""

    layer: int
    method: Method
    begin: int
    end: int

    @property
    def stream(self) -> Stream:
        """The stream that it reads."""
        return Stream(self.layer, self.method.kind)

    def batches(self, most_tokens: int) -> Iterator[tuple[int, int]]:
        """Token ranges of at most `most_tokens` each, in order."""
        for begin in range(self.begin, self.end, most_tokens):
            yield begin, min(begin + most_tokens, self.end)


@dataclass(frozen=True, slots=True)
class RestoreSchedule:
    """All parts of a restore of `token_count` tokens.

    The first `recomputed_layers` layers are run over the token ids; of the one behind them, the first
    `recomputed_tokens` tokens are. `parts` has the rows of each layer that come from the store, in token
    order.
    """

    token_count: int
    recomputed_layers: int
    recomputed_tokens: int
    parts: tuple[tuple[LayerPart, ...], ...]

    @classmethod
    def of_plan(cls, plan: Plan, first_tokens: Sequence[int]) -> "RestoreSchedule":
        """Carry out a planner's plan; each layer from the first token that the target needs of it.

        Raises InvalidArgument(field="plan").
        """
        layers = [
            [(piece.method, piece.begin, piece.end) for piece in pieces if piece.method]
            for pieces in plan.layers
        ]
        return cls.of_pieces(layers, plan.request.history, first_tokens)

    @classmethod
    def of_methods(
        cls, plan: RestorePlan, token_count: int, first_tokens: Sequence[int]
    ) -> "RestoreSchedule":
        """Carry out a plan of whole layers. Raises InvalidArgument(field="plan")."""
        layers: list[list[tuple[Method, int, int]]] = [[(method, 0, token_count)] for method in plan.methods]
        return cls.of_pieces(layers, token_count, first_tokens)

    @classmethod
    def of_pieces(
        cls,
        layers: Sequence[Sequence[tuple[Method, int, int]]],
        token_count: int,
        first_tokens: Sequence[int],
    ) -> "RestoreSchedule":
        """Carry out (method, begin, end) of each layer, in token order.

        Raises InvalidArgument(field="plan").
        """
        if len(layers) != len(first_tokens):
            problem = f"{len(layers)} layers, the target has {len(first_tokens)}"
            raise InvalidArgument(field="plan", problem=problem)
        is_whole = [[piece[0] for piece in pieces] == [Method.TOKENS] for pieces in layers]
        whole = is_whole.index(False) if False in is_whole else len(layers)
        cut = 0
        parts: list[tuple[LayerPart, ...]] = [()] * whole
        for layer in range(whole, len(layers)):
            some = list(_parts(layer, layers[layer], first_tokens[layer]))
            _check_covers(layer, some, token_count)
            if layer == whole and some and some[0].method is Method.TOKENS:
                cut = some.pop(0).end
            if any(part.method is Method.TOKENS for part in some):
                raise InvalidArgument(
                    field="plan", problem=f"layer {layer} is recomputed, one before it is not"
                )
            parts.append(tuple(some))
        _check_chains(parts, token_count)
        return cls(token_count, whole, cut, tuple(parts))

    @property
    def needs_token_ids(self) -> bool:
        """Whether anything is recomputed."""
        return self.recomputed_layers > 0 or self.recomputed_tokens > 0

    @property
    def chained_layers(self) -> frozenset[int]:
        """Layers whose wide rows the layer above needs, because it is a delta."""
        return frozenset(
            layer - 1 for layer, some in enumerate(self.parts) if any(part.method.is_delta for part in some)
        )

    def streams(self) -> tuple[Stream, ...]:
        """The streams to read, in storage order; token ids only where something is recomputed."""
        rows = {part.stream for some in self.parts for part in some}
        return ((TOKENS,) if self.needs_token_ids else ()) + tuple(sorted(rows))


def _parts(layer: int, pieces: Sequence[tuple[Method, int, int]], first_token: int) -> Iterator[LayerPart]:
    """The pieces from the target's first token on: the first one reaches back to it, or is cut there."""
    for index, (method, begin, end) in enumerate(pieces):
        start = first_token if index == 0 else max(begin, first_token)
        if method is Method.TOKENS or start < end:
            yield LayerPart(layer, method, start, end)


def _check_chains(parts: Sequence[Sequence[LayerPart]], token_count: int) -> None:
    """A delta needs all rows of the layer below, and has them when it comes: layers come in order."""
    for layer, some in enumerate(parts):
        if not any(part.method.is_delta for part in some):
            continue
        below = parts[layer - 1] if layer else ()
        check_below(layer, below[0].method if below else None)
        for level, pieces in ((layer, some), (layer - 1, below)):
            if len(pieces) > 1 or (pieces[0].begin, pieces[0].end) != (0, token_count):
                problem = f"layer {layer} is a delta: layer {level} does not come back whole by one method"
                raise InvalidArgument(field="plan", problem=problem)


def _check_covers(layer: int, parts: Sequence[LayerPart], token_count: int) -> None:
    """A token that no part brings back would be announced as it was.

    No parts: the layer has no state of its own.
    """
    gaps = [one.end != other.begin for one, other in pairwise(parts)]
    if parts and (any(gaps) or parts[-1].end != token_count):
        raise InvalidArgument(field="plan", problem=f"layer {layer} does not come back as a whole")
