"""Leased blocks: blocks held in DRAM for this client, read where they lie or copied out.

A lease has a token, by which another client of the tenant may have it too. Worst case: the hold ends while
bytes are copied, which `check` tells afterwards.
"""

from collections.abc import Sequence
from functools import partial
from typing import Self

import numpy as np

from ctxcache.client.access import AccessStream, ArenaAttachment, ClockPair, Hold, acquire
from ctxcache.client.arena import Bytes
from ctxcache.client.block_bytes import Array, BlockData, PartMemory, check_sizes, parts_of
from ctxcache.errors import LeaseNotFound
from ctxcache.v1 import block_pb2
from ctxcache.v1.arena_pb2 import Operation, OperationResult


class LeasedBlocks:
    """Blocks held in DRAM, which may be read until `release`. A context manager.

    `token` names the lease for other connections of the tenant, 16 bytes; empty where no block is held.
    """

    def __init__(self, attachment: ArenaAttachment, lease: block_pb2.BlockLease, hold: Hold) -> None:
        self.token = lease.token
        self._arena = attachment.arena.readable
        self._blocks = lease.blocks
        self._hold = hold

    def __len__(self) -> int:
        """How many keys were asked for."""
        return len(self._blocks)

    def parts(self, number: int) -> list[Bytes] | None:
        """The parts of the key of that number where they lie, not verified; None where no block is there.

        Valid while `check` raises nothing.
        """
        block = self._blocks[number]
        # Every block has bytes: one without a place is not there, and one on SSD has none in DRAM.
        if not block.offset_bytes or block.HasField("path_index"):
            return None
        return [
            self._arena[begin : begin + size_bytes]
            for begin, size_bytes in zip(block.offset_bytes, block.part_bytes, strict=True)
        ]

    def copy(
        self, number: int, into: BlockData | None = None, *, is_verified: bool = True
    ) -> list[Array] | None:
        """Copy a block's parts out, to new arrays by default; None for a block that is not there.

        An empty list for a block whose bytes are not what its writer said. Call `check` afterwards. Raises
        InvalidArgument.
        """
        parts = None if into is None else parts_of(into, "into", is_written=True)
        return self.copied(number, parts, is_verified=is_verified)

    def copied(self, number: int, into: list[PartMemory] | None, *, is_verified: bool) -> list[Array] | None:
        """As `copy`, to memory that the caller has checked."""
        parts = self.parts(number)
        if parts is None:
            return None
        targets = memory_for(into, [part.size for part in parts])
        checksums = self._blocks[number].checksums
        for target, part, checksum in zip(targets, parts, checksums, strict=True):
            if target.copy_out(part, is_summed=is_verified) != checksum and is_verified:
                return BAD
        return [array for target in targets for array in target.arrays]

    def left_on_ssd(self) -> list[tuple[int, block_pb2.BlockLocation]]:
        """The blocks that were left on SSD, by the number of their keys."""
        return [(i, block) for i, block in enumerate(self._blocks) if block.HasField("path_index")]

    def check(self) -> None:
        """Raise LeaseNotFound unless the lease holds."""
        self._hold.check()

    def release(self) -> None:
        """End the lease, without waiting."""
        if self.token:
            self._hold.release_soon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


BAD: list[Array] = []
"""Stands for a block whose bytes are not what its writer said."""


def memory_for(into: list[PartMemory] | None, sizes: Sequence[int]) -> list[PartMemory]:
    """`into`, or new memory where it is None, for parts of these sizes. Raises InvalidArgument."""
    place = [PartMemory([np.empty(size, np.uint8)]) for size in sizes] if into is None else into
    check_sizes(place, sizes)
    return place


def lease_blocks(attachment: ArenaAttachment, request: block_pb2.LeaseBlocksRequest) -> LeasedBlocks:
    """Acquire the lease that a request describes. Raises as `BlockCalls.lease`."""
    # Only `release` ends a lease whose token another client may have.
    is_own = not (request.token or request.outlives_connection)

    def hold_of(sent: ClockPair, result: OperationResult) -> Hold:
        return block_hold(attachment.stream, sent, result.leased_blocks, is_own=is_own)

    result, hold = acquire(attachment.stream, Operation(lease_blocks=request), hold_of)
    return LeasedBlocks(attachment, result.leased_blocks, hold)


def block_hold(
    stream: AccessStream,
    sent: ClockPair,
    lease: block_pb2.BlockLease | block_pb2.LookupBlocksResponse,
    *,
    is_own: bool = True,
) -> Hold:
    """The hold of a lease's token. `sent` is the time of the request for it."""
    release = Operation(release_blocks=block_pb2.ReleaseBlocksRequest(token=lease.token))
    ended = partial(LeaseNotFound, lease_id=lease.token.hex())
    deadline_ns = sent.deadline_ns(lease.expire_time)
    return Hold(stream, deadline_ns, release, ended, is_own=is_own and bool(lease.token))
