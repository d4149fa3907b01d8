"""lab/gpu.sh: a step that fails, hangs or says nonsense hides no other, and its table says what was met."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lab.studies.gpu_preflight import needed, problems
from lab.studies.gpu_table import Line, lines, read

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "lab/gpu.sh"


STEPS = ("tests", "sidecar", "kernels", "pipeline", "saving", "restore", "direct", "decoding")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose steps end with the status that the environment has for them, and say one row."""
    path = tmp_path / "python"
    path.write_text(f"""#!{sys.executable}
import os, runpy, sys
told = " ".join(sys.argv[1:3])
studies = "kernels", "pipeline_cost", "saving", "studies.restore", "studies.direct", "decoding", "gpu_table"
steps = "pytest", "gpu_preflight", *studies
step = next((key for key in steps if key in told), "")
if step == "gpu_table":
    sys.argv = sys.argv[2:]
    runpy.run_module("lab.studies.gpu_table", run_name="__main__")
    sys.exit(0)
if step == "gpu_preflight":
    sys.exit(int(os.environ.get("FAILS_gpu_preflight", 0)))
row = '{{"way": "two-stage", "model": "%s", "batch": 16, "over_none": {{"median": 0.02}}}}'
print(row % step, flush=True)
sys.exit(int(os.environ.get("FAILS_" + step.split(".")[-1], 0)))
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(python: Path, out: Path, **environment: int | str) -> subprocess.CompletedProcess[str]:
    """The script with that Python; its environment says which steps fail, and with what."""
    told = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        ["bash", str(SCRIPT), str(out)],
        env={**os.environ, "PYTHON": str(python), "COLUMNS": "200", **told},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_all_steps_run_and_the_table_has_them(python: Path, tmp_path: Path) -> None:
    """Exit status 0."""
    done = run(python, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [each in done.stdout for each in STEPS] == [True] * 8
    assert done.stdout.count("done, ") == 8


def test_a_step_that_fails_hides_no_other(python: Path, tmp_path: Path) -> None:
    """The exit status is the first failure's; what the step had said by then counts."""
    done = run(python, tmp_path / "out", FAILS_kernels=3, FAILS_restore=4)
    assert done.returncode == 3
    assert "failed with 3" in done.stdout
    assert "failed with 4" in done.stdout
    assert done.stdout.count("done, ") == 6
    assert "restore, batch 16" in done.stdout


def test_steps_are_chosen_by_name(python: Path, tmp_path: Path) -> None:
    """One that does not exist is refused before anything runs."""
    done = run(python, tmp_path / "out", ONLY="kernels restore")
    assert [f"== {step}" in done.stderr for step in STEPS] == [
        step in ("kernels", "restore") for step in STEPS
    ]
    wrong = run(python, tmp_path / "out", ONLY="kernel")
    assert wrong.returncode == 2
    assert "there is no step kernel" in wrong.stderr
    assert "== kernels" not in wrong.stderr


def test_nothing_begins_where_something_is_missing(python: Path, tmp_path: Path) -> None:
    """The missing part was named; ten minutes of a GPU are not spent on steps that cannot run."""
    done = run(python, tmp_path / "out", FAILS_gpu_preflight=1)
    assert done.returncode == 1
    assert "== tests" not in done.stderr


def test_the_preflight_says_what_lacks_and_what_is_too_old() -> None:
    """By what is installed here, and what is not."""
    asked = ["pytest", "pytest>=1000", "no-such-package>=2", "numpy"]
    found = {str(one): why for one, why in problems([Requirement(text) for text in asked])}
    assert found.keys() == {"pytest>=1000", "no-such-package>=2"}
    assert found["no-such-package>=2"] == "is not installed"
    assert found["pytest>=1000"].startswith("is ")
    assert {"torch", "rocksdict", "grpcio-reflection", "triton"} <= {one.name for one in needed()}


def test_a_step_that_was_ended_says_so(python: Path, tmp_path: Path) -> None:
    """As timeout says it."""
    done = run(python, tmp_path / "out", FAILS_pytest=124)
    assert done.returncode == 124
    assert "ended at its limit" in done.stdout


def test_all_limits_together_are_within_ten_minutes() -> None:
    """Each step's limit, what is left to its servers to end, and the table."""
    text = SCRIPT.read_text()
    limits = [int(each) for each in re.findall(r"^step \w+ (\d+) ", text, re.MULTILINE)]
    grace_s = int(re.findall(r"--kill-after=(\d+)", text)[0])
    table_s = int(re.findall(r"timeout (\d+) ", text)[0])
    assert len(limits) == len(STEPS)
    assert sum(limits) + len(limits) * grace_s + table_s <= 600
    budget_s = int(re.findall(r"--budget-s (\d+)", text)[0])
    assert budget_s < limits[STEPS.index("restore")]


def figures(*rows: dict[str, Any]) -> dict[str, Line]:
    """Lines by figure."""
    return {line.figure: line for line in lines(rows)}


def test_what_is_met_and_what_is_not() -> None:
    """At the goals' borders."""
    row = {"model": "a", "history": 9, "over_copied": {"closed form": [0.9], "search": [0.7, 0.8, 0.9]}}
    worse = {**row, "history": 8, "over_copied": {"closed form": [0.9], "search": [1.1]}}
    wrong = {**row, "history": 7, "is_right": False}
    found = figures(*({"splits": {}, "is_right": True, **each} for each in (row, worse, wrong)))
    assert [(line.here, line.is_met) for line in found.values()] == [
        ("0.80, closed form 0.90", True),
        ("1.10, closed form 0.90", False),
        ("other tokens", False),
    ]
    found = figures(
        {"way": "two-stage", "model": "a", "batch": 16, "over_none": {"median": 0.01}},
        {"way": "two-stage", "model": "b", "batch": 16, "over_none": {"median": 0.011}},
        {"way": "direct", "model": "a", "batch": 16, "over_none": {"median": 0.3}},
        {"way": "replayed", "model": "a", "batch": 16, "over_none": {"median": 0.009}, "is_right": True},
        {"way": "replayed", "model": "b", "batch": 16, "over_none": {"median": 0.009}, "is_right": False},
        {"way": "replayed", "model": "c", "batch": 16, "over_none": {"median": 0.5}, "is_captured": False},
    )
    assert [line.is_met for line in found.values()] == [True, False, None, True, False, None]
    kernel = {"what": "kv_projection A 1024", "teraflops": 1.0, "gigabytes_per_s": 1.0, "share_of_limit": 0.9}
    found = figures(
        {**kernel, "way": "product alone", "median_s": 0.96},
        {**kernel, "way": "fused", "median_s": 1.0},
        {**kernel, "what": "rope_scatter A 1024", "way": "fused", "median_s": 1.0},
        {**kernel, "what": "rope_scatter A 1024", "way": "separate", "median_s": 1.2},
        {**kernel, "what": "restore A 1024", "way": "two streams", "median_s": 1.0, "share_of_limit": 0.84},
    )
    assert [(line.here, line.is_met) for line in found.values()] == [
        ("0.96", True),
        ("1.20x", False),
        ("0.84", False),
    ]


def test_what_verifying_costs_has_a_goal() -> None:
    """A goal for each path beside itself; a path that is not verified has none."""
    row = {
        "what": "direct",
        "model": "a",
        "tokens": 64,
        "rows": "kv",
        "median_s": 0.01,
        "of_store": 0.9,
        "verifying": None,
    }
    found = figures(
        {**row, "way": "gds, not verified"},
        {**row, "way": "gds", "verifying": 0.05},
        {**row, "way": "posix", "verifying": 0.06},
    )
    assert [line.is_met for line in found.values()] == [None, True, False]


def restore(**others: object) -> dict[str, Any]:
    """A restore of K/V from DRAM at 0.87 of what copying allows."""
    row = {
        "what": "restore",
        "model": "llama",
        "history": 1024,
        "method": "kv",
        "place": "dram",
        "start": "whole",
        "problem": "",
        "restore_s": {"median": 0.01},
        "share_of_limit": {"median": 0.87},
        "limit_by": "copy",
    }
    return {**row, **others}


def test_restores_have_the_goal_of_what_limits_them() -> None:
    """0.9 of a pinned copy for K/V, 0.85 for the rest.

    A restore that is wrong is not met, whatever its speed.
    """
    (copied,) = lines([restore()])
    assert (copied.is_met, copied.goal) == (False, ">= 0.9")
    assert [each.is_met for each in lines([restore(limit_by="SSD"), restore(method="hidden")])] == [
        True,
        True,
    ]
    (too_fast,) = lines([restore(share_of_limit={"median": 1.2})])
    assert too_fast.is_met is False
    (red,) = lines([restore(problem="cache off by 1")])
    assert red.is_met is False
    assert not list(lines([restore(start="lead")]))


def test_files_that_were_cut_off_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    """A step that was ended leaves half a line."""
    path = tmp_path / "half.jsonl"
    path.write_text(json.dumps(restore()) + '\nnot JSON\n[1]\n{"what": "rest')
    assert len(read([path, tmp_path / "missing.jsonl"])) == 1
