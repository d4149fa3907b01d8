"""The disk by itself, and several slow disks made of one. The store is measured beside the first.

The disk: one preallocated file, O_DIRECT, a few threads. Throttled paths: each works on one transfer after
the other, at its own pace. Worst case: a filesystem without O_DIRECT, where opening raises OSError; a limit
above the speed of the device under it, which then limits nothing.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from ctxcache.format.layout import Slot
from ctxcache.storage.tiers.base import Arrived, DeviceTier, Pieces, TierRefusal

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


class ThrottledTier:
    """See DeviceTier.

    Each path of `inner` moves at most `path_bps` bytes per second, reads and writes together.
    """

    def __init__(self, inner: DeviceTier, path_bps: float) -> None:
        self._inner = inner
        self._path_bps = path_bps
        self._free_at_s = [0.0] * len(inner.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return self._inner.paths

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier."""
        return self._inner.capacities_bytes

    @property
    def refusals(self) -> Mapping[int, TierRefusal]:
        """See Tier."""
        return self._inner.refusals

    @property
    def emptied(self) -> Collection[int]:
        """See DeviceTier."""
        return self._inner.emptied

    @property
    def written_bytes(self) -> tuple[int, ...]:
        """See DeviceTier."""
        return self._inner.written_bytes

    async def probe(self) -> None:
        """See DeviceTier."""
        await self._inner.probe()

    def give_up_overdue(self) -> None:
        """See DeviceTier."""
        self._inner.give_up_overdue()

    async def read(
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        end_s = self._book(slot, into.nbytes)
        await self._inner.read(slot, begin, into, pieces=pieces, then=then)
        await self._wait(end_s)

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """See Tier."""
        end_s = self._book(slot, data.nbytes)
        await self._inner.write(slot, begin, data, pieces=pieces)
        await self._wait(end_s)

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier."""
        await self._inner.sync(path_indexes)

    def close(self) -> None:
        """See Tier."""
        self._inner.close()

    def _book(self, slot: Slot, size_bytes: int) -> float:
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_at_s[slot.path_index])
        self._free_at_s[slot.path_index] = end_s = begin_s + size_bytes / self._path_bps
        return end_s

    async def _wait(self, end_s: float) -> None:
        await asyncio.sleep(max(0.0, end_s - asyncio.get_running_loop().time()))
