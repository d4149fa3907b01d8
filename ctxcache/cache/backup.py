"""Backup: every session as SSD has it, as the bytes of an archive, while others go on.

Each session is as it was durable at one moment of the backup. No slot is held while bytes are on their way to whoever
takes them: one segment at a time is held while it is read, so that nobody slow keeps room from others. What went
meanwhile is not in it; of what was truncated meanwhile the rest is. A growing tail is read first, while no flush may
write it elsewhere. Worst case: a session that is cut faster than it is copied is left out, and counted.
"""

import asyncio
import json
import mmap
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ctxcache.cache.residency import Residency
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import GENERATION_BITS, State, record_of
from ctxcache.core import ranges
from ctxcache.core.segment import Segment
from ctxcache.errors import CorruptSegment, TooManyRequests
from ctxcache.format.archive import FRAME_BYTES, FrameMaker, Kind, cut, image_ranges, pack_record
from ctxcache.format.layout import SegmentLayout
from ctxcache.metadata import records
from ctxcache.metadata.base import SessionRecord

MESSAGE_BYTES = 2 << 20
PASSES = 64
"""How often a session may lose segments before they were copied."""


@dataclass(slots=True)
class Copied:
    """How far a backup is. Bytes are those of slots; `unwritten` tokens are those that only memory had."""

    total_session_count: int
    total_bytes: int
    session_count: int = 0
    segment_count: int = 0
    bytes: int = 0
    token_count: int = 0
    unwritten_token_count: int = 0
    left_out_session_count: int = 0


class Backup:
    """Makes backups, one at a time. Owned by the event loop."""

    def __init__(self, state: State, residency: Residency, sessions: Sessions, io: SegmentIO) -> None:
        self._state, self._residency, self._sessions, self._io = state, residency, sessions, io
        self._is_running = False

    async def run(self, created_by: str) -> AsyncGenerator[tuple[bytes, Copied]]:
        """Yield the archive's bytes in order, and how far it is.

        Raises TooManyRequests (one is under way), TierFailure.
        """
        if self._is_running:
            raise TooManyRequests(what="backups", limit=1)
        self._is_running = True
        try:
            one = _Backup(self._state, self._residency, self._sessions, self._io)
            async with aclosing(one.steps(created_by)) as steps:
                async for _ in steps:
                    for data in one.take(at_least=FRAME_BYTES):
                        yield data, one.copied
                for data in one.take():
                    yield data, one.copied
        finally:
            self._is_running = False


