"""The catalog: a second copy of every record, in plain files that no database is needed to read.

Written behind each commit and synced within a second, by a thread of its own: after the death of the
process it has every commit, after a power cut it may lack those of the last second or so. It is
read when the metadata is gone or cannot be trusted, and then only. Worst case: its device refuses a
write, which is logged; commits go on without it until the next start.

    NNNNNNNN.base   every record when log N was begun, then an end mark
    NNNNNNNN.log    the changes since, in the order of the commits; an end mark where a run ended

    entry     key bytes u32 | value bytes u32, 2^32-1 for a deletion | sequence u64 | key | value
              | XXH3-64 of all before it, seeded with XXH3-64 of the store's id, u64
    end mark  an entry without key and value

Keys and values are those of `records.py`. The newest base that is whole counts, and the logs from its
number on.
"""

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable

SYNC_INTERVAL_S = 1.0
LOG_LIMIT_BYTES = 64 << 20
"""A log may grow to this, or to its base's size; then the next base is written."""
_HEAD = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
_DELETED = (1 << 32) - 1
_END_BYTES = _HEAD.size + _CHECKSUM.size
_ENTRIES_PER_WRITE = 1024
_PAUSE_SHARE = 3
"""Pauses in proportion to the work: a million records take about twenty seconds, and delay nobody much."""
Entry = tuple[bytes, bytes | None]
"""A record's key, and its value or None: it is deleted."""
log = logging.getLogger(__name__)


