"""Eviction: sessions and segments on their way out of the cache, and the room on SSD that this makes.

    unreachable ──► record removed, synced ──► slots given back
                          │ commit failed
                          └──────────────────► slots stranded until changes are taken again

A departure runs to its end even when its caller is cancelled. The ledger says which session goes next; this
module carries it out. One session goes at a time, and the callers that wait look again: the room may be
enough for all of them. Staged slots go before sessions, and no session goes for a path that takes no writes.
Worst case: no session may go, and the caller is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import Background, State
from ctxcache.core import ranges
from ctxcache.core.history import Event
from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import CapacityExceeded, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.format.streams import contents_within
from ctxcache.storage.metadata.base import (
    BlockRecord,
    Changes,
    MetadataStore,
    SegmentRecord,
    SessionRecord,
)

FREED_PER_SLICE = 64
"""Segments given back before others get their turn of the event loop."""


class Ended(NamedTuple):
    """Sessions that are gone, and the segments that no session lists any more."""

    sessions: Sequence[Session]
    segments: Sequence[Segment]


NOTHING_ENDED = Ended((), ())


class Departures:
    """Takes records away, and then gives slots back. Owned by the event loop."""

    def __init__(self, state: State, metadata: MetadataStore, background: Background) -> None:
        self._ledger, self._metadata, self._background = state.ledger, metadata, background
        self._under_way: set[asyncio.Task[None]] = set()
        """Moves that give slots back as soon as records are gone."""

    async def wait_for_one(self) -> bool:
        """Wait until a move that gives slots back has ended; False when there is none."""
        if self._under_way:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def remove(self, sessions: Iterable[Session], *, is_evicted: bool = False) -> None:
        """Make sessions unreachable at once, and give their bytes back when their records are gone.

        What they were before edits goes in the same commit.
        """
        gone, dead = self.end(sessions, is_evicted=is_evicted)
        await self.write_down(gone=gone, dead=dead)

    async def leave_behind(self, session: Session, token_count: int) -> None:
        """Take a session's name and all but its first tokens, which others ask for.

        What it was before edits goes in the same commit.
        """
        formers = self.end(self._ledger.with_formers(session)[1:], is_evicted=True)
        dead = self._ledger.left_behind(session, token_count)
        await self.write_down([session], gone=formers.sessions, dead=[*formers.segments, *dead])

    def end(self, sessions: Iterable[Session], *, is_evicted: bool = False) -> Ended:
        """End sessions, and what they were before edits. What ended is to be written down at once."""
        named = [session for session in sessions if not session.is_gone]
        # A session and a former rendering of it may be among them.
        gone = [*dict.fromkeys(chain.from_iterable(map(self._ledger.with_formers, named)))]
        dead = [*chain.from_iterable(self._ledger.ended(s, is_evicted=is_evicted) for s in gone)]
        return Ended(gone, dead)

    # Nothing on disk has to be undone: that is why it may be done at once, inside a search for room.
    def remove_unrecorded(self, session: Session) -> int:
        """Evict a session of which no record names a byte; returns how many segments were freed, at once.

        Nobody waits for its own record to go: after a crash the session may be there again, empty.
        """
        _, *formers = self._ledger.with_formers(session)
        dead = self._ledger.ended(session, is_evicted=True)
        if formers:
            # Records name their bytes, and are gone in one step with the session's own.
            gone, recorded = self.end(formers)
            self._background.start(self.write_down(gone=[session, *gone], dead=recorded))
            for segment in dead:
                self._ledger.forgotten(segment)
            return len(dead)
        # Where no changes are taken now, the end of the rest removes it.
        with suppress(TierFailure):
            self._metadata.commit(Changes(deleted_session_uids=[session.uid]), is_durable=False).close()
        # No record names the segments, so that nothing has to be waited for.
        for segment in dead:
            self._ledger.forgotten(segment)
        return len(dead)

    # Records have their place among all others before anything is awaited, and callers await nothing between
    # a change and this call. So what the ledger says and what is written are in one order: no session is
    # recorded again behind its removal, and a new one under its name comes behind that.
    async def write_down(
        self,
        changed: Sequence[Session] = (),
        *,
        gone: Sequence[Session] = (),
        dead: Sequence[Segment] = (),
        bad: Sequence[Slot] = (),
        moved: Sequence[Segment] = (),
        left: Collection[Slot] = (),
    ) -> None:
        """Record sessions as they are, remove the records of others and of segments that no session lists.

        `bad` slots are kept from use until they are released. `moved` segments are recorded as they are, and
        `left` are slots that they had. Durable when it returns; only then are the slots of dead segments and
        those that were left given back. Raises TierFailure.
        """
        changes = Changes(
            sessions=[record_of(session) for session in changed],
            # A moved segment may have been unlisted since.
            segments=[segment_record_of(self._ledger, s) for s in moved if s.is_listed and s.durable],
            deleted_session_uids=[session.uid for session in gone],
            deleted_segment_ids=[segment.segment_id for segment in dead],
            quarantined=list(bad),
        )
        try:
            written = self._metadata.commit(changes, is_durable=True)
        except TierFailure:
            self._strand(dead, left)
            raise
        if not (dead or left):
            # Nothing follows, and the changes go on by themselves where their caller goes.
            await written
            return
        move = self._background.start(self._give_back(written, dead, left))
        # Only moves that free slots are worth waiting for.
        if dead:
            self._under_way.add(move)
            move.add_done_callback(self._under_way.discard)
        # Shielded: the session is unreachable already. Half a departure would lose its slots until a restart.
        await asyncio.shield(move)

    async def _give_back(
        self, written: Awaitable[None], dead: Sequence[Segment], left: Collection[Slot]
    ) -> None:
        """Give slots back when no record names them any more. Raises TierFailure."""
        try:
            await written
        except TierFailure:
            self._strand(dead, left)
            raise
        for slot in left:
            self._ledger.below.give(slot)
        # A session of a million tokens has thousands of segments; giving each back takes some microseconds.
        for i, segment in enumerate(dead, 1):
            self._ledger.forgotten(segment)
            if i % FREED_PER_SLICE == 0:
                await asyncio.sleep(0)

    async def reopen_metadata(self) -> None:
        """Where changes are taken again, give back the slots whose records are certainly gone.

        Raises TierFailure.
        """
        # Nothing was wrong, or it still is.
        if not await self._metadata.reopen():
            return
        # The set of before the wait: slots that are stranded meanwhile are for the next time.
        stranded = set(self._ledger.below.stranded)
        self._ledger.unstranded(stranded - await self._metadata.recorded_slots())

    def _strand(self, dead: Sequence[Segment], left: Collection[Slot]) -> None:
        self.strand(dead)
        self._ledger.stranded(left)

    def strand(self, dead: Sequence[Segment]) -> None:
        """Give back what segments have in memory; their records may still be there and name their slots."""
        self._ledger.stranded_with(dead)
        for segment in dead:
            self._ledger.forgotten(segment)


class SsdRoom:
    """Makes room on SSD. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        departures: Departures,
    ) -> None:
        self._state, self._io, self._metadata = state, io, metadata
        self._ledger = state.ledger
        self._departures = departures
        self.unstage_something: Callable[[], Awaitable[bool]]
        """Gives back the slot of something staged; False where nothing is.

        Staging, which takes slots here, has it.
        """
        self._turn = asyncio.Lock()

    async def place(self, size_bytes: int, for_session: Session) -> Slot:
        """A slot, made free if need be. Raises CapacityExceeded, TierFailure."""
        slot = self.take(size_bytes, for_session)
        # Free room needs no lock. Only making room is one at a time.
        if slot is None:
            # One caller at a time makes room; it may be enough for those that wait here, who look again.
            async with self._turn:
                while (slot := self.take(size_bytes, for_session)) is None:
                    await self._make(size_bytes, for_session)
        return slot

    def take(self, size_bytes: int, for_session: Session) -> Slot | None:
        """A slot that is free: on the session's path, or on another one, which is its path from then on."""
        # The session's path, then any that takes writes. Moving on with it keeps later segments together.
        slot = self._ledger.below.take(size_bytes, closed=self._io.refusals, on_path=for_session.path)
        if slot is not None:
            for_session.path = slot.path_index
        return slot

    async def place_copy(self, size_bytes: int, for_session: Session, first: Slot) -> Slot | None:
        """A slot for a second copy, on another path than the first; made free if need be.

        None where no other path takes writes or has room.
        """
        slot = self.take_copy(size_bytes, for_session, first)
        if slot is None and self._has_path_besides(first):
            async with self._turn:
                # One caller makes room for copies as for first ones: the same lock, or both would evict for
                # the same bytes.
                while (slot := self.take_copy(size_bytes, for_session, first)) is None:
                    try:
                        await self._make(size_bytes, for_session, {first.path_index})
                    # No room for a copy is no failure of the flush: the rows are safe with one.
                    except CapacityExceeded:
                        return None
                    if not self._has_path_besides(first):
                        return None
        return slot

    def take_copy(self, size_bytes: int, for_session: Session, first: Slot) -> Slot | None:
        """A slot that is free, on another path than the first."""
        # Never the path of the first: a device that is lost would take both.
        closed = {*self._io.refusals, first.path_index}
        slot = self._ledger.below.take(size_bytes, closed=closed, on_path=for_session.copy_path)
        if slot is not None:
            for_session.copy_path = slot.path_index
        return slot

    def _has_path_besides(self, first: Slot) -> bool:
        return len({*self._io.refusals, first.path_index}) < self._ledger.below.path_count

    async def keep_within_limit(self, session: Session, size_bytes: int) -> None:
        """Evict other sessions of the tenant until it may have as many bytes more.

        Raises CapacityExceeded, TierFailure.

        Never waits when it may already.
        """
        quotas = self._ledger.quotas
        while quotas.excess_bytes(session.tenant, size_bytes) > 0:
            async with self._turn:
                # It was made while this call waited.
                if quotas.excess_bytes(session.tenant, size_bytes) <= 0:
                    continue
                victim = self._ledger.leaving.of_tenant(session)
                if victim is None:
                    raise quotas.refusal(session.tenant, size_bytes)
                await self._evict(victim, "its tenant's limit on SSD")

    async def evict(self, choose: Callable[[], Session | None]) -> bool:
        """Give up whom `choose` names now, or wait until another one is gone. False when it names nobody.

        Raises CapacityExceeded, TierFailure.
        """
        # Somebody makes room already: the caller looks again when that has ended.
        if self._turn.locked():
            async with self._turn:
                return True
        async with self._turn:
            victim = choose()
            if victim is not None:
                await self._evict(victim, "room in DRAM, and SSD takes nothing")
            return victim is not None

    async def _make(
        self, size_bytes: int, for_session: Session, besides: Collection[int] = frozenset()
    ) -> None:
        # If no path takes writes, an eviction frees nothing that could be written to.
        self._io.check_any_path()
        # In this order, from what costs nothing to what costs a session: staged slots that no flush waits
        # for; slots that come back by themselves; a session.
        if await self.unstage_something():
            return
        if await self._departures.wait_for_one():
            return
        victim = self._ledger.leaving.from_below(for_session, size_bytes, besides)
        if victim is None:
            raise CapacityExceeded(
                tier="SSD",
                needed_bytes=size_bytes,
                limit_bytes=self._ledger.below.capacity_bytes,
                # Room on a closed path is free as well, and cannot be had.
                free_bytes=self._ledger.below.free_bytes_outside({*self._io.refusals, *besides}),
            )
        whose = "" if victim.tenant == for_session.tenant else f" of tenant {for_session.tenant}"
        await self._evict(victim, f"room on SSD for {for_session.name}{whose}")

    async def expel(self, session: Session, why: str) -> None:
        """Give up this one, with all that others may ask for. Raises CapacityExceeded, TierFailure."""
        self._metadata.check(is_growing=False)
        self._note(session, why)
        await self._departures.remove([session], is_evicted=True)

    def give_up(self, session: Session) -> int:
        """Evict a session that no record names bytes of, for room in memory.

        Returns how many segments went.
        """
        self._state.counters.unadmitted_session_count += 1
        self._note(session, "room in memory, and not worth its place on SSD")
        return self._departures.remove_unrecorded(session)

    async def _evict(self, victim: Session, why: str) -> None:
        # First: an eviction that cannot be recorded would give nothing back.
        # Memory would forget it, and a restart would bring it back: better to refuse the room.
        self._metadata.check(is_growing=False)
        self._note(victim, why)
        token_count = self._ledger.commons.staying_count(victim)
        if token_count:
            await self._departures.leave_behind(victim, token_count)
        else:
            await self._departures.remove([victim], is_evicted=True)

    def _note(self, victim: Session, why: str) -> None:
        self._state.counters.evicted_session_count += 1
        if not victim.is_gone:
            now_ns, seen = self._state.clock.now_ns(), self._state.seen
            seen.evicted_age_s.observe((now_ns - victim.create_time_ns) / 10**9)
            seen.evicted_idle_s.observe((now_ns - victim.access_time_ns) / 10**9)
            self._state.journal.happened(victim, Event.EVICTED, detail=why, token_count=victim.token_count)


