"""SIGTERM and Ctrl-C while a server starts.

It ends at once, as one that had nothing to do, and leaves nothing.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from ctxcache.cli.failures import ExitCode
from ctxcache.storage.data_directory import DataDirectory
from tests.nursery import without_settings

SMALL = ("--arena-size-bytes", "16MiB", "--ssd-size-bytes", "16MiB", "--listen", "127.0.0.1:0")
HANG = """
import importlib, sys, time
from ctxcache.cli.main import main

module, _, name = sys.argv.pop(1).rpartition(":")
*path, name = name.split(".")
owner = importlib.import_module(module)
for part in path:
    owner = getattr(owner, part)

def hang(*_, **__):
    print("hangs", flush=True)
    # A signal that comes just before one long sleep begins would be noticed only at its end.
    while True:
        time.sleep(0.01)

setattr(owner, name, hang)
main()
"""

WAIT = """
import sys
from ctxcache.cache import Cache
from ctxcache.cli.main import main

opened = Cache.open

async def wait(cache):
    print("waits", flush=True)
    sys.stdin.readline()
    await opened(cache)

Cache.open = wait
main()
"""


WAKES = """
import asyncio, signal, sys
from ctxcache.cli.main import main
from ctxcache.server.server import Server

async def start(*_, **__):
    print(signal.set_wakeup_fd(-1), flush=True)
    sys.exit()

Server.start = start
main()
"""


def start(step: str, directory: Path, *options: str) -> "subprocess.Popen[str]":
    """A server that hangs at a step of its start, there by now."""
    (directory / "shm").mkdir(exist_ok=True)
    command = [sys.executable, "-c", HANG, step, "serve", "--data-directory", str(directory / "data"), *SMALL]
    process = subprocess.Popen(
        [*command, "--arena-directory", str(directory / "shm"), *options], env=without_settings(os.environ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    return process


def ended(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[str, str]:
    """The output from the signal to the end."""
    process.send_signal(number)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "step",
    [
        "mmap:mmap",
        "ctxcache.storage.opening:SsdFiles",
        "ctxcache.storage.metadata.reading:has_database",
        "ctxcache.storage.metadata.rocksdb:RocksDbMetadata._open_for_writing",
        "ctxcache.cache:Cache.open",
    ],
)
def test_a_start_is_ended_at_once(tmp_path: Path, step: str, number: signal.Signals) -> None:
    """No arena, no lock, no run that counts as a crash; and the exit code of an end in order."""
    process = start(step, tmp_path)
    stdout, stderr = ended(process, number)
    left = list((tmp_path / "shm").iterdir())
    runs = json.loads((tmp_path / "data" / "RUNS").read_text())
    DataDirectory.open(tmp_path / "data").close()

    assert (process.returncode, stdout, left) == (ExitCode.OK, "", [])
    assert stderr.splitlines()[-1] == "ctxcache: stopped before it was ready"
    assert (runs["crash_count"], runs["is_clean"]) == (0, True)


def test_a_rebuild_at_the_start_is_ended_at_once(tmp_path: Path) -> None:
    """It reads all of the SSD files, in a thread; it can be made again."""
    with ServerProcess(tmp_path / "data", "--ssd-size-bytes", "16MiB") as server:
        server.terminate()
    (tmp_path / "data" / "metadata" / "CURRENT").unlink()
    process = start("ctxcache.storage.rebuild:scan", tmp_path, "--rebuild-metadata", "true")
    ended(process, signal.SIGTERM)

    assert process.returncode == ExitCode.OK
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_signal_wakes_a_start_that_waits(tmp_path: Path) -> None:
    """One that comes right before the loop waits interrupts nothing, so it needs the loop's descriptor."""
    command = [sys.executable, "-c", WAKES, "serve", "--data-directory", str(tmp_path / "data"), *SMALL]
    said = subprocess.check_output(command, env=without_settings(os.environ), text=True, timeout=60)
    assert int(said) >= 0


def test_a_hangup_while_it_starts_is_no_end(tmp_path: Path) -> None:
    """SIGHUP asks for changed settings to be read again: it does so when it is ready."""
    file = tmp_path / "ctxcache.toml"
    file.write_text("max_sessions = 5\n")
    (tmp_path / "shm").mkdir()
    command = [sys.executable, "-c", WAIT, "serve", "--data-directory", str(tmp_path / "data"), *SMALL]
    with subprocess.Popen(
        [*command, "--arena-directory", str(tmp_path / "shm"), "--config", str(file)],
        env=without_settings(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "waits\n"
        file.write_text("max_sessions = 6\n")
        process.send_signal(signal.SIGHUP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert "ready" in process.stdout.readline()
        _, stderr = ended(process, signal.SIGTERM)

    assert "settings_reloaded changed=max_sessions" in stderr
    assert process.returncode == ExitCode.OK
