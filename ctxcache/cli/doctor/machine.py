"""The machine around the server: files it may open, memory nodes, swap, the clock, what kind of disk, odd settings.

Reads what the kernel says. Worst case: a kernel that says nothing, which is reported as unknown and never as wrong.
"""

import ctypes
import os
import resource
from pathlib import Path

from ctxcache.cli.doctor.disk import existing
from ctxcache.cli.doctor.finding import Finding, degraded, ok
from ctxcache.runtime.clock import StoreClock
from ctxcache.settings.config import Settings

NODES = Path("/sys/devices/system/node")
SWAPS = Path("/proc/swaps")
FAR_OFF_S = 60.0
"""Less than this is not worth a word."""
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
BLOCK = Path("/sys/dev/block")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
TIMEX_BYTES, TIME_ERROR = 512, 5
OWN_FILES = 512
"""RocksDB's, the SSD files', logs and sockets that listen, with room to spare."""


def open_files(settings: Settings) -> Finding:
    """May it open as many files as settings admit connections."""
    # A server raises its own limit as far as it may.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = 2 * settings.max_connections + settings.max_local_clients + settings.max_bulk_connections
    needed = OWN_FILES + connections
    found = (
        f"{'unlimited' if hard == resource.RLIM_INFINITY else hard} may be open, {needed} are needed at most"
    )
    if hard != resource.RLIM_INFINITY and hard < needed:
        advice = f"raise it to {needed} (ulimit -Hn, LimitNOFILE=), or lower --max-connections, --max-local-clients and --max-bulk-connections"
        return degraded("open files", found, "fewer connections than settings admit", advice)
    return ok("open files", found, "every connection that settings admit")


def memory_nodes(root: Path = NODES) -> Finding:
    """Is all memory equally near."""
    count = sum(1 for _ in root.glob("node[0-9]*")) if root.is_dir() else 0
    if count > 1:
        advice = "run the server and its workers on the node of the GPU: numactl --cpunodebind=N --membind=N"
        return degraded("NUMA", f"{count} nodes", "memory of whichever node touches it first", advice)
    return ok("NUMA", "one node" if count else "unknown", "all memory alike")


def swap(path: Path = SWAPS) -> Finding:
    """Can the kernel take the arena out of memory."""
    try:
        areas = [line.split()[0] for line in path.read_text().splitlines()[1:]]
    except OSError:
        return ok("swap", "unknown", "memory as the kernel has it")
    if areas:
        advice = "swapoff, or vm.swappiness=0, or huge pages of the pool, which are never swapped"
        return degraded("swap", f"on: {', '.join(areas)}", "an arena that the kernel may swap out", advice)
    return ok("swap", "off", "an arena that stays in memory")


def store_time(settings: Settings) -> Finding:
    """Is the wall clock where the store's time is, which a running server has noted within the last minute."""
    ahead_s = StoreClock.open(settings.data_directory).wall_ahead_ns() / 1e9
    if abs(ahead_s) < FAR_OFF_S:
        return ok("time of the store", "the wall clock's", "the time since boot")
    found = f"the wall clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} it: it was set, or wrong"
    return degraded(
        "time of the store",
        found,
        "the store's time, by which sessions live on",
        "look after the time server",
    )


def clock(source: Path = CLOCK_SOURCE) -> Finding:
    """Is the clock, by which times are told, kept right, and quick to read."""
    is_kept = _is_synchronised()
    kind = source.read_text().strip() if source.is_file() else "unknown"
    found = f"{'synchronised' if is_kept else 'not synchronised'}, source {kind}"
    if kind in SLOW_CLOCKS:
        return degraded("clock", found, "a clock that is slow to read", "boot with clocksource=tsc")
    if not is_kept:
        advice = "run chrony or systemd-timesyncd: times are told and taken by this clock"
        return degraded("clock", found, "this clock as it is", advice)
    return ok("clock", found, "this clock")


def disk_kind(directory: Path, root: Path = BLOCK) -> Finding:
    """Is it a disk without moving parts."""
    name = f"disk of {directory}"
    try:
        device = existing(directory).stat().st_dev
        place = (root / f"{os.major(device)}:{os.minor(device)}").resolve()
        # A partition's queue is its disk's.
        queue = next(path / "queue" for path in (place, place.parent) if (path / "queue").is_dir())
        is_rotational = (queue / "rotational").read_text().strip() == "1"
    except (OSError, StopIteration):
        return ok(name, "unknown: no block device of this machine's", "it as it is")
    if is_rotational:
        return degraded(
            name, "it says that it rotates", "it as it is", "choose an SSD with --ssd-directories"
        )
    return ok(name, "no moving parts", "it as it is")


def odd_settings(doubts: list[str]) -> Finding:
    """What is allowed and seldom meant."""
    if doubts:
        return degraded(
            "settings", "; ".join(doubts), "these settings", "docs/settings.md says what each is for"
        )
    return ok("settings", "nothing odd", "these settings")


def _is_synchronised() -> bool:
    """What the kernel was told by whoever keeps its clock; true where it does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return True
    # All zeros: nothing is set.
    state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    return bool(state != TIME_ERROR)
