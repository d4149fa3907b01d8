"""Restore plans: by which method each layer's KV comes back, and the parts of a restore that follow from it.

Pure: knows stream names, row sizes and token ranges, no tensor and no clock. It does not choose a plan, it
only says what one needs, layer by layer and part by part. Worst case: a plan the model or the target cannot
serve, which is refused.
"""

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import DELTAS, unpacked
from ctxcache.format.streams import TOKENS, StateKind, Stream

# hidden:0-30,kv:31   layers 0 to 30 by their inputs, layer 31 by K and V.
_PART = re.compile(r"(?P<method>[a-z0-9_]+):(?P<first>[0-9]+)(-(?P<last>[0-9]+))?")


class Method(enum.Enum):
    """How one layer's KV comes back; the value is its name in the compact form."""

    HIDDEN = "hidden"
    """Project the saved layer input: norm, K and V projection, positions."""
    KV = "kv"
    """Take the saved K and V, add positions to K."""
    LATENT = "latent"
    """Take the saved compressed state, add positions to its rotary part."""
    KV_AS_CACHED = "kv_as_cached"
    """Take the saved keys and values as they are."""
    TOKENS = "tokens"
    """Run the layer, and all before it, over the token ids."""
    HIDDEN_INT8 = "hidden_int8"
    """As HIDDEN, from rows in 8 bits: close to what was computed, never equal."""
    KV_INT8 = "kv_int8"
    """As KV, from rows in 8 bits: close, never equal."""
    HIDDEN_INT4 = "hidden_int4"
    """As HIDDEN, from rows in 4 bits: close, never equal."""
    KV_INT4 = "kv_int4"
    """As KV, from rows in 4 bits: close, never equal."""
    HIDDEN_DELTA_INT4 = "hidden_delta_int4"
    """As HIDDEN, from the layer below's rows and the difference in 4 bits."""
    HIDDEN_DELTA_INT3 = "hidden_delta_int3"
    """As HIDDEN_DELTA_INT4, in 3 bits."""
    HIDDEN_DELTA_INT2 = "hidden_delta_int2"
    """As HIDDEN_DELTA_INT4, in 2 bits."""
    NOTHING = "nothing"
    """The layer keeps nothing of its own: it reads others' K and V, or attends to nothing."""

    @cached_property
    def kind(self) -> StateKind:
        """The state kind this method reads. NOTHING reads none: KeyError."""
        return StateKind[self.name]

    @cached_property
    def unpacked(self) -> "Method":
        """The method that takes the rows once they are wide; itself for rows that are not packed."""
        return self if self is Method.NOTHING else Method[unpacked(self.kind).name]

    @cached_property
    def is_exact(self) -> bool:
        """Whether a layer comes back as it was, but for rounding."""
        return self.unpacked is self

    @cached_property
    def is_delta(self) -> bool:
        """Whether its rows are added to those of the layer below."""
        return self not in (Method.TOKENS, Method.NOTHING) and self.kind in DELTAS


class Stage(enum.Enum):
    """A stage that a profile times. The value is its name in profiles and observations."""

    READ = "read"
    COPY = "copy"
    PROJECT = "project"
    EMBED = "embed"
    RECOMPUTE = "recompute"
    GATHER = "gather"
    PROJECT_INT8 = "project int8"
    EMBED_INT8 = "embed int8"
    PROJECT_INT4 = "project int4"
    EMBED_INT4 = "embed int4"

    @classmethod
    def of(cls, method: Method) -> "Stage":
        """The device's stage for a layer by that method. NOTHING has none: KeyError."""
        return _STAGES[method]


