"""The lab's commands, called as the product's own.

Their examples, their wrong words, and where they are listed.
"""

import json
import shlex
from pathlib import Path

import pytest
from command_line import Ran, ctxcache
from recorded_calls import CALLS
from server_process import ServerProcess
from typer.main import get_command

from ctxcache.cli.documents import TITLE
from ctxcache.cli.failures import ExitCode
from lab.bench.command import app as bench
from lab.replay.command import app as replay

EXAMPLES = (get_command(bench).epilog or "").split("\n\n")
REPLAYS = (get_command(replay).epilog or "").split("\n\n")


@pytest.mark.parametrize("line", EXAMPLES[1:])
def test_an_example_of_bench_works(line: str) -> None:
    """By the real program."""
    ran = ctxcache(*shlex.split(line)[1:])

    assert (EXAMPLES[0], ran.exit_code) == (TITLE, ExitCode.OK), ran.stderr
    assert "lookup" in ran.stdout


@pytest.mark.parametrize("line", REPLAYS[1:])
def test_an_example_of_replay_works(
    line: str, running_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real program, against a server."""
    (tmp_path / "calls.jsonl").write_text(CALLS)
    monkeypatch.chdir(tmp_path)

    ran = ctxcache(*shlex.split(line)[1:], environment={"CTXCACHE_TARGET": running_server.target})

    assert (REPLAYS[0], ran.exit_code) == (TITLE, ExitCode.OK), ran.stderr
    assert "reads in DRAM" in ran.stdout


def test_their_help_is_their_own() -> None:
    """Options of the lab's command, under the product's name."""

    def helped(*words: str) -> Ran:
        return ctxcache(*words, "--help")

    assert "Usage: ctxcache bench [OPTIONS]" in helped("bench").stdout
    assert "--opening-tokens" in helped("demo").stdout
    assert "Usage: ctxcache trace replay [OPTIONS]" in helped("trace", "replay").stdout
    assert " replay " in ctxcache("trace", "--help").stdout


@pytest.mark.parametrize(
    "words", [("bench", "--rows", "nope"), ("trace", "replay", "calls", "--speed", "-1")]
)
def test_wrong_words_end_as_those_of_any_command(words: tuple[str, ...]) -> None:
    """With the code of wrong usage, and a document where one was asked for."""
    plain = ctxcache(*words)
    document = ctxcache("--output", "json", *words)

    assert (plain.exit_code, document.exit_code) == (ExitCode.USAGE, ExitCode.USAGE)
    assert words[-2] in plain.stderr
    assert '"reason":"USAGE"' in document.stderr.replace(" ", "")
    assert document.stdout == ""


def test_an_adoption_is_replayed(running_server: ServerProcess, tmp_path: Path) -> None:
    """It is a fork of a session that was opened before: nothing is refused."""
    session = {"session": "0c", "tenant": "0b", "layout": 0}
    adoption = (
        {"at_ms": 4, "call": "open", "session_tokens": 0, "ttl_ms": 60_000},
        {"at_ms": 5, "call": "fork", "session_tokens": 64, "tokens": 64, "source": "0a", "ttl_ms": 60_000},
        {"at_ms": 6, "call": "read", "session_tokens": 64, "tokens": 64, "dram_tokens": 64, "lease": 2},
    )
    file = tmp_path / "calls.jsonl"
    file.write_text(CALLS + "".join(f"{json.dumps(call | session)}\n" for call in adoption))

    ran = ctxcache("trace", "replay", str(file), "--target", running_server.target, "--output", "json")

    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "SESSION_ALREADY_EXISTS" not in ran.stdout
    assert ran.document["errors"] in ({}, []), ran.stdout
