"""Exports and imports that somebody or something comes between: changes, kills, Ctrl-C.

Nothing partial, and nothing wrong.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from carried import SPEC, Rows, assert_equal, assert_rows, found, keep, make_rows, names
from command_line import TIMEOUT_S, asked
from server_process import COMMAND_LINE, ServerProcess
from stored import connected

import ctxcache
from ctxcache.archive import transfer
from ctxcache.archive.contents import ArchiveOutcome, ArchiveStatus, ImportWishes, OnConflict, Step
from ctxcache.archive.frames import FrameWriter, Source, destination
from ctxcache.archive.reader import ArchiveReader
from ctxcache.archive.transfer import GATHERED_BYTES, UNFINISHED, UNFINISHED_TTL_S, Exporter, Importer
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel, Client
from ctxcache.errors import FileUnusable, Unavailable
from tests.nursery import without_settings

TOKEN_COUNT = 150
LONG_TOKEN_COUNT = 2 * GATHERED_BYTES // (4 + sum(one.row_bytes for one in SPEC.streams))


def nothing(_name: str, _count: int, _size_bytes: int) -> None:
    """Somebody who does not listen."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three to a session of ours."""
    monkeypatch.setattr(transfer, "ROWS_BYTES", 64 * (4 + sum(one.row_bytes for one in SPEC.streams)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that lives throughout."""
    with ServerProcess(tmp_path_factory.mktemp("server") / "data") as started:
        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of a store that is empty."""
    with ctxcache.connect(server.target) as made:
        for session in list(made.sessions.list()):
            made.sessions.open(session.name).delete()
        yield made


def exported(
    client: Client, *session_ids: str, step: Step = nothing, skips_gone: bool = False
) -> tuple[list[ArchiveOutcome], bytes]:
    """Export into memory."""
    fd = os.memfd_create("export")
    try:
        writer = FrameWriter(fd, "export", bytes(16), 0)
        exporter = Exporter(client, writer, step, skips_gone=skips_gone)
        outcomes = list(exporter.export([f"sessions/{one}" for one in session_ids]))
        return outcomes, os.pread(fd, writer.size_bytes, 0)
    finally:
        os.close(fd)


def export_to(file: Path, client: Client, step: Step) -> None:
    """Export `x` into a file."""
    with destination(str(file), is_forced=False) as fd:
        list(
            Exporter(client, FrameWriter(fd, "x", bytes(16), 0), step, skips_gone=False).export(
                ["sessions/x"]
            )
        )


def imported(client: Client, data: bytes, wishes: ImportWishes, step: Step = nothing) -> list[ArchiveOutcome]:
    """Import from memory."""
    fd = os.memfd_create("export")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        reader = ArchiveReader(Source(fd, "export", len(data)))
        return list(Importer(client, wishes, reader.begin_time_ns, step).take(reader.sessions()))
    finally:
        os.close(fd)


def contents(data: bytes) -> dict[str, Rows]:
    """The sessions of an export, by name."""
    fd = os.memfd_create("export")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        all_of_it: dict[str, Rows] = {}
        for one in ArchiveReader(Source(fd, "export", len(data))).sessions():
            parts = [{stream: part.copy() for stream, part in some.items()} for some in one.rows()]
            if not one.is_void:
                all_of_it[one.described.session_id] = {
                    stream: np.concatenate([part[stream] for part in parts])
                    for stream in one.described.layout
                }
        return all_of_it
    finally:
        os.close(fd)


def once(action: Callable[[], object]) -> Step:
    """Do it after the first block, and never again."""
    waiting = [action]

    def step(_name: str, count: int, _size_bytes: int) -> None:
        if count > 0 and waiting:
            waiting.pop()()

    return step


def test_a_session_that_changes_meanwhile_is_read_again(client: Client) -> None:
    """The file has the later state, whole; what came of the earlier one is void."""
    keep(client, SPEC, "x", TOKEN_COUNT)

    def change() -> None:
        client.sessions.open("sessions/x", CallerModel(SPEC)).append(make_rows(SPEC, 10, 7))

    outcomes, data = exported(client, "x", step=once(change))

    assert [(one.status, one.token_count) for one in outcomes] == [(ArchiveStatus.EXPORTED, TOKEN_COUNT + 10)]
    assert_equal(contents(data)["x"], found(client, "x"))


def test_another_session_of_the_same_name_is_not_mixed_in(client: Client) -> None:
    """As long and of the same generation: told by its uid alone."""
    keep(client, SPEC, "x", TOKEN_COUNT)

    def replace() -> None:
        client.sessions.open("sessions/x").delete()
        made = client.sessions.create(CallerModel(SPEC), id="x", layout=[one.stream for one in SPEC.streams])
        made.append(make_rows(SPEC, TOKEN_COUNT, 99))

    outcomes, data = exported(client, "x", step=once(replace))

    assert [one.status for one in outcomes] == [ArchiveStatus.EXPORTED]
    assert_equal(contents(data)["x"], make_rows(SPEC, TOKEN_COUNT, 99))


def test_a_session_that_never_rests_fails_and_others_do_not(client: Client) -> None:
    """After three attempts; the file is whole without it."""
    rows = keep(client, SPEC, "calm", TOKEN_COUNT)
    keep(client, SPEC, "restless", TOKEN_COUNT)

    def step(name: str, count: int, _size_bytes: int) -> None:
        if name == "sessions/restless" and count > 0:
            client.sessions.open(name, CallerModel(SPEC)).append(make_rows(SPEC, 1, 7))

    outcomes, data = exported(client, "restless", "calm", step=step)

    assert [one.status for one in outcomes] == [ArchiveStatus.FAILED, ArchiveStatus.EXPORTED]
    assert outcomes[0].error is not None
    assert outcomes[0].error.reason == "GENERATION_MISMATCH"
    assert client.sessions.get("sessions/restless").token_count == TOKEN_COUNT + 3
    assert list(contents(data)) == ["calm"]
    assert_equal(contents(data)["calm"], rows)


@pytest.mark.parametrize(
    ("skips_gone", "status"), [(True, ArchiveStatus.SKIPPED), (False, ArchiveStatus.FAILED)]
)
def test_a_session_that_goes_is_left_out_and_told(
    client: Client, status: ArchiveStatus, *, skips_gone: bool
) -> None:
    """Before it was begun or midway; with --all it is no failure."""
    keep(client, SPEC, "going", TOKEN_COUNT)
    keep(client, SPEC, "staying", 3)

    outcomes, data = exported(
        client, "gone", "going", "staying", skips_gone=skips_gone,
        step=once(lambda: client.sessions.open("sessions/going").delete()),
    )  # fmt: skip

    assert [one.status for one in outcomes] == [status, status, ArchiveStatus.EXPORTED]
    assert {one.error.reason for one in outcomes if one.error} == {"SESSION_NOT_FOUND"}
    assert list(contents(data)) == ["staying"]


def test_a_server_that_dies_leaves_no_file(tmp_path: Path) -> None:
    """Midway through the rows: an error, and neither a file nor a part of one."""
    (tmp_path / "files").mkdir()
    with ServerProcess(tmp_path / "data") as dying, ctxcache.connect(dying.target, timeout_s=5) as client:
        keep(client, SPEC, "x", TOKEN_COUNT)
        with pytest.raises(Unavailable):
            export_to(tmp_path / "files" / "x", client, once(dying.kill9))

    assert not list((tmp_path / "files").iterdir())


def test_what_a_killed_export_leaves_is_used_up(tmp_path: Path) -> None:
    """Its name is never there; the next one takes the rest over, however long it was."""
    file = tmp_path / "x"
    script = (
        "import os, signal, sys\nfrom ctxcache.archive.frames import destination\n"
        "with destination(sys.argv[1], is_forced=False) as fd:\n"
        "    os.write(fd, bytes(1000))\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(file)], timeout=TIMEOUT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".x.ctxcache-partial"]

    with destination(str(file), is_forced=False) as fd:
        assert os.fstat(fd).st_size == 0
        os.write(fd, b"whole")
        with pytest.raises(FileUnusable, match="another export"), destination(str(file), is_forced=False):
            pass
        assert not file.exists()

    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert file.read_bytes() == b"whole"


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    """Nor does any other end of what fills it."""
    with pytest.raises(KeyboardInterrupt), destination(str(tmp_path / "x"), is_forced=False):
        raise KeyboardInterrupt

    assert not list(tmp_path.iterdir())


def test_what_was_filled_so_far_may_go(client: Client) -> None:
    """Evicted, or deleted by somebody: that is the failure, of this session alone.

    Clearing up does not hide it.
    """
    rows = keep(client, SPEC, "a", LONG_TOKEN_COUNT)
    keep(client, SPEC, "b", 3)
    _, data = exported(client, "a", "b")

    def evict() -> None:
        (unfinished,) = [one.name for one in client.sessions.list() if UNFINISHED in one.name]
        client.sessions.open(unfinished).delete()

    wishes = ImportWishes(names={"a": "a2", "b": "b2"})
    outcomes = imported(client, data, wishes, once(evict))

    assert [one.status for one in outcomes] == [ArchiveStatus.FAILED, ArchiveStatus.IMPORTED]
    assert outcomes[0].error is not None
    assert outcomes[0].error.reason == "SESSION_NOT_FOUND"
    assert "sessions/a2: what had come of it was evicted" in str(outcomes[0].error)
    assert sorted(one.name for one in client.sessions.list()) == ["sessions/a", "sessions/b", "sessions/b2"]
    assert_equal(found(client, "a"), rows)


def test_what_is_replaced_stays_when_it_has_changed(client: Client) -> None:
    """The operator who wanted it replaced had not seen its new tokens."""
    keep(client, SPEC, "x", TOKEN_COUNT)
    _, data = exported(client, "x")

    def change() -> None:
        client.sessions.open("sessions/x", CallerModel(SPEC)).append(make_rows(SPEC, 10, 7))

    (outcome,) = imported(client, data, ImportWishes(on_conflict=OnConflict.REPLACE), once(change))

    assert outcome.error is not None
    assert (outcome.status, outcome.error.reason) == (ArchiveStatus.FAILED, "GENERATION_MISMATCH")
    assert [(one.name, one.token_count) for one in client.sessions.list()] == [
        ("sessions/x", TOKEN_COUNT + 10)
    ]


class Importing:
    """`ctxcache import -` that has been given a part of a file, and has sent rows of it."""

    def __init__(self, target: str, data: bytes) -> None:
        self.target, self._rest = target, data[-1000:]
        self.process = subprocess.Popen(
            [*COMMAND_LINE, "--target", target, "--timeout", "2", "import", "-"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False, env=without_settings(os.environ),
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(data[:-1000])
        self.process.stdin.flush()
        with connected(target) as client:
            # Each turn asks the server: no time is waited for.
            while not any(one.token_count for one in client.sessions.list()):
                assert self.process.poll() is None

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Let it have the rest, or end it by a signal; its exit code and what it said."""
        if number is not None:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(None if number else self._rest, timeout=TIMEOUT_S)
        return self.process.returncode, stderr.decode()


@pytest.fixture
def export(client: Client) -> tuple[bytes, Rows]:
    """A session that is in a file and not in the store, of more bytes than go into one append."""
    rows = keep(client, SPEC, "x", LONG_TOKEN_COUNT)
    _, data = exported(client, "x")
    client.sessions.open("sessions/x").delete()
    return data, rows


def test_a_killed_import_leaves_what_expires_soon(
    server: ServerProcess, client: Client, export: tuple[bytes, Rows], tmp_path: Path
) -> None:
    """Not under the name that was asked for; the next import is not in its way."""
    data, rows = export
    assert Importing(server.target, data).end(signal.SIGKILL)[0] == -signal.SIGKILL
    (left,) = client.sessions.list()
    assert left.name.startswith(f"sessions/{UNFINISHED}")
    assert left.ttl == timedelta(seconds=UNFINISHED_TTL_S) == timedelta(minutes=2)

    (tmp_path / "x").write_bytes(data)
    assert asked(server.target, "import", str(tmp_path / "x")).exit_code == 0
    assert names(server.target) == [left.name.removeprefix("sessions/"), "x"]
    assert_rows(server.target, "x", rows)


def test_ctrl_c_leaves_nothing_of_an_import(
    server: ServerProcess, client: Client, export: tuple[bytes, Rows]
) -> None:
    """Exit code 130, and the store is as it was."""
    code, told = Importing(server.target, export[0]).end(signal.SIGINT)

    assert (code, "Traceback" in told) == (130, False)
    assert not list(client.sessions.list())


def test_a_server_that_dies_has_none_of_the_name(export: tuple[bytes, Rows], tmp_path: Path) -> None:
    """Killed midway and started again: the session is not there, and comes in at the next attempt."""
    data, rows = export
    with ServerProcess(tmp_path / "data") as dying:
        importing = Importing(dying.target, data)
        dying.kill9()
        code, told = importing.end()
        assert (code, told.count("\n")) == (ExitCode.UNAVAILABLE, 1)
        dying.start()
        assert [one for one in names(dying.target) if not one.startswith(UNFINISHED)] == []

        (tmp_path / "x").write_bytes(data)
        assert asked(dying.target, "import", str(tmp_path / "x")).exit_code == 0
        assert_rows(dying.target, "x", rows)
