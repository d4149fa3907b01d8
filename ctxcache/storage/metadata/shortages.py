"""Shortages: room, inodes, descriptors and memory that the database needs, and whether they are back.

RocksDB that runs into a full disk cannot be trusted to go on, so that growth is refused before. Knows no
record. Worst case: a filesystem whose server hangs; its last figures are used while it does not answer.
"""

import errno
import os
import tempfile
from concurrent.futures import Future, wait
from pathlib import Path

from ctxcache.errors import CapacityExceeded, DataDirectoryUnusable
from ctxcache.runtime.mounts import mount_of
from ctxcache.storage.device_threads import Threads
from ctxcache.storage.metadata.reading import MEMTABLE_BYTES

ROOM_BYTES = 2 * MEMTABLE_BYTES
"""Free bytes of the filesystem below which nothing that grows is taken: turning the log into tables may need
so many at a time."""
ROOM_INODES = 32
"""With fewer free inodes no growth is taken, where the filesystem counts them."""
OPENING_BYTES = 1 << 20
"""Free bytes that an opening for writing takes, besides those of tables as large as the log."""
OPENING_INODES = 16
SPARE_DESCRIPTORS = 16
"""Descriptors that are free when a database that rests is opened again."""
REMOTE_FILESYSTEMS = ("fuse", "nfs", "cifs", "smb", "ceph", "9p", "gluster", "lustre")
"""Kinds whose `statvfs` asks another process or machine, and may hang; the kernel answers for the others."""
SPACE_PATIENCE_S = 0.05
"""How long the loop waits for the answer of such a filesystem, once per question."""
# RocksDB has no error numbers to offer, so that its sentences are compared with the system's words.
_LACKING = tuple(
    os.strerror(number)
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN)
)


class Room:
    """The free room of the filesystem that has the database. Used by one thread."""

    def __init__(self, path: str, beside: Threads) -> None:
        """`beside`: asks a remote filesystem."""
        self._path, self._beside = path, beside
        self._is_remote = mount_of(path).kind.startswith(REMOTE_FILESYSTEMS)
        self._asked: Future[None] | None = None
        self._look()

    def check(self) -> None:
        """Raise CapacityExceeded where there is too little for growth. One statvfs."""
        # The local kernel answers at once. A remote filesystem may hang, so that it is asked in a thread, and
        # not again while it owes an answer.
        if not self._is_remote:
            self._look()
        elif self._asked is None or self._asked.done():
            self._asked = self._beside.submit(self._look)
            wait([self._asked], SPACE_PATIENCE_S)
        _check_room(self._path, self._space, ROOM_BYTES, ROOM_INODES)

    def _look(self) -> None:
        self._space = os.statvfs(self._path)


def has_what_lacked(path: str) -> bool:
    """Whether a database that rests has descriptors, room and inodes again."""
    spare: list[int] = []
    try:
        # Files are really made: only that tells whether descriptors, inodes and quotas suffice.
        for _ in range(SPARE_DESCRIPTORS):
            descriptor, name = tempfile.mkstemp(prefix="spare.", dir=Path(path).parent)
            spare.append(descriptor)
            Path(name).unlink()
        _check_room(path, os.statvfs(path), ROOM_BYTES, ROOM_INODES)
    except (OSError, CapacityExceeded):
        return False
    finally:
        for descriptor in spare:
            os.close(descriptor)
    return True


def _check_room(path: str, space: os.statvfs_result, needed_bytes: int, needed_inodes: int) -> None:
    """Raise CapacityExceeded where the filesystem of the database has less."""
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < needed_bytes:
        raise CapacityExceeded(
            tier=f"metadata {path}",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            limit_bytes=space.f_blocks * space.f_frsize,
        )
    # Some filesystems count no inodes, and say 0 of 0.
    if space.f_files and space.f_favail < needed_inodes:
        raise CapacityExceeded(
            tier=f"inodes of metadata {path}",
            needed_bytes=needed_inodes,
            free_bytes=space.f_favail,
            limit_bytes=space.f_files,
        )


def check_room_to_open(path: Path) -> None:
    """Raise CapacityExceeded where an opening for writing could run out of room half way.

    Raises DataDirectoryUnusable where that cannot be known.
    """
    try:
        log_bytes, space = sum(log.stat().st_size for log in path.glob("*.log")), os.statvfs(path)
    except OSError as error:
        raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error
    _check_room(str(path), space, log_bytes + OPENING_BYTES, OPENING_INODES)


def is_passing(said: str) -> bool:
    """Whether RocksDB's sentence, without the path, tells of a lack that passes.

    That is never so for a sync, which may lose bytes.
    """
    # A failed sync never passes: the lost bytes are not known.
    return "sync" not in said.lower() and any(lack in said for lack in _LACKING)
