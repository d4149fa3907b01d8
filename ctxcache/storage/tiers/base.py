"""The interface of a tier: reads, writes and syncs of slots, and nothing else.

A tier knows no session, no eviction and no free space: `core/extents.py` hands out slots. Every
implementation passes `TierContract`, which `tests/tiers/test_tier_contract.py` runs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ctxcache.format.layout import Slot

Range = tuple[int, int]
"""`[begin, end)` of a buffer, in bytes; both multiples of 4 KiB."""
Pieces: TypeAlias = Sequence[Range] | None
"""The parts in which bytes are moved; None for one."""
Arrived: TypeAlias = Callable[[int, int], None] | None
"""Called with the begin and the end of each piece that is there."""


@dataclass(frozen=True, slots=True)
class TierRefusal:
    """Why a path takes no writes; `is_final`: until a restart. `is_lost`: its bytes cannot be had either."""

    problem: str
    is_final: bool
    is_lost: bool = False
    since_ns: int | None = field(default=None, compare=False)
    """When the path was lost or fenced, as Unix time; None for what passes by itself."""

    @property
    def state(self) -> str:
        """In a word."""
        return "lost" if self.is_lost else "fenced" if self.is_final else "resting"

    def __str__(self) -> str:
        return f"{self.state}{' until a restart' * (self.state == 'fenced')}: {self.problem}"


# The callers, and the thread of each work:
#
#     event loop ──► read, write, sync ──► queue of pieces ──► threads of the path ──► device
#          ▲                                                        │
#          └── one wake-up when the last piece is done ◄────────────┘   `then` runs there, piece by piece
class Tier(Protocol):
    """Bytes at slots, on one or more paths.

    Worst case of every call is one device operation per MiB; none blocks the event loop. `pieces` cuts a
    transfer otherwise: those ranges of the buffer are moved and nothing else, one operation each.
    Offsets, sizes and buffer addresses are multiples of 4 KiB. A read or write that fails raises
    TierFailure, and the slot's content is then undefined. The buffer may be used for something else when the
    failure's `returned`, if it has one, is done: the device may read or write it until then.
    """

    @property
    def paths(self) -> tuple[str, ...]:
        """The file behind each path number."""

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """The size of each path."""

    @property
    def refusals(self) -> Mapping[int, TierRefusal]:
        """Path numbers that take no writes now, each with why; those that are not lost are read as before."""

    async def read(
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """Fill `into` from byte `begin` of the slot. Raises TierFailure, never reads short.

        `then(begin, end)` is called for every piece as soon as it is there, in no order, while others are
        still being read; in a thread where there are threads. The read raises its errors.
        """

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """Put `data` at byte `begin` of the slot. Not durable before `sync`. Raises TierFailure.

        A path that takes no more for that is in `refusals` before the failure is raised.
        """

    async def sync(self, path_indexes: Collection[int]) -> None:
        """Make what was written to these paths durable.

        A failure is final: TierFailure, and the writes since the last success must not be taken as
        durable, whatever a later sync says. The path takes no more writes.
        """

    def close(self) -> None:
        """Give up files and mappings. Nothing may be in flight."""


class DeviceTier(Tier, Protocol):
    """A tier of devices that may be lost, as `refusals` says, and may come back."""

    @property
    def emptied(self) -> Collection[int]:
        """Path numbers whose file was made by this start: nothing that a record names can be there."""

    @property
    def written_bytes(self) -> tuple[int, ...]:
        """The bytes written to each path since the start, without failed writes."""

    async def probe(self) -> None:
        """Find out which devices are lost and which are back. Never raises for what a device does."""

    def give_up_overdue(self) -> None:
        """Lose the devices that have not returned an operation for too long; its callers get TierFailure now.

        Such a path hands out no slot before the device has returned every operation.
        """


class MappedTier(Tier, Protocol):
    """A tier whose slots are memory of this process."""

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable, valid until `close`."""
