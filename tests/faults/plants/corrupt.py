"""Bugs that the corruption harness must find. It runs in one process, so each is planted for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from rocksdict import DBRecoveryMode, Options, Rdict

from ctxcache.cache import segments
from ctxcache.errors import CorruptSegment
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import decode_header
from ctxcache.server import lifecycle
from ctxcache.storage import rebuild
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.metadata import reading, rocksdb
from ctxcache.storage.metadata.reading import RocksDbRecords, Untouched
from ctxcache.storage.opening import open_storage
from ctxcache.storage.ssd_directories import forget_unreadable

PATCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def planted(*replacements: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes, and put them back."""
    kept = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


def _register(patch: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    PATCHES[patch.__name__] = contextmanager(patch)
    return patch


@_register
def verification_off() -> Iterator[None]:
    """Checksums are made and not compared."""
    yield from planted((segments._Arrival, "verified", lambda arrival: tuple(arrival._values)))


@_register
def header_believed() -> Iterator[None]:
    """A segment is verified against what its own header says it is."""

    def verified(arrival: Any) -> tuple[int, ...]:
        try:
            header = decode_header(arrival.view)
        except CorruptSegment as error:
            raise CorruptSegment(segment_id=arrival._segment.segment_id, problem="planted") from error
        seed, layout = header.identity.seed(), header.layout
        for spec, offset, wanted in zip(layout.specs, layout.offsets, header.checksums, strict=True):
            rows = arrival.view[offset : offset + spec.row_bytes * header.identity.token_count]
            if chunk_checksum(seed, spec.stream, rows) != wanted:
                raise CorruptSegment(segment_id=arrival._segment.segment_id, problem="planted")
        return tuple(arrival._values)

    yield from planted((segments._Arrival, "verified", verified))


@_register
def first_chunk_only() -> Iterator[None]:
    """Only the token ids are verified."""

    def verified(arrival: Any) -> tuple[int, ...]:
        header = segments._checked_header(
            arrival._segment, arrival.view[: arrival._segment.layout.header_bytes]
        )
        values = tuple(arrival._values)
        if header.checksums[0] != segments._bound(arrival._segment, arrival._row_count, values)[0]:
            raise CorruptSegment(segment_id=header.segment_id, problem="planted")
        return values

    yield from planted((segments._Arrival, "verified", verified))


@_register
def witness_ignored() -> Iterator[None]:
    """The log is replayed as far as it goes, as RocksDB does by default, and nobody asks the witness."""
    options = reading.options

    def lenient(**named: Any) -> Options:
        found = options(**named)
        found.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
        return found

    def read_last(store: Any) -> Any:
        store._witness = None
        return original(store)

    original = RocksDbRecords._read_last
    uncounted = (RocksDbRecords, "_check_sessions", lambda store, seals: setattr(store, "_seals", seals))
    lenient_ones = [(module, "options", lenient) for module in (reading, rocksdb)]
    yield from planted(*lenient_ones, (RocksDbRecords, "_read_last", read_last), uncounted)


@_register
def sessions_uncounted() -> Iterator[None]:
    """The sessions found are not compared with those recorded."""
    yield from planted(
        (RocksDbRecords, "_check_sessions", lambda store, seals: setattr(store, "_seals", seals))
    )


@_register
def tidied_first() -> Iterator[None]:
    """The database is opened for writing, and compared afterwards; where there is none one is made."""
    original = Untouched.__init__

    def tidied(store: Any, path: str) -> None:
        with suppress(Exception):  # rocksdict raises nothing narrower
            Rdict(path, reading.options(is_new=True)).close()
        original(store, path)

    yield from planted((Untouched, "__init__", tidied))


@_register
def verify_begins() -> Iterator[None]:
    """A verify opens all as a start does, and has sessions end before what is bad for good."""
    yield from planted((lifecycle, "open_untouched", open_storage))


@_register
def rebuild_mends_first() -> Iterator[None]:
    """A rebuild writes the directory's facts anew before it knows what it will make."""
    original = rebuild._read

    def mended(directories: Any, instance_id: str) -> Any:
        data = directories[0].parent / "data"
        DataDirectory.mend(data, instance_id=instance_id, crash_count=9, created_by="planted")
        forget_unreadable(data, directories)
        return original(directories, instance_id)

    yield from planted((rebuild, "_read", mended))
