"""A disk that stops answering, as a harness has it: a directory shown over FUSE by a process of its own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOUNT_TIMEOUT_S = 20.0


class HangingDisk:
    """The disk. `daemon`: the process that shows it."""

    def __init__(self, daemon: subprocess.Popen[str]) -> None:
        self._daemon = daemon

    def tell(self, what: str) -> None:
        """`hang` or `answer`; it does from then on."""
        if self._daemon.stdin is None or self._daemon.stdout is None:
            raise RuntimeError("its standard streams are pipes, always")
        self._daemon.stdin.write(what + "\n")
        self._daemon.stdin.flush()
        self._daemon.stdout.readline()


def why_not() -> str:
    """Why there can be no such disk here; empty where there can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there, or not for this user"
    return "" if shutil.which("fusermount3") else "fusermount3 not found: apt-get install fuse3"


@contextmanager
def hanging_disk(mount_point: Path, backing: Path) -> Iterator[HangingDisk]:
    """Show `backing` at `mount_point`; at the end it answers, and is unmounted."""
    for path in (mount_point, backing):
        path.mkdir(mode=0o700)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.shown_directory", str(mount_point), str(backing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + MOUNT_TIMEOUT_S
        while not mount_point.is_mount():
            if time.monotonic() > deadline_s or daemon.poll() is not None:
                raise TimeoutError(f"{mount_point} is not mounted after {MOUNT_TIMEOUT_S} s")
            time.sleep(0.01)
        yield (disk := HangingDisk(daemon))
        disk.tell("answer")
    finally:
        # The kernel answers all that it owes with an error, and lets the mount go.
        daemon.kill()
        daemon.wait()
        for stream in (daemon.stdin, daemon.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        subprocess.run(["fusermount3", "-u", "-z", str(mount_point)], check=False)
