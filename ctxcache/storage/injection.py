"""Faults on purpose, for tests around a store: SSD files and metadata that are slow, refuse, or flip bits.

A server has this module only where a setting asks for it. A fault strikes a number of times, for a time, and
there are few of them. A refusal counts as the device's own: the path's health hears of it. Worst case: a
delay of a few seconds.
"""

import asyncio
import enum
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxcache.errors import TierFailure, TooManyRequests
from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.runtime.clock import Clock
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.catalog import Catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.tiers.base import Arrived, Pieces
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import HANG_AFTER_S, SsdFiles

FAULT_LIMIT = 16
"""Faults at a time."""
COUNT_LIMIT = 10_000
DURATION_LIMIT_NS = 3600 * 10**9
DELAY_LIMIT_NS = 10 * 10**9


class FaultKind(enum.Enum):
    """A sort of fault."""

    SSD_READ_DELAY = enum.auto()
    SSD_WRITE_DELAY = enum.auto()
    SSD_READ_ERROR = enum.auto()
    SSD_WRITE_ERROR = enum.auto()
    SSD_READ_BIT_FLIP = enum.auto()
    COMMIT_DELAY = enum.auto()

    @property
    def is_delay(self) -> bool:
        """Whether it takes a time."""
        return self in (FaultKind.SSD_READ_DELAY, FaultKind.SSD_WRITE_DELAY, FaultKind.COMMIT_DELAY)

    @property
    def is_error(self) -> bool:
        """Whether it takes an error number."""
        return self in (FaultKind.SSD_READ_ERROR, FaultKind.SSD_WRITE_ERROR)

    @property
    def is_of_ssd(self) -> bool:
        """Whether it can be of one path."""
        return self is not FaultKind.COMMIT_DELAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that strikes `left_count` times more, before `end_ns` of the monotonic clock.

    `path_index` None: on every path. `delay_ns` and `error_number` are of the kinds that take them.
    """

    fault_id: int = 0
    kind: FaultKind
    left_count: int
    end_ns: int
    path_index: int | None = None
    delay_ns: int = 0
    error_number: int = 0


class Faults:
    """The faults of one server, from its start to its end. Owned by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._injected: dict[int, Fault] = {}
        self._last_id = 0

    def active(self) -> list[Fault]:
        """Faults that may strike yet, the oldest first."""
        # Expired ones are forgotten at the look: no timer is needed.
        now_ns = self.clock.monotonic_ns()
        self._injected = {i: fault for i, fault in self._injected.items() if fault.end_ns > now_ns}
        return list(self._injected.values())

    def inject(self, fault: Fault) -> Fault:
        """Let it strike from now on; returns it with its number. Raises TooManyRequests."""
        if len(self.active()) >= FAULT_LIMIT:
            raise TooManyRequests(what="faults", limit=FAULT_LIMIT)
        self._last_id += 1
        fault = self._injected[self._last_id] = replace(fault, fault_id=self._last_id)
        return fault

    def clear(self) -> int:
        """Let none strike any more; returns how many would have."""
        count = len(self.active())
        self._injected.clear()
        return count

    def strike(self, kind: FaultKind, path_index: int | None = None) -> Fault | None:
        """The oldest fault of that kind on that path, which has struck by that; None: all goes well."""
        # Nearly always: there is none at all.
        for fault in self.active() if self._injected else ():
            # On every path, or on this one.
            if fault.kind is kind and fault.path_index in (None, path_index):
                if fault.left_count > 1:
                    self._injected[fault.fault_id] = replace(fault, left_count=fault.left_count - 1)
                else:
                    del self._injected[fault.fault_id]
                return fault
        return None


