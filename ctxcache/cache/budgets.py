"""Budgets: who may take room in the arena, who waits for it, and how it is made.

    Pins         what leases, or reservations, keep from leaving    waits `room_wait_ns`, then refuses
    DirtyBound   what memory alone may have                         waits `writer_wait_s`, then refuses
    MemoryRoom   a free slot: drops what SSD has, flushes the rest   waits `writer_wait_s`, then refuses

Callers of one tenant are served in the order of coming, so that small requests never keep a large one from
its room. Tenants do not wait for each other's pins; before the dirty bound they wait in a line that their
shares divide. The first in that line flushes until there is room. A request that needs no waiting meets no
task and no lock.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

from ctxcache.cache.eviction import SsdRoom
from ctxcache.cache.flushing import Flushing, Staging
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import State
from ctxcache.core.ledger.ledger import Drop, GiveUp
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.work import current_work
from ctxcache.core.limits import Bound, Budget, Limits, Pinner, RoomRequest, WaitingLine
from ctxcache.core.placement.shares import EVERYONE
from ctxcache.errors import CapacityExceeded, CorruptSegment, SessionNotFound, TooManyRequests
from ctxcache.format.layout import Slot

QUEUE_LENGTH = 256
"""Callers that wait at a time, of whom no tenant's are all; more are refused at once."""


