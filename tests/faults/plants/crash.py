"""Bugs that only a crash, or a power cut, shows; and a server that checks its books when it has opened."""

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctxcache.cache import Cache, eviction, flushing, joining, sessions
from ctxcache.cache.appends import Appends
from ctxcache.cache.blocks import Blocks
from ctxcache.cache.eviction import record_of
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.reservations import Reservation
from ctxcache.cache.segments import Written
from ctxcache.cache.state import State
from ctxcache.core import ranges
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.ledger import ledger
from ctxcache.core.ledger.ledger import Flushed, Ledger
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.sleep import Sleep
from ctxcache.core.limits import Watermarks
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.server.upkeep import Upkeep
from ctxcache.storage.metadata.base import Changes, SessionRecord
from ctxcache.storage.metadata.catalog import Entry
from ctxcache.storage.metadata.records import encode_session
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.ssd import SsdFiles
from tests.faults.planted import plant
from tests.integrity import check_integrity

LATE_S = 0.03
_late: set["asyncio.Task[None]"] = set()


def _patch(owner: object, name: str, replacement: Any) -> None:
    getattr(owner, name)  # what is not there cannot be broken
    setattr(owner, name, replacement)


def _later(work: Any) -> None:
    async def wait() -> None:
        await asyncio.sleep(LATE_S)
        await work

    task = asyncio.get_running_loop().create_task(wait())
    _late.add(task)
    task.add_done_callback(_late.discard)


@plant
def checked_opening(_: int) -> None:
    """No bug: the server refuses to start when what it loaded does not add up."""
    opening = Cache.open

    async def open_checked(cache: Cache) -> None:
        await opening(cache)
        if problems := check_integrity(cache):
            raise RuntimeError(f"the books do not add up: {problems}")

    _patch(Cache, "open", open_checked)


JOINED = "segments were joined"
"""The line that a server that `joins_early` writes to standard error each time."""


@plant
def joins_early(_: int) -> None:
    """No bug: two full segments that follow one another are joined."""
    joined = Ledger.joined

    def told(
        book: Ledger, sessions: Sequence[Session], parts: Sequence[Segment], whole: Flushed
    ) -> list[Segment]:
        sys.stderr.write(f"{JOINED}: {len(parts)}\n")
        return joined(book, sessions, parts, whole)

    _turn_often()
    _patch(ledger, "MANY_SEGMENTS", 1)
    _patch(joining, "LONGEST_SEGMENT_TOKENS", 2 * SEGMENT_TOKENS)
    _patch(Ledger, "joined", told)


ASLEEP = "a session fell asleep"
"""The line that a server that `sleeps_early` writes to standard error each time."""


@plant
def sleeps_early(_: int) -> None:
    """No bug: clean rows leave memory, and sessions are dormant, as soon as they may."""
    fell_asleep = Sleep.fell_asleep

    def told(book: Sleep, session: Session, *records: Any) -> None:
        sys.stderr.write(f"{ASLEEP}\n")
        fell_asleep(book, session, *records)

    _turn_often()
    _patch(Watermarks, "is_low", lambda _marks, free_bytes, capacity_bytes: free_bytes < capacity_bytes)
    _patch(
        Watermarks, "missing_bytes", lambda _marks, free_bytes, capacity_bytes: capacity_bytes - free_bytes
    )
    _patch(Sleep, "awake_count", 0)
    _patch(Sleep, "sleep_ns", int(LATE_S * 1e9))
    _patch(Sleep, "fell_asleep", told)


@plant
def sleepers_record_is_old(_: int) -> None:
    """A session falls asleep with a record that lacks its last token."""
    sleeps_early(1)
    fell_asleep = Sleep.fell_asleep

    def fell_asleep_short(book: Sleep, session: Session, _kept: object, segments: Sequence[object]) -> None:
        record = record_of(session)
        (begin, end), *before = reversed(record.live) if record.live else [(0, 0)]
        if end - begin > 1:
            record = replace(record, live=(*reversed(before), (begin, end - 1)))
        fell_asleep(book, session, encode_session(record), segments)

    _patch(Sleep, "fell_asleep", fell_asleep_short)


def _turn_often() -> None:
    _patch(Upkeep.__init__, "__kwdefaults__", {"interval_s": LATE_S})


@plant
def commits_have_company(_: int) -> None:
    """No bug: a durable commit shares its write of the log with another one, behind it, that is not."""
    put = RocksDbMetadata._put

    def put_among(store: RocksDbMetadata, entries: Sequence[Entry], *, is_durable: bool) -> Any:
        if not is_durable:
            return put(store, entries, is_durable=False)
        # This one begins a write of the log where none is under way: the durable one has to wait.
        put(store, (), is_durable=False)
        done = put(store, entries, is_durable=True)
        put(store, (), is_durable=False)
        return done

    _patch(RocksDbMetadata, "_put", put_among)


@plant
def durable_wish_forgotten(_: int) -> None:
    """A durable commit is answered without a sync where another one is written behind it."""
    put = RocksDbMetadata._put

    def put_forgetting(store: RocksDbMetadata, entries: Sequence[Entry], *, is_durable: bool) -> Any:
        store._is_waiting_durable = False
        return put(store, entries, is_durable=is_durable)

    _patch(RocksDbMetadata, "_put", put_forgetting)


