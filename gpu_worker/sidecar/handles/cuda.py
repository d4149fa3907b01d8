"""Memory of a GPU: opened by CUDA IPC or as a VMM allocation, through the driver alone.

Both ends of a handle are on one host. The order of calls is tested with another driver. Worst case: a step
fails, with what the driver says, and what the steps before it opened is closed again.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument
from gpu_worker.kernels.libcuda import IPC_HANDLE_BYTES, NO_IPC, Libcuda


class Driver(Protocol):
    """The calls of CUDA's driver that are needed. Each raises OSError with the driver's message."""

    def use(self, device: int) -> None:
        """Make the device's primary context current in this thread."""

    def uuid(self, device: int) -> bytes:
        """A device's UUID, 16 bytes."""

    def open_ipc(self, handle: bytes) -> int:
        """Map an allocation of another process; its address."""

    def close_ipc(self, address: int) -> None:
        """Unmap the allocation at an address."""

    def allocation_bytes(self, address: int) -> int:
        """Bytes from the address to the end of its allocation."""

    def import_descriptor(self, fd: int) -> int:
        """An allocation's handle, from a POSIX file descriptor."""

    def release(self, handle: int) -> None:
        """Give an allocation's handle back."""

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses."""

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Give addresses back."""

    def map(self, address: int, size_bytes: int, handle: int, device: int) -> None:
        """Map an allocation there, readable and writable from the device."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap addresses."""

    def granularity(self, device: int) -> int:
        """The granularity of allocations, in bytes."""


Show = Callable[[int, int, int], Tensor]
"""(address, size in bytes, device) -> [size] uint8 on the device, owned by nobody."""


class DeviceMemory:
    """Mapped memory of a GPU. `data` is [size] uint8; `close` unmaps it, even while tensors show it."""

    def __init__(
        self,
        data: Tensor,
        size_bytes: int,
        opened: ExitStack,
        *,
        identity: Hashable = None,
        begin_bytes: int = 0,
        kin: Hashable = None,
    ) -> None:
        self.data, self.size_bytes, self._opened = data, size_bytes, opened
        self.identity, self.begin_bytes, self.kin = identity, begin_bytes, kin

    def check(self) -> None:
        """Memory of a GPU does not shrink."""

    def close(self) -> None:
        """Unmap the memory."""
        self._opened.close()


# Steps of opening, each with the one that undoes it; a step that fails undoes those before it, in reverse:
#
#     cuda_ipc    open handle ── close                    the whole allocation, at one address
#     cuda_vmm    import ── release, reserve ── free, map ── unmap        the descriptor is closed in any case
class CudaOpener:
    """Opens what other processes share of one GPU's memory."""

    def __init__(self, device: int, driver: Driver | None = None, show: Show | None = None) -> None:
        """Raises Unavailable where there is no driver."""
        self._device = device
        self._driver = driver or Libcuda()
        self._show = show or show_device_memory

    def open_ipc(
        self, handle: bytes, uuid: bytes, offset_bytes: int, size_bytes: int, field: str
    ) -> DeviceMemory:
        """Open a CUDA IPC handle. Raises InvalidArgument."""
        if len(handle) != IPC_HANDLE_BYTES or offset_bytes < 0:
            raise InvalidArgument(field=field, problem=_wrong(handle, offset_bytes))
        with ExitStack() as opened, _driver_errors(field):
            self._begin(uuid, field)
            address = self._driver.open_ipc(handle)
            opened.callback(self._close, self._driver.close_ipc, address)
            # The allocation's size by the driver, not the engine's
            # word: a kernel beyond it would fault on the device.
            there = self._driver.allocation_bytes(address)
            if there < offset_bytes + size_bytes:
                problem = f"{there:,} bytes are there, {offset_bytes + size_bytes:,} were said"
                raise InvalidArgument(field=field, problem=problem)
            data = self._show(address + offset_bytes, size_bytes, self._device)
            kept = opened.pop_all()
        # A handle that is opened again has the same address, so addresses tell memory apart.
        return DeviceMemory(
            data, size_bytes, kept, identity=("cuda", self._device), begin_bytes=address + offset_bytes
        )

    def open_vmm(self, fd: int, uuid: bytes, size_bytes: int, field: str) -> DeviceMemory:
        """Open an exported allocation; takes the descriptor over. Raises InvalidArgument."""
        with ExitStack() as opened, _driver_errors(field):
            opened.callback(os.close, fd)  # the allocation lives by its handle
            self._begin(uuid, field)
            handle = self._driver.import_descriptor(fd)
            opened.callback(self._close, self._driver.release, handle)
            step = self._driver.granularity(self._device)
            # The driver maps multiples of its granularity (2 MiB as a rule).
            whole = -(-size_bytes // step) * step
            address = self._driver.reserve(whole)
            opened.callback(self._close, self._driver.free_addresses, address, whole)
            # Fails where the allocation is smaller: the driver knows its size, nobody else does.
            self._driver.map(address, whole, handle, self._device)
            opened.callback(self._close, self._driver.unmap, address, whole)
            data = self._show(address, size_bytes, self._device)
            kept = opened.pop_all()
        # Each export has a descriptor of its own: nothing says whose allocation it is.
        return DeviceMemory(data, size_bytes, kept, kin=("cuda_vmm", self._device))

    def _begin(self, uuid: bytes, field: str) -> None:
        self._driver.use(self._device)
        mine = self._driver.uuid(self._device)
        if uuid and uuid != mine:
            problem = f"lies on GPU {uuid.hex()}, this worker computes on {mine.hex()}"
            raise InvalidArgument(field=field, problem=problem)

    def _close(self, call: Callable[..., None], *arguments: int) -> None:
        self._driver.use(self._device)
        call(*arguments)


def _wrong(handle: bytes, offset_bytes: int) -> str:
    """The fault of a handle, and the remedy. Torch's handles begin with a version and a letter."""
    if offset_bytes < 0:
        return f"begins at {offset_bytes} of its allocation"
    kind = handle[1:2]
    if kind == b"e" and len(handle) != IPC_HANDLE_BYTES:
        return f"is of torch's expandable segments. {NO_IPC}"
    if kind == b"c" and len(handle) == IPC_HANDLE_BYTES + 2:
        return f"is torch's: CUDA's {IPC_HANDLE_BYTES} bytes are those behind the first 2"
    return f"a handle has {IPC_HANDLE_BYTES} bytes, this one {len(handle)}"


@contextmanager
def _driver_errors(field: str) -> Iterator[None]:
    """Turn what the driver says into the field's error."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(field=field, problem=f"cannot be opened: {error}") from error


class _Shown:
    """Device memory in the form that torch reads: the CUDA array interface, version 3."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            # The flag says whether it is read-only.
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def show_device_memory(address: int, size_bytes: int, device: int) -> Tensor:
    """Memory at an address of a GPU as [size] uint8."""
    return torch.as_tensor(_Shown(address, size_bytes), device=f"cuda:{device}")
