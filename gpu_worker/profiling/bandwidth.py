"""Bandwidths of this machine: memory to device, and a file to memory past the page cache.

Worst case: a file system without direct reads, whose bandwidth is then that of whatever is cached.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from gpu_worker.profiling.stopwatch import Stopwatch

TRANSFER_BYTES = 64 << 20
"""Beyond what caches hold."""
_READ_PIECE_BYTES = 1 << 20


def copy_bytes_per_s(
    device: torch.device, stopwatch: Stopwatch, *, size_bytes: int = TRANSFER_BYTES
) -> float:
    """Measure copying from memory onto `device`; from pinned memory where it is a GPU."""
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return size_bytes / median(stopwatch.seconds(copy))


def read_bytes_per_s(directory: Path, stopwatch: Stopwatch, *, size_bytes: int = TRANSFER_BYTES) -> float:
    """Measure reading a file of `directory`, which is written first and removed after. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".ctxcache-profile-") as file:
        file.write(os.urandom(_READ_PIECE_BYTES) * (size_bytes // _READ_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        fd = _open_direct(file.name)
        try:
            return size_bytes / median(stopwatch.seconds(_reader(fd, size_bytes)))
        finally:
            os.close(fd)


def _open_direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _reader(fd: int, size_bytes: int) -> Callable[[], None]:
    # Direct reads ask for aligned memory, which mmap's is.
    buffer = mmap.mmap(-1, _READ_PIECE_BYTES)

    def read() -> None:
        for offset in range(0, size_bytes, _READ_PIECE_BYTES):
            os.preadv(fd, [buffer], offset)

    return read
