"""The machine: memory, limits, clocks, swap, the server that is there, and GPUs for a worker.

Reads /proc and /sys, and changes nothing. Imports nothing that touches a
device: torch is only looked for, and kvikio is asked in a process of its own with a time limit, since it may
hang where a driver is half there. Worst case: a file that is not there, which is reported as unknown.
"""

import ctypes
import os
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ctxcache.cli.call import CliCall
from ctxcache.cli.doctor import Finding, degraded, missing, ok
from ctxcache.cli.units import counted, human_size
from ctxcache.errors import CacheError, Unavailable
from ctxcache.runtime.clock import StoreClock
from ctxcache.runtime.memory import HUGE_PAGE_BYTES
from ctxcache.runtime.mounts import mount_of
from ctxcache.settings import sizes
from ctxcache.settings.config import Settings
from ctxcache.storage.opening import arena_size
from ctxcache.storage.tiers.shared_memory import free_huge_bytes

RDMA = Path("/sys/class/infiniband")
ROOMY_HUGE = ("always", "within_size", "advise")
NODES = Path("/sys/devices/system/node")
SWAPS = Path("/proc/swaps")
FAR_OFF_S = 60.0
"""A smaller distance of the wall clock is not told."""
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
TIMEX_BYTES, TIME_ERROR = 512, 5
OWN_FILES = 512
"""Files of RocksDB, the SSD files, logs and listening sockets, with room to spare."""
ANSWER_TIMEOUT_S = 5.0


def shared_memory(settings: Settings) -> Finding:
    """Where the arena is to lie, and whether it may be too much for this process."""
    name, directory = "shared memory", settings.arena_directory
    try:
        size = arena_size(settings)
        free = _free_bytes(directory)
    except OSError as error:
        return _unknown(name, error)
    needed, memory = size.size_bytes, sizes.memory_available()
    kind = filesystem(directory)
    state = (
        f"{directory} is {kind}, {human_size(free)} free; the arena takes {human_size(needed)}: {size.bound}"
    )
    if needed > memory.available_bytes and needed > free_huge_bytes():
        return degraded(
            name,
            f"{state}; {human_size(memory.available_bytes)} is {memory.source}",
            "more memory than this process can have: it may be killed",
            "choose a smaller --arena-size-bytes, or give the container more memory",
        )
    if kind != "tmpfs":
        return degraded(
            name, state, "a file on a disk", "choose a directory on a tmpfs with --arena-directory"
        )
    return ok(name, state, "an arena in shared memory, which workers on this host map")


def huge_pages(settings: Settings) -> Finding:
    """Which pages the arena would be made of."""
    name, lines = "huge pages", _meminfo()
    pool = f"{lines.get('HugePages_Total', '?')} of 2 MiB reserved, {human_size(free_huge_bytes())} free"
    huge = _mount_option(settings.arena_directory, "huge")
    pages = f"{pool}; {settings.arena_directory} is mounted with huge={huge}"
    try:
        needed = arena_size(settings).size_bytes
    except OSError as error:
        return _unknown(name, error)
    if settings.arena_huge_pages != "off" and needed % HUGE_PAGE_BYTES == 0 and needed <= free_huge_bytes():
        return ok(name, pages, f"2 MiB pages of the pool for the arena's {human_size(needed)}")
    if huge in ROOMY_HUGE:
        return ok(name, pages, "transparent huge pages, where the kernel has them")
    advice = (
        f"reserve {-(-needed // HUGE_PAGE_BYTES)} pages (sysctl vm.nr_hugepages) and leave "
        "--arena-huge-pages at auto: SSD reads into them are up to twice as fast"
    )
    return degraded(name, pages, "4 KiB pages", advice)


def _unknown(name: str, error: OSError) -> Finding:
    return missing(name, f"unknown: {error.strerror}", "nothing", "see the finding about the arena")


def locked_memory(rdma: Path = RDMA) -> Finding:
    """How much memory may be locked, and who asks for locked memory.

    The store does not, nor does CUDA's driver, which pins on its own account.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else human_size(soft)
    used = (
        "no locked memory: with swap on, the kernel may swap the arena out; workers' pinned staging is "
        "CUDA's, which needs no limit"
    )
    if soft != resource.RLIM_INFINITY and rdma.is_dir() and any(rdma.iterdir()):
        advice = (
            "lift it for workers that read over RDMA, whose registered memory counts: "
            "LimitMEMLOCK=infinity, in containers --ulimit memlock=-1"
        )
        return degraded("memlock limit", f"{limit}, and there are RDMA devices", used, advice)
    return ok("memlock limit", limit, used)


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`."""
    return mount_of(path).kind or "unknown"


def _mount_option(path: Path, option: str) -> str:
    options = dict(item.partition("=")[::2] for item in mount_of(path).options.split(","))
    return options.get(option, "never")


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


