"""The file of one SSD path: claimed by one server, and created with every block allocated.

It is opened around the page cache where the filesystem can. Worst case: a filesystem without room; the file
is left as it was.
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ctxcache.errors import CapacityExceeded, DataDirectoryUnusable, InvalidConfiguration
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE
from ctxcache.runtime.files import check_directory, check_usable, claim_directory, existing, open_private


@dataclass(frozen=True, slots=True)
class SsdPath:
    """A directory and the bytes the tier may take there, a multiple of 4 KiB.

    `absence`: why the directory is not opened at the start. `is_ours` says whether the directory is the one
    that records name. `may_be_absent`: a file that cannot be opened is left out without an error.
    """

    directory: str
    size_bytes: int
    absence: str = ""
    is_ours: Callable[[], bool] = lambda: True
    may_be_absent: bool = False


@dataclass(frozen=True, slots=True)
class IoMode:
    """How a path is accessed: around the page cache or through it, and why."""

    path: str
    is_direct: bool
    reason: str

    def __str__(self) -> str:
        return f"{'direct' if self.is_direct else 'buffered'} ({self.reason})"


def open_file(path: str, place: SsdPath, *, allow_direct: bool) -> tuple[int, IoMode, bool]:
    """Open a path's file, or create it. Returns the descriptor, its mode, and whether the file is new.

    Raises InvalidConfiguration, DataDirectoryUnusable, CapacityExceeded.
    """
    if place.size_bytes <= 0 or place.size_bytes % ALIGN_BYTES:
        raise InvalidConfiguration(
            source=path, problem=f"{place.size_bytes} B is not a multiple of {ALIGN_BYTES} B"
        )
    try:
        # The directory is made private before a file is in it.
        claim_directory(Path(place.directory))
        # The lock comes before any look at the size: another server may be growing it.
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"{path}: {error.strerror}") from error
    try:
        claim(fd, path, place)
        is_new = os.fstat(fd).st_size == 0
        _allocate(fd, path, place)
        return fd, choose_mode(fd, path, allow_direct=allow_direct), is_new
    except BaseException:
        os.close(fd)
        raise


def check_file(place: SsdPath) -> None:
    """Raise what `open_file` would raise before it changes anything. Changes nothing."""
    path = str(Path(place.directory) / SEGMENTS_FILE)
    try:
        check_usable(Path(place.directory))
        if Path(place.directory).exists():
            check_directory(Path(place.directory))
    except OSError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=error.strerror or str(error)) from error
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        _check_room(existing(Path(place.directory)), path, place.size_bytes)
        return
    except OSError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"{path}: {error.strerror}") from error
    try:
        # A shared lock only asks: two that ask do not disturb each other.
        claim(fd, path, place, fcntl.LOCK_SH)
        _check_growth(fd, path, place)
    finally:
        os.close(fd)


def claim(fd: int, path: str, place: SsdPath, kind: int = fcntl.LOCK_EX) -> None:
    """Lock the file for this server. Raises DataDirectoryUnusable."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"another server holds {path}") from error
    except OSError as error:
        raise DataDirectoryUnusable(
            path=place.directory, problem=f"cannot lock {path}: {error.strerror}"
        ) from error


def _allocate(fd: int, path: str, place: SsdPath) -> None:
    """Grow the file to its size, every block allocated, or leave it as it was."""
    present_bytes = os.fstat(fd).st_size
    _check_growth(fd, path, place)
    if present_bytes == place.size_bytes:
        return
    try:
        os.posix_fallocate(fd, present_bytes, place.size_bytes - present_bytes)
        # Size and name are synced: without the size a power cut leaves a short file, without the name none.
        os.fsync(fd)
        _sync_directory(place.directory)
    except OSError as error:
        # The next start takes present bytes for allocated: a partial growth is cut off again.
        os.ftruncate(fd, present_bytes)
        _check_room(fd, path, place.size_bytes - present_bytes)
        problem = f"cannot allocate {place.size_bytes} B for {path}: {error.strerror}"
        raise DataDirectoryUnusable(path=place.directory, problem=problem) from error


def _check_growth(fd: int, path: str, place: SsdPath) -> None:
    """Raise for a file that would have to shrink, or has no room to grow."""
    present_bytes = os.fstat(fd).st_size
    # Shrinking would cut slots that records name.
    if present_bytes > place.size_bytes:
        problem = (
            f"the file has {present_bytes} B and cannot shrink to {place.size_bytes} B; delete it to start"
            " empty"
        )
        raise InvalidConfiguration(source=path, problem=problem)
    # The room is checked before: an attempt that fills a filesystem harms others.
    if present_bytes < place.size_bytes:
        _check_room(fd, path, place.size_bytes - present_bytes)


def _check_room(place: int | Path, path: str, needed_bytes: int) -> None:
    """`place`: a descriptor or a path of the filesystem."""
    space = os.statvfs(place)
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


def choose_mode(fd: int, path: str, *, allow_direct: bool) -> IoMode:
    """Switch the descriptor to direct I/O if a probing read says that it works here."""
    if not allow_direct:
        return IoMode(path, is_direct=False, reason="direct I/O is switched off")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        # Some filesystems accept the flag and refuse the first read: only a read tells.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGN_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return IoMode(path, is_direct=False, reason=f"the filesystem refuses direct I/O: {error.strerror}")
    return IoMode(path, is_direct=True, reason="the filesystem takes direct I/O")
