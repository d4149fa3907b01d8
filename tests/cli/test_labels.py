"""Labels of sessions: given, found by, and kept through kills, rebuilds, forks and archives."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import numpy as np
import pytest
from command_line import ctxcache, ctxcache_json
from server_process import ServerProcess
from stored import HIDDEN, ROW_BYTES, connected, model_spec, store_session

from ctxcache.cli.failures import ExitCode
from ctxcache.client import Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKENS
from ctxcache.v1 import session_pb2, session_pb2_grpc

LABELS = {"app/name": "chat", "user": "4711", "empty": ""}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the test's own."""
    with ServerProcess(tmp_path / "data") as running:
        yield running


def store(client: Client, name: str, labels: Mapping[str, str], *, is_pinned: bool = False) -> SessionInfo:
    """A session with tokens on disk."""
    model = client.models.register(model_spec())
    session = client.sessions.create(model, id=name, layout=[HIDDEN], labels=labels, is_pinned=is_pinned)
    ids = np.arange(100, dtype=np.int32).reshape(-1, 1)
    session.append({TOKENS: ids, HIDDEN: np.zeros((100, ROW_BYTES), np.uint8)})
    return session.flush()


def labels_of(server: ServerProcess) -> dict[str, Mapping[str, str]]:
    """The labels of every session, by its id."""
    with connected(server.target) as client:
        return {s.name.removeprefix("sessions/"): s.labels for s in client.sessions.list()}


def test_labels_are_there_after_a_kill_a_restart_and_a_rebuild(server: ServerProcess) -> None:
    """Dormant sessions and others keep their labels; a rebuild takes labels from the catalog."""
    with connected(server.target) as client:
        store(client, "labelled", LABELS)
        store(client, "pinned", {"user": "1"}, is_pinned=True)
        store(client, "plain", {})
        client.sessions.create(client.models.register(model_spec()), id="without-tokens", labels=LABELS)
    expected = {"labelled": LABELS, "pinned": {"user": "1"}, "plain": {}, "without-tokens": LABELS}
    server.kill9()
    server.start()
    after_a_kill = labels_of(server)
    assert server.terminate() == ExitCode.OK
    shutil.rmtree(server.data_directory / "metadata")
    rebuilt = ctxcache("rebuild", "--data-directory", str(server.data_directory), "--ssd-size-bytes", "0")
    server.start()

    assert after_a_kill == expected
    assert rebuilt.exit_code == ExitCode.OK, rebuilt.stderr
    assert labels_of(server) == expected


def test_a_session_that_woke_and_was_written_again_has_its_labels(server: ServerProcess) -> None:
    """Its record is made anew of what is known of it."""
    with connected(server.target) as client:
        store(client, "labelled", LABELS)
    server.terminate()
    server.start()
    with connected(server.target) as client:
        client.sessions.open("sessions/labelled").keep_first(64)
    server.kill9()
    server.start()

    assert labels_of(server) == {"labelled": LABELS}


def test_a_fork_has_its_sources_labels(server: ServerProcess) -> None:
    """One that takes another's place has the other's: they belong to the name."""
    with connected(server.target) as client:
        store(client, "source", LABELS)
        other = store(client, "other", {"user": "1"})
        source = client.sessions.open("sessions/source")
        source.fork(id="fork", token_count=64)
        source.fork(id="other", replaces_generation=other.generation)

    assert labels_of(server) == {"source": LABELS, "fork": LABELS, "other": {"user": "1"}}


@pytest.mark.parametrize("is_store", [False, True], ids=["sessions", "store"])
def test_labels_go_through_an_archive(server: ServerProcess, tmp_path: Path, is_store: bool) -> None:  # noqa: FBT001
    """Of single sessions by a client, and of a whole store."""
    with connected(server.target) as client:
        store(client, "labelled", LABELS)
        store(client, "plain", {})
    file, target = str(tmp_path / "archive"), ("--target", server.target)
    if is_store:
        exported = ctxcache(*target, "export", "--store", "--to", file)
        imported = ctxcache(
            "import", "--new-store", file, "--data-directory", str(tmp_path / "new"),
            "--ssd-size-bytes", "64MiB",
        )  # fmt: skip
        with ServerProcess(tmp_path / "new") as other:
            found = labels_of(other)
    else:
        exported = ctxcache(*target, "export", "--all", "--to", file)
        with ServerProcess(tmp_path / "new") as other:
            imported = ctxcache("--target", other.target, "import", file)
            found = labels_of(other)

    assert (exported.exit_code, imported.exit_code) == (0, 0), exported.stderr + imported.stderr
    assert found == {"labelled": LABELS, "plain": {}}