# Three kinds of waiting, and what ends each:
#
#     Pins         another lease or reservation ends              an Event that every unpin sets
#     DirtyBound   a flush makes rows clean, or a claim ends      one Event per request, set for the first one
#     MemoryRoom   a flush that this caller asks for itself       the flush's own task
class Pins(Budget):
    """The bytes that leases, or reservations, keep in the arena: a budget that callers may wait for.

    Owned by the event loop.
    """

    def __init__(self, what: str, capacity_bytes: int, share: float, limits: Limits) -> None:
        """`what`: for refusals. `share` of the arena's bytes may be pinned."""
        super().__init__(
            limit_bytes=int(capacity_bytes * share),
            client_limit_bytes=int(capacity_bytes * limits.client_share),
            is_divided=limits.are_divided,
        )
        self._what = what
        self._wait_s = limits.room_wait_ns / 10**9
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The line of waiting callers, one per tenant, or one for all where the budget is not divided."""
        self._freed = asyncio.Event()
        self._waiting: Counter[str] = Counter()

    @property
    def waiting_count(self) -> int:
        """Callers that wait for room."""
        return self._waiting.total()

    async def wait_for_room(self, client: Pinner, needed: Callable[[], Mapping[int, int]]) -> None:
        """Wait until what `needed` says may be pinned; pin it before the next await.

        `needed` is asked again each time: what it looks at may change meanwhile. Raises
        CapacityExceeded (more than may ever be pinned), TooManyRequests, and what `needed` raises.
        """
        # No task, no lock: the usual case costs one look.
        if self.has_room(client, needed()):
            return
        account = self._account(client)
        bound = Bound(QUEUE_LENGTH, self.is_divided)
        if bound.is_reached(self._waiting.total(), self._waiting[account]):
            raise self._refusal(client)
        self._waiting[account] += 1
        # Weak: the lock is there as long as somebody waits.
        turn = self._turns.setdefault(account, asyncio.Lock())
        try:
            # One of the tenant's callers looks at a time: a small request cannot overtake a large one.
            # The time to wait includes the wait for the turn.
            async with asyncio.timeout(self._wait_s), turn:
                while not self.fits(client, sizes := needed()):
                    # A request that could never fit must not wait.
                    self.check_ever(client, sum(sizes.values()))
                    # Behind the look, and nothing awaits between the two: no wake-up is lost.
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise self._refusal(client) from None
        finally:
            self._waiting[account] -= 1
            if not self._waiting[account]:
                del self._waiting[account]

    def has_room(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether so much may be pinned now, with nobody of the tenant waiting.

        Raises CapacityExceeded: more than may ever be pinned.
        """
        if not self.fits(client, sizes_bytes):
            self.check_ever(client, sum(sizes_bytes.values()))
            return False
        # A caller of this tenant that waits already goes first, even if this one would fit.
        return not self._waiting or self._account(client) not in self._waiting

    def unpin(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin`, and let the next caller look."""
        super().unpin(client, sizes_bytes)
        # All that wait look again. A counter of who fits would have to know sizes that change while they
        # wait.
        self._freed.set()

    def _account(self, client: Pinner) -> str:
        return client.tenant if self.is_divided else EVERYONE

    def check_ever(self, client: Pinner, needed_bytes: int) -> None:
        """Raise CapacityExceeded where so much may never be pinned: to try again is of no use."""
        limit_bytes = self.limit_of(client)
        if needed_bytes > limit_bytes:
            free_bytes = limit_bytes - self.used_by(client)
            raise CapacityExceeded(
                f"DRAM: {needed_bytes} B needed, {self._what} may hold {limit_bytes} B",
                tier="DRAM",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
                limit_bytes=limit_bytes,
            )

    def _refusal(self, client: Pinner) -> TooManyRequests:
        return TooManyRequests(what=f"bytes of {self._what}", limit=self.limit_of(client))


DROPS_PER_SLICE = 256
"""Segments dropped before others get their turn of the event loop."""
DROPS_PER_LOOK = 8
"""Segments dropped before the tenants' shares are looked at again."""
FLUSHES_WAITED_FOR = 64
"""Flushes that one request for room waits for: others may take what they free."""


class MemoryRoom:
    """Makes room in the arena. Owned by the event loop."""

    def __init__(
        self, state: State, io: SegmentIO, staging: Staging, flushing: Flushing, ssd_room: SsdRoom
    ) -> None:
        self._io, self._ledger = io, state.ledger
        self._staging, self._flushing, self._ssd_room = staging, flushing, ssd_room
        self.is_short = asyncio.Event()
        """Set when less is free than shall be."""

    async def place(self, size_bytes: int, tenant: str) -> Slot:
        """A slot for a segment of that tenant, made free if need be. Raises CapacityExceeded, TierFailure."""
        slot = self._take(size_bytes, tenant)
        if slot is None:
            # A flush that this call began goes on when the time is over: only the wait ends.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ledger.watermarks.writer_wait_s):
                    slot = await self._take_what_is_cleaned(size_bytes, tenant)
        if slot is None:
            memory = self._ledger.memory
            raise CapacityExceeded(
                tier="DRAM",
                needed_bytes=size_bytes,
                free_bytes=memory.free_bytes,
                limit_bytes=memory.capacity_bytes,
            )
        return slot

    def take_all(self, session: Session, sizes_bytes: Sequence[int]) -> list[Slot] | None:
        """Slots of these sizes for the session that are free, or that something clean gave back.

        Nothing of the session itself leaves for them: it rests, and may be the coldest. None, and none is
        taken, where there are fewer. Slots of long segments are taken as `take_long` does.
        """
        plain_bytes, tenant, is_other = session.layout.size_bytes, session.tenant, session.uid.__ne__
        slots: list[Slot] = []
        for size_bytes in sizes_bytes:
            # Plain slots may be put together from what is dropped; a long slot needs one piece.
            take = self._take if size_bytes <= plain_bytes else self.take_long
            slot = take(size_bytes, tenant, is_other)
            if slot is None:
                # All or none: two writers that each kept a part would wait for one another.
                for taken in slots:
                    self._ledger.memory.give(taken)
                return None
            slots.append(slot)
        return slots

    def take_long(
        self, size_bytes: int, tenant: str, may_give: Callable[[bytes], bool] = lambda _: True
    ) -> Slot | None:
        """A slot that is free in one piece, or is once as many bytes of what is clean have left.

        None otherwise: shorter segments then take what is free in several pieces.
        """
        memory = self._ledger.memory
        slot = memory.take(size_bytes)
        # Dropping once is tried: what is dropped lies anywhere, and a second round would drop all that is
        # clean.
        if slot is None and self._drop_clean(size_bytes, tenant, may_give):
            slot = memory.take(size_bytes)
        # Told even if a slot was found: upkeep makes room before the next writer has to.
        if self._ledger.watermarks.is_low(memory.free_bytes, memory.capacity_bytes):
            self.is_short.set()
        return slot

    def take_ahead(self, segment: Segment, may_give: Callable[[bytes], bool]) -> Slot | None:
        """A slot that leaves as much free as shall be, and is taken only from sessions that `may_give` takes.

        None when there is none.
        """
        memory, size_bytes = self._ledger.memory, segment.size_bytes
        # Bounded: promotion ahead of need is no reason to hold the event loop.
        for _ in range(DROPS_PER_SLICE):
            free_bytes = memory.free_bytes - size_bytes
            # The watermark stays free: room that writers will want soon is not filled with guesses.
            if self._ledger.watermarks.missing_bytes(free_bytes, memory.capacity_bytes) <= 0:
                slot = memory.take(size_bytes)
                if slot is not None:
                    return slot
            among = self._ledger.quotas.in_memory(segment.tenant, size_bytes)
            if self._drop_one(among, may_give) is None:
                return None
        return None

    async def keep_free(self) -> None:
        """Once little is free, drop the coldest clean segments until enough is, as far as that goes."""
        # Cleared first: a writer that finds little free while this runs sets it again.
        self.is_short.clear()
        memory, watermarks = self._ledger.memory, self._ledger.watermarks
        if not watermarks.is_low(memory.free_bytes, memory.capacity_bytes):
            return
        while (missing := watermarks.missing_bytes(memory.free_bytes, memory.capacity_bytes)) > 0:
            if not self._drop_clean(missing, None):
                return
            # Each pass drops at most DROPS_PER_SLICE segments.
            await asyncio.sleep(0)

    async def clean_until(self, is_enough: Callable[[], bool]) -> None:
        """Flush the coldest dirty sessions until that is so, as far as that goes.

        Raises CapacityExceeded, TierFailure.
        """
        for _ in range(FLUSHES_WAITED_FOR):
            if is_enough() or not await self._clean_something(self._is_any_dirty, None):
                return

    # -- parts -------------------------------------------------------------------------------------

    def _take(
        self, size_bytes: int, tenant: str, may_give: Callable[[bytes], bool] = lambda _: True
    ) -> Slot | None:
        """A slot that is free, or that something clean gave back; None where there is neither."""
        memory = self._ledger.memory
        # Dropping frees bytes, but perhaps in pieces that are too small: so the two alternate.
        while (slot := memory.take(size_bytes)) is None and self._drop_clean(size_bytes, tenant, may_give):
            continue
        if self._ledger.watermarks.is_low(memory.free_bytes, memory.capacity_bytes):
            self.is_short.set()
        return slot

    async def _take_what_is_cleaned(self, size_bytes: int, tenant: str) -> Slot | None:
        # Bounded: with many writers each flush's room may go to another one.
        for _ in range(FLUSHES_WAITED_FOR):
            slot = self._take(size_bytes, tenant)
            among = self._ledger.quotas.in_memory(tenant, size_bytes)
            if slot is not None or not await self._clean_something(self._may_leave, among):
                return slot
        return None

    async def _clean_something(self, accepts: Callable[[Session], bool], among: Sequence[str] | None) -> bool:
        """Flush the coldest dirty session of those, or wait for a flush under way.

        False when there is neither.
        """
        victim = self._ledger.unwritten.coldest(accepts, among)
        if victim is not None:
            current_work().on(victim)
            # A flush cuts rows that it finds to be bad, and a cut makes room as well.
            with suppress(SessionNotFound, CorruptSegment):
                await self._clean(victim, among)
            return True
        # Nothing to flush, but a flush under way may make something clean.
        return await self._flushing.wait_for_one()

    async def _clean(self, victim: Session, among: Sequence[str] | None) -> None:
        """Flush a session, or spare it: then it may leave as it is.

        Where SSD takes nothing of it memory is all there is, and one session goes, as from a full SSD. That
        is while no path takes writes, or where its tenant has all that its share gives it.
        """
        from_memory = partial(self._ledger.leaving.from_memory, among)
        # No flush can succeed: a session in memory alone has to go, as it would from a full SSD.
        if not self._io.has_open_path and await self._ssd_room.evict(from_memory):
            return
        # Sparing is cheaper than writing: the session may leave memory as it is.
        if self._staging.spares(victim):
            return
        try:
            await self._flushing.flush(victim)
        except CapacityExceeded as error:
            choose = partial(self._ledger.leaving.over_share, victim)
            # Only a refusal by the tenant's own share is answered by giving up one of the tenant's sessions.
            if error.facts.get("tier") != "SSD" or not await self._ssd_room.evict(choose):
                raise

    def _drop_clean(
        self, size_bytes: int, tenant: str | None, may_give: Callable[[bytes], bool] = lambda _: True
    ) -> bool:
        """Drop copies that SSD has too, and spared sessions, until `size_bytes` went; whether anything did.

        `tenant`: which one needs the room; None: it is to be kept free. `may_give`: see Resident.
        """
        dropped_bytes = dropped_count = look_count = 0
        among: Sequence[str] | None = None
        # Two bounds: by what is needed, and by how long the event loop may be held.
        while dropped_bytes < size_bytes and dropped_count < DROPS_PER_SLICE:
            # The shares take a look at each tenant, and hardly change by a few segments.
            if look_count % DROPS_PER_LOOK == 0:
                among = self._ledger.quotas.in_memory(tenant, size_bytes)
            look_count += 1
            dropped = self._drop_one(among, may_give)
            if dropped is None:
                break
            dropped_count += dropped[0]
            dropped_bytes += dropped[1]
        return dropped_bytes > 0

    def _drop_one(
        self, among: Sequence[str] | None, may_give: Callable[[bytes], bool] = lambda _: True
    ) -> tuple[int, int] | None:
        """Carry out the ledger's next move out of memory.

        How many segments and bytes went, None when nothing may.
        """
        match self._ledger.next_out_of_memory(among, self._may_leave, may_give):
            case Drop(segment):
                self._ledger.dropped(segment)
                return 1, segment.size_bytes
            case GiveUp(session):
                # Asked before: the session has no segments afterwards.
                size_bytes = session.size_bytes
                return self._ssd_room.give_up(session), size_bytes
        return None

    def _is_any_dirty(self, session: Session) -> bool:
        return bool(self._ledger.unwritten.segments(session))

    def _may_leave(self, session: Session) -> bool:
        """Whether a flush would let something leave: a segment that only its own write holds."""
        return any(
            # Held by nothing, or by its own staged write, which ends with the flush.
            segment.memory_hold_count == self._staging.is_under_way(segment)
            for segment in self._ledger.unwritten.segments(session)
        )


# The line of writers at the dirty limit. Shares decide who is first, and may decide anew with each request.
#
#    admit ──► fits, and the line is empty ─────────────────────────────► promised
#      │                                                                    ▲
#      └──► in line ──► first: flushes until the request fits ──────────────┤
#              ▲          │                                                 │
#              │          │ another one became first         writer_wait_s  │ fits by then
#              └──────────┘                                  is over ───────┴──► else CapacityExceeded
class DirtyBound:
    """Promises room to writers, one after the other. Owned by the event loop."""

    def __init__(self, state: State, io: SegmentIO, room: MemoryRoom) -> None:
        self._state, self._io, self._room = state, io, room
        ledger = self._ledger = state.ledger
        self._line = WaitingLine("room for unwritten rows", ledger.usage.shares, ledger.unwritten.claimed_by)
        self._turns: dict[RoomRequest, asyncio.Event] = {}
        """Set when the request may be the first one. Only the first one makes room."""

    @property
    def waiting_count(self) -> int:
        """Writers that wait for room."""
        return len(self._line)

    def admits_at_once(self, needed_bytes: int, own_bytes: int) -> bool:
        """Whether a writer that has claimed `own_bytes` may claim as many more now.

        False while others wait.
        """
        # While somebody waits nobody overtakes, even with a smaller request.
        return not self._turns and self._fits(needed_bytes, own_bytes)

    async def admit(self, tenant: str, needed_bytes: Callable[[], int], own_bytes: Callable[[], int]) -> int:
        """Wait until a writer of that tenant may claim so much more, promise it, and return how much it is.

        `own_bytes` are claimed by the writer already. Both are asked for again after each wait.

        Raises CapacityExceeded, TooManyRequests, TierFailure.
        """
        if self._line or not self._fits(needed_bytes(), own_bytes()):
            await self._wait_in_line(tenant, needed_bytes, own_bytes)
        # Asked once more: the wait may have changed what is needed. No await follows before the promise.
        promised_bytes = needed_bytes()
        self._ledger.unwritten.promise(tenant, promised_bytes)
        return promised_bytes

    async def _wait_in_line(
        self, tenant: str, needed_bytes: Callable[[], int], own_bytes: Callable[[], int]
    ) -> None:
        request = self._line.join(tenant, needed_bytes())
        self._turns[request] = asyncio.Event()

        # Both facts change while it waits: its tail may leave, and others' claims come and go.
        def fits() -> bool:
            request.needed_bytes = needed_bytes()
            return self._fits(request.needed_bytes, own_bytes())

        try:
            if not (fits() and self._is_first(request)):
                self._state.counters.delayed_write_count += 1
                # Write-behind runs now instead of at its next turn.
                self._state.is_pressed.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ledger.watermarks.writer_wait_s):
                        await self._wait(request, fits)
                # Looked at once more after the time is over: room that came in the last moment is taken.
                if not (fits() and self._is_first(request)):
                    raise self._refusal(request)
        finally:
            # Whatever the end was, the next request may be the first one by now.
            del self._turns[request]
            self._line.leave(request)
            self._wake_first()

    async def _wait(self, request: RoomRequest, fits: Callable[[], bool]) -> None:
        """Return once the request may be granted, or once it is first and nothing is left to write."""
        turn = self._turns[request]
        while True:
            if self._is_first(request):
                # The first one makes the room, and stops as soon as another one is first: shares move while
                # it flushes.
                await self._room.clean_until(lambda: fits() or not self._is_first(request))
                # First, and nothing was left to write: whether it fits is for the caller to see.
                if self._is_first(request):
                    return
            turn.clear()
            # Another request may have become the first one because this one came, or because its tenant has
            # more.
            self._wake_first()
            await turn.wait()

    def _is_first(self, request: RoomRequest) -> bool:
        return self._line.first(self._limit_bytes()) is request

    def _wake_first(self) -> None:
        first = self._line.first(self._limit_bytes())
        if first is not None:
            self._turns[first].set()

    def _limit_bytes(self) -> int:
        return self._ledger.watermarks.limit_bytes(self._ledger.memory.capacity_bytes)

    def _fits(self, needed_bytes: int, own_bytes: int) -> bool:
        is_within = self._ledger.watermarks.admits(
            needed_bytes, self._ledger.unwritten.claimed_bytes, own_bytes, self._ledger.memory.capacity_bytes
        )
        # While no path takes writes memory is a cache of its own, and waiting would not make it less so.
        return is_within or not self._io.has_open_path

    def _refusal(self, request: RoomRequest) -> CapacityExceeded:
        limit_bytes, needed_bytes = self._limit_bytes(), request.needed_bytes
        free_bytes = max(limit_bytes - self._ledger.unwritten.claimed_bytes, 0)
        # Bytes that are free, but not for this request.
        if not self._is_first(request):
            # Free room is for requests that came first.
            free_bytes = 0
        return CapacityExceeded(
            f"DRAM: {needed_bytes} B needed, {free_bytes} B may be written before SSD has more of it",
            tier="DRAM",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            # A larger request is let through when it is alone.
            limit_bytes=limit_bytes if needed_bytes <= limit_bytes else self._ledger.memory.capacity_bytes,
        )
