"""Shelf: the slots of one tier, and the slots of it that are kept from use."""

from collections.abc import Sequence

from ctxcache.core.extents import SlotAllocator
from ctxcache.core.ledger.segment import Segment
from ctxcache.format.slot import Slot


class Shelf(SlotAllocator):
    """Hands out a tier's slots. Owned by the ledger. To others the sets are to be looked at, not changed."""

    def __init__(self, capacities_bytes: Sequence[int], *, first_offset: int = 0) -> None:
        super().__init__(capacities_bytes, first_offset=first_offset)
        self.stranded: dict[Slot, Segment | None] = {}
        """Slots whose records may be gone or not, since a commit failed. Taken until commits succeed again.

        Each comes with the segment whose record was to go, which may still be held; None for a replaced slot.
        """
        self.quarantined: set[Slot] = set()
        """Slots that gave back other bytes than were written there. Taken until they are released."""
        self.spoiled: set[Slot] = set()
        """Slots in memory that do not keep what is written there. Taken until a restart."""

    def give_back(self, slot: Slot | None) -> None:
        """Let a slot be taken again, unless a record may still name it."""
        if slot is not None and slot not in self.stranded:
            self.give(slot)
