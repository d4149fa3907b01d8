"""Bugs that the corruption harness must find. It runs in one process, so each is planted for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rocksdict import DBRecoveryMode, Options

from ctxcache.cache import segments
from ctxcache.errors import CorruptSegment
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import decode_header
from ctxcache.storage.metadata import rocksdb
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata

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
    options = rocksdb._options

    def lenient() -> Options:
        found = options()
        found.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
        return found

    def read_last(store: Any) -> Any:
        store._witness = None
        return original(store)

    original = RocksDbMetadata._read_last
    uncounted = (RocksDbMetadata, "_check_sessions", lambda store, seals: setattr(store, "_seals", seals))
    yield from planted((rocksdb, "_options", lenient), (RocksDbMetadata, "_read_last", read_last), uncounted)


@_register
def sessions_uncounted() -> Iterator[None]:
    """The sessions found are not compared with those recorded."""
    yield from planted(
        (RocksDbMetadata, "_check_sessions", lambda store, seals: setattr(store, "_seals", seals))
    )