class Catalog:
    """A store's catalog, being written. Owned by the event loop, but for its threads."""

    def __init__(self, directory: str | Path, instance_id: str) -> None:
        """Open or create `directory`. Raises DataDirectoryUnusable."""
        self._directory = Path(directory)
        self._instance_id = instance_id
        self._seed = xxh3_64_intdigest(instance_id.encode())
        self._fd = -1
        self._log_bytes = self._base_bytes = 0
        self._number = 0
        self._is_cut_off = False
        """Whether the newest log is that of a run that did not end in order: nothing may follow on it."""
        self._is_sync_due = False
        """Whether a sync is waited for that will begin after this."""
        self._closing = threading.Event()
        self._snapshot: Callable[[], Iterator[tuple[bytes, bytes]]] = lambda: iter(())
        self._worker = ThreadPoolExecutor(1, "catalog")
        self._syncer = ThreadPoolExecutor(1, "catalog-sync")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirectoryUnusable(path=str(directory), problem=error.strerror or str(error)) from error

    def check_new(self, has: Callable[[bytes], bool]) -> None:
        """Raise CorruptMetadata where this catalog is not that of a store without any commit.

        `has` says whether the store has a record. A first start that was cut off may have left a catalog, of
        the records of format 1 if any; the second commit comes after the first one was synced.
        """
        try:
            contents = read_catalog(self._directory, self._instance_id)
            damage = "; ".join(contents.problems) if _is_begun(self._directory) else ""
        except OSError as error:
            problem = error.strerror or str(error)
            raise DataDirectoryUnusable(path=str(self._directory), problem=problem) from error
        if contents.sequence > 1 or damage or not all(map(has, contents.records)):
            problem = f"it knows of {contents.sequence} commits, and the metadata is gone"
            raise CorruptMetadata(where=str(self._directory), problem=f"{problem}; {damage}".rstrip("; "))

    def begin(self, sequence: int, snapshot: Callable[[], Iterator[tuple[bytes, bytes]]]) -> None:
        """Go on where the last run ended, when it did so at `sequence`; else begin anew with the first commit.

        `snapshot` begins to iterate over the records as they are when it is called; it is read in a thread.
        Until the first commit what a run that was cut off left says all there is to say.
        """
        self._snapshot = snapshot
        with self._noticed():
            self._number = max(_numbers(self._directory, "log"), default=0)
            if self._number and self._ends_at(sequence):
                self._fd = os.open(self._path("log"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                self._log_bytes = os.fstat(self._fd).st_size
                self._base_bytes = self._path("base").stat().st_size
            elif self._number:
                self._is_cut_off = True
            else:
                self._rotate(sequence)

    def append(self, entries: Sequence[Entry], sequence: int) -> None:
        """Note a commit's changes. Costs one write to the page cache."""
        if self._fd < 0 and not self._is_cut_off:
            return
        with self._noticed():
            if self._is_cut_off:
                self._is_cut_off = False
                self._rotate(sequence)
            packed = b"".join(_pack(self._seed, sequence, key, value) for key, value in entries)
            _write_all(self._fd, packed)
            self._log_bytes += len(packed)
            if self._log_bytes > max(LOG_LIMIT_BYTES, self._base_bytes):
                self._rotate(sequence)
            self._ask_for_sync()

    def close(self, sequence: int) -> None:
        """Wait for the threads, which make haste now, mark the end, sync."""
        self._closing.set()
        self._syncer.shutdown()
        self._worker.shutdown()
        if self._fd >= 0:
            with self._noticed():
                _write_all(self._fd, _pack(self._seed, sequence, b"", b""))
                os.fdatasync(self._fd)
        self._give_up()

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.error("catalog_failed directory=%s error=%s", self._directory, error.strerror)  # noqa: TRY400
            self._give_up()

    def _give_up(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self._number:08d}.{kind}"

    def _ends_at(self, sequence: int) -> bool:
        """Whether the newest log ends with a mark of that commit, and its base is there."""
        end = _pack(self._seed, sequence, b"", b"")
        path = self._path("log")
        if not self._path("base").exists() or path.stat().st_size < _END_BYTES:
            return False
        with path.open("rb") as file:
            file.seek(-_END_BYTES, os.SEEK_END)
            return file.read() == end

    def _rotate(self, sequence: int) -> None:
        """Begin the next log; its base is written in the thread, and only then the old files go."""
        self._number += 1
        fd = os.open(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode=0o600)
        if self._fd >= 0:
            self._worker.submit(_sync, self._fd)
        self._fd, self._log_bytes, self._is_sync_due = fd, 0, False
        self._worker.submit(self._write_base, self._number, sequence, self._snapshot())

    def _ask_for_sync(self) -> None:
        # Without descriptors the next commit asks again.
        with contextlib.suppress(OSError):
            if not self._is_sync_due:
                fd = os.dup(self._fd)
                self._is_sync_due = True
                self._syncer.submit(self._sync_soon, fd)

    def _sync_soon(self, fd: int) -> None:
        # The last commit of all is followed by no other that could ask for a sync.
        self._closing.wait(SYNC_INTERVAL_S)
        self._is_sync_due = False
        _sync(fd)

    def _write_base(self, number: int, sequence: int, records: Iterator[tuple[bytes, bytes]]) -> None:
        path = self._directory / f"{number:08d}.base"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                for batch in _unhurried(records, self._closing):
                    file.write(b"".join(_pack(self._seed, sequence, key, value) for key, value in batch))
                file.write(_pack(self._seed, sequence, b"", b""))
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            _sync(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._base_bytes = path.stat().st_size
            for old in self._directory.iterdir():
                if old.stem.isdigit() and int(old.stem) < number:
                    old.unlink()
        except (OSError, CorruptMetadata) as error:
            # The base before it and the logs since are still there.
            log.error("catalog_failed directory=%s error=%s", self._directory, error)  # noqa: TRY400


def _unhurried(
    records: Iterator[tuple[bytes, bytes]], hurry: threading.Event
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Batches of records, taking a quarter of the time: it is Python's lock that the thread would hold."""
    began_s = time.monotonic()
    while batch := list(islice(records, _ENTRIES_PER_WRITE)):
        yield batch
        hurry.wait(_PAUSE_SHARE * (time.monotonic() - began_s))
        began_s = time.monotonic()


def _write_all(fd: int, data: bytes) -> None:
    """Write all of it, or raise: the kernel may take less than it is given, and what follows would be torn."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass(slots=True)
class Contents:
    """What a catalog says: records by key, as of commit `sequence`, and what could not be read of it."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    sequence: int = 0
    problems: list[str] = field(default_factory=list)


def read_catalog(directory: str | Path, instance_id: str) -> Contents:
    """Read a catalog that nobody writes. Raises OSError when a file cannot be read."""
    directory, seed = Path(directory), xxh3_64_intdigest(instance_id.encode())
    contents = Contents()
    first = _newest_base(directory, seed, contents) if directory.is_dir() else None
    if first is None:
        contents.problems.append(f"{directory} has no base that is whole")
    for number in sorted(_numbers(directory, "log")) if directory.is_dir() else ():
        if number >= (first or 0):
            _replay(directory / f"{number:08d}.log", seed, contents)
    return contents


def _newest_base(directory: Path, seed: int, contents: Contents) -> int | None:
    for number in sorted(_numbers(directory, "base"), reverse=True):
        found = Contents()
        if _replay(directory / f"{number:08d}.base", seed, found):
            contents.records, contents.sequence = found.records, found.sequence
            return number
        contents.problems += found.problems
    return None


def _replay(path: Path, seed: int, contents: Contents) -> bool:
    """Apply a file's entries; False unless an end mark is the last of them."""
    data = memoryview(path.read_bytes())
    offset, is_ended = 0, False
    while offset < len(data):
        found = _unpack(seed, data, offset)
        if found is None:
            contents.problems.append(
                f"{path}: {len(data) - offset} bytes from byte {offset} on are damaged or torn"
            )
            return False
        (key, value), contents.sequence, offset = found
        is_ended = not key
        if value is None:
            contents.records.pop(key, None)
        elif key:
            contents.records[key] = value
    return is_ended


def _unpack(seed: int, data: memoryview, offset: int) -> tuple[Entry, int, int] | None:
    """An entry, its sequence, and where the next one begins; None when it is not whole."""
    if offset + _END_BYTES > len(data):
        return None
    key_bytes, value_bytes, sequence = _HEAD.unpack_from(data, offset)
    key_end = offset + _HEAD.size + key_bytes
    value_end = key_end + (0 if value_bytes == _DELETED else value_bytes)
    if value_end + _CHECKSUM.size > len(data):
        return None
    if xxh3_64_intdigest(data[offset:value_end], seed=seed) != _CHECKSUM.unpack_from(data, value_end)[0]:
        return None
    key = bytes(data[offset + _HEAD.size : key_end])
    value = None if value_bytes == _DELETED else bytes(data[key_end:value_end])
    return (key, value), sequence, value_end + _CHECKSUM.size


def _pack(seed: int, sequence: int, key: bytes, value: bytes | None) -> bytes:
    value_bytes = _DELETED if value is None else len(value)
    body = _HEAD.pack(len(key), value_bytes, sequence) + key + (value or b"")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body, seed=seed))


def _numbers(directory: Path, kind: str) -> Iterable[int]:
    return [int(path.stem) for path in directory.glob(f"*.{kind}") if path.stem.isdigit()]


def _is_begun(directory: Path) -> bool:
    """Whether anything was ever written."""
    return any(path.stat().st_size for kind in ("base", "log") for path in directory.glob(f"*.{kind}"))


def _sync(fd: int) -> None:
    """Make a file durable, as far as its device does, and give it up."""
    with contextlib.suppress(OSError):
        os.fdatasync(fd)
    os.close(fd)
