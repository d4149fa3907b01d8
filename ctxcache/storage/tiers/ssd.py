"""The SSD tier: one preallocated file per directory, read and written around the page cache.

Knows slots, not what is in them. Worst case: a device refuses a sync. Its path is then fenced (see
`PathHealth`), every later write and sync on it raises TierFailure while reads go on, and only a restart
lifts that: what a failed sync left behind is unknown, and asking the kernel again would report success.
A device that is gone is found by probes, and taken again when it is back under its path.

A device that does not return an operation within `hang_after_s` is lost as well: callers have their answer,
and the operation keeps its thread and its buffer. Such a device is back only when it has returned every one.

A write that only lacks room or memory makes the path rest, and is tried again. A path of which several reads
fail one after the other is doubted. When probes of the whole device fail too, the path is lost, until a probe
succeeds.

These files are never shortened, unlinked or rewritten elsewhere: freeing a slot costs no I/O. Clients that
may open them read rows by their offset (`client/ssd_files.py`).
"""

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxcache.errors import CapacityExceeded, DataDirectoryUnusable, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE, Slot
from ctxcache.runtime.clock import Clock, SystemClock
from ctxcache.runtime.files import claim_directory, open_private
from ctxcache.storage.device_threads import Threads
from ctxcache.storage.tiers.base import Range, TierRefusal

log = logging.getLogger(__name__)

REST_NS = 2 * 10**9
"""How long a path that lacked room takes no writes."""
HELD = "an operator took it out of use"
READ_FAILURE_LIMIT = 3
"""Reads failing one after the other, none that succeeds between, until the path takes no more writes."""
# A lack of these passes: somebody deletes files, or memory comes back. Any other error is taken for a broken
# device.
_LACKING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN))


# Two scales that move on their own, and what each lets through:
#
#     writes   open ──► rests 2 s ──► open              lacked room or memory
#              open ──► fenced, until a restart         a sync failed, a write was refused, 3 reads in a row
#     reads    there ──► doubted ──► lost ──► there     probes of the whole device decide
#
# A fence is never lifted by a success: after a failed fdatasync the kernel forgets the lost pages, and the
# next one reports that all is well.
class PathHealth:
    """Whether one path works. The threads that do its I/O report to it; the event loop asks it."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._fence = ""
        self._lack = ""
        self._is_held = False
        self._rest_ends_ns = 0
        self._read_failure_count = 0
        self._loss = self._displacement = ""
        self._is_doubted = False

    @property
    def is_lost(self) -> bool:
        """Whether the path's bytes cannot be read."""
        return bool(self._loss)

    @property
    def is_doubted(self) -> bool:
        """Whether only a probe can tell if the path's bytes can be read."""
        return self._is_doubted or self.is_lost

    @property
    def refusal(self) -> TierRefusal | None:
        """Why the path takes no writes now; None while it does."""
        if self._loss:
            # A loss is told first: callers have to know it, whatever else is wrong.
            return TierRefusal(self._loss, is_final=bool(self._fence), is_lost=True)
        if self._fence:
            return TierRefusal(self._fence, is_final=True)
        if self._is_held:
            return TierRefusal(HELD, is_final=False)
        if self._displacement:
            return TierRefusal(self._displacement, is_final=False)
        if self._rest_ends_ns and self._clock.monotonic_ns() < self._rest_ends_ns:
            return TierRefusal(self._lack, is_final=False)
        return None

    def hold(self, *, is_held: bool) -> None:
        """Take no writes, though the path works, until this is taken back."""
        self._is_held = is_held

    def check(self) -> None:
        """Raise TierFailure unless the path takes writes."""
        if refusal := self.refusal:
            raise TierFailure(path=self._path, problem=str(refusal))

    def check_fence(self) -> None:
        """Raise TierFailure once the path is fenced. Writes before a rest may be synced in it."""
        # A rest is no reason to refuse a sync: earlier writes must become durable.
        if self._fence:
            self.check()

    def read_succeeded(self) -> None:
        """Note that a read was answered."""
        self._read_failure_count = 0

    def read_failed(self, problem: str) -> None:
        """Note that a read failed."""
        # Several threads read at a time, and each failure must count once.
        with self._lock:
            self._read_failure_count += 1
            is_last = self._read_failure_count == READ_FAILURE_LIMIT
        if is_last:
            self.fence(f"{READ_FAILURE_LIMIT} reads failed in a row, the last: {problem}")

    def write_failed(self, problem: str, number: int | None) -> None:
        """Note that a write was refused with that error number, if it has one."""
        if number not in _LACKING:
            self.fence(problem)
            return
        # Two threads may be refused at once.
        with self._lock:
            self._lack, self._rest_ends_ns = problem, self._clock.monotonic_ns() + REST_NS
        log.warning("path_rests path=%s problem=%s", self._path, problem)

    def lose(self, problem: str) -> None:
        """Note that the path's bytes cannot be read."""
        is_first, self._loss = not self._loss, problem
        if is_first:
            log.error("path_lost path=%s problem=%s", self._path, problem)

    def found(self) -> None:
        """Note that a probe of the whole device succeeded."""
        self.stands()
        was_lost, self._loss = self._loss, ""
        if was_lost:
            log.warning("path_returned path=%s", self._path)

    def stands(self) -> None:
        """Note that a probe was answered in some places: the path stays as it was."""
        self._is_doubted, self._read_failure_count = False, 0

    def displace(self, problem: str) -> None:
        """Take no writes while the file is not where a restart would look for it.

        An empty problem: the file is there again.
        """
        # The log gets this once, not with each probe.
        was, self._displacement = self._displacement, problem
        if problem and not was:
            log.error("path_displaced path=%s problem=%s", self._path, problem)

    def fence(self, problem: str) -> None:
        """Take no more writes until a restart."""
        with self._lock:
            # The first reason stays: later ones follow from it.
            is_first, self._fence = not self._fence, self._fence or problem
            self._is_doubted = True
        if is_first:
            log.error("path_fenced path=%s problem=%s", self._path, problem)


