"""The GPU side: what a worker on this machine would find. The server itself needs none of it.

Imports nothing that touches a device: torch is only looked for, and kvikio is asked in a process of
its own with a time limit, since it may hang where a driver is half there.
"""

import ctypes
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ctxcache.cli.doctor.finding import Finding, degraded, missing, ok

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
