"""`ctxcache simulate --blocks` as a user meets it."""

import json
from pathlib import Path

import pytest
from command_line import ctxcache
from typer.testing import CliRunner

from ctxcache.cli.failures import ExitCode
from ctxcache.cli.main import app


def trace_of(path: Path, block_tokens: int) -> Path:
    """A conversation of two requests of three blocks, and a third request that shares two of them."""
    rows = [(0, [1, 2, 3]), (1000, [1, 2, 3]), (2000, [1, 2, 9])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, (ms, 3 * block_tokens, 1, ids), strict=True))) for ms, ids in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("block_tokens", [16, 64, 512])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_blocks_of_any_size(tmp_path: Path, block_tokens: int, policy: str) -> None:
    """Five of nine blocks are found; another size than the trace's is refused with the line."""
    trace = trace_of(tmp_path / "trace.jsonl", block_tokens)
    said = ("simulate", str(trace), "--blocks", "--policies", policy, "-o", "json", "--block-tokens")

    document = json.loads(ctxcache(*said, str(block_tokens)).stdout)
    refused = ctxcache(*said, str(3 * block_tokens))

    assert document["prompt_hit_rate"] == pytest.approx(5 / 9)
    assert refused.exit_code == ExitCode.INVALID_ARGUMENT
    assert f"3 blocks of {3 * block_tokens} for {3 * block_tokens} tokens" in refused.sentence


@pytest.mark.parametrize(
    "option",
    [
        ("--slots", "2"),
        ("--timed",),
        ("--closed-loop",),
        ("--inclusive",),
        ("--context", "9"),
        ("--ttl", "1h"),
        ("--costs",),
        ("--dram-share", "0.5"),
        ("--buffer-share", "0"),
        ("--ssd-read", "1GB"),
        ("--dram-read", "1GB"),
        ("--decode", "9"),
        ("--gpus", "2"),
        ("--ssd-price", "1"),
        ("--prefill", "9"),
        ("--jobs", "2"),
        ("--lies", "phantom", "--hints", "ends", "--wrong-hints", "1"),
        ("--learned-from", "trace.jsonl", "--policies", "lru"),
        ("--hints", "ends", "--spaces"),
    ],
    ids=lambda option: option[0],
)
def test_what_blocks_do_not_know_is_refused(tmp_path: Path, option: tuple[str, ...]) -> None:
    """An option that would change nothing is named."""
    trace = trace_of(tmp_path / "trace.jsonl", 512)
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--blocks", *option])

    assert ran.exit_code == ExitCode.USAGE
    assert option[0] in ran.stderr


def test_the_size_of_named_blocks_is_said_for_sessions_too(tmp_path: Path) -> None:
    """A trace that names blocks of 16 tokens cannot be read as one of 512."""
    trace = trace_of(tmp_path / "trace.jsonl", 16)
    said = ("simulate", str(trace), "--policies", "lru", "-o", "json")
    told, untold = ctxcache(*said, "--block-tokens", "16"), ctxcache(*said)

    assert (told.exit_code, untold.exit_code) == (ExitCode.OK, ExitCode.INVALID_ARGUMENT)
    assert "blocks of 512" in untold.sentence


def test_value_begins_with_what_it_learned_from_another_trace(tmp_path: Path) -> None:
    """Sessions that come back after 100 s, others never do: known from the start, more is found."""
    trace = tmp_path / "trace.csv"
    rows = ["session_id,arrival_ms,new_input_tokens,output_tokens,history_tokens,turn"]
    turns = [(n * 10, f"r{n},{{}},{40 + n % 3},0,0,1") for n in range(60)]
    turns += [(n * 10 + 100, f"r{n},{{}},8,0,40,2") for n in range(60)]
    turns += [(n * 2 + 1, f"once{n},{{}},1000,0,0,1") for n in range(300)]
    rows += [row.format(at_s * 1000) for at_s, row in sorted(turns)]
    trace.write_text("\n".join(rows) + "\n")
    said = ("simulate", str(trace), "--blocks", "--block-tokens", "8", "--policies", "value", "-o", "json")
    sized = (*said, "--token-bytes", "1", "--dram", "0", "--ssd", "1200")

    alone, taught = (
        json.loads(ctxcache(*sized, *more).stdout)["prompt_hit_rate"]
        for more in ((), ("--learned-from", str(trace)))
    )

    assert taught > alone


