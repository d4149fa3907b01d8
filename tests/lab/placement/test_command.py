"""`python -m lab.placement` as a reader of the papers meets it."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ctxcache.cli.failures import ExitCode
from lab.placement.__main__ import app
from lab.placement.policies import NAMES
from lab.placement.sweeps import SWEEPS
from tests.nursery import without_settings

TRACE = "session_id,arrival_ms,new_input_tokens,output_tokens\na,0,10,5\nb,1000,10,5\na,2000,10,5\n"
COMMAND = (sys.executable, "-m", "lab.placement")


def placement(*words: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, words)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions, one of which returns."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """24 sessions of two turns each, two of which begin every second."""
    path = tmp_path / "load.csv"
    lines = [(500 * number + 20_000 * turn, number) for number in range(24) for turn in range(2)]
    rows = "".join(f"{number},{arrival_ms},300,100\n" for arrival_ms, number in sorted(lines))
    path.write_text("session_id,arrival_ms,new_input_tokens,output_tokens\n" + rows)
    return path


def test_policies_that_no_server_runs_are_compared_with_those_that_one_does(trace: Path) -> None:
    """One line per policy, all of them unless some are named."""
    ran = placement(str(trace), "--dram", "1GiB", "--ssd", "2GiB")

    assert ran.exit_code == ExitCode.OK
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["policy", *NAMES]


def test_a_bad_line_is_one_sentence(trace: Path) -> None:
    """File, line and field, without a traceback."""
    trace.write_text(TRACE + "a,3000,ten,5\n")
    ran = subprocess.run(
        [*COMMAND, str(trace), "--policies", "arc"], capture_output=True, text=True, check=False
    )

    assert ran.returncode == ExitCode.INVALID_ARGUMENT
    assert ran.stderr.startswith(f"lab.placement: {trace}, line 5, new_input_tokens: 'ten'")


SWEEP_NAMES = ("models", "policies", "overflow", "capacity", "tiers", "arrivals", "reads", "footprint")


@pytest.mark.parametrize("name", SWEEP_NAMES)
def test_a_sweep_prints_a_line_of_json_per_run_and_draws_them(load: Path, tmp_path: Path, name: str) -> None:
    """Every line says where it stands in the picture; the picture is a PNG."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    ran = placement(
        str(load),
        "--sweep",
        name,
        "--policies",
        "look-ahead" if SWEEPS[name].has_one_policy else "lru,look-ahead",
        "-o",
        "json",
        "--plot",
        str(picture),
    )

    assert (ran.exit_code, ran.stderr) == (ExitCode.OK, "")
    documents = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(documents) == len({(d["x"], d["series"]) for d in documents}) > 1
    for document in documents:
        assert document["sweep"] == name
        assert document["policy"] in {"lru", "look-ahead"}
        assert document["census"]["session_count"] == 24
        assert 0 <= document["hit_rate"] <= 1
        assert all(0 <= value <= 1 for value in document["paper"].values())
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_is_svg_where_its_name_says_so(load: Path, tmp_path: Path) -> None:
    """Text of XML, with the same bytes each time."""
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        placement(str(load), "--sweep", "policies", "--policies", "lru", "--plot", str(picture))

    assert b"<svg" in pictures[0].read_bytes()
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_jobs_change_nothing_that_is_printed(load: Path) -> None:
    """Two processes, the same lines in the same order."""
    one, two = (
        placement(
            str(load),
            "--sweep",
            "arrivals",
            "--policies",
            "lru,fifo",
            "-o",
            "json",
            "--jobs",
            jobs,
        )
        for jobs in ("1", "2")
    )

    assert two.stdout == one.stdout
    assert (one.exit_code, two.exit_code) == (ExitCode.OK, ExitCode.OK)


def test_people_see_a_sweep_beside_the_paper(load: Path) -> None:
    """A title, a line per run, and what the trace holds."""
    ran = placement(str(load), "--sweep", "policies", "--policies", "lru")

    lines = ran.stdout.splitlines()
    assert "Figure 21" in lines[0]
    assert [line.split()[:6] for line in lines[2:4]] == [
        ["128", "GiB", "+", "2", "TB", "lru"],
        ["128", "GiB", "+", "10", "TB", "lru"],
    ]
    assert "12.9%" in lines[2]
    assert lines[-1].startswith("48 turns of 24 sessions")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--sweep", "everything"), "models, policies, overflow, capacity"),
        (("--sweep", "policies", "--plot", "picture.jpeg"), ".svg"),
        (("--sweep", "policies", "--plot", "no/where/picture.png"), "no/where"),
        (("--sweep", "policies", "--live", "much"), "--live"),
        (("--plot", "picture.png"), "--sweep"),
        (("--live", "12TB"), "--sweep"),
        (("--sweep", "policies", "--jobs", "0"), "--jobs"),
    ],
)
def test_what_no_sweep_can_do_is_usage(trace: Path, wrong: tuple[str, ...], named: str) -> None:
    """The sentence says what there is; nothing is replayed or drawn."""
    ran = CliRunner().invoke(app, [str(trace), *wrong], terminal_width=200)

    assert ran.exit_code == ExitCode.USAGE
    assert named in " ".join(ran.stderr.replace("│", " ").split())
    assert not ran.stdout


