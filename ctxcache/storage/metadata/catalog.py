"""The catalog: a second copy of every record, in plain files that no database is needed to read.

The catalog is written behind each commit, in the order of the commits. The thread that writes the store's log
does so where both lie on one device, else a thread of its own. Another thread syncs it within a second. A
commit returns when the catalog has it: after the death of the process the catalog has every commit, after a
power cut it may lack those of the last second or so. The catalog is read only when the metadata is gone or
cannot be trusted. Worst case: its device refuses a write, which is logged; commits go on without the catalog
until the next start. A write that does not come back is waited for no longer than a bound. Commits then go on
too, until the device has returned what it owes, and the next commit begins the catalog anew. On the store's
own device such a write is one of the store's log, and the store rests until it has come back.

    NNNNNNNN.base   every record when log N was begun, then an end mark
    NNNNNNNN.log    the changes since, in the order of the commits, with marks where a run began and ended
                    and where a commit is whole

Both hold:

    entry        key bytes u32 | value bytes u32, 2^32-1 for a deletion | sequence u64 | key | value
                 | XXH3-64 of all before it, seeded with XXH3-64 of the store's id, u64
    begin mark   an entry without a key, its value one zero byte: what follows comes after that commit
    commit mark  the deletion of an entry without a key: all of that commit is before it
    end mark     an entry without key and value: the base is whole, or the run ended in order

Keys and values are those of `records.py`. The newest whole base counts, and the logs from its number on, each
up to where the next one begins. A commit counts with its mark or not at all. Damage and missing commits are
told, and all readable commits count.
"""

import asyncio
import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, TierFailure
from ctxcache.runtime.clock import SystemClock
from ctxcache.runtime.files import claim_directory, open_private
from ctxcache.storage.device_threads import Threads

# A directory with two logs, and how it is read:
#
#     00000007.base   records as of commit 100, END
#     00000007.log    BEGIN 100, changes of 101 .. 180, a torn end
#     00000008.log    BEGIN 178, changes of 179 ..
#
# The base counts first, then log 7 up to commit 178, where log 8 goes on: commits 179 and 180 of log 7 were
# taken back by a power cut, which log 8 knows. Base 8 is not whole yet; when it is, the files of 7 go.
_HEAD = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
_DELETED = (1 << 32) - 1
Entry = tuple[bytes, bytes | None]
"""A record's key, and its value; None for a deletion."""
BEGIN, COMMIT, END = b"\0", None, b""
MARK_BYTES = _HEAD.size + _CHECKSUM.size
"""Size of a commit or end mark, and the least one of an entry."""


@dataclass(slots=True)
class CatalogContents:
    """The contents of a catalog.

    It has the records by key, as of commit `sequence`, and the problems of reading them.
    """

    records: dict[bytes, bytes] = field(default_factory=dict)
    sequence: int = 0
    problems: list[str] = field(default_factory=list)

    def apply(self, entries: Iterable[Entry], sequence: int) -> None:
        """Take the entries of a commit over."""
        for key, value in entries:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        self.sequence = sequence

    def go_on(self, path: Path, sequence: int) -> None:
        """Note that later entries come after that commit. Unless commits are missing, it is the last one."""
        if sequence > self.sequence:
            self.problems.append(f"{path}: commits {self.sequence + 1} to {sequence} are missing before it")
            self.sequence = sequence


def read_catalog(directory: str | Path, instance_id: str) -> CatalogContents:
    """Read a catalog that nobody writes. Raises OSError when a file cannot be read."""
    directory, seed = Path(directory), xxh3_64_intdigest(instance_id.encode())
    contents = CatalogContents()
    first = _newest_base(directory, seed, contents) if directory.is_dir() else None
    if first is None:
        contents.problems.append(f"{directory} has no base that is whole")
    # Logs before the newest whole base have no commit that it lacks.
    logs = {n: directory / f"{n:08d}.log" for n in sorted(numbers(directory, "log")) if n >= (first or 0)}
    begins = {number: _begin(path, seed) for number, path in logs.items()}
    if first is not None:
        _join(directory, contents, first, begins)
    for number, path in logs.items():
        # The earliest later log says up to where this one counts.
        later = [begin for n, begin in begins.items() if n > number and begin is not None]
        _replay(path, seed, contents, until=min(later, default=None))
    return contents


