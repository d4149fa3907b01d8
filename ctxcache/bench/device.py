"""The disk by itself: one preallocated file, O_DIRECT, a few threads. What the store is measured beside.

Knows nothing of the store. Worst case: a filesystem without O_DIRECT, where opening raises OSError.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """How a transfer is cut and how many device operations are in flight."""

    depth: int
    piece_bytes: int

    def __str__(self) -> str:
        return f"{self.depth} x {self.piece_bytes // MIB} MiB"


WAYS = (Way(1, 4 * MIB), Way(2, 1 * MIB), Way(2, 4 * MIB), Way(4, 1 * MIB), Way(4, 4 * MIB), Way(4, 16 * MIB))


class Device:
    """A file of `size_bytes` in `directory`, every block written. Use it as a context manager."""

    def __init__(self, directory: str | Path, size_bytes: int) -> None:
        self._path = Path(directory) / "limit.dat"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        self._threads = ThreadPoolExecutor(max(way.depth for way in WAYS), "device")

    def read(self, into: memoryview, way: Way) -> float:
        """Fill `into` from the file's begin; seconds it took."""
        return self._timed(os.preadv, into, way)

    def write(self, data: memoryview, way: Way, *, is_synced: bool = True) -> float:
        """Write `data` to the file's begin, then one fdatasync; seconds it took."""
        begin = time.perf_counter()
        self._timed(os.pwritev, data, way)
        if is_synced:
            os.fdatasync(self._fd)
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _timed(
        self, call: Callable[[int, Sequence[memoryview], int], int], buffer: memoryview, way: Way
    ) -> float:
        def piece(offset: int) -> None:
            part = buffer[offset : offset + way.piece_bytes]
            moved = call(self._fd, [part], offset)
            if moved != len(part):
                raise OSError(f"{self._path}: {moved} B of {len(part)} B at {offset}")

        begin = time.perf_counter()
        for _ in self._threads.map(piece, range(0, len(buffer), way.piece_bytes)):
            pass
        return time.perf_counter() - begin


def best_way(transfer: Callable[[Way], float], *, round_count: int = 5) -> Way:
    """The way whose median over interleaved rounds is least."""
    taken: dict[Way, list[float]] = {way: [] for way in WAYS}
    for _ in range(round_count):
        for way in WAYS:
            taken[way].append(transfer(way))
    return min(WAYS, key=lambda way: median(taken[way]))
