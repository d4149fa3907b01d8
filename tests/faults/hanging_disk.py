"""A disk that stops answering: a directory shown over FUSE, every request of which can be held.

    python -m tests.faults.hanging_disk MOUNT_POINT BACKING_DIRECTORY

`hang` on standard input: no request is answered from then on, as by a controller that has stopped. `answer`:
all of them are, late, and in any order. Worst case: its process ends; then whoever waits gets an error.
"""

# ruff: noqa: ARG002  # the signatures are mfusepy's
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mfusepy

MOUNT_TIMEOUT_S = 20.0


class Shown(mfusepy.Operations):  # type: ignore[misc]  # untyped package
    """The filesystem: requests are carried out in the backing directory."""

    use_ns = True

    def __init__(self, backing: str) -> None:
        self._backing = backing
        self._answers = threading.Event()
        self._answers.set()

    def obey(self) -> None:
        """Hang and answer when told to."""
        for line in sys.stdin:
            if line.strip() == "hang":
                self._answers.clear()
            else:
                self._answers.set()
            sys.stdout.write(line)
            sys.stdout.flush()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """See mfusepy."""
        found = os.lstat(self._at(path))
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
        facts: dict[str, Any] = {name: getattr(found, name) for name in names}
        return facts | {"st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}

    def readdir(self, path: str, fh: int) -> list[str]:
        """See mfusepy."""
        return [".", "..", *os.listdir(self._at(path))]  # noqa: PTH208

    def mkdir(self, path: str, mode: int) -> None:
        """See mfusepy."""
        Path(self._at(path)).mkdir(mode)

    def rmdir(self, path: str) -> None:
        """See mfusepy."""
        Path(self._at(path)).rmdir()

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        """See mfusepy."""
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        """See mfusepy. Whether it is direct is between the kernel and the caller."""
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """See mfusepy."""
        self._wait()
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """See mfusepy."""
        self._wait()
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """See mfusepy."""
        self._wait()
        os.fsync(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """See mfusepy."""
        os.truncate(self._at(path), length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        """See mfusepy."""
        os.posix_fallocate(fh, offset, length)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """See mfusepy."""
        Path(self._at(path)).chmod(mode)
        return 0

    def rename(self, old: str, new: str) -> int:
        """See mfusepy."""
        Path(self._at(old)).rename(self._at(new))
        return 0

    def unlink(self, path: str) -> int:
        """See mfusepy."""
        Path(self._at(path)).unlink()
        return 0

    def release(self, path: str, fh: int) -> int:
        """See mfusepy."""
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """See mfusepy."""
        found = os.statvfs(self._at(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def _at(self, path: str) -> str:
        self._wait()
        return self._backing + path

    def _wait(self) -> None:
        self._answers.wait()


class HangingDisk:
    """The disk as a harness has it. Its daemon is a process of its own."""

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
        [sys.executable, "-m", "tests.faults.hanging_disk", str(mount_point), str(backing)],
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


if __name__ == "__main__":
    shown_at, backed_by = sys.argv[1:]
    shown = Shown(backed_by)
    threading.Thread(target=shown.obey, daemon=True).start()
    mfusepy.FUSE(shown, shown_at, foreground=True, default_permissions=True)
