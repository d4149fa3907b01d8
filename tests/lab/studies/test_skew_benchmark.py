"""The skew benchmark.

Draws and kept caches by hand, what is red has no figures, and all of it once on a tiny model.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from transformers import Cache

from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.profile import StatePlace
from lab.demo.embedded_store import embedded_store
from lab.restoring.bed import Bed, Case, Saved, Taken, halves
from lab.restoring.figures import LEAD, PLANNED
from lab.restoring.models import Subject, random_model
from lab.restoring.plot import plot_skew
from lab.restoring.rounds import Row, plans
from lab.restoring.skewed import Front, Served, Skewed, compared, draw, figures, shares
from lab.studies.skew import contexts, show

HISTORY, NEW, SESSIONS = 40, 8, 4


def test_shares_by_hand() -> None:
    """In proportion to one over the rank, to the power of the skew."""
    assert shares(4, 0.0).tolist() == [0.25] * 4
    assert shares(3, 1.0) == pytest.approx(np.array([6, 3, 2]) / 11)
    assert shares(3, 2.0) == pytest.approx(np.array([36, 9, 4]) / 49)


def test_draws_follow_the_shares() -> None:
    """Within five standard deviations of each share; the same seed draws the same."""
    count = 20_000
    drawn = draw(5, 1.0, count, np.random.default_rng(1))
    expected = shares(5, 1.0)
    found = np.bincount(drawn, minlength=5) / count
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count))
    assert draw(5, 1.0, count, np.random.default_rng(1)) == drawn


def test_the_least_recently_used_cache_leaves() -> None:
    """A look counts as a use, and so does keeping it again."""
    front = Front[str](2)
    front.put(0, "a")
    front.put(1, "b")
    assert front.get(0) == "a"
    front.put(2, "c")
    assert [front.get(each) for each in (0, 1, 2)] == ["a", None, "c"]
    front.put(0, "d")
    front.put(3, "e")
    assert [front.get(each) for each in (0, 2, 3)] == ["d", None, "e"]


def test_a_front_without_room_keeps_nothing() -> None:
    """Every request is a miss."""
    front = Front[str](0)
    front.put(0, "a")
    assert front.get(0) is None


def served(*outcomes: tuple[float, bool]) -> list[Served]:
    """A round: seconds, and whether it was a hit."""
    return [Served(Taken(seconds, 0, 0, 0, 0), is_hit) for seconds, is_hit in outcomes]


def test_figures_by_hand() -> None:
    """Means and medians within a round; hits and misses over all rounds."""
    found = figures([served((1, True), (2, True), (6, False)), served((1, True), (5, False), (6, False))])
    assert found["rounds"] == {
        "hit_rate": [pytest.approx(2 / 3), pytest.approx(1 / 3)],
        "mean_ttft_s": [3, 4],
        "median_ttft_s": [2, 5],
    }
    assert (found["hit_ttft_s"]["median"], found["miss_ttft_s"]["median"]) == (1, 6)
    assert figures([served((1, False)), served((1, False))])["hit_ttft_s"] is None


def means(method: str, case: int, *seconds: float, problem: str = "") -> Row:
    """A row of results as far as ratios need it."""
    return {"method": method, "case": case, "problem": problem, "rounds": {"mean_ttft_s": list(seconds)}}


def test_ratios_are_taken_within_rounds_and_leave_out_the_red_and_the_same() -> None:
    """A plan beside itself says nothing; the paper's figure stands at its own skew alone."""
    rows = [
        means("recompute", 0, 9, problem="cache off by 1"),
        means("kv", 1, 10, 20, 60),
        means("hidden", 2, 1, 4, 2),
        means(PLANNED, 1, 10, 20, 60),
    ]
    (found,) = compared(rows, 2.0)
    assert (found["figure"], found["ratio"]["median"], found["paper"]) == (
        "mean TTFT, kv over hidden",
        10,
        "1.15",
    )
    assert next(compared(rows, 1.0))["paper"] == ""


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Two layers, and text for all sessions but a half: they overlap."""
    return random_model("tiny", torch.device("cpu"), layers=2, token_count=SESSIONS * (HISTORY + NEW) // 2)


@dataclass
class Known:
    """A bed with sessions."""

    bed: Bed
    saved: list[Saved]

    def rows(self, *, room_count: int = 2, rounds: int = 2) -> list[Row]:
        """Rows of 12 requests a round at skew 1."""
        found = plans(self.bed.shape, known_profile("cpu"), HISTORY, NEW, StatePlace.DRAM)
        cases = {name: Case(found[name], StatePlace.DRAM, LEAD) for name in ("kv", "hidden", PLANNED)}
        facts = {
            "model": "tiny",
            "device": "cpu",
            "history": HISTORY,
            "kept": room_count,
            "sessions": SESSIONS,
        }
        skewed = Skewed(self.bed, self.saved, {"recompute": Case(None), **cases}, room_count, facts)
        return json.loads(json.dumps(list(skewed.measure(1.0, 12, rounds))))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def known(subject: Subject) -> Iterator[Known]:
    """Four sessions in a store."""
    with embedded_store(64 << 20) as store, Bed(subject.model, store, is_random=True) as bed:
        yield Known(
            bed, [bed.add(ids[:HISTORY], ids[HISTORY:]) for ids in contexts(subject, HISTORY + NEW, SESSIONS)]
        )


def test_every_method_is_served_alike_and_right(known: Known, tmp_path: Path) -> None:
    """Hits, misses, means and ratios, from a real store to the table and the picture."""
    rows = known.rows()
    times = [row for row in rows if row["what"] == "skew"]
    assert [row["method"] for row in times] == ["recompute", "kv", "hidden", PLANNED]
    assert not [row for row in times if row["problem"]]
    (hit_rates,) = {tuple(row["rounds"]["hit_rate"]) for row in times}
    assert all(0 < each < 1 for each in hit_rates)
    assert {row["figure"] for row in rows if row["what"] == "compared"} >= {
        "mean TTFT, kv over hidden",
        "mean TTFT, recompute over hidden",
    }
    text = io.StringIO()
    show(rows, Console(file=text, width=200))
    assert "0-1 hidden" in text.getvalue()
    plot_skew(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_kept_cache_that_is_not_its_sessions_has_no_figures(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept caches are compared at each use."""
    first: dict[int, Cache] = {}

    def get(front: Front[Cache], _session: int) -> Cache | None:
        return first.get(id(front))

    monkeypatch.setattr(Front, "get", get)
    monkeypatch.setattr(Front, "put", lambda front, _session, cache: first.setdefault(id(front), cache))
    rows = known.rows()
    assert all(row["problem"] for row in rows)
    assert not any("mean_ttft_s" in row or row["what"] == "compared" for row in rows)


def test_a_restore_that_is_off_has_no_figures(known: Known) -> None:
    """One element of one session."""
    keys = halves(known.saved[0].cache, 1)[0]
    right = keys.clone()
    keys[0, 2, HISTORY - 1, 7] += 1
    try:
        rows = known.rows(room_count=0)
    finally:
        keys.copy_(right)
    assert all(row["problem"] for row in rows)
    text = io.StringIO()
    show(rows, Console(file=text, width=200))
    assert text.getvalue().count("RED") == 5 * len(rows)


def test_contexts_begin_as_far_apart_as_the_text_allows(subject: Subject) -> None:
    """Whole where there is room, overlapping where there is not, never alike; too little text is refused."""
    ids = subject.token_ids
    assert contexts(subject, 20, 3) == [ids[0:20], ids[20:40], ids[40:60]]
    assert contexts(subject, 90, 3) == [ids[0:90], ids[3:93], ids[6:96]]
    assert contexts(subject, 96, 1) == [ids]
    with pytest.raises(typer.BadParameter, match="too short"):
        contexts(subject, 95, 3)
    with pytest.raises(typer.BadParameter, match="too short"):
        contexts(subject, 97, 1)
