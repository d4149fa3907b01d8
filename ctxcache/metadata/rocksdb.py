"""Metadata in RocksDB: every commit through its log, and many commits per sync.

Knows records (`records.py` documents keys and values) and nothing of what they mean. Worst case:
the device refuses a write or a sync; the store is then fenced, every later commit raises
TierFailure, and only a restart, which reads what is really there, lifts that.

A record is never dropped in silence: the log is replayed in the mode that refuses damage before
its end, tables are checksummed by RocksDB, and every value carries its own checksum besides.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

from rocksdict import (
    BlockBasedOptions,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
)

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, TierFailure
from ctxcache.metadata import records
from ctxcache.metadata.base import Changes, ModelRecord, SegmentRecord, SessionRecord

MEMTABLE_BYTES = 8 << 20
LOG_LIMIT_BYTES = 64 << 20
"""Past this many bytes of write-ahead log the oldest memtable is flushed: it bounds replay at start."""
TABLE_FORMAT = 5
"""The newest table format that RocksDB 7 reads as well, so that other tools can open the files."""
TEXT_LOG_COUNT = 4
TEXT_LOG_BYTES = 1 << 20
Record = TypeVar("Record")


class RocksDbMetadata:
    """See MetadataStore. One process at a time; owned by the event loop, but for the syncing thread."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the database in directory `path`.

        Raises DataDirectoryUnusable (held by another process, not accessible) and CorruptMetadata.
        """
        self._path = str(path)
        self._db = _open(self._path)
        self._syncer = ThreadPoolExecutor(1, "metadata-sync")
        self._next_sync: Future[None] | None = None
        self._failure: str | None = None
        self._is_closed = False

    def models(self) -> Iterator[ModelRecord]:
        """See MetadataStore."""
        return self._scan(records.MODEL_PREFIX, records.decode_model)

    def sessions(self) -> Iterator[SessionRecord]:
        """See MetadataStore."""
        return self._scan(records.SESSION_PREFIX, records.decode_session)

    def segments(self) -> Iterator[SegmentRecord]:
        """See MetadataStore. Ascending by id."""
        return self._scan(records.SEGMENT_PREFIX, records.decode_segment)

    async def commit(self, changes: Changes, *, is_durable: bool) -> None:
        """See MetadataStore. The write itself goes to the page cache, on the loop: tens of microseconds."""
        self._check()
        if changes:
            self._write(_batch(changes))
        if is_durable:
            # Shielded: one caller's cancellation must not cancel the sync of the others.
            await asyncio.shield(asyncio.wrap_future(self._join_sync()))

    def close(self) -> None:
        """Sync what is still in the page cache and give up the files, whatever the device says.

        Raises TierFailure for a sync that fails here; a fenced store has said so before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._syncer.shutdown()
        try:
            if self._failure is None:
                self._sync()
        finally:
            _release(self._db)
            del self._db

    def _scan(self, prefix: bytes, decode: Callable[[bytes, bytes], Record]) -> Iterator[Record]:
        cursor = self._db.iter()
        cursor.seek(prefix)
        while cursor.valid() and (key := cursor.key()).startswith(prefix):
            yield decode(key, cursor.value())
            cursor.next()
        # Not optional: a damaged table ends the iteration early, and only the status tells.
        try:
            cursor.status()
        except Exception as error:  # rocksdict raises nothing narrower
            raise CorruptMetadata(where=self._path, problem=str(error)) from error

    def _write(self, batch: WriteBatch) -> None:
        try:
            self._db.write(batch)
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            self._fail(error)

    def _join_sync(self) -> "Future[None]":
        """Queue a sync, or share the queued one: it starts after this call either way."""
        sync = self._next_sync
        if sync is None or sync.running() or sync.done():
            sync = self._next_sync = self._syncer.submit(self._sync)
        return sync

    def _sync(self) -> None:
        # The syncing thread: one sync at a time. A sync that follows a failed one may report
        # success for writes that are gone, so it is not even tried.
        self._check()
        try:
            self._db.flush_wal(sync=True)
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            self._fail(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise TierFailure(
                path=self._path, problem=f"fenced after a failed write or sync: {self._failure}"
            )

    def _fail(self, error: Exception) -> NoReturn:
        self._failure = str(error)
        raise TierFailure(path=self._path, problem=self._failure) from error


def _open(path: str) -> Rdict:
    try:
        return Rdict(path, _options())
    except Exception as error:  # rocksdict raises nothing narrower
        problem = str(error)
        if "Corruption" in problem or "MANIFEST" in problem:
            raise CorruptMetadata(where=path, problem=problem) from error
        if "LOCK" in problem:
            problem = f"another process holds the metadata ({problem})"
        raise DataDirectoryUnusable(path=path, problem=problem) from error


def _release(database: Rdict) -> None:
    # Closing also turns the log into a table. Where that fails the log still holds everything, and
    # dropping the last reference gives up the lock.
    with contextlib.suppress(Exception):  # rocksdict raises nothing narrower
        database.close()


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    # The default mode drops everything after a damaged record and says nothing; this one refuses
    # to open, unless the damage is the torn end that a crash leaves.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_paranoid_checks(enabled=True)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_max_total_wal_size(LOG_LIMIT_BYTES)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(TEXT_LOG_COUNT)
    options.set_max_log_file_size(TEXT_LOG_BYTES)
    tables = BlockBasedOptions()
    tables.set_format_version(TABLE_FORMAT)
    options.set_block_based_table_factory(tables)
    return options


def _batch(changes: Changes) -> WriteBatch:
    """One atomic batch; deletions last, so that they win. A batch is good for one write."""
    batch = WriteBatch(raw_mode=True)
    for model in changes.models:
        batch.put(records.model_key(model.tenant, model.spec.model_id), records.encode_model(model))
    for segment in changes.segments:
        batch.put(records.segment_key(segment.segment_id), records.encode_segment(segment))
    for session in changes.sessions:
        batch.put(records.session_key(session.uid), records.encode_session(session))
    for uid in changes.deleted_session_uids:
        batch.delete(records.session_key(uid))
    for segment_id in changes.deleted_segment_ids:
        batch.delete(records.segment_key(segment_id))
    return batch
