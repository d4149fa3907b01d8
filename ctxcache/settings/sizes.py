"""Default sizes of the tiers, from what the machine has."""

import os
import shutil
from pathlib import Path

from ctxcache.format.layout import ALIGN_BYTES, align
from ctxcache.settings.config import ARENA_CAP_BYTES, MIB, SSD_CAP_BYTES
from ctxcache.storage.tiers.shared_memory import HUGE_PAGE_BYTES

ARENA_SHARE = 4
SSD_SHARE = 5
LEAST_BYTES = 64 * MIB


# Defaults for a machine that others use as well: a quarter of what is available, and never more than the
# caps.
def arena_bytes(directory: Path) -> int:
    """A quarter of the memory available or half of what the tmpfs has free, at most 8 GiB.

    Whole huge pages.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = min(_memory_available(available) // ARENA_SHARE, shutil.disk_usage(directory).free // 2)
    return min(max(wanted, LEAST_BYTES), ARENA_CAP_BYTES) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def ssd_bytes(directory: Path, file_name: str) -> int:
    """The size of the file that is there, else a fifth of the free space, at most 32 GiB: whole pages."""
    file = directory / file_name
    # An empty one is what is left of a start that was killed before it had allocated anything.
    if file.exists() and (present_bytes := file.stat().st_size):
        return align(present_bytes)
    wanted = shutil.disk_usage(directory).free // SSD_SHARE
    return _whole_pages(min(max(wanted, LEAST_BYTES), SSD_CAP_BYTES))


def _memory_available(otherwise: int) -> int:
    """Linux's own estimate of what can be had without swapping, page cache counted in."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return otherwise
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else otherwise


def _whole_pages(size_bytes: int) -> int:
    return size_bytes // ALIGN_BYTES * ALIGN_BYTES
