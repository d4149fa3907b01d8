"""Which tokens a turn keeps: arithmetic of prefixes and of the context window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.errors import InvalidArgument
from gpu_worker.families.generation import Truncation, common_prefix, fit


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4, 4], [4, 4], 2)],
)
def test_common_prefix(a: list[int], b: list[int], count: int) -> None:
    """Counts equal tokens from the front, whichever sequence is longer."""
    assert common_prefix(a, b) == common_prefix(b, a) == count


def test_what_fits_is_not_truncated() -> None:
    """A window that is exactly full is full enough."""
    assert fit(90, 10, window=100) is None


def test_the_oldest_half_goes_and_the_sinks_stay() -> None:
    """The last 50 and the first 4 of 100 tokens stay."""
    cut = fit(100, 20, window=110)

    assert cut == Truncation(token_count=100, sink_count=4, recent_count=50)
    assert cut.kept_count == 54
    assert cut.apply(range(100)) == [0, 1, 2, 3, *range(50, 100)]


def test_half_again_where_half_is_not_enough() -> None:
    """A long new turn costs a quarter, an eighth."""
    cut = fit(100, 60, window=90)

    assert cut is not None
    assert cut.recent_count == 25


def test_a_turn_larger_than_the_window_is_refused() -> None:
    """Where not even the sinks fit beside it, the error names the new tokens."""
    with pytest.raises(InvalidArgument, match="new_token_ids"):
        fit(50, 97, window=100)


def test_sinks_of_a_short_history_are_kept_once() -> None:
    """Sinks and recent tokens that overlap are no more than there are."""
    cut = Truncation(token_count=6, sink_count=4, recent_count=3)

    assert cut.kept_count == 6
    assert cut.apply(range(6)) == list(range(6))


@given(
    history=st.integers(0, 400), new=st.integers(1, 120), window=st.integers(8, 300), sinks=st.integers(0, 6)
)
def test_what_is_kept_always_fits(history: int, new: int, window: int, sinks: int) -> None:
    """Whatever the sizes, a truncation leaves room, keeps what it says, and drops something."""
    if sinks + new > window:
        return
    cut = fit(history, new, window=window, sink_count=sinks)

    kept = list(range(history)) if cut is None else cut.apply(range(history))
    assert len(kept) + new <= window
    assert cut is None or (len(kept) == cut.kept_count < history)
    assert kept[:sinks] == list(range(min(sinks, history)))
