"""Default sizes of the tiers, from what the machine has and the process may have of it.

A container sees the memory of its whole host in /proc/meminfo. Its own limit is in the files of its cgroup.
The arena counts against it, and a process that passes it is killed. The limits of cgroups nest, and the least
of them counts.

    /proc/self/mountinfo   where the hierarchy is mounted, and which part of it
    /proc/self/cgroup      the path of the own cgroup below that
    v2  memory.max, memory.high        v1  memory.limit_in_bytes        in each directory of that path

Worst case: files that are not there or not readable, as without cgroups; then the machine's memory counts.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxcache.format.layout import ALIGN_BYTES, align
from ctxcache.runtime.memory import HUGE_PAGE_BYTES
from ctxcache.settings.config import ARENA_CAP_BYTES, MIB, SSD_CAP_BYTES

ARENA_SHARE = 8
SSD_SHARE = 10
LEAST_BYTES = 64 * MIB
PROC = Path("/proc")
MOUNT = re.compile(r"\d+ \d+ \S+ (\S+) (\S+) .*- (cgroup2?) \S+ (\S+)")
"""The root in its hierarchy, the place, the kind and the controllers of a mounted hierarchy."""
GROUP = re.compile(r"(\d+):([^:]*):(.*)")
LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
USED = {"cgroup2": "memory.current", "cgroup": "memory.usage_in_bytes"}
PAGE_CACHE = {
    "cgroup2": ("inactive_file", "active_file"),
    "cgroup": ("total_inactive_file", "total_active_file"),
}
"""The part of a cgroup's use that the kernel takes back before it kills."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can be had, and the file that says so."""

    available_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """Bytes of a default arena, and what they were bounded by."""

    size_bytes: int
    bound: str


# Defaults for a machine that others use as well, such as a laptop: a small part of what is available, never
# more than the caps.
def default_arena(directory: Path) -> ArenaSize:
    """An eighth of the memory available or half of what the tmpfs has free, at most 8 GiB.

    Whole huge pages. Raises OSError.
    """
    memory = memory_available()
    wanted, bound = min(
        (memory.available_bytes // ARENA_SHARE, f"an eighth of {memory.source}"),
        (shutil.disk_usage(directory).free // 2, f"half of the free space of {directory}"),
        (ARENA_CAP_BYTES, "the most that is taken unasked"),
    )
    if wanted < LEAST_BYTES:
        wanted, bound = LEAST_BYTES, f"the least, though {bound} is less"
    return ArenaSize(wanted // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, bound)


def ssd_bytes(directory: Path, file_name: str) -> int:
    """The size of the file that is there, else a tenth of the free space, at most 32 GiB: whole pages.

    Project quotas count, as volumes of containers have: the filesystem's free space is told within them.
    """
    file = directory / file_name
    # An empty one is what is left of a start that was killed before it had allocated anything.
    if file.exists() and (present_bytes := file.stat().st_size):
        return align(present_bytes)
    wanted = shutil.disk_usage(directory).free // SSD_SHARE
    return _whole_pages(min(max(wanted, LEAST_BYTES), SSD_CAP_BYTES))


def memory_available(proc: Path | None = None) -> Memory:
    """The least of the machine's memory and of what each limit on this process leaves.

    `proc`: in place of /proc.
    """
    proc = proc or PROC
    return min([_of_machine(proc), *_left_by_cgroups(proc)], key=lambda found: found.available_bytes)


def _of_machine(proc: Path) -> Memory:
    # Linux's own estimate of what can be had without swapping, page cache counted in.
    for name, found in _numbers(proc / "meminfo"):
        if name == "MemAvailable:":
            return Memory(found * 1024, "the machine's available memory")
    return Memory(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's free memory")


def _left_by_cgroups(proc: Path) -> Iterator[Memory]:
    own = dict(_own_cgroups(proc))
    for root, point, kind, options in _found(MOUNT, proc / "self" / "mountinfo"):
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # Without a namespace of its own, a container is mounted its part of the host's hierarchy, and reads
        # the path of the whole one.
        path = own[kind].removeprefix(root.rstrip("/"))
        # Spaces are \040 there.
        top = Path(point.encode().decode("unicode_escape"))
        group = top.joinpath(*[part for part in path.split("/") if part not in {"", ".."}])
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            yield from _left_in(directory, kind)


def _own_cgroups(proc: Path) -> Iterator[tuple[str, str]]:
    """The kind of each hierarchy that limits memory, and the own path in it."""
    for number, controllers, path in _found(GROUP, proc / "self" / "cgroup"):
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def _found(pattern: re.Pattern[str], path: Path) -> list[tuple[str, ...]]:
    """The groups of each line of a file that the pattern fits."""
    return [fit.groups() for line in _lines(path) if (fit := pattern.fullmatch(line))]


def _left_in(directory: Path, kind: str) -> Iterator[Memory]:
    """The bytes that each limit of one cgroup leaves; none where it has no limit."""
    for name in LIMITS[kind]:
        # "max" where there is none; a number beyond all memory in v1.
        if (limit := _number(directory / name)) is not None:
            counts = dict(_numbers(directory / "memory.stat"))
            kept = (_number(directory / USED[kind]) or 0) - sum(counts.get(n, 0) for n in PAGE_CACHE[kind])
            yield Memory(max(limit - max(kept, 0), 0), f"what {directory / name} leaves")


def _number(path: Path) -> int | None:
    (first, *_) = (*_lines(path), "")
    return int(first) if first.isdecimal() else None


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """Names and numbers of a file that has one of each in a line."""
    for line in _lines(path):
        name, number, *_ = (*line.split(), "", "")
        if number.isdecimal():
            yield name, int(number)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _whole_pages(size_bytes: int) -> int:
    return size_bytes // ALIGN_BYTES * ALIGN_BYTES
