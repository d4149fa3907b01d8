"""Shared memory for an arena: a file on a tmpfs, huge pages of the kernel's pool, or sealed memory.

The memory knows its size and nothing of its contents. Other processes get one of two descriptors. The one for
reading cannot be reopened for writing: its description is read-only, and the memory's mode admits its owner
alone. Sealed memory has no name, and after the seal no process, its owner included, can map it for writing.
Worst case: too little memory. That shows here and never as a SIGBUS later: pages of a file are allocated,
huge pages are reserved.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ctxcache.errors import CapacityExceeded, InvalidConfiguration, TierFailure
from ctxcache.runtime.files import FILE_MODE, check_usable
from ctxcache.runtime.memory import HUGE_PAGE_BYTES

# The rights to the arena:
#
#     server           maps it to write, before the seal
#     local writer     write_fd: none exists where the memory is sealed
#     local reader     read_fd: a description for reading, of a file whose mode is 0600
#
# A reader cannot open its descriptor again through /proc to write: the mode refuses that.
HugePages = Literal["auto", "on", "off"]
SMALL_PAGE_BYTES = 4096
MEMFD_NAME = "ctxcache-arena"
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_MFD_HUGE_2MB = 21 << 26
_SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_F_SEAL_FUTURE_WRITE = 0x10
"""From then on nobody writes, or maps to write; mappings that are there go on.

Linux 5.1, for huge pages 5.13.
"""
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


_names: set[str] = set()
"""Names that this process has made, or is about to make."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """Memory that others map by a descriptor, and by `path` unless that is empty. `reason`: why these pages.

    `write_fd` is None where the memory is sealed.
    """

    map: mmap.mmap
    read_fd: int
    write_fd: int | None
    path: str
    page_bytes: int
    reason: str

    @property
    def name(self) -> str:
        """The path, or what /proc calls it."""
        return self.path or f"memfd:{MEMFD_NAME}"

    def close(self) -> None:
        """Remove the name and the mapping; what others have mapped or still view lives on."""
        with contextlib.suppress(BufferError):
            self.map.close()
        os.close(self.read_fd)
        if self.write_fd is not None:
            os.close(self.write_fd)
        self.unlink()

    def unlink(self) -> None:
        """Remove the name; the memory lives on while it is mapped."""
        if self.path:
            # The next start removes what cannot be removed now.
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
            _names.discard(self.path)


def create_shared(
    path: str, size_bytes: int, huge_pages: HugePages, *, is_sealed: bool = False
) -> SharedMemory:
    """Create memory of that size: a new file at `path`, or huge pages where `huge_pages` and the pool allow.

    `is_sealed`: this process alone ever writes to it, and it has no path; it needs as much room as a file.
    Raises InvalidConfiguration, CapacityExceeded (no room), TierFailure.
    """
    problem = "not asked for" if huge_pages == "off" else _pool_problem(size_bytes)
    if huge_pages == "on":
        _check_pages(size_bytes)
    if huge_pages != "off":
        # A stale name of an earlier run still holds memory.
        with contextlib.suppress(OSError):
            _remove_stale(path)
    # Looked at and taken in two steps: another process may take the pages between them.
    if not problem and (memory := _create_huge(size_bytes, is_sealed=is_sealed)) is not None:
        return memory
    if huge_pages == "on":
        raise _no_pages(size_bytes)
    reason = f"4 KiB pages: huge pages {problem or 'went while we asked'}"
    return _create_sealed(path, size_bytes, reason) if is_sealed else _create_file(path, size_bytes, reason)


def check_shared(path: str, size_bytes: int, huge_pages: HugePages, *, stale_bytes: int) -> None:
    """Raise what `create_shared` would raise. Changes nothing.

    `stale_bytes`: of files that go before, which are not free yet.
    """
    if huge_pages == "on":
        _check_pages(size_bytes)
        if _pool_problem(size_bytes):
            raise _no_pages(size_bytes)
    if huge_pages != "off" and not _pool_problem(size_bytes):
        return
    directory = Path(path).parent
    try:
        space = os.statvfs(directory)
        check_usable(directory)
        _check_stale(path)
    except OSError as error:
        raise TierFailure(path=path, problem=f"cannot create the arena: {error.strerror}") from error
    # A tmpfs without a bound says 0 of 0.
    if space.f_blocks and size_bytes > space.f_bavail * space.f_frsize + stale_bytes:
        raise _no_room(path, size_bytes, space)


def _check_pages(size_bytes: int) -> None:
    if size_bytes % HUGE_PAGE_BYTES:
        raise InvalidConfiguration(source="arena_huge_pages", problem=_pool_problem(size_bytes))


def _no_pages(size_bytes: int) -> CapacityExceeded:
    return CapacityExceeded(
        tier="huge pages",
        needed_bytes=size_bytes,
        free_bytes=free_huge_bytes(),
        limit_bytes=_pool_bytes(),
    )


def unlink_all() -> None:
    """Remove every name that this process has made: for one that ends without closing anything."""
    for path in tuple(_names):
        with contextlib.suppress(OSError):
            Path(path).unlink()


def free_huge_bytes() -> int:
    """Bytes of 2 MiB pages in the kernel's pool that nobody uses or has reserved."""
    return max(_pool("free_hugepages") - _pool("resv_hugepages"), 0) * HUGE_PAGE_BYTES


