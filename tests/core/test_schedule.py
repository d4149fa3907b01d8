"""The merged queue against one that looks at everything each time; ranks against a sorted list."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.core.placement.order import Ranks
from ctxcache.core.placement.schedule import DEFAULT_PER_S, Job, Schedule, StartRate

ENGINES = ("a", "b", "c")
DELTAS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "put at", "started", "cancelled", "drop", "passed")),
        st.sampled_from(ENGINES),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(0, 4)),
        st.integers(-5, 5),
        st.integers(0, 9),
    ),
    max_size=80,
)


class _Naive:
    """The same by lists and whole passes."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, tuple[Job, int, float]]] = {}
        self.rates: dict[str, StartRate] = {}
        self.passes: dict[str, tuple[bool, tuple[float, ...]]] = {}
        self.dues: dict[tuple[str, str], tuple[float, float, float]] = {}
        """From when it is late, its patience, and by how much it is put off."""
        self.started: dict[str, float] = {}
        self.number = 0

    def put(self, engine: str, job: Job, now_s: float) -> None:
        jobs, rate = self.jobs.setdefault(engine, {}), self.rates.setdefault(engine, StartRate(now_s))
        rate.passed(now_s, is_waiting=bool(jobs))
        jobs.pop(job.job_id, None)
        self.number += 1
        start_s = self._start(engine, job, now_s) if job.start_s is None else job.start_s
        jobs[job.job_id] = job, self.number, start_s
        patience_s = min(max(start_s - now_s, 8 / self.rates[engine].per_s, 60.0), 600.0)
        self.dues[engine, job.job_id] = start_s, patience_s, 0.0
        self._fit(engine, now_s)

    def passed(self, now_s: float) -> None:
        late = [
            (self.dues[engine, job_id][0] + max(self.dues[engine, job_id][1:]), engine, job_id)
            for engine, jobs in self.jobs.items()
            for job_id in jobs
            if self.dues[engine, job_id][2] < inf
        ]
        for look_s, engine, job_id in sorted(late):
            from_s, patience_s, _ = self.dues[engine, job_id]
            if look_s > now_s:
                continue
            if job_id in [job.job_id for job, *_ in self.line(engine)[8:]]:
                from_s = max(from_s, self.started.get(engine, -inf))
            steps = (patience_s * 2**n for n in range(5))
            put_off_s = next((step_s for step_s in steps if from_s + step_s > now_s), inf)
            self.dues[engine, job_id] = (
                from_s,
                patience_s,
                put_off_s if now_s >= from_s + patience_s else 0.0,
            )

    def gone(self, engine: str, job_id: str, now_s: float, *, is_started: bool) -> None:
        jobs = self.jobs.get(engine, {})
        if job_id in jobs:
            self.rates[engine].passed(now_s, is_waiting=True, started=int(is_started))
            if is_started:
                self.started[engine] = now_s
            del jobs[job_id]
            self._fit(engine, now_s)

    def drop(self, engine: str) -> None:
        for facts in (self.jobs, self.rates, self.passes, self.started):
            facts.pop(engine, None)

    def line(self, engine: str) -> list[tuple[Job, int, float]]:
        placed = (
            entry
            for entry in self.jobs.get(engine, {}).values()
            if entry[0].start_s is None and self.dues[engine, entry[0].job_id][2] < inf
        )
        return sorted(placed, key=lambda entry: self.place(entry[0], entry[1]))

    def starts(self, uid: bytes) -> list[tuple[Job, float]]:
        return [
            (job, start_s + late_s)
            for engine, jobs in self.jobs.items()
            for job, _, start_s in jobs.values()
            for _, _, late_s in (self.dues[engine, job.job_id],)
            if job.uid == uid and late_s < inf
        ]

    def _start(self, engine: str, job: Job, now_s: float) -> float:
        mine = self.place(job, self.number)
        line = self.line(engine)
        before = [entry for entry in line if self.place(entry[0], entry[1]) < mine]
        after = line[len(before) :]
        step_s = 1 / self.rates[engine].per_s
        low, high = before[-1][2] if before else -inf, after[0][2] if after else inf
        return self._between(now_s + len(before) * step_s, low, high, step_s)

    def _fit(self, engine: str, now_s: float) -> None:
        per_s, line = self.rates[engine].per_s, self.line(engine)
        if engine not in self.passes:
            if not line or abs(line[0][2] - now_s) * per_s <= 8:
                return
            is_later = line[0][2] < now_s
            self.passes[engine] = is_later, (inf,) if is_later else (-inf,)
        is_later, cursor = self.passes[engine]
        for _ in range(4):
            line = self.line(engine)
            places = [self.place(job, number) for job, number, _ in line]
            left = [i for i, place in enumerate(places) if (place < cursor if is_later else place > cursor)]
            if not left:
                del self.passes[engine]
                return
            at = left[-1] if is_later else left[0]
            job, number, _ = line[at]
            low, high = line[at - 1][2] if at else -inf, line[at + 1][2] if at + 1 < len(line) else inf
            self.jobs[engine][job.job_id] = (
                job,
                number,
                self._between(now_s + at / per_s, low, high, 1 / per_s),
            )
            cursor = places[at]
            self.passes[engine] = is_later, cursor

    @staticmethod
    def place(job: Job, number: int) -> tuple[float, ...]:
        return job.position, -job.priority, job.deadline_s, number

    @staticmethod
    def _between(start_s: float, low: float, high: float, step_s: float) -> float:
        if start_s <= low:
            return low + min(step_s, (high - low) / 2)
        return high - min(step_s, (high - low) / 2) if start_s >= high else start_s