def record_of(session: Session) -> SessionRecord:
    """The part of a session that its record holds.

    Positions below `recorded_end` and the segments that hold them.

    A withheld session is written down as well, with the generation that the session has when it is shown
    again: its path may be back after a restart.
    """
    end = session.recorded_end
    # Withheld tokens are on a path that may be back after a restart: the record keeps them.
    live = ranges.normalise([*session.live, *session.withheld]) if session.withheld else session.live
    return SessionRecord(
        uid=session.uid,
        tenant=session.tenant,
        session_id=session.session_id,
        model_id=session.model_id,
        layout=tuple(session.layout.index),
        # One more than now: shown again, the session is another content than what readers see today.
        generation=session.generation + bool(session.withheld),
        # Only what is recorded: a record must not name rows that are not on disk.
        segment_ids=tuple([s.segment_id for s in session.segments if s.begin < end]),
        live=ranges.clip(live, 0, end),
        log_end=end,
        create_time_ns=session.create_time_ns,
        access_time_ns=session.access_time_ns,
        expire_time_ns=session.expire_time_ns,
        ttl_ns=session.expiration.ttl_ns,
        is_pinned=session.is_pinned,
        salt=session.salt,
        contents=contents_within(session.contents, 0, end) if session.contents else (),
        copies=session.copies,
        labels=session.labels,
        block=_block_record(session) if session.is_block else None,
    )


