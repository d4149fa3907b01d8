"""Victims: which session is given up when there is no room. Looks at state, changes none of it.

Never one that is pinned, being written, or held. Worst case: there is none.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from ctxcache.cache.quotas import Quotas
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.evictable import Verdict
from ctxcache.core.placement.admission import Leaving
from ctxcache.core.session import Session


class Victims:
    """Sessions that may be given up, the coldest first. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, quotas: Quotas) -> None:
        self._state = state
        self._io = io
        self.quotas = quotas

    def in_memory(self, among: Sequence[str] | None) -> Session | None:
        """The coldest of these accounts that gives room in DRAM; what is clean has left already. None when there is none."""
        by_uid = self._state.by_uid
        uid = self._state.unwritten.first(lambda uid: self.is_removable(by_uid[uid]), among)
        return None if uid is None else by_uid[uid]

    def on_ssd(self, for_session: Session, size_bytes: int) -> Session | None:
        """The coldest but this one that gives room on a path that takes writes. None when there is none."""
        among = self.quotas.on_ssd(for_session.tenant, size_bytes)
        return self._written(for_session, among, self._frees_room)

    def leaving(self, comer: Session, size_bytes: int) -> Generator[Leaving]:
        """Those that would leave for so many bytes of a session that SSD has nothing of, one after the other."""
        among = self.quotas.on_ssd(comer.tenant, size_bytes)
        rank = self._state.placement.rank(comer.uid)
        judge = self._judge(comer, self._frees_room)
        with closing(self._state.evictable.in_order(judge, among)) as uids:
            for uid in uids:
                victim = self._state.by_uid[uid]
                # Who has more than its share gives way, whatever it is worth.
                is_others = among is not None and victim.tenant != comer.tenant
                gives_way = is_others or (self._state.placement.rank(uid) or ()) < (rank or ())
                yield Leaving(gives_way, self._freed_bytes(victim))

    def of_tenant(self, for_session: Session) -> Session | None:
        """The coldest of the session's tenant but this one, wherever it lies. None when there is none."""
        among = [for_session.tenant]
        return self._written(for_session, among, lambda _: True) or self.in_memory(among)

    def over_share(self, dirty: Session) -> Session | None:
        """The coldest that SSD has no room for, of the account of this one, if that has more than its share."""
        account = self.quotas.over_share(dirty.tenant)
        return None if account is None else self.in_memory([account])

    def _written(
        self, for_session: Session, among: Sequence[str] | None, is_of_use: Callable[[Session], bool]
    ) -> Session | None:
        found = self._state.evictable.first(self._judge(for_session, is_of_use), among)
        return None if found is None else self._state.by_uid[found]

    def _judge(
        self, for_session: Session, is_of_use: Callable[[Session], bool]
    ) -> Callable[[bytes], Verdict]:

        def judge(uid: bytes) -> Verdict:
            session = self._state.by_uid[uid]
            if session.is_pinned or not session.amounts().ssd_bytes:
                return Verdict.NOT_BEFORE_ITS_NEXT_CHANGE
            leaves = session is not for_session and self.is_removable(session) and is_of_use(session)
            return Verdict.LEAVES if leaves else Verdict.NOT_NOW

        return judge

    def _freed_bytes(self, session: Session) -> int:
        """What goes with it; what others list too stays."""
        closed = self._io.refusals
        slots = (s.ssd for s in session.segments if s.session_count == 1)
        return sum(slot.size_bytes for slot in slots if slot and slot.path_index not in closed)

    def _frees_room(self, session: Session) -> bool:
        closed = self._io.refusals
        return any(s.ssd and s.ssd.path_index not in closed for s in session.segments)

    def is_removable(self, session: Session) -> bool:
        """Whether nobody keeps the session in the store, or would keep all of it."""
        if session.is_pinned or session.is_writing or not self._state.placement.is_idle(session):
            return False
        held = [s for s in session.segments if s.hold_count]
        if not held:
            return True
        # What others list too stays with them, whoever reads it: then it must have something else to give.
        is_shared = all(s.session_count > 1 for s in held)
        return is_shared and any(s.session_count == 1 for s in session.segments)
