"""Holdings: what the store has of a session, layer by layer; and what an engine lets a planner do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.planning.profile import StatePlace


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """Tokens [begin, end) whose rows lie in one place."""

    place: StatePlace
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise InvalidArgument(field="span", problem=f"[{self.begin}, {self.end}) is no token range")


@dataclass(frozen=True, slots=True)
class LayerHolding:
    """One layer's kinds of state, each with its spans in token order."""

    kinds: tuple[tuple[StateKind, tuple[HeldSpan, ...]], ...]
    snapshot_tokens: int = 0
    """Tokens behind which a copy of a LINEAR layer's state is held; 0: none is."""

    def sizes(
        self, kind: StateKind, begin: int, end: int, row_bytes: int
    ) -> Mapping[StatePlace, float] | None:
        """Bytes of tokens [begin, end) by place; None where a token's row is not held."""
        # Spans of a kind, and tokens [begin, end) that are asked for:
        #
        #     spans    [ DRAM: 0 .. 512 )[ SSD: 512 .. 1024 )
        #     asked            [ 256 .............. 800 )            DRAM 256 rows, SSD 288 rows
        #
        # At a gap `begin` stands still, and the tokens cannot be had by this kind.
        sizes: dict[StatePlace, float] = {}
        for span in dict(self.kinds).get(kind, ()):
            if span.begin <= begin < span.end:
                until = min(end, span.end)
                sizes[span.place] = sizes.get(span.place, 0.0) + (until - begin) * row_bytes
                begin = until
        return sizes if begin >= end else None


@dataclass(frozen=True, slots=True)
class Holding:
    """The store's state of one session, layer 0 first. Token ids are always held."""

    layers: tuple[LayerHolding, ...]

    @classmethod
    def alike(cls, layer_count: int, kinds: Iterable[StateKind], spans: Iterable[HeldSpan]) -> "Holding":
        """The same kinds in the same places for every layer, as the store keeps them."""
        held = tuple(spans)
        return cls((LayerHolding(tuple((kind, held) for kind in kinds)),) * layer_count)


SPLIT_TOKENS = 64
"""Splits fall between the store's segments."""


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """An engine's abilities.

    `can_recompute`: it offers its first layers to be run by themselves. `starts_by_layer`: it begins with
    new tokens when layer 0 is restored, and takes each later layer as it comes; otherwise it starts when
    all are there. `can_split`: a layer's tokens may come back by two methods. `split_count`: most splits of
    a layer that are looked at. `lossy_kinds`: packed kinds that the caller takes, from `loss.allowed_loss`;
    none unless said so.
    """

    can_recompute: bool = True
    starts_by_layer: bool = False
    can_split: bool = False
    split_count: int = 7
    lossy_kinds: frozenset[StateKind] = frozenset()