# Every entry has its own checksum: before a torn end all entries can be read.
def pack(seed: int, sequence: int, key: bytes, value: bytes | None) -> bytes:
    """An entry as it is written."""
    value_bytes = _DELETED if value is None else len(value)
    body = _HEAD.pack(len(key), value_bytes, sequence) + key + (value or b"")
    # The store's id is the seed: another store's catalog has no right entry.
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body, seed=seed))


def pack_mark(seed: int, sequence: int, kind: bytes | None) -> bytes:
    """A mark as it is written: BEGIN, COMMIT or END."""
    return pack(seed, sequence, b"", kind)


def numbers(directory: Path, kind: str) -> Iterable[int]:
    """Numbers of the present bases or logs. Empty where there is no directory."""
    return [int(path.stem) for path in directory.glob(f"*.{kind}") if path.stem.isdigit()]


def _newest_base(directory: Path, seed: int, contents: CatalogContents) -> int | None:
    # The search begins at the newest base. A base that is not whole is told, and the one before it counts.
    for number in sorted(numbers(directory, "base"), reverse=True):
        base = CatalogContents()
        if _replay(directory / f"{number:08d}.base", seed, base):
            contents.records, contents.sequence = base.records, base.sequence
            return number
        contents.problems += base.problems
    return None


def _join(directory: Path, contents: CatalogContents, first: int, begins: Mapping[int, int | None]) -> None:
    """See whether the logs follow on the base. Its own was begun with it, so nothing is between them."""
    if first not in begins:
        contents.problems.append(f"{directory / f'{first:08d}.log'} is gone")
    for number, begin in begins.items():
        if begin is not None and number == first:
            contents.sequence = max(contents.sequence, begin)
        elif begin is not None and begin < contents.sequence:
            # A power cut took back commits that the base already had.
            contents.problems.append(
                f"{directory / f'{number:08d}.log'} follows commit {begin}, and its base has commits"
                f" {begin + 1} to {contents.sequence} of before a power cut"
            )


def _begin(path: Path, seed: int) -> int | None:
    """The commit that a log follows; None where the log says none."""
    with path.open("rb") as file:
        found = _unpack(seed, memoryview(file.read(MARK_BYTES + len(BEGIN))), 0)
    return found[1] if found and found[0] == (b"", BEGIN) else None


def _replay(path: Path, seed: int, contents: CatalogContents, *, until: int | None = None) -> bool:
    """Apply a file's commits, none after `until`; False unless an end mark is the last of its entries."""
    data = memoryview(path.read_bytes())
    offset, is_ended = 0, False
    pending: list[Entry] | None = None
    while offset < len(data):
        entry = _unpack(seed, data, offset)
        if entry is None:
            contents.problems.append(
                f"{path}: {len(data) - offset} bytes from byte {offset} on are damaged or torn"
            )
            return False
        (key, value), sequence, offset = entry
        # A crash took these commits back: the next log follows an earlier one.
        if until is not None and sequence > until:
            return False
        is_ended = not key and value == END
        # An entry within a commit counts when the commit's mark comes.
        if key and pending is not None:
            pending.append((key, value))
        # A base has no commits: each entry is a record.
        elif key:
            contents.apply([(key, value)], sequence)
        elif value == BEGIN:
            contents.go_on(path, sequence)
            pending = []
        elif value is COMMIT:
            contents.go_on(path, sequence - 1)
            contents.apply(pending or (), sequence)
            pending = []
        else:
            contents.sequence = sequence
    if pending:
        contents.problems.append(f"{path}: its last commit is not whole")
    return is_ended


def _unpack(seed: int, data: memoryview, offset: int) -> tuple[Entry, int, int] | None:
    """An entry, its sequence, and where the next one begins; None when it is not whole."""
    # Sizes are checked before they are used: damaged ones point anywhere.
    if offset + MARK_BYTES > len(data):
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


