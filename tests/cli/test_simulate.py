"""`ctxcache simulate` as a user meets it."""

import json
import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import ctxcache
from server_process import COMMAND_LINE
from typer.testing import CliRunner

from ctxcache.cli.failures import ExitCode
from ctxcache.cli.main import app
from ctxcache.simulate.study import ALL_POLICIES
from ctxcache.simulate.sweeps import SWEEPS
from tests.nursery import without_settings

TRACE = "session_id,arrival_ms,new_input_tokens,output_tokens\na,0,10,5\nb,1000,10,5\na,2000,10,5\n"


IDEAL = ("--instant", "--exclusive", "--segment", "1")
"""Turns that take no time, in a store that keeps every token by itself."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions, one of which returns."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_line_of_json_per_policy_and_capacity(trace: Path) -> None:
    """Figures have their names and are plain numbers."""
    said = ("--policies", "lru,belady", "--footprint", "1,4", *IDEAL)
    ran = ctxcache("simulate", str(trace), *said, "-o", "json")

    documents = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(d["policy"], d["footprint_multiple"]) for d in documents] == [
        ("lru", 1),
        ("belady", 1),
        ("lru", 4),
        ("belady", 4),
    ]
    assert documents[-1]["hit_rate"] == 1
    assert documents[-1]["dram_bytes"] + documents[-1]["ssd_bytes"] == 4 * 15 * 819_200


def test_people_see_a_table(trace: Path) -> None:
    """One line per policy, all of them unless some are named."""
    ran = ctxcache("simulate", str(trace), "--dram", "1GiB", "--ssd", "2GiB")

    assert ran.exit_code == ExitCode.OK
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["policy", *ALL_POLICIES]


def test_costs_are_another_table(trace: Path) -> None:
    """Savings, wear and waits; prices and the model are options.

    One of three turns hits 15 tokens.
    """
    ran = ctxcache(
        "simulate",
        str(trace),
        "--policies",
        "lru",
        "--costs",
        *IDEAL,
        "--model",
        "llama-65b",
        "--prefill",
        "0.1",
        "--gpu-price",
        "36",
        "--dram-price",
        "0",
        "--ssd-price",
        "0",
        "--gpus",
        "2",
    )

    title, row = ran.stdout.splitlines()
    assert title.split()[:2] == ["policy", "capacity"]
    # 150 s of two GPUs, of 450 s; a first token after 100 s each.
    saved = "100.0% 0.0% 0.08 h 3.00 $ 9.00 $ 100 s 100 s 0 0 s 0"
    assert row.split()[6:] == saved.split()


def test_machine_and_model_are_told_by_name(trace: Path) -> None:
    """A window of 20 tokens holds no second turn's 25; without decoupling that is a miss."""
    figures = {
        how: json.loads(
            ctxcache(
                "simulate",
                str(trace),
                "--policies",
                "lru",
                "-o",
                "json",
                "--context",
                "20",
                "--overflow",
                how,
                "--segment",
                "64",
                "--inclusive",
                "--timed",
                "--ssd-write",
                "1GB",
            ).stdout
        )
        for how in ("decoupled", "invalidate")
    }

    assert [figures[how]["hit_rate"] for how in figures] == [1, 0]
    assert figures["invalidate"]["void_turns"] == 1
    assert figures["decoupled"]["ssd_written_bytes"] == 3 * 64 * 819_200
    assert figures["decoupled"]["most_write_lag_s"] > 0
    assert figures["decoupled"]["end_s"] > 2


def test_lengths_get_arrivals_by_options(trace: Path) -> None:
    """And are refused without."""
    trace.write_text(
        "task,doc_id,context_tokens,instruction_tokens,output_tokens\nqa,1,50,5,1\nqa,1,50,6,1\n"
    )
    ran = ctxcache(
        "simulate", str(trace), "--policies", "lru", "-o", "json", "--session-rate", "1", "--think", "9s"
    )
    refused = ctxcache("simulate", str(trace), "--policies", "lru")

    assert json.loads(ran.stdout)["hit_tokens"] == 50
    assert refused.exit_code == ExitCode.INVALID_ARGUMENT
    assert "lengths without arrivals" in refused.sentence


