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
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from ctxcache.errors import DataDirectoryUnusable, TierFailure
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE, Slot
from ctxcache.runtime.clock import Clock, SystemClock
from ctxcache.storage.device_threads import Threads
from ctxcache.storage.tiers.base import Arrived, Pieces, Range, TierRefusal
from ctxcache.storage.tiers.path_health import PathHealth
from ctxcache.storage.tiers.segments_file import IoMode, SsdPath, choose_mode, claim, open_file

# One path and its threads. No kind of operation waits in line behind another:
#
#     ssd-read x 4     ssd-write x 4     ssd-sync x 1     ssd-probe x 1
PIECE_BYTES = 1 << 20
SECOND_NS = 10**9
THREADS_PER_PATH = 4
PROBE_INTERVAL_NS = 5 * SECOND_NS
"""How often a path that is not doubted is probed."""
PROBE_PATIENCE_S = 0.25
"""How long `probe` waits for a device. A slower probe reports to the path's health when it ends."""
HANG_AFTER_S = 30.0
PROBE_COUNT = 8
"""Places in which a doubted device is read. If none can be read, the device is lost."""


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
    def written_bytes(self) -> tuple[int, ...]:
        """See DeviceTier."""
        return tuple(file.written_bytes for file in self.files)

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

        Probes the doubted paths, and all paths every few seconds; each in a thread of its own.
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
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        file = self._file(slot, begin, into.nbytes, pieces)
        await file.read(slot.offset_bytes + begin, into, pieces, then)

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
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

    def _file(self, slot: Slot, begin: int, size_bytes: int, pieces: Pieces) -> "_File":
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
        self.written_bytes = 0
        """By writes that succeeded since the start."""
        self._place, self._allow_direct = place, allow_direct
        self.fd, self.io_mode = -1, IoMode(self.path, is_direct=False, reason="it is not there")
        self._old_fds: list[int] = []
        """Descriptors of files that are gone. They stay open: reads on them may still be under way."""
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
        """Why the device gets no operations: it owes some. Empty while it returns them."""
        self._next_sync: Future[None] | None = None
        self._last_probe: Future[None] | None = None
        self._bounce = threading.local()

    async def read(
        self,
        offset: int,
        into: memoryview,
        pieces: Pieces,
        then: Arrived,
    ) -> None:
        """Fill the pieces of `into` or raise TierFailure."""
        self.check_returns()
        flat, is_placed = into.cast("B"), self._is_placed(into)

        def piece(begin: int, end: int) -> None:
            self._read_piece(offset + begin, flat[begin:end], is_placed=is_placed)
            if then:
                then(begin, end)

        await self._readers.transfer(piece, _cut(flat.nbytes) if pieces is None else pieces)

    async def write(self, offset: int, data: memoryview, pieces: Pieces) -> None:
        """Write the pieces of `data` or raise TierFailure."""
        self.check_returns()
        flat, is_placed = data.cast("B"), self._is_placed(data)

        def piece(begin: int, end: int) -> None:
            self._write_piece(offset + begin, flat[begin:end], is_placed=is_placed)

        cut = _cut(flat.nbytes) if pieces is None else pieces
        await self._writers.transfer(piece, cut)
        self.written_bytes += sum(end - begin for begin, end in cut)

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
        """Where an operation is older than `limit_s`, lose the device and answer all its callers."""
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
        """Wait for the threads, each at most `limit_s`, then close the descriptor and with it the lock.

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
            self.fd, self.io_mode, self.is_new = open_file(
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
        # The device may have been given up since the probe began.
        if not self._owes():
            self._hang = ""
            self.health.found()

    def _owes(self) -> bool:
        """Whether the device still owes operations whose callers were answered.

        A late write must not fall on another session's slot.
        """
        return any(threads.is_owed for threads in (self._readers, self._writers, self._syncer))

    def _probe_in(self, fd: int, count: int) -> list[str]:
        """Read a page in `count` places. Returns a problem for each, empty where the read succeeded."""
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
            claim(fd, self.path, self._place)
            mode = choose_mode(fd, self.path, allow_direct=self._allow_direct)
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
        # Reads and writes through the page cache take any address.
        return not self.io_mode.is_direct or np.frombuffer(buffer, np.uint8).ctypes.data % ALIGN_BYTES == 0

    def _aligned(self, size_bytes: int) -> memoryview:
        """Aligned memory of this thread, as large as its largest piece so far."""
        if len(getattr(self._bounce, "memory", b"")) < size_bytes:
            self._bounce.memory = mmap.mmap(-1, max(size_bytes, PIECE_BYTES))
        return memoryview(self._bounce.memory)[:size_bytes]


def _loop(
    fd: int, call: Callable[[int, Sequence[memoryview], int], int], offset: int, buffer: memoryview
) -> None:
    """Repeat `call` until the whole buffer is read or written.

    Raises OSError whose `strerror` also says where.
    """
    done = 0
    # POSIX allows short transfers. They happen at signals and at a full device.
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
