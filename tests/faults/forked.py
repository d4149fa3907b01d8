"""Servers forked from a process that has imported everything: see `zygote.py`.

Worst case: a server that neither starts nor ends, which waits say like `subprocess` does.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from tests.server_process import START_TIMEOUT_S, ServerDidNotStart, ServerProcess, without_settings


class Zygote:
    """Forks servers. A context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            env=without_settings(os.environ) | dict(environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the zygote did not start")

    def fork(self, arguments: Sequence[str], stderr: Path, plants: str) -> "Forked":
        """Start a server with these arguments of `ctxcache`."""
        assert self._process.stdin is not None
        directory = Path(tempfile.mkdtemp(prefix="ctxcache-forked-"))
        os.mkfifo(directory / "stdout")
        os.mkfifo(directory / "status")
        stderr.touch()
        # Opened before the other side is: neither then waits for the other.
        stdout = os.fdopen(os.open(directory / "stdout", os.O_RDWR))
        status = os.fdopen(os.open(directory / "status", os.O_RDWR), "rb", buffering=0)
        asked = {
            "arguments": arguments, "stdout": str(directory / "stdout"), "stderr": str(stderr),
            "status": str(directory / "status"), "plants": plants,
        }  # fmt: skip
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Forked(directory, stdout, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()


class Forked:
    """What `ServerProcess` needs of a `subprocess.Popen`."""

    def __init__(self, directory: Path, stdout: IO[str], status: IO[bytes]) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self.status = status
        self.pid = int(status.readline())
        self._directory = directory

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            can_read, _, _ = select.select([self.status], [], [], timeout_s)
            if not can_read:
                raise subprocess.TimeoutExpired("ctxcache", timeout_s)
            self.returncode = int(self.status.readline())
            self.status.close()
            shutil.rmtree(self._directory)
        return self.returncode

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkedServer(ServerProcess):
    """A ServerProcess whose process is forked."""

    def __init__(self, zygote: Zygote, data_directory: Path, *options: str, plants: str = "") -> None:
        super().__init__(data_directory, *options, program=())
        self._zygote = zygote
        self._plants = plants

    def start(self) -> Self:
        """See ServerProcess."""
        self._process = self._zygote.fork(self._command(), self.stderr_path, self._plants)  # type: ignore[assignment]
        self.ready = self._read_ready_line()
        self._listen = self.target
        return self

    def _read_ready_line(self) -> dict[str, Any]:
        # Both sides of its pipe are ours, so its end does not show there.
        forked = cast("Forked", self._process)
        pipes: list[IO[Any]] = [forked.stdout, forked.status]
        can_read, _, _ = select.select(pipes, [], [], START_TIMEOUT_S)
        if forked.stdout in can_read:
            return super()._read_ready_line()
        if can_read:
            forked.wait(START_TIMEOUT_S)
        raise ServerDidNotStart(forked.returncode, self.stderr)
