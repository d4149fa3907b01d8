"""Scrubbing: every segment is verified, in DRAM and on SSD, one at a time, at a bounded rate.

What is bad on SSD is quarantined, and what is bad in DRAM mended, as a read of it would do. Segments come in the order of their positions, the
last first, so that no cut hides a bad one that is still to come. Takes one slot's memory and no room in
the arena. Worst case: a segment per session and pass is checked twice, when it moves meanwhile.
"""

import asyncio
import mmap
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from ctxcache.cache.residency import Residency
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import State
from ctxcache.core.ledger.places import Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, TooManyRequests
from ctxcache.format.slot import Slot
from ctxcache.storage.metadata.base import Changes, MetadataStore

SEGMENTS_PER_REPORT = 32
RECORDS_PER_TURN = 256


@dataclass(frozen=True, slots=True)
class Bad:
    """A copy of a segment that is not what was written: tokens at positions `[begin, end)` of these sessions.

    `is_mended`: it was in DRAM, and has SSD's rows now.
    """

    segment_id: int
    tenant: str
    sessions: tuple[str, ...]
    begin: int
    end: int
    path: str
    offset_bytes: int
    problem: str
    is_in_dram: bool = False
    is_mended: bool = False


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a pass has come; `bad` are those found since the last report."""

    segment_count: int
    checked_segment_count: int
    checked_bytes: int
    record_count: int
    bad: tuple[Bad, ...]


class Scrubbing:
    """The scrubber. Owned by the event loop; one pass at a time."""

    def __init__(
        self, state: State, residency: Residency, sessions: Sessions, io: SegmentIO, metadata: MetadataStore
    ) -> None:
        self._state, self._residency, self._sessions = state, residency, sessions
        self._ledger = state.ledger
        self._io, self._metadata = io, metadata
        self._is_running = self._is_releasing = False

    async def run(self, *, bytes_per_second: int = 0) -> AsyncGenerator[Scrubbed, None]:
        """Verify every record and every segment; 0 bytes per second is as fast as it goes.

        Raises TooManyRequests (a pass is under way), CorruptMetadata, TierFailure.
        """
        if self._is_running:
            raise TooManyRequests(what="verifications", limit=1)
        self._is_running = True
        try:
            record_count = await self._records()
            segments = sorted(self._ledger.segments(), key=lambda segment: -segment.begin)
            began_ns, done_bytes = self._state.clock.monotonic_ns(), 0
            bad: list[Bad] = []
            bounce = memoryview(mmap.mmap(-1, max((s.layout.size_bytes for s in segments), default=4096)))
            for i, segment in enumerate(segments):
                if i % SEGMENTS_PER_REPORT == 0:
                    yield Scrubbed(len(segments), i, done_bytes, record_count, tuple(bad))
                    bad.clear()
                if segment.memory and segment.place is not Place.HELD:
                    done_bytes += segment.memory.size_bytes
                    bad += await self._check_dram(segment)
                if segment.durable and segment.is_listed and not self._ledger.is_on_lost_path(segment):
                    done_bytes += segment.durable.size_bytes
                    bad += await self._check(segment, bounce)
                await self._pause(began_ns, done_bytes, bytes_per_second)
            yield Scrubbed(len(segments), len(segments), done_bytes, record_count, tuple(bad))
        finally:
            self._is_running = False

    async def release(self) -> tuple[int, int]:
        """Test quarantined slots by writing, and let those be used again that keep what they are given.

        Returns how many do, and how many do not. Raises TooManyRequests (it is under way), TierFailure.
        """
        # Alone: what another one has released holds somebody's rows by now.
        if self._is_releasing:
            raise TooManyRequests(what="releases", limit=1)
        self._is_releasing = True
        try:
            slots = sorted(self._ledger.below.quarantined)
            released = [await self._release(slot) for slot in slots].count(True)
            return released, len(slots) - released
        finally:
            self._is_releasing = False

    async def _release(self, slot: Slot) -> bool:
        if not await self._io.keeps_bytes(slot):
            return False
        await self._metadata.commit(Changes(released=[slot]), is_durable=True)
        self._ledger.unquarantined(slot)
        return True

    async def _records(self) -> int:
        """Read every record, a few at a time."""
        count = 0
        tables: Iterable[Iterable[object]] = (
            self._metadata.models(), self._metadata.sessions(), self._metadata.segments(),
        )  # fmt: skip
        for table in tables:
            for _ in table:
                count += 1
                if count % RECORDS_PER_TURN == 0:
                    await asyncio.sleep(0)
        return count

    async def _check_dram(self, segment: Segment) -> list[Bad]:
        """Before SSD's copy: where that is bad as well, nothing can be mended by it."""
        slot, end = segment.memory, segment.end
        if slot is None:
            return []
        names = sorted(session.session_id for session in self._ledger.listers(segment))
        self._ledger.held(segment)
        is_mended = True
        try:
            problem = await self._residency.mending.verify(segment)
        except CorruptSegment as error:
            problem, is_mended = str(error.facts["problem"]), False
        finally:
            self._ledger.released(segment)
        if not problem:
            return []
        return [
            Bad(
                segment.segment_id, segment.tenant, tuple(names), segment.begin, end, self._io.arena_path,
                slot.offset_bytes, problem, is_in_dram=True, is_mended=is_mended,
            )
        ]  # fmt: skip

    async def _check(self, segment: Segment, bounce: memoryview) -> list[Bad]:
        while segment.durable and segment.is_listed:
            row_count = segment.durable_row_count
            self._ledger.held(segment)
            try:
                await self._io.check(segment, bounce)
            except CorruptSegment as error:
                if segment.durable_row_count != row_count or not segment.durable:
                    # Written elsewhere meanwhile, and perhaps back again; or another reader has found it bad.
                    continue
                bad = self._describe(segment, str(error.facts["problem"]))
                await self._residency.mending.quarantine({segment})
                return [bad]
            finally:
                self._ledger.released(segment)
            return []
        return []

    def _describe(self, segment: Segment, problem: str) -> Bad:
        assert segment.durable is not None  # noqa: S101  # it has just been read
        names = sorted(session.session_id for session in self._ledger.listers(segment))
        return Bad(
            segment.segment_id, segment.tenant, tuple(names), segment.begin,
            segment.begin + segment.durable_row_count, self._io.path_of(segment.durable), segment.durable.offset_bytes, problem,
        )  # fmt: skip

    async def _pause(self, began_ns: int, done_bytes: int, bytes_per_second: int) -> None:
        due_ns = done_bytes * 10**9 // bytes_per_second if bytes_per_second else 0
        wait_ns = due_ns - (self._state.clock.monotonic_ns() - began_ns)
        await asyncio.sleep(max(wait_ns, 0) / 10**9)
