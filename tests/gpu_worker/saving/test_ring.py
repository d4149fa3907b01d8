"""The ring: no row is handed out twice, none is lost."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.saving.staging import RowRing, RowRun, cut, rows_of


@given(
    size=st.integers(1, 40),
    steps=st.lists(st.one_of(st.integers(1, 20), st.none()), max_size=60),
)
def test_runs_never_overlap_and_empty_is_all_free(size: int, steps: list[int | None]) -> None:
    """Whatever is taken and freed, runs in use are apart and within; an empty ring has room for all of it."""
    ring, used = RowRing(size), deque[RowRun]()

    for count in steps:
        if count is None:
            if used:
                ring.free(used.popleft())
            continue
        run = ring.take(count)
        if run is not None:
            used.append(run)
        rows = [row for item in used for row in range(item.begin, item.end)]
        assert len(rows) == len(set(rows))
        assert all(0 <= row < size for row in rows)
        assert len(rows) <= ring.used_count <= size
    while used:
        ring.free(used.popleft())

    assert ring.used_count == 0
    assert ring.take(size) == RowRun(0, size)


def test_a_full_ring_has_no_room() -> None:
    """Room at the begin and at the end is not put together."""
    ring = RowRing(10)
    first = ring.take(4)
    assert first is not None
    ring.take(4)
    ring.free(first)
    ring.free(first)

    assert ring.take(5) is None
    assert ring.take(3) == RowRun(0, 3)
    assert ring.take(1) == RowRun(3, 4)
    assert ring.take(1) is None


def test_rows_that_follow_one_another_are_a_slice() -> None:
    """Rows that lie together are viewed; anything else is put together by number, in order."""
    assert rows_of([RowRun(2, 4), RowRun(4, 7)]) == slice(2, 7)
    scattered = rows_of([RowRun(8, 9), RowRun(0, 2)])
    assert not isinstance(scattered, slice)
    assert scattered.tolist() == [8, 0, 1]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 40))
def test_a_cut_loses_nothing(lengths: list[int], count: int) -> None:
    """The first part has as many rows as were asked for, or all; both together are what was there."""
    runs = [RowRun(10 * i, 10 * i + length) for i, length in enumerate(lengths)]
    rows = [row for run in runs for row in range(run.begin, run.end)]

    first, rest = cut(runs, count)

    cut_rows = [row for run in first for row in range(run.begin, run.end)]
    assert cut_rows == rows[:count]
    assert cut_rows + [row for run in rest for row in range(run.begin, run.end)] == rows
