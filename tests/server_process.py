"""A real server in a process of its own: `ctxcache serve`.

The process is forked by a nursery, which saves the imports of each start, or started anew as an operator
does.

Worst case: it does not start, which is a ServerDidNotStart with its exit code and what it said.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, TextIO

from tests.nursery import Entry, Nursery, shared, without_settings

ARENA_SIZE_BYTES = 64 << 20
SSD_SIZE_BYTES = 64 << 20
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60
COMMAND_LINE = (sys.executable, "-m", "ctxcache.cli.main")
"""The program as an operator starts it."""
FORKED = Entry()
"""The same, forked by a nursery."""


class ServerDidNotStart(Exception):
    """The process ended, or said nothing in time. `returncode` is None when it was still there."""

    def __init__(self, returncode: int | None, stderr: str) -> None:
        super().__init__(f"exit code {returncode}: {stderr}")
        self.returncode = returncode
        self.stderr = stderr


class Process(Protocol):
    """The needed part of a running server; `subprocess.Popen` is one."""

    pid: int
    stdout: IO[str] | None
    returncode: Any

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code. Raises subprocess.TimeoutExpired."""


def write_secret(path: Path, text: str) -> None:
    """Write a file that is for this user alone, as a token or a key has to be."""
    path.touch(0o600)
    path.write_text(text)


class ServerProcess:
    """A server over `data_directory`, on a free port that it keeps across restarts.

    `options` are added to the command line and win over the defaults given here. As a context manager it
    starts on entry; on exit it is killed if it still runs, and its arena removed. `program` is what runs in
    the place of `ctxcache`: a command that is started anew, or what `nursery` forks, by default the nursery
    of this test process. Under a `wrapper`, such as `prlimit`, the program is started anew.
    """

    def __init__(
        self,
        data_directory: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        program: Sequence[str] | Entry = FORKED,
        nursery: Nursery | None = None,
    ) -> None:
        self.data_directory = data_directory
        self.stderr_path = data_directory.with_name(data_directory.name + ".stderr")
        self.ready: dict[str, Any] = {}
        self._options = options
        self._environment = without_settings(os.environ) | dict(environment or {})
        self._wrapper = wrapper
        self._program = COMMAND_LINE if wrapper and program is FORKED else program
        self._nursery = nursery
        self._listen = "127.0.0.1:0"
        self._process: Process | None = None

    @property
    def target(self) -> str:
        """Its TCP address as a gRPC target."""
        return str(
            next(address for address in self.ready["listen_addresses"] if not address.startswith("unix:"))
        )

    @property
    def unix_target(self) -> str:
        """Its Unix socket as a gRPC target."""
        return str(next(address for address in self.ready["listen_addresses"] if address.startswith("unix:")))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    @property
    def stderr(self) -> str:
        """All that it, and those before it on this data directory, wrote to standard error."""
        return self.stderr_path.read_text() if self.stderr_path.exists() else ""

    def start(self) -> Self:
        """Start it, or start it again, and wait until it listens. Raises ServerDidNotStart."""
        with self.stderr_path.open("a") as stderr:
            self._process = self._spawn(stderr)
        self.ready = self._read_ready_line()
        self._listen = self.target
        return self

    def terminate(self) -> int:
        """Ask it to drain and end (SIGTERM), wait, return its exit code."""
        process = self._running()
        process.terminate()
        return process.wait(STOP_TIMEOUT_S)

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended gets none."""
        self._running().send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; its exit code, or None when it still runs by then."""
        try:
            return self._running().wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill9(self) -> None:
        """Kill it where it stands, and wait until it is gone."""
        process = self._running()
        process.kill()
        process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Kill it if it runs, and remove the arena that a killed server leaves."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            if self._process.stdout is not None:
                self._process.stdout.close()
        with contextlib.suppress(FileNotFoundError, KeyError):
            Path(self.ready["arena"]["path"]).unlink()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, stderr: TextIO) -> Process:
        if isinstance(self._program, Entry):
            nursery = self._nursery or shared()
            return nursery.start(self._program, self._arguments(), self._environment, stderr=stderr.fileno())
        command = [*self._wrapper, *self._program, *self._arguments()]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    def _arguments(self) -> list[str]:
        defaults = {
            "--data-directory": str(self.data_directory),
            "--listen": self._listen,
            "--arena-size-bytes": str(ARENA_SIZE_BYTES),
            # Whatever the machine has reserved is not for tests that do not ask for it.
            "--arena-huge-pages": "off",
            "--ssd-size-bytes": str(SSD_SIZE_BYTES),
            "--output": "json",
        }
        given = [
            part for flag, value in defaults.items() if flag not in self._options for part in (flag, value)
        ]
        return ["serve", *given, *self._options]

    def _read_ready_line(self) -> dict[str, Any]:
        process = self._running()
        if process.stdout is None:
            raise RuntimeError("standard output is a pipe, always")
        can_read, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if can_read else ""
        if line:
            ready: dict[str, Any] = json.loads(line)
            return ready
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S if can_read else 0)
        raise ServerDidNotStart(process.returncode, self.stderr)

    def _running(self) -> Process:
        if self._process is None:
            raise RuntimeError("the server was never started")
        return self._process
