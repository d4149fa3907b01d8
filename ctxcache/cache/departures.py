"""Departures: sessions and segments on their way out of the cache.

Order that this rests on: what goes is unreachable at once, its record is gone, and only then are its
bytes given back. A departure runs to its end even when the caller that wanted it is cancelled. Worst
case: a commit fails, and slots whose records may still be there are kept from use until a restart.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from ctxcache.cache.moves import Moves
from ctxcache.cache.state import State, record_of
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import TierFailure
from ctxcache.format.slot import Slot
from ctxcache.metadata.base import Changes, MetadataStore

FREED_PER_SLICE = 256
"""Segments given back before others get their turn of the event loop."""


class Places(Protocol):
    """Who has the slots."""

    stranded: set[Slot]
    quarantined: set[Slot]

    def free(self, segment: Segment) -> None:
        """Give a segment's slots back as soon as nothing holds it."""


class Departures:
    """Takes records away, and gives slots back. Owned by the event loop."""

    def __init__(self, state: State, metadata: MetadataStore, places: Places, moves: Moves) -> None:
        self._state, self._metadata, self._places, self._moves = state, metadata, places, moves
        self._under_way: set[asyncio.Task[None]] = set()
        """What gives slots back as soon as records are gone."""
        self._forgotten: list[bytes] = []
        """Sessions whose records nobody waits for."""

    async def wait_for_one(self) -> bool:
        """Wait until one that gives slots back has ended; False when there is none."""
        if self._under_way:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def remove(self, sessions: Iterable[Session]) -> None:
        """Make sessions unreachable at once, and give their bytes back when their records are gone."""
        gone = [session for session in sessions if not session.is_gone]
        dead = [segment for session in gone for segment in self._state.forget(session)]
        await self.write_down(gone=gone, dead=dead)

    def remove_unrecorded(self, session: Session) -> int:
        """Remove a session that no record names bytes of: they are free at once; returns how many segments went.

        Nobody waits for its own record: after a crash the session may be there again, empty.
        """
        dead = self._state.forget(session)
        for segment in dead:
            self._places.free(segment)
        if not self._forgotten:
            self._moves.start(self._remove_forgotten())
        self._forgotten.append(session.uid)
        return len(dead)

    async def _remove_forgotten(self) -> None:
        uids, self._forgotten = self._forgotten, []
        await self._metadata.commit(Changes(deleted_session_uids=uids), is_durable=False)

    async def write_down(
        self, changed: Sequence[Session] = (), *, gone: Sequence[Session] = (), dead: Sequence[Segment] = (),
        bad: Sequence[Slot] = (),
    ) -> None:  # fmt: skip
        """Record sessions as they are, remove the records of others and of segments that nobody lists.

        `bad` slots are kept from use until they are released.

        Durable when it returns; only then are the dead segments' slots given back. Raises TierFailure.
        """
        self._places.quarantined |= set(bad)
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
        changes = Changes(
            sessions=[record_of(session) for session in changed if not session.is_gone],
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
            self._places.free(segment)
            if i % FREED_PER_SLICE == 0:
                await asyncio.sleep(0)

    def strand(self, dead: Sequence[Segment]) -> None:
        """Give back what segments have in DRAM; their records may still be there and name their slots."""
        self._places.stranded |= {segment.ssd for segment in dead if segment.ssd}
        for segment in dead:
            self._places.free(segment)