def test_sessions_are_found_by_all_of_the_given_labels(server: ServerProcess) -> None:
    """The server looks, awake or dormant; the command line shows, and deletes, the same."""
    with connected(server.target) as client:
        store(client, "a", {"user": "1", "app": "chat"})
        store(client, "b", {"user": "1"})
        store(client, "c", {"user": "2", "app": "chat"})
    server.terminate()
    server.start()
    with connected(server.target) as client:
        by_user = [s.name for s in client.sessions.list(labels={"user": "1"}, page_size=1)]
        by_both = [s.name for s in client.sessions.list(labels={"user": "1", "app": "chat"})]
        nothing = list(client.sessions.list(labels={"user": "3"}))
    listed = ctxcache_json(server.target, "session", "list", "--label", "user=1", "--label", "app=chat")
    table = ctxcache("--target", server.target, "session", "list")
    shown = ctxcache("--target", server.target, "session", "show", "a")
    deleted = ctxcache(
        "-o", "json", "--target", server.target, "session", "delete", "--label", "user=1", "--yes"
    )

    assert (by_user, by_both, nothing) == (["sessions/a", "sessions/b"], ["sessions/a"], [])
    assert [s["labels"] for s in listed["sessions"]] == [{"app": "chat", "user": "1"}]
    assert "app=chat user=1" in table.stdout
    assert "app=chat user=1" in shown.stdout
    assert deleted.document["deleted"] == ["sessions/a", "sessions/b"]
    assert list(labels_of(server)) == ["c"]


def test_the_command_line_makes_a_session_with_labels(server: ServerProcess) -> None:
    """With its model's streams; what is no label is refused before the server is asked."""
    store_session(server.target, "other", token_count=0)
    words = ("session", "create", "chat-99", "--model", "tiny")
    made = ctxcache_json(server.target, *words, "--label", "user=4711", "--label", "empty=", "--ttl", "7d")
    refused = ctxcache("--target", server.target, "session", "create", "x", "--model", "tiny", "--label", "u")

    assert made["labels"] == {"empty": "", "user": "4711"}
    assert (made["ttl"], made["layout"][1]["kind"]) == ("604800s", "STATE_KIND_HIDDEN")
    assert refused.exit_code == ExitCode.USAGE
    assert "'u' is not KEY=VALUE" in refused.stderr


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ({f"key{i}": "" for i in range(9)}, "9 labels, and 8 are the most"),
        ({"": "x"}, "the key '' does not match"),
        ({"a b": "x"}, "the key 'a b' does not match"),
        ({"a" * 64: "x"}, "does not match"),
        ({"user": "a@b"}, "the value 'a@b' of user does not match"),
        ({"user": "x" * 64}, "does not match"),
        ({"user": "4711\n"}, "does not match"),
        ({"k" * 1000: "x"}, "does not match"),
    ],
)
def test_a_refused_label_names_its_field_and_changes_nothing(
    running_server: ServerProcess, labels: dict[str, str], problem: str
) -> None:
    """Neither a session is made, nor is anything listed by it."""
    with connected(running_server.target) as client:
        model = client.models.register(model_spec())
        with pytest.raises(InvalidArgument) as created:
            client.sessions.create(model, id="refused", labels=labels)
        with pytest.raises(InvalidArgument) as listed:
            list(client.sessions.list(labels=labels))
        names = [session.name for session in client.sessions.list()]

    for refused in (created.value, listed.value):
        assert refused.facts["field"] == "labels"
        assert problem in str(refused.facts["problem"])
        assert len(str(refused)) < 300
    assert "sessions/refused" not in names


def test_labels_are_on_the_wire_as_the_contract_says(server: ServerProcess) -> None:
    """Any gRPC client gives and reads them."""
    with connected(server.target) as client:
        client.models.register(model_spec())
    with grpc.insecure_channel(server.target) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        made = stub.CreateSession(
            session_pb2.CreateSessionRequest(session_id="wire", model="models/tiny", labels=LABELS)
        )
        got = stub.GetSession(session_pb2.GetSessionRequest(name="sessions/wire"))
        listed = stub.ListSessions(session_pb2.ListSessionsRequest(labels={"user": "4711"}))

    assert dict(made.labels) == dict(got.labels) == dict(listed.sessions[0].labels) == LABELS
