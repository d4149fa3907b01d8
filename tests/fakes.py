"""Fakes: a clock that is moved by hand, and a tier in memory that fails and waits on demand.

MemoryTier passes the same contract suite as the real tiers do. Worst case: a fault that was asked
for and never came, which `faults_left` shows.
"""

import asyncio
import enum
from collections import defaultdict
from collections.abc import Collection, Sequence

from ctxcache.errors import TierFailure
from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.storage.tiers.base import Arrived, Pieces, TierRefusal

NANOSECONDS = 1_000_000_000
EPOCH_NS = 1_700_000_000 * NANOSECONDS


class FakeClock:
    """See Clock. Stands still until it is moved."""

    def __init__(self, now_ns: int = EPOCH_NS) -> None:
        self._now_ns = now_ns
        self._monotonic_ns = self._wall_ahead_ns = 0

    def now_ns(self) -> int:
        """See Clock."""
        return self._now_ns

    def monotonic_ns(self) -> int:
        """See Clock."""
        return self._monotonic_ns

    def wall_ahead_ns(self) -> int:
        """See Clock."""
        return self._wall_ahead_ns

    def wall_ns(self) -> int:
        """See Clock."""
        return self._now_ns + self._wall_ahead_ns

    def advance(self, *, seconds: float = 0, ns: int = 0) -> None:
        """Let time pass, on every hand."""
        step_ns = ns + round(seconds * NANOSECONDS)
        if step_ns < 0:
            raise ValueError("monotonic time does not go back; jump moves the wall clock alone")
        self._now_ns += step_ns
        self._monotonic_ns += step_ns

    def jump(self, *, to_ns: int) -> None:
        """Set the wall clock, forwards or back, as an operator or NTP does. The store's time goes on."""
        self._wall_ahead_ns = to_ns - self._now_ns


