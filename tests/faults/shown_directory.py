"""A directory shown over FUSE, every request of which can be held. Needs libfuse to be imported.

    python -m tests.faults.shown_directory MOUNT_POINT BACKING_DIRECTORY

`hang` on standard input: no request is answered from then on, as by a controller that has stopped. `answer`:
all of them are, late, and in any order. Worst case: its process ends; then whoever waits gets an error.
"""

# ruff: noqa: ARG002  # the signatures are mfusepy's
import os
import sys
import threading
from pathlib import Path
from typing import Any

import mfusepy


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


if __name__ == "__main__":
    shown_at, backed_by = sys.argv[1:]
    shown = Shown(backed_by)
    threading.Thread(target=shown.obey, daemon=True).start()
    mfusepy.FUSE(shown, shown_at, foreground=True, default_permissions=True)
