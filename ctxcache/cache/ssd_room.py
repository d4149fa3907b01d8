"""SSD room: slots for what is written, made free by giving up whole sessions.

One session goes at a time, and those who wait look again: what goes for one may be room for them too. What
was written ahead of need goes before what somebody was promised, and nobody loses anything for a path that
would not take what comes in its place. Worst case: nobody may go, and what wanted room is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable

from ctxcache.cache.departures import Departures
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.state import State
from ctxcache.cache.victims import Victims
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.history import Event
from ctxcache.core.session import Session
from ctxcache.errors import CapacityExceeded
from ctxcache.format.slot import Slot
from ctxcache.metadata.base import MetadataStore


class SsdRoom:
    """Who makes room on SSD. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, metadata: MetadataStore, ssd: SlotAllocator, victims: Victims,
        departures: Departures, unstage_something: Callable[[], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._state, self._io, self._metadata = state, io, metadata
        self._ssd = ssd
        self._victims = victims
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
        slot = self._ssd.take(size_bytes, closed=self._io.refusals, on_path=for_session.ssd_path)
        if slot is not None:
            for_session.ssd_path = slot.path_index
        return slot

    async def keep_within_limit(self, session: Session, size_bytes: int) -> None:
        """Evict others of the session's tenant until it may have so much more. Raises CapacityExceeded, TierFailure.

        Never waits when it may already.
        """
        quotas = self._victims.quotas
        while quotas.excess_bytes(session.tenant, size_bytes) > 0:
            # A caller may have been begun without a task of its own; what waits needs one.
            await asyncio.sleep(0)
            async with self._turn:
                if quotas.excess_bytes(session.tenant, size_bytes) <= 0:
                    continue
                victim = self._victims.of_tenant(session)
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
        victim = self._victims.on_ssd(for_session, size_bytes)
        if victim is None:
            raise CapacityExceeded(
                tier="SSD", needed_bytes=size_bytes, limit_bytes=self._ssd.capacity_bytes,
                free_bytes=self._ssd.free_bytes_outside(self._io.refusals),
            )  # fmt: skip
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
        await self._departures.remove([victim])

    def _note(self, victim: Session, why: str) -> None:
        self._state.counters.evicted_session_count += 1
        if not victim.is_gone:
            now_ns, seen = self._state.clock.now_ns(), self._state.seen
            seen.evicted_age_s.observe((now_ns - victim.create_time_ns) / 10**9)
            seen.evicted_idle_s.observe((now_ns - victim.access_time_ns) / 10**9)
            self._state.accesses.happened(victim, Event.EVICTED, detail=why, token_count=victim.token_count)
            self._state.placement.evicted(victim)
