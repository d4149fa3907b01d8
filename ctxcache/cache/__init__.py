"""The cache: the use cases over sessions, and the state they share. Owned by the event loop.

Policy is decided in `core/`; bytes move through `tiers/` and records through `metadata/`; nothing
here knows gRPC. A request is served by one of the parts of `Cache`.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain

from ctxcache.cache.appends import Appends
from ctxcache.cache.blocks import Blocks
from ctxcache.cache.budgets import DirtyBound, MemoryRoom, Pins
from ctxcache.cache.copying import Copying
from ctxcache.cache.devices import Devices
from ctxcache.cache.eviction import Departures, SsdRoom
from ctxcache.cache.flushing import PARALLEL_FLUSHES, Flushing, Staging, WriteBehind
from ctxcache.cache.forgetting import Forgetting
from ctxcache.cache.held_rows import HeldRows
from ctxcache.cache.hints import Hints
from ctxcache.cache.joining import Joining
from ctxcache.cache.leases import Leases
from ctxcache.cache.loading import LAST_USED, DormantSlots, load
from ctxcache.cache.models import Models
from ctxcache.cache.prefixes import Prefixes
from ctxcache.cache.promotion import Prefetching, Promotions
from ctxcache.cache.queues import Queues
from ctxcache.cache.scrubbing import Bad, Mending, Scrubbing
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import Background, State
from ctxcache.cache.token_leases import TokenLeases
from ctxcache.core.ledger.places import Backlog
from ctxcache.core.ledger.segment import Segment, Shelf
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.ledger.work import Work, current_work
from ctxcache.core.limits import (
    DEFAULT_LIMITS,
    DEFAULT_QUEUE_LIMITS,
    DEFAULT_WATERMARKS,
    Limits,
    QueueLimits,
    Watermarks,
)
from ctxcache.core.placement.policy import Ranked
from ctxcache.core.placement.shares import NO_SHARES, Shares
from ctxcache.errors import CapacityExceeded, CorruptSegment, DataDirectoryUnusable, SessionNotFound
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.storage.metadata.base import MetadataStore
from ctxcache.storage.tiers.base import DeviceTier, MappedTier


class Cache:
    """The parts, put together over one arena, one SSD tier and one metadata store."""

    def __init__(
        self,
        *,
        arena: MappedTier,
        ssd: DeviceTier,
        metadata: MetadataStore,
        clock: Clock,
        policy: Ranked,
        default_expiration: Expiration,
        crash_count: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        watermarks: Watermarks = DEFAULT_WATERMARKS,
        shares: Shares = NO_SHARES,
        queue_limits: QueueLimits = DEFAULT_QUEUE_LIMITS,
        spans: Spans = NO_SPANS,
        copies: int = 1,
    ) -> None:
        self.arena, self.ssd, self._metadata = arena, ssd, metadata
        # The arena's first page says which arena it is.
        memory = Shelf(arena.capacities_bytes, first_offset=ALIGN_BYTES)
        self.io = io = SegmentIO(arena, ssd)
        self.state = State(
            clock,
            policy,
            memory,
            Shelf(ssd.capacities_bytes),
            io,
            crash_count=crash_count,
            limits=limits,
            shares=shares,
            watermarks=watermarks,
            spans=spans,
            copies=copies,
        )
        self.ledger = self.state.ledger
        self.placement = self.ledger.placement
        # Each part gets those that it calls, and none knows the whole:
        #
        #     Appends     ──► MemoryRoom, DirtyBound, Pins, Staging, Flushing
        #     Leases      ──► HeldRows, Promotions, Mending, Pins
        #     Sessions    ──► Leases, to compare token ids
        #     HeldRows    ──► Mending
        #     Promotions  ──► MemoryRoom, Mending
        #     MemoryRoom  ──► Staging, Flushing, SsdRoom
        #     Flushing    ──► Staging, Mending
        #     Staging     ──► SsdRoom ──► Departures ◄── Mending
        #     all of them ──► State, and its ledger
        #
        # One arrow goes the other way: SsdRoom asks Staging for slots that nobody waits for.
        state, background = self.state, Background()
        self._background = background
        self.departures = Departures(state, metadata, background)
        self.mending = Mending(state, io, self.departures, background)
        self.ssd_room = SsdRoom(state, io, metadata, self.departures)
        self.staging = Staging(state, io, background, self.ssd_room)
        self.ssd_room.unstage_something = self.staging.unstage_something
        self.flushing = Flushing(state, io, metadata, self.staging, self.mending, background)
        self.write_behind = WriteBehind(state, self.flushing, self.staging)
        self.memory_room = MemoryRoom(state, io, self.staging, self.flushing, self.ssd_room)
        self.joining = Joining(
            state,
            io,
            metadata,
            self.departures,
            self.ssd_room,
            self.staging,
            self.write_behind,
            self.memory_room,
            background,
        )
        self.dirty_bound = DirtyBound(state, io, self.memory_room)
        self.promotions = Promotions(state, io, self.mending, self.memory_room, background)
        self.copying = Copying(
            state, io, metadata, self.departures, self.ssd_room, self.mending, self.write_behind, background
        )
        self.prefetching = Prefetching(state, self.promotions, self.mending)
        self.models = Models(state, metadata)
        leased = Pins("leases", memory.capacity_bytes, limits.lease_share, limits)
        held_rows = HeldRows(self.ledger, io, self.mending)
        self.leases = Leases(state, held_rows, self.promotions, self.mending, leased)
        self.tokens = TokenLeases(state, self.leases)
        self.forgetting = Forgetting(state, metadata, self.departures, self.models)
        self.sessions = Sessions(
            state, metadata, self.departures, self.ssd_room, self.flushing, self.leases, default_expiration
        )
        self.queues = Queues(state, queue_limits)
        self.hints = Hints(state, self.flushing, self.prefetching, self.queues)
        self.appends = Appends(
            state,
            io,
            self.departures,
            self.ssd_room,
            self.staging,
            self.flushing,
            self.memory_room,
            self.dirty_bound,
            Pins("reservations", memory.capacity_bytes, limits.reservation_share, limits),
        )
        self.prefixes = Prefixes(state, metadata, self.departures, self.flushing, self.leases, self.tokens)
        self.blocks = Blocks(
            state,
            io,
            metadata,
            self.appends,
            self.leases,
            self.tokens,
            self.flushing,
            self.departures,
            lambda: self.sessions.default_expiration,
        )
        self.scrubbing = Scrubbing(state, self.mending, io, metadata)
        self.devices = Devices(state, ssd, self.departures, self.mending, self.flushing)

    async def drain(self) -> None:
        """Wait for everything that runs in the background."""
        await self._background.drain()

    async def open(self, last_used: int = LAST_USED) -> None:
        """Load every record; what does not fit together is cut or removed, logged and committed.

        So many sessions, the last that were used, are known from the start; others may be dormant.

        Raises CorruptMetadata, CapacityExceeded (no room to open the records for writing), and
        DataDirectoryUnusable when records name an SSD path that is not there.
        """
        with Work():
            await self._load(last_used)

    async def _load(self, last_used: int) -> None:
        # Before the records: sessions on a lost path are recalled as far as they can be had.
        self.devices.note()
        loaded = load(self.state, self._metadata, last_used)
        # A directory that was left out by mistake must stop the start, not cut every session that lies there.
        self._check_paths()
        # Repairs give slots back. Given back before all were taken, they could be adopted by the wrong
        # segment.
        misplaced, halved, losses = self._adopt(loaded.dormant)
        self.scrubbing.lost_at_start((*loaded.losses, *losses))
        # Everything was read and nothing refused: only now may anything be written.
        self._metadata.begin()
        if loaded.repairs:
            await self._metadata.commit(loaded.repairs, is_durable=True)
        if misplaced:
            await self.mending.quarantine(misplaced)
        if halved:
            await self.departures.write_down(moved=halved)
        # Files that are new: what the records say of them is gone for good.
        await self.devices.give_up(self.ssd.emptied)
        await self.sessions.expire_due()

    async def close(self) -> None:
        """Flush every session and wait for all moves.

        State that cannot be flushed is lost, as its durability says.

        So is what SSD has no free room for and is not worth its place there, the best kept first. Raises the
        first failure when everything else is done.
        """
        with Work():
            dirty = self._worth_keeping()
            results = await self._flush_all(dirty, at_a_time=PARALLEL_FLUSHES)
            # A flush under way makes no room for others: sessions that found none are flushed one by one.
            again = [s for s, result in results.items() if isinstance(result, CapacityExceeded)]
            results |= await self._flush_all(again, at_a_time=1)
            # Behind the flushes, which write access times too.
            save = self.sessions.save_access_times(is_last=True)
            saved = await asyncio.gather(save, return_exceptions=True)
        await self.drain()
        self.io.close()
        for result in (*results.values(), *saved):
            # A session that is gone was deleted, or evicted to make room for another one's flush; one that is
            # corrupt was cut, and what is left of it is written.
            if result is not None and not isinstance(result, (SessionNotFound, CorruptSegment)):
                raise result

    def _worth_keeping(self) -> list[Session]:
        """Sessions with rows that only DRAM has; others of these are given up."""
        kept: list[Session] = []
        kept_bytes = 0
        for session in self.ledger.unwritten.sessions():
            # The best kept first: with each one less room is free for those behind it.
            if self.staging.spares(session, kept_bytes):
                self.ssd_room.give_up(session)
            else:
                kept.append(session)
                kept_bytes += self.ledger.unwritten.size_bytes(session)
        return kept

    async def flush_due(self) -> None:
        """Write what SSD is to have; others go on. Raises the first failure when the rest is done."""
        due = [s for s in self.ledger.unwritten.sessions() if s.backlog is not Backlog.SPARED]
        results = await self._flush_all(due, at_a_time=PARALLEL_FLUSHES, is_last=False)
        for result in results.values():
            if result is not None and not isinstance(result, SessionNotFound):
                raise result

    async def _flush_all(
        self, sessions: Sequence[Session], *, at_a_time: int, is_last: bool = True
    ) -> dict[Session, BaseException | None]:
        results: list[BaseException | None] = []
        for session in sessions:
            current_work().on(session)
        # `is_last`: the metadata keeps a part of its room for the end, so that a full disk loses nothing
        # acknowledged.
        for begin in range(0, len(sessions), at_a_time):
            flushes = [self.flushing.flush(s, is_last=is_last) for s in sessions[begin : begin + at_a_time]]
            results += await asyncio.gather(*flushes, return_exceptions=True)
        return dict(zip(sessions, results, strict=True))

    def _check_paths(self) -> None:
        """Refuse what would cost every session its tokens on a path that nobody has named."""
        segments, dormant = self.ledger.segments(), self.ledger.sleep.dormant
        number = max((slot.path_index for s in segments for slot in s.places), default=0)
        number = max(number, dormant.last_path)
        if number >= len(self.ssd.paths):
            problem = (
                f"records name SSD directory number {number}, which is missing: name it with"
                " --ssd-directories"
            )
            raise DataDirectoryUnusable(path=self.ssd.paths[0], problem=problem)

    def _adopt(self, dormant: DormantSlots) -> tuple[set[Segment], list[Segment], list[Bad]]:
        """Take the segments' slots.

        Returns the segments that have no slot that is theirs to have, those that have one of two, and what is
        lost by the first.
        """
        # All slots that records name, against what there is. Two records may name one place after damage: the
        # first in order of offset has it, and the other's segment is cut.
        segments, below = self.ledger.segments(), self.ledger.below
        named = [(slot, s) for s in segments for slot in s.places]
        # A record with another size than its segment has would overlap its neighbour.
        slots = [(slot, s) for slot, s in named if slot.size_bytes == s.size_bytes]
        wrong = [(slot, s) for slot, s in named if slot.size_bytes != s.size_bytes]
        # A slot that a segment has is not kept from use a second time.
        quarantined = set(self._metadata.quarantined()) - {slot for slot, _ in named}
        if quarantined:
            quarantined.difference_update(dormant)
        kept_from_use = sorted(quarantined)
        refused = below.adopt(chain(dormant, (slot for slot, _ in slots), kept_from_use))
        for i in refused:
            if i < len(dormant):
                # As any other that is not what it should be, it is to be known.
                segment = self.ledger.segment(dormant.segment_ids[i])
                wrong += [(slot, segment) for slot in segment.places] if segment else []
            elif i < len(dormant) + len(slots):
                wrong.append(slots[i - len(dormant)])
            else:
                quarantined.discard(kept_from_use[i - len(dormant) - len(slots)])
        below.quarantined = quarantined
        halved, losses = dict[Segment, None](), list[Bad]()
        misplaced = {segment for segment in segments if not segment.places}
        for slot, segment in wrong:
            if len(segment.places) > 1:
                self.ledger.place_lost(segment, slot, is_bad=False)
                halved[segment] = None
            else:
                problem = "the place that its record names is another's, or not there"
                losses.append(self.scrubbing.described(segment, slot, problem))
                self.ledger.disowned(segment, is_bad=False)
                misplaced.add(segment)
        return misplaced, [segment for segment in halved if segment not in misplaced], losses
