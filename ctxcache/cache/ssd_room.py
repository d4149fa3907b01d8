"""SSD room: slots for what is written, made free by giving up whole sessions.

The ledger says which session goes next; this carries it out. One session goes at a time, and callers that wait look
again: what goes for one may be room for another too. What was written ahead of need goes before what a caller was
promised, and no session is given up for a path that would not take what comes in its place. Worst case: no session
may go, and what wanted room is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable

from ctxcache.cache.departures import Departures
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.history import Event
from ctxcache.core.ledger.session import Session
from ctxcache.errors import CapacityExceeded
from ctxcache.format.slot import Slot
from ctxcache.storage.metadata.base import MetadataStore


class SsdRoom:
    """Who makes room on SSD. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        departures: Departures,
        unstage_something: Callable[[], Awaitable[bool]],
    ) -> None:
        self._state, self._io, self._metadata = state, io, metadata
        self._ledger = state.ledger
        self._departures = departures
        self._unstage_something = unstage_something
        self._turn = asyncio.Lock()

    async def place(self, size_bytes: int, for_session: Session) -> Slot:
        """A slot, made free if need be. Raises CapacityExceeded, TierFailure."""
        slot = self.take(size_bytes, for_session)
        if slot is None:
            async with self._turn:
                while (slot := self.take(size_bytes, for_session)) is None:
                    await self._make(size_bytes, for_session)
        return slot

    def take(self, size_bytes: int, for_session: Session) -> Slot | None:
        """A slot that is free: on the session's path, or on another one, which is its path from then on."""
        slot = self._ledger.below.take(size_bytes, closed=self._io.refusals, on_path=for_session.path)
        if slot is not None:
            for_session.path = slot.path_index
        return slot

    async def keep_within_limit(self, session: Session, size_bytes: int) -> None:
        """Evict others of the session's tenant until it may have so much more. Raises CapacityExceeded, TierFailure.

        Never waits when it may already.
        """
        quotas = self._ledger.quotas
        while quotas.excess_bytes(session.tenant, size_bytes) > 0:
            async with self._turn:
                if quotas.excess_bytes(session.tenant, size_bytes) <= 0:
                    continue
                victim = self._ledger.next_of_tenant(session)
                if victim is None:
                    raise quotas.refusal(session.tenant, size_bytes)
                await self._evict(victim, "its tenant's limit on SSD")

    async def evict(self, choose: Callable[[], Session | None]) -> bool:
        """Give up whom `choose` names now, or wait until another one is gone. False when it names nobody.

        Raises CapacityExceeded, TierFailure.
        """
        if self._turn.locked():
            async with self._turn:
                return True
        async with self._turn:
            victim = choose()
            if victim is not None:
                await self._evict(victim, "room in DRAM, and SSD takes nothing")
            return victim is not None

    async def _make(self, size_bytes: int, for_session: Session) -> None:
        self._io.check_any_path()
        if await self._unstage_something():
            return
        if await self._departures.wait_for_one():
            return
        victim = self._ledger.next_from_below(for_session, size_bytes)
        if victim is None:
            raise CapacityExceeded(
                tier="SSD",
                needed_bytes=size_bytes,
                limit_bytes=self._ledger.below.capacity_bytes,
                free_bytes=self._ledger.below.free_bytes_outside(self._io.refusals),
            )
        whose = "" if victim.tenant == for_session.tenant else f" of tenant {for_session.tenant}"
        await self._evict(victim, f"room on SSD for {for_session.name}{whose}")

    async def expel(self, session: Session, why: str) -> None:
        """Give up this one. Raises CapacityExceeded, TierFailure."""
        await self._evict(session, why)

    def give_up(self, session: Session) -> int:
        """Evict a session that no record names bytes of, for room in memory; returns how many segments went."""
        self._state.counters.unadmitted_session_count += 1
        self._note(session, "room in memory, and not worth its place on SSD")
        return self._departures.remove_unrecorded(session)

    async def _evict(self, victim: Session, why: str) -> None:
        self._metadata.check(is_growing=False)
        self._note(victim, why)
        await self._departures.remove([victim], is_evicted=True)

    def _note(self, victim: Session, why: str) -> None:
        self._state.counters.evicted_session_count += 1
        if not victim.is_gone:
            now_ns, seen = self._state.clock.now_ns(), self._state.seen
            seen.evicted_age_s.observe((now_ns - victim.create_time_ns) / 10**9)
            seen.evicted_idle_s.observe((now_ns - victim.access_time_ns) / 10**9)
            self._state.accesses.happened(victim, Event.EVICTED, detail=why, token_count=victim.token_count)
