"""Memory: would the arena fit, which pages is it made of, and may they be locked.

Reads what the kernel says and allocates nothing. Worst case: a kernel that says nothing, which is
reported as unknown.
"""

import os
import resource
from pathlib import Path

from ctxcache.cli.doctor.finding import Finding, degraded, fatal, ok
from ctxcache.cli.units import human_size
from ctxcache.errors import CapacityExceeded, TierFailure
from ctxcache.format.layout import align
from ctxcache.settings import sizes
from ctxcache.settings.config import Settings
from ctxcache.storage.tiers.shared_memory import HUGE_PAGE_BYTES, free_huge_bytes

RDMA = Path("/sys/class/infiniband")
ROOMY_HUGE = ("always", "within_size", "advise")


def shared_memory(settings: Settings) -> Finding:
    """Would the arena fit where it is to lie."""
    name, directory = "shared memory", settings.arena_directory
    try:
        needed = align(settings.arena_size_bytes) or sizes.arena_bytes(directory)
        free = _free_bytes(directory)
    except OSError as error:
        failure = TierFailure(path=str(directory), problem=error.strerror or str(error))
        return fatal(name, failure, "choose a directory on a tmpfs with --arena-directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        failure = TierFailure(path=str(directory), problem="no permission to create files in it")
        return fatal(name, failure, "choose a directory on a tmpfs with --arena-directory")
    if needed > free:
        lack = CapacityExceeded(
            tier=f"DRAM {directory}", needed_bytes=needed, free_bytes=free, limit_bytes=free
        )
        return fatal(
            name, lack, "choose a smaller --arena-size-bytes, or enlarge the tmpfs (containers: --shm-size)"
        )
    kind = filesystem(directory)
    found = f"{directory} is {kind}, {human_size(free)} free; the arena takes {human_size(needed)}"
    if kind != "tmpfs":
        return degraded(
            name, found, "a file on a disk", "choose a directory on a tmpfs with --arena-directory"
        )
    return ok(name, found, "an arena in shared memory, which workers on this host map")


def huge_pages(settings: Settings) -> Finding:
    """Which pages the arena would be made of."""
    name, lines = "huge pages", _meminfo()
    pool = f"{lines.get('HugePages_Total', '?')} of 2 MiB reserved, {human_size(free_huge_bytes())} free"
    huge = _mount_option(settings.arena_directory, "huge")
    found = f"{pool}; {settings.arena_directory} is mounted with huge={huge}"
    needed = _arena_bytes(settings)
    if settings.arena_huge_pages != "off" and needed % HUGE_PAGE_BYTES == 0 and needed <= free_huge_bytes():
        return ok(name, found, f"2 MiB pages of the pool for the arena's {human_size(needed)}")
    advice = (
        f"reserve {-(-needed // HUGE_PAGE_BYTES)} pages (sysctl vm.nr_hugepages) and leave --arena-huge-pages at"
        " auto: SSD reads into them are up to twice as fast"
    )
    if settings.arena_huge_pages == "on":
        lack = CapacityExceeded(
            tier="huge pages",
            needed_bytes=needed,
            free_bytes=free_huge_bytes(),
            limit_bytes=free_huge_bytes(),
        )
        return fatal(name, lack, advice)
    if huge in ROOMY_HUGE:
        return ok(name, found, "transparent huge pages, where the kernel has them")
    return degraded(name, found, "4 KiB pages", advice)


def _arena_bytes(settings: Settings) -> int:
    try:
        return align(settings.arena_size_bytes) or sizes.arena_bytes(settings.arena_directory)
    except OSError:
        return sizes.LEAST_BYTES


def locked_memory(rdma: Path = RDMA) -> Finding:
    """How much memory may be locked, and who asks. Not the store, and not CUDA's driver, which pins on its own account."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else human_size(soft)
    used = "no locked memory: with swap on, the kernel may swap the arena out; workers' pinned staging is CUDA's, which needs no limit"
    if soft != resource.RLIM_INFINITY and rdma.is_dir() and any(rdma.iterdir()):
        advice = (
            "lift it for workers that read over RDMA, whose registered memory counts: LimitMEMLOCK=infinity, in"
            " containers --ulimit memlock=-1"
        )
        return degraded("memlock limit", f"{limit}, and there are RDMA devices", used, advice)
    return ok("memlock limit", limit, used)


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`."""
    return _mount(path)[0]


def _mount_option(path: Path, option: str) -> str:
    options = dict(item.partition("=")[::2] for item in _mount(path)[1].split(","))
    return options.get(option, "never")


def _mount(path: Path) -> tuple[str, str]:
    """Find type and options of the mount that holds `path`: the last of those with the longest path."""
    best, found = -1, ("unknown", "")
    target = path.resolve()
    for line in _lines("/proc/self/mounts"):
        _, point, kind, options, *_ = line.split(" ")
        # Spaces are \040 there.
        place = Path(point.encode().decode("unicode_escape"))
        if target.is_relative_to(place) and len(place.parts) >= best:
            best, found = len(place.parts), (kind, options)
    return found


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def _meminfo() -> dict[str, str]:
    return {
        name: value.strip() for name, _, value in (line.partition(":") for line in _lines("/proc/meminfo"))
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
