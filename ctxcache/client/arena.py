"""The arena as this process sees it: a file of shared memory, mapped after it proved to be the one.

Knows no lease. The mapping lives as long as any view of it, so that a server's restart never takes
memory away under a reader. Worst case: the file is not the server's, and bytes travel by stream.
"""

import mmap
import os
import stat
import threading

import numpy as np
import numpy.typing as npt

from ctxcache.v1 import arena_pb2

Bytes = npt.NDArray[np.uint8]

_ID_BYTES = 16


class MappedArena:
    """A mapped arena. `readable` is a read-only [size_bytes] array of its bytes."""

    def __init__(self, arena: arena_pb2.Arena, readable: Bytes) -> None:
        self._arena = arena
        self.readable = readable
        self._lock = threading.Lock()
        self._writable: Bytes | None = None

    @property
    def arena_id(self) -> bytes:
        """What tells this arena from those of other servers and earlier runs."""
        return self._arena.arena_id

    def writable(self) -> Bytes | None:
        """Map the arena for writing on first use; None where we may only read."""
        with self._lock:
            if self._writable is None:
                self._writable = _map(self._arena, os.O_RDWR)
            return self._writable


def map_arena(arena: arena_pb2.Arena) -> MappedArena | None:
    """Map the server's arena; None when its path is not, on this host, that very arena."""
    readable = _map(arena, os.O_RDONLY)
    return None if readable is None else MappedArena(arena, readable)


def _map(arena: arena_pb2.Arena, access: int) -> Bytes | None:
    if not arena.path or len(arena.arena_id) != _ID_BYTES:
        return None
    try:
        # Without O_NONBLOCK a FIFO under that name would block us for ever.
        fd = os.open(arena.path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _map_file(fd, arena, access)
    finally:
        os.close(fd)


def _map_file(fd: int, arena: arena_pb2.Arena, access: int) -> Bytes | None:
    status = os.fstat(fd)
    if not _is_trusted(status) or status.st_size != arena.size_bytes or status.st_size < _ID_BYTES:
        return None
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == os.O_RDWR else 0)
    try:
        mapping = mmap.mmap(fd, arena.size_bytes, mmap.MAP_SHARED, protection)
    except (OSError, ValueError):
        return None
    return np.frombuffer(mapping, np.uint8) if mapping[:_ID_BYTES] == arena.arena_id else None


def _is_trusted(status: os.stat_result) -> bool:
    # Ours, the system's, or meant for everyone: a file that someone else shares with us alone is not
    # what a server of this host creates.
    is_known_owner = status.st_uid in (0, os.geteuid())
    return stat.S_ISREG(status.st_mode) and (is_known_owner or bool(status.st_mode & stat.S_IROTH))
