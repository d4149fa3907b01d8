"""Backup: every session as SSD has it, as the bytes of an archive, while requests go on.

Each session is as it was durable at one moment of the backup. No slot is held while bytes are on their way to
the client: one segment at a time is held while it is read, so that a slow client keeps no room from others.
Sessions that end meanwhile are left out. A session that is truncated meanwhile is in it without what was cut.
A growing tail is read first, while no flush may write it elsewhere. Worst case: a session that is cut faster
than it is copied is left out, and counted.
"""

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ctxcache.archive.contents import (
    FRAME_NUMBER,
    STRETCH,
    TOTALS,
    ArchivedModel,
    ArchivedSession,
    Origin,
)
from ctxcache.archive.frames import (
    END,
    FILE_ID_BYTES,
    MADE,
    MODEL,
    PAYLOAD_LIMIT_BYTES,
    ROWS,
    SAME,
    SESSION,
    VOID,
    FrameMaker,
)
from ctxcache.cache import Cache
from ctxcache.cache.eviction import record_of
from ctxcache.cache.state import GENERATION_BITS
from ctxcache.core import ranges
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.work import Work
from ctxcache.errors import CorruptSegment, TooManyRequests
from ctxcache.format.streams import contents_within
from ctxcache.storage.metadata.base import SessionRecord

MESSAGE_BYTES = 2 << 20
AT_ONCE_BYTES = 1 << 20
"""Bytes that are made without a turn for others in between, and gathered for a message."""
ROWS_LIMIT_BYTES = PAYLOAD_LIMIT_BYTES - STRETCH.size
"""Rows of one frame: all of a segment, unless its tokens are wider than those of any known model."""
PASSES = 64
"""Copies of a session that are tried, while it loses segments before they are copied."""


Part = tuple[int, int]
"""Rows of a segment that one frame takes: the segment's id, and the first row."""
InArchive = Mapping[Part, tuple[int, int]]
"""Rows that are in the archive: the number of their frame, and how many rows SSD had of the segment."""


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

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._is_running = False

    async def run(self, created_by: str) -> AsyncGenerator[tuple[bytes, Copied]]:
        """Yield the archive's bytes in order, and how far it is.

        Raises TooManyRequests (a backup is under way), TierFailure.
        """
        if self._is_running:
            raise TooManyRequests(what="backups", limit=1)
        self._is_running = True
        try:
            backup = _Backup(self._cache)
            async with aclosing(backup.steps(created_by)) as steps:
                async for _ in steps:
                    for data in backup.take(at_least=AT_ONCE_BYTES):
                        yield data, backup.copied
                for data in backup.take():
                    yield data, backup.copied
        finally:
            self._is_running = False


