"""What the figures were taken on: processor, memory, kernel, versions, load. Worst case: a fact is `?`."""

import os
import platform
import shutil
import subprocess
import sys
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
    """What is installed of what matters here."""
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
