"""Reservation: a writer's room in a session, run by run, and what part of it is visible.

Facts and arithmetic: it takes and gives back nothing itself. Worst case: none; whoever asks for what
is not there is told so.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ctxcache.core.budget import Client
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream
from ctxcache.format.sums import Place, Sums, Tally


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

    def row_of(self, token: int) -> int:
        """The row of a token."""
        return self.row_begin + token - self.token_begin


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the tokens `[write_offset, end)`; those below `committed` are visible. Owned by the event loop.

    Those below `marked` will not change any more. `promised_bytes`: of slots for what is being made room.
    `runs` in token order, one per segment, each segment held once; those committed in full are let go.
    `client` is whose share of the arena they are counted in. `tally`: of rows that came over a wire.
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
    tally: Tally = field(default_factory=Tally)

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

    def cuts(self, token_begin: int, token_end: int) -> list[tuple[Run, int, int]]:
        """The runs that hold tokens of `[token_begin, token_end)`, with the first and one past the last of these."""
        return [
            (run, max(run.token_begin, token_begin), min(run.token_end, token_end))
            for run in self.runs_of(token_begin, token_end)
            if max(run.token_begin, token_begin) < min(run.token_end, token_end)
        ]

    def sums(self, token_begin: int, token_end: int, given: Sequence[int]) -> list[tuple[Segment, Sums]]:
        """What a writer says of tokens: one checksum per stream for each run. Raises InvalidArgument."""
        cuts, width = self.cuts(token_begin, token_end), len(self.session.layout.specs)
        if len(given) != len(cuts) * width:
            problem = f"{len(given)} are not {len(cuts)} runs of {width} streams"
            raise InvalidArgument(field="checksums", problem=problem)
        return [
            (run.segment, Sums(run.row_of(begin), run.row_of(end), tuple(given[i * width : (i + 1) * width])))
            for i, (run, begin, end) in enumerate(cuts)
        ]

    def joint_sums(
        self, token_begin: int, token_end: int, given: Sequence[int]
    ) -> list[tuple[Segment, Sums]]:
        """What a writer says of tokens: one checksum for each. Raises InvalidArgument."""
        if len(given) != token_end - token_begin:
            problem = f"{len(given)} are not one for each of {token_end - token_begin} tokens"
            raise InvalidArgument(field="checksums", problem=problem)
        return [
            (run.segment, Sums(run.row_of(token), run.row_of(token) + 1, (given[token - token_begin],)))
            for run, begin, end in self.cuts(token_begin, token_end)
            for token in range(begin, end)
        ]

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
        return (tail, tail.row_count) if tail and tail.memory else (None, 0)

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

    tally: Tally
    """To be fed what is put there."""

    def places(self, stream: Stream, token_begin: int, token_end: int) -> list[Place] | None:
        """Where rows of one stream belong, in token order; None unless all of them have room here."""
        first = bisect_right(self.runs, token_begin, key=lambda item: item[0].token_begin) - 1
        found: list[tuple[memoryview, int, int, bool]] = []
        for run, view in self.runs[max(first, 0) :]:
            begin, end = max(token_begin, run.token_begin), min(token_end, run.token_end)
            if begin >= end:
                break
            rows = self.layout.rows(stream, run.row_of(begin), run.row_of(end))
            found.append((view[rows], begin, end, begin == run.token_begin))
            if end == token_end:
                return [
                    Place(view, self.tally.grow(stream, begin, end, is_first=is_first))
                    for view, begin, end, is_first in found
                ]
        return None
