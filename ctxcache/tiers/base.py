"""The interface of a tier: reads, writes and syncs of slots, and nothing else.

A tier knows no session, no eviction and no free space: `core/extents.py` hands out slots. Every
implementation passes `ctxcache.testing.tiers.TierContract`.
"""

from collections.abc import Collection
from typing import Protocol

from ctxcache.format.slot import Slot


class Tier(Protocol):
    """Bytes at slots, on one or more paths.

    Worst case of every call is one device operation per 4 MiB; none blocks the event loop.
    Offsets, sizes and buffer addresses are multiples of 4 KiB. A read or write that fails raises
    TierFailure, and the slot's content is then undefined.
    """

    @property
    def paths(self) -> tuple[str, ...]:
        """The file behind each path number."""

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """The size of each path."""

    async def read(self, slot: Slot, begin: int, into: memoryview) -> None:
        """Fill `into` from byte `begin` of the slot. Raises TierFailure, never reads short."""

    async def write(self, slot: Slot, begin: int, data: memoryview) -> None:
        """Put `data` at byte `begin` of the slot. Not durable before `sync`. Raises TierFailure."""

    async def sync(self, path_indexes: Collection[int]) -> None:
        """Make what was written to these paths durable.

        A failure is final: TierFailure, and the writes since the last success must not be taken as
        durable, whatever a later sync says.
        """

    def close(self) -> None:
        """Give up files and mappings. Nothing may be in flight."""


class MappedTier(Tier, Protocol):
    """A tier whose slots are memory of this process."""

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable, valid until `close`."""
