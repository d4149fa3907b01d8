"""Prices of a bucket, against numbers made by hand."""

from dataclasses import replace

import pytest

from ctxcache.core.placement.policy import Capacities, Facts, Level
from ctxcache.core.placement.prices import Bucket, BucketPrices, Recomputation
from ctxcache.core.placement.value import MissCost, Objective, ReturnValue

LLAMA_70B = Recomputation(prefill_tokens_per_s=5280, token_bytes=327_680, gpu_count=4)
S3 = Bucket(BucketPrices(), LLAMA_70B)
GIB = 1 << 30


def test_a_gibibyte_is_64_objects_and_some_seconds_of_four_gpus() -> None:
    """3,277 tokens take .62 s of four GPUs at 5 dollars an hour."""
    assert BucketPrices().puts(GIB) == pytest.approx(64 * 5e-6)
    assert BucketPrices().gets(GIB + 1) == pytest.approx(65 * 4e-7)
    assert BucketPrices().storage(10**9, 30 * 86_400) == pytest.approx(0.023)
    assert LLAMA_70B.cost(GIB) == pytest.approx(GIB / 327_680 / 5280 * 4 * 5 / 3600)
    assert BucketPrices().fetch_s(10**9) == pytest.approx(1.03)


def test_keeping_costs_as_much_as_computing_after_about_100_hours() -> None:
    """At list prices, of a 70B model with grouped heads; half the chance pays for less than half of that."""
    assert S3.kept_for_s(GIB) / 3600 == pytest.approx(100, rel=0.15)
    assert S3.kept_for_s(GIB, 0.5) < S3.kept_for_s(GIB) / 2
    assert S3.kept_for_s(GIB, 0.01) == 0
    free = Bucket(replace(BucketPrices(), gb_month=0.0), LLAMA_70B)
    assert free.kept_for_s(GIB) == float("inf")


def test_a_put_is_worth_it_from_the_chance_on_that_pays_for_it() -> None:
    """PUT and storage for a day, over what a return saves."""
    size_bytes, day_s = 4 * GIB, 86_400.0
    cost = S3.prices.puts(size_bytes) + S3.prices.storage(size_bytes, day_s)
    break_even = cost / S3.saves(size_bytes)

    assert 0.2 < break_even < 0.5
    assert S3.is_worth_put(size_bytes, break_even * 1.01, day_s)
    assert not S3.is_worth_put(size_bytes, break_even * 0.99, day_s)
    assert S3.is_worth_put(size_bytes, break_even * 0.99, day_s / 2)


def test_what_comes_slower_than_it_is_computed_is_not_fetched() -> None:
    """And a miss costs what the next source does: a GET, or computing."""
    slow = Bucket(replace(BucketPrices(), bytes_per_s=1e8), LLAMA_70B)

    assert not slow.is_worth_get(GIB)
    fast = Bucket(replace(BucketPrices(), bytes_per_s=1e10), LLAMA_70B)
    assert fast.miss_cost(GIB, is_in_bucket=True) == fast.prices.gets(GIB)
    assert fast.miss_cost(GIB, is_in_bucket=False) == LLAMA_70B.cost(GIB)
    assert slow.miss_cost(GIB, is_in_bucket=True) == LLAMA_70B.cost(GIB)


@pytest.mark.parametrize("objective", Objective)
def test_a_session_that_a_bucket_has_is_worth_what_fetching_it_costs(objective: Objective) -> None:
    """In seconds; tokens and turns are missed all the same. Of its next turn the bucket lacks something."""
    size_bytes, token_bytes = 10**9, 10**5
    policy = ReturnValue(Capacities(10**9, 10**10), MissCost(objective, prefill_tokens_per_s=5_000))
    fallen: list[bytes] = []
    policy.watch(fallen.append)
    for uid in (b"here", b"backed"):
        policy.arrived(uid, 0.0)
        policy.idle(uid, Facts(size_bytes, 1, size_bytes, token_bytes), 0.0)
        policy.placed(uid, Level.BELOW)
    fallen.clear()
    policy.backed(b"backed")
    here, backed = policy.rank(b"here") or (), policy.rank(b"backed") or ()

    if objective is Objective.SECONDS:
        # 10,000 tokens: 2 s of prefill, or 1.03 s of reading; .75 s are lost with either.
        assert backed[0] / here[0] == pytest.approx(1.78 / 2.75)
        assert fallen == [b"backed"]
    else:
        assert backed[0] == here[0]
    policy.arrived(b"backed", 1.0)
    policy.idle(b"backed", Facts(2 * size_bytes, 1, size_bytes, token_bytes), 1.0)
    policy.arrived(b"here", 1.0)
    policy.idle(b"here", Facts(2 * size_bytes, 1, size_bytes, token_bytes), 1.0)
    assert (policy.rank(b"backed") or ())[0] == (policy.rank(b"here") or ())[0]
    policy.backed(b"nobody's")
