"""Host memory: POSIX shared memory by name, and memfds.

A mapping behind the end of a file kills the process that touches it. So a memfd must be sealed against
shrinking; named memory cannot be, and is looked at again before each use. Worst case: an engine that shrinks
named memory between that look and the use, which ends the worker.
"""

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Hashable

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument

_NAME = re.compile(r"/[^/\0]{1,250}")
_DIRECTORY = "/dev/shm"  # noqa: S108  where Linux keeps what shm_open opens


class HostMemory:
    """A mapped file. `data` is [size] uint8; the mapping ends when nothing shows it any more."""

    def __init__(self, fd: int, size_bytes: int, field: str) -> None:
        """Takes the descriptor over. Raises InvalidArgument for less memory than `size_bytes`."""
        self._fd, self._field, self.size_bytes = fd, field, size_bytes
        status = os.fstat(fd)
        self.identity: Hashable = ("file", status.st_dev, status.st_ino)
        self.begin_bytes = 0
        try:
            self.check()
            self.data: Tensor = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        except OSError as error:
            os.close(fd)
            raise InvalidArgument(field=field, problem=f"cannot be mapped: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def check(self) -> None:
        """Raise InvalidArgument when the file has become too small."""
        there = os.fstat(self._fd).st_size
        if there < self.size_bytes:
            problem = f"{there:,} bytes are there, {self.size_bytes:,} were said"
            raise InvalidArgument(field=self._field, problem=problem)

    def close(self) -> None:
        """Let go of the file; what still shows its bytes keeps them mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_named(name: str, size_bytes: int, field: str) -> HostMemory:
    """Map POSIX shared memory. Raises InvalidArgument."""
    if not _NAME.fullmatch(name) or name in ("/.", "/.."):
        raise InvalidArgument(field=field, problem=f"{name!r} is no name of shared memory")
    try:
        fd = os.open(f"{_DIRECTORY}{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        problem = f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}"
        raise InvalidArgument(field=field, problem=problem) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidArgument(field=field, problem=f"{name} is no shared memory")
    return HostMemory(fd, size_bytes, field)


def open_descriptor(fd: int, size_bytes: int, field: str) -> HostMemory:
    """Map a memfd; takes the descriptor over. Raises InvalidArgument."""
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        is_sealed = 0
    if not is_sealed:
        os.close(fd)
        raise InvalidArgument(field=field, problem="is no memfd that is sealed against shrinking")
    return HostMemory(fd, size_bytes, field)