def _pool_bytes() -> int:
    return _pool("nr_hugepages") * HUGE_PAGE_BYTES


def _pool(name: str) -> int:
    try:
        return int((_POOL / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _pool_problem(size_bytes: int) -> str:
    """Say why the pool cannot give that much; empty when it can."""
    if size_bytes % HUGE_PAGE_BYTES:
        return f"need a size that is a multiple of 2 MiB, not {size_bytes} B"
    free_bytes = free_huge_bytes()
    if free_bytes < size_bytes:
        return f"needed: {size_bytes // HUGE_PAGE_BYTES}, free: {free_bytes // HUGE_PAGE_BYTES}"
    return ""


def _create_huge(size_bytes: int, *, is_sealed: bool) -> SharedMemory | None:
    """Reserve huge pages; None when another process was faster."""
    # Huge pages of 2 MiB, whatever the machine's default is.
    try:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB
        fd = os.memfd_create(MEMFD_NAME, flags)
    except OSError:
        return None
    # Size first, then the mapping: hugetlbfs reserves when it is mapped.
    try:
        os.ftruncate(fd, size_bytes)
        # Reserves every page: a touch cannot fail afterwards.
        mapping = mmap.mmap(fd, size_bytes)
    except OSError:
        os.close(fd)
        return None
    return _nameless(fd, mapping, HUGE_PAGE_BYTES, "2 MiB pages", is_sealed=is_sealed)


def _create_sealed(path: str, size_bytes: int, reason: str) -> SharedMemory:
    try:
        _remove_stale(path)
        directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TierFailure(path=path, problem=f"cannot create the arena: {error.strerror}") from error
    try:
        # A tmpfs has a bound, and a memfd has none: the tmpfs that would be used says how much there may be.
        # Nameless memory has no bound of its own but the machine's, where the kernel kills for it.
        space = os.fstatvfs(directory)
    finally:
        os.close(directory)
    if size_bytes > space.f_bavail * space.f_frsize:
        raise _no_room(path, size_bytes, space)
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        mapping = _allocate(fd, path, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return _nameless(fd, mapping, SMALL_PAGE_BYTES, reason, is_sealed=True)


def _nameless(fd: int, mapping: mmap.mmap, page_bytes: int, reason: str, *, is_sealed: bool) -> SharedMemory:
    """Memory behind a descriptor alone.

    No process can make it shorter, which would kill processes that have it mapped.
    """
    try:
        # By itself everybody may open it again through /proc, to write as well.
        # In this order: mode, the reader's descriptor, then the seal, behind which neither can be changed.
        os.fchmod(fd, FILE_MODE)
        read_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        write_seal = _F_SEAL_FUTURE_WRITE if is_sealed else 0
        # Size seals: nobody can shorten the memory under those that have it mapped. F_SEAL_SEAL: nobody adds
        # another.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL | write_seal)
    except OSError as error:
        os.close(fd)
        problem = f"this kernel cannot seal such memory: {error.strerror}"
        raise InvalidConfiguration(source="arena_sealed", problem=problem) from error
    # The mapping that was made before the seal goes on to write. Nothing else can.
    if is_sealed:
        os.close(fd)
    return SharedMemory(mapping, read_fd, None if is_sealed else fd, "", page_bytes, reason)


def _create_file(path: str, size_bytes: int, reason: str) -> SharedMemory:
    try:
        _remove_stale(path)
        _names.add(path)
        # O_EXCL and O_NOFOLLOW: nobody's link or file is opened in the place of ours.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, mode=FILE_MODE)
    except OSError as error:
        raise TierFailure(path=path, problem=f"cannot create the arena: {error.strerror}") from error
    try:
        # Locked before it is allocated: a server that starts beside would take it for a stale one.
        _claim(fd, path)
        mapping = _allocate(fd, path, size_bytes)
        # Not the claimed description: a process that is given these must not keep our claim alive.
        # A lock belongs to the description, and a duplicate would carry it into other processes.
        read_fd, write_fd = (
            os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC) for access in (os.O_RDONLY, os.O_RDWR)
        )
        return SharedMemory(mapping, read_fd, write_fd, path, SMALL_PAGE_BYTES, reason)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _claim(fd: int, path: str) -> None:
    """Say that the owner lives: the mapping keeps the file description, and so the lock, until it goes."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    # Unlinked between creation and lock, by a server that removed stale arenas.
    if not os.fstat(fd).st_nlink:
        raise TierFailure(path=path, problem="another server took the new arena for a stale one; start again")


def _remove_stale(path: str) -> None:
    _check_stale(path)
    Path(path).unlink(missing_ok=True)


def _check_stale(path: str) -> None:
    """Raise OSError for what is not a file: not every thing of that name is ours to remove."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "something that is not a file has that name")


def _allocate(fd: int, path: str, size_bytes: int) -> mmap.mmap:
    space = os.fstatvfs(fd)
    try:
        # Every page is allocated here, or the failure comes here.
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise TierFailure(path=path, problem=f"cannot allocate the arena: {error.strerror}") from error
        raise _no_room(path, size_bytes, space) from error


def _no_room(path: str, size_bytes: int, space: os.statvfs_result) -> CapacityExceeded:
    return CapacityExceeded(
        tier=f"DRAM {path}",
        needed_bytes=size_bytes,
        free_bytes=space.f_bavail * space.f_frsize,
        limit_bytes=space.f_blocks * space.f_frsize,
    )
