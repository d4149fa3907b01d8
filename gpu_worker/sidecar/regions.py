"""Regions: the memory of one engine, opened by its handles, as tensors of its layers.

Knows handles and layouts, no model. Owned by the event loop while it is opened and closed. Worst case: one of
the handles is bad; the others are closed again and nothing was written.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType
from gpu_worker.sidecar.cache_layout import Box, CacheLayout, TensorPlace
from gpu_worker.sidecar.handles.cuda import CudaOpener
from gpu_worker.sidecar.handles.host import DescriptorSocket, open_descriptor, open_named
from gpu_worker.v1 import attachment_pb2

REGION_LIMIT = 256
SIZE_LIMIT_BYTES = 1 << 50
TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


class Memory(Protocol):
    """Mapped memory, wherever it is."""

    data: Tensor
    size_bytes: int
    identity: Hashable
    """Equal for mappings of the same memory; None where that cannot be told."""
    begin_bytes: int
    """Where in that memory `data` begins."""
    kin: Hashable
    """Equal for mappings that cannot be told apart; None where `identity` tells."""

    def check(self) -> None:
        """Raise InvalidArgument for less memory than was said."""

    def close(self) -> None:
        """Unmap the memory, or close its file."""


# From an engine's handles to its tensors:
#
#     region (handle, size) ──► Memory: bytes [size], mapped once
#     layout (region, offset, strides) ──► views [blocks, tokens, heads, elements], as_strided, nothing copied
class Opener:
    """Opens regions for a worker that computes on one device."""

    def __init__(self, device: torch.device, descriptors: DescriptorSocket) -> None:
        self._device, self._descriptors = device, descriptors
        self._cuda: CudaOpener | None = None

    def open_all(
        self, regions: Sequence[attachment_pb2.MemoryRegion], field: str, *, is_on_host: bool = False
    ) -> "Regions":
        """Open all or none: memory of the device, or of the host. Raises InvalidArgument."""
        where = "cpu" if is_on_host else self._device.type
        if not 1 <= len(regions) <= REGION_LIMIT:
            problem = f"{len(regions)} is not within [1, {REGION_LIMIT}]"
            raise InvalidArgument(field=field, problem=problem)
        passed = [region.cuda_vmm.descriptor for region in regions if region.HasField("cuda_vmm")]
        # VMM memory has no identity: one allocation that is mapped twice would not be seen to overlap itself.
        if len({(one.ticket, one.index) for one in passed}) < len(passed):
            raise InvalidArgument(field=field, problem="two regions have one descriptor of cuda_vmm")
        with ExitStack() as opened:
            memories = []
            for i, region in enumerate(regions):
                memory = self._open(region, where, f"{field}[{i}]")
                opened.callback(memory.close)
                memories.append(memory)
            # All regions are open: from here on the caller closes them.
            kept = opened.pop_all()
        return Regions(memories, kept)

    def _open(self, region: attachment_pb2.MemoryRegion, where: str, field: str) -> Memory:
        size = region.size_bytes
        if not 1 <= size <= SIZE_LIMIT_BYTES:
            problem = f"{size} is not within [1, {SIZE_LIMIT_BYTES}]"
            raise InvalidArgument(field=f"{field}.size_bytes", problem=problem)
        way = region.WhichOneof("handle")
        on_device = "cuda" if way in ("cuda_ipc", "cuda_vmm") else "cpu"
        # Kernels of a GPU cannot write to the host's memory here, and a save area is read by the host.
        if way and where != on_device:
            problem = f"leads to {on_device} memory, that of {where} is needed"
            raise InvalidArgument(field=f"{field}.{way}", problem=problem)
        match way:
            case "shared_memory_name":
                return open_named(region.shared_memory_name, size, f"{field}.{way}")
            case "memory_descriptor":
                passed = region.memory_descriptor
                fd = self._descriptors.claim(passed.ticket, passed.index, f"{field}.{way}")
                return open_descriptor(fd, size, f"{field}.{way}")
            case "cuda_ipc":
                ipc = region.cuda_ipc
                opener = self._opener()
                return opener.open_ipc(ipc.handle, ipc.device_uuid, ipc.offset_bytes, size, f"{field}.{way}")
            case "cuda_vmm":
                vmm = region.cuda_vmm
                fd = self._descriptors.claim(vmm.descriptor.ticket, vmm.descriptor.index, f"{field}.{way}")
                return self._opener().open_vmm(fd, vmm.device_uuid, size, f"{field}.{way}")
        raise InvalidArgument(field=f"{field}.handle", problem="is missing")

    def _opener(self) -> CudaOpener:
        if self._cuda is None:
            self._cuda = CudaOpener(self._device.index or 0)
        return self._cuda


class Regions:
    """The opened memory of one engine. Close it when nothing writes to it any more."""

    def __init__(self, memories: Sequence[Memory], opened: ExitStack) -> None:
        self._memories, self._opened = list(memories), opened
        self.size_bytes = sum(memory.size_bytes for memory in memories)

    def check(self) -> None:
        """Raise InvalidArgument when memory has become smaller than it was."""
        for memory in self._memories:
            memory.check()

    def bytes_of(self, region: int) -> Tensor:
        """One region [size] uint8."""
        return self._memories[region].data

    def layers(self, layout: CacheLayout) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [blocks, tokens, heads, elements] of each layer, views of the memory."""
        dtype = TORCH_DTYPES[layout.dtype]
        return [(self._view(keys, dtype), self._view(values, dtype)) for keys, values in layout.layers]

    @property
    def kin(self) -> frozenset[Hashable]:
        """Memory that nobody can tell from other memory of its kind."""
        return frozenset(memory.kin for memory in self._memories if memory.kin is not None)

    def covered(self, layout: CacheLayout) -> Iterator[tuple[Hashable, Box]]:
        """The memory that keys and values lie in, and which bytes of it.

        Memory without an identity is left out.
        """
        for place in chain.from_iterable(layout.layers):
            memory, box = self._memories[place.region], place.box
            if memory.identity is not None:
                yield memory.identity, replace(box, offset=memory.begin_bytes + box.offset)

    def close(self) -> None:
        """Unmap the memory. Views of it must not be used any more."""
        # First the tensors, then the mappings: a view that
        # outlives its memory crashes the process that touches it.
        self._memories.clear()
        self._opened.close()

    def _view(self, place: TensorPlace, dtype: torch.dtype) -> Tensor:
        size = place.element_bytes
        data = self._memories[place.region].data
        # A region's end may lie in the middle of an element; the layout's offsets and strides are whole ones.
        elements = data[: len(data) // size * size].view(dtype)
        strides = (*(stride // size for stride in place.stride_bytes), 1)
        return elements.as_strided(place.shape, strides, place.offset_bytes // size)
