"""Reservations: which rows of which segments the tokens of one writer are.

    session   0 ....... committed ....... marked ....... end
              visible             will not change  reserved

A reservation answers from its own numbers: it takes no room, holds no segment and reads no row. `Appends`
does that around it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import Pinner
from ctxcache.errors import InvalidArgument
from ctxcache.format.checksums import SumPlace, Sums, Tally
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Content, Stream

TOKEN_BEGIN, TOKEN_END = attrgetter("token_begin"), attrgetter("token_end")


# A reservation of 300 tokens by a session whose tail has 40 rows, with a long segment of 256:
#
#     tokens     40 ............ 64 .................... 320 ...... 340
#     runs       run 0: tail        run 1: long           run 2: new tail
#                rows 40..64        rows 0..256           rows 0..20
#
# Runs follow one another in tokens; each is one segment, and each segment is held once.
@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row_begin, row_end)` of a segment to be written.

    The first row's token has index `token_begin`.
    """

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


Cut = tuple[Run, int, int]
"""Tokens `[begin, end)` of a run: the run, `begin`, `end`."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the tokens `[write_offset, end)`. Tokens below `committed` are visible.

    Tokens below `marked` will not change any more. `promised_bytes`: slot bytes for segments that are being
    made. `runs` in token order, one per segment, without runs that are committed in full; each segment is
    held once. The slots count in `client`'s share of the arena. `tally`: checksums of rows that came over a
    wire. `coming_end`: one past the last token that the writer is known to append. Tokens that fill a
    long segment are put into one, if its slot takes no more than `longest_bytes`. `contents`: digests of the
    content behind the tokens.
    """

    reservation_id: int
    session: Session
    committed: int
    end: int
    deadline_ns: int
    client: Pinner
    marked: int = 0
    promised_bytes: int = 0
    runs: list[Run] = field(default_factory=list)
    tally: Tally | None = None
    coming_end: int = 0
    longest_bytes: int = 0
    contents: Sequence[Content] = ()

    def check(self, token_count: int) -> None:
        """Raise InvalidArgument unless there is room up to `token_count` and no later token is visible."""
        # A commit that went back would take visible tokens away from readers.
        if not self.committed <= token_count <= self.end:
            problem = f"{token_count} is not within [{self.committed}, {self.end}]"
            raise InvalidArgument(field="token_count", problem=problem)

    def cuts(self, token_begin: int, token_end: int) -> list[Cut]:
        """The runs that hold tokens of `[token_begin, token_end)`, each with its first token and its end."""
        cuts: list[Cut] = []
        runs = self.runs
        if len(runs) == 1 and runs[0].token_begin <= token_begin < token_end <= self.end:
            # A decode step, and most other commits.
            return [(runs[0], token_begin, token_end)]
        if len(runs) > 1:
            # The run that holds the first token is found by bisection: a decode step commits one token of
            # thousands.
            runs = runs[max(bisect_right(runs, token_begin, key=TOKEN_BEGIN) - 1, 0) :]
        for run in runs:
            if run.token_begin >= token_end:
                break
            begin = max(run.token_begin, token_begin)
            end = min(run.token_begin + run.row_end - run.row_begin, token_end)
            if begin < end:
                cuts.append((run, begin, end))
        return cuts

    def sums(self, cuts: Sequence[Cut], given: Sequence[int]) -> list[tuple[Segment, Sums]]:
        """A writer's checksums of tokens: one per stream for each cut. Raises InvalidArgument."""
        width = len(self.session.layout.specs)
        if len(given) != len(cuts) * width:
            problem = f"{len(given)} are not {len(cuts)} runs of {width} streams"
            raise InvalidArgument(field="checksums", problem=problem)
        said: list[tuple[Segment, Sums]] = []
        for i, (run, begin, end) in enumerate(cuts):
            first_row = run.row_begin - run.token_begin
            values = tuple(given[i * width : (i + 1) * width])
            said.append((run.segment, Sums(begin + first_row, end + first_row, values)))
        return said

    def joint_sums(self, cuts: Sequence[Cut], given: Sequence[int]) -> list[tuple[Segment, Sums]]:
        """A writer's checksums of tokens: one for each. Raises InvalidArgument."""
        if len(cuts) == len(given) == 1:
            # A decode step commits one token.
            run, begin, end = cuts[0]
            if end - begin == 1:
                row = run.row_begin + begin - run.token_begin
                return [(run.segment, Sums(row, row + 1, (given[0],)))]
        rows = [
            (run.segment, row)
            for run, begin, end in cuts
            for row in range(run.row_of(begin), run.row_of(begin) + end - begin)
        ]
        if len(given) != len(rows):
            problem = f"{len(given)} are not one for each of {len(rows)} tokens"
            raise InvalidArgument(field="checksums", problem=problem)
        return [
            (segment, Sums(row, row + 1, (value,))) for (segment, row), value in zip(rows, given, strict=True)
        ]

    def grow(self, segment: Segment, row: int, end: int) -> bool:
        """Take rows of a segment from `row` on, up to token `end` or the segment's last row.

        Returns whether the segment is new to the reservation.
        """
        row_end = min(row + end - self.end, segment.layout.segment_tokens)
        last = self.runs[-1] if self.runs else None
        is_new = last is None or last.segment is not segment
        if last is None or is_new:
            self.runs.append(Run(segment, row, row_end, self.end))
        else:
            self.runs[-1] = replace(last, row_end=row_end)
        self.end += row_end - row
        return is_new

    def advance(self, token_count: int) -> list[Run]:
        """Tokens below `token_count` are committed. Removes and returns the runs that are committed in full.

        The last run stays: the session's next tokens may go on in it.
        """
        self.committed = token_count
        if self.tally is not None:
            self.tally.forget(token_count)
        full_count = bisect_right(self.runs[:-1], token_count, key=TOKEN_END)
        full = self.runs[:full_count]
        del self.runs[:full_count]
        return full

    def tallied(self) -> Tally:
        """The reservation's tally; an empty one where no row has come over a wire yet."""
        if self.tally is None:
            self.tally = Tally()
        return self.tally

    def mark(self, token_count: int) -> list[Segment]:
        """Tokens below `token_count` will not change any more. Returns the segments that they make full."""
        # The mark begins where the last mark or commit ended, so that a segment is returned as full once.
        begin = max(self.marked, self.committed)
        self.marked = max(self.marked, token_count)
        if len(self.runs) == 1 and token_count < self.end:
            # Its only segment is not full yet, as with most steps of a decoding engine.
            return []
        cuts = self.cuts(begin, token_count)
        return [
            run.segment
            # A segment is full with these tokens only if its last row is among them, not if it is reserved to
            # its end.
            for run, _, _ in cuts
            if run.row_end == run.segment.layout.segment_tokens and run.token_end <= token_count
        ]

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots of its runs."""
        return sum([run.segment.layout.size_bytes for run in self.runs])

    @property
    def next_position(self) -> int:
        """The position of the first token that the reservation has no room for."""
        # A position of the log, which is more than the number of tokens after a truncation.
        return self.session.log_end + self.end - self.committed

    def last(self) -> tuple[Segment | None, int]:
        """The segment that has room for the next token, and its next row; None, 0 if all are full."""
        # The reservation's own last run goes on first. Only a reservation without runs continues the
        # session's tail.
        if self.runs:
            segment, row = self.runs[-1].segment, self.runs[-1].row_end
            return (segment, row) if row < segment.layout.segment_tokens else (None, 0)
        # A tail that left memory cannot grow: its rows would have to be read back.
        tail = self.session.growing_tail
        return (tail, tail.row_count) if tail and tail.memory else (None, 0)

    def needed(self, token_count: int) -> dict[int, int]:
        """Slot bytes by segment id that the reservation holds with `token_count` more tokens.

        Segments that are not made yet have ids below 0. Empty without more tokens.
        """
        if not token_count:
            return {}
        last, row = self.last()
        return self.held_with(last, self.new_layouts(token_count, last, row))

    def held_with(self, last: Segment | None, new: Sequence[SegmentLayout]) -> dict[int, int]:
        """Slot bytes by segment id of the runs, of `last`, and of new segments of these layouts."""
        sizes_bytes = {}
        for run in self.runs:
            sizes_bytes[run.segment.segment_id] = run.segment.layout.size_bytes
        if last is not None:
            sizes_bytes[last.segment_id] = last.layout.size_bytes
        # Segments that are not made yet have no number: negative ones count their bytes in the same budget.
        for number, layout in enumerate(new, 1):
            sizes_bytes[-number] = layout.size_bytes
        return sizes_bytes

    def new_segment_bytes(self, token_count: int) -> int:
        """Slot bytes of the segments that must be made for `token_count` more tokens."""
        return sum([layout.size_bytes for layout in self.new_layouts(token_count, *self.last())])

    def new_layouts(self, token_count: int, last: Segment | None, row: int) -> list[SegmentLayout]:
        """Layouts of the segments that must be made for `token_count` more tokens, in order.

        The tokens first fill `last` from `row` on; both are as the method `last` returns them.
        """
        free_count = last.layout.segment_tokens - row if last is not None else 0
        missing_count = token_count - free_count
        # The tokens that the writer announced choose long segments, not only the tokens asked for now.
        coming_count = max(missing_count, self.coming_end - self.end - free_count)
        layouts: list[SegmentLayout] = []
        plain = self.session.layout
        while missing_count > 0:
            layout = plain.filled_by(coming_count, self.longest_bytes) if self.longest_bytes else plain
            layouts.append(layout)
            missing_count -= layout.segment_tokens
            coming_count -= layout.segment_tokens
        return layouts


# Rows of a bulk upload are copied in another thread, which holds this instead of the reservation: what
# happens to the reservation on the event loop meanwhile does not move the views.
@dataclass(frozen=True, slots=True)
class Room:
    """Room that another thread may fill while `Appends` lends it: runs in token order, each with its slot."""

    runs: tuple[tuple[Run, memoryview], ...]
    tally: Tally
    """Sums the rows that the thread puts there."""

    def places(self, stream: Stream, token_begin: int, token_end: int) -> list[SumPlace] | None:
        """The places of one stream's rows, in token order; None unless the room has a place for each."""
        first = bisect_right(self.runs, token_begin, key=lambda item: item[0].token_begin) - 1
        places: list[tuple[memoryview, int, int, bool]] = []
        for run, view in self.runs[max(first, 0) :]:
            begin, end = max(token_begin, run.token_begin), min(token_end, run.token_end)
            if begin >= end:
                break
            rows = run.segment.layout.rows(stream, run.row_of(begin), run.row_of(end))
            places.append((view[rows], begin, end, begin == run.token_begin))
            if end == token_end:
                return [
                    SumPlace(view, self.tally.grow(stream, begin, end, is_first=is_first))
                    for view, begin, end, is_first in places
                ]
        return None
