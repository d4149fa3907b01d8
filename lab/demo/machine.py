"""The machine that figures were measured on. Worst case: a fact that is not known is empty or 0."""

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a figure depends on, besides other users of the machine."""

    cpu: str
    physical_core_count: int
    thread_count: int
    memory_bytes: int
    platform: str
    python: str
    torch: str
    transformers: str
    ctxcache: str

    @property
    def title(self) -> str:
        """One line for captions."""
        return f"{self.cpu or self.platform}, {self.thread_count} threads, torch {self.torch}"


def this_machine() -> Machine:
    """Return the facts; `thread_count` is what torch is set to now."""
    cpuinfo = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Machine(
        cpu=model[1].strip() if model else platform.processor(),
        physical_core_count=physical_core_count(cpuinfo),
        thread_count=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        platform=f"{platform.system()} {platform.machine()}",
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch.__version__,
        transformers=transformers.__version__,
        ctxcache=version("ctxcache"),
    )


def physical_core_count(cpuinfo: str | None = None) -> int:
    """Return how many cores, not hyperthreads, this process may use; at least 1."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    packages = re.findall(r"^physical id\s*:\s*(\d+)$", text, re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", text, re.MULTILINE)
    usable = len(os.sched_getaffinity(0))
    known = len(set(zip(packages, cores, strict=False))) or usable
    return max(1, min(known, usable))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
