"""Rates between two looks at a server."""

import math

from ctxcache.cli.top import Look, Rates, quantile
from ctxcache.client.types import Activity, MethodActivity, SessionActivity, StoreStats


def look(
    at_s: int, *, started_s: int = 1000, read: int = 0, hits: int = 0, misses: int = 0, calls: int = 0
) -> Look:
    """A server that was started then, at that second."""
    stats = StoreStats(read_token_count=read, start_time_ns=started_s * 10**9)
    activity = Activity(
        hit_count=hits,
        miss_count=misses,
        time_ns=at_s * 10**9,
        methods=(
            MethodActivity(method="S/M", count=calls, bounds_seconds=(0.1, 1), bucket_counts=(calls, 0, 0)),
        ),
        sessions=(SessionActivity(name="sessions/a", tenant="t", access_count=calls),),
    )
    return Look(stats, activity)


def test_rates_are_of_the_time_between_two_looks() -> None:
    """And of all the time without an earlier one."""
    before, now = (
        look(1010, read=100, hits=9, misses=1, calls=10),
        look(1014, read=500, hits=9, misses=2, calls=30),
    )
    between, since_start = Rates(now, before), Rates(now, None)

    assert (between.seconds, since_start.seconds) == (4, 14)
    assert (between.stat("read_token_count"), between.hit_rate()) == (100, 0)
    assert since_start.hit_rate() == 9 / 11
    (call,) = between.calls()
    assert (call.rate, call.p50_s, call.p99_s) == (5, 0.1, 0.1)
    assert between.accesses("session", "t/sessions/a") == 5


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    """Nothing is negative."""
    rates = Rates(look(1014, started_s=1012, read=10), look(1010, read=100))

    assert (rates.seconds, rates.stat("read_token_count")) == (2, 5)


def test_quantiles_are_upper_bounds() -> None:
    """None without values; beyond every bound is beyond."""
    assert quantile([1, 2], [0, 0, 0], 0.5) is None
    assert quantile([1, 2], [1, 8, 1], 0.5) == 2
    assert quantile([1, 2], [0, 0, 1], 0.5) == math.inf
