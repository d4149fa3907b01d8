"""The SSD tier: one preallocated file per directory, read and written around the page cache.

Knows slots, not what is in them. Worst case: a device refuses a sync. Its path is then fenced, every
later write and sync on it raises TierFailure while reads go on, and only a restart lifts that: what
a failed sync left behind is unknown, and asking the kernel again would report success.

Files are never shortened, unlinked or rewritten elsewhere: freeing a slot costs no I/O.
"""

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxcache.errors import CapacityExceeded, DataDirectoryUnusable, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.slot import Slot

FILE_NAME = "segments.dat"
PIECE_BYTES = 4 << 20
THREADS_PER_PATH = 4


@dataclass(frozen=True, slots=True)
class SsdPath:
    """A directory and the bytes the tier may take there, a multiple of 4 KiB."""

    directory: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IoMode:
    """How a path is accessed: around the page cache or through it, and why."""

    path: str
    is_direct: bool
    reason: str

    def __str__(self) -> str:
        return f"{'direct' if self.is_direct else 'buffered'} ({self.reason})"


class SsdFiles:
    """See Tier. Slots lie in `[0, capacities_bytes[path_index])`."""

    first_offset_bytes = 0

    def __init__(
        self,
        directories: Sequence[SsdPath],
        *,
        threads_per_path: int = THREADS_PER_PATH,
        allow_direct: bool = True,
    ) -> None:
        """Open or create the files; creation allocates every block.

        `threads_per_path` bounds the device operations in flight per path. `allow_direct` off reads and
        writes through the page cache even where the filesystem could do without. Raises
        InvalidConfiguration, CapacityExceeded (no room to allocate), DataDirectoryUnusable.
        """
        self._files: list[_File] = []
        try:
            for directory in directories:
                self._files.append(_File(directory, threads_per_path, allow_direct=allow_direct))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return tuple(file.path for file in self._files)

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier."""
        return tuple(file.size_bytes for file in self._files)

    @property
    def io_modes(self) -> tuple[IoMode, ...]:
        """How each path is accessed."""
        return tuple(file.io_mode for file in self._files)

    @property
    def fenced(self) -> dict[str, str]:
        """Paths that refused a sync and take no more writes, each with what the device said."""
        return {file.path: file.failure for file in self._files if file.failure is not None}

    async def read(self, slot: Slot, begin: int, into: memoryview) -> None:
        """See Tier."""
        file = self._file(slot, begin, into.nbytes)
        await file.transfer(file.read_piece, slot.offset_bytes + begin, into)

    async def write(self, slot: Slot, begin: int, data: memoryview) -> None:
        """See Tier."""
        file = self._file(slot, begin, data.nbytes)
        file.check_fence()
        await file.transfer(file.write_piece, slot.offset_bytes + begin, data)

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier. Paths sync side by side; callers that wait for the same path share a sync."""
        syncs = [asyncio.wrap_future(self._files[index].join_sync()) for index in path_indexes]
        # Shielded: one caller's cancellation must not cancel the sync of the others.
        await asyncio.shield(asyncio.gather(*syncs))

    def close(self) -> None:
        """See Tier."""
        for file in self._files:
            file.close()

    def _file(self, slot: Slot, begin: int, size_bytes: int) -> "_File":
        """Find the slot's file. Raises ValueError: an unaligned or stray range is a bug."""
        file = self._files[slot.path_index]
        is_in_slot = begin >= 0 and begin + size_bytes <= slot.size_bytes
        if not is_in_slot or not 0 <= slot.offset_bytes <= file.size_bytes - slot.size_bytes:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not in {file.path}")
        if (slot.offset_bytes | begin | size_bytes) % ALIGN_BYTES:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not {ALIGN_BYTES} B-aligned")
        return file


