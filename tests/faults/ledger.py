"""The ledger of a run over one data directory: tags, sessions, and rows that follow from tags.

Knows the client's types and no server. Rows of every stream follow from the token ids beside them, so
that whatever is read says itself whether it is whole and whose it is.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ctxcache.client.rows import SessionRows
from ctxcache.format.layout import LONGEST_SEGMENT_TOKENS, SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from tests.faults.blocks import KeptBlocks
from tests.faults.expected import Expected
from tests.faults.rows import Rows, rows_at
from tests.model_specs import small_model

OWNER = 7


@dataclass(frozen=True, slots=True)
class Shape:
    """The streams that every session of a data directory stores."""

    layer_count: int
    row_bytes: int

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Hidden states of every layer."""
        return tuple(Stream(layer, StateKind.HIDDEN) for layer in range(self.layer_count))

    @property
    def model(self) -> ModelSpec:
        """A model that has them."""
        specs = tuple(StreamSpec(stream, self.row_bytes, DType.FLOAT16) for stream in self.streams)
        return small_model(
            *specs,
            model_id="crash",
            architecture="Crash",
            revision="1",
            layer_count=self.layer_count,
            hidden_size=self.row_bytes // 2,
            head_size=self.row_bytes // 2,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a segment of 64 tokens in either tier."""
        return SegmentLayout(self.model.resolve(self.streams)).size_bytes

    @property
    def longest_slot_bytes(self) -> int:
        """Bytes of the longest segment."""
        return SegmentLayout(self.model.resolve(self.streams)).of(LONGEST_SEGMENT_TOKENS).size_bytes


@dataclass(slots=True)
class Ledger:
    """Sessions by name, and the next tag. Thread-safe where clients share it."""

    shape: Shape
    sessions: dict[str, Expected] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    blocks: KeptBlocks = field(init=False)
    operation_count: int = 0
    told_durable: threading.Event = field(default_factory=threading.Event)
    """Set by each answer that says that tokens are durable."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _next_tag: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.blocks = KeptBlocks(self.shape.slot_bytes)

    def new_name(self) -> str:
        """A session id that was never used."""
        return f"s{next(self._numbers)}"

    def take_tags(self, count: int) -> tuple[int, ...]:
        """Tags that were never used, ascending."""
        with self._lock:
            begin, self._next_tag = self._next_tag, self._next_tag + count
        return tuple(range(begin, begin + count))

    def find(self, finding: str | None) -> None:
        """Note what broke a promise; None is nothing."""
        if finding is not None:
            with self._lock:
                self.findings.append(finding)

    def count(self, what: str, by: int = 1) -> None:
        """Count what was done."""
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + by

    def began_operation(self) -> None:
        """Count an operation, which moves on the moment of the next blow."""
        with self._lock:
            self.operation_count += 1

    def rows(self, tags: Sequence[int]) -> dict[Stream, Rows]:
        """The rows of these tokens, of every stream."""
        positions = np.array(tags, np.int64)
        rows = {s: rows_at(OWNER, s, positions, self.shape.row_bytes) for s in self.shape.streams}
        return {TOKENS: positions.astype("<i4").view(np.uint8).reshape(len(tags), 4), **rows}

    def read_tags(self, rows: SessionRows) -> tuple[tuple[int, ...], str | None]:
        """Read every stream; returns the token ids, and what is wrong with the rows beside them."""
        tags = tuple(int(tag) for tag in rows.array(TOKENS).view("<i4").ravel())
        expected = self.rows(tags)
        for stream in self.shape.streams:
            wrong = np.flatnonzero((rows.array(stream) != expected[stream]).any(axis=1))
            if len(wrong):
                return (
                    tags,
                    f"{rows.session.name}: {stream} has a foreign row at token {wrong[0]} of {len(tags)}",
                )
        return tags, None
