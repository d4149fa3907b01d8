"""Ranges against sets of integers, extents against a map of bytes, pieces against counting by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core import ranges
from ctxcache.core.extents import Extents, SlotAllocator
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.core.ranges import Ranges
from ctxcache.format.layout import SegmentLayout, Slot
from ctxcache.format.streams import TOKENS_SPEC

SIZE = 60
any_ranges = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8)
range_lists = any_ranges.map(ranges.normalise)


def positions(found: Ranges) -> list[int]:
    """Every position, in order."""
    return [i for begin, end in found for i in range(begin, end)]


def is_canonical(found: Ranges) -> bool:
    """Ascending, disjoint, none empty."""
    ends = [0, *(end for _, end in found)]
    return all(end <= begin < stop for end, (begin, stop) in zip(ends, found, strict=False))


@given(any_ranges)
def test_normalise_keeps_every_position_once(given_ranges: list[tuple[int, int]]) -> None:
    """Any ranges become ascending and disjoint ones that hold the same positions."""
    found = ranges.normalise(given_ranges)

    assert positions(found) == sorted({i for b, e in given_ranges for i in range(b, e)})
    assert is_canonical(found)


@given(range_lists, range_lists)
def test_subtract_is_set_difference(kept: Ranges, dropped: Ranges) -> None:
    """The remaining positions were there and were not dropped."""
    found = ranges.subtract(kept, dropped)

    assert positions(found) == sorted(set(positions(kept)) - set(positions(dropped)))
    assert is_canonical(found)


@given(range_lists, st.integers(0, SIZE), st.integers(0, SIZE))
def test_clip_is_intersection(kept: Ranges, begin: int, end: int) -> None:
    """The remaining positions lie within."""
    found = ranges.clip(kept, begin, end)

    assert positions(found) == [i for i in positions(kept) if begin <= i < end]
    assert is_canonical(found)


@given(range_lists, range_lists)
def test_select_all_picks_by_rank(live: Ranges, indexes: Ranges) -> None:
    """Indexes are ranks among the live positions; those past the end pick nothing."""
    found = ranges.select_all(live, indexes)
    listed = positions(live)

    assert positions(found) == [listed[i] for i in positions(indexes) if i < len(listed)]
    assert is_canonical(found)


@given(range_lists, st.integers(0, SIZE), st.integers(0, SIZE))
def test_select_picks_one_run(live: Ranges, begin: int, end: int) -> None:
    """One range of indexes is picked like any other."""
    assert positions(ranges.select(live, begin, end)) == positions(live)[begin:end]


@given(range_lists, st.integers(0, 5), st.integers(0, 5))
def test_extend_adds_at_the_end(live: Ranges, gap: int, size: int) -> None:
    """New positions come after all others, joined where they touch."""
    begin = (live[-1][1] if live else 0) + gap
    found = ranges.extend(live, begin, begin + size)

    assert positions(found) == [*positions(live), *range(begin, begin + size)]
    assert is_canonical(found)


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 40))
def test_keeping_recent_tokens_keeps_the_sinks(token_count: int, sinks: int, recent: int) -> None:
    """The first and the last so many stay; what is between goes."""
    dropped = positions(ranges.sinks_and_recent(token_count, sink_count=sinks, recent_count=recent))

    assert dropped == [i for i in range(token_count) if i >= sinks and i < token_count - recent]


def test_many_ranges_are_dropped_in_time_that_grows_with_their_number() -> None:
    """Every other token of a long session goes in one pass: a quadratic one would take minutes."""
    live: Ranges = ((0, 400_000),)
    dropped = tuple((i, i + 1) for i in range(0, 400_000, 2))
    kept = ranges.subtract(live, dropped)
    again = ranges.select_all(kept, dropped[: len(kept) // 2])

    assert (len(kept), ranges.count(kept), len(again)) == (200_000, 200_000, 100_000)


# -- extents ----------------------------------------------------------------------------------------------

requests = st.lists(st.one_of(st.integers(1, 12), st.integers(-30, -1)), max_size=60)


@given(requests)
def test_extents_never_hand_out_a_byte_twice(asked: list[int]) -> None:
    """Positive numbers take, negative ones give back: runs are disjoint and what is free adds up."""
    extents = Extents(5, 40)
    taken: list[tuple[int, int]] = []
    for number in asked:
        if number < 0 and taken:
            extents.give(*taken.pop(number % len(taken)))
        elif number > 0:
            begin = extents.take(number)
            used = {i for b, size in taken for i in range(b, b + size)}
            if begin is None:
                runs = "".join("x" if i in used else "." for i in range(5, 45)).split("x")
                assert max(map(len, runs)) < number
            else:
                assert 5 <= begin <= 45 - number
                assert not used & set(range(begin, begin + number))
                taken.append((begin, number))
        assert extents.free_bytes == 40 - sum(size for _, size in taken)
        used = {i for b, size in taken for i in range(b, b + size)}
        runs = "".join("x" if i in used else "." for i in range(5, 45)).split("x")
        assert extents._sizes == sorted({len(run) for run in runs if run})
    for run in taken:
        extents.give(*run)
    assert extents.take(40) == 5


@given(st.lists(st.tuples(st.integers(-5, 45), st.integers(1, 12)), max_size=20))
def test_adopted_slots_are_taken_once(slots: list[tuple[int, int]]) -> None:
    """A recorded slot is taken where it lies, unless a lower one has part of it or it is out of bounds."""
    allocator = SlotAllocator([40, 40])
    asked = [Slot(i % 3, begin, size) for i, (begin, size) in enumerate(slots)]
    refused = set(allocator.adopt(asked))
    used: set[tuple[int, int]] = set()
    for i in sorted(range(len(asked)), key=lambda i: (*asked[i], i)):
        path, begin, size = asked[i]
        wanted = {(path, at) for at in range(begin, begin + size)}
        is_free = path < 2 and begin >= 0 and begin + size <= 40 and not wanted & used
        assert (i not in refused) == is_free
        used |= wanted if is_free else set()

    assert allocator.used_bytes == sum(allocator.used_bytes_by_path) == len(used)
    while slot := allocator.take(1):
        assert (slot.path_index, slot.offset_bytes) not in used
        used.add((slot.path_index, slot.offset_bytes))
    assert len(used) == 80


def test_slots_are_adopted_before_any_is_taken() -> None:
    """Adopting rebuilds what is free: a slot handed out before would be free again."""
    extents = Extents(0, 40)
    extents.take(8)

    with pytest.raises(ValueError, match="before"):
        extents.adopt([(8, 8)])


def test_free_extents_of_many_sizes_are_found_without_a_walk() -> None:
    """A hundred thousand holes that are too small delay no one: seconds, were each looked at."""
    extents = Extents(0, 400_000)
    for _ in range(100_000):
        extents.take(4)
    for begin in range(0, 400_000, 8):
        extents.give(begin, 4)
    assert all(extents.take(5) is None for _ in range(10_000))
    extents.give(4, 4)

    assert extents.take(12) == 0


def test_what_is_known_of_free_space_does_not_grow_with_use() -> None:
    """Extents that came and went are forgotten, also while another one of their size stays."""
    extents = Extents(0, 40)
    for _ in range(10):
        extents.take(4)
    extents.give(32, 4)
    extents.give(36, 4)
    for _ in range(1000):
        for begin in (0, 4, 8):
            extents.give(begin, 4)
        assert extents.take(12) == 0

    assert extents._sizes == [8]
    assert len(extents._bins[8]) < 100
    assert extents.take(8) == 32


def test_slots_of_a_session_lie_on_its_path() -> None:
    """A path that is named gives what it has; another one is asked when it is full or closed."""
    allocator = SlotAllocator([20, 10, 20])
    on_second = [allocator.take(10, on_path=1) for _ in range(2)]
    elsewhere = allocator.take(10, on_path=2, closed={2})

    assert [slot.path_index for slot in on_second if slot] == [1, 0]
    assert elsewhere == Slot(0, 10, 10)
    assert [slot.path_index for _ in range(3) if (slot := allocator.take(10))] == [2, 2]


def test_sessions_are_spread_by_free_room() -> None:
    """A path that is twice as large gets twice as many sessions, in turn and not one after the other."""
    allocator = SlotAllocator([2000, 1000])
    paths = [slot.path_index for _ in range(300) if (slot := allocator.take(1))]

    assert paths.count(0) == 200
    assert {tuple(sorted(paths[i : i + 3])) for i in range(0, 300, 3)} == {(0, 0, 1)}


def test_a_tier_of_no_room_hands_out_nothing() -> None:
    """A capacity that the first offset uses up leaves no slot."""
    assert SlotAllocator([4096], first_offset=4096).take(4096) is None


# -- sessions ---------------------------------------------------------------------------------------------

LAYOUT = SegmentLayout((TOKENS_SPEC,), 8)


def make_session(sizes: list[int]) -> Session:
    """A session whose segments hold so many rows each, one after the other."""
    session = Session(
        uid=bytes(16),
        tenant="t",
        session_id="s",
        model_id="m",
        model_fingerprint=bytes(32),
        layout=LAYOUT,
        expiration=Expiration(1),
        create_time_ns=0,
        access_time_ns=0,
        expire_time_ns=1,
    )
    for i, size in enumerate(sizes):
        segment = Segment(
            segment_id=i,
            tenant="t",
            writer_uid=bytes(16),
            generation=1,
            begin=session.log_end,
            model_fingerprint=bytes(32),
            layout=LAYOUT,
            use=Usage(NO_SHARES).of("t"),
        )
        segment.row_count = size
        session.segments.append(segment)
        session.append_rows(session.log_end + size)
    return session


@given(
    st.lists(st.integers(1, 8), max_size=8), st.lists(range_lists, max_size=3), st.integers(0, 64), st.data()
)
def test_pieces_are_the_rows_of_the_live_tokens(
    sizes: list[int], drops: list[Ranges], begin: int, data: st.DataObject
) -> None:
    """However tokens were dropped, pieces name the rows that counting by hand finds."""
    session = make_session(sizes)
    places = [(i, row) for i, size in enumerate(sizes) for row in range(size)]
    live = list(range(len(places)))
    for dropped in drops:
        session.drop_positions(dropped)
        live = [i for i in live if i not in positions(dropped)]
    first = min(begin, len(live))
    last = data.draw(st.integers(first, len(live)))
    pieces = list(session.pieces(first, last))

    found = [(p.segment.segment_id, row) for p in pieces for row in range(p.row_begin, p.row_end)]
    assert found == [places[i] for i in live[first:last]]
    indexes = [p.token_begin + i for p in pieces for i in range(p.row_end - p.row_begin)]
    assert indexes == list(range(first, last))
    assert [s.segment_id for s in session.segments] == sorted({places[i][0] for i in live})
    assert session.first_gap() is None
    assert session.generation == 1 + len(sizes) + len(drops)


def test_a_gap_is_found_where_no_segment_holds_a_live_token() -> None:
    """The first live position without a row is where a session has to end."""
    session = make_session([8, 8, 8])
    session.drop_positions(((2, 10),))
    del session.segments[1]

    assert session.first_gap() == 10
