"""Admission: which sessions are written to SSD though nobody asked for it, and which are spared.

Spared is who has nothing there, is used by nobody, neither pinned nor retained, and worth less than who would have to
leave for it. It stays in DRAM, leaves from there when it is the coldest, and is looked at again when something
happens to it or it has become old. Decides by facts of now; moves nothing. Worst case: one look at all that would leave.
"""

from collections.abc import Callable
from contextlib import closing

from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.cache.victims import Victims
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.placement.admission import is_worth_writing
from ctxcache.core.residence import Residence
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session


class Admission:
    """Who is written. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, ssd: SlotAllocator, victims: Victims) -> None:
        self._state, self._io, self._ssd, self._victims = state, io, ssd, victims

    def waits(self, session: Session) -> bool:
        """Whether nobody can tell yet what the session is worth, and SSD has no free room for it."""
        is_idle = self._state.placement.is_idle(session)
        return not is_idle and _is_in_dram_alone(session) and not self._is_room(session)

    def refuses(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Whether the session is not worth its place on SSD, of which `ahead_bytes` are somebody's already."""
        placement = self._state.placement
        if session.is_pinned or session.is_writing or not placement.is_idle(session):
            return False
        if not _is_in_dram_alone(session) or placement.retention.store_level(session.uid):
            return False
        needed_bytes = ahead_bytes + self._dirty_bytes(session)
        with closing(self._victims.leaving(session, needed_bytes)) as leaving:
            return not is_worth_writing(needed_bytes, self._free_bytes, leaving)

    def may_leave(self, segment: Segment, is_due: Callable[[bytes], bool]) -> bool:
        """Whether a segment of a spared session may leave DRAM, and with it the session the store.

        One that has come to be worth writing is spared no more: written, it may leave DRAM. So is one that somebody keeps,
        but one at a time, for others leave SSD for them: not while a session that is to be written anyway `is_due`.
        """
        home = segment.home
        if not isinstance(home, Residence) or not self._state.unwritten.is_spared(home.uid):
            return False
        session = self._state.by_uid[home.uid]
        is_kept = not self._victims.is_removable(session)
        if not is_kept and self.refuses(session):
            return True
        if is_kept and self._state.unwritten.ranking.first(is_due) is not None:
            return False
        self._state.unwritten.unspare(session.uid)
        return False

    @property
    def _free_bytes(self) -> int:
        return self._ssd.free_bytes_outside(self._io.refusals)

    def _is_room(self, session: Session) -> bool:
        return self._dirty_bytes(session) <= self._free_bytes

    def _dirty_bytes(self, session: Session) -> int:
        return len(self._state.unwritten.segments(session.uid)) * session.layout.size_bytes


def _is_in_dram_alone(session: Session) -> bool:
    """Whether SSD has nothing of it, and never had anything that is still part of it."""
    return not session.recorded_end and not session.amounts().ssd_bytes
