"""Devices: SSD paths that are lost, and what sessions show meanwhile.

A lost path is acted on once, whatever lies on it: every session shows the longest prefix that can still be
had, at its next look-up or within moments, and no segment is read to find out. Records stay as they are, so
that the tokens are back when the path is; a writer that goes on behind the prefix gives them up. Rows of a
lost path that DRAM has are written to another path. Worst case: a pass over all segments, in slices.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from ctxcache.cache.eviction import Departures
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.scrubbing import Mending
from ctxcache.cache.state import State
from ctxcache.core.history import Event
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session, lies_on
from ctxcache.format.layout import Slot
from ctxcache.storage.tiers.base import DeviceTier as Tier
from ctxcache.storage.tiers.base import TierRefusal

SEGMENTS_PER_TURN = 256
"""Number of sessions reckoned before others have their turn: a few milliseconds of work."""
SEGMENTS_PER_COMMIT = 4096
"""Segments of emptied paths that one commit takes."""
SEGMENTS_PER_MOVE = 8
"""Written elsewhere with one sync and one commit."""
log = logging.getLogger(__name__)


# A path, and what sessions show:
#
#     open ──► hangs or fails ──► lost: withheld behind the first segment there ──► back: shown again
#                                   │ rows that memory has are written elsewhere, and stay
#                                   └──► its file is new: cut for good, `give_up`
class Devices:
    """Looks after the devices of the SSD tier. Owned by the event loop."""

    def __init__(
        self, state: State, ssd: Tier, departures: Departures, mending: Mending, flushing: Flushing
    ) -> None:
        self._ssd, self._departures, self._mending, self._flushing = ssd, departures, mending, flushing
        self._ledger = state.ledger
        self._is_reckoned = True
        """Whether every session was looked at since a path was lost or came back."""

    @property
    def refusals(self) -> Mapping[int, TierRefusal]:
        """SSD paths that take no writes now, each with why.

        A path that is shown as lost, or back, is so for look-ups as well.
        """
        # A thread of the tier finds the loss, and upkeep takes it over up to half a second later.
        self.note()
        return self._ssd.refusals

    async def give_up_overdue(self) -> None:
        """Lose the paths whose devices hang: callers that wait are answered, and look-ups tell the truth.

        Waits for nothing, and so never for a device.
        """
        # Called often, and never waits: a device that hangs must not keep this from running.
        self._ssd.give_up_overdue()
        self.note()

    async def look(self) -> None:
        """Find out which paths are lost or back, and act on it.

        Raises the first failure to write elsewhere.
        """
        await self._ssd.probe()
        self.note()
        if not self._is_reckoned:
            await self._reckon_all()
        if len(self._ssd.refusals) < len(self._ssd.paths):
            await self._write_elsewhere()

    def note(self) -> bool:
        """Take over what the tier says; whether that is news.

        Sessions are reckoned when they are looked at.
        """
        refusals = self._ssd.refusals
        lost = {i: path for i, path in enumerate(self._ssd.paths) if i in refusals and refusals[i].is_lost}
        is_news = self._ledger.paths_lost(lost)
        # News only delays what was reckoned: the flag stays off until a whole pass was made.
        self._is_reckoned = self._is_reckoned and not is_news
        return is_news

    async def give_up(self, path_indexes: Iterable[int]) -> None:
        """Cut the sessions that have segments on these paths, for good: their files are new and empty."""
        emptied = {i: self._ssd.paths[i] for i in path_indexes}
        for _ in self._ledger.sleep.wake_on(emptied):
            continue
        # Segments that have nothing left are cut; those with a copy elsewhere lose a place.
        gone = [s for s in self._ledger.segments() if lies_on(s, emptied)]
        halved = [
            (segment, place)
            for segment in self._ledger.segments()
            for place in segment.places
            if len(segment.places) > 1 and place.path_index in emptied and not lies_on(segment, emptied)
        ]
        for begin in range(0, len(halved), SEGMENTS_PER_COMMIT):
            await self._halve(halved[begin : begin + SEGMENTS_PER_COMMIT])
        if gone:
            log.error("device_emptied paths=%s segments=%d", list(emptied.values()), len(gone))
            await self._lose(gone, ", ".join(emptied.values()))

    async def _halve(self, halved: Sequence[tuple[Segment, Slot]]) -> None:
        """These segments have lost one of two places, in one commit."""
        for segment, place in halved:
            self._ledger.place_lost(segment, place, is_bad=False)
        moved, left = [segment for segment, _ in halved], [place for _, place in halved]
        await self._departures.write_down(moved=moved, left=left)

    async def _lose(self, gone: Sequence[Segment], why: str) -> None:
        """End every session before the first of these segments, whose bytes are gone; some in each commit."""
        for begin in range(0, len(gone), SEGMENTS_PER_COMMIT):
            some = {s for s in gone[begin : begin + SEGMENTS_PER_COMMIT] if s.is_listed}
            cut, dead = self._mending.cut(some, Event.DEVICE_LOST, why)
            await self._departures.write_down(cut, dead=dead)

    async def _reckon_all(self) -> None:
        # Set before the pass: news that comes during it makes another pass.
        self._is_reckoned = True
        count = 0
        lost = set(self._ledger.lost.paths)
        by_uid = self._ledger.names.by_uid
        # Asked for when its turn comes: it may be gone by then, or asleep.
        known = filter(None, map(by_uid.get, list(by_uid)))
        for session in chain(known, self._ledger.sleep.wake_on(lost)):
            if not session.is_gone:
                self._ledger.lost.reckon(session)
                count += 1 + len(session.segments)
            if count >= SEGMENTS_PER_TURN:
                count = 0
                await asyncio.sleep(0)
        withheld = self._ledger.lost.withheld
        log.log(
            logging.ERROR if withheld else logging.WARNING,
            "sessions_reckoned lost=%s withheld_sessions=%d withheld_tokens=%d",
            list(self._ledger.lost.paths.values()),
            len(withheld),
            sum(withheld.values()),
        )

    async def _write_elsewhere(self) -> None:
        """Write what only DRAM and a lost path have to another path, a session at a time."""
        # One session at a time, a few segments with each sync.
        for session in self._ledger.lost.exposed():
            await asyncio.sleep(0)
            while not session.is_gone and (some := list(islice(self._exposed(session), SEGMENTS_PER_MOVE))):
                if not await self._flushing.write_elsewhere(session, some):
                    break
            self._ledger.lost.rescued(session)

    def _exposed(self, session: Session) -> Iterator[Segment]:
        """Its segments that lie on lost paths and in DRAM, but for those that a flush will move."""
        # A tail that is written will be flushed by its writer, to another path.
        tail = session.growing_tail if session.is_writing else None
        for segment in session.segments:
            is_exposed = segment.memory and self._ledger.lost.has(segment)
            if is_exposed and not segment.is_unwritten and segment is not tail:
                yield segment