class _File:
    """One path: its descriptor, its bounded threads, and its fence. Owned by the event loop."""

    def __init__(self, place: SsdPath, thread_count: int, *, allow_direct: bool) -> None:
        self.path = str(Path(place.directory) / FILE_NAME)
        self.size_bytes = place.size_bytes
        self.failure: str | None = None
        self._fd, self.io_mode = _open(self.path, place, allow_direct=allow_direct)
        self._pool = ThreadPoolExecutor(thread_count, "ssd-io")
        self._syncer = ThreadPoolExecutor(1, "ssd-sync")
        self._next_sync: Future[None] | None = None
        self._bounce = threading.local()

    async def transfer(
        self, piece: Callable[[int, memoryview], None], offset: int, buffer: memoryview
    ) -> None:
        """Run `piece` on every 4 MiB of `buffer`, in as many threads as the path has."""
        flat = buffer.cast("B")
        work = [
            self._pool.submit(piece, offset + begin, flat[begin : begin + PIECE_BYTES])
            for begin in range(0, flat.nbytes, PIECE_BYTES)
        ]
        await _settle(work)

    def read_piece(self, offset: int, into: memoryview) -> None:
        """In a thread. Fills `into` or raises TierFailure."""
        if self._is_placed(into):
            self._loop(os.preadv, "read", offset, into)
        else:
            aligned = self._aligned(into.nbytes)
            self._loop(os.preadv, "read", offset, aligned)
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(aligned, np.uint8))

    def write_piece(self, offset: int, data: memoryview) -> None:
        """In a thread. Writes all of `data` or raises TierFailure."""
        if self._is_placed(data):
            self._loop(os.pwritev, "write", offset, data)
        else:
            aligned = self._aligned(data.nbytes)
            np.copyto(np.frombuffer(aligned, np.uint8), np.frombuffer(data, np.uint8))
            self._loop(os.pwritev, "write", offset, aligned)

    def join_sync(self) -> "Future[None]":
        """Queue a sync, or share the queued one: it starts after this call either way."""
        sync = self._next_sync
        if sync is None or sync.running() or sync.done():
            sync = self._next_sync = self._syncer.submit(self._sync)
        return sync

    def check_fence(self) -> None:
        """Raise TierFailure once a sync has failed."""
        if self.failure is not None:
            raise TierFailure(path=self.path, problem=f"fenced after a failed sync: {self.failure}")

    def close(self) -> None:
        """Wait for the threads, then give up the descriptor and with it the lock."""
        self._pool.shutdown()
        self._syncer.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sync(self) -> None:
        # One at a time: the kernel reports a lost write to one fdatasync only, and a second one
        # beside it would be told that all is well.
        self.check_fence()
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self.failure = f"fdatasync: {error.strerror}"
            raise TierFailure(path=self.path, problem=self.failure) from error

    def _loop(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        verb: str,
        offset: int,
        buffer: memoryview,
    ) -> None:
        """Repeat `call` until the buffer is done: the kernel may do less than it was asked to."""
        done = 0
        while done < buffer.nbytes:
            where = f"{verb} of {buffer.nbytes - done} B at byte {offset + done}"
            try:
                moved = call(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise TierFailure(path=self.path, problem=f"{where}: {error.strerror}") from error
            if moved == 0:
                raise TierFailure(path=self.path, problem=f"{where}: the file ends there")
            done += moved

    def _is_placed(self, buffer: memoryview) -> bool:
        return not self.io_mode.is_direct or np.frombuffer(buffer, np.uint8).ctypes.data % ALIGN_BYTES == 0

    def _aligned(self, size_bytes: int) -> memoryview:
        """Lend this thread's own aligned memory: at most 4 MiB per thread of the path."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = mmap.mmap(-1, PIECE_BYTES)
        return memoryview(self._bounce.memory)[:size_bytes]


async def _settle(work: "list[Future[None]]") -> None:
    """Wait until every piece has ended, also when cancelled: until then the device owns the buffer."""
    waiters = [asyncio.wrap_future(future) for future in work]
    pending, is_cancelled = set(waiters), False
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            is_cancelled = True
            for future in work:
                future.cancel()  # those that no thread has taken yet
    errors = [waiter.exception() for waiter in waiters if not waiter.cancelled()]
    if is_cancelled:
        raise asyncio.CancelledError
    for error in filter(None, errors):
        raise error


def _open(path: str, place: SsdPath, *, allow_direct: bool) -> tuple[int, IoMode]:
    if place.size_bytes <= 0 or place.size_bytes % ALIGN_BYTES:
        raise InvalidConfiguration(
            source=path, problem=f"{place.size_bytes} B is not a multiple of {ALIGN_BYTES} B"
        )
    try:
        Path(place.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600)
    except OSError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"{path}: {error.strerror}") from error
    try:
        _claim(fd, path, place)
        _allocate(fd, path, place)
        return fd, _choose_mode(fd, path, allow_direct=allow_direct)
    except BaseException:
        os.close(fd)
        raise


def _claim(fd: int, path: str, place: SsdPath) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"another server holds {path}") from error
    except OSError as error:
        raise DataDirectoryUnusable(
            path=place.directory, problem=f"cannot lock {path}: {error.strerror}"
        ) from error


def _allocate(fd: int, path: str, place: SsdPath) -> None:
    """Grow the file to its size, every block allocated, or leave it as it was."""
    present_bytes = os.fstat(fd).st_size
    if present_bytes > place.size_bytes:
        problem = f"the file has {present_bytes} B and cannot shrink to {place.size_bytes} B; delete it to start empty"
        raise InvalidConfiguration(source=path, problem=problem)
    if present_bytes == place.size_bytes:
        return
    _check_room(fd, path, place.size_bytes - present_bytes)
    try:
        os.posix_fallocate(fd, present_bytes, place.size_bytes - present_bytes)
        os.fsync(fd)
        _sync_directory(place.directory)
    except OSError as error:
        os.ftruncate(fd, present_bytes)
        _check_room(fd, path, place.size_bytes - present_bytes)
        problem = f"cannot allocate {place.size_bytes} B for {path}: {error.strerror}"
        raise DataDirectoryUnusable(path=place.directory, problem=problem) from error


def _check_room(fd: int, path: str, needed_bytes: int) -> None:
    space = os.fstatvfs(fd)
    free_bytes = space.f_bavail * space.f_frsize
    if needed_bytes > free_bytes:
        limit_bytes = space.f_blocks * space.f_frsize
        raise CapacityExceeded(
            tier=f"SSD {path}", needed_bytes=needed_bytes, free_bytes=free_bytes, limit_bytes=limit_bytes
        )


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _choose_mode(fd: int, path: str, *, allow_direct: bool) -> IoMode:
    """Switch the descriptor to direct I/O if a probing read says that it works here."""
    if not allow_direct:
        return IoMode(path, is_direct=False, reason="direct I/O is switched off")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGN_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return IoMode(path, is_direct=False, reason=f"the filesystem refuses direct I/O: {error.strerror}")
    return IoMode(path, is_direct=True, reason="the filesystem takes direct I/O")
