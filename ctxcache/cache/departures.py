"""Departures: sessions and segments on their way out of the cache.

Order that this rests on: what goes is unreachable at once, its record is gone, and only then are its
bytes given back. A departure runs to its end even when the caller that wanted it is cancelled. Worst
case: a commit fails, and slots whose records may still be there are kept from use until a restart.
"""

import asyncio
from collections.abc import Iterable, Sequence

from ctxcache.cache.moves import Moves
from ctxcache.cache.state import State, record_of
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import TierFailure
from ctxcache.format.slot import Slot
from ctxcache.storage.metadata.base import Changes, MetadataStore

FREED_PER_SLICE = 256
"""Segments given back before others get their turn of the event loop."""


class Departures:
    """Takes records away, and then gives slots back. Owned by the event loop."""

    def __init__(self, state: State, metadata: MetadataStore, moves: Moves) -> None:
        self._ledger, self._metadata, self._moves = state.ledger, metadata, moves
        self._under_way: set[asyncio.Task[None]] = set()
        """Moves that give slots back as soon as records are gone."""
        self._forgotten: list[bytes] = []
        """Sessions whose records are to go, and no caller waits for it."""
        self._leaving: set[bytes] = set()
        """Sessions that are gone from memory while the commit that removes their records is still to come."""

    async def wait_for_one(self) -> bool:
        """Wait until a move that gives slots back has ended; False when there is none."""
        if self._under_way:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def remove(self, sessions: Iterable[Session], *, is_evicted: bool = False) -> None:
        """Make sessions unreachable at once, and give their bytes back when their records are gone."""
        gone = [session for session in sessions if not session.is_gone]
        dead = [segment for s in gone for segment in self._ledger.ended(s, is_evicted=is_evicted)]
        await self.write_down(gone=gone, dead=dead)

    def remove_unrecorded(self, session: Session) -> int:
        """Evict a session that no record names bytes of: they are free at once; returns how many segments went.

        Its own record goes later: after a crash the session may be there again, empty.
        """
        dead = self._ledger.ended(session, is_evicted=True)
        for segment in dead:
            self._ledger.forgotten(segment)
        if not self._forgotten:
            self._moves.start(self._remove_forgotten())
        self._forgotten.append(session.uid)
        return len(dead)

    async def _remove_forgotten(self) -> None:
        uids, self._forgotten = self._forgotten, []
        await self._metadata.commit(Changes(deleted_session_uids=uids), is_durable=False)

    async def write_down(
        self,
        changed: Sequence[Session] = (),
        *,
        gone: Sequence[Session] = (),
        dead: Sequence[Segment] = (),
        bad: Sequence[Slot] = (),
    ) -> None:
        """Record sessions as they are, remove the records of others and of segments that no session lists.

        `bad` slots are kept from use until they are released. Durable when it returns; only then are the dead
        segments' slots given back. Raises TierFailure.
        """
        self._leaving.update(session.uid for session in gone)
        move = self._moves.start(self._write_down(changed, gone, dead, bad))
        if dead:
            self._under_way.add(move)
            move.add_done_callback(self._under_way.discard)
        await asyncio.shield(move)

    async def _write_down(
        self,
        changed: Sequence[Session],
        gone: Sequence[Session],
        dead: Sequence[Segment],
        bad: Sequence[Slot],
    ) -> None:
        # Records are made when they are written: those of an earlier moment could undo another's.
        # A leaving session is written as it went. Its removal may fail, and its old record lists dead segments.
        recorded = [s for s in changed if not s.is_gone or s.uid in self._leaving]
        self._leaving.difference_update(session.uid for session in gone)
        changes = Changes(
            sessions=[record_of(session) for session in recorded],
            deleted_session_uids=[session.uid for session in gone],
            deleted_segment_ids=[segment.segment_id for segment in dead],
            quarantined=list(bad),
        )
        try:
            await self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self.strand(dead)
            raise
        for i, segment in enumerate(dead, 1):
            self._ledger.forgotten(segment)
            if i % FREED_PER_SLICE == 0:
                await asyncio.sleep(0)

    def strand(self, dead: Sequence[Segment]) -> None:
        """Give back what segments have in memory; their records may still be there and name their slots."""
        self._ledger.stranded_with(dead)
        for segment in dead:
            self._ledger.forgotten(segment)
