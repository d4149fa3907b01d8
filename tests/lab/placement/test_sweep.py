"""Sweeps: what is replayed, in which order, and what the trace is found to hold."""

import itertools
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ctxcache.simulate.trace import Trace, TraceTurn
from lab.bench.generate_load import PROFILES, Pace, rows, write
from lab.placement import sweeps
from lab.placement.census import Census, PacedTrace, count
from lab.placement.sweeps import SWEEPS, ReplayLost, SweepRow, play, prepare


def quiet(_what: str, _done: int) -> None:
    """Hear of turns and say nothing."""


@pytest.fixture
def load_path(tmp_path: Path) -> Path:
    """60 generated sessions."""
    path = tmp_path / "load.csv"
    write(path, rows(PROFILES["ca"], Pace(60, 1.0, 30.0, 0.5), seed=1))
    return path


def test_a_generated_load_is_a_trace_and_the_same_again(load_path: Path, tmp_path: Path) -> None:
    """The simulator reads it, and the same arguments make the same bytes."""
    again = tmp_path / "again.csv"
    write(again, rows(PROFILES["ca"], Pace(60, 1.0, 30.0, 0.5), seed=1))

    assert again.read_bytes() == load_path.read_bytes()
    assert len({turn.session for turn in Trace(load_path)}) == 60


def test_a_generated_load_has_the_statistics_that_it_was_asked_for() -> None:
    """A share of single turns, and a mean think time; 2000 sessions tell them to a few per cent."""
    made = rows(PROFILES["ca"], Pace(2000, 2.0, 100.0, 0.8), seed=2)

    turns: dict[int, list[int]] = {}
    for arrival_ms, session, *_ in made:
        turns.setdefault(session, []).append(arrival_ms)
    gaps = [after - before for each in turns.values() for before, after in itertools.pairwise(each)]
    assert sum(len(each) == 1 for each in turns.values()) / 2000 == pytest.approx(0.27, abs=0.03)
    assert sum(gaps) / len(gaps) == pytest.approx(100_000, rel=0.05)
    assert max(each[0] for each in turns.values()) == pytest.approx(1_000_000, rel=0.1)


def test_sessions_begin_faster_and_think_as_long(load_path: Path) -> None:
    """Twice as many begin a second; every turn keeps its distance to its session's first; order holds."""
    usual, faster = list(Trace(load_path)), list(PacedTrace(load_path, sessions_times=2.0))

    def distances_ms(turns: list[TraceTurn]) -> dict[tuple[bytes, int | None], int]:
        firsts: dict[bytes, float] = {}
        return {
            (turn.session, turn.number): round(
                1000 * (turn.arrival_s - firsts.setdefault(turn.session, turn.arrival_s))
            )
            for turn in turns
        }

    assert [turn.arrival_s for turn in faster] == sorted(turn.arrival_s for turn in faster)
    assert distances_ms(faster) == distances_ms(usual)
    assert faster[0].arrival_s == usual[0].arrival_s / 2
    assert count(faster, 3600).begin_span_s == pytest.approx(count(usual, 3600).begin_span_s / 2)


@pytest.mark.parametrize("times", [0.3, 1.0, 3.0])
def test_no_turn_is_lost_at_another_pace(load_path: Path, times: float) -> None:
    """Slower or faster, the same turns come."""
    usual = sorted((turn.session, turn.number) for turn in Trace(load_path))
    paced = [*PacedTrace(load_path, sessions_times=times)]

    assert sorted((turn.session, turn.number) for turn in paced) == usual
    assert [turn.arrival_s for turn in paced] == sorted(turn.arrival_s for turn in paced)


def test_a_census_counts_sessions_within_the_ttl(trace_path: Path) -> None:
    """400 come once a second apart, 40 return every 40 s; within 10 s at most 10 + those that return then."""
    day, brief = count(Trace(trace_path), 86_400), count(Trace(trace_path), 10)

    assert (day.turn_count, day.session_count, day.distinct_sessions) == (800, 440, 440)
    assert brief.distinct_sessions < 40
    assert day.longest_tokens == 500
    assert day.cache_bytes(None, 2) == 440 * 500 * 2
    assert day.cache_bytes(100, 2) == 440 * 100 * 2