def open_files(settings: Settings) -> Finding:
    """May it open as many files as settings admit connections."""
    # A server raises its own limit as far as it may.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two listeners of gRPC, TCP and a Unix socket, have a limit each.
    connections = 2 * settings.max_connections + settings.max_local_clients + settings.max_bulk_connections
    needed = OWN_FILES + connections
    limits = (
        f"{'unlimited' if hard == resource.RLIM_INFINITY else hard} may be open, {needed} are needed at most"
    )
    if hard != resource.RLIM_INFINITY and hard < needed:
        advice = (
            f"raise it to {needed} (ulimit -Hn, LimitNOFILE=), or lower --max-connections, "
            "--max-local-clients and --max-bulk-connections"
        )
        return degraded("open files", limits, "fewer connections than settings admit", advice)
    return ok("open files", limits, "every connection that settings admit")


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
    """Is the wall clock where the store is, by what a running server noted within the last minute."""
    ahead_s = StoreClock.open(settings.data_directory).wall_ahead_ns() / 1e9
    if abs(ahead_s) < FAR_OFF_S:
        return ok("time of the store", "the wall clock's", "the time since boot")
    difference = (
        f"the wall clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} it: it was "
        "set, or wrong"
    )
    return degraded(
        "time of the store",
        difference,
        "the store's time, by which sessions live on",
        "look after the time server",
    )


def clock(source: Path = CLOCK_SOURCE) -> Finding:
    """Is the clock, by which times are told, kept right, and quick to read."""
    is_kept = _is_synchronised()
    kind = source.read_text().strip() if source.is_file() else "unknown"
    state = f"{'synchronised' if is_kept else 'not synchronised'}, source {kind}"
    if kind in SLOW_CLOCKS:
        return degraded("clock", state, "a clock that is slow to read", "boot with clocksource=tsc")
    if not is_kept:
        advice = "run chrony or systemd-timesyncd: times are told and taken by this clock"
        return degraded("clock", state, "this clock as it is", advice)
    return ok("clock", state, "this clock")


def odd_settings(doubts: list[str]) -> Finding:
    """Settings that are allowed and seldom meant."""
    if doubts:
        return degraded(
            "settings",
            "; ".join(doubts),
            "these settings",
            "`ctxcache config reference` says what each is for",
        )
    return ok("settings", "nothing odd", "these settings")


def _is_synchronised() -> bool:
    """The kernel's word on its clock, as the time daemon set it; true where it does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return True
    # A buffer of zeros sets nothing.
    state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    return bool(state != TIME_ERROR)


def server(call: CliCall) -> tuple[Finding, str]:
    """Does a server answer, and is it healthy; and the data directory that it tells, empty without one."""
    name = f"server at {call.target}"
    try:
        with call.but(None, None, min(call.timeout_s, ANSWER_TIMEOUT_S)).client() as client:
            is_healthy, stats = client.admin.health(), client.admin.stats()
    except Unavailable:
        return missing(name, "no answer", "nothing", "start one with `ctxcache serve`"), ""
    except CacheError as error:
        return degraded(name, f"it fails: {error}", "nothing", "see its log"), ""
    answer = (
        f"version {stats.version}, {counted(stats.session_count, 'session')}, data in {stats.data_directory}"
    )
    if not is_healthy:
        problem = f"{answer}; it takes no work"
        return degraded(name, problem, "nothing", "it starts or drains: try again"), stats.data_directory
    return ok(name, f"{answer}; it takes work", "that server"), stats.data_directory


NAME_GPU, NAME_READS, NAME_TORCH = "GPU", "SSD to GPU", "torch"
PROBE_TIMEOUT_S = 20
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
KVIKIO_PROBE = (
    "import kvikio, kvikio.cufile_driver as d; print(kvikio.__version__, bool(d.get('is_gds_available')))"
)
POSIX = "POSIX: direct reads into pinned memory, copied to the GPU from there"


def gpu() -> Finding:
    """Is there a GPU."""
    names = _output(GPU_QUERY)
    if names:
        return ok(NAME_GPU, "; ".join(names.splitlines()), "the GPU, by workers")
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        return degraded(
            NAME_GPU,
            "a driver is loaded, nvidia-smi does not answer",
            "the CPU, by workers",
            "run nvidia-smi to see why",
        )
    return missing(NAME_GPU, "no NVIDIA driver", "the CPU, by workers", "")


def reads_into_gpu() -> Finding:
    """Say how a worker would bring SSD files into the GPU."""
    if not _has_libcuda():
        return missing(
            NAME_READS, "libcuda.so.1 does not load", "memory of the host: there is no GPU to read into", ""
        )
    if find_spec("kvikio") is None:
        return degraded(
            NAME_READS,
            "kvikio is not installed",
            POSIX,
            "pip install 'ctxcache[direct]', for GPUDirect Storage",
        )
    answer = _output((sys.executable, "-c", KVIKIO_PROBE))
    if not answer:
        return degraded(
            NAME_READS, "kvikio does not load, or does not answer", POSIX, "import kvikio by hand to see why"
        )
    kvikio_version, is_gds_available = answer.split()[-2:]
    if is_gds_available == "True":
        return ok(
            NAME_READS,
            f"kvikio {kvikio_version}, GDS is available",
            "GDS: from the disk straight into the GPU",
        )
    return degraded(
        NAME_READS,
        f"kvikio {kvikio_version}, GDS is not available",
        "kvikio's compatibility mode: through the host's memory",
        "load nvidia-fs and use a filesystem that GDS supports",
    )


def torch() -> Finding:
    """Is torch installed."""
    if find_spec("torch") is None:
        used = "the server alone, which needs no torch"
        return missing(NAME_TORCH, "not installed", used, "a worker needs it: pip install 'ctxcache[worker]'")
    try:
        return ok(NAME_TORCH, version("torch"), "torch, by workers")
    except PackageNotFoundError:
        return ok(NAME_TORCH, "installed, version unknown", "torch, by workers")


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _output(command: tuple[str, ...]) -> str:
    """Run a program for what it prints; empty when it is not there, fails or takes too long."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()