# One path and its threads. No kind of operation waits in line behind another:
#
#     ssd-read x 4     ssd-write x 4     ssd-sync x 1     ssd-probe x 1
PIECE_BYTES = 1 << 20
SECOND_NS = 10**9
THREADS_PER_PATH = 4
PROBE_INTERVAL_NS = 5 * SECOND_NS
"""How often a path that nobody doubts is looked at."""
PROBE_PATIENCE_S = 0.25
"""How long one look at the devices waits for a probe. A later look takes a slower one's result."""
HANG_AFTER_S = 30.0
PROBE_COUNT = 8
"""Places in which a doubted device is read. When none of them can be read, the device is lost."""


@dataclass(frozen=True, slots=True)
class SsdPath:
    """A directory and the bytes the tier may take there, a multiple of 4 KiB.

    `absence`: why the directory is not opened at the start. `is_ours` says whether the directory is the one
    that records name. `may_be_absent`: a file that cannot be opened is left out without an error.
    """

    directory: str
    size_bytes: int
    absence: str = ""
    is_ours: Callable[[], bool] = lambda: True
    may_be_absent: bool = False


@dataclass(frozen=True, slots=True)
class IoMode:
    """How a path is accessed: around the page cache or through it, and why."""

    path: str
    is_direct: bool
    reason: str

    def __str__(self) -> str:
        return f"{'direct' if self.is_direct else 'buffered'} ({self.reason})"