# How one session comes into the archive, while others write to it:
#
#     capture (under the flush lock)   record, list of segments, and the tail's rows read at once
#     for each segment                 in the archive already ──► SAME
#                                      still as captured      ──► held, read, ROWS
#                                      cut or moved meanwhile ──► VOID, and captured anew, up to 64 times
#
# A pass after the first is short: rows that are in the file by now are SAME in the next one.
class _Backup:
    """One backup, and the bytes of it that were made and not yet taken."""

    def __init__(self, cache: Cache) -> None:
        self._state, self._io = cache.state, cache.io
        self._flushing, self._mending = cache.flushing, cache.mending
        self._frames = FrameMaker(os.urandom(FILE_ID_BYTES), cache.state.clock.wall_ns())
        self._models: dict[tuple[str, str], tuple[int, ArchivedModel]] = {}
        """Models of the archive and their numbers, by tenant and id."""
        self._shared: dict[Part, tuple[int, int]] = {}
        """Segments in the archive that several sessions list."""
        self._memory = self._tail_memory = memoryview(b"")
        self._made: list[bytes] = []
        self._made_bytes = 0
        self._keep(self._frames.header)
        self.copied = Copied(cache.ledger.session_count, sum(cache.ledger.below.used_bytes_by_path))

    def take(self, *, at_least: int = 0) -> Iterator[bytes]:
        """The bytes made so far, in pieces for messages. Nothing while there are fewer than `at_least`."""
        if self._made_bytes >= at_least:
            data = b"".join(self._made)
            self._made, self._made_bytes = [], 0
            for begin in range(0, len(data), MESSAGE_BYTES):
                yield data[begin : begin + MESSAGE_BYTES]

    async def steps(self, created_by: str) -> AsyncGenerator[None]:
        """Make one part of the archive after the other."""
        # Sessions that come later are left to the next backup: no segment that was copied as shared grows
        # behind its copy. Uids name the sessions: one that ends meanwhile is skipped, and its name may be
        # another one's by then.
        uids = self._state.ledger.uids()
        crash_count = self._state.least_generation >> GENERATION_BITS
        self._add(MADE, Origin(created_by, crash_count).encode())
        for record in list(self._state.models.values()):
            model = ArchivedModel(record.tenant, record.spec, record.create_time_ns, record.probe)
            self._models[record.tenant, record.spec.model_id] = len(self._models), model
            self._add(MODEL, model.encode())
            yield
        for uid in uids:
            async with aclosing(self._copy(uid)) as steps:
                async for _ in steps:
                    yield
        self._add(END, TOTALS.pack(self.copied.session_count, self.copied.token_count))
        yield

    async def _copy(self, uid: bytes) -> AsyncGenerator[None]:
        done: dict[Part, tuple[int, int]] = {}
        for _ in range(PASSES):
            captured = await self._capture(uid, done)
            if captured is None:
                # The session is gone or expired, and nobody misses it.
                return
            self._add(SESSION, captured.described.encode(captured.model_number))
            for stretch in captured.stretches:
                packed = STRETCH.pack(stretch.begin, stretch.end - stretch.begin)
                number = self._number(stretch, done)
                if number is not None:
                    self._add(SAME, packed, FRAME_NUMBER.pack(number))
                    yield
                    continue
                is_tail = stretch is captured.stretches[-1] and captured.is_tail_read
                if not is_tail:
                    self._memory = _room(self._memory, stretch.segment)
                    read = await self._read(stretch.segment, stretch.row_count, self._memory)
                    if read is None:
                        # The session changed. Its new state begins with rows that are in the archive by now.
                        self._add(VOID)
                        yield
                        break
                    self._memory = read
                memory = self._tail_memory if is_tail else self._memory
                self._note(stretch, done)
                for part in self._frames.frame(ROWS, packed, *_rows(stretch, memory)):
                    self._keep(part)
                    yield
            else:
                self._count(captured)
                return
        self.copied.left_out_session_count += 1

    async def _capture(self, uid: bytes, done: InArchive) -> "_Captured | None":
        """A session's state on SSD now; None when the session is gone."""
        # Others have their turn among many small sessions, too.
        await asyncio.sleep(0)
        # A work of its own: a backup of hours keeps no session awake that is done.
        with Work():
            return await self._captured(uid, done)

    async def _captured(self, uid: bytes, done: InArchive) -> "_Captured | None":
        session = self._state.ledger.get(uid)
        if session is None:
            return None
        # A flush would write the tail elsewhere, and give back the slot that is being read.
        async with self._flushing.lock(session):
            # No client could ask for a hidden one: a guest goes on at another store, a former rendering ends
            # with its owner.
            is_over = session.is_gone or session.is_hidden or session.has_expired(self._state.clock.now_ns())
            model = self._models.get((session.tenant, session.model_id))
            if is_over or model is None:
                return None
            record = self._by_wall_clock(record_of(session))
            # The record lists only what is on SSD; what memory has beyond is counted, not copied.
            listed = [s for s in session.shown if s.begin < session.recorded_end]
            if session.withheld:
                record = replace(record, live=ranges.clip(session.live, 0, session.recorded_end))
            described = _described(record, model[1])
            captured = _Captured(described, model[0], list(_stretches(listed, described)))
            captured.unwritten_token_count = session.token_count - described.token_count
            if captured.stretches:
                tail = captured.stretches[-1]
                if self._number(tail, done) is None:
                    self._tail_memory = _room(self._tail_memory, tail.segment)
                    read = await self._read(tail.segment, tail.row_count, self._tail_memory)
                    captured.is_tail_read = read is not None
                    self._tail_memory = self._tail_memory if read is None else read
        return captured

    def _by_wall_clock(self, record: SessionRecord) -> SessionRecord:
        """Turn a record's times into those of the wall clock, by which another store begins."""
        ahead_ns = self._state.clock.wall_ahead_ns()
        return replace(
            record,
            create_time_ns=record.create_time_ns + ahead_ns,
            access_time_ns=record.access_time_ns + ahead_ns,
            expire_time_ns=record.expire_time_ns + ahead_ns,
        )

    async def _read(self, segment: Segment, row_count: int, memory: memoryview) -> memoryview | None:
        """Read a segment, to that memory or another; None when it is gone from SSD, or has more rows.

        Raises TierFailure.
        """
        # A tail that grew has another row count: it is not what was captured.
        if not segment.is_listed or not segment.durable or segment.durable_row_count != row_count:
            return None
        # The segment is held for one reading: eviction and truncation give slots back, and a writer would get
        # it.
        self._state.ledger.held(segment, is_past=True)
        try:
            image, _ = await self._mending.image(segment, memory)
        except CorruptSegment:
            # Only the segment as it was captured can be damaged: one that moved meanwhile is not.
            if segment.durable and segment.durable_row_count == row_count:
                await self._mending.quarantine({segment})
            return None
        finally:
            self._state.ledger.released(segment, is_past=True)
        # The row count is checked again, since the reading waited for a device.
        return image if segment.durable_row_count == row_count else None

    def _number(self, stretch: "_OnSsd", done: InArchive) -> int | None:
        """The frame that has these rows; None when there is none yet."""
        # `done` ends with the session's copy, `_shared` with the backup: shared rows live longer than a
        # session.
        for known in (done, self._shared):
            number, row_count = known.get(stretch.part, (0, 0))
            if row_count == stretch.row_count:
                return number
        return None

    def _note(self, stretch: "_OnSsd", done: dict[Part, tuple[int, int]]) -> None:
        known = self._shared if stretch.segment.reference_count > 1 else done
        known[stretch.part] = self._frames.frame_count, stretch.row_count
        if not stretch.row_begin:
            self.copied.segment_count += 1
            self.copied.bytes += stretch.segment.layout.size_bytes

    def _count(self, captured: "_Captured") -> None:
        self.copied.session_count += 1
        self.copied.token_count += captured.described.token_count
        self.copied.unwritten_token_count += captured.unwritten_token_count

    def _add(self, tag: bytes, *payload: bytes) -> None:
        for part in self._frames.frame(tag, *payload):
            self._keep(part)

    def _keep(self, part: bytes | memoryview) -> None:
        # The memory of a segment is used again for the next one.
        self._made.append(bytes(part))
        self._made_bytes += len(part)


