"""Who hands out slots: free extents of each path, first fit, neighbours merged.

Segments of one model have one size, so freed slots are taken again as they are and fragmentation
stays low. Worst case of an allocation is a walk over the free extents of every path.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from ctxcache.format.slot import Slot


class Extents:
    """Free space of one path, `[first_offset, first_offset + capacity)`."""

    def __init__(self, first_offset: int, capacity_bytes: int) -> None:
        self._begins: list[int] = [first_offset] if capacity_bytes else []
        self._end_of = {first_offset: first_offset + capacity_bytes} if capacity_bytes else {}
        self.capacity_bytes = self.free_bytes = capacity_bytes

    def take(self, size_bytes: int) -> int | None:
        """Offset of a free run of that size, now taken; None when there is none."""
        for begin in self._begins:
            if self._end_of[begin] - begin >= size_bytes:
                self.take_at(begin, size_bytes)
                return begin
        return None

    def take_at(self, begin: int, size_bytes: int) -> bool:
        """Take exactly `[begin, begin + size_bytes)`. False when it is not free."""
        i = bisect_left(self._begins, begin + 1) - 1
        if i < 0 or self._end_of[self._begins[i]] < begin + size_bytes:
            return False
        low = self._begins.pop(i)
        high = self._end_of.pop(low)
        self._add(low, begin)
        self._add(begin + size_bytes, high)
        self.free_bytes -= size_bytes
        return True

    def give(self, begin: int, size_bytes: int) -> None:
        """Give a run back. It must have been taken."""
        self.free_bytes += size_bytes
        end = begin + size_bytes
        i = bisect_left(self._begins, begin)
        if i < len(self._begins) and self._begins[i] == end:
            end = self._end_of.pop(self._begins.pop(i))
        if i and self._end_of[self._begins[i - 1]] == begin:
            begin = self._begins.pop(i - 1)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        if begin < end:
            insort(self._begins, begin)
            self._end_of[begin] = end


class SlotAllocator:
    """Slots over all paths of a tier, round robin, so that neighbours in a session use every path."""

    def __init__(self, capacities_bytes: Sequence[int], *, first_offset: int = 0) -> None:
        self._paths = [Extents(first_offset, capacity - first_offset) for capacity in capacities_bytes]
        self._next = 0
        self.capacity_bytes = sum(path.free_bytes for path in self._paths)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, over all paths."""
        return sum(path.free_bytes for path in self._paths)

    @property
    def used_bytes(self) -> int:
        """Bytes taken, over all paths."""
        return self.capacity_bytes - self.free_bytes

    @property
    def used_bytes_by_path(self) -> tuple[int, ...]:
        """Bytes taken on each path."""
        return tuple(path.capacity_bytes - path.free_bytes for path in self._paths)

    def take(self, size_bytes: int) -> Slot | None:
        """A slot on the next path that has room; None when none has."""
        for step in range(len(self._paths)):
            index = (self._next + step) % len(self._paths)
            offset = self._paths[index].take(size_bytes)
            if offset is not None:
                self._next = index + 1
                return Slot(index, offset, size_bytes)
        return None

    def adopt(self, slot: Slot) -> bool:
        """Take exactly this slot, as found in a record. False when it is taken or out of bounds."""
        return slot.path_index < len(self._paths) and self._paths[slot.path_index].take_at(
            slot.offset_bytes, slot.size_bytes
        )

    def give(self, slot: Slot) -> None:
        """Give a slot back."""
        self._paths[slot.path_index].give(slot.offset_bytes, slot.size_bytes)
