"""The allocator of slots: free extents of each path, best fit, neighbours merged.

Segments of one model have one size, so freed slots are taken again as they are and fragmentation
stays low. Every operation takes logarithmic time: free extents lie in bins by size, and a path of C
bytes has no more than sqrt(C / 2 KiB) different sizes of them (their sum is at most C).
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from ctxcache.format.layout import Slot

FREE_BYTES = attrgetter("free_bytes")
SLACK = 64
"""Outdated begins of a size that are not worth a pass."""


# Free extents in three indexes, and slots between them:
#
#     path      |####......####|..........|#####|.....|
#     _end_of   begin ► end of each free extent      to find the extent that begins where a slot ends
#     _begin_of end ► begin                          to find the one that ends where it begins
#     _bins     size ► heap of begins                the smallest size that fits, then the lowest offset
#
# Best fit keeps large extents whole for long segments. The lowest offset keeps the file's end free.
class Extents:
    """Free space of one path, `[first_offset, first_offset + capacity_bytes)`."""

    def __init__(self, first_offset: int, capacity_bytes: int) -> None:
        self.first_offset = first_offset
        self.capacity_bytes = self.free_bytes = capacity_bytes
        self.run_count = 0
        """Runs taken."""
        self._end_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        # Begins of the extents of each size; some are outdated, `_end_of` knows. No bin is without one that
        # is not.
        self._bins: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._sizes: list[int] = []
        self._add(first_offset, first_offset + capacity_bytes)

    def take(self, size_bytes: int) -> int | None:
        """Offset of a run of that size, now taken, from the smallest extent that has one.

        None when no path has room.
        """
        i = bisect_left(self._sizes, size_bytes)
        if i == len(self._sizes):
            return None
        size = self._sizes[i]
        begins = self._bins[size]
        # Begins of extents that are gone, or have another size by now, are passed over.
        # No bin is empty of current entries, so that this ends.
        while self._end_of.get(begin := heappop(begins)) != begin + size:
            continue
        self._remove(begin)
        self._add(begin + size_bytes, begin + size)
        self.free_bytes -= size_bytes
        self.run_count += 1
        return begin

    @property
    def largest_free_bytes(self) -> int:
        """The largest run that could be taken."""
        return self._sizes[-1] if self._sizes else 0

    def adopt(self, runs: Iterable[tuple[int, int]]) -> list[bool]:
        """Take exactly these runs of a path nothing was taken of yet, `(offset, size)` each, ascending.

        False for those that are out of bounds or overlap one before.
        """
        if self.free_bytes != self.capacity_bytes:
            raise ValueError("runs are adopted before any is taken")
        # One pass over runs in ascending order leaves the gaps between them as the free extents.
        begin, end = self.first_offset, self.first_offset + self.capacity_bytes
        self._end_of, self._begin_of, self._bins, self._counts, self._sizes = {}, {}, {}, {}, []
        is_adopted = []
        for offset, size_bytes in runs:
            fits = begin <= offset and offset + size_bytes <= end
            is_adopted.append(fits)
            if fits:
                # Gap before the run. `_add` ignores empty ones.
                self._add(begin, offset)
                self.free_bytes -= size_bytes
                begin = offset + size_bytes
        self._add(begin, end)
        self.run_count = sum(is_adopted)
        return is_adopted

    def give(self, begin: int, size_bytes: int) -> None:
        """Give a run back. It must have been taken."""
        self.free_bytes += size_bytes
        self.run_count -= 1
        end = begin + size_bytes
        # Neighbours that are free are joined: a long slot needs one piece.
        if end in self._end_of:
            end = self._remove(end)
        if begin in self._begin_of:
            begin = self._begin_of[begin]
            self._remove(begin)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        size = end - begin
        if size <= 0:
            return
        self._end_of[begin], self._begin_of[end] = end, begin
        begins = self._bins.get(size)
        if begins is None:
            begins = self._bins[size] = []
            self._counts[size] = 0
            insort(self._sizes, size)
        self._counts[size] += 1
        heappush(begins, begin)
        # Deleting from the middle of a heap is not possible: begins that are gone stay until they outnumber
        # the rest.
        if len(begins) > 2 * self._counts[size] + SLACK:
            # More that are outdated than are not: once in as many calls.
            self._bins[size] = [b for b in set(begins) if self._end_of.get(b) == b + size]
            heapify(self._bins[size])

    def _remove(self, begin: int) -> int:
        end = self._end_of.pop(begin)
        del self._begin_of[end]
        size = end - begin
        self._counts[size] -= 1
        if not self._counts[size]:
            del self._bins[size], self._counts[size], self._sizes[bisect_left(self._sizes, size)]
        return end


class SlotAllocator:
    """Slots over all paths of a tier.

    A session names the path that it lies on, and gets slots there as long as there are any: a device that
    is lost takes whole sessions with it, and leaves the others whole. Sessions without a path are spread
    over the paths in proportion to what is free there.
    """

    def __init__(self, capacities_bytes: Sequence[int], *, first_offset: int = 0) -> None:
        self._paths = [Extents(first_offset, capacity - first_offset) for capacity in capacities_bytes]
        self.path_count = len(self._paths)
        self._credits = [0.0] * len(self._paths)
        """How many sessions each path is owed: the one that is owed most has the next one."""
        self.capacity_bytes = sum(path.free_bytes for path in self._paths)
        self.smallest_path_bytes = min((path.capacity_bytes for path in self._paths), default=0)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, over all paths."""
        return sum(map(FREE_BYTES, self._paths))

    def free_bytes_outside(self, closed: Collection[int]) -> int:
        """Bytes not taken, on paths that are not closed."""
        return sum(path.free_bytes for i, path in enumerate(self._paths) if i not in closed)

    @property
    def used_bytes(self) -> int:
        """Bytes taken, over all paths."""
        return self.capacity_bytes - self.free_bytes

    @property
    def used_bytes_by_path(self) -> tuple[int, ...]:
        """Bytes taken on each path."""
        return tuple(path.capacity_bytes - path.free_bytes for path in self._paths)

    @property
    def largest_free_bytes_by_path(self) -> tuple[int, ...]:
        """The largest slot that could be taken on each path."""
        return tuple(path.largest_free_bytes for path in self._paths)

    @property
    def slot_count_by_path(self) -> tuple[int, ...]:
        """Slots taken on each path."""
        return tuple(path.run_count for path in self._paths)

    def take(
        self, size_bytes: int, *, closed: Collection[int] = (), on_path: int | None = None
    ) -> Slot | None:
        """A slot on that path, or else on another one that has room; None when no path has room.

        Never on a `closed` one.
        """
        if len(self._paths) == 1:
            on_path = 0
        # The session's own path first: a device that is lost shall take few sessions whole, not a part of
        # each.
        if on_path is not None and on_path not in closed:
            offset = self._paths[on_path].take(size_bytes)
            if offset is not None:
                return Slot(on_path, offset, size_bytes)
        index = self._next_path(size_bytes, closed)
        if index is None:
            return None
        offset = self._paths[index].take(size_bytes)
        return None if offset is None else Slot(index, offset, size_bytes)

    def _next_path(self, size_bytes: int, closed: Collection[int]) -> int | None:
        """The path of the next session: smooth weighted round robin over those with room, by free bytes."""
        # With 3 GB and 1 GB free, sessions go a a b a, a a b a: in proportion at any time, where drawing by
        # weight would send long runs to one path now and then.
        free_bytes = {
            i: path.free_bytes
            for i, path in enumerate(self._paths)
            if i not in closed and path.largest_free_bytes >= size_bytes
        }
        if not free_bytes:
            return None
        # Free bytes at each call: a path that fills up faster gets fewer sessions from then on.
        total_bytes = sum(free_bytes.values())
        for i, path_bytes in free_bytes.items():
            self._credits[i] += path_bytes / total_bytes
        index = max(free_bytes, key=lambda i: self._credits[i])
        # The chosen path pays for its turn, so that the others come next in proportion.
        self._credits[index] -= 1
        return index

    def adopt(self, slots: Iterable[tuple[int, int, int]]) -> list[int]:
        """Take exactly these slots, as found in records, before any other is taken.

        Returns the indexes of those that could not be had: out of bounds, or overlapping another one.
        """
        # By path, in columns: there may be ten million.
        columns = [(array("q"), array("q"), array("q")) for _ in self._paths]
        misplaced = []
        for i, (path_index, offset_bytes, size_bytes) in enumerate(slots):
            # Records of a store with more paths: those slots cannot be had, and their sessions are cut.
            if path_index >= len(self._paths):
                misplaced.append(i)
                continue
            offsets, sizes, indexes = columns[path_index]
            offsets.append(offset_bytes)
            sizes.append(size_bytes)
            indexes.append(i)
        for path, (offsets, sizes, indexes) in zip(self._paths, columns, strict=True):
            order = sorted(range(len(offsets)), key=offsets.__getitem__)
            is_adopted = path.adopt((offsets[j], sizes[j]) for j in order)
            misplaced += [indexes[j] for j, is_ours in zip(order, is_adopted, strict=True) if not is_ours]
        return misplaced

    def give(self, slot: Slot) -> None:
        """Give a slot back."""
        self._paths[slot.path_index].give(slot.offset_bytes, slot.size_bytes)