class SsdFiles:
    """See Tier. Slots lie in `[0, capacities_bytes[path_index])`."""

    first_offset_bytes = 0

    def __init__(
        self,
        directories: Sequence[SsdPath],
        *,
        threads_per_path: int = THREADS_PER_PATH,
        allow_direct: bool = True,
        hang_after_s: float = HANG_AFTER_S,
        clock: Clock | None = None,
    ) -> None:
        """Open or create the files; creation allocates every block.

        `threads_per_path` bounds the reads in flight per path, and the writes: neither waits in line behind
        the other. `hang_after_s` is how old an operation may be. `allow_direct` off reads and writes through
        the page cache even where the filesystem could do without. Raises InvalidConfiguration,
        CapacityExceeded (no room to allocate), DataDirectoryUnusable.
        """
        self.files: list[_File] = []
        """One for each path, in their order. To be looked at, not changed."""
        self._clock = clock or SystemClock()
        self._next_probe_ns = 0
        self._hang_after_s = hang_after_s
        try:
            for directory in directories:
                health = PathHealth(str(Path(directory.directory) / SEGMENTS_FILE), self._clock)
                self.files.append(
                    _File(directory, threads_per_path, health, self._clock, allow_direct=allow_direct)
                )
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return tuple(file.path for file in self.files)

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier."""
        return tuple(file.size_bytes for file in self.files)

    @property
    def io_modes(self) -> tuple[IoMode, ...]:
        """How each path is accessed."""
        return tuple(file.io_mode for file in self.files)

    @property
    def refusals(self) -> dict[int, TierRefusal]:
        """See Tier."""
        by_path: dict[int, TierRefusal] = {}
        for i, file in enumerate(self.files):
            refusal = file.health.refusal
            if refusal is not None:
                by_path[i] = refusal
        return by_path

    @property
    def emptied(self) -> Collection[int]:
        """See DeviceTier."""
        return [i for i, file in enumerate(self.files) if file.is_new]

    async def probe(self) -> None:
        """See DeviceTier.

        Those that are doubted now, all of them every few seconds; each in a thread of its own.
        """
        now_ns = self._clock.monotonic_ns()
        is_due = now_ns >= self._next_probe_ns
        if is_due:
            # The time is set before the probes: one that hangs does not make the next look come early.
            self._next_probe_ns = now_ns + PROBE_INTERVAL_NS
        doubted = [i for i, file in enumerate(self.files) if is_due or file.health.is_doubted]
        await asyncio.gather(*map(self._probe, doubted))

    async def _probe(self, index: int) -> None:
        probe = self.files[index].start_probe()
        # A probe that is late is not waited for. Its thread reports when it is back.
        if probe is not None:
            await asyncio.wait([asyncio.wrap_future(probe)], timeout=PROBE_PATIENCE_S)

    def give_up_overdue(self) -> None:
        """See DeviceTier."""
        for file in self.files:
            file.give_up_overdue(self._hang_after_s)

    def hold(self, index: int, is_held: bool) -> None:  # noqa: FBT001  it is the value itself
        """Keep a path from writes, or let it take writes again. Its bytes are read in any case."""
        self.files[index].health.hold(is_held=is_held)

    async def read(
        self,
        slot: Slot,
        begin: int,
        into: memoryview,
        *,
        pieces: Sequence[Range] | None = None,
        then: Callable[[int, int], None] | None = None,
    ) -> None:
        """See Tier."""
        file = self._file(slot, begin, into.nbytes, pieces)
        await file.read(slot.offset_bytes + begin, into, pieces, then)

    async def write(
        self, slot: Slot, begin: int, data: memoryview, *, pieces: Sequence[Range] | None = None
    ) -> None:
        """See Tier."""
        file = self._file(slot, begin, data.nbytes, pieces)
        # The refusal comes before a thread is taken: a path that is closed while data waits refuses at once.
        file.health.check()
        await file.write(slot.offset_bytes + begin, data, pieces)

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier. Paths sync side by side; callers that wait for the same path share a sync."""
        for index in path_indexes:
            self.files[index].check_returns()
        syncs = [asyncio.wrap_future(self.files[index].join_sync()) for index in path_indexes]
        # The syncs are shielded: one caller's cancellation must not cancel the sync of the others.
        await asyncio.shield(asyncio.gather(*syncs))

    def close(self) -> None:
        """See Tier."""
        for file in self.files:
            file.close(self._hang_after_s)

    def _file(self, slot: Slot, begin: int, size_bytes: int, pieces: Sequence[Range] | None) -> "_File":
        """Find the slot's file. Raises ValueError: an unaligned or stray range is a bug."""
        # A wrong slot would overwrite another session's bytes: the range is checked here, behind all callers.
        file = self.files[slot.path_index]
        is_in_slot = begin >= 0 and begin + size_bytes <= slot.size_bytes
        if not is_in_slot or not 0 <= slot.offset_bytes <= file.size_bytes - slot.size_bytes:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not in {file.path}")
        if (slot.offset_bytes | begin | size_bytes) % ALIGN_BYTES:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not {ALIGN_BYTES} B-aligned")
        # Pieces are checked too: each is one operation, and O_DIRECT takes aligned ones only.
        for first, last in pieces or ():
            if not 0 <= first < last <= size_bytes or (first | last) % ALIGN_BYTES:
                raise ValueError(
                    f"piece [{first}, {last}) is not in {size_bytes} B, or not {ALIGN_BYTES} B-aligned"
                )
        return file


