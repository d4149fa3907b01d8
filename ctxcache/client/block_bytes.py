"""Bytes of blocks: arrays of any strides, and memory by its addresses, gathered and scattered without a loop.

    array, MemoryRows, or Scattered ──► one or more arrays ──► copied by numpy, added up in the same pass

Rows are never looped over: an array is one copy, whatever its strides, and of what is scattered each region
is. Knows no connection. Worst case: a part of another size than it should have, which is InvalidArgument
before anything is copied.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from ctxcache.client.arena import Bytes, copied
from ctxcache.errors import InvalidArgument
from ctxcache.format.checksums import rows_checksum

Writing: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Entered around each write to a caller's memory; what it raises ends the call."""
Array: TypeAlias = npt.NDArray[np.generic]


class MemoryRows(NamedTuple):
    """Rows in this process's memory by their address: the first one's, and how far each is from the next.

    `stride_bytes` 0: they follow one another. The memory must stay there while a call, or its future, lasts.
    """

    address: int
    row_count: int
    row_bytes: int
    stride_bytes: int = 0

    def array(self) -> Bytes:
        """The rows where they lie, uint8 [row_count, row_bytes]. Raises InvalidArgument."""
        stride_bytes = self.stride_bytes or self.row_bytes
        if min(self.address, self.row_count, self.row_bytes) < 1 or stride_bytes < self.row_bytes:
            raise InvalidArgument(field="rows", problem=f"{self} are no rows in memory")
        # The last row ends with its bytes, not with its stride: memory behind it may belong to nobody.
        span_bytes = (self.row_count - 1) * stride_bytes + self.row_bytes
        memory = memoryview((ctypes.c_uint8 * span_bytes).from_address(self.address)).cast("B")
        shape = (self.row_count, self.row_bytes)
        return np.ndarray(shape, np.uint8, buffer=memory, strides=(stride_bytes, 1))


Region: TypeAlias = Buffer | Array | MemoryRows


@dataclass(frozen=True, slots=True)
class Scattered:
    """A part whose bytes lie in several regions, in this order: a page of each of a cache's layers."""

    regions: Sequence[Region]


PartData: TypeAlias = Region | Scattered
"""Bytes of a part: a buffer, an array of any shape and strides, which counts in C order, or memory."""
BlockData: TypeAlias = PartData | Sequence[PartData]
"""Bytes of a block, or of each of its parts."""


class PartMemory:
    """Where a part's bytes lie in this process: one array, or several in order."""

    __slots__ = ("arrays", "nbytes")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self.nbytes = sum([array.nbytes for array in arrays])

    def copy_in(self, target: Bytes) -> int:
        """Copy the part to contiguous bytes of its size; returns their XXH3-64."""
        # One run copies and adds up 512 KiB at a time; strides and several regions are copied whole, then
        # added up.
        if len(self.arrays) == 1 and self.arrays[0].flags.c_contiguous:
            return copied(target, _flat(self.arrays[0]))
        begin = 0
        for array in self.arrays:
            np.copyto(_shaped(target[begin : begin + array.nbytes], array), array)
            begin += array.nbytes
        return rows_checksum(target.data)

    def copy_out(self, source: Bytes, *, is_summed: bool) -> int:
        """Copy contiguous bytes of its size to the part; returns their XXH3-64 where that is asked for."""
        if len(self.arrays) == 1 and self.arrays[0].flags.c_contiguous and is_summed:
            # The sum is of the bytes that arrived in the part, and not of the arena, which may change under
            # the copy.
            return copied(_flat(self.arrays[0]), source, of_target=True)
        begin = 0
        for array in self.arrays:
            np.copyto(array, _shaped(source[begin : begin + array.nbytes], array))
            begin += array.nbytes
        return rows_checksum(source.data) if is_summed else 0

    def runs(self, most_bytes: int) -> Iterator[tuple[int, Bytes]]:
        """The part in pieces for messages, each with where it begins."""
        if len(self.arrays) == 1:
            flat = _flat(np.ascontiguousarray(self.arrays[0]))
        else:
            flat = np.empty(self.nbytes, np.uint8)
            self.copy_in(flat)
        for begin in range(0, flat.size, most_bytes):
            yield begin, flat[begin : begin + most_bytes]


def parts_of(data: BlockData, field: str, *, is_written: bool = False) -> list[PartMemory]:
    """A block's parts, which share their memory with what was given.

    `is_written`: it must be memory that may be written to. Raises InvalidArgument.
    """
    # A list is of parts; MemoryRows is a tuple too, and one part.
    given = data if isinstance(data, (list, tuple)) and not isinstance(data, MemoryRows) else [data]
    parts = [_part(cast("PartData", part)) for part in given]
    for part in parts:
        for array in part.arrays:
            if array.dtype.hasobject:
                raise InvalidArgument(field=field, problem="objects are not bytes")
            if is_written and not array.flags.writeable:
                raise InvalidArgument(field=field, problem="is not memory that may be written to")
    return parts


def check_sizes(parts: Sequence[PartMemory], sizes: Sequence[int]) -> None:
    """Raise InvalidArgument unless the parts have these sizes, in bytes."""
    given = [part.nbytes for part in parts]
    if given != list(sizes):
        raise InvalidArgument(field="part_bytes", problem=f"{given} B given, {list(sizes)} B expected")


def _part(data: PartData) -> PartMemory:
    return PartMemory(list(map(_array, data.regions)) if isinstance(data, Scattered) else [_array(data)])


def _array(data: Region) -> Array:
    if isinstance(data, MemoryRows):
        return data.array()
    return data if isinstance(data, np.ndarray) else np.frombuffer(memoryview(data), np.uint8)


def _flat(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _shaped(flat: Bytes, like: Array) -> Array:
    return flat.view(like.dtype).reshape(like.shape)
