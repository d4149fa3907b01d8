"""The restore benchmark.

Its limits, ratios and storage by hand, what is red has no figures, and all of it once on a tiny model.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import StatePlace
from lab.demo.embedded_store import embedded_store
from lab.restoring.bed import Bed, Bounds, Taken, halves
from lab.restoring.figures import (
    FIRST,
    HIDDEN_INT8,
    LEAD,
    PLANNED,
    VERIFIED,
    WHOLE,
    Ceilings,
    Work,
    compared,
    ratio,
    spread,
    storage,
)
from lab.restoring.models import Subject, random_model
from lab.restoring.plot import plot, series
from lab.restoring.rounds import Rounds, plans
from lab.restoring.table import cells, show

MACHINE = Ceilings(
    copy_bytes_per_s=25e9,
    ssd_bytes_per_s=5e9,
    flops_per_s=200e12,
    checksum_bytes_per_s=20e9,
    host_copy_bytes_per_s=10e9,
)


def llama_plans(place: StatePlace = StatePlace.DRAM) -> Mapping[str, Plan]:
    """Plans for 1,024 tokens of Llama-2-7B."""
    return plans(known_model("llama-2-7b"), known_profile("a100-40gb"), 1024, 16, place)


def limit(work: Work, machine: Ceilings) -> tuple[Any, ...]:
    """The limiting ceiling's name, and seconds."""
    return work.limit_s(machine)[::-1]


def test_work_and_limit_of_hidden_states_by_hand() -> None:
    """Bytes of the rows, FLOPs of the projections; the slower of both is the limit."""
    work = Work.of(llama_plans()["hidden"], StatePlace.DRAM)
    assert work == Work(32 * 1024 * 8192, 0, 32 * 1024 * 2 * 4096 * 8192)
    # 268 MB at 25 GB/s are 10.7 ms, 2.2 TFLOP at 200 TFLOP/s are 11.0 ms.
    assert limit(work, MACHINE) == ("FLOPs", pytest.approx(10.995e-3, rel=1e-3))
    assert limit(work, replace(MACHINE, flops_per_s=250e12)) == ("copy", pytest.approx(10.737e-3, rel=1e-3))


def test_rows_on_ssd_are_limited_by_it() -> None:
    """They pass the SSD and the copy."""
    work = Work.of(llama_plans(StatePlace.SSD)["kv"], StatePlace.SSD)
    assert (work.copied_bytes, work.ssd_bytes, work.flops) == (32 * 1024 * 16384, 32 * 1024 * 16384, 0)
    assert limit(work, MACHINE) == ("SSD", pytest.approx(536.9e6 / 5e9, rel=1e-3))


def test_recomputed_layers_count_all_matrices_and_attention_but_no_bytes() -> None:
    """Recomputation reads nothing to speak of."""
    work = Work.of(llama_plans()["recompute"], StatePlace.DRAM)
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008
    pairs = 1024 * 1025 / 2
    assert work.copied_bytes == 0
    assert work.flops == 32 * (1024 * 2 * matrices + pairs * 4 * 4096)


def test_a_ratio_is_taken_within_rounds() -> None:
    """A slow round is slow for both."""
    # The medians alone would say 20 / 2 = 10.
    assert ratio([10, 20, 60], [1, 4, 2])["median"] == 10
    assert ratio([8, 20, 60], [1, 4, 2])["median"] == 8
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_spread_has_quartiles() -> None:
    """One value is its own."""
    assert spread([4, 1, 3, 2, 5]) == {"median": 3, "low": 2, "high": 4}
    assert spread([7]) == {"median": 7, "low": 7, "high": 7}


def row(
    method: str, start: str, *ttft: float, restore: float = 1, case: int = 0, problem: str = ""
) -> dict[str, Any]:
    """A row of results as far as ratios need it."""
    rounds = {"ttft_s": list(ttft), "restore_s": [restore] * len(ttft)}
    return {
        "method": method,
        "place": "dram",
        "start": start,
        "rounds": rounds,
        "case": case,
        "problem": problem,
    }


def test_the_papers_rows_leave_out_what_is_red_or_the_same_measurement() -> None:
    """Else a failure, or a plan beside itself, would be a result."""
    rows = [
        row("kv", LEAD, 3, 3, 3, case=1),
        row("hidden", LEAD, 2, 2, 1, case=2),
        row("hidden", WHOLE, 2, 2, 2, restore=5, case=3),
        row("hcache", WHOLE, 2, 2, 2, restore=4, case=4),
        row("planned", WHOLE, 2, 2, 2, restore=4, case=4),
        row("naive hybrid", WHOLE, 2, 2, 2, restore=9, case=5, problem="cache off by 1"),
        row("kvpr", WHOLE, 2, 2, 2, restore=4, case=4),
    ]
    found = {(each["row"], each["figure"]): each["ratio"]["median"] for each in compared(rows)}
    assert found == {
        ("D1", "TTFT, K/V over hidden"): 1.5,
        ("D5", "hidden only over scheduled"): 1.25,
        ("D5", "hidden only over planned"): 1.25,
        ("D14", "hidden, TTFT from the lead over whole"): 1.0,
    }