@dataclass(frozen=True, slots=True)
class _OnSsd:
    """Positions `[begin, end)` of a session: the first of a segment's rows `[row_begin, row_end)`.

    `row_count` rows of the segment are on SSD.
    """

    segment: Segment
    row_count: int
    row_begin: int
    row_end: int
    end: int

    @property
    def begin(self) -> int:
        """The stretch's first position."""
        return self.segment.begin + self.row_begin

    @property
    def part(self) -> Part:
        """The stretch's segment, and the first row."""
        return self.segment.segment_id, self.row_begin


@dataclass(slots=True)
class _Captured:
    """A session at one moment, and where its rows were on SSD."""

    described: ArchivedSession
    model_number: int
    stretches: list[_OnSsd]
    unwritten_token_count: int = 0
    is_tail_read: bool = False
    """Whether the rows of the last segment are in memory."""


def _described(record: SessionRecord, model: ArchivedModel) -> ArchivedSession:
    return ArchivedSession(
        session_id=record.session_id,
        model=model,
        layout=record.layout,
        uid=record.uid,
        generation=record.generation,
        live=record.live,
        log_end=record.log_end,
        create_time_ns=record.create_time_ns,
        access_time_ns=record.access_time_ns,
        expire_time_ns=record.expire_time_ns,
        ttl_ns=record.ttl_ns or 0,
        is_pinned=record.is_pinned,
        salt=record.salt,
        labels=record.labels,
        copies=record.copies,
        contents=contents_within(record.contents, 0, ranges.whole_count(record.live)),
    )


def _stretches(listed: Sequence[Segment], described: ArchivedSession) -> Iterator[_OnSsd]:
    """The segments that hold tokens of the session.

    A position is in the last segment that begins at or before it.
    """
    begins = [*(segment.begin for segment in listed), described.log_end]
    rows_at_once = max(1, ROWS_LIMIT_BYTES // described.token_bytes)
    # The next segment's begin cuts this one: rows behind it were replaced by a later append.
    for segment, next_begin in zip(listed, begins[1:], strict=True):
        row_count = segment.durable_row_count
        for row_begin in range(0, row_count, rows_at_once):
            row_end = min(row_begin + rows_at_once, row_count)
            end = min(segment.begin + row_end, next_begin)
            if ranges.clip(described.live, segment.begin + row_begin, end):
                yield _OnSsd(segment, row_count, row_begin, row_end, end)


def _room(memory: memoryview, segment: Segment) -> memoryview:
    """Page-aligned memory that takes a segment: `memory`, where it is large enough."""
    size_bytes = segment.layout.size_bytes
    return memory if len(memory) >= size_bytes else memoryview(mmap.mmap(-1, size_bytes))


def _rows(stretch: _OnSsd, memory: memoryview) -> Iterator[memoryview]:
    """The rows of each stream without padding, in parts of at most AT_ONCE_BYTES."""
    layout = stretch.segment.layout
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        begin, end = (offset + spec.row_bytes * row for row in (stretch.row_begin, stretch.row_end))
        for at in range(begin, end, AT_ONCE_BYTES):
            yield memory[at : min(at + AT_ONCE_BYTES, end)]
