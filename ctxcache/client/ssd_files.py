"""The files of a server's SSD tier, read beside the server: around the page cache where that can be.

Knows bytes and places, no segment: whoever reads verifies, for nothing here says whose bytes they are.
Thread-safe.
Worst case: a device that does not answer, which holds up the thread that reads.
"""

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import IO, TypeAlias
from weakref import finalize

import numpy as np

from ctxcache.errors import TierFailure
from ctxcache.format.layout import ALIGN_BYTES

THREADS_PER_PATH = 4
"""Reads in flight, as the server has them."""
# O_NOFOLLOW, since the path is the server's word; O_NONBLOCK, for a FIFO there would hold up the open.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class _File:
    """An open file. It closes with its last reference, so that no number is used again under a read."""

    path: str
    size_bytes: int
    raw: IO[bytes]


class SsdReader:
    """All files or none: `is_open`, and if not `problem` says why."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        """Open each of (path, size in bytes) for reading."""
        self._files: list[_File] = []
        self.is_direct = True
        """Whether reads go around the page cache, all of them."""
        self.problem = "" if files else "the server names no files"
        for path, size_bytes in files:
            try:
                self._files.append(_File(path, size_bytes, self._open(path, size_bytes)))
            except OSError as error:
                self.problem = f"{path}: {error.strerror}"
                self._files.clear()
                # A place names its file by index, and a gap would shift the indexes.
                return

    @property
    def is_open(self) -> bool:
        """Whether the files can be read."""
        return not self.problem

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files, in the server's order; none where they are not open."""
        return tuple(file.path for file in self._files)

    def read(self, path_index: int, offset_bytes: int, into: memoryview) -> None:
        """Fill `into`, whose address, place and size are multiples of 4 KiB (see `aligned`).

        Raises TierFailure.
        """
        file = self._at(path_index, offset_bytes, into.nbytes)
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(file.raw.fileno(), [into[done:]], offset_bytes + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends there")  # noqa: TRY301  # as a device that fails
            except OSError as error:
                where = f"{into.nbytes - done} B at byte {offset_bytes + done}"
                raise TierFailure(path=file.path, problem=f"read of {where}: {error.strerror}") from error
            done += count

    def spread(self, reads: Sequence[Callable[[], None]]) -> None:
        """Carry out reads side by side; returns, or raises the first one's error, when all have ended."""
        if len(reads) <= 1:
            for read in reads:
                read()
            return
        # The first read is this thread's own, which would only wait otherwise.
        begun = [self._threads.submit(read) for read in reads[1:]]
        try:
            reads[0]()
        finally:
            # All reads are waited for, even after an error: they write to memory that the caller may free.
            wait(begun)
        for each in begun:
            each.result()

    def spread_within(self, reads: Sequence[Callable[[], None]], timeout_s: float) -> bool:
        """Carry out reads side by side; whether all have ended in time, or raise the first one's error.

        A read that has not ended may end at any time later: it must not write to what the caller frees.
        """
        begun = [self._threads.submit(read) for read in reads]
        ended, left = wait(begun, timeout_s)
        for future in left:
            future.cancel()
        for future in ended:
            future.result()
        return not left

    def check_place(self, path_index: int, offset_bytes: int, size_bytes: int) -> None:
        """Raise TierFailure for a place that no file has."""
        self._at(path_index, offset_bytes, size_bytes)

    @cached_property
    def _threads(self) -> "_ReadThreads":
        return _ReadThreads(THREADS_PER_PATH * len(self._files))

    def _at(self, path_index: int, offset_bytes: int, size_bytes: int) -> _File:
        if not 0 <= path_index < len(self._files):
            raise TierFailure(path=f"SSD path {path_index}", problem="is none that the server named")
        file = self._files[path_index]
        if offset_bytes < 0 or offset_bytes + size_bytes > file.size_bytes:
            problem = f"{size_bytes} B at byte {offset_bytes} are not in its {file.size_bytes} B"
            raise TierFailure(path=file.path, problem=problem)
        return file

    def _open(self, path: str, size_bytes: int) -> IO[bytes]:
        raw = os.fdopen(os.open(path, _FLAGS), "rb", buffering=0)
        status = os.fstat(raw.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size < size_bytes:
            raise OSError(errno.EINVAL, f"is no file of {size_bytes} B")
        flags = fcntl.fcntl(raw.fileno(), fcntl.F_GETFL)
        try:
            fcntl.fcntl(raw.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
            # A filesystem may take the flag and refuse the read, so one read is tried.
            os.preadv(raw.fileno(), [aligned(ALIGN_BYTES)], 0)
        except OSError:
            fcntl.fcntl(raw.fileno(), fcntl.F_SETFL, flags)
            self.is_direct = False
        return raw


class _ReadThreads:
    """Threads that read. They end with this object, and the end of the process waits for no device."""

    def __init__(self, count: int) -> None:
        self._queue: _Reads = SimpleQueue()
        # Executors would have the end of the process wait until each of their threads has ended.
        for number in range(count):
            name = f"ctxcache-ssd_{number}"
            threading.Thread(target=_read_on, args=(self._queue,), name=name, daemon=True).start()
        finalize(self, _end_threads, self._queue, count).atexit = False

    def submit(self, read: Callable[[], None]) -> Future[None]:
        """Have a thread carry out a read."""
        future: Future[None] = Future()
        self._queue.put((future, read))
        return future


_Reads: TypeAlias = "SimpleQueue[tuple[Future[None], Callable[[], None]] | None]"


def _read_on(queue: _Reads) -> None:
    while (item := queue.get()) is not None:
        future, read = item
        del item
        if future.set_running_or_notify_cancel():
            try:
                read()
            except BaseException as error:  # noqa: BLE001  # whatever it is, it is the future's
                future.set_exception(error)
            else:
                future.set_result(None)
        # The last read's memory would else live until the next read comes.
        del future, read


def _end_threads(queue: _Reads, count: int) -> None:
    for _ in range(count):
        queue.put(None)


def aligned(size_bytes: int) -> memoryview:
    """Fresh memory that begins on a page, of at least so many bytes, a multiple of 4 KiB."""
    return memoryview(mmap.mmap(-1, max(-(-size_bytes // ALIGN_BYTES), 1) * ALIGN_BYTES))


def is_aligned(buffer: memoryview) -> bool:
    """Whether a buffer can be read into as it is."""
    address = int(np.frombuffer(buffer, np.uint8).ctypes.data) if buffer.nbytes else 0
    return not (address | buffer.nbytes) % ALIGN_BYTES
