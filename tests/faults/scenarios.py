"""Faults that last: a device that hangs, no descriptors, a clock that jumps; `shortages.py` has more.

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
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import seconds
from ctxcache.errors import CacheError, SessionNotFound, WriteInProgress
from tests.cli.stored import HIDDEN
from tests.faults.harness import Unsupported
from tests.faults.interposed import FOR_EVER, Interposer
from tests.faults.lifecycle import DEADLINE_S, OWN, STREAMS, Lifecycle
from tests.faults.rows import rows_of
from tests.server_process import ServerProcess

Problem = Callable[[str], None]
CLOCK_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
JUMPS = ("+1h", "-1h", "+1d", "-1d")
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


def clock_jump(make: Callable[[], ServerProcess], clock: Path, jump: str, problem: Problem) -> None:
    """Deadlines of writers do not move with the wall clock, expiry does, and nobody comes back."""
    life = Lifecycle(problem)
    clock.write_text("+0\n")
    server = make()
    try:
        server.start()
        with ctxcache.connect(server.target, access="local", timeout_s=DEADLINE_S) as client:
            life.create(client, "kept", life_s=10 * 86400)
            life.append(client, "kept", 100, is_durable=True)
            life.create(client, "due", life_s=1800)
            is_forward = jump.startswith("+")
            _write_across(
                client, life, lambda: _set(clock, jump, client, 1 if is_forward else 2, problem), problem
            )
            _check_due(client, jump, problem)
        server.terminate()
        server.start()
        with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as client:
            life.read(client, "kept")
            _check_due(client, jump, problem)
            if is_forward:
                _set(clock, "+0", client, 1, problem)
                _check_due(client, jump, problem)
        server.terminate()
    finally:
        server.close()


def clock_environment(clock: Path) -> dict[str, str]:
    """The environment in which a server reads its wall clock from that file. Raises Unsupported."""
    if not CLOCK_LIBRARY.exists():
        raise Unsupported("there is no libfaketime; apt-get install faketime")
    return {
        "LD_PRELOAD": str(CLOCK_LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip


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


def _write_across(client: Client, life: Lifecycle, jump: Callable[[], None], problem: Problem) -> None:
    known = life.sessions["kept"]
    rows = {s: rows_of(known.owner, s, 100, 110, row_bytes) for s, row_bytes in STREAMS.items()}
    try:
        with (
            client.sessions.open("sessions/kept", OWN).read(),
            client.sessions.open("sessions/kept", OWN).writer(10) as writer,
        ):
            jump()
            if client.admin.stats().lease_count != 1:
                problem("a lease ended with the jump")
            expect(
                WriteInProgress,
                "a second writer",
                lambda: client.sessions.open("sessions/kept", OWN).writer(1),
                problem,
            )
            for stream, view in rows.items():
                writer.write(stream, 0, view)
            writer.commit()
            known.most = 110
    except CacheError as error:
        problem(f"a writer across the jump: {error.reason}: {error}")


def _set(clock: Path, jump: str, client: Client, left_count: int, problem: Problem) -> None:
    """Set the clock, and wait until upkeep has turned by it.

    It has when it has removed a session made behind the jump, so that `left_count` are left.
    """
    set_to = clock.with_suffix(".new")
    set_to.write_text(f"{jump}\n")
    set_to.replace(clock)
    client.sessions.create(OWN, id="mark", layout=[HIDDEN], ttl=seconds(1))
    _until(
        lambda: client.admin.stats().session_count == left_count,
        problem,
        f"upkeep does not turn after {jump}",
    )


def _check_due(client: Client, jump: str, problem: Problem) -> None:
    try:
        client.sessions.get("sessions/due")
        is_there = True
    except SessionNotFound:
        is_there = False
    if is_there == jump.startswith("+"):
        problem(f"after {jump} a session with half an hour to live is {'there' if is_there else 'gone'}")


@contextmanager
def _flushing(target: str, name: str, problem: Problem) -> Iterator[None]:
    def flush() -> None:
        try:
            with ctxcache.connect(target, access="remote", timeout_s=4 * DEADLINE_S) as client:
                client.sessions.flush(name)
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
