"""A row of the table: what is measured, beside what, with which goal, and how to set both sides up.

Knows no path. A side is called with the number of the round and returns what one walk over the bytes
cost, in the row's unit; it checks all bytes it moved, outside what it times. Worst case: WrongBytes,
and the row has no figure.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ctxcache.bench.statistics import Goal
from ctxcache.format.streams import TOKEN_ROW_BYTES

Side = Callable[[int], float]


class NoPeer(Exception):
    """What the row is measured beside, or the path itself, is not here. The sentence says how to get it."""


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
    """Rows whose names begin with one of the comma-separated patterns, in their order. Raises KeyError(pattern)."""
    wanted = [part.strip() for part in patterns.split(",") if part.strip()]
    for part in wanted:
        if not any(name.startswith(part) for name in rows):
            raise KeyError(part)
    return [row for name, row in rows.items() if any(name.startswith(part) for part in wanted)]
