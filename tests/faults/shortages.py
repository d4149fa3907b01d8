"""Shortages: a small disk that is full to its last byte, and memory that is refused.

The shortages are real: ext4 on a small loop device, and a bound on the process's address space.
`syscalls.py` says how servers are made. Worst case: a machine that lets nobody mount, which
is Unsupported; without loop devices the small filesystem is a tmpfs.
"""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.errors import CapacityExceeded, DeadlineExceeded, TooManyRequests, Unavailable
from tests.faults.endings import check_refusal, stop
from tests.faults.harness import Unsupported
from tests.faults.lifecycle import DEADLINE_S, OWN, Lifecycle
from tests.faults.scenarios import expect
from tests.server_process import ServerDidNotStart, ServerProcess

DISK_BYTES = 96 << 20
CROWDED_BYTES = 8 << 20
"""Left free where records may not grow.

Less than the server keeps for itself, more than it needs to go on.
"""
FULL_BYTES = 2 << 20
"""Too little for the SSD files."""
START_LIMITS_BYTES = (1 << 30, 3 << 30)
MANY_TOKENS, CLIENTS = 20_000, 6
STARVED_DEADLINE_S = 4.0
"""The longest wait of a caller of a server without memory: here no longer than this."""


@contextmanager
def small_disk(directory: Path, image: Path) -> Iterator[str]:
    """A filesystem of 96 MiB at a directory: its type, ext4 or tmpfs.

    Raises Unsupported where we may not mount.
    """
    directory.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    make = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    mount = ["mount", "-o", "loop", str(image), str(directory)]
    mount_tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    is_ext4 = _has_run(make) and _has_run(mount)
    if not is_ext4 and not _has_run(mount_tmpfs):
        raise Unsupported("this user may mount neither ext4 nor a tmpfs")
    try:
        yield "ext4" if is_ext4 else "tmpfs"
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)


def full_disk(make: Callable[[], ServerProcess], ballast: Path, problems: list[str]) -> None:
    """All of a server on one full disk.

    Calls that need room are refused by name, the others go on, and room helps at once.
    """
    life = Lifecycle(problems.append)
    _fill(ballast, FULL_BYTES)
    _check_no_start(make(), problems)
    ballast.unlink()
    with make() as server:
        with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as client:
            _be_crowded(client, life, ballast, problems)
            if life.refused_count:
                problems.append(f"{life.refused_count} calls were refused that need no room")
            # Now there is not a byte, and what fails does so by itself.
            _fill(ballast, 0)
            life.append(client, "a", 200, is_durable=True)
            life.truncate(client, "b", 20)
            life.delete(client, "c")
            life.read(client, "a")
        stop(server, problems, is_faulty=True)
    ballast.unlink()
    with make() as server:
        life.verify(server.target)
        stop(server, problems, is_faulty=False)


def refused_memory(
    make: Callable[[], ServerProcess], bounded: Callable[[int], ServerProcess], problems: list[str]
) -> None:
    """Without address space a start ends with a sentence.

    In service what was acknowledged outlives the end.
    """
    for limit_bytes in START_LIMITS_BYTES:
        _check_no_start(bounded(limit_bytes), problems)
    life = Lifecycle(problems.append)
    with make() as server:
        with ctxcache.connect(server.target, access="remote", timeout_s=DEADLINE_S) as client:
            life.create(client, "a")
            life.append(client, "a", 100, is_durable=True)
        now_bytes = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(server.pid, resource.RLIMIT_AS, (now_bytes, resource.RLIM_INFINITY))
        starved = Lifecycle(problems.append, refusals=(Unavailable, DeadlineExceeded, TooManyRequests))
        starved.sessions = life.sessions
        for _ in range(CLIENTS):
            with ctxcache.connect(server.target, access="remote", timeout_s=STARVED_DEADLINE_S) as client:
                starved.append(client, "a", MANY_TOKENS, is_durable=True)
                starved.read(client, "a")
        if server.wait(0) is None:
            resource.prlimit(server.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            life.verify(server.target)
    with make() as server:
        life.verify(server.target)
        if code := server.terminate():
            problems.append(f"afterwards it ends with exit code {code}")


# -- parts -----------------------------------------------------------------------------------------


def _be_crowded(client: Client, life: Lifecycle, ballast: Path, problems: list[str]) -> None:
    for name in ("a", "b", "c", "d"):
        life.create(client, name)
        life.append(client, name, 100, is_durable=True)
    life.append(client, "a", 30, is_durable=False)
    _fill(ballast, CROWDED_BYTES)
    for what, call in (
        ("create", lambda: client.sessions.create(OWN, id="x")),
        ("fork", lambda: client.sessions.open("sessions/a").fork(id="y")),
        ("flush", lambda: client.sessions.open("sessions/a").flush()),
    ):
        expect(CapacityExceeded, what, call, problems.append)
    life.append(client, "a", 50, is_durable=False)
    life.read(client, "a")
    life.truncate(client, "b", 64)
    life.delete(client, "d")
    ballast.unlink()
    life.create(client, "e")
    life.append(client, "e", 100, is_durable=True)
    life.append(client, "a", 10, is_durable=True)
    life.check_all(client)


def _check_no_start(server: ServerProcess, problems: list[str]) -> None:
    try:
        server.start()
    except ServerDidNotStart as error:
        check_refusal(error, problems)
    else:
        problems.append("it starts without room")
    finally:
        server.close()


def _fill(ballast: Path, left_bytes: int) -> None:
    """Take all room but so much."""
    with ballast.open("ab") as file:
        space = os.fstatvfs(file.fileno())
        taken_bytes = max(0, space.f_bavail * space.f_frsize - left_bytes)
        # Without its own blocks' blocks, which the filesystem takes besides.
        os.posix_fallocate(file.fileno(), file.tell(), max(4096, taken_bytes - (1 << 20)))
        if not left_bytes:
            _fill_up(file.fileno())


def _fill_up(fd: int) -> None:
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        return


def _has_run(command: list[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
