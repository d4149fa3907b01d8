"""Restore plans: by which method each layer's KV comes back.

Pure: knows stream names and row sizes, no tensor and no clock. It does not choose a plan, it only
says what one needs. Worst case: a plan the model cannot serve, which `check` refuses.
"""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import DELTAS, unpacked
from ctxcache.format.streams import TOKENS, StateKind, Stream

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
    """As KV, likewise."""
    HIDDEN_INT4 = "hidden_int4"
    """As HIDDEN, from rows in 4 bits, likewise."""
    KV_INT4 = "kv_int4"
    """As KV, likewise."""
    HIDDEN_DELTA_INT4 = "hidden_delta_int4"
    """As HIDDEN, from the layer below's rows and the difference in 4 bits."""
    HIDDEN_DELTA_INT3 = "hidden_delta_int3"
    """Likewise, in 3 bits."""
    HIDDEN_DELTA_INT2 = "hidden_delta_int2"
    """Likewise, in 2 bits."""

    @cached_property
    def kind(self) -> StateKind:
        """The state kind this method reads."""
        return StateKind[self.name]

    @cached_property
    def unpacked(self) -> "Method":
        """The method that takes the rows once they are wide; itself for rows that always were."""
        return Method[unpacked(self.kind).name]

    @cached_property
    def is_exact(self) -> bool:
        """Whether a layer comes back as it was, but for rounding."""
        return self.unpacked is self

    @cached_property
    def is_delta(self) -> bool:
        """Whether its rows are added to those of the layer below."""
        return self is not Method.TOKENS and self.kind in DELTAS


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One method per layer, layer 0 first.

    Recomputed layers (TOKENS) come before all others, because a layer can only be run on the
    output of the one before it. The layer below a delta comes back from its own inputs. Raises
    InvalidArgument(field="plan") otherwise, or when empty.
    """

    methods: tuple[Method, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise InvalidArgument(field="plan", problem="no layers")
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
            Stream(i, method.kind) for i, method in enumerate(self.methods) if method is not Method.TOKENS
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
    if below is None or below.unpacked is not Method.HIDDEN:
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
    last = int(match["last"] or first)
    if last < first:
        raise InvalidArgument(field="plan", problem=f"{part!r} ends before it starts")
    return method, first, last
