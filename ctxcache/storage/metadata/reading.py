"""Reading: the records of a database in RocksDB, of which not a byte is changed.

RocksDB that opens for writing begins by tidying up: it deletes each file that its manifest does not name.
Behind a damaged manifest those are the newest tables and the log. So a database is read first, through links
beside it, and compared with its witness and its catalog. Only what passes all of that is opened for writing
(`rocksdb.py`).

    metadata/        the database: untouched
    metadata.look/   links to its files, while it is read; the binding writes a file of its own here

Knows records (`records.py` documents keys and values) and nothing of what they mean. Worst case: a process
that is killed leaves the links, and the next look removes them.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
)

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.format.layout import Slot
from ctxcache.runtime.files import DIRECTORY_MODE
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import (
    Changes,
    KeptSegments,
    KeptSessions,
    Kind,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
)
from ctxcache.storage.metadata.catalog import Catalog
from ctxcache.storage.metadata.records import Commit, Seals
from ctxcache.storage.metadata.witness import Witness

MEMTABLE_BYTES = 8 << 20
LOG_LIMIT_BYTES = 64 << 20
"""Past this many bytes of write-ahead log the oldest memtable is flushed: it bounds replay at start."""
TABLE_FORMAT = 5
"""The newest table format that RocksDB 7 reads as well, so that other tools can open the files."""
ENTRIES_PER_BATCH = 1024
TEXT_LOG_COUNT = 4
OPEN_FILES_LIMIT = 256
"""Tables that are open at a time: descriptors are reserved for so many."""
TEXT_LOG_BYTES = 1 << 20
OPTIONS = Path(__file__).parent / "options"
"""The options that the binding has no setters for."""
_FIRST_MANIFEST = "MANIFEST-000001"
_OWN_FILES = ("LOCK", "LOG", "rocksdict-config.json")
"""Beginnings of names of files without records, which every opening of a database writes."""
Record = TypeVar("Record")


def has_database(path: Path) -> bool:
    """Whether the directory has any part of a database. Raises OSError.

    RocksDB makes a first manifest, and then the file that names it. A creation that was cut off between the
    two left no record.
    """
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    if "CURRENT" in names:
        return True
    return any(
        name.endswith((".sst", ".log")) or (name.startswith("MANIFEST-") and name != _FIRST_MANIFEST)
        for name in names
    )


def options(*, is_new: bool = False) -> Options:
    """The options of the database. Without `is_new` no database is made where there is none."""
    database, _ = Options.load_latest(str(OPTIONS))
    database.create_if_missing(create_if_missing=is_new)
    # The default mode drops everything after a damaged record and says nothing; this one refuses
    # to open, unless the damage is the torn end that a crash leaves.
    database.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    database.set_paranoid_checks(enabled=True)
    database.set_max_open_files(OPEN_FILES_LIMIT)
    database.set_write_buffer_size(MEMTABLE_BYTES)
    database.set_max_total_wal_size(LOG_LIMIT_BYTES)
    database.set_compression_type(DBCompressionType.lz4())
    database.set_keep_log_file_num(TEXT_LOG_COUNT)
    database.set_max_log_file_size(TEXT_LOG_BYTES)
    tables = BlockBasedOptions()
    tables.set_format_version(TABLE_FORMAT)
    database.set_block_based_table_factory(tables)
    return database


def release(database: Rdict) -> None:
    """Close a database, whatever the device says."""
    # Closing also turns the log into a table. Where that fails the log still holds everything, and dropping
    # the last reference gives up the lock.
    with contextlib.suppress(Exception):  # rocksdict raises nothing narrower
        database.close()


def refuse(path: str, error: Exception) -> NoReturn:
    """Raise the error for RocksDB's refusal to open a database: damage, or another failure."""
    problem = str(error).replace(_place(path), path)
    # The path that RocksDB names may have any word in it.
    said = problem.replace(path, "")
    # A missing file is damage. A directory that cannot be entered is not.
    if "Corruption" in said or "No such file" in said:
        raise CorruptMetadata(where=path, problem=problem) from error
    if "LOCK" in said:
        problem = f"another process holds the metadata ({problem})"
    raise DataDirectoryUnusable(path=path, problem=problem) from error