def segment_record_of(ledger: Ledger, segment: Segment) -> SegmentRecord:
    """The record of a segment that is below, with its places there."""
    assert segment.durable is not None  # noqa: S101  # the ledger has just set it
    # As many rows as the slot has, which may be fewer than memory has.
    row_count = segment.durable_row_count
    return SegmentRecord(
        segment.segment_id,
        segment.identity(row_count),
        segment.durable,
        segment.header_checksum,
        ledger.keyed.keys_of(segment, row_count),
        segment.layout.segment_tokens,
        segment.copy,
    )


async def record_moved(
    ledger: Ledger, metadata: MetadataStore, segments: Sequence[Segment], replaced: Collection[Slot]
) -> None:
    """Record segments at their new places, then give the replaced ones back. Raises TierFailure."""
    try:
        if segments:
            changes = Changes(segments=[segment_record_of(ledger, segment) for segment in segments])
            await metadata.commit(changes, is_durable=True)
    except TierFailure:
        # Both the old and the new place may be named by what is on disk.
        ledger.stranded(replaced)
        raise
    for slot in replaced:
        ledger.below.give(slot)


def _block_record(session: Session) -> BlockRecord:
    part_bytes = tuple(spec.row_bytes for spec in session.layout.specs)
    return BlockRecord(session.model_fingerprint, session.parent_id, part_bytes)
