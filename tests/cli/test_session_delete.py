"""`ctxcache session delete`: by name and by selection, counted, asked, bounded, and run again."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TIMEOUT_S, Ran, at_terminal, ctxcache
from server_process import COMMAND_LINE, ServerProcess, write_secret
from stored import HIDDEN, TOKEN_COUNT, connected, model_spec, store_session

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.selecting import DELETED_AT_ONCE, PAGE_SIZE, Deletion, Selection
from ctxcache.client import Client
from ctxcache.identity import ArenaGrant, Role, Token, digest_of
from tests.nursery import without_settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this file's own: its tests delete whole selections."""
    with ServerProcess(tmp_path_factory.mktemp("delete") / "data") as running:
        yield running


@pytest.fixture
def target(server: ServerProcess) -> str:
    """Its address; no session is there before the test."""
    with connected(server.target) as client:
        for session in client.sessions.list():
            client.sessions.open(session.name).delete()
    return server.target


def delete(target: str, *words: str) -> Ran:
    """Run the command for a script."""
    return ctxcache("-o", "json", "--target", target, "session", "delete", *words)


def left(target: str) -> list[str]:
    """IDs of the sessions that are there."""
    with connected(target) as client:
        return [session.name.removeprefix("sessions/") for session in client.sessions.list()]


def store_many(target: str, count: int) -> None:
    """Create empty sessions `many-00000` and on."""
    with connected(target) as client:
        model = client.models.register(model_spec())
        for number in range(count):
            client.sessions.create(model, id=f"many-{number:05d}", layout=[HIDDEN])


def test_a_dry_run_says_how_much_would_go(target: str) -> None:
    """Sessions, tokens and bytes, with their names for scripts; nothing is deleted."""
    for name in ("user-1-a", "user-1-b", "user-2-a"):
        store_session(target, name)

    ran = delete(target, "--prefix", "user-1-", "--dry-run")
    text = ctxcache("--target", target, "session", "delete", "--prefix", "user-", "--dry-run")

    assert ran.exit_code == ExitCode.OK
    assert ran.document["would_delete"] == ["sessions/user-1-a", "sessions/user-1-b"]
    assert (ran.document["session_count"], ran.document["token_count"]) == (2, 2 * TOKEN_COUNT)
    assert ran.document["dram_bytes"] > 0
    assert (ran.document["deleted"], ran.document["is_dry_run"]) == ([], True)
    assert text.stdout.splitlines()[0] == "would delete sessions/user-1-a"
    assert left(target) == ["user-1-a", "user-1-b", "user-2-a"]


def test_everything_of_a_user_goes_by_its_prefix(target: str) -> None:
    """Others stay; and to run it again is no error."""
    for name in ("user-1-a", "user-1-b", "user-2-a"):
        store_session(target, name)

    ran, again = (delete(target, "--prefix", "user-1-", "--yes") for _ in range(2))

    assert ran.document["deleted"] == ["sessions/user-1-a", "sessions/user-1-b"]
    assert (again.exit_code, again.document["deleted"]) == (ExitCode.OK, [])
    assert left(target) == ["user-2-a"]


def test_options_are_and(target: str) -> None:
    """A session goes if all of them are true of it, a named one too."""
    for name in ("user-1-a", "user-2-a"):
        store_session(target, name, token_count=0)

    young = delete(target, "--prefix", "user-", "--older-than", "1h", "--yes")
    idle = delete(target, "--prefix", "user-", "--idle", "1h", "--yes")
    other = delete(target, "user-1-a", "user-2-a", "--prefix", "user-2")

    assert (young.document["deleted"], idle.document["deleted"]) == ([], [])
    assert other.document["deleted"] == ["sessions/user-2-a"]
    assert left(target) == ["user-1-a"]


def test_it_goes_on_behind_a_session_that_cannot_be_deleted(target: str) -> None:
    """The first failure is the sentence and the exit code; JSON has each."""
    for name in ("first", "last"):
        store_session(target, name, token_count=0)

    ran = delete(target, "first", "not-there", "last")

    assert ran.exit_code == ExitCode.NOT_FOUND
    assert ran.document["deleted"] == ["sessions/first", "sessions/last"]
    assert ran.document["failed"] == [{"name": "sessions/not-there", "reason": "SESSION_NOT_FOUND"}]
    assert "sessions/not-there does not exist" in ran.stderr


def test_a_session_that_is_being_written_is_told(server: ServerProcess, target: str) -> None:
    """It stays, the others go, and the exit code says conflict."""
    for name in ("user-a", "user-b"):
        store_session(target, name, token_count=0)
    with connect(server.target) as client:
        model = client.models.register(model_spec())
        with client.sessions.open("sessions/user-a", model).writer(token_count=64):
            ran = delete(target, "--prefix", "user-", "--yes")

    assert ran.exit_code == ExitCode.CONFLICT
    assert ran.document["deleted"] == ["sessions/user-b"]
    assert ran.document["failed"] == [{"name": "sessions/user-a", "reason": "WRITE_IN_PROGRESS"}]


@pytest.mark.parametrize("words", [(), ("--older-than", "0"), ("--yes",)])
def test_no_selection_is_no_deletion_of_all(target: str, words: tuple[str, ...]) -> None:
    """A variable that a script has left empty deletes nothing."""
    store_session(target, "kept", token_count=0)

    assert delete(target, *words).exit_code == ExitCode.USAGE
    assert left(target) == ["kept"]