def test_turns_with_slots_take_time_anyway(trace: Path) -> None:
    """Two options that contradict each other are refused."""
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--slots", "2", "--timed"])

    assert ran.exit_code == ExitCode.USAGE
    assert "--timed" in ran.stderr


def test_a_bad_line_is_one_sentence(trace: Path) -> None:
    """File, line and field, without a traceback."""
    trace.write_text(TRACE + "a,3000,ten,5\n")
    ran = ctxcache("simulate", str(trace), "--policies", "lru")

    assert ran.exit_code == ExitCode.INVALID_ARGUMENT
    assert (
        ran.sentence
        == f"ctxcache: {trace}, line 5, new_input_tokens: 'ten' is not a whole number (INVALID_FIELD)"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ("--policies", "mru"),
        ("--footprint", "much"),
        ("--footprint", "-1"),
        ("--hints", "rumours"),
        ("--ttl", "soon"),
        ("--ttl", ""),
        ("--ssd", ""),
        ("--dram", "big"),
        ("--ssd-read", "0"),
        ("--decode", "nan"),
        ("--model", "gpt"),
        ("--overflow", "drop"),
        ("--gpu-price", "nan"),
        ("--ssd-write", "0"),
        ("--session-rate", "inf"),
    ],
)
def test_wrong_options_are_usage(trace: Path, wrong: tuple[str, str]) -> None:
    """Each is named, and nothing is replayed."""
    ran = CliRunner().invoke(app, ["simulate", str(trace), *wrong])

    assert ran.exit_code == ExitCode.USAGE
    assert wrong[0] in ran.stderr
    assert not ran.stdout


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """24 sessions of two turns each, two of which begin every second."""
    path = tmp_path / "load.csv"
    lines = [(500 * number + 20_000 * turn, number) for number in range(24) for turn in range(2)]
    rows = "".join(f"{number},{arrival_ms},300,100\n" for arrival_ms, number in sorted(lines))
    path.write_text("session_id,arrival_ms,new_input_tokens,output_tokens\n" + rows)
    return path


SWEEP_NAMES = ("models", "policies", "overflow", "capacity", "tiers", "arrivals", "reads", "footprint")