def test_a_warm_up_of_the_papers_leaves_most_of_a_short_trace(load_path: Path) -> None:
    """10,000 turns would leave nothing to count; a fifth of the trace is not counted."""
    sweep = SWEEPS["policies"]
    census, runs = prepare(sweep, PacedTrace(load_path), sweep.preset, ["lru"], live_bytes=None, step=quiet)

    assert {run.load.warm_up_count for run in runs} == {census.turn_count // 5}


def test_capacities_are_scaled_as_if_live_state_peaked_elsewhere(load_path: Path) -> None:
    """Both tiers together keep their share of the live footprint, and DRAM does not grow."""
    sweep = SWEEPS["policies"]
    trace = PacedTrace(load_path)
    census, scaled = prepare(sweep, trace, sweep.preset, ["lru"], live_bytes=12 * 10**12, step=quiet)
    _, plain = prepare(sweep, trace, sweep.preset, ["lru"], live_bytes=None, step=quiet)

    factor = census.live_bytes / (12 * 10**12)
    assert 0 < factor < 1
    for small, large in zip(scaled, plain, strict=True):
        total_bytes = large.load.dram_bytes + large.load.ssd_bytes
        assert small.load.dram_bytes + small.load.ssd_bytes == pytest.approx(total_bytes * factor, rel=1e-6)
        assert small.load.dram_bytes <= large.load.dram_bytes


def test_more_processes_give_the_same_rows_in_the_same_order(load_path: Path) -> None:
    """Rows come in the order of the runs, whichever ends first, and each is told of."""
    sweep = SWEEPS["capacity"]
    _, runs = prepare(
        sweep, PacedTrace(load_path), sweep.preset, ["lru", "look-ahead"], live_bytes=None, step=quiet
    )
    ended: list[int] = []

    def rows_of(job_count: int) -> list[SweepRow]:
        return list(
            play(
                PacedTrace(load_path),
                runs,
                job_count=job_count,
                step=quiet,
                done=lambda: ended.append(1),
            )
        )

    assert rows_of(3) == rows_of(1)
    assert len(ended) == 2 * len(runs)


def test_a_process_that_is_killed_is_told_of(tmp_path: Path) -> None:
    """No waiting for rows that will never come: REPLAY_LOST."""
    sweep = SWEEPS["policies"]
    path = tmp_path / "never.csv"
    os.mkfifo(path)
    runs = sweep.make(sweep.preset, ["lru"], Census(1, 1, 1.0, 1, 1, 1.0))

    def kill() -> None:
        # Opens once a process reads, so there is one to kill.
        with path.open("wb"):
            for child in multiprocessing.active_children():
                child.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ReplayLost) as lost:
        list(play(PacedTrace(path), runs, job_count=2, step=quiet, done=lambda: None))
    killer.join()

    assert lost.value.reason == "REPLAY_LOST"


def test_a_warm_up_is_of_turns_served(load_path: Path) -> None:
    """One slot, so that turns arrive long before they are served: all but the first fifth are counted."""
    sweep = SWEEPS["reads"]
    load = replace(sweep.preset, slot_count=1)
    census, runs = prepare(sweep, PacedTrace(load_path), load, ["lru"], live_bytes=None, step=quiet)

    rows_played = play(PacedTrace(load_path), runs[:1], job_count=1, step=quiet, done=lambda: None)
    (row,) = rows_played
    assert row.number("turns") == census.turn_count - census.turn_count // 5
    assert row.number("all_hit_rate") <= row.number("later_turn_share") < 1


def test_a_caller_that_stops_leaves_what_has_not_begun(
    load_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are given up, and no process is left."""
    futures: list[Future[object]] = []

    class Pool(ProcessPoolExecutor):
        def submit(self, *given: object, **named: object) -> Future[object]:  # type: ignore[override]
            futures.append(super().submit(*given, **named))  # type: ignore[arg-type]
            return futures[-1]

    monkeypatch.setattr(sweeps, "ProcessPoolExecutor", Pool)
    sweep = SWEEPS["policies"]
    runs = sweep.make(sweep.preset, ["lru"], Census(1, 1, 1.0, 1, 1, 1.0)) * 20
    rows = play(PacedTrace(load_path), runs, job_count=2, step=quiet, done=lambda: None)

    next(rows)
    rows.close()  # type: ignore[attr-defined]

    assert futures[-1].cancelled()
    assert not multiprocessing.active_children()
