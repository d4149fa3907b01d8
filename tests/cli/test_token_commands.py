"""`ctxcache token`, and commands that say who they are."""

import stat
from pathlib import Path

import pytest
from command_line import ctxcache
from server_process import ServerProcess, write_secret

from ctxcache.cli.failures import ExitCode
from ctxcache.identity import read_tokens


def new(hashes: Path, *options: str, name: str = "ci") -> str:
    """A new token's text."""
    ran = ctxcache("token", "new", name, "--hashes", str(hashes), *options)
    assert ran.exit_code == 0, ran.stderr
    return ran.stdout.strip()


def test_a_new_token_is_good_at_a_server_that_runs(tmp_path: Path) -> None:
    """From the command's output alone; what it may not do, and being nobody, have exit codes of their own."""
    hashes, token = tmp_path / "hashes", tmp_path / "token"
    write_secret(token, new(hashes, "--tenant", "ops", "--role", "operator"))
    with ServerProcess(tmp_path / "data", "--token-hashes", str(hashes)) as server:
        at = ("--target", server.target)
        stats = ctxcache("--token-file", str(token), "stats", *at)
        write_secret(token, new(hashes, "--tenant", "a", name="later"))
        # The file is looked at once a second.
        while (
            listed := ctxcache("session", "list", *at, environment={"CTXCACHE_TOKEN_FILE": str(token)})
        ).exit_code:
            assert listed.exit_code == ExitCode.UNAUTHENTICATED
        refused = ctxcache("--token-file", str(token), "stats", *at)
        nobody = ctxcache("session", "list", *at)
        missing = ctxcache("--token-file", str(tmp_path / "none"), "stats", *at)

    assert stats.exit_code == 0, stats.stderr
    assert (refused.exit_code, nobody.exit_code) == (ExitCode.PERMISSION_DENIED, ExitCode.UNAUTHENTICATED)
    assert "needs the role operator" in refused.sentence
    assert "--token-file" in nobody.sentence
    assert missing.exit_code == ExitCode.CONFIGURATION


def test_tokens_are_added_to_a_file_for_the_server_alone(tmp_path: Path) -> None:
    """One line each, whoever ended the file without a line's end; a file that is none is not touched."""
    hashes = tmp_path / "hashes"
    first = new(hashes, "--tenant", "a")
    hashes.write_text(hashes.read_text().rstrip())
    second = new(hashes, "--tenant", "b", "--shared-memory")
    tokens = read_tokens(hashes)

    assert [found.grant.tenant for found in map(tokens.find, (first, second)) if found] == ["a", "b"]
    assert stat.S_IMODE(hashes.stat().st_mode) == 0o600
    assert first not in hashes.read_text()
    hashes.write_text("something else")
    assert ctxcache("token", "new", "x", "--hashes", str(hashes), "--tenant", "a").exit_code == 11
    assert hashes.read_text() == "something else"


@pytest.mark.parametrize("arguments", [("two words", "--tenant", "a"), ("ci", "--tenant", "../a"), ("ci",)])
def test_a_token_for_nobody_is_not_made(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Names and tenants are words."""
    assert ctxcache("token", "new", "--hashes", str(tmp_path / "h"), *arguments).exit_code == ExitCode.USAGE
    assert not (tmp_path / "h").exists()
