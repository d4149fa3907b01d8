"""Resident: which segments may leave DRAM next, found without a look at those that may not.

Of every session with something that may leave it knows below which position that lies; the newest
tokens leave first. What is said to have become clean and is not is passed over once.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from ctxcache.core.eviction import Ranking
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session


class Resident:
    """Sessions that may have segments that may leave DRAM. Owned by the event loop."""

    def __init__(self, rank: Callable[[bytes], int | None], by_uid: Mapping[bytes, Session]) -> None:
        self._by_uid = by_uid
        self._ranking = Ranking(rank)
        self._ends: dict[bytes, int] = {}

    def end(self, uid: bytes) -> int:
        """The position below which the session's segments may leave; 0 when none may."""
        return self._ends.get(uid, 0)

    def add(self, segment: Segment) -> None:
        """The segment may leave, as far as its sessions go."""
        for residence in segment.residences:
            self._raise(residence.uid, segment.end)

    def add_session(self, session: Session) -> None:
        """A session came with segments that others had."""
        if session.residence.dram_segment_count:
            self._raise(session.uid, session.segments[-1].end)

    def forget(self, uid: bytes) -> None:
        """Nothing of the session may leave, or it is gone."""
        if self._ends.pop(uid, None) is not None:
            self._ranking.discard(uid)

    def take(self, may_leave: Callable[[Segment], bool]) -> Segment | None:
        """The segment that leaves first: of the coldest session the newest. None when none may.

        It is not found again before it is added again.
        """
        while (uid := self._ranking.first()) is not None:
            segments = self._by_uid[uid].segments
            i = bisect_left(segments, self._ends[uid], key=lambda segment: segment.begin)
            while i and not may_leave(segments[i - 1]):
                i -= 1
            if i:
                self._ends[uid] = segments[i - 1].begin
                return segments[i - 1]
            self.forget(uid)
        return None

    def _raise(self, uid: bytes, end: int) -> None:
        known = self._ends.get(uid)
        if known is None:
            self._ranking.add(uid)
        if known is None or known < end:
            self._ends[uid] = end