class _File:
    """One path: its descriptor, its bounded threads, and its health. Owned by the event loop."""

    def __init__(
        self, place: SsdPath, thread_count: int, health: PathHealth, clock: Clock, *, allow_direct: bool
    ) -> None:
        self.path = str(Path(place.directory) / SEGMENTS_FILE)
        self.size_bytes = place.size_bytes
        self.health = health
        self.is_new = False
        self._place, self._allow_direct = place, allow_direct
        self.fd, self.io_mode = -1, IoMode(self.path, is_direct=False, reason="it is not there")
        # Old descriptors stay open: a thread may still be in a call on one, whose number another file would
        # get.
        self._old_fds: list[int] = []
        """Descriptors of files that are gone. Reads may still be under way on them."""
        self._open_first()
        # Reads and writes have a bound each: reads would wait behind a burst of writes, such as the flush of
        # a long session.
        self._clock = clock
        self._readers = Threads(thread_count, "ssd-read", clock)
        self._writers = Threads(thread_count, "ssd-write", clock)
        # A sync never waits in line behind reads or writes, nor a probe behind anything.
        self._syncer = Threads(1, "ssd-sync", clock)
        self._prober = Threads(1, "ssd-probe", clock)
        self._hang = ""
        """Why nothing is asked of the device: it owes operations. Empty when it returns them."""
        self._next_sync: Future[None] | None = None
        self._last_probe: Future[None] | None = None
        self._bounce = threading.local()

    async def read(
        self,
        offset: int,
        into: memoryview,
        pieces: Sequence[Range] | None,
        then: Callable[[int, int], None] | None,
    ) -> None:
        """Fill the pieces of `into` or raise TierFailure."""
        self.check_returns()
        flat, is_placed = into.cast("B"), self._is_placed(into)

        def piece(begin: int, end: int) -> None:
            self._read_piece(offset + begin, flat[begin:end], is_placed=is_placed)
            if then:
                then(begin, end)

        await self._readers.transfer(piece, _cut(flat.nbytes) if pieces is None else pieces)

    async def write(self, offset: int, data: memoryview, pieces: Sequence[Range] | None) -> None:
        """Write the pieces of `data` or raise TierFailure."""
        self.check_returns()
        flat, is_placed = data.cast("B"), self._is_placed(data)

        def piece(begin: int, end: int) -> None:
            self._write_piece(offset + begin, flat[begin:end], is_placed=is_placed)

        await self._writers.transfer(piece, _cut(flat.nbytes) if pieces is None else pieces)

    async def occupy(self, work: Callable[[], None], *, is_read: bool) -> None:
        """Occupy one of the path's threads with `work`, as a slow device would. Raises TierFailure."""
        await (self._readers if is_read else self._writers).transfer(lambda *_: work(), [(0, 0)])

    def _read_piece(self, offset: int, into: memoryview, *, is_placed: bool) -> None:
        # The arena is page-aligned, and is read into directly. Other buffers go through a thread's own page.
        target = into if is_placed else self._aligned(into.nbytes)
        try:
            # `fd` is read at each call: a device that came back has another one.
            _loop(self.fd, os.preadv, offset, target)
        except OSError as error:
            problem = f"read of {error.strerror}"
            self.health.read_failed(problem)
            raise TierFailure(path=self.path, problem=problem) from error
        self.health.read_succeeded()
        if not is_placed:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(target, np.uint8))

    def _write_piece(self, offset: int, data: memoryview, *, is_placed: bool) -> None:
        source = data if is_placed else self._aligned(data.nbytes)
        if not is_placed:
            np.copyto(np.frombuffer(source, np.uint8), np.frombuffer(data, np.uint8))
        try:
            _loop(self.fd, os.pwritev, offset, source)
        except OSError as error:
            problem = f"write of {error.strerror}"
            self.health.write_failed(problem, error.errno)
            raise TierFailure(path=self.path, problem=problem) from error

    def join_sync(self) -> "Future[None]":
        """Queue a sync, or share the queued one: it starts after this call either way."""
        sync = self._next_sync
        if sync is None or sync.running() or sync.done():
            sync = self._next_sync = self._syncer.submit(self._sync)
        return sync

    @property
    def _threads(self) -> tuple[Threads, ...]:
        return (self._readers, self._writers, self._syncer, self._prober)

    def check_returns(self) -> None:
        """Raise TierFailure while the device owes operations: one more would take one more thread."""
        if self._hang:
            raise TierFailure(path=self.path, problem=self._hang)

    def give_up_overdue(self, limit_s: float) -> None:
        """Lose the device when an operation is older than that, and answer all callers that wait for it."""
        begun = [threads.oldest_ns for threads in self._threads]
        oldest_ns = min((ns for ns in begun if ns is not None), default=None)
        # The oldest operation of any kind counts: one that does not return tells of the device.
        if oldest_ns is None or self._clock.monotonic_ns() - oldest_ns < limit_s * SECOND_NS:
            return
        self._hang = f"an operation has not come back for {limit_s:g} s"
        # The path is lost before any caller hears of it: no slot may be handed out while the device owes a
        # write.
        self.health.lose(self._hang)
        for threads in self._threads:
            # Each caller gets a failure of its own, for each has its own buffer to wait for.
            threads.give_up(lambda: TierFailure(path=self.path, problem=self._hang))

    def close(self, limit_s: float) -> None:
        """Wait for the threads, each at most so long, then give up the descriptor and with it the lock.

        A device that owes operations keeps its descriptor until the process ends: its number would be another
        file's.
        """
        for threads in self._threads:
            threads.close(limit_s)
        # Busy threads count too: a device that began to hang at the end has not been given up.
        if any(threads.is_busy for threads in self._threads):
            return
        # The lock goes with the descriptor, so that the descriptor goes last.
        for fd in (self.fd, *self._old_fds):
            if fd >= 0:
                os.close(fd)
        self.fd, self._old_fds = -1, []

    def _open_first(self) -> None:
        if self._place.absence:
            self.health.lose(self._place.absence)
            return
        try:
            self.fd, self.io_mode, self.is_new = _open(
                self.path, self._place, allow_direct=self._allow_direct
            )
        except DataDirectoryUnusable as error:
            # A file that another server holds is not absent.
            is_held = isinstance(error.__cause__, BlockingIOError)
            if not self._place.may_be_absent or is_held or not isinstance(error.__cause__, OSError):
                raise
            self.health.lose(str(error.facts["problem"]))

    def start_probe(self) -> "Future[None] | None":
        """Begin a probe of the device in a thread, which reports to the health. None while one runs."""
        # One probe runs at a time, and none while one hangs.
        if self._prober.is_owed or not (self._last_probe is None or self._last_probe.done()):
            return None
        self._last_probe = self._prober.submit(self._probe)
        return self._last_probe

    def _probe(self) -> None:
        if self._owes():
            return
        if self.fd >= 0:
            self._look_for_file()
            # One page is read in the usual case. A doubted device is read in eight places, spread over its
            # size: a few bad places are damage, all of them are a loss.
            first = self._probe_in(self.fd, PROBE_COUNT if self.health.is_doubted else 1)
            # One bad page makes the probe read all places.
            problems = first if not any(first) else self._probe_in(self.fd, PROBE_COUNT)
            if not any(problems):
                self._found()
                return
            if not all(problems):
                # Some places are bad: those are corrupt segments one by one, or reads that fail.
                if not self.health.is_lost:
                    self.health.stands()
                return
            # Every place failed: the path is lost. The open descriptor may be dead, so that the path is
            # looked up anew.
            self.health.lose(next(filter(None, problems)))
        if self._reopen():
            self._found()

    def _found(self) -> None:
        # Callers may have been answered without the device since the probe began.
        if not self._owes():
            self._hang = ""
            self.health.found()

    def _owes(self) -> bool:
        """Whether the device still owes operations whose callers were answered.

        A late write must not fall on another session's slot.
        """
        return any(threads.is_owed for threads in (self._readers, self._writers, self._syncer))

    def _probe_in(self, fd: int, count: int) -> list[str]:
        """Read a page in each of so many places. Returns each one's problem, empty when there is none."""
        page_count = self.size_bytes // ALIGN_BYTES
        problems = []
        with mmap.mmap(-1, ALIGN_BYTES) as page:
            view = memoryview(page)
            for i in range(count):
                try:
                    # The places are spread over the file: devices fail in regions.
                    _loop(fd, os.preadv, page_count * i // count * ALIGN_BYTES, view)
                except OSError as error:
                    problems.append(f"read of {error.strerror}")
                else:
                    problems.append("")
            view.release()
        return problems

    def _look_for_file(self) -> None:
        """Take no writes while a restart would not find the file.

        The directory was unmounted, moved or removed.
        """
        try:
            there, open_now = os.stat(self.path), os.fstat(self.fd)  # noqa: PTH116  no Path in this class
            # Device and inode are compared. A moved directory has the same file under another path, and an
            # unmounted one shows the files below its mount point.
            is_there = (there.st_dev, there.st_ino) == (open_now.st_dev, open_now.st_ino)
            problem = "" if is_there else "another file has taken its place"
        except OSError as error:
            problem = f"its file is not at its path any more: {error.strerror}"
        self.health.displace(problem)

    def _reopen(self) -> bool:
        """Open the file that is at the path now, if it is ours and whole."""
        try:
            # The directory's owner is checked first: a mount point without its filesystem belongs to nobody.
            if not self._place.is_ours():
                return False
            # O_NOFOLLOW: a link that somebody put there leads to another file.
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            _claim(fd, self.path, self._place)
            mode = _choose_mode(fd, self.path, allow_direct=self._allow_direct)
            # The file is taken only if it is whole, and readable everywhere it is looked at.
            is_whole = os.fstat(fd).st_size == self.size_bytes and not any(self._probe_in(fd, PROBE_COUNT))
        except (OSError, DataDirectoryUnusable):
            is_whole = False
        if not is_whole:
            os.close(fd)
            return False
        # Reads from before the loss may still be in the kernel.
        if self.fd >= 0:
            self._old_fds.append(self.fd)
        self.fd, self.io_mode = fd, mode
        self.health.displace("")
        return True

    def _sync(self) -> None:
        # Syncs run one at a time: the kernel reports a lost write to one fdatasync only, and a second one
        # beside it would be told that all is well. The fence is checked again in the thread: an earlier sync
        # in the queue may have failed.
        self.health.check_fence()
        try:
            # fdatasync is enough: the file's size never changes, and its blocks are allocated, so that no
            # metadata has to follow.
            os.fdatasync(self.fd)
        except OSError as error:
            problem = f"fdatasync: {error.strerror}"
            self.health.fence(problem)
            raise TierFailure(path=self.path, problem=problem) from error

    def _is_placed(self, buffer: memoryview) -> bool:
        # Through the page cache any address is right.
        return not self.io_mode.is_direct or np.frombuffer(buffer, np.uint8).ctypes.data % ALIGN_BYTES == 0

    def _aligned(self, size_bytes: int) -> memoryview:
        """Lend this thread's own aligned memory: one per thread of the path, of the largest piece's size."""
        if len(getattr(self._bounce, "memory", b"")) < size_bytes:
            self._bounce.memory = mmap.mmap(-1, max(size_bytes, PIECE_BYTES))
        return memoryview(self._bounce.memory)[:size_bytes]


def _loop(
    fd: int, call: Callable[[int, Sequence[memoryview], int], int], offset: int, buffer: memoryview
) -> None:
    """Repeat `call` until the buffer is done: the kernel may do less than it was asked to.

    Raises OSError whose `strerror` also says where.
    """
    done = 0
    # A short transfer is no error of POSIX, and happens at signals and at a full device.
    while done < buffer.nbytes:
        where = f"{buffer.nbytes - done} B at byte {offset + done}"
        try:
            moved = call(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, f"{where}: {error.strerror}") from error
        # The file has its full size from the start: an end before it means that somebody cut it.
        if moved == 0:
            raise OSError(errno.EIO, f"{where}: the file ends there")
        done += moved


def _cut(size_bytes: int) -> list[Range]:
    begins = range(0, size_bytes, PIECE_BYTES)
    return [(begin, min(begin + PIECE_BYTES, size_bytes)) for begin in begins]


def _open(path: str, place: SsdPath, *, allow_direct: bool) -> tuple[int, IoMode, bool]:
    if place.size_bytes <= 0 or place.size_bytes % ALIGN_BYTES:
        raise InvalidConfiguration(
            source=path, problem=f"{place.size_bytes} B is not a multiple of {ALIGN_BYTES} B"
        )
    try:
        # The directory is made private before a file is in it.
        claim_directory(Path(place.directory))
        # The lock comes before any look at the size: another server may be growing it.
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"{path}: {error.strerror}") from error
    try:
        _claim(fd, path, place)
        is_new = os.fstat(fd).st_size == 0
        _allocate(fd, path, place)
        return fd, _choose_mode(fd, path, allow_direct=allow_direct), is_new
    except BaseException:
        os.close(fd)
        raise


