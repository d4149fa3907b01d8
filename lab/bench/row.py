"""A row of the table: what is measured, beside what, with which goal, and how to set both sides up.

Knows no path. A side is called with the number of the round. It returns what one walk over the bytes cost, in
the row's unit, and checks all bytes it moved outside what it times. Statistics of rounds are here too, as
goals are of ratios within a round. Worst case: WrongBytes, and the row has no figure.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKEN_ROW_BYTES, DType, StreamSpec

Side = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, between their 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Raises ValueError for no values."""
        return cls(percentile(values, 50), percentile(values, 10), percentile(values, 90))


@dataclass(frozen=True, slots=True)
class Goal:
    """How a ratio has to compare with `bound`: `is_floor` says at least, otherwise at most."""

    bound: float
    is_floor: bool

    def is_met(self, ratio: float) -> bool:
        """Whether this ratio is good enough."""
        return ratio >= self.bound if self.is_floor else ratio <= self.bound

    def ratio(self, ours: float, beside: float) -> float:
        """Speed of ours by that beside where more is better, cost by cost where less is. Both are costs."""
        return beside / ours if self.is_floor else ours / beside

    def __str__(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {self.bound:g}"


def at_least(bound: float) -> Goal:
    """Goal for a ratio of speeds."""
    return Goal(bound, is_floor=True)


def at_most(bound: float) -> Goal:
    """Goal for a ratio of costs."""
    return Goal(bound, is_floor=False)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the neighbours. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_round(goal: Goal, ours: Sequence[float], beside: Sequence[float]) -> Spread:
    """Ratios of the two sides of each round. Raises ValueError where rounds differ in number."""
    return Spread.of([goal.ratio(a, b) for a, b in zip(ours, beside, strict=True)])


class NoPeer(Exception):
    """The peer of the row, or the path itself, is not here. The sentence says how to get it."""


class WrongBytes(Exception):
    """A path delivered other bytes than were saved."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved: `context_count` contexts of `layer_count` x `token_count` rows of `row_bytes`."""

    context_count: int
    layer_count: int
    token_count: int
    row_bytes: int
    call_count: int
    """Small calls per round, of rows that count calls."""
    segment_count: int
    """Segments of the data directory that is opened."""

    @property
    def context_bytes(self) -> int:
        """Bytes of one context: token ids, then each layer's rows."""
        return self.token_count * (TOKEN_ROW_BYTES + self.layer_count * self.row_bytes)

    @property
    def walk_bytes(self) -> int:
        """Bytes of a round."""
        return self.context_count * self.context_bytes


FULL = Scale(4, 32, 512, 4096, call_count=300, segment_count=1_000_000)
"""Contexts of 64 MiB: K/V of 512 tokens of an 8B model with grouped heads; 256 MiB a walk, past any cache."""
QUICK = Scale(2, 4, 128, 1024, call_count=20, segment_count=2_000)
"""Seconds in all: for tests and a first look. Its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how to measure. `directory` is on the disk to measure, empty, and the row's own."""

    directory: Path
    scale: Scale
    transport: str = "tcp"


@dataclass(frozen=True, slots=True)
class Sides:
    """The two sides of a row; without `beside`, ours is the figure. `notes` are facts to print with it."""

    ours: Side
    beside: Side | None
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `open` sets up both sides, or raises NoPeer.

    `unit` is what a side returns. `is_moving` rows move `Scale.walk_bytes` a round, so that GB/s can be said.
    """

    name: str
    path: str
    beside: str
    goal: Goal
    open: Callable[[Place], AbstractContextManager[Sides]]
    unit: str = "s"
    is_moving: bool = True


def named(rows: Mapping[str, Row], patterns: str) -> list[Row]:
    """Rows whose names begin with one of the comma-separated patterns, in their order.

    Raises KeyError(pattern).
    """
    wanted = [part.strip() for part in patterns.split(",") if part.strip()]
    for part in wanted:
        if not any(name.startswith(part) for name in rows):
            raise KeyError(part)
    return [row for name, row in rows.items() if any(name.startswith(part) for part in wanted)]


def bench_model(digest: str, layer_count: int, streams: tuple[StreamSpec, ...]) -> ModelSpec:
    """A model of these streams. The digest of its weights tells it from others."""
    return ModelSpec(
        model_id="bench",
        architecture="Bench",
        revision="",
        weights_digest=digest,
        tokenizer_digest="",
        dtype=DType.FLOAT16,
        layer_count=layer_count,
        hidden_size=64,
        kv_head_count=1,
        head_size=64,
        rope="",
        norm="",
        is_relocatable=True,
        streams=streams,
    )
