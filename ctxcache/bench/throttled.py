"""A tier whose paths have a speed limit: several devices where there is one disk.

Knows bytes and time. A path works on one transfer after the other, at its own pace. Worst case: a limit
above what the device under it does, which then limits nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from ctxcache.format.slot import Slot
from ctxcache.tiers.base import Devices, Range, Refusal


class ThrottledTier:
    """See Devices. Each path of `inner` moves at most `path_bps` bytes per second, reads and writes together."""

    def __init__(self, inner: Devices, path_bps: float) -> None:
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
    def refusals(self) -> Mapping[int, Refusal]:
        """See Tier."""
        return self._inner.refusals

    @property
    def emptied(self) -> Collection[int]:
        """See Devices."""
        return self._inner.emptied

    async def probe(self) -> None:
        """See Devices."""
        await self._inner.probe()

    async def read(
        self,
        slot: Slot,
        begin: int,
        into: memoryview,
        *,
        pieces: Sequence[Range] | None = None,
        then: Callable[[int, int], None] | None = None,
    ) -> None:
        """See Tier."""
        end_s = self._book(slot, into.nbytes)
        await self._inner.read(slot, begin, into, pieces=pieces, then=then)
        await self._wait(end_s)

    async def write(
        self, slot: Slot, begin: int, data: memoryview, *, pieces: Sequence[Range] | None = None
    ) -> None:
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