class Operation(enum.Enum):
    """Operations of a tier."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class MemoryTier:
    """See Tier. Pages in a dict, zeros where nothing was written.

    Operations of a kind are numbered from 1 in the order of the calls; `counts` says how many came.
    """

    first_offset_bytes = 0

    def __init__(self, capacities_bytes: Sequence[int] = (64 << 20,)) -> None:
        self._capacities_bytes = tuple(capacities_bytes)
        self.pages: dict[tuple[int, int], bytes] = {}
        self.durable: dict[tuple[int, int], bytes] = {}
        self._fenced: set[int] = set()
        self.lost: set[int] = set()
        self._full: set[int] = set()
        self.emptied: set[int] = set()
        """See DeviceTier."""
        self._written_bytes = [0] * len(self._capacities_bytes)
        self._faults: dict[Operation, set[int]] = defaultdict(set)
        self._gates: dict[tuple[Operation, int | None], asyncio.Event] = {}
        self.counts: dict[Operation, int] = dict.fromkeys(Operation, 0)

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return tuple(f"memory/{index}" for index in range(len(self._capacities_bytes)))

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier."""
        return self._capacities_bytes

    @property
    def refusals(self) -> dict[int, TierRefusal]:
        """See Tier."""
        fenced = dict.fromkeys(self._fenced, TierRefusal("a failed sync", is_final=True))
        fenced |= dict.fromkeys(self._full, TierRefusal("No space left on device", is_final=False))
        return fenced | dict.fromkeys(self.lost, TierRefusal("it is gone", is_final=False, is_lost=True))

    @property
    def faults_left(self) -> int:
        """Faults that were asked for and have not come."""
        return sum(map(len, self._faults.values()))

    def fail(self, operation: Operation, *, nth: int = 1) -> None:
        """Let the `nth` operation of its kind, counted from now, raise TierFailure."""
        self._faults[operation].add(self.counts[operation] + nth)

    def fence(self, path_index: int) -> None:
        """Let a path take no more writes."""
        self._fenced.add(path_index)

    def lose(self, path_index: int) -> None:
        """Let nothing of a path be had, until `find`."""
        self.lost.add(path_index)

    def find(self, path_index: int) -> None:
        """Let a path that was lost be there again, with what it had."""
        self.lost.discard(path_index)

    def fill(self, path_index: int, *, is_full: bool = True) -> None:
        """Let a path's device have no room for what is written, or room again."""
        (self._full.add if is_full else self._full.discard)(path_index)

    @property
    def written_bytes(self) -> tuple[int, ...]:
        """See DeviceTier."""
        return tuple(self._written_bytes)

    async def probe(self) -> None:
        """See DeviceTier."""

    def give_up_overdue(self) -> None:
        """See DeviceTier. Memory returns everything."""

    def hold(self, operation: Operation, path_index: int | None = None) -> asyncio.Event:
        """Let operations of this kind, on one path or all, wait before they do anything until it is set."""
        return self._gates.setdefault((operation, path_index), asyncio.Event())

    def crash(self) -> "MemoryTier":
        """Return what a power cut leaves: a tier with what was synced."""
        survivor = MemoryTier(self._capacities_bytes)
        survivor.pages = dict(self.durable)
        survivor.durable = dict(self.durable)
        survivor.lost = set(self.lost)
        return survivor

    async def read(
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        keys = self._keys(slot, begin, into.nbytes)
        await self._arrive(Operation.READ, slot.path_index)
        flat = into.cast("B")
        for first, last in [(0, into.nbytes)] if pieces is None else pieces:
            for i in range(first // ALIGN_BYTES, last // ALIGN_BYTES):
                flat[i * ALIGN_BYTES : (i + 1) * ALIGN_BYTES] = self.pages.get(keys[i], bytes(ALIGN_BYTES))
            if then:
                then(first, last)

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """See Tier."""
        keys = self._keys(slot, begin, data.nbytes)
        self._check_fence(slot.path_index)
        await self._arrive(Operation.WRITE, slot.path_index)
        if slot.path_index in self._full:
            raise TierFailure(path=self.paths[slot.path_index], problem="No space left on device")
        flat = data.cast("B")
        for first, last in [(0, data.nbytes)] if pieces is None else pieces:
            for i in range(first // ALIGN_BYTES, last // ALIGN_BYTES):
                self.pages[keys[i]] = bytes(flat[i * ALIGN_BYTES : (i + 1) * ALIGN_BYTES])
            self._written_bytes[slot.path_index] += last - first

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier. A failure is that of one device, the first path's, and fences it."""
        for index in path_indexes:
            self._check_fence(index)
        # A write that comes while a sync waits is not covered by that sync.
        written = {key: page for key, page in self.pages.items() if key[0] in path_indexes}
        try:
            await self._arrive(Operation.SYNC, min(path_indexes, default=0))
        except TierFailure:
            self._fenced.add(min(path_indexes, default=0))
            raise
        self.durable |= written

    def close(self) -> None:
        """See Tier."""

    async def _arrive(self, operation: Operation, path_index: int) -> None:
        self.counts[operation] += 1
        number = self.counts[operation]
        if path_index in self.lost:
            raise TierFailure(path=self.paths[path_index], problem="it is gone")
        for place in (None, path_index):
            if gate := self._gates.get((operation, place)):
                await gate.wait()
        if number in self._faults[operation]:
            self._faults[operation].discard(number)
            problem = f"{operation.value} {number} was told to fail"
            raise TierFailure(path=self.paths[path_index], problem=problem)

    def _check_fence(self, path_index: int) -> None:
        if path_index in self._fenced:
            raise TierFailure(path=self.paths[path_index], problem="fenced after a failed sync")

    def _keys(self, slot: Slot, begin: int, size_bytes: int) -> list[tuple[int, int]]:
        capacity_bytes = self._capacities_bytes[slot.path_index]
        is_in_slot = begin >= 0 and begin + size_bytes <= slot.size_bytes
        if not is_in_slot or not 0 <= slot.offset_bytes <= capacity_bytes - slot.size_bytes:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not in the tier")
        if (slot.offset_bytes | begin | size_bytes) % ALIGN_BYTES:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not {ALIGN_BYTES} B-aligned")
        first = (slot.offset_bytes + begin) // ALIGN_BYTES
        return [(slot.path_index, first + i) for i in range(size_bytes // ALIGN_BYTES)]
