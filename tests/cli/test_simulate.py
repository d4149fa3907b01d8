"""`ctxcache simulate` as a user meets it."""

import json
from pathlib import Path

import pytest
from command_line import ctxcache
from typer.testing import CliRunner

from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.main import app

TRACE = "session_id,arrival_ms,new_input_tokens,output_tokens\na,0,10,5\nb,1000,10,5\na,2000,10,5\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions, one of which returns."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_line_of_json_per_policy_and_capacity(trace: Path) -> None:
    """Figures have their names and are plain numbers."""
    ran = ctxcache("simulate", str(trace), "--policies", "lru,belady", "--footprint", "1,4", "--json")

    documents = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(d["policy"], d["footprint_multiple"]) for d in documents] == [
        ("lru", 1), ("belady", 1), ("lru", 4), ("belady", 4),
    ]  # fmt: skip
    assert documents[-1]["hit_rate"] == 1
    assert documents[-1]["dram_bytes"] + documents[-1]["ssd_bytes"] == 4 * 15 * 819_200


def test_people_see_a_table(trace: Path) -> None:
    """One line per policy, all of them unless some are named."""
    ran = ctxcache("simulate", str(trace), "--dram", "1GiB", "--ssd", "2GiB")

    assert ran.exit_code == ExitCode.OK
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [
        "policy", "lru", "fifo", "s3-fifo", "arc", "t-lru", "look-ahead", "value", "value-by-tokens", "belady",
    ]  # fmt: skip


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
        ("--policies", "mru"), ("--footprint", "much"), ("--footprint", "-1"), ("--hints", "rumours"),
        ("--ttl", "soon"), ("--dram", "big"), ("--ssd-read", "0"), ("--decode", "nan"),
    ],
)  # fmt: skip
def test_wrong_options_are_usage(trace: Path, wrong: tuple[str, str]) -> None:
    """Each is named, and nothing is replayed."""
    ran = CliRunner().invoke(app, ["simulate", str(trace), *wrong])

    assert ran.exit_code == ExitCode.USAGE
    assert wrong[0] in ran.stderr
    assert not ran.stdout
