"""A nursery: processes forked from one that has imported everything, so that a start costs no imports.

    forked = shared().start(Entry("ctxcache.cli.main:main"), ["version"], environment, stdout=fd, stderr=fd)
    forked.wait()

A forked process is a process like any other: it has a process id, arguments, an environment, a working
directory, a file mode mask, three standard files and an exit code of its own. It differs from one that was
started anew in two ways. Its modules are imported already, and `/proc/PID/cmdline` names the nursery.
Tests of imports, of entry points and of interpreters' ends therefore start processes anew.

    test ── request, files ──►  nursery ── fork ──►  process
      ▲                            │  waits for it       │
      └──────── exit code ─────────┘ ◄────── ends ───────┘

Linux only. Worst case: the nursery dies, cannot fork, or says nothing in time, and `start` raises
ChildProcessError.
"""

import array
import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self, TextIO

ROOT = Path(__file__).parents[1]
_REQUEST_BYTES = 1 << 20
_FILES = 4
"""Standard input, output and error, and where the exit code goes."""
START_TIMEOUT_S = 300.0
"""Longest wait for a fork, imports of the nursery included."""
STORE = (
    "ctxcache.cli",
    "ctxcache.client",
    "ctxcache.archive",
    "ctxcache.server.lifecycle",
    "ctxcache.server.server",
)
"""Imported by the shared nursery; of a package, its modules too."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a forked process begins: `module:function`, called without arguments.

    `words` stand before the other arguments in `sys.argv`.
    """

    name: str = "ctxcache.cli.main:main"
    words: tuple[str, ...] = ()


class Forked:
    """A process that a nursery forked; `subprocess.Popen` has the same methods."""

    def __init__(self, pid: int, ending: int, stdout: TextIO | None) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._ending = ending
        self._turn = threading.Lock()

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        # The nursery may have reaped it a moment before its ending is heard of here.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code, when it has ended."""
        with self._turn:
            if self.returncode is None and select.select([self._ending], [], [], 0)[0]:
                said = os.read(self._ending, 32)
                os.close(self._ending)
                # A nursery that is gone cannot say how the process ended.
                self.returncode = int(said) if said else -signal.SIGKILL
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code. Raises subprocess.TimeoutExpired."""
        if (code := self.poll()) is None:
            # Another thread that waits may read and close it meanwhile.
            with suppress(OSError, ValueError):
                select.select([self._ending], [], [], timeout)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code


class Nursery:
    """The process that forks. A context manager.

    `modules` are imported before anything is forked. `environment` is the nursery's own, for libraries that
    load before all others.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), *modules],
                cwd=ROOT,
                # gRPC reads this when it is imported, and the command line sets it before that.
                env=without_settings(os.environ) | {"GRPC_VERBOSITY": "NONE"} | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket.settimeout(START_TIMEOUT_S)

    def start(
        self,
        entry: Entry,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int,
    ) -> Forked:
        """Fork a process. `stdin` is empty unless given; `stdout` is a pipe unless given.

        Raises ChildProcessError.
        """
        request = {
            "entry": entry.name,
            "arguments": [*entry.words, *arguments],
            "environment": dict(environment),
            "directory": str(Path.cwd()),
            "mask": _mask(),
        }
        begin, end = (None, None) if stdout is not None else os.pipe()
        ending, ended = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = [nothing if stdin is None else stdin, end if stdout is None else stdout, stderr, ended]
        try:
            pid = self._ask(request, [file for file in files if file is not None])
        except BaseException:
            os.close(ending)
            if begin is not None:
                os.close(begin)
            raise
        finally:
            for file in (nothing, end, ended):
                if file is not None:
                    os.close(file)
        return Forked(pid, ending, None if begin is None else os.fdopen(begin))

    def close(self) -> None:
        """End it; what it forked lives on."""
        self._socket.close()
        try:
            self._process.wait(START_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        descriptors = array.array("i", files)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        try:
            self._socket.sendmsg([json.dumps(request).encode()], rights)
            answer = self._socket.recv(_REQUEST_BYTES)
        except TimeoutError as error:
            raise ChildProcessError(f"the nursery has not forked in {START_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ChildProcessError(f"the nursery is gone: {error}") from error
        if not answer:
            raise ChildProcessError("the nursery is gone")
        if not answer.isdigit():
            raise ChildProcessError(f"the nursery cannot fork: {answer.decode()}")
        return int(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def shared() -> Nursery:
    """The nursery of this test process, which has the whole store imported."""
    nursery = Nursery(STORE)
    atexit.register(nursery.close)
    return nursery


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without CTXCACHE_ variables, which would be settings."""
    return {name: value for name, value in environment.items() if not name.startswith("CTXCACHE_")}


def _mask() -> int:
    """The file mode mask of this process, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _serve_forks(asking: socket.socket) -> None:
    """Fork for every request until nobody asks any more, and say of each process how it ended."""
    # Ctrl-C at a terminal is for the tests; they end what they started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(asking, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                _say_end(descriptor, *running.pop(descriptor))
            elif not (asked := _next_request(asking)):
                return
            else:
                request, files = asked
                try:
                    pid = _fork(asking, request, files, running)
                except OSError as error:
                    asking.send(str(error).encode())
                    for file in files:
                        os.close(file)
                    continue
                for file in files[:-1]:
                    os.close(file)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = (pid, files[-1])
                poll.register(pidfd, select.POLLIN)
                asking.send(b"%d" % pid)


def _next_request(asking: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    data, ancillary, _, _ = asking.recvmsg(_REQUEST_BYTES, socket.CMSG_LEN(4 * _FILES))
    if not data:
        return None
    files = array.array("i")
    for _, _, rights in ancillary:
        files.frombytes(rights)
    return json.loads(data), list(files)


def _say_end(pidfd: int, pid: int, ending: int) -> None:
    _, status = os.waitpid(pid, 0)
    # A test that is over no longer reads.
    with suppress(BrokenPipeError):
        os.write(ending, b"%d" % os.waitstatus_to_exitcode(status))
    os.close(ending)
    os.close(pidfd)


def _fork(
    asking: socket.socket,
    request: dict[str, Any],
    files: Sequence[int],
    running: Mapping[int, tuple[int, int]],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        asking.close()
        # The ends of others' pipes: a copy here would outlive them.
        for pidfd, (_, ending) in running.items():
            os.close(pidfd)
            os.close(ending)
        *standard, ending = files
        os.close(ending)
        for number, file in enumerate(standard):
            os.dup2(file, number)
            os.close(file)
        _become(request)
    finally:
        os._exit(70)


def _become(request: dict[str, Any]) -> NoReturn:
    """Be what an interpreter is that was started with these arguments, and end as it would."""
    os.umask(request["mask"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["ctxcache", *request["arguments"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    code = 1
    try:
        module, _, function = request["entry"].partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001  what an interpreter's end would have printed
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads, as an interpreter's end does
    # A log on a full disk changes nothing of how a process ends.
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    os._exit(code)


def _import(name: str) -> None:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        _import(wanted)
    # Collections in forked processes leave these pages as they are, and so shared.
    gc.collect()
    gc.freeze()
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
