"""Lost paths: what sessions can show while the files of a path cannot be read.

    path lost, or back ──► the reckoning grows ──► each session is reckoned at its next look
                                                     └► tokens that cannot be had are withheld, or shown again

A loss costs nothing at once: each session compares the number of its last reckoning with the present one when
it is looked up. Rows that only memory has on a lost path stay there until another path has them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from ctxcache.core import ranges
from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.segment import Copies, Segment
from ctxcache.core.ledger.session import Session, lies_on
from ctxcache.core.ledger.work import current_work

NEVER = -1
"""The number of no reckoning: the session is reckoned at its next look."""


class LostPaths:
    """Which paths are lost, and what of each session that concerns. Owned by the ledger."""

    def __init__(
        self,
        copies: Copies,
        feed: Feed,
        listers: Callable[[Segment], list[Session]],
        withheld: Callable[[Session, int], None],
        unsaved: dict[bytes, Session],
    ) -> None:
        """`withheld` is told of a session that shows so many tokens fewer.

        `unsaved`: sessions that a record is to be written of; a restart is to know of their generation.
        """
        self.paths: Mapping[int, str] = {}
        """The files of paths of which nothing can be had now, by path number."""
        self._copies, self._feed, self._listers = copies, feed, listers
        self._tell_withheld, self._unsaved = withheld, unsaved
        self._reckoning = 0
        """How often paths were lost or came back."""
        self._kept_back: set[Segment] = set()
        self._withheld: dict[bytes, int] = {}
        self._exposed: dict[bytes, Session] = {}

    def changed(self, paths: Mapping[int, str]) -> bool:
        """These paths are lost, and no other; whether that is news."""
        if paths == self.paths:
            return False
        self.paths = paths
        self._reckoning += 1
        return True

    # -- sessions ----------------------------------------------------------------------------------

    def is_reckoned(self, session: Session) -> bool:
        """Whether the session shows what can be had now."""
        return session.reckoned == self._reckoning

    def begin(self, session: Session) -> None:
        """A session or block appeared, or is known again."""
        # While a path is lost a new session may list segments on it, as a fork does. Else it is up to date.
        session.reckoned = NEVER if self.paths else self._reckoning
        self.reckon(session)

    def reckoned_elsewhere(self, session: Session) -> None:
        """A session made for one look lies on no lost path."""
        session.reckoned = self._reckoning

    def reckon(self, session: Session) -> None:
        """Show of the session what can be had.

        Takes a time that grows with its segments, once for each loss.
        """
        if session.reckoned == self._reckoning:
            return
        session.reckoned = self._reckoning
        # Negative where tokens came back: they are shown, and nobody is told of withheld ones.
        fewer_count = session.reckon(self.paths)
        if session.copies > 1:
            for segment in session.segments:
                self._copies.count(segment, self.paths)
        if session.exposed_begin is None:
            self._exposed.pop(session.uid, None)
        else:
            self._exposed[session.uid] = session
        if not fewer_count:
            return
        self.note_withheld(session)
        self._unsaved[session.uid] = session
        if fewer_count > 0:
            self._tell_withheld(session, fewer_count)
        self._feed.settled(session)
        self._feed.recounted(session)

    def reckon_again(self, segments: Iterable[Segment]) -> None:
        """Segments on a lost path left memory, or lie elsewhere now: their sessions are reckoned anew."""
        for segment in segments:
            for session in self._listers(segment):
                session.reckoned = NEVER
                self._exposed[session.uid] = session

    def rescued(self, session: Session) -> None:
        """Segments of lost paths that memory had were written elsewhere, as far as possible."""
        if not session.is_gone:
            session.reckoned = NEVER
            self.reckon(session)

    def note_withheld(self, session: Session) -> None:
        """The session's withheld tokens may be others."""
        if session.withheld:
            self._withheld[session.uid] = ranges.count(session.withheld)
        else:
            self._withheld.pop(session.uid, None)

    def forget(self, session: Session) -> None:
        """The session is gone, and lists nothing any more."""
        self._exposed.pop(session.uid, None)
        self._withheld.pop(session.uid, None)

    def is_exposed(self, session: Session) -> bool:
        """Whether memory has something of the session that lies on a lost path, or had when it was lost."""
        return session.uid in self._exposed

    def exposed(self) -> list[Session]:
        """The sessions that are exposed. The caller is at work on them, see `Work`."""
        work, sessions = current_work(), list(self._exposed.values())
        for session in sessions:
            work.on(session)
        return sessions

    @property
    def withheld(self) -> Mapping[bytes, int]:
        """Tokens that sessions do not show because paths are lost, by uid."""
        return self._withheld

    # -- segments ----------------------------------------------------------------------------------

    def has(self, segment: Segment) -> bool:
        """Whether what lies below of the segment cannot be had."""
        return bool(self.paths) and lies_on(segment, self.paths)

    def of(self, session: Session) -> list[str]:
        """The lost paths that have segments of the session."""
        on_lost = {slot.path_index for s in session.segments if lies_on(s, self.paths) for slot in s.places}
        return [self.paths[i] for i in sorted(on_lost)]

    def keep_back(self, segment: Segment) -> None:
        """The segment was passed over: memory has the only copy of it that can be read."""
        self._kept_back.add(segment)

    def take_kept_back(self) -> Collection[Segment]:
        """The segments that were passed over, to be looked at again."""
        kept_back, self._kept_back = self._kept_back, set()
        return kept_back

    def emptied(self, segment: Segment) -> None:
        """The segment has no slots any more."""
        self._kept_back.discard(segment)
