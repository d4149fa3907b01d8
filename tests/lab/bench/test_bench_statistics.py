"""Statistics by values known beforehand, the table, and what is kept in JSON."""

import json
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from lab.bench.report import BEGIN, END, cells, filled, markdown, remarks
from lab.bench.row import Place, Row, Sides, Spread, at_least, at_most, in_round, named, percentile
from lab.bench.run import FAILED, NO_PEER, Result, Run, measured, unmeasured


def _never(_: Place) -> AbstractContextManager[Sides]:
    raise NotImplementedError


READ = Row("read", "a read", "a copy", at_least(0.9), _never)
CALL = Row("call", "a call", "an empty call", at_most(1.5), _never, is_moving=False)


def run_of(*rows: Result) -> Run:
    """A run with these rows."""
    return Run("ctxcache bench", "2026-01-01", 2, False, "off", [0.0], {"cpu": "?"}, {"numpy": "2"}, rows)  # noqa: FBT003


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (10, 1.4), (50, 3.0), (90, 4.6), (100, 5.0)])
def test_percentiles_lie_between_neighbours(percent: float, expected: float) -> None:
    """Linear interpolation over the ordered values."""
    assert percentile([5, 1, 4, 2, 3], percent) == pytest.approx(expected)


def test_no_values_have_no_percentile() -> None:
    """Nothing measured is no figure."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    assert in_round(at_least(1), [1, 2, 4], [2, 4, 8]) == Spread(2, 2, 2)
    assert in_round(at_most(1), [1, 2, 4], [2, 4, 8]) == Spread(0.5, 0.5, 0.5)


def test_rounds_come_in_pairs() -> None:
    """A side that misses a round is an error, not a shorter list."""
    with pytest.raises(ValueError, match="zip"):
        in_round(at_least(1), [1, 2], [1])


@pytest.mark.parametrize(
    ("ours", "beside", "is_met"), [((1.0, 1.0), (0.95, 0.95), True), ((1.0, 1.0), (0.8, 0.8), False)]
)
def test_a_goal_is_met_by_the_median(
    ours: tuple[float, ...],
    beside: tuple[float, ...],
    is_met: bool,  # noqa: FBT001
) -> None:
    """At least 0.9 of the speed of what is beside."""
    found = measured(READ, ours, beside, bytes_a_round=10**9, foreign_cores=0, notes={})

    assert found.is_met is is_met
    assert run_of(found).is_good is is_met


def test_only_a_missing_peer_is_forgiven() -> None:
    """A row that failed is not good, one that nothing is to be compared with is."""
    assert run_of(unmeasured(READ, NO_PEER, "install it")).is_good
    assert not run_of(unmeasured(READ, FAILED, "WrongBytes")).is_good


def test_a_run_comes_back_from_json() -> None:
    """All rounds are kept."""
    row = measured(CALL, [0.001, 0.002], [0.001, 0.001], bytes_a_round=0, foreign_cores=0.5, notes={"n": 1})
    run = run_of(row, unmeasured(READ, NO_PEER, "install it"))

    assert Run.from_json(run.to_json()) == run


def test_the_names_in_json_stay() -> None:
    """Scripts read them."""
    run = json.loads(run_of(measured(CALL, [1], [1], bytes_a_round=0, foreign_cores=0, notes={})).to_json())

    assert run.keys() >= {
        "schema",
        "command",
        "date",
        "round_count",
        "is_quick",
        "garbage_collection",
        "load_at_start",
        "machine",
        "versions",
        "rows",
    }
    assert run["rows"][0].keys() == {
        "name",
        "path",
        "beside_what",
        "goal",
        "unit",
        "status",
        "problem",
        "ratio",
        "is_met",
        "bytes_a_round",
        "ours",
        "beside",
        "foreign_cores",
        "notes",
    }
    assert run["rows"][0]["ratio"].keys() == {"median", "p10", "p90"}


def test_another_schema_is_refused() -> None:
    """Rather no table than a wrong one."""
    with pytest.raises(ValueError, match="schema 2"):
        Run.from_json(run_of().to_json().replace('"schema": 1', '"schema": 2'))


def test_the_table_says_speed_ratio_and_goal() -> None:
    """Bytes by the median of the rounds; a missed goal stands out."""
    found = measured(READ, [0.5, 0.5], [0.25, 0.25], bytes_a_round=10**9, foreign_cores=0, notes={})

    assert cells(found) == ("a read", "2.00 GB/s", "4.00 GB/s a copy", "0.5 [0.5-0.5]", ">= 0.9", "NO")


def test_a_row_without_a_figure_says_why() -> None:
    """Nothing stands where a number would."""
    line = markdown([unmeasured(READ, NO_PEER, "apt-get install redis-server")]).splitlines()[-1]

    assert line == "| a read | - | a copy | no peer: apt-get install redis-server | >= 0.9 | - |"


def test_noise_is_said() -> None:
    """A figure says that others were using the machine."""
    noisy = measured(CALL, [1], [1], bytes_a_round=0, foreign_cores=1.25, notes={})
    quiet = measured(CALL, [1], [1], bytes_a_round=0, foreign_cores=0.01, notes={})

    assert remarks([noisy]) == ["call: NOISY: others kept 1.25 cores busy"]
    assert remarks([quiet]) == []


def test_rows_are_chosen_by_the_beginning_of_their_names() -> None:
    """In the table's order, each once."""
    rows = {"read": READ, "call": CALL}

    assert named(rows, "call,re") == [READ, CALL]
    with pytest.raises(KeyError):
        named(rows, "write")


def test_the_document_takes_the_newest_table_alone() -> None:
    """The text between the marks goes; the rest stays. Without marks nothing is changed."""
    machine: dict[str, object] = {"cpu": "?", "core_count": 2, "disk": "?", "kernel": "6"}
    run = replace(run_of(unmeasured(READ, NO_PEER, "install it")), machine=machine)
    once = filled(f"before\n{BEGIN}old\n{END}after\n", run, "result.json")

    assert once.startswith(f"before\n{BEGIN}")
    assert once.endswith(f"{END}after\n")
    assert "old" not in once
    assert filled(once, run, "result.json") == once
    with pytest.raises(ValueError, match="not in the document"):
        filled("no marks", run, "result.json")
