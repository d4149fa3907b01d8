"""The arena as this process sees it: shared memory, mapped after it proved to be the one.

Knows no lease. A mapping lives as long as any view of it, so that a server's restart never takes
memory away under a reader. Worst case: the memory is not the server's, and bytes travel by stream.
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from ctxcache.client.ssd_files import SsdReader
from ctxcache.runtime.memory import Populate
from ctxcache.v1 import arena_pb2

Bytes = npt.NDArray[np.uint8]
_Open = Callable[[int], AbstractContextManager[int]]

_ID_BYTES = 16


class MappedArena:
    """A mapped arena. `readable` is a read-only [size_bytes] array of its bytes.

    Both mappings are populated in the background: a first touch costs up to three times a later one.
    """

    def __init__(self, arena: arena_pb2.Arena, readable: Bytes, opened: _Open) -> None:
        self._arena = arena
        self.readable = readable
        self._opened = opened
        self._lock = threading.Lock()
        self._writable: Bytes | None = None
        self._ssd_files: SsdReader | None = None
        self._populating = [_populate(readable, arena, is_for_writing=False)]

    @property
    def arena_id(self) -> bytes:
        """What tells this arena from those of other servers and earlier runs."""
        return self._arena.arena_id

    def writable(self) -> Bytes | None:
        """Map the arena for writing on first use; None where we may only read."""
        with self._lock:
            if self._writable is None and self._arena.may_write:
                self._writable = _map(self._arena, self._opened, os.O_RDWR)
                if self._writable is not None:
                    self._populating.append(_populate(self._writable, self._arena, is_for_writing=True))
            return self._writable

    def ssd_files(self) -> SsdReader:
        """The files of the same server's SSD tier, opened on first use."""
        with self._lock:
            if self._ssd_files is None:
                self._ssd_files = SsdReader([(file.path, file.size_bytes) for file in self._arena.ssd_files])
            return self._ssd_files


def map_arena(arena: arena_pb2.Arena) -> MappedArena | None:
    """Map the server's arena by its path; None when that is not, on this host, that very arena."""
    if not arena.path:
        return None
    return _mapped(arena, lambda access: _open_path(arena.path, access))


def map_descriptors(arena: arena_pb2.Arena, fds: Sequence[int]) -> MappedArena | None:
    """Map the arena that descriptors lead to, for reading and maybe for writing; None when they do not.

    Keeps duplicates of them for `writable`.
    """
    return _mapped(arena, _Kept(fds).open)


class _Kept:
    """Duplicates of descriptors, closed with the last reference."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = [os.fdopen(os.dup(fd), "rb", buffering=0, closefd=True) for fd in fds]

    def open(self, access: int) -> AbstractContextManager[int]:
        """The last one is good for all that this process may. Raises OSError where it may only read."""
        if access == os.O_RDWR and len(self._files) == 1:
            raise PermissionError(errno.EACCES, "the arena was given to be read")
        return contextlib.nullcontext(self._files[-1 if access == os.O_RDWR else 0].fileno())


def _mapped(arena: arena_pb2.Arena, opened: _Open) -> MappedArena | None:
    readable = _map(arena, opened, os.O_RDONLY)
    return None if readable is None else MappedArena(arena, readable, opened)


@contextlib.contextmanager
def _open_path(path: str, access: int) -> Iterator[int]:
    # Without O_NONBLOCK a FIFO under that name would block us for ever.
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _map(arena: arena_pb2.Arena, opened: _Open, access: int) -> Bytes | None:
    if len(arena.arena_id) != _ID_BYTES:
        return None
    try:
        with opened(access) as fd:
            return _map_file(fd, arena, access)
    except OSError:
        return None


def _map_file(fd: int, arena: arena_pb2.Arena, access: int) -> Bytes | None:
    status = os.fstat(fd)
    if not _is_trusted(status) or status.st_size != arena.size_bytes or status.st_size < _ID_BYTES:
        return None
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == os.O_RDWR else 0)
    try:
        mapping = mmap.mmap(fd, arena.size_bytes, mmap.MAP_SHARED, protection)
    except ValueError:
        return None
    return np.frombuffer(mapping, np.uint8) if mapping[:_ID_BYTES] == arena.arena_id else None


def _is_trusted(status: os.stat_result) -> bool:
    # Ours, the system's, or meant for everyone: a file that someone else shares with us alone is not
    # what a server of this host creates.
    is_known_owner = status.st_uid in (0, os.geteuid())
    return stat.S_ISREG(status.st_mode) and (is_known_owner or bool(status.st_mode & stat.S_IROTH))


def _populate(mapping: Bytes, arena: arena_pb2.Arena, *, is_for_writing: bool) -> Populate:
    populate = Populate(
        mapping.ctypes.data,
        mapping.size,
        is_for_writing=is_for_writing,
        keeps=mapping,
        page_bytes=arena.page_bytes,
    )
    populate.start()
    return populate
