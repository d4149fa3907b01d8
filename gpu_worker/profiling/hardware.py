"""The hardware's name, under which its profiles are kept. Worst case: a machine that does not say."""

import os
import platform
import re
from pathlib import Path

import torch


def hardware_name(device: torch.device) -> str:
    """Name what computes: the GPU, or the CPU with the number of threads that it uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{cpu}, {min(torch.get_num_threads(), os.cpu_count() or 1)} threads"
