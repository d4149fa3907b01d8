"""The DRAM tier: shared memory that local workers map as well.

Knows slots, not what is in them. Worst case: there is no memory for the whole arena, which is
found out when it is created, never by a SIGBUS later.

The first page belongs to the arena, slots follow it. A slot's offset is its offset in the file:

    | arena id 16 B, zeros to 4 KiB | slots ... |
    0                               4096        capacity
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxcache.errors import InvalidConfiguration
from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.runtime.memory import Populate
from ctxcache.runtime.threads import started_pool
from ctxcache.storage.tiers.base import Arrived, Pieces, TierRefusal
from ctxcache.storage.tiers.shared_memory import HugePages, check_shared, create_shared

log = logging.getLogger(__name__)

ARENA_FILE_NAME = "ctxcache-{}.arena"
ARENA_ID_BYTES = 16
INLINE_COPY_BYTES = 1 << 20
"""Copies up to this size run on the event loop: about 0.2 ms, less than two thread switches are worth."""
COPY_THREADS = 2
BLOCK_BYTES = 512
"""What `st_blocks` counts, whatever the filesystem's own blocks are."""


class DramArena:
    """See MappedTier. One path; slots lie in `[first_offset_bytes, capacities_bytes[0])`."""

    first_offset_bytes = ALIGN_BYTES

    def __init__(
        self, path: str | Path, size_bytes: int, *, huge_pages: HugePages = "off", is_sealed: bool = False
    ) -> None:
        """Create new memory: a file at `path`; or huge pages of the pool, or sealed memory, without a path.

        `size_bytes` is a multiple of 4 KiB and at least two of them; huge pages need a multiple of 2 MiB.
        `auto` takes them where there are enough. A stale file at `path` is replaced. Raises
        InvalidConfiguration, CapacityExceeded (no room), TierFailure.
        """
        _check_size(size_bytes)
        # Allocated now, and not at the first touch: a full tmpfs kills a process that touches a page by
        # SIGBUS.
        self._memory = create_shared(str(path), size_bytes, huge_pages, is_sealed=is_sealed)
        self._size_bytes = size_bytes
        self._map = self._memory.map
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        # Drawn anew for each arena. A client that has an older one mapped finds another id in its first page.
        self._arena_id = secrets.token_bytes(ARENA_ID_BYTES)
        self._map[:ARENA_ID_BYTES] = self._arena_id
        self._copiers = started_pool(COPY_THREADS, "arena-copy")
        self._prefault: Populate | None = None
        self._is_closed = False

    @property
    def arena_id(self) -> bytes:
        """16 random bytes, also the memory's first: whoever maps it can tell this arena from another."""
        return self._arena_id

    @property
    def shared_path(self) -> str:
        """The file that others may map; empty when it has no path and only `fd` leads there."""
        return self._memory.path

    @property
    def read_fd(self) -> int:
        """Descriptor of the memory, good for reading alone, to be handed to local clients."""
        return self._memory.read_fd

    @property
    def write_fd(self) -> int | None:
        """One to write through, for those who may; None where the memory is sealed."""
        return self._memory.write_fd

    @property
    def page_bytes(self) -> int:
        """Size of the pages that it is made of."""
        return self._memory.page_bytes

    @property
    def pages_reason(self) -> str:
        """Which pages, and why."""
        return self._memory.reason

    @property
    def paths(self) -> tuple[str, ...]:
        """See Tier."""
        return (self._memory.name,)

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """See Tier. The arena's own page included."""
        return (self._size_bytes,)

    @property
    def refusals(self) -> dict[int, TierRefusal]:
        """See Tier. Memory takes what it is given."""
        return {}

    def view(self, slot: Slot) -> memoryview:
        """See MappedTier."""
        begin = self._offset(slot, 0, slot.size_bytes)
        return memoryview(self._map)[begin : begin + slot.size_bytes]

    async def read(
        self, slot: Slot, begin: int, into: memoryview, *, pieces: Pieces = None, then: Arrived = None
    ) -> None:
        """See Tier."""
        offset, flat = self._offset(slot, begin, into.nbytes), np.frombuffer(into, np.uint8)
        # One piece where nobody cuts it.
        for first, last in [(0, into.nbytes)] if pieces is None else pieces:
            await self._copy(flat[first:last], self._bytes[offset + first : offset + last])
            if then:
                then(first, last)

    async def write(self, slot: Slot, begin: int, data: memoryview, *, pieces: Pieces = None) -> None:
        """See Tier."""
        offset, flat = self._offset(slot, begin, data.nbytes), np.frombuffer(data, np.uint8)
        for first, last in [(0, data.nbytes)] if pieces is None else pieces:
            await self._copy(self._bytes[offset + first : offset + last], flat[first:last])

    async def sync(self, path_indexes: Collection[int]) -> None:
        """See Tier. Memory has nowhere to sync to: it is as durable as it ever gets."""

    @property
    def prefaulted_bytes(self) -> int:
        """How much of the arena has been touched ahead of use."""
        return 0 if self._prefault is None else self._prefault.populated_bytes

    def prefault(self) -> Populate:
        """Begin to map every page ahead of use: a first touch costs four times a later one.

        A thread does it in short steps with pauses, one to three seconds per GiB, and logs its end;
        reads and writes go on meanwhile. Does nothing on a kernel before 5.14.
        """
        if self._prefault is None:
            self._prefault = Populate(
                self._bytes.ctypes.data,
                self._size_bytes,
                is_for_writing=True,
                page_bytes=self.page_bytes,
                on_end=_log_prefault,
            )
            self._prefault.start()
        return self._prefault

    def unlink(self) -> None:
        """Remove the file's name, from any thread: for a process that ends without closing anything."""
        self._memory.unlink()

    def close(self) -> None:
        """See Tier. Removes the file; a mapping that someone still views lives until the view ends."""
        if self._is_closed:
            return
        self._is_closed = True
        self._copiers.shutdown()
        if self._prefault is not None:
            self._prefault.stop()
        # A view of the mapping would keep it from being closed.
        self._bytes = np.empty(0, np.uint8)
        self._memory.close()

    def _offset(self, slot: Slot, begin: int, size_bytes: int) -> int:
        """Where in the file the range is. Raises ValueError: an unaligned or stray range is a bug."""
        # Not the first page: it says which arena this is.
        is_in_slot = begin >= 0 and begin + size_bytes <= slot.size_bytes
        is_in_file = self.first_offset_bytes <= slot.offset_bytes <= self._size_bytes - slot.size_bytes
        if slot.path_index or not is_in_slot or not is_in_file:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not in {self._memory.name}")
        if (slot.offset_bytes | begin | size_bytes) % ALIGN_BYTES:
            raise ValueError(f"[{begin}, {begin + size_bytes}) of {slot} is not {ALIGN_BYTES} B-aligned")
        return slot.offset_bytes + begin

    async def _copy(self, into: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        # copyto releases the GIL; a memoryview slice assignment would hold it.
        if source.nbytes <= INLINE_COPY_BYTES:
            np.copyto(into, source)
        else:
            await self._in_thread(np.copyto, into, source)

    async def _in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        work = asyncio.get_running_loop().run_in_executor(self._copiers, function, *arguments)
        is_cancelled = False
        # A thread cannot be stopped, and until it ends the buffers are not the caller's again.
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        work.result()


def _log_prefault(prefault: Populate) -> None:
    log.info(
        "arena_prefaulted populated_bytes=%d size_bytes=%d took_s=%.2f",
        prefault.populated_bytes,
        prefault.size_bytes,
        prefault.took_s,
    )


def check_arena(path: Path, size_bytes: int, *, huge_pages: HugePages) -> None:
    """Raise what a new arena at `path` would raise, once abandoned ones are removed. Changes nothing."""
    _check_size(size_bytes)
    stale_bytes = 0
    for abandoned in path.parent.glob(ARENA_FILE_NAME.format("*")):
        with contextlib.suppress(OSError), abandoned.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            stale_bytes += os.fstat(file.fileno()).st_blocks * BLOCK_BYTES
    check_shared(str(path), size_bytes, huge_pages, stale_bytes=stale_bytes)


def _check_size(size_bytes: int) -> None:
    if size_bytes % ALIGN_BYTES or size_bytes < 2 * ALIGN_BYTES:
        problem = f"{size_bytes} B; at least {2 * ALIGN_BYTES} B, a multiple of {ALIGN_BYTES} B"
        raise InvalidConfiguration(source="arena_size_bytes", problem=problem)


def remove_abandoned(directory: Path) -> list[str]:
    """Remove the arenas of servers that were killed and not started again; returns their paths.

    Memory that nobody uses would stay taken until the next boot. Files that a living server holds, or that
    this user may not remove, stay.
    """
    removed = []
    # A name that a server's crash left. The lock says whether its owner lives, for the mapping keeps it.
    for path in sorted(directory.glob(ARENA_FILE_NAME.format("*"))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A living server holds this lock, and then the file stays.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(str(path))
    return removed
