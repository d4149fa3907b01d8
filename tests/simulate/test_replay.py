"""Replays: what is counted, on which clock, and what policies reach on a small trace."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ctxcache.core.placement.policy import Capacities, Policy
from ctxcache.simulate.load import Load, TraceHint
from ctxcache.simulate.replay import Replay
from ctxcache.simulate.store import NextUse
from ctxcache.simulate.study import Capacity, StudyOutcome, look, study
from ctxcache.simulate.tally import HitTally
from ctxcache.simulate.trace import Trace, TraceTurn
from lab.placement.policies import NAMES, POLICIES, policy_of

LOAD = Load(token_bytes=10, dram_bytes=10_000, ssd_bytes=90_000, buffer_share=0.0)
QUARTER = (Capacity(0.25, 0.2),)


def _study(path: Path, load: Load, policies: Sequence[str]) -> dict[str, StudyOutcome]:
    outcomes = study(Trace(path), load, policies, QUARTER, step=lambda *_: None, policy_of=policy_of)
    return {outcome.policy: outcome for outcome in outcomes}


def _played(load: Load, turns: Sequence[TraceTurn], name: str = "lru") -> HitTally:
    return Replay(load, lambda capacities, _: POLICIES[name](capacities)).run(turns)


def _footprint_of(load: Load, turns: Sequence[TraceTurn]) -> Replay:
    def policy(capacities: Capacities, _: NextUse) -> Policy:
        return POLICIES["lru"](capacities)

    return Replay(load, policy, next_arrivals_s=look(turns), is_footprint=True)


def _turn(session: str, arrival_s: float, number: int | None = None) -> TraceTurn:
    return TraceTurn(session.encode(), arrival_s, 100, 0, None, number)


def test_hits_are_counted_by_tier_and_over_later_turns() -> None:
    """DRAM's room for one session: the other comes from SSD; first turns count for neither."""
    load = replace(LOAD, dram_bytes=2000, ssd_bytes=90_000)
    tally = _played(load, [_turn("a", 0), _turn("b", 1), _turn("c", 2), _turn("b", 3), _turn("a", 4)])

    assert (tally.later_turns, tally.dram_hits, tally.ssd_hits) == (2, 1, 1)
    assert tally.hit_rate == 1
    assert tally.promoted_bytes == 1000
    assert tally.ssd_wait_s == pytest.approx(1000 / LOAD.ssd_read_bytes_per_s)


def test_an_idle_session_expires() -> None:
    """After its TTL a session is gone, and forgotten by the replay too."""
    replay = Replay(replace(LOAD, ttl_s=10), lambda capacities, _: POLICIES["lru"](capacities))
    tally = replay.run(
        [_turn("a", 0, 1), _turn("b", 5, 1), _turn("a", 9, 2), _turn("b", 16, 2), _turn("a", 18, 3)]
    )

    assert (tally.later_turns, tally.dram_hits) == (3, 2)
    assert tally.most_sessions == 2


def test_a_turn_waits_for_a_slot_and_for_its_predecessor() -> None:
    """One slot, one second a turn: the third to come waits for two, and a session for itself."""
    load = replace(LOAD, slot_count=1, prefill_tokens_per_s=100, dram_bytes_per_s=1e12)
    tally = _played(load, [_turn("a", 0), _turn("b", 0), _turn("a", 0.5)])

    assert tally.queue_wait_s == pytest.approx(1 + 1)
    assert tally.end_s == pytest.approx(3)
    assert tally.hit_rate == 1


@pytest.mark.parametrize(("bytes_per_s", "in_time", "late"), [(1e9, 1, 0), (500, 0, 1)])
def test_a_prefetch_is_in_time_if_the_ssd_is_fast_enough(bytes_per_s: float, in_time: int, late: int) -> None:
    """A queued session is read ahead; one that is not there when its turn starts is late, and no DRAM hit."""
    load = replace(
        LOAD, dram_bytes=2000, slot_count=1, prefill_tokens_per_s=100, ssd_read_bytes_per_s=bytes_per_s
    )
    turns = [_turn("a", 0), _turn("b", 10), _turn("c", 20), _turn("d", 30), _turn("a", 30.5)]
    tally = _played(load, turns, "look-ahead")

    assert (tally.prefetches_in_time, tally.prefetches_late) == (in_time, late)
    assert (tally.dram_hits, tally.ssd_hits) == (in_time, late)