def let_pass(merged: Schedule, now_s: float) -> None:
    """Put off whatever is overdue."""
    while merged.passed(now_s, 3):
        pass


@given(DELTAS)
@settings(max_examples=300, deadline=None)
def test_the_merged_order_is_that_of_a_model_that_looks_at_everything(deltas: list[Any]) -> None:
    """Every session has its earliest job's start, and whoever listens has heard exactly that."""
    heard: dict[bytes, float | None] = {}
    merged, naive, now_s = Schedule(heard.__setitem__), _Naive(), 100.0
    for kind, engine, number, session, at, passed_s in deltas:
        now_s += passed_s
        uid = None if session is None else bytes([session])
        job = Job(str(number), uid, position=float(at), priority=number, deadline_s=now_s + number)
        if kind == "put at":
            job = replace(job, start_s=now_s + at)
        if kind.startswith("put"):
            merged.put(engine, job, now_s)
            naive.put(engine, job, now_s)
        elif kind == "passed":
            now_s += 40 * passed_s
            let_pass(merged, now_s)
            naive.passed(now_s)
        elif kind == "drop":
            while merged.drop(engine, 3):
                pass
            naive.drop(engine)
        else:
            merged.gone(engine, job.job_id, now_s, is_started=kind == "started")
            naive.gone(engine, job.job_id, now_s, is_started=kind == "started")

        for key in (bytes([i]) for i in range(5)):
            starts, order = naive.starts(key), merged.order(key)
            assert heard.get(key) == order
            assert (order is None) == (not starts)
            if order is not None:
                # Explicit starts are moved within their millisecond.
                exact = min(start_s for _, start_s in starts)
                assert exact - 0.001 <= order <= exact + 0.001
        for name in ENGINES:
            assert merged.job_count(name) == len(naive.jobs.get(name, {}))
            line = [start_s for *_, start_s in naive.line(name)]
            assert line == sorted(line)


def late(merged: Schedule, until_s: int) -> Iterator[tuple[int, list[float | None]]]:
    """Look twice a second; when something has changed, and the orders of sessions 0 to 9."""
    before: list[float | None] = []
    for half_s in range(2 * until_s):
        let_pass(merged, half_s / 2)
        orders = [merged.order(bytes([i])) for i in range(10)]
        if orders != before:
            yield half_s // 2, orders
        before = orders


@pytest.mark.parametrize("has_positions", [True, False])
def test_a_stuck_engines_jobs_lose_their_places(*, has_positions: bool) -> None:
    """They are behind whatever starts soon, in their order, each as far off as it is late.

    And in the end nowhere.
    """
    merged = Schedule(lambda *_: None)
    for i in range(10):
        start_s = None if has_positions else float(i)
        merged.put("a", Job(f"{i}", bytes([i]), position=float(i), start_s=start_s), 0.0)
    settled = {
        now_s: [round(order) for order in orders if order is not None] for now_s, orders in late(merged, 1000)
    }

    assert [settled[now_s] for now_s in (0, 69, 129, 249, 489)] == [
        [at + i for i in range(10)] for at in (0, 120, 240, 480, 960)
    ]
    assert settled[969] == []
    assert merged.job_count("a") == 10


def test_a_job_that_was_forgotten_holds_up_nobody() -> None:
    """One that never ends, before others that do: it is given up, and they are expected in their turn."""
    merged = Schedule(lambda *_: None)
    merged.put("a", Job("forgotten", b"f", position=-1.0), 0.0)
    for i in range(2000):
        merged.put("a", Job(f"{i}", b"%d" % i, position=float(i)), float(i))
        merged.put("a", Job(f"x{i}", None, position=float(i)), float(i))
        merged.gone("a", f"{i}", i + 0.5, is_started=True)
        merged.gone("a", f"x{i}", i + 1.0, is_started=True)
        merged.passed(i + 1.0, 10)
    merged.put("a", Job("next", b"n", position=2000.0), 2000.0)

    assert merged.order(b"f") is None
    assert merged.order(b"n") == 2000.0
    merged.put("a", Job("forgotten", b"f", position=3000.0), 2000.0)
    assert merged.order(b"f") is not None


