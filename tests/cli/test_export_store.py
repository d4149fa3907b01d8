"""`ctxcache export --store` and `import --new-store` through the real binary.

A store that runs comes back elsewhere.
"""

import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from command_line import ctxcache, ctxcache_json
from server_process import COMMAND_LINE, ServerProcess
from stored import HIDDEN, ROW_BYTES, connected, model_spec

from ctxcache.archive.frames import destination
from ctxcache.archive.transfer import receive
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from ctxcache.errors import TooManyRequests
from ctxcache.format.streams import TOKENS, Stream

TOKEN_COUNT = 4000
NAMES = ("monday", "tuesday")
WAIT_S = 30


def rows_of(name: str) -> dict[Stream, npt.NDArray[np.generic]]:
    """A session's rows, of none other."""
    draw = np.random.default_rng(len(name))
    return {
        TOKENS: np.arange(TOKEN_COUNT, dtype=np.int32).reshape(-1, 1),
        HIDDEN: draw.integers(0, 256, (TOKEN_COUNT, ROW_BYTES), np.uint8),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two sessions that SSD has."""
    with ServerProcess(tmp_path_factory.mktemp("source") / "data") as started:
        with connected(started.target) as client:
            model = client.models.register(model_spec())
            for name in NAMES:
                session = client.sessions.create(model, id=name, layout=[HIDDEN])
                session.append(rows_of(name))
                client.sessions.open(session.name).flush()
        yield started


@pytest.fixture
def running(server: ServerProcess) -> str:
    """Its address, whatever an earlier test did to it."""
    if server.wait(0) is not None:
        server.start()
    return str(server.target)


def slow_backup(target: str, file: Path) -> "subprocess.Popen[str]":
    """One that is in the middle of it."""
    command = [*COMMAND_LINE, "--target", target, "export", "--store", "--to", str(file)]
    command += ["--rate-limit", "16KiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = file.with_name(f".{file.name}.ctxcache-partial")
    deadline_s = time.monotonic() + WAIT_S
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.02)
    return process


def test_a_store_comes_back_elsewhere(running: str, tmp_path: Path) -> None:
    """With the same rows, while the first one runs; its file is nobody else's to read."""
    file = tmp_path / "it.ctxarchive"
    made = ctxcache_json(running, "export", "--store", "--to", str(file))
    listed = ctxcache("import", str(file), "--check", "--output", "json").document
    said = ctxcache("import", str(file), "--new-store", "--check", "--output", "json").document
    options = (
        "--data-directory",
        str(tmp_path / "new"),
        "--ssd-size-bytes",
        "64MiB",
        "--arena-size-bytes",
        "64MiB",
    )
    restored = ctxcache("import", str(file), "--new-store", *options)
    with ServerProcess(tmp_path / "new") as other, connected(other.target) as client:
        assert {session.name for session in client.sessions.list()} == {f"sessions/{n}" for n in NAMES}
        for name in NAMES:
            with client.sessions.open(f"sessions/{name}", CallerModel(model_spec())).read() as read:
                for stream, expected in rows_of(name).items():
                    np.testing.assert_array_equal(read.array(stream), expected.view(np.uint8))
        assert ctxcache_json(other.target, "verify")["bad"] == []

    assert (made["session_count"], made["token_count"], made["size_bytes"]) == (
        len(NAMES), len(NAMES) * TOKEN_COUNT, file.stat().st_size,
    )  # fmt: skip
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted((one["session"], one["status"], one["token_count"]) for one in listed["sessions"]) == [
        (f"sessions/{name}", "whole", TOKEN_COUNT) for name in NAMES
    ]
    assert said.items() >= {"session_count": len(NAMES), "data_directory": None}.items()
    assert f"tokens in {made['segment_count']} segments" in restored.stdout
    assert [path.name for path in tmp_path.glob("it*")] == [file.name]


def test_what_is_refused_is_one_sentence(running: str, tmp_path: Path) -> None:
    """A file that is there, and keeps what it has; a backup that is damaged or newer, which makes nothing."""
    file = tmp_path / "it"
    assert ctxcache("--target", running, "export", "--store", "--to", str(file)).exit_code == 0
    data = file.read_bytes()
    again = ctxcache("--target", running, "export", "--store", "--to", str(file))

    assert again.exit_code == ExitCode.CONFLICT
    assert "already exists; choose another name; only `export --force` replaces a file" in again.sentence
    assert file.read_bytes() == data
    damages = {
        data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]: ExitCode.DATA_LOSS,
        data[:8] + b"\3" + data[9:]: ExitCode.FORMAT_TOO_NEW,
    }
    for damaged, code in damages.items():
        file.write_bytes(damaged)
        refused = ctxcache("import", str(file), "--new-store", "--data-directory", str(tmp_path / "new"))
        assert refused.exit_code == code
        assert str(file) in refused.sentence
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_backup_that_is_ended_leaves_no_file(running: str, tmp_path: Path, number: int, code: int) -> None:
    """No file has its name; the next one of that name is made, and the server has let go of this one."""
    file = tmp_path / "it"
    process = slow_backup(running, file)
    with connected(running) as client:
        with pytest.raises(TooManyRequests, match="backups: the limit of 1 is reached"):
            next(client.admin.backup())
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
        assert (process.returncode, file.exists()) == (code, False)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                pieces = [answer.data for answer in client.admin.backup()]
                break
            except TooManyRequests:
                assert time.monotonic() < deadline_s
    with destination(str(file), is_forced=False) as fd:
        receive(pieces, fd, str(file))

    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_server_that_dies_leaves_no_file(running: str, server: ServerProcess, tmp_path: Path) -> None:
    """And has all it had."""
    process = slow_backup(running, tmp_path / "it")
    server.kill9()
    _, stderr = process.communicate(timeout=WAIT_S)
    server.start()

    assert process.returncode == ExitCode.UNAVAILABLE
    assert len(stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert ctxcache_json(running, "verify")["bad"] == []


def test_a_disk_that_is_full_leaves_no_file(running: str, tmp_path: Path) -> None:
    """One sentence, with the file's name."""
    command = [*COMMAND_LINE, "--target", running, "export", "--store", "--to", str(tmp_path / "it")]
    limit = (100_000, 100_000)
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip

    assert ran.returncode == ExitCode.RESOURCE_EXHAUSTED
    assert ran.stderr.splitlines() == [f"ctxcache: {tmp_path}/it: File too large (FILE_FULL)"]
    assert list(tmp_path.iterdir()) == []


def test_a_store_comes_into_one_that_runs_and_through_a_pipe(running: str, tmp_path: Path) -> None:
    """The same file, some or all of it.

    Rows that are shared are written for each, and a pipe cannot give them again.
    """
    file = tmp_path / "it"
    with connected(running) as client:
        client.sessions.open("sessions/monday").fork(id="fork", token_count=100)
        client.sessions.open("sessions/fork").flush()
    command = [*COMMAND_LINE, "--target", running, "--output", "json", "export", "--store", "--to", "-"]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=WAIT_S)
    file.write_bytes(piped.stdout)
    with connected(running) as client:
        client.sessions.open("sessions/fork").delete()
    with ServerProcess(tmp_path / "other") as other, connected(other.target) as client:
        told = ctxcache_json(other.target, "import", str(file))
        names = {one["session"]: (one["status"], one["token_count"]) for one in told["sessions"]}
        for name, count in (("monday", TOKEN_COUNT), ("fork", 100)):
            with client.sessions.open(f"sessions/{name}", CallerModel(model_spec())).read() as read:
                for stream, expected in rows_of("monday").items():
                    np.testing.assert_array_equal(read.array(stream), expected.view(np.uint8)[:count])
        for session in names:
            client.sessions.open(session).delete()
        process = subprocess.run(
            [*COMMAND_LINE, "--target", other.target, "import", "-"], input=piped.stdout, capture_output=True,
            check=False, timeout=WAIT_S,
        )  # fmt: skip
        left = {session.name for session in client.sessions.list()}

    assert names == {
        f"sessions/{n}": ("imported", c) for n, c in [(x, TOKEN_COUNT) for x in NAMES] + [("fork", 100)]
    }
    assert process.returncode == ExitCode.DEVICE
    assert b"share rows, which a pipe cannot give again" in process.stderr
    assert left == {f"sessions/{name}" for name in NAMES}


@pytest.mark.parametrize(
    "words",
    [
        ("export", "--store", "--all", "--to", "x"),
        ("export", "a", "--store", "--to", "x"),
        ("export", "--all", "--rate-limit", "1MiB", "--to", "x"),
        ("import", "-", "--new-store"),
        ("import", "x", "--new-store", "--only", "a"),
        ("import", "x", "--data-directory", "/nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...]) -> None:
    """Before anything is asked or read."""
    assert ctxcache(*words).exit_code == ExitCode.USAGE