def _claim(fd: int, path: str, place: SsdPath) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataDirectoryUnusable(path=place.directory, problem=f"another server holds {path}") from error
    except OSError as error:
        raise DataDirectoryUnusable(
            path=place.directory, problem=f"cannot lock {path}: {error.strerror}"
        ) from error


def _allocate(fd: int, path: str, place: SsdPath) -> None:
    """Grow the file to its size, every block allocated, or leave it as it was."""
    present_bytes = os.fstat(fd).st_size
    # Shrinking would cut slots that records name.
    if present_bytes > place.size_bytes:
        problem = (
            f"the file has {present_bytes} B and cannot shrink to {place.size_bytes} B; delete it to start"
            " empty"
        )
        raise InvalidConfiguration(source=path, problem=problem)
    if present_bytes == place.size_bytes:
        return
    # The room is checked before: an attempt that fills a filesystem harms others.
    _check_room(fd, path, place.size_bytes - present_bytes)
    try:
        os.posix_fallocate(fd, present_bytes, place.size_bytes - present_bytes)
        # Size and name are synced: without the size a power cut leaves a short file, without the name none.
        os.fsync(fd)
        _sync_directory(place.directory)
    except OSError as error:
        # The next start takes present bytes for allocated: a partial growth is cut off again.
        os.ftruncate(fd, present_bytes)
        _check_room(fd, path, place.size_bytes - present_bytes)
        problem = f"cannot allocate {place.size_bytes} B for {path}: {error.strerror}"
        raise DataDirectoryUnusable(path=place.directory, problem=problem) from error


def _check_room(fd: int, path: str, needed_bytes: int) -> None:
    space = os.fstatvfs(fd)
    free_bytes = space.f_bavail * space.f_frsize
    if needed_bytes > free_bytes:
        limit_bytes = space.f_blocks * space.f_frsize
        raise CapacityExceeded(
            tier=f"SSD {path}", needed_bytes=needed_bytes, free_bytes=free_bytes, limit_bytes=limit_bytes
        )


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _choose_mode(fd: int, path: str, *, allow_direct: bool) -> IoMode:
    """Switch the descriptor to direct I/O if a probing read says that it works here."""
    if not allow_direct:
        return IoMode(path, is_direct=False, reason="direct I/O is switched off")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        # Some filesystems accept the flag and refuse the first read: only a read tells.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGN_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return IoMode(path, is_direct=False, reason=f"the filesystem refuses direct I/O: {error.strerror}")
    return IoMode(path, is_direct=True, reason="the filesystem takes direct I/O")
