"""Which objects of the bucket still hold rows of a session, against a list of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core import ranges
from ctxcache.core.fleet.shared import Part, indexes, landed, prefix, still_right, to_put
from ctxcache.core.ranges import Ranges

LEAST, MOST, TOKEN_BYTES = 400, 1280, 10


@st.composite
def _lives(draw: st.DrawFn) -> tuple[Ranges, Ranges]:
    """What was live when objects were put, and what is: some was dropped, some came behind."""
    cuts = sorted(draw(st.sets(st.integers(0, 900), max_size=6)))
    first = ranges.normalise([(0, 1000)])
    dropped = ranges.normalise(list(zip(cuts[::2], cuts[1::2], strict=False)))
    end = draw(st.integers(1000, 1600))
    return first, ranges.normalise([*ranges.subtract(first, dropped), (1000, end)])


def _put(cuts: list[tuple[int, int]]) -> list[Part]:
    return [
        Part(f"{begin}", begin, end, (end - begin) * TOKEN_BYTES, b"") for begin, end in cuts if end > begin
    ]


def _positions(live: Ranges) -> list[int]:
    return [at for begin, end in live for at in range(begin, end)]


@given(_lives())
def test_all_that_is_live_is_there_once(lives: tuple[Ranges, Ranges]) -> None:
    """And nothing that was dropped; every object is of a bounded size."""
    before, now = lives
    _, cuts = to_put([], before, token_bytes=TOKEN_BYTES, least_bytes=LEAST, most_bytes=MOST)
    parts = _put(cuts)
    kept, cuts = to_put(
        still_right(parts, now), now, token_bytes=TOKEN_BYTES, least_bytes=LEAST, most_bytes=MOST
    )
    told = prefix(still_right([*kept, *_put(cuts)], now), now)
    assert [at for part in told for at in range(part.begin, part.end)] == _positions(now)
    assert all(part.size_bytes <= MOST for part in told)
    # By their indexes they are one behind the other, as another host is told.
    at = 0
    for part in told:
        assert indexes((part.begin, part.end), now)[0] == at
        at += part.end - part.begin
    assert at == ranges.count(now)


@given(_lives(), st.integers(0, 1600))
def test_what_is_told_ends_at_the_first_token_that_is_not_there(
    lives: tuple[Ranges, Ranges], lost: int
) -> None:
    """A session out of the bucket has no hole that it had not here."""
    _, now = lives
    _, cuts = to_put([], now, token_bytes=TOKEN_BYTES, least_bytes=LEAST, most_bytes=MOST)
    parts = [part for part in _put(cuts) if not part.begin <= lost < part.end]
    told = [at for part in prefix(parts, now) for at in range(part.begin, part.end)]
    assert told == _positions(now)[: len(told)]
    assert lost not in told


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_behind_a_gap_positions_are_one_ahead(whole_count: int, token_count: int) -> None:
    """A token stood for what was dropped, and is gone again."""
    parts = _put([(0, whole_count), (whole_count, 1001)])
    found = landed(parts, token_count, whole_count)
    assert all(part.end - (part.begin > whole_count) <= token_count for part in found)
    assert [part.begin for part in found] == [0, whole_count + 1][: len(found)]
