"""Watermarks and the allowance: decisions without a cache."""

import pytest

from ctxcache.core.limits import SECOND_NS, Allowance, Watermarks

MARKS = Watermarks(low=0.1, high=0.2, dirty=0.25, dirty_limit=0.75)


def test_room_is_made_below_low_and_up_to_high() -> None:
    """Eviction starts below the low watermark, and goes on to the high one."""
    assert [MARKS.is_low(free, 100) for free in (9, 10)] == [True, False]
    assert [MARKS.missing_bytes(free, 100) for free in (9, 19, 20)] == [11, 1, 0]


def test_writers_may_fill_up_to_the_limit() -> None:
    """The last byte below the limit is admitted, the first above is not."""
    assert MARKS.admits(5, 70, 0, 100)
    assert not MARKS.admits(6, 70, 0, 100)


def test_what_is_larger_than_the_limit_goes_when_it_is_alone() -> None:
    """A reservation above the limit is admitted when all that is claimed is its own."""
    assert MARKS.admits(90, 0, 0, 100)
    assert MARKS.admits(50, 40, 40, 100)
    assert not MARKS.admits(50, 41, 40, 100)


@pytest.mark.parametrize("size_bytes", [1, 40, 100, 700])
def test_an_allowance_holds_over_time(size_bytes: int) -> None:
    """In any time no more is spent than was earned, a second's worth and one piece; nor much less."""
    allowance, spent, peak_bytes_per_s = Allowance(100, 0), 0, 100
    for now_ns in range(0, 60 * SECOND_NS, SECOND_NS // 2):
        while allowance.is_left(now_ns):
            allowance.spend(size_bytes)
            spent += size_bytes
        assert spent <= peak_bytes_per_s * (now_ns / SECOND_NS + 1) + size_bytes

    assert spent >= 100 * 59


def test_what_was_not_spent_is_saved_up_for_a_second() -> None:
    """An hour of rest allows no more than a second's worth."""
    allowance = Allowance(100, 0)
    spent = 0
    while allowance.is_left(3600 * SECOND_NS):
        allowance.spend(10)
        spent += 10

    assert spent == 100


def test_without_a_rate_there_is_no_bound() -> None:
    """0 bytes per second is no bound, not a stop."""
    allowance = Allowance(0, 0)
    allowance.spend(10**12)

    assert allowance.is_left(0)
