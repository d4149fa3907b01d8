"""Figures for an operator, each against numbers made by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playing import LOAD, ROOMY, played, turn

from ctxcache.core.placement.value import MissCost
from ctxcache.simulate.load import Load, Prices
from ctxcache.simulate.replay import Replay
from ctxcache.simulate.study import maker
from ctxcache.simulate.tally import FineHistogram, HitTally
from ctxcache.simulate.trace import TraceTurn
from lab.placement.policies import POLICIES

TURNS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.none() | st.integers(0, 99)), max_size=60
).map(
    lambda rows: [
        turn(name, number, tokens)._replace(history_tokens=history)
        for number, (name, tokens, history) in enumerate(rows)
    ]
)
TIGHT = replace(LOAD, dram_bytes=800, ssd_bytes=800)


def test_gpu_seconds_and_money_are_those_of_the_tokens() -> None:
    """Two turns hit, one had been evicted: 200 of 500 tokens of history and input are not computed."""
    load = replace(
        LOAD, dram_bytes=2000, ssd_bytes=0, prefill_tokens_per_s=10, gpu_count=2,
        prices=Prices(gpu_hour=36, dram_gb_hour=9e8, ssd_gb_hour=1),
    )  # fmt: skip
    tally = played(load, [turn("a", 0), turn("a", 1), turn("b", 2), turn("b", 10)])

    # a: 100, then 100 + 100; b: 100, then 100 + 100.
    assert (tally.prompt_tokens, tally.computed_tokens) == (600, 400)
    costs = tally.costs(load)
    assert (costs["gpu_s"], costs["gpu_without_s"], costs["gpu_saved_s"]) == (80, 120, 40)
    # 2,000 B at 0.9 dollars a byte and hour for 10 s.
    assert costs["storage_cost"] == pytest.approx(5)
    assert costs["cost_without"] == pytest.approx(1.2)
    assert costs["cost_saved"] == pytest.approx(1.2 - 0.8 - 5)
    assert costs["cost_saved_share"] == pytest.approx(-4.6 / 1.2)


def test_what_is_written_is_paid_for() -> None:
    """By the TB, in what is saved too."""
    load = replace(LOAD, dram_bytes=2000, is_inclusive=True, prices=Prices(0, 0, 0, written_tb=1e12))
    tally = played(load, [turn("a", 0), turn("a", 1)])

    assert tally.ssd_written_bytes > 0
    costs = tally.costs(load)
    assert costs["wear_cost"] == costs["cost"] == -costs["cost_saved"] == tally.ssd_written_bytes


def test_the_papers_prices_are_the_defaults() -> None:
    """An hour of one GPU, and of 128 GB of DRAM and 10 TB of SSD."""
    assert Prices().gpu(3600) == 5
    assert Prices().storage(128 * 10**9, 10 * 10**12, 3600) == pytest.approx(1.1264 + 0.82)


def test_misses_are_told_apart() -> None:
    """One session was evicted, one outlived its TTL, one hits."""
    load = replace(LOAD, dram_bytes=2000, ssd_bytes=0, ttl_s=50)
    turns = [turn("a", 0), turn("b", 1), turn("c", 2), turn("c", 3), turn("a", 4), turn("a", 90)]
    turns[-1] = turns[-1]._replace(number=3)
    tally = played(load, turns)

    assert (tally.later_turns, tally.dram_hits) == (3, 1)
    assert (tally.regret_turns, tally.regret_tokens) == (1, 100)
    assert (tally.expired_turns, tally.void_turns) == (1, 0)


def test_what_is_on_ssd_is_not_written_again() -> None:
    """A session of 1,000 B leaves DRAM, comes back, grows by as much and leaves again."""
    load = replace(LOAD, dram_bytes=2000)
    turns = [turn("a", 0), turn("b", 1, 200), turn("a", 2), turn("b", 3, 0)]
    tally = played(load, turns)

    # b pushes a out (1,000); a comes and pushes b out (2,000), grows, and b pushes it out (1,000 more).
    assert tally.ssd_written_bytes == 1000 + 2000 + 1000
    assert tally.ssd_rewritten_bytes == 1000 + 2000 + 2000


def test_inclusive_tiers_write_every_turn_once() -> None:
    """Whatever leaves DRAM and returns, SSD is written what turns add."""
    load = replace(LOAD, dram_bytes=2000, is_inclusive=True)
    tally = played(load, [turn("a", 0), turn("b", 1, 200), turn("a", 2), turn("b", 3, 0)])

    assert tally.ssd_written_bytes == 1000 + 2000 + 1000
    assert tally.costs(load)["drive_writes_per_day"] == pytest.approx(4000 / (3 / 86_400) / 92_000)


def test_what_was_evicted_is_written_anew() -> None:
    """State that is computed again has nothing on SSD."""
    load = replace(LOAD, dram_bytes=0, ssd_bytes=2000)
    tally = played(load, [turn("a", 0), turn("b", 1), turn("c", 2), turn("a", 3)])

    assert tally.ssd_written_bytes == 4 * 1000 + 1000


def test_segments_are_kept_whole() -> None:
    """64-token segments: 100 tokens take 128."""
    load = replace(ROOMY, segment_tokens=64, dram_bytes=0)

    assert played(load, [turn("a", 0)]).ssd_written_bytes == 128 * 10
    # Grown to 200, which take 256; the first segment was full, the second is written again.
    assert played(load, [turn("a", 0), turn("a", 1)]).ssd_written_bytes == (128 + 192) * 10


def test_writes_take_their_time_and_slow_reads() -> None:
    """A read of one second meets a write of ten: it takes two, and the write lies behind by one more."""
    load = replace(ROOMY, dram_bytes=0, ssd_read_bytes_per_s=1000, ssd_write_bytes_per_s=100)
    tally = played(load, [turn("a", 0), turn("a", 0)])

    assert tally.ssd_wait_s == 2
    assert tally.most_write_lag_s == pytest.approx(10 + 1 + 10)


def test_the_first_token_waits_for_queue_ssd_copy_and_prefill() -> None:
    """By hand: prefill of 1 s; then 1 s in the queue, 1 s of SSD, 2 s of copy and 1 s of prefill."""
    load = replace(
        ROOMY, dram_bytes=0, slot_count=1, ssd_read_bytes_per_s=1000, dram_bytes_per_s=500,
        prefill_tokens_per_s=100,
    )  # fmt: skip
    tally = played(load, [turn("a", 0), turn("a", 0)])

    assert tally.ttft.quantile_s(0.5) == pytest.approx(1, rel=0.006)
    # The second turn of a session is no turn of the queue before the first is over.
    assert tally.ttft.quantile_s(1) == pytest.approx(1 + 2 + 1, rel=0.006)
    other = played(load, [turn("a", 0), turn("b", 0), turn("a", 1.5)])
    assert other.ttft.quantile_s(1) == pytest.approx(0.5 + 1 + 2 + 1, rel=0.006)


@pytest.mark.parametrize(("bytes_per_s", "lead_s", "late_s"), [(4000, 0.25, 0), (500, 0, 1.5)])
def test_prefetches_say_how_early_and_how_late_they_were(
    bytes_per_s: float, lead_s: float, late_s: float
) -> None:
    """Session a comes at 30.5 s, is read ahead from then on, 1,000 B, and its turn starts at 31 s."""
    load = replace(
        LOAD, dram_bytes=2000, slot_count=1, prefill_tokens_per_s=100, ssd_read_bytes_per_s=bytes_per_s
    )
    turns = [turn("a", 0), turn("b", 10), turn("c", 20), turn("d", 30), turn("a", 30.5)]
    tally = played(load, turns, "look-ahead")

    assert tally.prefetch_lead_s == pytest.approx(lead_s)
    assert tally.prefetch_late_s == tally.most_late_s == pytest.approx(late_s)


@given(turns=TURNS, load=st.sampled_from([TIGHT, ROOMY, replace(TIGHT, is_inclusive=True)]))
def test_figures_agree_with_each_other(turns: list[TraceTurn], load: Load) -> None:
    """Every miss has a reason, nothing saved is negative, appending writes no more than rewriting."""
    for name in POLICIES:
        tally = played(load, turns, name)

        misses = tally.later_turns - tally.dram_hits - tally.ssd_hits
        assert misses == tally.regret_turns + tally.void_turns + tally.expired_turns
        assert tally.costs(load)["gpu_saved_s"] >= 0
        assert tally.prompt_tokens - tally.computed_tokens == tally.hit_tokens
        assert tally.ssd_written_bytes <= tally.ssd_rewritten_bytes
        assert tally.hit_tokens + tally.recomputed_tokens == tally.later_tokens


@given(names=st.lists(st.sampled_from("abcdefghij"), max_size=80))
def test_inclusive_and_exclusive_tiers_hold_the_same(names: list[str]) -> None:
    """Sessions of one size, and a buffer for one: where the copies lie makes no difference to who hits."""
    turns = [TraceTurn(name.encode(), number, 0, 0, 100, None) for number, name in enumerate(names)]
    load = replace(LOAD, dram_bytes=3000, ssd_bytes=4000, buffer_share=1 / 3)
    exclusive = played(load, turns)
    # A buffer is room that only exclusive tiers lack: inclusive ones have everything on SSD.
    inclusive = played(replace(load, ssd_bytes=3000, is_inclusive=True), turns)

    assert (exclusive.dram_hits, exclusive.ssd_hits) == (inclusive.dram_hits, inclusive.ssd_hits)


@given(st.lists(st.floats(1e-5, 1e5), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_quantile_is_off_by_half_a_per_cent_at_most(values: list[float], share: float) -> None:
    """Against the sorted values themselves."""
    histogram = FineHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[-int(-share * len(values) // 1) - 1]

    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.0051)


def test_an_empty_tally_has_figures() -> None:
    """Shares of nothing are 0."""
    assert HitTally().figures()["ttft_p95_s"] == 0
    assert HitTally().costs(LOAD)["cost_saved_share"] == 0


def test_a_write_that_is_not_worth_its_wear_is_not_made() -> None:
    """Nine of ten sessions never return. Spared by price, SSD is written less, and as many hits are left."""
    turns = []
    for number in range(3000):
        turns.append(turn(f"once {number}", number, 400))
        if number % 10 == 0:
            turns.append(turn(f"often {number // 100}", number + 0.5, 40))
    # A token's wear is worth .42 of its prefill.
    prices = Prices(gpu_hour=3600, dram_gb_hour=0, ssd_gb_hour=0, written_tb=6e6)
    load = replace(LOAD, dram_bytes=40_000, ssd_bytes=400_000, is_inclusive=True, prices=prices)
    tallies = []
    for spares in (True, False):
        sized = replace(load, spares_wear=spares)
        tallies.append(Replay(sized, maker("value", sized)).run(turns))
    spared, written = tallies

    assert spared.ssd_written_bytes < written.ssd_written_bytes / 2
    assert spared.hit_rate > written.hit_rate - 0.01
    assert spared.costs(load)["cost_saved"] > written.costs(load)["cost_saved"]


def test_a_chance_is_worth_its_wear_by_what_its_returns_save() -> None:
    """At prefill of 10 tokens a second, 100 bytes a token and 1 ms a byte a token saves what it wears."""
    cost = MissCost(prefill_tokens_per_s=10, write_s_per_byte=0.001)

    assert cost.is_worth_wear(0.5, 100)
    assert not cost.is_worth_wear(0.49, 100)
    assert cost.is_worth_wear(0.1, 11)
    assert MissCost(prefill_tokens_per_s=10).is_worth_wear(0.0, 100), "wear costs nothing"
