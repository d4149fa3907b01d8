"""Where rows lie, as a server says it: what does not add up is refused before anybody reads there."""

import numpy as np
import pytest

from ctxcache.client.arena import SlotLayout, SlotRows, Span, Verifier, spans_of_runs, spans_of_segments
from ctxcache.errors import CorruptSegment
from ctxcache.v1.arena_pb2 import ChunkLayout, RowRange, Runs, SegmentLocation
from ctxcache.v1.model_pb2 import STATE_KIND_HIDDEN, STATE_KIND_TOKENS, StreamName

ARENA = np.zeros(3 * 4096, np.uint8)
LAYOUT = SlotLayout(
    [
        ChunkLayout(stream=StreamName(layer=-1, kind=STATE_KIND_TOKENS), offset_bytes=0, row_bytes=4),
        ChunkLayout(stream=StreamName(layer=0, kind=STATE_KIND_HIDDEN), offset_bytes=256, row_bytes=60),
    ]
)


def span(offset_bytes: int, *, stride_bytes: int = 0, run_count: int = 1, row_end: int = 64) -> Span:
    """Rows from the first on, in each of so many slots."""
    return Span(offset_bytes, stride_bytes, run_count, 0, row_end, 0)


@pytest.mark.parametrize(
    "outside",
    [span(-4096), span(2 * 4096 + 4), span(0, stride_bytes=4096, run_count=4), span(2 * 4096, row_end=65)],
)
def test_rows_outside_the_arena_are_refused(outside: Span) -> None:
    """No view is made of what lies before, behind or partly behind the arena.

    The last slot itself is inside.
    """
    SlotRows(ARENA, LAYOUT, [span(0, stride_bytes=4096, run_count=3)])

    with pytest.raises(CorruptSegment, match="outside the arena"):
        SlotRows(ARENA, LAYOUT, [outside])


@pytest.mark.parametrize("end", [63, 65])
def test_runs_that_do_not_add_up_are_refused(end: int) -> None:
    """An answer for fewer or for more tokens than it says is none."""
    runs = Runs(offset_bytes=[0, 4096], row_begin=[0, 0], row_end=[32, 32])
    spans = spans_of_runs(runs, 0, 64)
    assert sum(item.run_count * (item.row_end - item.row_begin) for item in spans) == 64

    with pytest.raises(CorruptSegment, match="no location"):
        spans_of_runs(runs, 0, end)


@pytest.mark.parametrize("begin", [31, 33])
def test_segments_that_overlap_or_leave_a_gap_are_refused(begin: int) -> None:
    """Each segment's rows begin where the rows before them end."""

    def segments(second: int) -> list[SegmentLocation]:
        return [
            SegmentLocation(
                row_capacity=64, offset_bytes=0, rows=[RowRange(token_begin=0, row_begin=0, row_end=32)]
            ),
            SegmentLocation(
                row_capacity=64,
                offset_bytes=4096,
                rows=[RowRange(token_begin=second, row_begin=0, row_end=32)],
            ),
        ]

    spans_of_segments(segments(32), 0, 64)
    with pytest.raises(CorruptSegment, match="no location"):
        spans_of_segments(segments(begin), 0, 64)


@pytest.mark.parametrize(
    ("capacities", "problem"),
    [
        ([32, 32], "no segment has 32 rows"),
        ([96, 96], "no segment has 96 rows"),
        ([8192, 8192], "no segment has 8192 rows"),
        ([64], "do not fit together"),
        ([128, 128], "outside the arena, or its slot"),
    ],
)
def test_slots_of_no_length_that_there_is_are_refused(capacities: list[int], problem: str) -> None:
    """Room for rows says where every chunk lies: a number that cannot be is no place."""
    runs = Runs(offset_bytes=[0, 4096], row_begin=[0, 0], row_end=[130, 130], row_capacity=capacities)
    with pytest.raises(CorruptSegment, match=problem):
        SlotRows(np.zeros(16 * 4096, np.uint8), LAYOUT, spans_of_runs(runs, 0, 260))


@pytest.mark.parametrize(
    ("offset_bytes", "token_count", "problem"),
    [
        (-4096, 32, "outside the arena"),
        (3 * 4096, 32, "outside the arena"),
        (0, 65, "outside the arena"),
        (0, 31, "not those of its rows"),
    ],
)
def test_checksums_of_bytes_outside_the_arena_are_refused(
    offset_bytes: int, token_count: int, problem: str
) -> None:
    """Also where the rows that were asked for lie inside: a sum is of all rows of its segment."""

    def verifier(offset_bytes: int, token_count: int) -> Verifier:
        rows = [RowRange(token_begin=0, row_begin=0, row_end=32)]
        segment = SegmentLocation(
            row_capacity=64, offset_bytes=offset_bytes, token_count=token_count, rows=rows, checksums=[0, 0]
        )
        return Verifier(ARENA, LAYOUT, [segment], lambda: None, lambda: None)

    verifier(2 * 4096, 64)
    with pytest.raises(CorruptSegment, match=problem):
        verifier(offset_bytes, token_count)