class Untouched:
    """A database that is open for reading. RocksDB writes nothing to it, and its binding writes elsewhere."""

    def __init__(self, path: str) -> None:
        """Raises CorruptMetadata, DataDirectoryUnusable."""
        self._links = Path(_place(path))
        try:
            self._link(Path(path))
            self.database = Rdict(str(self._links), options(), access_type=AccessType.read_only())
        except BaseException as error:
            self._unlink()
            if isinstance(error, OSError):
                raise DataDirectoryUnusable(path=path, problem=error.strerror or str(error)) from error
            if isinstance(error, Exception):  # rocksdict raises nothing narrower
                refuse(path, error)
            raise

    def close(self) -> None:
        """Close the database and remove the links."""
        release(self.database)
        self._unlink()

    def _link(self, path: Path) -> None:
        # Links may remain of a read-only opening whose process was killed.
        self._unlink()
        self._links.mkdir(mode=DIRECTORY_MODE)
        for entry in path.iterdir():
            if not entry.name.startswith(_OWN_FILES):
                (self._links / entry.name).symlink_to(Path("..", path.name, entry.name))

    def _unlink(self) -> None:
        shutil.rmtree(self._links, ignore_errors=True)


def _place(path: str) -> str:
    return f"{path}.look"


class RocksDbRecords:
    """The reading half of MetadataStore, over a database that is there. Owned by the event loop.

    With `witness` and `catalog` the database is compared with what they know.
    """

    database: Rdict

    def __init__(
        self, path: str | Path, *, witness: Witness | None = None, catalog: Catalog | None = None
    ) -> None:
        """Open the database and change nothing. Closes `witness` and `catalog` at its end.

        Raises DataDirectoryUnusable, and CorruptMetadata: damaged, or it lacks what was on disk.
        """
        self._path = str(path)
        self._witness, self._catalog = witness, catalog
        self._seals: Seals | None = None
        """The checksum of each session's record; None until they were read."""
        self._untouched: Untouched | None = None
        """The database while it is open for reading alone."""
        try:
            is_there = has_database(Path(path))
        except OSError as error:
            raise DataDirectoryUnusable(path=self._path, problem=error.strerror or str(error)) from error
        if is_there:
            self._untouched = Untouched(self._path)
            self.database = self._untouched.database
        try:
            self._is_counted, self._last = self._read_last()
        except BaseException:
            self._let_go()
            raise
        self._written = self._last
        """The last commit that is in memory; `_last` is the last one that is in the log."""

    @property
    def is_there(self) -> bool:
        """Whether there is a database, and it is open for reading alone."""
        return self._untouched is not None

    def close(self) -> None:
        """Close what is open for reading."""
        self._let_go()
        if self._catalog:
            self._catalog.close(self._last.sequence)

    def models(self) -> Iterator[ModelRecord]:
        """See MetadataStore."""
        return self._scan(records.MODEL_PREFIX, records.decode_model)

    def sessions(self) -> Iterator[SessionRecord]:
        """See MetadataStore."""
        for keys, values in self._sealed_sessions():
            yield from map(records.decode_session, keys, values)

    def segments(self) -> Iterator[SegmentRecord]:
        """See MetadataStore. Ascending by id."""
        return self._scan(records.SEGMENT_PREFIX, records.decode_segment)

    def kept_sessions(self) -> Iterator[KeptSessions]:
        """See MetadataStore."""
        kinds: dict[object, Kind] = {}
        for keys, values in self._sealed_sessions():
            yield records.keep_sessions(keys, values, kinds)

    def kept_segments(self) -> Iterator[KeptSegments]:
        """See MetadataStore."""
        for keys, values in self._batches(records.SEGMENT_PREFIX):
            yield records.keep_segments(keys, values)

    def session(self, uid: bytes, kept: object) -> SessionRecord:
        """See MetadataStore."""
        assert isinstance(kept, bytes)  # noqa: S101  # this store gave it
        return records.decode_session(records.session_key(uid), kept)

    def segment(self, segment_id: int, kept: object) -> SegmentRecord:
        """See MetadataStore."""
        assert isinstance(kept, bytes)  # noqa: S101  # this store gave it
        return records.decode_segment(records.segment_key(segment_id), kept)

    def kept(self, record: SessionRecord | SegmentRecord) -> object:
        """See MetadataStore."""
        if isinstance(record, SessionRecord):
            return records.encode_session(record)
        return records.encode_segment(record)

    def _sealed_sessions(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """The sessions' keys and values. Values that the caller does not verify raise nothing."""
        seals = Seals()
        for keys, values in self._batches(records.SESSION_PREFIX):
            yield keys, values
            # The seals are collected while records are read anyway. At the end they are compared with those
            # of the last commit.
            seals.extend(keys, values)
        if self._seals is None:
            self._check_sessions(seals)

    def quarantined(self) -> Iterator[Slot]:
        """See MetadataStore."""
        return self._scan(records.SLOT_PREFIX, records.decode_slot)

    def raw(self) -> Iterator[tuple[bytes, bytes]]:
        """Every record but the commit's, as it is kept, at the moment of this call.

        Raises CorruptMetadata while it is iterated over.
        """
        # A cursor is a snapshot: it has no later commits.
        cursor = self.database.iter()
        cursor.seek(b"")

        def items() -> Iterator[tuple[bytes, bytes]]:
            while cursor.valid():
                if (key := cursor.key()) != records.COMMIT_KEY:
                    yield key, cursor.value()
                cursor.next()
            self._check_cursor(cursor)

        return items()

    def _read_last(self) -> tuple[bool, Commit]:
        """Whether the last commit was noted, and it. Raises CorruptMetadata when it is not the last one."""
        try:
            value = self.database.get(records.COMMIT_KEY) if self.is_there else None
        except Exception as error:  # rocksdict raises nothing narrower
            raise CorruptMetadata(where=self._path, problem=str(error)) from error
        # The witness is outside the database: a database put back from an older copy cannot know it.
        last = records.decode_commit(value) if value else Commit(0, 0, 0)
        witnessed = self._witness.sequence if self._witness else 0
        # The metadata was put back from an earlier copy, or a device lost synced bytes.
        if last.sequence < witnessed:
            problem = f"commits {last.sequence + 1} to {witnessed} were on disk and are gone"
            raise CorruptMetadata(where=self._path, problem=problem)
        # A catalog with commits beside a database without any: the metadata was deleted.
        if value is None and self._catalog:
            self._catalog.check_new(lambda key: self.is_there and self.database.get(key) is not None)
        return value is not None, last

    def _check_sessions(self, seals: "Seals") -> None:
        count, digest = seals.read_count, seals.read_digest
        if not self._is_counted:
            # The database is new, or of a version that did not count.
            self._last = self._written = Commit(self._last.sequence, count, digest)
        elif self._last[1:] != (count, digest):
            problem = f"{count} sessions are there, {self._last.session_count} were recorded"
            if count == self._last.session_count:
                problem = "sessions are not as they were recorded last"
            raise CorruptMetadata(where=self._path, problem=problem)
        self._seals = seals

    def _recorded_slots(self) -> set[Slot]:
        return {slot for record in self.segments() for slot in record.places} | set(self.quarantined())

    def _scan(self, prefix: bytes, decode: Callable[[bytes, bytes], Record]) -> Iterator[Record]:
        for keys, values in self._batches(prefix):
            yield from map(decode, keys, values)

    def _batches(self, prefix: bytes) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys with a prefix, and their values, ascending, ENTRIES_PER_BATCH at a time."""
        cursor = self.database.iter()
        cursor.seek(prefix)
        is_there, key_of, value_of, go_on = cursor.valid, cursor.key, cursor.value, cursor.next
        keys: list[bytes] = []
        values: list[bytes] = []
        while is_there() and (key := key_of()).startswith(prefix):
            keys.append(key)
            values.append(value_of())
            go_on()
            if len(keys) == ENTRIES_PER_BATCH:
                yield keys, values
                keys, values = [], []
        if keys:
            yield keys, values
        self._check_cursor(cursor)

    def _check_cursor(self, cursor: RdictIter) -> None:
        # The check is needed: a damaged table ends the iteration early, and only the status tells.
        try:
            cursor.status()
        except Exception as error:  # rocksdict raises nothing narrower
            raise CorruptMetadata(where=self._path, problem=str(error)) from error

    def _let_go(self) -> None:
        """Close what is open for reading."""
        if self._untouched:
            self._untouched.close()
            self._untouched = None


class ReadOnlyMetadata(RocksDbRecords):
    """See MetadataStore. For whoever only looks: what is committed is forgotten, and nothing is written."""

    def __init__(
        self, path: str | Path, *, witness: Witness | None = None, catalog: Catalog | None = None
    ) -> None:
        """See RocksDbRecords. Raises DataDirectoryUnusable also where there is no database yet."""
        super().__init__(path, witness=witness, catalog=catalog)
        if not self.is_there:
            raise DataDirectoryUnusable(path=self._path, problem="nothing was kept in it yet")

    def check(self, *, is_growing: bool = True) -> None:
        """See MetadataStore. A commit meets nothing here."""

    def begin(self) -> None:
        """See MetadataStore. Nothing is written."""

    async def commit(self, changes: Changes, *, is_durable: bool) -> None:
        """See MetadataStore. Nothing is written."""

    async def reopen(self) -> bool:
        """See MetadataStore. Nothing is ever refused."""
        return False

    async def recorded_slots(self) -> set[Slot]:
        """See MetadataStore."""
        return self._recorded_slots()
