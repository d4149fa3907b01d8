"""Sums of rows: cut anew by any boundaries they hold, and a byte that changed at any time before is found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ctxcache.errors import ChecksumMismatch
from ctxcache.format.checksums import Sums, Tally, computed, covers, difference, settled
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec

ROWS = 64
ROW_BYTES = 4
HIDDEN = StreamSpec(Stream(0, StateKind.HIDDEN), 24, DType.FLOAT16)
LAYOUT = SegmentLayout((TOKENS_SPEC, HIDDEN))


def slot() -> memoryview:
    """A slot whose every byte says where it is."""
    return memoryview(bytearray(i * 31 % 251 for i in range(LAYOUT.size_bytes)))


def said(view: memoryview, ends: list[int], *, joint_from: int) -> list[Sums]:
    """Writers' sums of rows up to these ends; from `joint_from` on, row by row of all streams."""
    found, begin = [], 0
    for end in ends:
        if begin < joint_from:
            values = tuple(
                xxh3_64_intdigest(view[LAYOUT.rows(spec.stream, begin, end)]) for spec in LAYOUT.specs
            )
            found.append(Sums(begin, end, values))
        else:
            for row in range(begin, end):
                data = b"".join(bytes(view[LAYOUT.rows(spec.stream, row, row + 1)]) for spec in LAYOUT.specs)
                found.append(Sums(row, row + 1, (xxh3_64_intdigest(data),)))
        begin = end
    return found


ENDS = st.sets(st.integers(1, ROWS), min_size=1).map(sorted)


@settings(deadline=None)
@given(ENDS, st.integers(0, ROWS), st.integers(0, ROWS - 1), st.sampled_from(LAYOUT.specs))
def test_sums_settle_to_those_of_the_whole_and_find_every_flip(
    ends: list[int], joint_from: int, row: int, spec: StreamSpec
) -> None:
    """The sums may come from any writers, in any pieces."""
    view, row_count = slot(), ends[-1]
    known = said(view, ends, joint_from=joint_from)
    assert covers(known, row_count)
    assert not covers(known, row_count + 1)
    assert settled(LAYOUT, view, known, row_count) == (computed(LAYOUT, view, row_count), "")
    view[LAYOUT.rows(spec.stream, row, row + 1).stop - 1] ^= 1

    _, problem = settled(LAYOUT, view, known, row_count)
    assert bool(problem) == bool(difference(LAYOUT, view, known)) == (row < row_count)


@settings(deadline=None)
@given(
    ENDS,
    st.lists(st.integers(0, ROWS), min_size=2, max_size=2, unique=True).map(sorted),
    st.integers(0, ROWS - 1),
)
def test_a_tally_is_cut_anew_by_any_range(ends: list[int], wanted: list[int], row: int) -> None:
    """The tally's sum of a range is the sum of its rows.

    Where a row that it has to read has changed, it says nothing.
    """
    data = bytearray(range(ROWS * ROW_BYTES))
    tally, begin = Tally(), 0
    for end in ends:
        tally.grow(TOKENS, begin, end, is_first=True).update(data[begin * ROW_BYTES : end * ROW_BYTES])
        begin = end
    low, high = wanted[0], min(wanted[1], ends[-1])
    if low >= high:
        return

    def rows(first: int, last: int) -> bytes:
        return bytes(data[first * ROW_BYTES : last * ROW_BYTES])

    touched = [(a, b) for a, b in zip([0, *ends], ends, strict=False) if a < high and low < b]
    is_read = touched != [(low, high)] and touched[0][0] <= row < touched[-1][1]
    expected = xxh3_64_intdigest(rows(low, high))
    data[row * ROW_BYTES] ^= 1
    if is_read:
        with pytest.raises(ChecksumMismatch):
            tally.value(TOKENS, low, high, rows)
    else:
        assert tally.value(TOKENS, low, high, rows) == expected
        assert tally.value(TOKENS, low, high, rows) == expected


def test_rows_that_are_written_again_are_taken_out() -> None:
    """The remaining part of a piece keeps its sum; of rows that nobody noted nothing is said."""
    data = bytes(range(10 * ROW_BYTES))
    tally = Tally()

    def rows(begin: int, end: int) -> bytes:
        return data[begin * ROW_BYTES : end * ROW_BYTES]

    tally.note(TOKENS, 0, 10, [xxh3_64_intdigest(data)])
    tally.drop(TOKENS, 3, 5, rows)
    assert tally.value(TOKENS, 0, 3, rows) == xxh3_64_intdigest(rows(0, 3))
    with pytest.raises(KeyError):
        tally.value(TOKENS, 0, 10, rows)
    tally.note(TOKENS, 3, 2, [1])
    with pytest.raises(ChecksumMismatch):
        tally.drop(TOKENS, 4, 5, rows)


@pytest.mark.parametrize("ranges", [[(0, 4), (4, 8)], [(0, 4)], [(0, 2), (2, 8)], [(4, 8), (8, 9)]])
def test_sums_of_ranges_are_those_of_their_rows(ranges: list[tuple[int, int]]) -> None:
    """Whether they are just what was noted, a part of it, or cut otherwise."""
    data = bytes(range(9 * ROW_BYTES))
    tally = Tally()

    def rows(begin: int, end: int) -> bytes:
        return data[begin * ROW_BYTES : end * ROW_BYTES]

    sums = [xxh3_64_intdigest(rows(begin, begin + 4)) for begin in (0, 4)]
    tally.note(TOKENS, 0, 4, sums)
    tally.note(TOKENS, 8, 1, [xxh3_64_intdigest(rows(8, 9))])
    assert tally.values(TOKENS, ranges, rows) == [xxh3_64_intdigest(rows(*one)) for one in ranges]
    with pytest.raises(KeyError):
        tally.values(TOKENS, [(0, 4), (4, 10)], rows)
