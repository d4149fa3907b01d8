"""Which devices there are: the host, and GPUs.

Worst case: a machine without a GPU, on which lanes are threads and the copying lane has nothing to do.
"""

import mmap

import torch
from torch import Tensor

from gpu_worker.pipeline.cuda import Cuda
from gpu_worker.pipeline.device import Device
from gpu_worker.pipeline.lane import Event, HostLane, Lane, passed


class Host(Device):
    """The CPU as the device."""

    def __init__(self, *, is_unified: bool = True) -> None:
        """Without `is_unified`, rows are copied once more, as they are onto a GPU: for tests of that way."""
        self.device = torch.device("cpu")
        self.is_unified = is_unified

    def lane(self, name: str) -> Lane:
        """See Device."""
        return HostLane(name)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device. On a page, where files can be read into it around the page cache."""
        memory = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        begin = -memory.data_ptr() % mmap.PAGESIZE
        return memory[begin : begin + size_bytes]

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def mark(self) -> Event:
        """See Device. What a thread has called on a CPU has ended."""
        return passed()


def device_of(device: torch.device) -> Device:
    """The device by torch's name for it."""
    if device.type == "cuda":
        return Cuda(device)
    return Host()