_STAGES = {
    Method.TOKENS: Stage.RECOMPUTE,
    Method.HIDDEN: Stage.PROJECT,
    Method.KV: Stage.EMBED,
    Method.LATENT: Stage.EMBED,
    Method.KV_AS_CACHED: Stage.EMBED,
    Method.HIDDEN_INT8: Stage.PROJECT_INT8,
    Method.KV_INT8: Stage.EMBED_INT8,
    Method.HIDDEN_INT4: Stage.PROJECT_INT4,
    Method.KV_INT4: Stage.EMBED_INT4,
    # A delta costs one addition in the pass that makes rows of 4 bits wide.
    Method.HIDDEN_DELTA_INT4: Stage.PROJECT_INT4,
    Method.HIDDEN_DELTA_INT3: Stage.PROJECT_INT4,
    Method.HIDDEN_DELTA_INT2: Stage.PROJECT_INT4,
}


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One method per layer, layer 0 first.

    Recomputed layers (TOKENS) come before all others, because a layer can only be run on the
    output of the one before it. The layer below a delta comes back from its own inputs; those of layer 0
    may be the token ids' (`tokens:0`). Raises InvalidArgument(field="plan") otherwise, or when empty.
    """

    methods: tuple[Method, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise InvalidArgument(field="plan", problem="no layers")
        # Methods by layer, T for TOKENS:
        #
        #     T T H H K K    fine: two layers are run, their output ends there
        #     H T K          refused: layer 1 needs layer 0's output, which a restore does not compute
        if Method.TOKENS in self.methods[self.recomputed_layer_count :]:
            raise InvalidArgument(field="plan", problem="a recomputed layer follows one that is not")
        for layer, method in enumerate(self.methods):
            if method.is_delta:
                check_below(layer, None if layer == 0 else self.methods[layer - 1])

    @classmethod
    def uniform(cls, method: Method, layer_count: int) -> "RestorePlan":
        """The same method for every layer."""
        return cls((method,) * layer_count)

    @classmethod
    def parse(cls, text: str) -> "RestorePlan":
        """Read the compact form: `hidden:0-30,kv:31`; both ends count, layers ascend without a gap.

        Raises InvalidArgument(field="plan") for anything else.
        """
        methods: list[Method] = []
        for part in text.split(","):
            method, first, last = _parse_part(part)
            # Gaps and repeats are refused alike: each layer is named once, in order.
            if first != len(methods):
                raise InvalidArgument(field="plan", problem=f"{part!r} must start at layer {len(methods)}")
            methods += [method] * (last + 1 - first)
        return cls(tuple(methods))

    def __str__(self) -> str:
        """The compact form that `parse` reads."""
        return ",".join(f"{method.value}:{_span(first, end)}" for method, first, end in self._runs())

    @property
    def layer_count(self) -> int:
        """Layers of the model this plan is for."""
        return len(self.methods)

    @property
    def recomputed_layer_count(self) -> int:
        """Layers, counted from layer 0, that are run over the token ids."""
        kept = (i for i, method in enumerate(self.methods) if method is not Method.TOKENS)
        return next(kept, len(self.methods))

    def streams(self) -> tuple[Stream, ...]:
        """The streams to read, in storage order; token ids only where a layer is recomputed."""
        tokens = (TOKENS,) if self.recomputed_layer_count else ()
        return tokens + tuple(
            Stream(i, method.kind)
            for i, method in enumerate(self.methods)
            if method not in (Method.TOKENS, Method.NOTHING)
        )

    def check(self, spec: ModelSpec) -> None:
        """Raise InvalidArgument(field="plan") if `spec` has other layers or lacks a stream."""
        if spec.layer_count != self.layer_count:
            problem = f"{self.layer_count} layers, the model has {spec.layer_count}"
            raise InvalidArgument(field="plan", problem=problem)
        try:
            spec.resolve(self.streams())
        except KeyError as error:
            raise InvalidArgument(field="plan", problem=f"the model has no stream {error.args[0]}") from error

    def bytes_per_token(self, spec: ModelSpec) -> int:
        """Bytes read per token of history, token ids included; checks the plan first."""
        self.check(spec)
        return sum(stream.row_bytes for stream in spec.resolve(self.streams()))

    def _runs(self) -> Iterator[tuple[Method, int, int]]:
        begin = 0
        for end in range(1, self.layer_count + 1):
            if end == self.layer_count or self.methods[end] is not self.methods[begin]:
                yield self.methods[begin], begin, end
                begin = end


def check_below(layer: int, below: Method | None) -> None:
    """Refuse a delta at `layer` on a layer that does not come back from its inputs.

    Raises InvalidArgument(field="plan").
    """
    # Layer 0's input follows from token ids alone; that of a later layer is the output of the one before.
    is_embedded = layer == 1 and below is Method.TOKENS
    if below is None or not (is_embedded or below.unpacked is Method.HIDDEN):
        found = "nothing" if below is None else below.value
        problem = f"layer {layer} is a delta, and the layer below it comes back by {found}"
        raise InvalidArgument(field="plan", problem=problem)


def _span(begin: int, end: int) -> str:
    return f"{begin}" if end == begin + 1 else f"{begin}-{end - 1}"


def _parse_part(part: str) -> tuple[Method, int, int]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        raise InvalidArgument(field="plan", problem=f"{part!r} is not method:layer or method:first-last")
    try:
        method = Method(match["method"])
    except ValueError as error:
        known = ", ".join(item.value for item in Method)
        problem = f"{match['method']!r} is not one of {known}"
        raise InvalidArgument(field="plan", problem=problem) from error
    first = int(match["first"])
    # The last layer counts as well, unlike in all other ranges: the form is for people.
    last = int(match["last"] or first)
    if last < first:
        raise InvalidArgument(field="plan", problem=f"{part!r} ends before it starts")
    return method, first, last


# -- the parts of a restore --------------------------------------------------------------------------


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
    def of_methods(
        cls, plan: RestorePlan, token_count: int, first_tokens: Sequence[int]
    ) -> "RestoreSchedule":
        """Carry out a plan of whole layers. Raises InvalidArgument(field="plan")."""
        layers: list[list[tuple[Method, int, int]]] = [
            [] if method is Method.NOTHING else [(method, 0, token_count)] for method in plan.methods
        ]
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
        _check_chains(parts, token_count, whole)
        return cls(token_count, whole, cut, tuple(parts))

    @property
    def is_on_tokens(self) -> bool:
        """Whether layer 1 is a delta to layer 0's input, of which nothing is stored but token ids."""
        return self.recomputed_layers == 1 and 0 in self.chained_layers

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


def _check_chains(parts: Sequence[Sequence[LayerPart]], token_count: int, recomputed: int) -> None:
    """Check that a delta has all rows of the layer below, which comes before it."""
    for layer, some in enumerate(parts):
        if not any(part.method.is_delta for part in some):
            continue
        below = parts[layer - 1] if layer else ()
        levels = [(layer, some), (layer - 1, below)]
        if 0 < layer <= recomputed:
            check_below(layer, Method.TOKENS)
            levels.pop()
        else:
            check_below(layer, below[0].method if below else None)
        for level, pieces in levels:
            # Each row is added to one row of the layer below:
            # a token that came another way there has no base.
            if len(pieces) > 1 or (pieces[0].begin, pieces[0].end) != (0, token_count):
                problem = f"layer {layer} is a delta: layer {level} does not come back whole by one method"
                raise InvalidArgument(field="plan", problem=problem)


def _check_covers(layer: int, parts: Sequence[LayerPart], token_count: int) -> None:
    """Check that parts cover all tokens: one that no part brings back would be announced as it was.

    No parts: the layer has no state of its own.
    """
    gaps = [one.end != other.begin for one, other in pairwise(parts)]
    if parts and (any(gaps) or parts[-1].end != token_count):
        raise InvalidArgument(field="plan", problem=f"layer {layer} does not come back as a whole")
