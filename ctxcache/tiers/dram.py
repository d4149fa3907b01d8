"""The DRAM tier: one shared-memory file that local workers map as well.

Knows slots, not what is in them. Worst case: there is no memory for the whole arena, which is
found out when it is created, never by a SIGBUS later, because every page is allocated at once.

The first page belongs to the arena, slots follow it. A slot's offset is its offset in the file:

    | arena id 16 B, zeros to 4 KiB | slots ... |
    0                               4096        capacity
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxcache.errors import CapacityExceeded, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.slot import Slot

ARENA_FILE_NAME = "ctxcache-{}.arena"
ARENA_ID_BYTES = 16
INLINE_COPY_BYTES = 1 << 20
"""Copies up to this size run on the event loop: about 0.2 ms, less than two thread switches are worth."""
COPY_THREADS = 2
_PREFAULT_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class DramArena:
    """See MappedTier. One path; slots lie in `[first_offset_bytes, capacities_bytes[0])`."""

    first_offset_bytes = ALIGN_BYTES

    def __init__(self, path: str | Path, size_bytes: int) -> None:
        """Create the file fresh at `path`, a stale one is replaced, and allocate all of it.

        `size_bytes` is the file's, a multiple of 4 KiB and at least two of them. Raises
        InvalidConfiguration, CapacityExceeded (the filesystem is too small), TierFailure.
        """
        if size_bytes % ALIGN_BYTES or size_bytes < 2 * ALIGN_BYTES:
            problem = f"{size_bytes} B is not a multiple of {ALIGN_BYTES} B, or not two of them"
            raise InvalidConfiguration(source="DRAM size", problem=problem)
        self._path = str(path)
        self._size_bytes = size_bytes
        self._map = _create(self._path, size_bytes)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._arena_id = secrets.token_bytes(ARENA_ID_BYTES)
        self._map[:ARENA_ID_BYTES] = self._arena_id
        self._copiers = ThreadPoolExecutor(COPY_THREADS, "arena-copy")
        self._is_closed = False

    @property
    def arena_id(self) -> bytes:
        """16 random bytes, also the file's first: whoever maps the file can tell this arena from another."""
        return self._arena_id

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return (self._path,)

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier. The file's size, the arena's own page included."""
        return (self._size_bytes,)

    def view(self, slot: Slot) -> memoryview:
        """See MappedTier."""
        begin = self._offset(slot, 0, slot.size_bytes)
        return memoryview(self._map)[begin : begin + slot.size_bytes]

    async def read(self, slot: Slot, begin: int, into: memoryview) -> None:
        """See Tier."""
        offset = self._offset(slot, begin, into.nbytes)
        await self._copy(np.frombuffer(into, np.uint8), self._bytes[offset : offset + into.nbytes])

    async def write(self, slot: Slot, begin: int, data: memoryview) -> None:
        """See Tier."""
        offset = self._offset(slot, begin, data.nbytes)
        await self._copy(self._bytes[offset : offset + data.nbytes], np.frombuffer(data, np.uint8))

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier. Memory has nowhere to sync to: it is as durable as it ever gets."""

    async def prefault(self) -> None:
        """Map every page ahead of use: a first touch costs four times a later one.

        Reads and writes go on meanwhile. One to three seconds per GiB; does nothing on a kernel before 5.14.
        """
        start = self._bytes.ctypes.data
        for begin in range(0, self._size_bytes, _PREFAULT_BYTES):
            size_bytes = min(_PREFAULT_BYTES, self._size_bytes - begin)
            await self._in_thread(_libc.madvise, start + begin, size_bytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """See Tier. Removes the file; a mapping that someone still views lives until the view ends."""
        if self._is_closed:
            return
        self._is_closed = True
        self._copiers.shutdown()
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self._path).unlink()

    def _offset(self, slot: Slot, begin: int, size_bytes: int) -> int:
        """Where in the file the range is. Raises ValueError: an unaligned or stray range is a bug."""
        is_in_slot = begin >= 0 and begin + size_bytes <= slot.size_bytes
        is_in_file = self.first_offset_bytes <= slot.offset_bytes <= self._size_bytes - slot.size_bytes
        if slot.path_index or not is_in_slot or not is_in_file:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not in {self._path}")
        if (slot.offset_bytes | begin | size_bytes) % ALIGN_BYTES:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not {ALIGN_BYTES} B-aligned")
        return slot.offset_bytes + begin

    async def _copy(self, into: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        # copyto releases the GIL; a memoryview slice assignment would hold it.
        if source.nbytes <= INLINE_COPY_BYTES:
            np.copyto(into, source)
        else:
            await self._in_thread(np.copyto, into, source)

    async def _in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        work = asyncio.get_running_loop().run_in_executor(self._copiers, function, *arguments)
        is_cancelled = False
        # A thread cannot be stopped, and until it ends the buffers are not the caller's again.
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        work.result()


def remove_abandoned(directory: Path) -> list[str]:
    """Remove the arenas of servers that were killed and not started again; returns their paths.

    Memory that nobody uses would stay taken until the next boot. What a living server holds, or what
    is not ours to remove, stays.
    """
    removed = []
    for path in sorted(directory.glob(ARENA_FILE_NAME.format("*"))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(str(path))
    return removed


def _create(path: str, size_bytes: int) -> mmap.mmap:
    try:
        _remove_stale(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, mode=0o600)
    except OSError as error:
        raise TierFailure(path=path, problem=f"cannot create the arena: {error.strerror}") from error
    try:
        _claim(fd, path)
        return _allocate(fd, path, size_bytes)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _claim(fd: int, path: str) -> None:
    """Say that the owner lives: the mapping keeps the file description, and so the lock, until it goes."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    if not os.fstat(fd).st_nlink:
        raise TierFailure(path=path, problem="another server took the new arena for a stale one; start again")


def _remove_stale(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "something that is not a file has that name")
        Path(path).unlink()


def _allocate(fd: int, path: str, size_bytes: int) -> mmap.mmap:
    space = os.fstatvfs(fd)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise TierFailure(path=path, problem=f"cannot allocate the arena: {error.strerror}") from error
        raise CapacityExceeded(
            tier=f"DRAM {path}",
            needed_bytes=size_bytes,
            free_bytes=space.f_bavail * space.f_frsize,
            limit_bytes=space.f_blocks * space.f_frsize,
        ) from error
