"""Devices: lanes and buffers of the place where the engine's cache is. The only border to a device's own terms.

Knows none of them (`devices.py`, `cuda.py`). Worst case: a device that fails, which is every waiter's error.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gpu_worker.pipeline.lane import Event, HostLane, Lane


class Device(ABC):
    """Where the engine's cache is."""

    device: torch.device
    is_unified: bool
    """Whether work on the device reads the host's buffers in place, so that nothing is copied onto it."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """A lane whose work runs on the device."""

    @abstractmethod
    def host_buffer(self, size_bytes: int) -> Tensor:
        """A buffer [size_bytes] uint8 on the host, from which the device can copy by itself."""

    @abstractmethod
    def device_buffer(self, size_bytes: int) -> Tensor:
        """A buffer [size_bytes] uint8 on the device."""

    @abstractmethod
    def mark(self) -> Event:
        """The end of what the calling thread has issued to the device so far."""

    def host_lane(self, name: str) -> Lane:
        """A lane whose work the host does."""
        return HostLane(name)
