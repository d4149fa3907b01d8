"""`ctxcache simulate` as a user meets it."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from command_line import TIMEOUT_S, ctxcache
from server_process import COMMAND_LINE
from typer.testing import CliRunner

from ctxcache.cli.failures import ExitCode
from ctxcache.cli.main import app
from ctxcache.simulate.study import ALL_POLICIES
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
    saved = "100.0% 0.0% 0.08 h 3.00 $ 9.00 $ 100 s 100 s 0.00 $ 0 0 s 0"
    assert row.split()[6:] == saved.split()


def test_a_window_that_cuts_and_an_ssd_that_is_too_slow_are_told(trace: Path) -> None:
    """Neither is a lack of capacity; where nothing is cut and SSD rests, nothing is said."""
    said = ("simulate", str(trace), "--policies", "lru", "--timed", "--dram", "1kB", "--ssd", "1GB")
    cut = ctxcache(*said, "--context", "20").stdout
    slow = ctxcache(*said, "--ssd-read", "1kB", "--open-loop").stdout
    plain = ctxcache(*said).stdout

    assert "turns overflowed the context of 20 tokens" in cut
    assert "Its speed is short, not its size" in slow
    assert len(plain.splitlines()) == 2


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
        ("--objective turns --policies lru", "--objective", "none of the --policies"),
        ("--block-tokens 16", "--block-tokens", "needs --blocks, or a trace that names"),
        ("--hints ends --policies lru", "--hints", "none of the --policies listens"),
        ("--slots 1 --wrong-hints 1 --policies lru", "--wrong-hints", "none of the --policies hears"),
        ("--hints ends --wrong-hints 1 --lies order", "--lies", "order and missing need --slots"),
        ("--slots 1 --wrong-hints 1 --lies hint", "--lies", "hint needs --hints"),
        ("--gpu-price 3", "--gpu-price", "needs --costs"),
        ("--gpus 2", "--gpus", "needs --costs"),
        ("--costs -o json", "--costs", "is another table"),
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


@pytest.mark.parametrize("sizes", [("--footprint", "0.1,1"), ("--dram", "1GiB", "--ssd", "2GiB")])
def test_a_sweep_says_on_a_terminal_how_far_it_is_and_when_it_ends(
    tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    """From the first replay on where the footprint was counted, else from the second; never backwards."""
    trace = tmp_path / "trace.csv"
    rows = [f"s{number % 400},{number},40,5\n" for number in range(16_000)]
    trace.write_text(TRACE.partition("\n")[0] + "\n" + "".join(rows))
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND_LINE, "simulate", str(trace), "--policies", "lru,fifo", *sizes],
        env=without_settings(os.environ) | {"TERM": "xterm", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=other_end,
    )
    os.close(other_end)
    drawn = b""
    try:
        while data := os.read(terminal, 4096):
            drawn += data
    except OSError:
        # The other end is closed.
        pass
    os.close(terminal)

    assert process.wait(TIMEOUT_S) == ExitCode.OK
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
    seen = [int(share) for share in re.findall(r"turns .*?(\d+)%", text)]
    assert seen == sorted(seen)
    assert re.search(r"fifo, [\d,]+ turns .* ends in \d+ (s|min)", text)
    assert max(seen) >= 50
