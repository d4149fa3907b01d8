"""Leaving: which segment leaves memory next, which session leaves the store, and which is not written.

Never a session that is pinned, being written or held. A session is spared that has nothing below, is idle,
neither pinned nor retained, and worth less than a session that would have to leave for it: it stays in
memory, leaves from there when it is the coldest, and is looked at again when something happens to it or it
has become old. Decides by present facts, and changes nothing but the set of spared sessions. Worst case: one
look at all that would leave.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing

from ctxcache.core.ledger.commons import Commons
from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.places import Backlog
from ctxcache.core.ledger.rankings import Evictable, Verdict
from ctxcache.core.ledger.segment import Shelf
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.unwritten import Unwritten
from ctxcache.core.ledger.usage import Quotas
from ctxcache.core.placement.policy import Candidate as Comparison
from ctxcache.core.placement.policy import is_worth_writing


class Leaving:
    """Decides which session leaves. Owned by the ledger."""

    def __init__(
        self,
        get: Callable[[bytes], Session],
        feed: Feed,
        commons: Commons,
        unwritten: Unwritten,
        evictable: Evictable,
        quotas: Quotas,
        below: Shelf,
        closed_paths: Callable[[], Collection[int]],
        continued_by: Callable[[Session], Collection[Session]],
    ) -> None:
        """`continued_by`: the blocks that name a block as the one that they continue."""
        self._get = get
        self._continued_by = continued_by
        self._feed, self._commons = feed, commons
        self._unwritten = unwritten
        self._evictable = evictable
        self._quotas = quotas
        self._below = below
        self._closed_paths = closed_paths

    # -- which session is given up -----------------------------------------------------------------

    def is_removable(self, session: Session) -> bool:
        """Whether the session may leave, and its leaving would give room."""
        if session.is_pinned or not session.is_idle:
            return False
        # Readers do not protect shared segments, which stay with the forks that list them. A session whose
        # own segments are all held gives nothing, and removing it would only lose its name.
        held = [s for s in session.segments if s.hold_count]
        if not held:
            return True
        # Shared segments stay with the other sessions while they are read: the session must have something
        # else to give.
        is_shared = all(s.reference_count > 1 for s in held)
        return is_shared and any(s.reference_count == 1 for s in session.segments)

    def from_memory(self, among: Sequence[str] | None) -> Session | None:
        """The coldest session of these accounts that is in memory alone; None when none may go."""
        uid = self._unwritten.first(lambda uid: self.is_removable(self._get(uid)), among)
        return None if uid is None else self.leaf(self._get(uid), _is_in_memory_alone)

    def leaf(self, session: Session, is_of_use: Callable[[Session], bool]) -> Session:
        """The session that leaves in the place of a block.

        It is the last of the blocks that continue the block, one after the other.

        Blocks that may not leave, or are of no use, do not count. A session goes itself.
        """
        if not session.is_block:
            return session
        # A walk down the tree of blocks to a leaf: a prompt is of use from its beginning only.
        #
        #     system prompt ── tools ─┬─ chat 1 ── ...
        #                             └─ chat 2 ── ...      "tools" is the coldest: chat 1 leaves
        # Blocks that were put anew may name each other.
        passed: set[bytes] = set()
        while session.uid not in passed:
            passed.add(session.uid)
            for child in self._continued_by(session):
                if child.uid not in passed and self.is_removable(child) and is_of_use(child):
                    session = child
                    break
        return session

    def from_below(
        self, for_session: Session, size_bytes: int, besides: Collection[int] = ()
    ) -> Session | None:
        """The coldest session but this one that gives room on a path that takes writes, and is none of these.

        None when there is none.
        """
        among = self._quotas.below(for_session.tenant, size_bytes)
        return self._first(for_session, among, lambda session: self._frees_room(session, besides))

    def of_tenant(self, for_session: Session) -> Session | None:
        """The coldest session of the same tenant but this one, wherever it lies; None when there is none."""
        among = [for_session.tenant]
        return self._first(for_session, among, lambda _: True) or self.from_memory(among)

    def over_share(self, dirty: Session) -> Session | None:
        """The account's coldest session in memory alone. None while the account is within its share below."""
        account = self._quotas.over_share(dirty.tenant)
        return None if account is None else self.from_memory([account])

    # -- which session is not written unasked --------------------------------------------------------

    def waits(self, session: Session) -> bool:
        """Whether the session is in use, so that its worth is not known yet, and no room below is free."""
        # While there is room, a write costs nothing that others need. Without room the session's worth
        # decides, which is known when it rests.
        has_room = self._unwritten.size_bytes(session) <= self._free_bytes
        return not session.is_idle and _is_in_memory_alone(session) and not has_room

    def refuses(self, session: Session, ahead_bytes: int = 0) -> bool:
        """Whether the session is not worth its place below.

        `ahead_bytes` of the free bytes there are taken already.
        """
        if session.is_pinned or not session.is_idle:
            return False
        # A session that is partly below stays: the rest is little, and a record without its end is a loss.
        if not _is_in_memory_alone(session) or self._feed.retaining.store_level(session.uid):
            return False
        if not (self._feed.is_worth_wear(session.uid) or self._commons.is_worth_wear(session)):
            return True
        # Every copy takes room.
        needed_bytes = ahead_bytes + session.copies * self._unwritten.size_bytes(session)
        with closing(self._would_leave(session, needed_bytes)) as leaving:
            return not is_worth_writing(needed_bytes, self._free_bytes, leaving)

    def may_leave_spared(self, session: Session, is_due: Callable[[Session], bool]) -> bool:
        """Whether a spared session may leave memory, and with that the store.

        A session that has come to be worth writing is recalled: written, it may leave memory. So is a session
        that is kept, but one at a time, for others leave below for it: not while another is due anyway.
        """
        if session.backlog is not Backlog.SPARED:
            return False
        # `is_kept` is about the session itself: pinned, in use, or held.
        is_kept = not self.is_removable(session)
        if not is_kept and self.refuses(session):
            return True
        # A kept session may have to push others out below. While anything else is due that would be written
        # anyway, writing that makes room without a victim.
        if is_kept and self._unwritten.ranking.first(lambda uid: is_due(self._get(uid))) is not None:
            return False
        # The session is recalled and stays for now: its rows are the only ones, and are written first.
        self._unwritten.recall(session)
        return False

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _free_bytes(self) -> int:
        return self._below.free_bytes_outside(self._closed_paths())

    def _would_leave(self, comer: Session, size_bytes: int) -> Generator[Comparison]:
        """The sessions that would leave for so many bytes of a session that has nothing below, one by one."""
        among = self._quotas.below(comer.tenant, size_bytes)
        # What others ask for of it is worth its place, though the rest may not be.
        rank = max(self._feed.rank(comer.uid) or (), self._commons.rank(comer) or ())
        judge = self._judge(comer, self._frees_room)
        with closing(self._evictable.in_order(judge, among)) as uids:
            for uid in uids:
                victim = self._get(uid)
                # An account that has more than its share gives way, whatever its sessions are worth.
                is_others = among is not None and victim.tenant != comer.tenant
                gives_way = is_others or (self._feed.rank(uid) or ()) < rank
                yield Comparison(gives_way, self._freed_bytes(victim))

    def _first(
        self, for_session: Session, among: Sequence[str] | None, is_of_use: Callable[[Session], bool]
    ) -> Session | None:
        judge = self._judge(for_session, is_of_use)
        uid = self._evictable.first(judge, among)
        if uid is None:
            return None
        return self.leaf(self._get(uid), lambda child: judge(child.uid) is Verdict.LEAVES)

    def _judge(
        self, for_session: Session, is_of_use: Callable[[Session], bool]
    ) -> Callable[[bytes], Verdict]:
        def judge(uid: bytes) -> Verdict:
            session = self._get(uid)
            # A pinned session, or one without durable bytes, does not change by itself: an unpinning or a
            # flush adds it again.
            if session.is_pinned or not session.amounts().durable_bytes:
                return Verdict.NOT_BEFORE_ITS_NEXT_CHANGE
            # A session in use, or of no use to this caller, may leave for the next caller.
            leaves = session is not for_session and self.is_removable(session) and is_of_use(session)
            return Verdict.LEAVES if leaves else Verdict.NOT_NOW

        return judge

    def _freed_bytes(self, session: Session) -> int:
        """The bytes that leave with the session. Segments that others list stay."""
        closed, begin = self._closed_paths(), self._commons.staying_count(session)
        # A segment of several forks has more than one lister, and does not leave with this session.
        own = (s for s in session.segments if s.reference_count == 1 and s.begin >= begin)
        slots = (slot for s in own for slot in s.places)
        return sum(slot.size_bytes for slot in slots if slot.path_index not in closed)

    def _frees_room(self, session: Session, besides: Collection[int] = ()) -> bool:
        closed = self._closed_paths()
        slots = (slot for s in session.segments for slot in s.places)
        return any(slot.path_index not in closed and slot.path_index not in besides for slot in slots)


def _is_in_memory_alone(session: Session) -> bool:
    """Whether no tier below has rows of the session."""
    return not session.recorded_end and not session.amounts().durable_bytes