class _Backup:
    """One backup, and what of it nobody has taken yet."""

    def __init__(self, state: State, residency: Residency, sessions: Sessions, io: SegmentIO) -> None:
        self._state, self._residency, self._sessions, self._io = state, residency, sessions, io
        self._frames = FrameMaker()
        self._shared: dict[int, int] = {}
        """Rows that were copied of segments that several sessions list, by their ids."""
        self._memory = memoryview(b"")
        self._made, self._made_bytes = [self._frames.preamble], len(self._frames.preamble)
        self.copied = Copied(len(state.by_uid), sum(residency.ssd.used_bytes_by_path))

    def take(self, *, at_least: int = 0) -> Iterator[bytes]:
        """What was made, in pieces for messages; nothing while it is less than that."""
        if self._made_bytes >= at_least:
            data = b"".join(self._made)
            self._made, self._made_bytes = [], 0
            for begin in range(0, len(data), MESSAGE_BYTES):
                yield data[begin : begin + MESSAGE_BYTES]

    async def steps(self, created_by: str) -> AsyncGenerator[None]:
        """Make one frame after the other."""
        # Who comes later is left to the next backup: so nothing that was copied as shared grows behind its copy.
        uids = list(self._state.by_uid)
        facts = {
            "created_by": created_by, "create_time_ns": self._state.clock.wall_ns(),
            "crash_count": self._state.least_generation >> GENERATION_BITS,
        }  # fmt: skip
        self._add(Kind.FACTS, [json.dumps(facts).encode()])
        for model in list(self._state.models.values()):
            key = records.model_key(model.tenant, model.spec.model_id)
            self._add(Kind.MODEL, pack_record(key, records.encode_model(model)))
            yield
        for uid in uids:
            async with aclosing(self._copy(uid)) as steps:
                async for _ in steps:
                    yield
        counts = {"session_count": self.copied.session_count, "segment_count": self.copied.segment_count}
        self._add(Kind.END, [json.dumps(counts).encode()])
        yield

    async def _copy(self, uid: bytes) -> AsyncGenerator[None]:
        done: dict[int, int] = {}
        for _ in range(PASSES):
            captured = await self._capture(uid, done)
            if captured is None:
                return
            # The newest first, whose bytes are at hand; who drops tokens mostly drops the oldest.
            for segment, row_count in reversed(captured.segments):
                if self._has(segment, row_count, done):
                    continue
                if not captured.is_last_read and not await self._read(segment, row_count):
                    break
                captured.is_last_read = False
                for kind, parts in self._image(segment.layout, row_count):
                    self._add(kind, parts)
                    yield
                self._note(segment, row_count, done)
            else:
                self._finish(captured.record, captured.unwritten_token_count)
                yield
                return
        self.copied.left_out_session_count += 1

    async def _capture(self, uid: bytes, done: Mapping[int, int]) -> "_Captured | None":
        """What SSD has of a session now; None when the session is gone."""
        # Of many small ones too, others have their turn in between.
        await asyncio.sleep(0)
        session = self._state.by_uid.get(uid)
        if session is None:
            return None
        # A flush would write the tail elsewhere, and give back what is being read.
        async with self._residency.flush_lock(session):
            if session.is_gone or session.expire_time_ns <= self._state.clock.now_ns():
                return None
            record = record_of(session)
            listed = [s for s in session.shown if s.begin < session.recorded_end]
            if session.withheld:
                live = ranges.clip(session.live, 0, session.recorded_end)
                record = replace(record, live=live, segment_ids=tuple(s.segment_id for s in listed))
            segments = [(s, s.ssd_row_count) for s in listed]
            record = self._by_wall_clock(record)
            found = _Captured(record, segments, session.token_count - ranges.count(record.live))
            if segments and not self._has(*segments[-1], done):
                found.is_last_read = await self._read(*segments[-1])
        return found

    def _by_wall_clock(self, record: SessionRecord) -> SessionRecord:
        """Another store begins with the wall clock's time."""
        ahead_ns = self._state.clock.wall_ahead_ns()
        return replace(
            record, create_time_ns=record.create_time_ns + ahead_ns,
            access_time_ns=record.access_time_ns + ahead_ns, expire_time_ns=record.expire_time_ns + ahead_ns,
        )  # fmt: skip

    async def _read(self, segment: Segment, row_count: int) -> bool:
        """Read a segment into our memory; False when it is there no more, or has more rows. Raises TierFailure."""
        if segment.is_discarded or not segment.ssd or segment.ssd_row_count != row_count:
            return False
        if len(self._memory) < segment.layout.size_bytes:
            self._memory = memoryview(mmap.mmap(-1, segment.layout.size_bytes))
        self._residency.hold(segment, is_past=True)
        try:
            await self._io.check(segment, self._memory)
        except CorruptSegment:
            if segment.ssd and segment.ssd_row_count == row_count:
                await self._residency.mending.quarantine({segment})
            return False
        finally:
            self._residency.release(segment, is_past=True)
        return segment.ssd_row_count == row_count

    def _has(self, segment: Segment, row_count: int, done: Mapping[int, int]) -> bool:
        return row_count in (self._shared.get(segment.segment_id), done.get(segment.segment_id))

    def _note(self, segment: Segment, row_count: int, done: dict[int, int]) -> None:
        (self._shared if segment.session_count > 1 else done)[segment.segment_id] = row_count
        self.copied.segment_count += 1
        self.copied.bytes += segment.layout.size_bytes

    def _image(self, layout: SegmentLayout, row_count: int) -> Iterator[tuple[Kind, list[memoryview]]]:
        head, *rows = (self._memory[slice(*found)] for found in image_ranges(layout, row_count))
        yield Kind.SEGMENT, [head]
        for parts in cut(rows):
            yield Kind.ROWS, parts

    def _finish(self, record: SessionRecord, unwritten_count: int) -> None:
        key, value = records.session_key(record.uid), records.encode_session(record)
        self._add(Kind.SESSION, pack_record(key, value))
        self.copied.session_count += 1
        self.copied.token_count += ranges.count(record.live)
        self.copied.unwritten_token_count += unwritten_count

    def _add(self, kind: Kind, parts: Sequence[bytes | memoryview]) -> None:
        self._made.append(self._frames.frame(kind, parts))
        self._made_bytes += len(self._made[-1])


@dataclass(slots=True)
class _Captured:
    """A session at one moment: its record, and its segments with the rows of each that SSD had."""

    record: SessionRecord
    segments: list[tuple[Segment, int]]
    unwritten_token_count: int
    is_last_read: bool = False
    """Whether the last segment is what was read last."""