def test_lessons_of_sessions_are_refused(tmp_path: Path) -> None:
    """Only a replay of blocks begins with them."""
    trace = trace_of(tmp_path / "trace.jsonl", 512)
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--learned-from", str(trace)])

    assert ran.exit_code == ExitCode.USAGE
    assert "--learned-from" in ran.stderr


def test_what_is_to_be_saved_is_said(tmp_path: Path) -> None:
    """By turns many short histories are kept, by tokens the few long ones, which return more often."""
    trace = tmp_path / "trace.csv"
    turns = [
        (n * 10 + turn * 400, f"short{n},{{}},100,1,{101 * (turn > 1)},{turn}")
        for n in range(900)
        for turn in range(1, 2 + (n % 3 == 0))
    ]
    turns += [
        (n * 100 + turn * 400, f"long{n},{{}},4000,1,{4001 * (turn - 1)},{turn}")
        for n in range(90)
        for turn in range(1, 6)
    ]
    rows = ["session_id,arrival_ms,new_input_tokens,output_tokens,history_tokens,turn"]
    rows += [row.format(at_s * 1000) for at_s, row in sorted(turns)]
    trace.write_text("\n".join(rows) + "\n")
    said = ("simulate", str(trace), "--policies", "value", "-o", "json", "--token-bytes", "1")
    sized = (*said, "--dram", "0", "--ssd", "120000", "--buffer-share", "0", "--objective")

    by_turns, by_tokens = (json.loads(ctxcache(*sized, what).stdout) for what in ("turns", "tokens"))
    refused = CliRunner().invoke(app, ["simulate", str(trace), "--objective", "money"])

    assert by_turns["hit_rate"] > by_tokens["hit_rate"]
    assert by_turns["token_hit_rate"] < by_tokens["token_hit_rate"]
    assert refused.exit_code == ExitCode.USAGE
    assert "'money' is none of turns, tokens, seconds" in refused.stderr


def test_belady_knows_which_blocks_come_back(tmp_path: Path) -> None:
    """Two prompts take turns in a store of one; keeping the first finds half of what comes again."""
    path = tmp_path / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [(n * 1000, 512, 1, [n % 2]) for n in range(20)]
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows) + "\n")
    said = ("simulate", str(path), "--blocks", "--policies", "lru,belady", "-o", "json", "--token-bytes", "1")
    ran = ctxcache(*said, "--dram", "0", "--ssd", "512")
    wider = ctxcache(*said, "--dram", "0", "--ssd", "1024")

    found = [json.loads(line)["prompt_hit_rate"] for line in ran.stdout.splitlines()]
    assert found == [0, 0.45]
    assert [json.loads(line)["prompt_hit_rate"] for line in wider.stdout.splitlines()] == [0.9, 0.9]


def test_a_space_of_blocks_is_a_shape_of_its_own(tmp_path: Path) -> None:
    """It needs --blocks, and finds what is there to be found."""
    trace = trace_of(tmp_path / "trace.jsonl", 512)
    document = json.loads(
        ctxcache("simulate", str(trace), "--blocks", "--spaces", "-o", "json", "--policies", "value").stdout
    )
    refused = CliRunner().invoke(app, ["simulate", str(trace), "--spaces"])

    assert document["prompt_hit_rate"] == pytest.approx(5 / 9)
    assert (refused.exit_code, "--spaces" in refused.stderr) == (ExitCode.USAGE, True)