def test_without_matplotlib_one_sentence_says_what_to_install(load: Path, tmp_path: Path) -> None:
    """Before anything is replayed."""
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('none', name='matplotlib')\n")
    paths = os.pathsep.join([str(hidden.parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [*COMMAND, str(load), "--sweep", "policies", "--plot", str(tmp_path / "p.png")],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.returncode, ran.stdout) == (ExitCode.USAGE, "")
    assert ran.stderr == "lab.placement: --plot needs matplotlib, which is not installed\n"


def test_a_bar_is_drawn_where_a_person_looks(load: Path) -> None:
    """On a terminal the replays are counted; elsewhere, as the other tests see, nothing is written there."""
    master, slave = pty.openpty()
    with (
        subprocess.Popen(
            [*COMMAND, str(load), "--sweep", "policies", "--policies", "lru", "-o", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave,
            env=without_settings(os.environ) | {"TERM": "xterm"},
        ) as process,
        os.fdopen(master, "rb", buffering=0) as terminal,
    ):
        os.close(slave)
        drawn = b""
        # A terminal that nobody holds open any longer is an error to read, on Linux.
        with suppress(OSError):
            while piece := terminal.read(65_536):
                drawn += piece
        lines = process.stdout.read().splitlines() if process.stdout else []

    assert b"100%" in drawn
    assert len(lines) == 2


def test_a_sweep_reads_lengths_at_the_pace_that_is_said(tmp_path: Path) -> None:
    """Documents with questions, without arrivals; other processes read them at the same pace."""
    path = tmp_path / "lengths.csv"
    path.write_text(
        "task,doc_id,context_tokens,instruction_tokens,output_tokens\n"
        + "".join(f"qa,{document},900,10,20\n" for document in range(4) for _ in range(3))
    )
    ran = placement(
        str(path),
        "--sweep",
        "policies",
        "--policies",
        "lru,fifo",
        "--session-rate",
        "0.5",
        "--think",
        "10s",
        "--jobs",
        "2",
        "-o",
        "json",
    )

    assert (ran.exit_code, ran.stderr) == (ExitCode.OK, "")
    assert {json.loads(line)["census"]["session_count"] for line in ran.stdout.splitlines()} == {4}


def test_forms_are_compared_in_place_of_policies(trace: Path) -> None:
    """One line for each, the mixture and the one that knows; what cannot be is named, with the option."""
    said = (str(trace), "--token-bytes", "1000", "--prefill", "1", "--ttl", "1h")
    forms = "kv=1:0,tokens=0:1"
    ran = placement(*said, "--forms", forms, "-o", "json")
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["strategy"] for one in found] == ["kv", "tokens", "mixed", "learned", "knows"]
    assert [one["returns"] for one in found] == [1] * 5
    assert [one["gpu_s"] for one in found] == [0.0, 15.0, 0.0, 0.0, 0.0]
    assert found[0]["gb_hours"] == pytest.approx(1004 * (15 * 2 + (30 + 15) * 3600) / 3600 / 1e9)
    table = placement(*said, "--forms", forms)
    assert [line.split()[0] for line in table.stdout.splitlines()] == [
        "form",
        "kv",
        "tokens",
        "mixed",
        "learned",
        "knows",
    ]
    for wrong in (("--forms", "kv"), ("--forms", forms, "--policies", "lru"), ("--forms", forms, "--blocks")):
        refused = placement(*said, *wrong)
        assert refused.exit_code == ExitCode.USAGE
        assert "--" in refused.stderr
    free = placement(*said, "--forms", forms, "--ssd-price", "0")
    assert free.exit_code == ExitCode.USAGE
    assert "--forms" in free.stderr


@pytest.mark.parametrize(
    ("words", "named", "problem"),
    [
        ("--jobs 2", "--jobs", "needs --sweep"),
        ("--sweep policies --footprint 1", "--footprint", "not of sweeps"),
        ("--sweep policies --costs", "--costs", "not of sweeps"),
        ("--sweep models --model llama-13b", "--model", "contradicts --sweep models"),
        ("--sweep policies --ssd 1TB", "--ssd", "contradicts --sweep policies"),
        ("--sweep reads --ssd-read 1GB", "--ssd-read", "contradicts --sweep reads"),
        ("--sweep capacity --live 1TB", "--live", "contradicts --sweep capacity"),
        ("--sweep overflow --policies lru,value", "--policies", "plays one policy"),
        ("--sweep overflow --objective turns", "--objective", "none of the --policies"),
        ("--sweep footprint --decode 9", "--decode", "whose turns take no time"),
        ("--sweep footprint --overflow invalidate", "--overflow", "needs --context"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    trace: Path, words: str, named: str, problem: str
) -> None:
    """The sentence names it, and what it contradicts or lacks; nothing is replayed."""
    ran = CliRunner().invoke(app, [str(trace), *words.split()], terminal_width=200)

    assert ran.exit_code == ExitCode.USAGE
    assert named in ran.stderr
    assert problem in " ".join(ran.stderr.replace("│", " ").split())
    assert not ran.stdout


def test_blocks_are_drawn_by_capacity(trace: Path, tmp_path: Path) -> None:
    """A line for each policy over the capacities."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "blocks.svg"
    said = ("--blocks", "--block-tokens", "5", "--footprint", "0.5,1", "--policies", "lru,sieve")
    ran = placement(str(trace), *said, "--plot", str(picture))

    assert ran.exit_code == ExitCode.OK
    assert b"<svg" in picture.read_bytes()
