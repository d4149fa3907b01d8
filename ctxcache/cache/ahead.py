"""Ahead: segments that were promoted ahead of need, and what became of them. Counts; moves nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ctxcache.core.segment import Segment
from ctxcache.core.session import Piece


@dataclass(slots=True)
class Prefetched:
    """Segments promoted ahead of need since the start; of those, read since, and dropped unread.

    Late is what was read while it was still on its way: it counts as used too.
    """

    prefetched_segment_count: int = 0
    prefetch_used_segment_count: int = 0
    prefetch_unused_segment_count: int = 0
    prefetch_late_segment_count: int = 0


class Ahead:
    """Segments promoted ahead of need, or being so, and not read since. Owned by the event loop."""

    def __init__(self) -> None:
        self.counts = Prefetched()
        self._segments: set[Segment] = set()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def promoting(self, segment: Segment) -> None:
        """The segment is being promoted ahead of need."""
        self._segments.add(segment)

    def promoted(self, segment: Segment, *, is_there: bool) -> None:
        """Its promotion ahead of need is over; not `is_there`: it failed."""
        self.counts.prefetched_segment_count += is_there
        if not is_there:
            self._segments.discard(segment)

    def used(self, pieces: Iterable[Piece]) -> None:
        """These are read."""
        if self._segments:
            for piece in pieces:
                if piece.segment in self._segments:
                    self._segments.discard(piece.segment)
                    self.counts.prefetch_used_segment_count += 1
                    self.counts.prefetch_late_segment_count += piece.segment.dram is None

    def dropped(self, segment: Segment) -> None:
        """The segment left DRAM."""
        if segment in self._segments:
            self._segments.discard(segment)
            self.counts.prefetch_unused_segment_count += 1