@plant
def acknowledged_before_record(_: int) -> None:
    """A flush returns while its record is still to be written."""
    commit = RocksDbMetadata.commit

    async def commit_then(store: RocksDbMetadata, changes: Changes, *, is_durable: bool) -> None:
        await commit(store, changes, is_durable=is_durable)

    def commit_late(
        store: RocksDbMetadata, changes: Changes, *, is_durable: bool
    ) -> Coroutine[Any, Any, None]:
        if not changes.segments:
            return commit(store, changes, is_durable=is_durable)
        _later(commit_then(store, changes, is_durable=is_durable))
        return asyncio.sleep(0)

    _patch(RocksDbMetadata, "commit", commit_late)


@plant
def second_writer_is_not_flushed_for(_: int) -> None:
    """A durable put of a block that another writer has put is acknowledged as it is."""
    flush, reserve = Blocks.flush, vars(Blocks)["_reserve"]
    put_before: set[bytes] = set()

    async def reserve_and_note(blocks: Blocks, *asked: Any) -> Any:
        room = await reserve(blocks, *asked)
        if not room.reservation_id:
            tenant, space, wanted, *_ = asked
            put_before.update(block.uid for block in blocks.there(tenant, space, [wanted.key]))
        return room

    async def flush_own(blocks: Blocks, found: Sequence[Session]) -> None:
        await flush(blocks, [block for block in found if block.uid not in put_before])

    _patch(Blocks, "_reserve", reserve_and_note)
    _patch(Blocks, "flush", flush_own)


@plant
def record_before_bytes(_: int) -> None:
    """A slot is written after the record that points at it."""
    write = SsdFiles.write

    async def write_late(files: SsdFiles, slot: Any, begin: int, data: memoryview, **named: Any) -> None:
        _later(write(files, slot, begin, memoryview(bytearray(data)), **named))

    _patch(SsdFiles, "write", write_late)


@plant
def deleted_record_stays(_: int) -> None:
    """The record of a deleted session is forgotten, not removed."""
    commit = RocksDbMetadata.commit

    def commit_some(
        store: RocksDbMetadata, changes: Changes, *, is_durable: bool
    ) -> Coroutine[Any, Any, None]:
        changes.deleted_session_uids = []
        return commit(store, changes, is_durable=is_durable)

    _patch(RocksDbMetadata, "commit", commit_some)


@plant
def tail_rewritten_in_place(_: int) -> None:
    """The slot of a growing segment is given back before the record names the new one."""
    write = Flushing._write

    async def write_over(
        back: Flushing, session: Session, row_counts: Mapping[Segment, int]
    ) -> Sequence[Written]:
        for segment in row_counts:
            if segment.durable is not None:
                for slot in segment.places:
                    back._ledger.below.give(slot)
                segment.placed(())
                segment.durable_row_count = 0
        written = await write(back, session, row_counts)
        await asyncio.sleep(LATE_S)
        return written

    _patch(Flushing, "_write", write_over)


@plant
def generation_reused(_: int) -> None:
    """Crashes are not counted, so that generations go on where records ended."""
    begin = State.__init__

    def begin_uncounted(state: State, *arguments: Any, crash_count: int, **named: Any) -> None:
        begin(state, *arguments, crash_count=0, **named)

    _patch(State, "__init__", begin_uncounted)


@plant
def recorded_end_off_by_one(_: int) -> None:
    """Records leave out the last token."""

    def short_record(session: Session) -> SessionRecord:
        record = record_of(session)
        end = max(record.log_end - 1, 0)
        return replace(record, log_end=end, live=ranges.clip(record.live, 0, end))

    for module in (eviction, flushing, sessions):
        _patch(module, "record_of", short_record)


@plant
def abandoned_save_shows(_: int) -> None:
    """A writer that gives up leaves its rows visible."""
    release = Appends.release

    def release_committed(writing: Appends, reservation: Reservation, *, is_abandoned: bool = False) -> None:
        if writing.is_open(reservation.reservation_id) and not reservation.session.is_gone:
            end, now_ns = reservation.end, writing._state.clock.now_ns()
            cuts = reservation.cuts(reservation.committed, end)
            writing._attach(reservation, cuts, end, now_ns, keep_open=False)
        release(writing, reservation, is_abandoned=is_abandoned)

    _patch(Appends, "release", release_committed)


@plant
def slot_leaked(_: int) -> None:
    """Every tenth slot is not given back."""
    give, count = SlotAllocator.give, iter(range(1 << 62))

    def give_most(allocator: SlotAllocator, slot: Any) -> None:
        if next(count) % 10:
            give(allocator, slot)

    _patch(SlotAllocator, "give", give_most)


@plant
def slots_not_synced(_: int) -> None:
    """SSD files are never synced."""
    _patch(os, "fdatasync", lambda _fd: None)


@plant
def records_not_synced(_: int) -> None:
    """The metadata's log is never synced."""
    _patch(RocksDbMetadata, "sync_log", lambda _store: None)


@plant
def facts_not_synced(_: int) -> None:
    """FORMAT and RUNS get their names before their bytes are synced; the SSD file is never synced whole."""
    _patch(os, "fsync", lambda _fd: None)
