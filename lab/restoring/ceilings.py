"""Ceilings: what this machine does at most, measured right before what is held against it."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from lab.bench.device import WAYS, Device, best_way
from lab.restoring.figures import Ceilings

_ROUNDS = 5


def ceilings(
    device: torch.device, dtype: torch.dtype, directory: Path, *, size_bytes: int, order: int
) -> Ceilings:
    """Measure copies of `size_bytes` and products of `order`. `directory`: where the store's SSD tier is.

    Rows come onto a GPU from pinned memory; on a CPU they are copied by one thread. Where the file system has
    no direct reads, the SSD has no limit.
    """
    is_cuda = device.type == "cuda"
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    host = np.zeros(size_bytes, np.uint8)
    one, other = (torch.randn(order, order, device=device, dtype=dtype) for _ in range(2))

    def copy() -> None:
        if is_cuda:
            target.copy_(source, non_blocking=True)
        else:
            np.copyto(target.numpy(), source.numpy())

    return Ceilings(
        copy_bytes_per_s=size_bytes / _seconds(copy, device),
        host_copy_bytes_per_s=size_bytes / _seconds(lambda: np.copyto(host, source.numpy()), device),
        ssd_bytes_per_s=_ssd_bytes_per_s(directory, size_bytes),
        flops_per_s=2 * order**3 / _seconds(lambda: one @ other, device),
        checksum_bytes_per_s=size_bytes / _seconds(lambda: xxh3_64_intdigest(host.data), device),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS + 1):
        _settle(device)
        begin = time.perf_counter()
        call()
        _settle(device)
        taken.append(time.perf_counter() - begin)
    # The best: nothing that is held against it may be faster.
    return min(taken[1:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ssd_bytes_per_s(directory: Path, size_bytes: int) -> float:
    data = torch.ones(size_bytes + 4096, dtype=torch.uint8).numpy()
    begin = -data.ctypes.data % 4096
    aligned = data[begin : begin + size_bytes].data
    try:
        with Device(directory, size_bytes) as disk:
            disk.write(aligned, WAYS[0])
            way = best_way(lambda way: disk.read(aligned, way), round_count=2)
            return size_bytes / min(disk.read(aligned, way) for _ in range(3))
    except OSError:
        return float("inf")