def test_a_warm_up_is_not_counted() -> None:
    """Turns before its end fill the store and no figure."""
    tally = _played(replace(LOAD, warm_up_count=2), [_turn("a", 0), _turn("a", 1), _turn("a", 2)])

    assert (tally.turns, tally.later_turns, tally.dram_hits) == (1, 1, 1)


def test_turns_may_take_time_and_wait_for_nothing() -> None:
    """Two sessions at once take one second; their state is live while they run, and until the next turn."""
    load = replace(LOAD, is_timed=True, prefill_tokens_per_s=100, dram_bytes_per_s=1e12)
    turns = [_turn("a", 0), _turn("b", 0), _turn("a", 0.5)]
    replay = _footprint_of(load, turns)
    tally = replay.run(turns)

    assert (round(tally.end_s, 6), tally.queue_wait_s, tally.dram_hits) == (2, 0, 1)
    assert replay.peak_live_bytes == 1000 + 1000 + 1000


def test_turns_that_take_no_time_need_nothing_while_they_run() -> None:
    """The footprint is what later turns need: a's 10 tokens and b's 5, and c's 99 never."""
    turns = [TraceTurn(name.encode(), second, size, 0, None, None) for second, (name, size) in enumerate(
        [("a", 10), ("b", 5), ("a", 1), ("b", 1), ("c", 99)]
    )]  # fmt: skip
    replay = _footprint_of(LOAD, turns)
    replay.run(turns)

    assert replay.peak_live_bytes == 150


def test_memory_is_that_of_live_sessions() -> None:
    """Six times as many turns and sessions, as many of them live: nothing grows with the trace."""
    load = replace(LOAD, ttl_s=100)

    def peak_bytes(count: int) -> int:
        turns = (TraceTurn(b"%d" % (n // 2), float(n), 10, 10, None, None) for n in range(count))
        tracemalloc.start()
        tally = Replay(load, lambda capacities, _: POLICIES["lru"](capacities)).run(turns)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert tally.most_sessions == 51
        return peak

    assert peak_bytes(6_000) < peak_bytes(1_000) + 16_384


@pytest.mark.parametrize("slots", [None, 2])
def test_every_policy_says_the_same_twice(trace_path: Path, slots: int | None) -> None:
    """A study depends on its inputs alone, with a queue, hints and lies too."""
    load = replace(LOAD, slot_count=slots, hints=frozenset(TraceHint), wrong_hint_share=0.3)

    first, second = (_study(trace_path, load, NAMES) for _ in range(2))

    assert [o.to_dict() for o in first.values()] == [o.to_dict() for o in second.values()]


def test_nobody_beats_belady_where_sessions_are_of_one_size(tmp_path: Path) -> None:
    """The bound is one: no policy hits more often than it, where sizes play no part."""
    path = tmp_path / "even.csv"
    rows = sorted((1000 * s + 7000 * t * (1 + s % 5), s) for s in range(60) for t in range(1 + s % 4))
    path.write_text(
        "session_id,arrival_ms,new_input_tokens,output_tokens,history_tokens\n"
        + "".join(f"{s},{at},0,0,100\n" for at, s in rows)
    )
    rates = {name: o.tally.hit_rate for name, o in _study(path, LOAD, NAMES).items()}

    assert rates["belady"] == max(rates.values())
    assert rates["belady"] > rates["lru"]


def test_value_keeps_what_returns_where_lru_is_flooded(trace_path: Path) -> None:
    """Among as many one-shots, learned return times are worth a multiple of LRU's hits."""
    outcomes = _study(trace_path, LOAD, ["lru", "value"])

    assert outcomes["value"].tally.hit_rate > 2 * outcomes["lru"].tally.hit_rate


def test_lies_leave_value_above_the_best_baseline(trace_path: Path) -> None:
    """Hints that are all wrong cost less than what learning is worth."""
    load = replace(LOAD, hints=frozenset(TraceHint), wrong_hint_share=1.0)
    baselines = ["lru", "fifo", "s3-fifo", "arc", "t-lru", "look-ahead"]
    rates = {name: o.tally.hit_rate for name, o in _study(trace_path, load, [*baselines, "value"]).items()}

    assert rates["value"] >= max(rates[name] for name in baselines) - 0.02
