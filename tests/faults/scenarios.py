"""Faults that last: a device that hangs, no descriptors; `shortages.py` has more.

Each scenario lets a real server meet one, and says what it did that it must not. `syscalls.py` says how
servers are made. Worst case: a call that is not answered, which is a problem.
"""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import ctxcache
from ctxcache.errors import CacheError
from tests.faults.interposed import FOR_EVER, Interposer
from tests.faults.lifecycle import DEADLINE_S, Lifecycle
from tests.server_process import ServerProcess

Problem = Callable[[str], None]
QUICK_S = 5.0
"""Deadline of calls that no device is needed for: a bound against hanging, no measurement."""
LOG_LIMIT_BYTES = 64 << 10
"""The most that the log may grow in some seconds without descriptors: a line or two a second."""


def hanging_device(
    server: ServerProcess, faults: Interposer, ssd_files: Sequence[str], problem: Problem
) -> None:
    """While every write to SSD hangs, rows in memory are read and control calls are answered."""
    life = Lifecycle(problem)
    with ctxcache.connect(server.target, access="remote", timeout_s=QUICK_S) as client:
        life.create(client, "a")
        life.append(client, "a", 100, is_durable=True)
        life.create(client, "b")
        life.append(client, "b", 100, is_durable=False)
        faults.arm("write", ssd_files, first=1, times=FOR_EVER, is_waiting=True)
        with _flushing(server.target, "sessions/b", problem):
            _until(lambda: faults.hit_count > 0, problem, "no write reached the device")
            for _ in range(3):
                life.read(client, "a")
                life.read(client, "b")
                life.try_("stats", client.admin.stats)
                life.try_("health", client.admin.health)
            life.create(client, "c")
            faults.disarm()
        life.check_all(client)
    if life.refused_count:
        problem(f"{life.refused_count} calls were refused while a device hung")


def no_descriptors(server: ServerProcess, problem: Problem) -> None:
    """Without descriptors for new connections the old ones go on, and new ones come when there are some."""
    life = Lifecycle(problem)
    with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as client:
        life.create(client, "a")
        life.append(client, "a", 100, is_durable=True)
        taken = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1  # noqa: PTH208
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (taken, limits[1]))
        log_bytes = server.stderr_path.stat().st_size
        with ExitStack() as waiting, ctxcache.connect(server.target, access="remote", timeout_s=2.0) as other:
            for address in 8 * [server.target, *filter(None, [server.ready.get("metrics_address")])]:
                host, _, port = address.rpartition(":")
                waiting.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
            expect(CacheError, "a new connection", other.admin.stats, problem)
            life.read(client, "a")
            life.append(client, "a", 50, is_durable=True)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        if (log_bytes := server.stderr_path.stat().st_size - log_bytes) > LOG_LIMIT_BYTES:
            problem(f"{log_bytes} B of log in some seconds without descriptors")
        with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as other:
            life.check_all(other)


def expect(kind: type[CacheError], what: str, call: Callable[[], object], problem: Problem) -> None:
    """A call that must be refused so."""
    try:
        call()
    except kind:
        return
    except CacheError as error:
        problem(f"{what}: {error.reason}: {error}")
    else:
        problem(f"{what} was not refused")


# -- parts -----------------------------------------------------------------------------------------


@contextmanager
def _flushing(target: str, name: str, problem: Problem) -> Iterator[None]:
    def flush() -> None:
        try:
            with ctxcache.connect(target, access="remote", timeout_s=4 * DEADLINE_S) as client:
                client.sessions.open(name).flush()
        except CacheError as error:
            problem(f"the flush that waited: {error.reason}: {error}")

    thread = threading.Thread(target=flush)
    thread.start()
    yield
    thread.join()


def _until(is_so: Callable[[], bool], problem: Problem, what: str) -> None:
    ended_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > ended_s:
            problem(what)
            return
        time.sleep(0.01)
