"""A disk with a volatile write cache: files over FUSE whose writes last only from the next fsync on.

    python -m tests.faults.cut_disk MOUNT_POINT SIZE_BYTES BACKING_FILE...

Each backing file is shown as `disk0`, `disk1`, ...; a loop device over one turns a filesystem's barriers
into fsyncs. `cut SEED` on standard input is the power cut: of all writes since each disk's last fsync some
reach the backing file, some in part, sector by sector, and some do not; from then on everything fails.
One line of JSON on standard output says what became of them. Worst case: a cache that has grown past
its limit, of which the oldest writes become durable, as on a real disk.
"""

# ruff: noqa: ARG002  # the signatures are mfusepy's
import errno
import json
import os
import random
import stat
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import mfusepy

SECTOR_BYTES = 512
CACHE_LIMIT_WRITES = 8192
DROPPED_RATIO, TORN_RATIO = 0.45, 0.25


@dataclass(slots=True)
class Disk:
    """One disk. `cache`: offset and bytes of writes since the last fsync, oldest first."""

    fd: int
    size_bytes: int
    cache: list[tuple[int, bytes]] = field(default_factory=list)

    def read(self, size_bytes: int, offset: int) -> bytes:
        """The bytes that were written last, durable or not."""
        data = bytearray(os.pread(self.fd, size_bytes, offset))
        for begin, written in self.cache:
            low, high = max(begin, offset), min(begin + len(written), offset + size_bytes)
            if low < high:
                data[low - offset : high - offset] = written[low - begin : high - begin]
        return bytes(data)

    def write(self, data: bytes, offset: int) -> None:
        """Cache a write."""
        self.cache.append((offset, data))
        if len(self.cache) > CACHE_LIMIT_WRITES:
            begin, written = self.cache.pop(0)
            os.pwrite(self.fd, written, begin)

    def sync(self) -> None:
        """Make every write durable."""
        for begin, written in self.cache:
            os.pwrite(self.fd, written, begin)
        self.cache.clear()

    def cut(self, rng: random.Random) -> dict[str, int]:
        """Let some cached writes become durable, whole or in part, and lose the others."""
        counts = {"kept": 0, "torn": 0, "dropped": 0}
        for begin, written in self.cache:
            fate = rng.random()
            if fate < DROPPED_RATIO:
                counts["dropped"] += 1
            elif fate < DROPPED_RATIO + TORN_RATIO and len(written) > SECTOR_BYTES:
                counts["torn"] += 1
                for i in range(0, len(written), SECTOR_BYTES):
                    if rng.random() < 0.5:
                        os.pwrite(self.fd, written[i : i + SECTOR_BYTES], begin + i)
            else:
                counts["kept"] += 1
                os.pwrite(self.fd, written, begin)
        self.cache.clear()
        return counts


class Disks(mfusepy.Operations):  # type: ignore[misc]  # untyped package
    """The filesystem that shows them."""

    use_ns = True

    def __init__(self, backing: list[str], size_bytes: int) -> None:
        self._lock = threading.Lock()
        self._is_cut = False
        self._disks = {}
        for i, path in enumerate(backing):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, size_bytes)
            self._disks[f"/disk{i}"] = Disk(fd, size_bytes)

    def obey(self) -> None:
        """Cut the power when told to."""
        for line in sys.stdin:
            _, seed = line.split()
            rng = random.Random(int(seed))
            with self._lock:
                self._is_cut = True
                counts = [disk.cut(rng) for disk in self._disks.values()]
            total = {name: sum(count[name] for count in counts) for name in counts[0]}
            sys.stdout.write(json.dumps(total) + "\n")
            sys.stdout.flush()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """See mfusepy."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": self._disk(path).size_bytes}

    def readdir(self, path: str, fh: int) -> list[str]:
        """See mfusepy."""
        return [".", "..", *(name[1:] for name in self._disks)]

    def open(self, path: str, flags: int) -> int:
        """See mfusepy."""
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """See mfusepy."""
        with self._lock:
            return self._living(path).read(size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """See mfusepy."""
        with self._lock:
            self._living(path).write(bytes(data), offset)
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """See mfusepy."""
        with self._lock:
            self._living(path).sync()
        return 0

    def flush(self, path: str, fh: int) -> int:
        """See mfusepy. Closing a file makes nothing durable."""
        return 0

    def _disk(self, path: str) -> Disk:
        if path not in self._disks:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return self._disks[path]

    def _living(self, path: str) -> Disk:
        if self._is_cut:
            raise mfusepy.FuseOSError(errno.EIO)
        return self._disk(path)


if __name__ == "__main__":
    mount_point, size, *files = sys.argv[1:]
    disks = Disks(files, int(size))
    threading.Thread(target=disks.obey, daemon=True).start()
    mfusepy.FUSE(disks, mount_point, foreground=True, nothreads=True)