CATALOG = "catalog"
"""The name of its directory, in the first SSD directory."""
SYNC_INTERVAL_S = 1.0
LOG_LIMIT_BYTES = 64 << 20
"""A log that has grown to this, or to its base's size, makes the next base due."""
BACKLOG_LIMIT_BYTES = 64 << 20
"""Bytes of commits without callers that may wait for the device. With more it counts as hanging."""
HANG_AFTER_S = 30.0
END_PATIENCE_S = 5.0
"""How long the end waits for a device that does not answer, at most as long as a commit does."""
_ENTRIES_PER_WRITE = 1024
_PAUSE_SHARE = 3
"""Pauses in proportion to the work: a million records take about twenty seconds, and delay nobody much."""
log = logging.getLogger(__name__)


class Beside(NamedTuple):
    """Commits that the thread of the store's log writes down: their bytes, and the call that does it."""

    packed: bytes
    write: Callable[[], None]


class Catalog:
    """A store's catalog, being written. Owned by the event loop; its files by the threads that write them."""

    def __init__(
        self,
        directory: str | Path,
        instance_id: str,
        *,
        hang_after_s: float = HANG_AFTER_S,
        beside: str | Path | None = None,
    ) -> None:
        """No file is written until `claim` and `begin`. `hang_after_s` is how long a commit waits.

        `beside`: the store, or None where the catalog counts as on another device.
        """
        self._directory = Path(directory)
        self._instance_id = instance_id
        self.hang_after_s = hang_after_s
        self._seed = xxh3_64_intdigest(instance_id.encode())
        self._store, self.is_beside = beside, False
        """Whether the thread of the store's log may write here: a device that hangs has hung it already."""
        # Three threads, so that a base that takes a minute delays neither a commit's write nor a sync:
        #
        #     catalog        the log, in the order of the commits
        #     catalog-base   all records, unhurried, while commits go on
        #     catalog-sync   one fdatasync a second at most
        self._fd = -1
        """The newest log. From `begin` on it belongs to the thread that has `_writing`."""
        self._writing = threading.Lock()
        """Held while the log is written, ended or followed by the next."""
        self._number = 0
        self._log_bytes = self._base_bytes = 0
        self._is_begun = False
        self._is_marked = False
        """Whether this run, or the log that it has begun, said where it begins."""
        self._is_cut_off = False
        """Whether the newest log is one that was not ended in order: nothing may follow on it."""
        self._is_failed = False
        """Whether the device refused something. Set by the threads, and never taken back."""
        self._is_hung = False
        """Whether a write was given up that did not come back."""
        self._hang_count = 0
        """Hangs so far: what was asked for before the last one is not begun any more."""
        self._is_sync_due = False
        """Whether a sync is waited for that will begin after this."""
        self.is_base_due = False
        """Whether a base is being written. To be looked at, not changed."""
        self._piece_count = 0
        """Pieces of bases that were written: by these the end sees that the device gets on."""
        self._put_bytes = self._written_bytes = 0
        """Bytes given to the writing thread since the start, and bytes that it has written or failed."""
        self.last_write: Future[None] | None = None
        """The last work of the writing thread, for `wait`. To be looked at, not changed."""
        self._waited: tuple[Future[None], asyncio.Future[None]] | None = None
        """The write that commits wait for, and the same for the loop."""
        self._closing = threading.Event()
        self._snapshot: Callable[[], Iterator[tuple[bytes, bytes]]] = lambda: iter(())
        self.writer, self._base_writer, self._syncer = (
            Threads(1, name, SystemClock()) for name in ("catalog", "catalog-base", "catalog-sync")
        )

    def check_new(self, has: Callable[[bytes], bool]) -> None:
        """Raise CorruptMetadata where this catalog is not that of a store without any commit.

        `has` says whether the store has a record. A first start that was cut off may have left a catalog of
        its first commit; the second commit comes after the first one was synced.
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

    def claim(self) -> None:
        """Make the directory, or take an existing one. Raises DataDirectoryUnusable."""
        try:
            claim_directory(self._directory)
        except OSError as error:
            problem = error.strerror or str(error)
            raise DataDirectoryUnusable(path=str(self._directory), problem=problem) from error

    def begin(self, sequence: int, snapshot: Callable[[], Iterator[tuple[bytes, bytes]]]) -> None:
        """Go on behind the last run if it ended at `sequence`. Else begin anew with the first commit.

        `snapshot` begins to iterate over the records as they are when it is called; a thread reads it.
        Until the first commit the catalog of a run that was cut off is complete. The directory is claimed.
        """
        self._snapshot = snapshot
        with self._noticed():
            self.is_beside = self._store is not None and _device(self._store) == _device(self._directory)
            # The newest log decides: it ends where the metadata ends, or the catalog begins anew.
            self._number = max(numbers(self._directory, "log"), default=0)
            if self._number and self._ends_at(sequence):
                self._fd = os.open(self._path("log", self._number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                self._log_bytes = os.fstat(self._fd).st_size
                self._base_bytes = self._path("base", self._number).stat().st_size
                self._is_begun = True
            elif self._number:
                # The run was cut off. No entry may follow on its log, whose end behind the last synced commit
                # is not known.
                self._is_cut_off = True
            else:
                self._rotate(sequence)

    def append(self, commits: Sequence[tuple[Sequence[Entry], int]]) -> None:
        """Note the changes of commits, each with its sequence, in the order of the calls.

        Costs one write to the page cache, in the thread.
        """
        self._end_hang()
        # Only the first commit has no changes: the next one says what it follows.
        commits = [(entries, sequence) for entries, sequence in commits if entries]
        # Without a begun log the first commit begins one. After a failure nothing is written until the next
        # start.
        if not commits or self._is_failed or self._is_hung or not (self._is_begun or self._is_cut_off):
            return
        # Commits whose callers have gone count as well, so that their bytes are bounded.
        if self._put_bytes - self._written_bytes > BACKLOG_LIMIT_BYTES:
            self._give_up_hung(f"{BACKLOG_LIMIT_BYTES} bytes of commits wait for it")
            return
        first, last = commits[0][1], commits[-1][1]
        # The new base's snapshot has these commits already. The log repeats them, which does no harm.
        if self._is_cut_off:
            self._rotate(first)
        # Each log says which commit it follows: a hole between two logs is found.
        begin = b"" if self._is_marked else pack_mark(self._seed, first - 1, BEGIN)
        # One write has all commits, each with its mark behind its changes.
        packed = begin + b"".join(self._packed(entries, sequence) for entries, sequence in commits)
        self._put_bytes += len(packed)
        self.last_write = self.writer.submit(partial(self._write, packed, self._hang_count))
        self._is_marked = True
        self._grow(packed, last)

    def beside(self, commits: Sequence[tuple[Sequence[Entry], int]]) -> "Beside | None":
        """As `append`, for the thread that writes the store's log. `noted` follows when that is done.

        None, and nothing is done, where the catalog is on another device, or an earlier write is due.
        """
        is_usual = self._is_marked and not (self._is_cut_off or self._is_failed or self._is_hung)
        if not (self.is_beside and is_usual):
            return None
        packed = b"".join(self._packed(entries, sequence) for entries, sequence in commits if entries)
        write = partial(self._put_down, packed, self._hang_count)
        before = self.last_write
        # The order holds: the first commits of a run, and of a log, are the writing thread's.
        is_next = before is None or before.done()
        return Beside(packed, write if is_next else partial(_write_behind, before, write))

    def noted(self, written: "Beside", last: int) -> None:
        """Note that the store's thread has written these commits, up to `last`."""
        self._grow(written.packed, last)

    def _grow(self, packed: bytes, last: int) -> None:
        self._log_bytes += len(packed)
        # A log as long as its base costs a start as much as the base.
        if self._log_bytes > max(LOG_LIMIT_BYTES, self._base_bytes) and not self.is_base_due:
            self._rotate(last)

    def _packed(self, entries: Sequence[Entry], sequence: int) -> bytes:
        changes = b"".join(pack(self._seed, sequence, key, value) for key, value in entries)
        return changes + pack_mark(self._seed, sequence, COMMIT)

    async def wait(self, write: "Future[None] | None") -> None:
        """Return when this write, and all before it, have come back.

        A hanging write is given up, with all behind it.
        """
        if write is None or write.done():
            return
        if self._waited is None or self._waited[0] is not write:
            # All commits that share the write wait for one future.
            self._waited = write, asyncio.wrap_future(write)
            # A given-up write is no caller's error: it was logged, and commits go on.
            self._waited[1].add_done_callback(lambda done: done.exception())
        await asyncio.wait([self._waited[1]], timeout=self.hang_after_s)
        # Commits must not wait for a second copy. They go on without the catalog, which is made anew when the
        # device is back.
        if not write.done():
            self._give_up_hung(f"a write has not come back for {self.hang_after_s:g} s")

    def close(self, sequence: int) -> None:
        """Have the threads finish without pauses, mark the end, sync.

        A hanging device is not waited for.
        """
        self._closing.set()
        # The order is writer, base, syncer: each may ask the next one for something. The end mark says that
        # the base is there.
        for threads in (self.writer, self._base_writer, self._syncer):
            # A late thread is given up, with the rest of its work.
            self._finish(threads, threads.submit(_nothing))
        if not self._is_hung:
            self._finish(self.writer, self.writer.submit(partial(self._end, sequence)))
        for threads in (self.writer, self._base_writer, self._syncer):
            threads.close()

    def _finish(self, threads: Threads, last: "Future[None]") -> None:
        """Wait for a thread's last work while the device gets on.

        Else leave the thread to the process's end.
        """
        while not self._is_hung and not last.done():
            count, patience_s = self._piece_count, min(END_PATIENCE_S, self.hang_after_s)
            wait([last], patience_s)
            if not last.done() and self._piece_count == count:
                self._give_up_hung(f"the end has waited {patience_s:g} s for it")
        if self._is_hung:
            threads.give_up(self._overdue)

    def _give_up_hung(self, problem: str) -> None:
        """Go on without the catalog, until the device has answered all that it owes."""
        if not self._is_hung:
            self._is_hung = True
            self._hang_count += 1
            log.error("catalog_failed directory=%s error=%s", self._directory, problem)
            self.writer.give_up(self._overdue)

    def _end_hang(self) -> None:
        """Begin anew with the next commit, once the device has answered all that it owes.

        The catalog lacks the commits in between.
        """
        # Every late write is back, so that none can land in the new log.
        if self._is_hung and not self._is_failed and not self.writer.is_owed and not self.is_base_due:
            log.warning("catalog_begun_anew directory=%s", self._directory)
            self._is_hung, self._is_cut_off = False, True
            self._put_bytes = self._written_bytes

    def _overdue(self) -> TierFailure:
        return TierFailure(path=str(self._directory), problem="the catalog's device hangs")

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        try:
            yield
        # The error is logged and not raised: a commit does not fail for its second copy.
        except OSError as error:
            log.error("catalog_failed directory=%s error=%s", self._directory, error.strerror)  # noqa: TRY400
            self._is_failed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f"{number:08d}.{kind}"

    def _ends_at(self, sequence: int) -> bool:
        """Whether the newest log ends with a mark of that commit, and its base is there."""
        end = pack_mark(self._seed, sequence, END)
        path = self._path("log", self._number)
        if not self._path("base", self._number).exists() or path.stat().st_size < MARK_BYTES:
            return False
        with path.open("rb") as file:
            # Only the last bytes are read: a log may have tens of megabytes.
            file.seek(-MARK_BYTES, os.SEEK_END)
            return file.read() == end

    def _rotate(self, sequence: int) -> None:
        """Begin the next log; its base is written in a thread, and only then the old files go."""
        self._number += 1
        self._is_begun, self._is_marked, self._is_cut_off = True, False, False
        self._log_bytes = 0
        # The snapshot is taken here: the threads would find later records.
        records = self._snapshot()
        begin = partial(self._begin_log, self._number, sequence, records, self._hang_count)
        self.last_write = self.writer.submit(begin)

    # -- in the writing thread ---------------------------------------------------------------------

    def _begin_log(
        self, number: int, sequence: int, records: Iterator[tuple[bytes, bytes]], hang_count: int
    ) -> None:
        if self._is_failed or hang_count != self._hang_count:
            return
        with self._writing, self._noticed():
            fd = open_private(self._path("log", number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            # The old log is synced once more: it counts until the new base is whole.
            if self._fd >= 0:
                self._syncer.submit(partial(_sync, self._fd))
            self._fd, self._is_sync_due = fd, False
            # The base comes after its log: a base without its log has lost it.
            self.is_base_due = True
            self._base_writer.submit(partial(self._write_base, number, sequence, records))

    def _write(self, packed: bytes, hang_count: int) -> None:
        self._put_down(packed, hang_count)
        self._written_bytes += len(packed)

    def _put_down(self, packed: bytes, hang_count: int) -> None:
        # A commit behind one that was left out would make a hole in the log.
        with self._writing:
            if self._fd >= 0 and hang_count == self._hang_count:
                with self._noticed():
                    _write_all(self._fd, packed)
                    self._ask_for_sync()

    def _ask_for_sync(self) -> None:
        # Without free descriptors the next commit asks again.
        with contextlib.suppress(OSError):
            if not self._is_sync_due:
                # The sync gets a duplicate, since the log may be closed before it is due.
                fd = os.dup(self._fd)
                self._is_sync_due = True
                self._syncer.submit(partial(self._sync_soon, fd))

    def _end(self, sequence: int) -> None:
        with self._writing:
            if self._fd >= 0:
                with self._noticed():
                    _write_all(self._fd, pack_mark(self._seed, sequence, END))
                    os.fdatasync(self._fd)
                    self._let_go()

    # -- in the threads beside it ------------------------------------------------------------------

    def _sync_soon(self, fd: int) -> None:
        # At the end no commit follows that could ask for a sync. Commits within this second share the sync.
        self._closing.wait(SYNC_INTERVAL_S)
        # The flag falls before the sync: a write during the sync asks for the next one.
        self._is_sync_due = False
        _sync(fd)

    def _write_base(self, number: int, sequence: int, records: Iterator[tuple[bytes, bytes]]) -> None:
        path = self._path("base", number)
        partial_path = path.with_suffix(".partial")
        try:
            with os.fdopen(open_private(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                # A pause follows each batch: the thread holds Python's lock while it packs.
                for batch in _unhurried(records, self._closing):
                    file.write(b"".join(pack(self._seed, sequence, key, value) for key, value in batch))
                    self._piece_count += 1
                file.write(pack_mark(self._seed, sequence, END))
                file.flush()
                os.fsync(file.fileno())
            # The file gets its name whole and synced: the newest base can be trusted.
            partial_path.rename(path)
            _sync(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._base_bytes = path.stat().st_size
            # Only now the old files go: until here the old base and its logs were the only whole copy.
            for old in self._directory.iterdir():
                # Files with a lower number are older than the new base.
                if old.stem.isdigit() and int(old.stem) < number:
                    old.unlink()
        except (OSError, CorruptMetadata) as error:
            # The earlier base and its logs are still there.
            log.error("catalog_failed directory=%s error=%s", self._directory, error)  # noqa: TRY400
        finally:
            self.is_base_due = False


def _unhurried(
    records: Iterator[tuple[bytes, bytes]], hurry: threading.Event
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Batches of records, in a quarter of the time: packing holds Python's lock."""
    began_s = time.monotonic()
    while batch := list(islice(records, _ENTRIES_PER_WRITE)):
        yield batch
        hurry.wait(_PAUSE_SHARE * (time.monotonic() - began_s))
        began_s = time.monotonic()


def _write_all(fd: int, data: bytes) -> None:
    """Write all of it, or raise.

    The kernel may take fewer bytes than it is given, and later entries would be torn.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_behind(before: "Future[None] | None", write: Callable[[], None]) -> None:
    """Write in the thread of the store's log, after the writing thread's pending work."""
    if before is not None:
        wait([before])
    write()


def _device(path: str | Path) -> int:
    return Path(path).stat().st_dev


def _nothing() -> None:
    """The last work of a thread: earlier work is done before it."""


def _is_begun(directory: Path) -> bool:
    """Whether the catalog was ever written."""
    return any(path.stat().st_size for kind in ("base", "log") for path in directory.glob(f"*.{kind}"))


def _sync(fd: int) -> None:
    """Make a file durable, as far as its device does, and close it."""
    with contextlib.suppress(OSError):
        os.fdatasync(fd)
    os.close(fd)
