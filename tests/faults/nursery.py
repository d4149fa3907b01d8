"""A nursery: servers forked from a process that has imported everything, so that a start costs no imports.

    with Nursery() as nursery:
        nursery.spawn(["bugs", "serve", ...], environment, stderr_path)

A forked server is a process like any other, with the same code after `main`; it belongs to whoever asked,
who waits for it and kills it. Linux only. Worst case: the nursery dies, cannot fork, or says nothing in time,
and `spawn` raises ChildProcessError.
"""

import array
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self, TextIO

from tests.server_process import Process, ServerProcess, without_settings

_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 1 << 20
SPAWN_TIMEOUT_S = 60.0
"""Longest wait for a fork, imports of the nursery included."""


class Forked:
    """See Process: a server that a nursery forked, adopted by this process."""

    def __init__(self, pid: int, stdout: TextIO) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, signal: int, /) -> None:
        """See Process."""
        if self.poll() is None:
            os.kill(self.pid, signal)

    def terminate(self) -> None:
        """See Process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Process."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code, when it has ended."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See Process."""
        if self.returncode is None:
            select.select([self._pidfd], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code


class Nursery:
    """The process that forks. A context manager. `environment` is added to its own, for libraries that load first."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.nursery", str(theirs.fileno())],
                env=without_settings(os.environ) | dict(environment or {}),
                pass_fds=[theirs.fileno()],
            )
        self._socket.settimeout(SPAWN_TIMEOUT_S)

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int
    ) -> int:
        """Fork a server that writes there; returns its process id. `arguments`: plants, then the command line."""
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        descriptors = array.array("i", [stdout, stderr])
        self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        try:
            answer = self._socket.recv(_REQUEST_BYTES)
        except TimeoutError as error:
            raise ChildProcessError(f"the nursery has not forked in {SPAWN_TIMEOUT_S:g} s") from error
        if not answer:
            raise ChildProcessError("the nursery is gone")
        if not answer.isdigit():
            raise ChildProcessError(f"the nursery cannot fork: {answer.decode()}")
        return int(answer)

    def close(self) -> None:
        """End it; servers live on."""
        self._socket.close()
        try:
            self._process.wait(SPAWN_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NurseryServer(ServerProcess):
    """A ServerProcess that a nursery forks, with `plants` in it."""

    def __init__(
        self,
        nursery: Nursery,
        data_directory: Path,
        *options: str,
        plants: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(data_directory, *options, environment=environment, program=[",".join(plants)])
        self._nursery = nursery

    def _spawn(self, stderr: TextIO) -> Process:
        begin, end = os.pipe()
        try:
            pid = self._nursery.spawn(self._command(), self._environment, end, stderr.fileno())
        finally:
            os.close(end)
        return Forked(pid, os.fdopen(begin))


def _serve_forks(asking: socket.socket) -> None:
    """Fork for every request until nobody asks any more."""
    while True:
        request, ancillary, _, _ = asking.recvmsg(_REQUEST_BYTES, socket.CMSG_LEN(2 * 4))
        if not request:
            return
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        asking.send(_fork_server(asking, json.loads(request), descriptors))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_server(asking: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> bytes:
    """Fork a server; its process id in digits, or why there is none.

    Forked twice: the process between ends at once, so that the asking process inherits the server as its child.
    """
    begin, end = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(begin)
        os.close(end)
        return str(error).encode()
    if between == 0:
        try:
            pid = os.fork()
            if pid == 0:
                asking.close()
                os.close(begin)
                os.close(end)
                _become_server(request, *descriptors)
            os.write(end, b"%d" % pid)
        except OSError as error:
            os.write(end, str(error).encode())
        finally:
            os._exit(0)
    # The only other writer is the process between: its end ends the read, whatever became of it.
    os.close(end)
    os.waitpid(between, 0)
    with os.fdopen(begin, "rb") as said:
        return said.read() or b"the process between ended"


def _become_server(request: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    from ctxcache.cli.main import main  # noqa: PLC0415  imported by now
    from tests.faults import planted  # noqa: PLC0415

    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    plants, *arguments = request["arguments"]
    sys.argv = ["ctxcache", *arguments]
    code = 1
    try:
        planted.plant_all(plants)
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  what an interpreter's end would have printed
        import traceback  # noqa: PLC0415

        traceback.print_exc()
    finally:
        # As an interpreter's end does: a log on a full disk is no failure of the server.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from ctxcache.cli import main  # noqa: F401
    from ctxcache.server import server  # noqa: F401  forked servers find it imported
    from tests.faults import plants  # noqa: F401

    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