@pytest.mark.parametrize("name", SWEEP_NAMES)
def test_a_sweep_prints_a_line_of_json_per_run_and_draws_them(load: Path, tmp_path: Path, name: str) -> None:
    """Every line says where it stands in the picture; the picture is a PNG."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    ran = ctxcache(
        "simulate",
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
        ctxcache("simulate", str(load), "--sweep", "policies", "--policies", "lru", "--plot", str(picture))

    assert b"<svg" in pictures[0].read_bytes()
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_jobs_change_nothing_that_is_printed(load: Path) -> None:
    """Two processes, the same lines in the same order."""
    one, two = (
        ctxcache(
            "simulate",
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
    ran = ctxcache("simulate", str(load), "--sweep", "policies", "--policies", "lru")

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
    ran = CliRunner().invoke(app, ["simulate", str(trace), *wrong], terminal_width=200)

    assert ran.exit_code == ExitCode.USAGE
    assert named in " ".join(ran.stderr.replace("│", " ").split())
    assert not ran.stdout


def test_without_matplotlib_one_sentence_says_what_to_install(load: Path, tmp_path: Path) -> None:
    """Before anything is replayed."""
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('none', name='matplotlib')\n")
    paths = os.pathsep.join([str(hidden.parent), os.environ.get("PYTHONPATH", "")])
    ran = ctxcache(
        "simulate",
        str(load),
        "--sweep",
        "policies",
        "--plot",
        str(tmp_path / "p.png"),
        environment={"PYTHONPATH": paths},
    )

    assert (ran.exit_code, ran.stdout) == (ExitCode.USAGE, "")
    assert ran.sentence == (
        "ctxcache: --plot needs matplotlib, which is not installed; pip install 'ctxcache[plot]'"
    )


def test_a_bar_is_drawn_where_a_person_looks(load: Path) -> None:
    """On a terminal the replays are counted; elsewhere, as the other tests see, nothing is written there."""
    master, slave = pty.openpty()
    with (
        subprocess.Popen(
            [*COMMAND_LINE, "simulate", str(load), "--sweep", "policies", "--policies", "lru", "-o", "json"],
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
    ran = ctxcache(
        "simulate",
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


@pytest.mark.parametrize(
    "options",
    [("--exclusive", "--layers", "4", "--resident-layers", "2"), ("--inclusive", "--resident-layers", "2")],
)
def test_first_layers_alone_need_an_inclusive_store_of_layers(trace: Path, options: tuple[str, ...]) -> None:
    """Layers that DRAM lacks must be on SSD, and there must be layers to count."""
    ran = ctxcache("simulate", str(trace), *options)

    assert ran.exit_code == ExitCode.USAGE
    assert "--resident-layers" in ran.stderr


def test_what_is_false_has_a_name(trace: Path) -> None:
    """Kinds of lies are named one by one; another name is refused with those that there are."""
    options = ("--policies", "look-ahead", "--slots", "1", "--wrong-hints", "1", "-o", "json")
    ran = ctxcache("simulate", str(trace), *options, "--lies", "phantom,missing")
    assert ran.exit_code == ExitCode.OK

    ran = ctxcache("simulate", str(trace), *options, "--lies", "phantoms")
    assert ran.exit_code == ExitCode.USAGE
    assert "missing" in ran.stderr


def test_the_usual_mode_is_that_of_a_server(trace: Path) -> None:
    """DRAM is a cache of SSD, state is kept in segments of 64 tokens, turns take time in a closed loop."""
    said = ("simulate", str(trace), "--policies", "lru", "-o", "json")
    modes = ("--inclusive", "--timed", "--closed-loop", "--segment", "64")
    usual, told, ideal = (json.loads(ctxcache(*said, *mode).stdout) for mode in ((), modes, IDEAL))

    assert usual == told
    assert usual["ssd_written_bytes"] == 3 * 64 * 819_200
    assert (usual["end_s"] > 2, ideal["end_s"]) == (True, 2.0)


def test_yaml_is_printed_where_it_is_asked_for(trace: Path) -> None:
    """A document for each replay; the option may stand before the command, too."""
    said = ("simulate", str(trace), "--policies", "lru,fifo")
    after, before = ctxcache(*said, "-o", "yaml"), ctxcache("-o", "yaml", *said)

    assert after.stdout == before.stdout
    assert after.stdout.count("---\n") == 2
    assert 'policy: "fifo"' in after.stdout


@pytest.mark.parametrize(
    ("words", "named", "problem"),
    [
        ("--footprint 1 --ssd 1GB", "--ssd", "contradicts --footprint"),
        ("--footprint 1 --dram 1GB", "--dram", "contradicts --footprint"),
        ("--dram-share 0.5", "--dram-share", "needs --footprint"),
        ("--think 1s", "--think", "needs --session-rate"),
        ("--wrong-hints 0.5", "--wrong-hints", "needs --hints or --slots"),
        ("--lies hint --hints ends", "--lies", "needs --wrong-hints"),
        ("--slots 1 --timed", "--timed", "contradicts --slots"),
        ("--slots 1 --instant", "--timed", "contradicts --slots"),
        ("--instant --decode 9", "--decode", "contradicts --instant"),
        ("--instant --closed-loop", "--closed-loop", "contradicts --instant"),
        ("--overflow invalidate", "--overflow", "needs --context"),
        ("--jobs 2", "--jobs", "needs --sweep"),
        ("--sweep policies --footprint 1", "--footprint", "not of sweeps"),
        ("--sweep policies --costs", "--costs", "not of sweeps"),
        ("--objective turns --policies lru", "--objective", "none of the --policies"),
        ("--block-tokens 16", "--block-tokens", "needs --blocks, or a trace that names"),
        ("--hints ends --policies lru", "--hints", "none of the --policies listens"),
        ("--slots 1 --wrong-hints 1 --policies lru", "--wrong-hints", "none of the --policies hears"),
        ("--hints ends --wrong-hints 1 --lies order", "--lies", "order and missing need --slots"),
        ("--slots 1 --wrong-hints 1 --lies hint", "--lies", "hint needs --hints"),
        ("--gpu-price 3", "--gpu-price", "needs --costs"),
        ("--gpus 2", "--gpus", "needs --costs"),
        ("--costs -o json", "--costs", "is another table"),
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
    ran = CliRunner().invoke(app, ["simulate", str(trace), *words.split()], terminal_width=200)

    assert ran.exit_code == ExitCode.USAGE
    assert named in ran.stderr
    assert problem in " ".join(ran.stderr.replace("│", " ").split())
    assert not ran.stdout


def test_in_a_closed_loop_a_request_waits_for_the_answer_and_the_thought(tmp_path: Path) -> None:
    """An answer of 100 s and a thought of 10 s, where the trace had the next request come after 20 s."""
    path = tmp_path / "agents.csv"
    path.write_text(
        "session_id,arrival_ms,new_input_tokens,output_tokens,think_ms\n"
        "a,0,7000,100,\na,20000,7000,100,10000\na,40000,7000,100,10000\n"
    )
    said = ("simulate", str(path), "--policies", "lru", "--decode", "1", "--dram-read", "100TB", "-o", "json")
    closed, opened = (json.loads(ctxcache(*said, mode).stdout) for mode in ("--closed-loop", "--open-loop"))

    assert closed["end_s"] == pytest.approx(3 * 101 + 2 * 10, abs=0.01)
    assert opened["end_s"] == pytest.approx(3 * 101, abs=0.01)


def test_a_thought_that_the_trace_does_not_say_is_what_an_answer_left_of_the_gap(tmp_path: Path) -> None:
    """The answer takes 2 of the 20 s to the next request; a slower machine gets the request later."""
    path = tmp_path / "turns.csv"
    path.write_text("session_id,arrival_ms,new_input_tokens,output_tokens\na,0,7000,60\na,20000,7000,60\n")
    said = ("simulate", str(path), "--policies", "lru", "--dram-read", "100TB", "-o", "json")
    nothing_kept = ("--dram", "0", "--ssd", "0")
    as_recorded, alone = (
        json.loads(ctxcache(*said, "--decode", "60", *more).stdout) for more in ((), nothing_kept)
    )

    assert as_recorded["end_s"] == pytest.approx(22, abs=0.01)
    # The second turn computes all 14,060 tokens.
    assert alone["end_s"] == pytest.approx(21 + 14_060 / 7000, abs=0.01)


def test_what_comes_in_a_closed_loop_may_have_expired(tmp_path: Path) -> None:
    """The longer one of two thoughts outlasts the TTL, although no other request tells the time."""
    path = tmp_path / "turns.csv"
    path.write_text(
        "session_id,arrival_ms,new_input_tokens,output_tokens,think_ms,turn\n"
        "a,0,70,1,,1\na,20000,70,1,60000,2\na,40000,70,1,7200000,3\n"
    )
    ran = ctxcache("simulate", str(path), "--policies", "lru", "--ttl", "1h", "-o", "json")
    figures = json.loads(ran.stdout)

    assert (figures["ssd_hits"] + figures["dram_hits"], figures["later_turns"]) == (1, 2)
    assert figures["expired_turns"] == 1


def test_forms_are_compared_in_place_of_policies(trace: Path) -> None:
    """One line for each, the mixture and the one that knows; what cannot be is named, with the option."""
    said = ("simulate", str(trace), "--token-bytes", "1000", "--prefill", "1", "--ttl", "1h")
    forms = "kv=1:0,tokens=0:1"
    ran = ctxcache(*said, "--forms", forms, "-o", "json")
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["strategy"] for one in found] == ["kv", "tokens", "mixed", "learned", "knows"]
    assert [one["returns"] for one in found] == [1] * 5
    assert [one["gpu_s"] for one in found] == [0.0, 15.0, 0.0, 0.0, 0.0]
    assert found[0]["gb_hours"] == pytest.approx(1004 * (15 * 2 + (30 + 15) * 3600) / 3600 / 1e9)
    table = ctxcache(*said, "--forms", forms)
    assert [line.split()[0] for line in table.stdout.splitlines()] == [
        "form",
        "kv",
        "tokens",
        "mixed",
        "learned",
        "knows",
    ]
    for wrong in (("--forms", "kv"), ("--forms", forms, "--policies", "lru"), ("--forms", forms, "--blocks")):
        refused = ctxcache(*said, *wrong)
        assert refused.exit_code == ExitCode.USAGE
        assert "--" in refused.stderr
    free = ctxcache(*said, "--forms", forms, "--ssd-price", "0")
    assert free.exit_code == ExitCode.USAGE
    assert "--forms" in free.stderr