class FaultySsdFiles(SsdFiles):
    """See SsdFiles. A fault strikes a read or write of a slot as a whole."""

    def __init__(
        self, directories: Sequence[SsdPath], faults: Faults, *, hang_after_s: float = HANG_AFTER_S
    ) -> None:
        """See SsdFiles."""
        super().__init__(directories, hang_after_s=hang_after_s)
        self._faults = faults

    async def read(
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        # A path that owes operations refuses first, as the real one would.
        self.files[slot.path_index].check_returns()
        await self._delay(FaultKind.SSD_READ_DELAY, slot)
        if fault := self._faults.strike(FaultKind.SSD_READ_ERROR, slot.path_index):
            problem = _problem("read", fault, slot)
            # Counted by the path's health, so that three of them fence it.
            self.files[slot.path_index].health.read_failed(problem)
            raise TierFailure(path=self.paths[slot.path_index], problem=problem)
        if self._faults.strike(FaultKind.SSD_READ_BIT_FLIP, slot.path_index):
            then = _flipping(into, pieces, then)
        await super().read(slot, begin, into, pieces=pieces, then=then)

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """See Tier. A call that is refused anyway meets no fault."""
        health = self.files[slot.path_index].health
        health.check()
        await self._delay(FaultKind.SSD_WRITE_DELAY, slot)
        if fault := self._faults.strike(FaultKind.SSD_WRITE_ERROR, slot.path_index):
            problem = _problem("write", fault, slot)
            health.write_failed(problem, fault.error_number)
            raise TierFailure(path=self.paths[slot.path_index], problem=problem)
        await super().write(slot, begin, data, pieces=pieces)

    async def _probe(self, index: int) -> None:
        """See SsdFiles. A device of which reads are refused is one that a probe cannot read either."""
        health = self.files[index].health
        if health.is_doubted and (fault := self._faults.strike(FaultKind.SSD_READ_ERROR, index)):
            health.lose(f"a probe: {os.strerror(fault.error_number)} (injected)")
            return
        await super()._probe(index)

    async def _delay(self, kind: FaultKind, slot: Slot) -> None:
        if fault := self._faults.strike(kind, slot.path_index):
            delay_s = fault.delay_ns / 10**9
            # As on a slow device it is a thread of the path that waits, and it is an operation that grows
            # old.
            file = self.files[slot.path_index]
            await file.occupy(lambda: time.sleep(delay_s), is_read=kind is FaultKind.SSD_READ_DELAY)


def _problem(what: str, fault: Fault, slot: Slot) -> str:
    return f"{what} at byte {slot.offset_bytes}: {os.strerror(fault.error_number)} (injected)"


def _flipping(into: memoryview, pieces: Pieces, then: Arrived) -> Callable[[int, int], None]:
    """`then`, before which a bit is flipped in the last page that is read: its first, which is no padding."""
    flat = into.cast("B")
    # The last page of the last piece is never the header, whose damage would be found in another way.
    end = pieces[-1][1] if pieces else flat.nbytes
    position = (end - 1) // ALIGN_BYTES * ALIGN_BYTES

    def flip(begin: int, end: int) -> None:
        if begin <= position < end:
            flat[position] ^= 1
        if then:
            then(begin, end)

    return flip


class SlowMetadata(RocksDbMetadata):
    """See RocksDbMetadata."""

    def __init__(
        self,
        path: str | Path,
        faults: Faults,
        *,
        witness: Witness | None = None,
        catalog: Catalog | None = None,
        hang_after_s: float = HANG_AFTER_S,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """See RocksDbMetadata."""
        super().__init__(path, witness=witness, catalog=catalog, hang_after_s=hang_after_s, before=before)
        self._faults = faults

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """See MetadataStore.

        As on a slow device, it is the sync that takes long: changes keep their order.
        """
        written = super().commit(changes, is_durable=is_durable)
        fault = self._faults.strike(FaultKind.COMMIT_DELAY) if is_durable else None
        return written if fault is None else _late(written, fault.delay_ns / 10**9)


async def _late(written: Coroutine[Any, Any, None], delay_s: float) -> None:
    """Behind the commit: it is acknowledged late, and keeps its place among the others."""
    await written
    await asyncio.sleep(delay_s)