def test_a_selection_needs_a_yes_where_nobody_can_answer(target: str) -> None:
    """A script says --yes."""
    store_session(target, "user-a", token_count=0)

    ran = delete(target, "--prefix", "user-")

    assert ran.exit_code == ExitCode.USAGE
    assert "--yes" in ran.stderr
    assert left(target) == ["user-a"]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_question_says_how_much_goes(target: str, answer: str) -> None:
    """The question names the count and the sizes."""
    for number in range(4):
        store_session(target, f"user-{number}", token_count=0)
    ran = at_terminal(answer, "--target", target, "session", "delete", "--prefix", "user-")

    assert "Delete 4 sessions (0 tokens, 0 B in DRAM, 0 B on SSD)?" in ran.stderr
    assert len(left(target)) == (0 if answer == "y" else 4)
    assert ran.exit_code == (ExitCode.OK if answer == "y" else ExitCode.INTERNAL)


def test_more_sessions_than_a_page_go_and_an_interrupted_run_goes_on(target: str) -> None:
    """Ctrl-C ends with what was deleted, and 130; the second run deletes the rest."""
    count = PAGE_SIZE + 10
    store_many(target, count)
    process = subprocess.Popen(
        [*COMMAND_LINE, "-o", "json", "--target", target, "session", "delete", "--prefix", "many-", "--yes"],
        env=without_settings(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(left(target)) == count:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    gone = count - len(left(target))
    again = delete(target, "--prefix", "many-", "--yes")

    assert process.returncode == 130, stderr
    assert f'"session_count":{gone},' in stdout
    assert again.document["session_count"] == count - gone
    assert left(target) == []


def test_a_session_that_came_again_is_looked_at_anew(target: str) -> None:
    """One that was made again, or grew, between list and deletion goes if it still is selected."""
    store_session(target, "user-a", token_count=0)
    store_session(target, "user-b", token_count=0)
    with connected(target) as client:
        selection = Selection(prefix="user-")
        listed = list(selection.sessions(client))
        for name in ("user-a", "user-b"):
            client.sessions.open(f"sessions/{name}").delete()
        store_session(target, "user-a")
        deletion = Deletion(client, selection)
        deletion.run(listed)

    assert (deletion.deleted.names, deletion.failures) == (["sessions/user-a"], {})
    assert deletion.deleted.token_count == TOKEN_COUNT
    assert left(target) == []


def test_few_deletions_are_under_way_at_a_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are selected: the next few are taken when the last few are through."""
    store_many(target, 3 * DELETED_AT_ONCE)
    taken = 0

    def counted(client: Client) -> Iterator[object]:
        nonlocal taken
        for session in Selection(prefix="many-").sessions(client):
            taken += 1
            yield session

    with connected(target) as client:
        deletion = Deletion(client, Selection(prefix="many-"))
        steps: list[tuple[int, int]] = []
        deletion.on_step = lambda tally: steps.append((taken, len(tally.names)))
        deletion.run(counted(client))  # type: ignore[arg-type]  # it yields sessions

    assert steps == [(number * DELETED_AT_ONCE, number * DELETED_AT_ONCE) for number in (1, 2, 3)]


def test_an_operator_deletes_all_of_a_tenant(tmp_path: Path) -> None:
    """`--tenant` alone is a selection, and an operator's alone."""
    grants = {"ops": ArenaGrant("ops", Role.OPERATOR), "alice": ArenaGrant("alice"), "bob": ArenaGrant("bob")}
    write_secret(
        tmp_path / "hashes",
        "\n".join(Token(name, digest_of(name), grant).line() for name, grant in grants.items()),
    )
    for name in grants:
        write_secret(tmp_path / name, name)
    with ServerProcess(tmp_path / "data", "--token-hashes", str(tmp_path / "hashes")) as server:

        def sessions_of(name: str) -> list[str]:
            with connect(server.unix_target, access="remote", token_file=tmp_path / name) as client:
                return [session.name for session in client.sessions.list()]

        for name in ("alice", "bob"):
            with connect(server.unix_target, access="remote", token_file=tmp_path / name) as client:
                client.sessions.create(client.models.register(model_spec()), id="chat", layout=[HIDDEN])
        words = ("session", "delete", "--tenant", "alice", "--yes")
        at = ("-o", "json", "--target", server.unix_target, "--token-file")
        refused = ctxcache(*at, str(tmp_path / "bob"), *words)
        before = sessions_of("alice")
        ran = ctxcache(*at, str(tmp_path / "ops"), *words)

        assert (refused.exit_code, before) == (ExitCode.PERMISSION_DENIED, ["sessions/chat"])
        assert ran.document["deleted"] == ["sessions/chat"]
        assert (sessions_of("alice"), sessions_of("bob")) == ([], ["sessions/chat"])


@pytest.mark.parametrize("label", ["user=a b", "no space=1", "user"])
def test_a_refused_label_is_said_before_anything_else(target: str, label: str) -> None:
    """Nothing is printed that looks like a deletion, here and by every command that takes labels."""
    store_session(target, "user-1")

    for words in (["delete", "--yes"], ["delete", "user-1"], ["list"], ["create", "new", "--model", "m"]):
        ran = ctxcache("--target", target, "session", *words, "--label", label)
        assert (ran.exit_code, ran.stdout) == (ExitCode.USAGE, "")
        assert "--label: " in ran.stderr

    assert left(target) == ["user-1"]


def test_a_deletion_that_does_not_begin_prints_its_error_alone(target: str) -> None:
    """Whatever it is: nobody listens, or the caller has no right."""
    ran = ctxcache("--target", "127.0.0.1:1", "--timeout", "2", "session", "delete", "--prefix", "u", "--yes")
    assert (ran.exit_code, ran.stdout) == (ExitCode.UNAVAILABLE, "")
    assert left(target) == []
