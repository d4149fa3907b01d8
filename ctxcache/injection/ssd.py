"""SSD files of which reads and writes can be made slow, refused, or wrong by a bit.

A refusal is taken for the device's own: the path's health hears of it. Worst case: a delay, of a few seconds.
"""

import asyncio
import os
from collections.abc import Callable, Sequence

from ctxcache.errors import TierFailure
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.slot import Slot
from ctxcache.injection.faults import Fault, FaultKind, Faults
from ctxcache.tiers.base import Range
from ctxcache.tiers.ssd import SsdFiles, SsdPath


class FaultySsdFiles(SsdFiles):
    """See SsdFiles. A fault strikes a read or write of a slot as a whole."""

    def __init__(self, directories: Sequence[SsdPath], faults: Faults) -> None:
        """See SsdFiles."""
        super().__init__(directories)
        self._faults = faults

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
        await self._delay(FaultKind.SSD_READ_DELAY, slot)
        if fault := self._faults.strike(FaultKind.SSD_READ_ERROR, slot.path_index):
            problem = _problem("read", fault, slot)
            self._files[slot.path_index].health.read_failed(problem)
            raise TierFailure(path=self.paths[slot.path_index], problem=problem)
        if self._faults.strike(FaultKind.SSD_READ_BIT_FLIP, slot.path_index):
            then = _flipping(into, pieces, then)
        await super().read(slot, begin, into, pieces=pieces, then=then)

    async def write(
        self, slot: Slot, begin: int, data: memoryview, *, pieces: Sequence[Range] | None = None
    ) -> None:
        """See Tier. What is refused anyway, no fault strikes."""
        health = self._files[slot.path_index].health
        health.check()
        await self._delay(FaultKind.SSD_WRITE_DELAY, slot)
        if fault := self._faults.strike(FaultKind.SSD_WRITE_ERROR, slot.path_index):
            problem = _problem("write", fault, slot)
            health.write_failed(problem, fault.error_number)
            raise TierFailure(path=self.paths[slot.path_index], problem=problem)
        await super().write(slot, begin, data, pieces=pieces)

    async def _probe(self, index: int) -> None:
        """See SsdFiles. A device of which reads are refused is one that a probe cannot read either."""
        health = self._files[index].health
        if health.is_doubted and (fault := self._faults.strike(FaultKind.SSD_READ_ERROR, index)):
            health.lose(f"a probe: {os.strerror(fault.error_number)} (injected)")
            return
        await super()._probe(index)

    async def _delay(self, kind: FaultKind, slot: Slot) -> None:
        if fault := self._faults.strike(kind, slot.path_index):
            await asyncio.sleep(fault.delay_ns / 10**9)


def _problem(what: str, fault: Fault, slot: Slot) -> str:
    return f"{what} at byte {slot.offset_bytes}: {os.strerror(fault.error_number)} (injected)"


def _flipping(
    into: memoryview, pieces: Sequence[Range] | None, then: Callable[[int, int], None] | None
) -> Callable[[int, int], None]:
    """`then`, before which a bit is flipped in the last page that is read: its first, which is no padding."""
    flat = into.cast("B")
    end = pieces[-1][1] if pieces else flat.nbytes
    position = (end - 1) // ALIGN_BYTES * ALIGN_BYTES

    def flip(begin: int, end: int) -> None:
        if begin <= position < end:
            flat[position] ^= 1
        if then:
            then(begin, end)

    return flip
