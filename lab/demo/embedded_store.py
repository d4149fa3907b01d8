"""A real `ctxcache serve` of the demo's own, in a process that can be killed and started again.

Knows the command line and the ready line, nothing of models. Worst case: the demo itself is killed
with SIGKILL; then the server stays behind, in a session of its own, until someone ends it.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.errors import CapacityExceeded, Unavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # shared memory is what it is for
_SPARE_BYTES = 64 << 20


class StoreDidNotStart(Unavailable):
    """The embedded store ended, or did not get ready in time; `problem` is what it said last."""

    # The product's advice for a store that cannot be reached does not fit a store of one's own.
    template = "the embedded store did not start: {problem}"


@dataclass(frozen=True, slots=True)
class Ready:
    """The ready line of a server. `ssd_io_mode` is `direct` or `buffered`."""

    pid: int
    target: str
    session_count: int
    ssd_io_mode: str


class EmbeddedStore:
    """One server over one data directory, and a client to it. Owned by one thread.

    After `kill`, `start` brings another process up on the same data; clients of the old one are closed.
    """

    def __init__(
        self,
        data_directory: Path,
        arena_directory: Path,
        *,
        size_bytes: int,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`options` of `ctxcache serve`, besides or in place of the demo's own."""
        self._options = dict(options or {})
        self._data_directory = data_directory
        self._arena_directory = arena_directory
        self._size_bytes = size_bytes
        self._log = arena_directory / "server.log"
        self._process: subprocess.Popen[str] | None = None
        self._client: Client | None = None
        self.ready = Ready(0, "", 0, "")

    @property
    def client(self) -> Client:
        """The client of the process that runs now."""
        if self._client is None:
            raise StoreDidNotStart(problem="it is not running")
        return self._client

    def start(self) -> Ready:
        """Start the server and wait until it listens. Raises StoreDidNotStart."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith("CTXCACHE_")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this very package's command line
                self._command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is for the demo, which then ends the server in order.
                start_new_session=True,
            )
        self.ready = self._wait_until_ready(self._process)
        self._client = ctxcache.connect(self.ready.target)
        return self.ready

    def send(self, number: int) -> None:
        """Send the server a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> int:
        """Kill the server with SIGKILL where it stands; its process id."""
        self._close_client()
        if self._process is None:
            raise StoreDidNotStart(problem="it is not running")
        os.kill(self._process.pid, signal.SIGKILL)
        self._reap(self._process)
        return self._process.pid

    def close(self) -> None:
        """End the server in order, or by force when it does not."""
        self._close_client()
        process = self._process
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        self._reap(process)

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.wait(STOP_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()

    def _command(self) -> list[str]:
        options = {
            "--data-directory": str(self._data_directory),
            "--listen": "127.0.0.1:0",
            "--arena-directory": str(self._arena_directory),
            "--arena-size-bytes": str(self._size_bytes),
            "--log-level": "warning",
            "--output": "json",
        }
        if not (self._data_directory / "ssd").exists():
            options["--ssd-size-bytes"] = str(self._size_bytes)
        given = [part for flag, text in (options | self._options).items() for part in (flag, text)]
        return [sys.executable, "-m", "ctxcache.cli.main", "serve", *given]

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> Ready:
        if process.stdout is None:
            raise StoreDidNotStart(problem="it has no standard output")
        can_read, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if can_read else ""
        if not line:
            raise StoreDidNotStart(problem=self._last_words())
        facts = json.loads(line)
        return Ready(
            pid=facts["pid"],
            target=facts["listen_addresses"][0],
            session_count=facts["session_count"],
            ssd_io_mode=facts["ssd"][0]["io_mode"],
        )

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it said nothing within {START_TIMEOUT_S:g} s"


@contextmanager
def embedded_store(size_bytes: int, data_directory: Path | None = None) -> Iterator[EmbeddedStore]:
    """Run a store with room for `size_bytes` in DRAM and as much on SSD, until the block ends.

    Its data is removed afterwards unless a `data_directory` is named. Raises StoreDidNotStart, and
    CapacityExceeded before anything is started where there is too little space.
    """
    with contextlib.ExitStack() as stack:
        data = data_directory or Path(stack.enter_context(_temporary(None)))
        data.mkdir(parents=True, exist_ok=True)
        require_room(data, size_bytes)
        arena = Path(stack.enter_context(_temporary(_arena_parent(data, size_bytes))))
        store = EmbeddedStore(data, arena, size_bytes=size_bytes)
        stack.callback(store.close)
        store.start()
        yield store


def require_room(directory: Path, size_bytes: int) -> None:
    """Raise CapacityExceeded unless the directory's filesystem can take `size_bytes` and a little more."""
    usage = shutil.disk_usage(directory)
    if usage.free < size_bytes + _SPARE_BYTES:
        raise CapacityExceeded(
            tier=str(directory),
            needed_bytes=size_bytes + _SPARE_BYTES,
            free_bytes=usage.free,
            limit_bytes=usage.total,
        )


def _arena_parent(data: Path, size_bytes: int) -> Path:
    """Return shared memory, or the data directory where a container has too little of it."""
    try:
        require_room(_SHARED_MEMORY, size_bytes)
    except (CapacityExceeded, FileNotFoundError):
        require_room(data, 2 * size_bytes)
        return data.parent
    return _SHARED_MEMORY


def _temporary(parent: Path | None) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="ctxcache-demo-", dir=parent, ignore_cleanup_errors=True)
