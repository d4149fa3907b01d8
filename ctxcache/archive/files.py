"""The file that an export goes to and the one that an import comes from, or a pipe in its place: `-`.

A new file is filled under another name, synced, and gets its own when it is whole. Worst case: a process that
is killed leaves .FILE.ctxcache-partial, which the next export to FILE uses up.
"""

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ctxcache.errors import FileAlreadyExists, FileFull, FileUnusable
from ctxcache.runtime.files import open_private, sync_directory

PIPE = "-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Source(NamedTuple):
    """An open file. `size_bytes` is None for what cannot be read twice."""

    fd: int
    path: str
    size_bytes: int | None


@contextmanager
def refusals_of_file(path: str) -> Iterator[None]:
    """Raise a system call's refusal of a file as FileFull or FileUnusable."""
    try:
        yield
    except OSError as error:
        kind = FileFull if error.errno in _FULL else FileUnusable
        raise kind(path=path, problem=error.strerror or str(error)) from error


@contextmanager
def source(path: str) -> Iterator[Source]:
    """Open a file to read, `-` for standard input. Raises FileUnusable."""
    if path == PIPE:
        yield Source(sys.stdin.fileno(), "standard input", None)
        return
    with refusals_of_file(path):
        # Opening a named pipe without a writer must not wait for one.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise FileUnusable(path=path, problem="it is no regular file; - reads a pipe")
        yield Source(fd, path, facts.st_size)
    finally:
        os.close(fd)


@contextmanager
def destination(path: str, *, is_forced: bool) -> Iterator[int]:
    """A descriptor to fill and read back; the file has its name, mode 0600, once the block has ended well.

    `-` is standard output. Raises FileAlreadyExists (not where it may be replaced: `is_forced`), FileFull,
    FileUnusable.
    """
    if path == PIPE:
        yield sys.stdout.fileno()
        return
    final = Path(path)
    _check_new(final, is_forced=is_forced)
    partial = final.with_name(f".{final.name}.ctxcache-partial")
    fd = _claim(partial, path)
    try:
        yield fd
        with refusals_of_file(path):
            os.fsync(fd)
            _check_new(final, is_forced=is_forced)
            partial.rename(final)
    except BaseException:
        # The failure before counts, not that of clearing up.
        with suppress(OSError):
            partial.unlink()
        raise
    finally:
        os.close(fd)
    with refusals_of_file(path):
        sync_directory(final.parent)


def _check_new(final: Path, *, is_forced: bool) -> None:
    with refusals_of_file(str(final)):
        if not os.path.lexists(final):
            return
        if not is_forced:
            raise FileAlreadyExists(path=str(final))
        if not final.is_file():
            raise FileUnusable(path=str(final), problem="it is no regular file; - writes to a pipe")


def _claim(partial: Path, path: str) -> int:
    """Create what is filled, or empty what a killed export left of it. Raises FileUnusable, FileFull."""
    with refusals_of_file(path):
        fd = open_private(partial, os.O_RDWR | os.O_CREAT)
    try:
        with refusals_of_file(path):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed between our opening and our lock: it is a whole file by now.
            if not os.path.samestat(os.fstat(fd), partial.stat()):
                raise BlockingIOError(errno.EWOULDBLOCK, "")
            os.ftruncate(fd, 0)
    except FileUnusable as error:
        os.close(fd)
        if isinstance(error.__cause__, BlockingIOError | FileNotFoundError):
            raise FileUnusable(path=path, problem="another export is writing it") from error
        raise
    return fd