def test_storage_by_hand() -> None:
    """HCache's schedules, and 8 bits."""
    llama, opt = storage("llama-2-7b"), storage("opt-30b")
    assert (llama["kv"], llama["hidden"]) == (512 * 1024, 256 * 1024)
    # HCache: 31 layers of hidden states and one of K/V; 40 of hidden states, 8 are recomputed.
    assert llama["scheduled"] == (31 * 8 + 16) * 1024
    assert opt["scheduled"] == 40 * 14 * 1024
    # 8 bits, a least value and a step for 32 elements, four outliers of 6 bytes.
    assert llama["kv"] / llama["hidden_int8"] > 3.5
    assert "scheduled" not in storage("qwen2.5-7b")


def test_what_is_off_or_not_a_number_is_red() -> None:
    """Each bound by itself."""
    bounds = Bounds(cache_error=1e-4, kl_nats=1e-5)
    assert not Taken(1, 1, 1, 1e-4, 1e-5).problem(bounds)
    assert Taken(1, 1, 1, 2e-4, 0).problem(bounds)
    assert Taken(1, 1, 1, 0, 2e-5).problem(bounds)
    assert Taken(1, 1, 1, float("nan"), 0).problem(bounds)
    assert Taken(1, 1, 1, 0, float("nan")).problem(bounds)


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Three layers."""
    return random_model("tiny", torch.device("cpu"), layers=3, token_count=112)


@pytest.fixture(scope="module")
def bed(subject: Subject) -> Iterator[Bed]:
    """It, with a store."""
    with embedded_store(64 << 20) as store, Bed(subject.model, store, is_random=True) as bed:
        yield bed


def measured(bed: Bed, subject: Subject, *, with_ssd: bool = True) -> list[dict[str, Any]]:
    """Rows of 96 tokens and 16 new ones."""
    rounds = Rounds(
        bed, MACHINE, 2, {"model": "tiny", "layers": subject.layers, "dtype": "float32", "device": "cpu"}
    )
    ids = subject.token_ids
    return list(rounds.measure(ids[:96], ids[96:], known_profile("cpu"), with_ssd=with_ssd))


def test_every_way_is_measured_and_right(bed: Bed, subject: Subject, tmp_path: Path) -> None:
    """All methods, places and starts, through a store, to the table and the picture."""
    rows = measured(bed, subject)
    assert not [each for each in rows if each["problem"]]
    ways = {(each["method"], each["place"], each["start"]) for each in rows}
    for method in ("kv", "hidden", PLANNED, HIDDEN_INT8):
        assert {(method, place, start) for place in ("dram", "ssd") for start in (WHOLE, LEAD)} <= ways
    assert {
        ("recompute", "", ""),
        ("kv", "dram", FIRST),
        ("hidden", "dram", VERIFIED),
        ("kvpr", "dram", WHOLE),
    } <= ways
    lossy = [each for each in rows if each["method"] == HIDDEN_INT8]
    assert all(each["cache_error"] > 1e-4 for each in lossy)
    text = io.StringIO()
    facts = {"what": "compared", "model": "tiny", "history": 96}
    again = json.loads(json.dumps([*rows, *({**facts, **each} for each in compared(rows))]))
    show(again, Console(file=text, width=200))
    assert "0-2 hidden_int8" in text.getvalue()
    assert "K/V verified again" in text.getvalue()
    plot(again, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_restore_that_is_off_has_no_figures(
    bed: Bed, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in rows, table, picture or ratios."""
    whole = Bed.save

    def save(self: Bed, token_ids: Sequence[int], new_ids: Sequence[int]) -> None:
        whole(self, token_ids, new_ids)
        # One element of what recomputation left, so that every restore differs from it.
        halves(self._known.cache, 1)[0][0, 2, 95, 7] += 1

    monkeypatch.setattr(Bed, "save", save)
    rows = measured(bed, subject, with_ssd=False)
    assert all(each["problem"] for each in rows)
    assert not any("ttft_s" in each or "rounds" in each for each in rows)
    assert all("RED" in cells(each) for each in rows)
    assert not series(rows)
    assert not list(compared(rows))
