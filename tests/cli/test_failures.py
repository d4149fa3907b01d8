"""Failures as scripts see them: a document on standard error, with one reason for one sort of fault."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import ctxcache

from ctxcache.cli.documents import Output
from ctxcache.cli.failures import ExitCode, asked_output

NOBODY = ("--target", "localhost:1")
KEYS = ["status", "reason", "message", "field", "hint", "exit_code", "facts"]


def failed(*words: str) -> tuple[int, str, str]:
    """Run a command that fails; its exit code and both of its outputs.

    In a process of its own: `serve` sets up the process that it runs in, its collector of garbage among it.
    """
    ran = ctxcache(*words)
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason", "field"),
    [
        (("-o", "json", "sessoin", "list"), ExitCode.USAGE, "USAGE", ""),
        (("session", "list", "--bogus", "--output=json"), ExitCode.USAGE, "USAGE", "--bogus"),
        (("session", "show", "-ojson"), ExitCode.USAGE, "USAGE", "name"),
        (("--timeout", "-3", "-o", "json", "stats"), ExitCode.USAGE, "USAGE", "--timeout"),
        (("-o", "json", "bench", "--rows", "nope"), ExitCode.USAGE, "USAGE", "--rows"),
        (("stats", *NOBODY, "-o", "json"), ExitCode.UNAVAILABLE, "UNAVAILABLE", ""),
        (
            ("-o", "json", "serve", "--listen", "nonsense"),
            ExitCode.CONFIGURATION,
            "INVALID_CONFIGURATION",
            "listen",
        ),
        (
            ("-o", "json", "--token-file", "/none", "stats"),
            ExitCode.CONFIGURATION,
            "INVALID_CONFIGURATION",
            "/none",
        ),
    ],
)
def test_an_error_is_one_document(words: Sequence[str], code: ExitCode, reason: str, field: str) -> None:
    """Words that cannot be read give one as a server that is not there; nothing is on standard output."""
    exit_code, out, err = failed(*words)
    (line,) = err.splitlines()
    error = json.loads(line)["error"]

    assert (exit_code, out) == (code, "")
    assert list(error) == KEYS
    assert (error["reason"], error["field"], error["exit_code"]) == (reason, field, code)
    assert error["message"]


def test_an_error_is_yaml_where_that_is_asked_for_and_a_sentence_else() -> None:
    """As what a command prints is."""
    assert failed("-o", "yaml", "stats", *NOBODY)[2].startswith('---\nerror:\n  status: "UNAVAILABLE"\n')
    assert failed("stats", *NOBODY)[2].startswith("ctxcache: no answer from localhost:1")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("stats", Output.TABLE),
        ("-o json stats", Output.JSON),
        ("-o json stats -o table", Output.TABLE),
        ("stats --output yaml", Output.YAML),
        ("-ojson x", Output.JSON),
        ("-o xml", Output.TABLE),
        ("show -- -o json", Output.TABLE),
    ],
)
def test_how_to_print_is_known_of_any_words(words: str, output: Output) -> None:
    """The last that says it, and none behind the end of the options."""
    assert asked_output(words.split()) is output


@pytest.mark.parametrize(
    "words",
    [
        ("import", "PATH", "--new-store"),
        ("import", "PATH", "--check"),
        ("simulate", "PATH"),
        ("trace", "replay", "PATH"),
        ("trace", "convert", "PATH", "NEW"),
    ],
)
def test_a_file_that_cannot_be_read_has_one_reason(tmp_path: Path, words: Sequence[str]) -> None:
    """One that is not there, and a directory."""
    for path in (tmp_path / "missing.jsonl", tmp_path):
        new = str(tmp_path / "new.jsonl")
        given = [{"PATH": str(path), "NEW": new}.get(word, word) for word in words]
        exit_code, _, err = failed("-o", "json", *given)
        error = json.loads(err)["error"]

        assert (exit_code, error["reason"]) == (ExitCode.DEVICE, "FILE_UNUSABLE"), err
        assert error["facts"] == {"path": str(path)}


def test_a_file_that_is_no_archive_has_one_reason(tmp_path: Path) -> None:
    """For a new store as for one that runs."""
    (tmp_path / "it").write_bytes(bytes(100))
    for words in (("import", "--new-store", "--check"), ("import", "--new-store"), ("import", "--check")):
        exit_code, _, err = failed(*words, str(tmp_path / "it"), "-o", "json")
        assert (exit_code, json.loads(err)["error"]["reason"]) == (ExitCode.DATA_LOSS, "FILE_DAMAGED"), err


def test_a_directory_that_is_not_there_has_one_reason(tmp_path: Path) -> None:
    """To be verified as to be made whole again; neither makes one."""
    missing = str(tmp_path / "missing")
    for words in (("verify",), ("rebuild",), ("rebuild", "--dry-run")):
        exit_code, _, err = failed(*words, "--data-directory", missing, "-o", "json")
        reason = json.loads(err)["error"]["reason"]
        assert (exit_code, reason) == (ExitCode.DATA_DIRECTORY_UNUSABLE, "DATA_DIRECTORY_UNUSABLE"), err
    assert list(tmp_path.iterdir()) == []
