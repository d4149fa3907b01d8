"""The machine that figures were taken on: processor, memory, kernel, versions, and what others used of it.

Linux alone. Worst case: a fact is `?`; without /proc, an OSError.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("ctxcache", "grpcio", "protobuf", "numpy", "rocksdict", "redis", "hiredis")


def machine(directory: Path) -> dict[str, object]:
    """Facts about this machine and the disk that holds `directory`."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "core_count": os.cpu_count(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "huge_pages_free": _first("/proc/meminfo", "HugePages_Free"),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "disk": _filesystem(directory),
    }


def versions() -> dict[str, str]:
    """The installed versions of packages that matter here."""
    found = {name: _version(name) for name in _PACKAGES}
    return found | {"redis-server": _redis_server()}


def load() -> list[float]:
    """The load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _redis_server() -> str:
    program = shutil.which("redis-server")
    if program is None:
        return "not installed"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603  its own path
    return next((word[2:] for word in said.stdout.split() if word.startswith("v=")), "?")


def _first(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "?")


def _filesystem(directory: Path) -> str:
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holders = [
        (where, f"{device} {kind}") for device, where, kind in mounts if directory.is_relative_to(where)
    ]
    return max(holders, default=("", "?"))[1]


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAT_IDLE = (3, 4)
_STAT_COUNTED = 8
NOISY_CORES = 0.1
"""Foreign CPU, in cores, above which a figure is called noisy."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU of the machine and of this process' family, in seconds, at an instant of the monotonic clock."""

    time_s: float
    machine_s: float
    family_s: float

    def foreign_cores(self, since: "Usage") -> float:
        """Cores that others kept busy between the two; not below 0, as the clocks differ in grain."""
        foreign_s = (self.machine_s - since.machine_s) - (self.family_s - since.family_s)
        return max(0.0, foreign_s / max(self.time_s - since.time_s, 1e-9))


def usage() -> Usage:
    """Read it now. Children that have ended count with their parent, once it has waited for them."""
    return Usage(time.monotonic(), _machine_s(), _family_s())


def _machine_s() -> float:
    first = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    # Guest time is in user time already.
    counted = [int(ticks) for ticks in first[:_STAT_COUNTED]]
    return sum(ticks for i, ticks in enumerate(counted) if i not in _STAT_IDLE) / _TICKS_PER_S


def _family_s() -> float:
    family = _family()
    ticks = 0
    for process in family:
        fields = _stat(process)
        # utime, stime, and those of children that were waited for.
        ticks += sum(map(int, fields[11:15])) if fields else 0
    return ticks / _TICKS_PER_S


def _family() -> set[int]:
    family = {os.getpid()}
    parents = {
        int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    }
    while True:
        more = {pid for pid, fields in parents.items() if fields and int(fields[1]) in family} - family
        if not more:
            return family
        family |= more


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
