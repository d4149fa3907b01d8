"""The catalog: a second copy of every record, in plain files that no database is needed to read.

Written behind each commit and synced within a second, by a thread of its own: after the death of the
process it has every commit, after a power cut it may lack those of the last second or so. It is
read when the metadata is gone or cannot be trusted, and then only. Worst case: its device refuses a
write, which is logged; commits go on without it until the next start.

    NNNNNNNN.base   every record when log N was begun, then an end mark
    NNNNNNNN.log    the changes since, in the order of the commits, with marks where a run began and ended
                    and where a commit is whole

`catalog_contents.py` reads it and has the format of what is in these files.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.metadata.catalog_contents import (
    BEGIN,
    COMMIT,
    END,
    MARK_BYTES,
    Entry,
    numbers,
    pack,
    pack_mark,
    read_catalog,
)
from ctxcache.pools import started_pool
from ctxcache.privacy import claim_directory, open_private

SYNC_INTERVAL_S = 1.0
LOG_LIMIT_BYTES = 64 << 20
"""A log may grow to this, or to its base's size; then the next base is written."""
_ENTRIES_PER_WRITE = 1024
_PAUSE_SHARE = 3
"""Pauses in proportion to the work: a million records take about twenty seconds, and delay nobody much."""
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
        self._is_marked = False
        """Whether this run, or the log that it has begun, said where it begins."""
        self._is_cut_off = False
        """Whether the newest log is that of a run that did not end in order: nothing may follow on it."""
        self._is_sync_due = False
        """Whether a sync is waited for that will begin after this."""
        self._closing = threading.Event()
        self._snapshot: Callable[[], Iterator[tuple[bytes, bytes]]] = lambda: iter(())
        self._worker = started_pool(1, "catalog")
        self._syncer = started_pool(1, "catalog-sync")
        try:
            claim_directory(self._directory)
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
            self._number = max(numbers(self._directory, "log"), default=0)
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
        # Without changes is the first commit only: the next one says what it follows.
        if not entries or (self._fd < 0 and not self._is_cut_off):
            return
        with self._noticed():
            if self._is_cut_off:
                self._is_cut_off = False
                self._rotate(sequence)
            begin = b"" if self._is_marked else pack_mark(self._seed, sequence - 1, BEGIN)
            changes = b"".join(pack(self._seed, sequence, key, value) for key, value in entries)
            packed = begin + changes + pack_mark(self._seed, sequence, COMMIT)
            _write_all(self._fd, packed)
            self._is_marked = True
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
                _write_all(self._fd, pack_mark(self._seed, sequence, END))
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
        end = pack_mark(self._seed, sequence, END)
        path = self._path("log")
        if not self._path("base").exists() or path.stat().st_size < MARK_BYTES:
            return False
        with path.open("rb") as file:
            file.seek(-MARK_BYTES, os.SEEK_END)
            return file.read() == end

    def _rotate(self, sequence: int) -> None:
        """Begin the next log; its base is written in the thread, and only then the old files go."""
        self._number += 1
        fd = open_private(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if self._fd >= 0:
            self._worker.submit(_sync, self._fd)
        self._fd, self._log_bytes, self._is_sync_due, self._is_marked = fd, 0, False, False
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
            with os.fdopen(open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                for batch in _unhurried(records, self._closing):
                    file.write(b"".join(pack(self._seed, sequence, key, value) for key, value in batch))
                file.write(pack_mark(self._seed, sequence, END))
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


def _is_begun(directory: Path) -> bool:
    """Whether anything was ever written."""
    return any(path.stat().st_size for kind in ("base", "log") for path in directory.glob(f"*.{kind}"))


def _sync(fd: int) -> None:
    """Make a file durable, as far as its device does, and give it up."""
    with contextlib.suppress(OSError):
        os.fdatasync(fd)
    os.close(fd)