def test_who_waits_for_a_slow_engine_is_not_overdue() -> None:
    """Jobs of an engine that takes an unforeseen minute for each keep their order."""
    merged = Schedule(lambda *_: None)
    for i in range(100):
        merged.put("a", Job(f"{i}", b"%d" % i, position=float(i)), 0.0)
    for i in range(100):
        for half_s in range(120):
            merged.passed(60.0 * i + half_s / 2, 1000)
        orders = [merged.order(b"%d" % j) for j in range(i, 100)]
        assert None not in orders
        merged.gone("a", f"{i}", 60.0 * (i + 1), is_started=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_ranks_are_those_of_a_sorted_list(changes: list[tuple[bool, int]]) -> None:
    """Rank and neighbours of every key, in the set or not."""
    ranks, keys = Ranks(), list[tuple[float, ...]]()
    for is_added, number in changes:
        key = (float(number), 1.0)
        if is_added and key not in keys:
            ranks.add(key)
            insort(keys, key)
        elif not is_added:
            ranks.discard(key)
            keys = [other for other in keys if other != key]
    assert len(ranks) == len(keys)
    for number in range(31):
        key = (float(number), 1.0)
        rank = bisect_left(keys, key)
        rest = [other for other in keys[rank:] if other != key]
        expected = rank, keys[rank - 1] if rank else None, rest[0] if rest else None
        assert tuple(ranks.find(key)) == expected


def test_keys_in_order_make_no_deep_tree() -> None:
    """Nor do those in reverse: recursion stays shallow."""
    for keys in (range(20_000), range(20_000, 0, -1)):
        ranks = Ranks()
        for number in keys:
            ranks.add((float(number),))
        assert ranks.find((10_000.5,)).rank in (10_000, 10_001)


def test_two_engines_merge_by_their_rates() -> None:
    """The tenth job at 10 starts a second is due before the third at one start in 2 s."""
    merged = Schedule(lambda *_: None)
    for i in range(100):
        merged.put("fast", Job(f"{i}", None, position=i), 0.0)
        merged.put("slow", Job(f"{i}", None, position=i), 0.0)
    for i in range(2000):
        now_s = (i + 1) / 10
        merged.gone("fast", f"{i}", now_s, is_started=True)
        merged.put("fast", Job(f"{i + 100}", None, position=i + 100), now_s)
        if i % 20 == 19:
            merged.gone("slow", f"{i // 20}", now_s, is_started=True)
            merged.put("slow", Job(f"{i // 20 + 100}", None, position=i // 20 + 100), now_s)
    merged.put("fast", Job("x", b"x", position=2009.5), 200.0)
    merged.put("slow", Job("y", b"y", position=102.5), 200.0)
    x, y = merged.order(b"x"), merged.order(b"y")

    assert x is not None
    assert y is not None
    assert 195 < x < y < 215


def test_the_earliest_wins_where_two_queue_one_session() -> None:
    """And the other one takes its place when it is gone."""
    heard: list[float | None] = []
    merged = Schedule(lambda _, order: heard.append(order))
    merged.put("a", Job("1", b"s", start_s=50.0), 0.0)
    merged.put("b", Job("1", b"s", start_s=20.0), 0.0)
    merged.put("b", Job("2", b"s", start_s=90.0), 0.0)
    merged.gone("b", "1", 20.0, is_started=True)
    merged.drop("a", 9)
    merged.drop("b", 9)

    assert [None if order is None else round(order) for order in heard] == [50, 20, 50, 90, None]


def test_a_job_that_is_put_again_is_not_withdrawn_in_between() -> None:
    """A withdrawal says that a job started or never will."""
    heard: list[float | None] = []
    merged = Schedule(lambda _, order: heard.append(order))
    merged.put("a", Job("1", b"s", start_s=50.0), 0.0)
    merged.put("a", Job("1", b"s", start_s=20.0), 0.0)

    assert None not in heard
    assert len(heard) == 2


def test_priority_then_deadline_break_ties() -> None:
    """Among starts within a millisecond, whether they are given or positions."""
    merged = Schedule(lambda *_: None)
    for given_s, position in ((30.0, 0.0), (None, 7.0)):
        for name, priority, deadline_s in (("a", 0, inf), ("b", 0, 40.0), ("c", 9, inf), ("d", 0, 35.0)):
            job = Job(name, name.encode(), position, given_s, priority, deadline_s)
            merged.put("engine", job, 0.0)
        by_order = sorted("abcd", key=lambda name: merged.order(name.encode()) or 0)
        assert by_order == ["c", "d", "b", "a"]
        assert len({merged.order(name.encode()) for name in "abcd"}) == 4


def test_a_rate_is_learned_from_busy_time_alone() -> None:
    """An engine without a queue is not slow."""
    rate = StartRate(0.0)
    assert rate.per_s == DEFAULT_PER_S
    for i in range(1, 2001):
        rate.passed(i / 20, is_waiting=True, started=1)
    assert 15 < rate.per_s < 21
    rate.passed(100_000.0, is_waiting=False)
    assert 15 < rate.per_s < 21
    for i in range(100):
        rate.passed(100_000.0 + i * 10, is_waiting=True, started=1)
    assert 0.05 < rate.per_s < 0.2
    rate.passed(99.0, is_waiting=True, started=5)
    assert rate.per_s > 0
