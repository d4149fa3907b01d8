"""Reservation: a writer's room in a session, run by run, and what part of it is visible.

Facts and arithmetic: it takes and gives back nothing itself. Worst case: none; whoever asks for what
is not there is told so.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from ctxcache.core.budget import Client
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row_begin, row_end)` of a segment to be written; the first one's token has index `token_begin`."""

    segment: Segment
    row_begin: int
    row_end: int
    token_begin: int

    @property
    def token_end(self) -> int:
        """One past the index of the last row's token."""
        return self.token_begin + self.row_end - self.row_begin


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the tokens `[write_offset, end)`; those below `committed` are visible. Owned by the event loop.

    Those below `marked` will not change any more. `promised_bytes`: of slots for what is being made room.
    `runs` in token order, one per segment, each segment held once; those committed in full are let go.
    `client` is whose share of the arena they are counted in.
    """

    reservation_id: int
    session: Session
    committed: int
    end: int
    deadline_ns: int
    client: Client
    marked: int = 0
    promised_bytes: int = 0
    runs: list[Run] = field(default_factory=list)

    def runs_of(self, token_begin: int, token_end: int) -> list[Run]:
        """The runs that hold tokens of `[token_begin, token_end)`."""
        first = bisect_right(self.runs, token_begin, key=lambda run: run.token_begin) - 1
        last = bisect_left(self.runs, token_end, key=lambda run: run.token_begin)
        return self.runs[max(first, 0) : last]

    def check(self, token_count: int) -> None:
        """Raise InvalidArgument unless there is room up to `token_count`, and nothing beyond it is visible."""
        if not self.committed <= token_count <= self.end:
            problem = f"{token_count} is not within [{self.committed}, {self.end}]"
            raise InvalidArgument(field="token_count", problem=problem)

    def mark(self, token_count: int) -> list[Segment]:
        """Tokens below `token_count` will not change any more; returns segments that are full with them."""
        runs = self.runs_of(max(self.marked, self.committed), token_count)
        self.marked = max(self.marked, token_count)
        return [
            run.segment
            for run in runs
            if run.row_end == run.segment.layout.segment_tokens and run.token_end <= token_count
        ]

    def last(self) -> tuple[Segment | None, int]:
        """The segment that goes on, and its next row; None where a new one is needed."""
        if self.runs:
            segment, row = self.runs[-1].segment, self.runs[-1].row_end
            return (segment, row) if row < segment.layout.segment_tokens else (None, 0)
        tail = self.session.growing_tail
        return (tail, tail.row_count) if tail and tail.dram else (None, 0)

    def needed(self, token_count: int) -> dict[int, int]:
        """Slot bytes by segment of what is pinned with so many tokens more; below 0 what is not made yet."""
        if not token_count:
            return {}
        last, row = self.last()
        layout = self.session.layout
        held = [run.segment.segment_id for run in self.runs] or ([last.segment_id] if last else [])
        free_row_count = layout.segment_tokens - row if last else 0
        new_count = -(-max(token_count - free_row_count, 0) // layout.segment_tokens)
        return dict.fromkeys([*held, *range(-new_count, 0)], layout.size_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Room that another thread may fill while it is lent: runs in token order, and each one's slot."""

    layout: SegmentLayout
    runs: tuple[tuple[Run, memoryview], ...]

    def places(self, stream: Stream, token_begin: int, token_end: int) -> list[memoryview] | None:
        """Where rows of one stream belong, in token order; None unless all of them have room here."""
        first = bisect_right(self.runs, token_begin, key=lambda item: item[0].token_begin) - 1
        found = []
        for run, view in self.runs[max(first, 0) :]:
            begin, end = max(token_begin, run.token_begin), min(token_end, run.token_end)
            if begin >= end:
                break
            row = run.row_begin + begin - run.token_begin
            found.append(view[self.layout.rows(stream, row, row + end - begin)])
            if end == token_end:
                return found
        return None
