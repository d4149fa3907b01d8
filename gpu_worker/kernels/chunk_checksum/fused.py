"""`chunk_checksum` in Triton: every 1,024 bytes by a program of their own, then one short chain per chunk.

Source: the XXH3 specification (xxHash, doc/xxhash_spec.md), for inputs above 240 bytes. A block of 1,024
bytes adds 16 stripes to 8 lanes and then scrambles them. The sum of the stripes does not depend on the lanes:

    bytes    [block 0][block 1][block 2] ...      read once, by as many programs as there are blocks
                 │        │        │
    sums      8 words  8 words  8 words           64 bytes for each block
                 └──► lanes ──► lanes ──► lanes   one warp per chunk, or per piece of it

so that a few long chunks fill a device as many short ones do. Lanes of a chunk that goes on in a later piece
stay on the device. Nothing waits for the device. Worst case: one chunk of 32 MiB, whose chain of 32,768
scrambles takes about as long as its bytes take over PCIe (50 GB/s on an H200); chains of other chunks run
beside it.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.chunk_checksum.reference import BLOCK_BYTES, ChunkPiece, Places, Sums

BLOCKS = 4
LANES = 8
# The table on the device has a row of _FIELDS = 6 int64 for each piece:
#
#     offset   size   begin in chunk   total of chunk   first row in `sums`   slot in `states`
FIRST_STATES = 16
"""Chunks that may be unfinished at a time before more room is made."""
_FIELDS = tl.constexpr(6)
_STAGES = tl.constexpr(8)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LANES = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
    0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
"""The first values of the lanes."""
_PRIME_32 = tl.constexpr(0x9E3779B1)
_PRIME_64 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_MIX = tl.constexpr(0x165667919E3779F9)


class _Table(NamedTuple):
    """Pieces as kernels read them, `rows` on the device, and what their launch needs.

    `sums` and `checksums` are written to anew by each launch: launches of one stream run in order.
    """

    pieces: Sequence[ChunkPiece]
    data_bytes: int
    rows: Tensor
    most_blocks: int
    are_last: list[bool]
    sums: Tensor
    checksums: Tensor


class ChunkSums:
    """See the reference."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # 24 words of the secret, then the 8 first lanes: kernels find the lanes at word 24.
        self._words = _words(device)
        self._states = torch.zeros(FIRST_STATES, LANES, dtype=torch.int64, device=device)
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(FIRST_STATES))
        self._places = Places()
        # By the identity of the pieces, which the table keeps: to hash them takes as long as to launch.
        self._tables: dict[int, _Table] = {}

    def add(self, data: Tensor, pieces: Sequence[ChunkPiece]) -> Sums:
        """See the reference. A tuple of whole chunks is looked at once, however often it comes."""
        table = self._tables.get(id(pieces))
        if table is None or table.data_bytes != data.nbytes:
            self._places.take(data, pieces)
            if not pieces:
                return list
            table = self._table(data, pieces)
        # Signed words of 64 bits, which torch has; kernels take the same bits as unsigned ones.
        words = data[: data.nbytes // 8 * 8].view(torch.int64)
        # One grid for all pieces, as wide as the longest; programs beyond a shorter piece's end are masked.
        if table.most_blocks:
            _block_sums[triton.cdiv(table.most_blocks, BLOCKS), len(pieces)](
                words, table.rows, self._words, table.sums, BLOCKS=BLOCKS
            )
        _chunk_ends[(len(pieces),)](
            words, data, table.rows, self._words, table.sums, self._states, table.checksums, num_warps=1
        )
        return self._to_host(table.checksums, table.are_last)

    def _table(self, data: Tensor, pieces: Sequence[ChunkPiece]) -> _Table:
        rows, first = [], 0
        counts = [_block_count(piece) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            rows.append((piece.offset, piece.size, piece.begin, piece.total, first, self._slot(piece)))
            first += count
        table = _Table(
            pieces,
            data.nbytes,
            self._on_device(rows),
            max(counts),
            [piece.is_last for piece in pieces],
            sums=torch.empty(max(first, 1), LANES, dtype=torch.int64, device=self._device),
            checksums=torch.empty(len(pieces), dtype=torch.int64, device=self._device),
        )
        # Whole chunks keep no lanes from batch to batch: the same pieces have the same table in every layer.
        if isinstance(pieces, tuple) and all(piece.begin == 0 and piece.is_last for piece in pieces):
            self._tables[id(pieces)] = table
        return table

    def _slot(self, piece: ChunkPiece) -> int:
        """Where a chunk's lanes stay between two pieces; any place where there is one piece alone."""
        slot = self._slots.pop(piece.chunk, None)
        if piece.is_last:
            if slot is not None:
                # Later work on this stream alone writes there again.
                self._free.append(slot)
            return slot or 0
        if slot is None:
            if not self._free:
                count = len(self._states)
                # Kernels under way write to the former tensor, and are
                # copied from it: both are of one stream, in order.
                self._states = torch.cat((self._states, torch.zeros_like(self._states)))
                self._free = list(range(count, 2 * count))
            slot = self._free.pop()
        self._slots[piece.chunk] = slot
        return slot

    def _on_device(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        return table.to(self._device, non_blocking=True)

    def _to_host(self, checksums: Tensor, is_last: Sequence[bool]) -> Sums:
        is_pinned = self._device.type == "cuda"
        on_host = torch.empty(checksums.shape, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        # The caller's event says when this copy has ended: this function waits for nothing.
        on_host.copy_(checksums, non_blocking=True)

        def read() -> list[int]:
            # Digests are unsigned in XXH3, and in the store's tables.
            numbers = on_host.numpy().view(np.uint64).tolist()
            return [number for number, ends in zip(numbers, is_last, strict=True) if ends]

        return read


def _block_count(piece: ChunkPiece) -> int:
    """Blocks of a piece that are scrambled: the last block of a chunk never is, not even a whole one."""
    # A chunk of 3 * 1,024 bytes in pieces of 2,048 and 1,024:
    #
    #     block      0          1          2
    #     piece      └── 0 ───────────┘    └─ 1 ─┘
    #     scrambled  yes        yes        no: XXH3 ends within the last block, by its last 64 bytes
    #
    # Without `total - 1` a chunk of whole blocks would be scrambled once too often.
    return ((piece.total - 1) if piece.is_last else piece.begin + piece.size) // BLOCK_BYTES - (
        piece.begin // BLOCK_BYTES
    )


def _words(device: torch.device) -> Tensor:
    """The secret's 24 words, then the 8 of the lanes."""
    words = [int.from_bytes(_SECRET[i : i + 8], "little") for i in range(0, len(_SECRET), 8)]
    signed = [word - (1 << 64) if word >> 63 else word for word in (*words, *_LANES)]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _key(secret_at, word):
    return tl.load(secret_at + word).to(tl.uint64, bitcast=True)


@triton.jit
def _unaligned_key(secret_at, word, BYTES: tl.constexpr):
    """Words that begin BYTES behind a word's begin."""
    return (_key(secret_at, word) >> (8 * BYTES)) | (_key(secret_at, word + 1) << (64 - 8 * BYTES))


@triton.jit
def _added(value, swapped, key):
    """The sum that a lane's word and its neighbour's add to the lane."""
    key = key ^ value
    return swapped + (key & 0xFFFFFFFF) * (key >> 32)


@triton.jit
def _count(size, begin, total):
    """Blocks of a piece that are scrambled, see `_block_count`."""
    end = tl.where(begin + size == total, total - 1, begin + size)
    return end // 1024 - begin // 1024


@triton.jit
def _block_sums(words_at, pieces_at, secret_at, sums_at, BLOCKS: tl.constexpr):
    """The 8 words [blocks, 8] that the stripes of each block add to the lanes."""
    piece = pieces_at + tl.program_id(1) * _FIELDS
    offset, size = tl.load(piece), tl.load(piece + 1)
    count = _count(size, tl.load(piece + 2), tl.load(piece + 3))
    first = tl.load(piece + 4)
    lane, stripe = tl.arange(0, 8), tl.arange(0, 16)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    # Stripe s of a block is keyed by the 8 words of the secret from word s on:
    #
    #     [BLOCKS, 16 stripes, 8 lanes] words of 8 bytes  ──► sum over the stripes ──► [BLOCKS, 8]
    is_there = block < count
    keys = _key(secret_at, stripe[:, None] + lane[None, :])
    # A lane gets its neighbour's word as it is, and its own word as a product.
    place = offset // 8 + stripe[None, :, None] * 8 + block[:, None, None] * 128
    value = _load(words_at + (place + lane[None, None, :]), is_there[:, None, None])
    # Neighbours are lanes 0 and 1, 2 and 3, and so on.
    swapped = _load(words_at + (place + (lane ^ 1)[None, None, :]), is_there[:, None, None])
    sums = tl.sum(_added(value, swapped, keys[None, :, :]), 1)
    to = sums_at + (first + block)[:, None] * 8 + lane[None, :]
    tl.store(to, sums.to(tl.int64, bitcast=True), mask=is_there[:, None])


@triton.jit
def _chunk_ends(words_at, bytes_at, pieces_at, secret_at, sums_at, states_at, checksums_at):
    """Scramble a chunk's lanes block by block, to its checksum, or to its lanes for the next piece."""
    piece = pieces_at + tl.program_id(0) * _FIELDS
    offset, size, begin, total = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    first, slot = tl.load(piece + 4), tl.load(piece + 5)
    count = _count(size, begin, total)
    lane, stripe = tl.arange(0, 8), tl.arange(0, 16)
    # The secret's last 64 bytes, words 16 to 23.
    scrambling = _key(secret_at, 16 + lane)
    state = states_at + slot * 8 + lane
    lanes = _key(secret_at, 24 + lane)
    # Only a chunk that goes on has lanes of its own; a slot's former lanes belong to another chunk.
    if begin > 0:
        lanes = tl.load(state).to(tl.uint64, bitcast=True)
    # Each scramble needs the one before it, and takes 20 ns: sums are loaded _STAGES blocks ahead of it.
    at = sums_at + first * 8 + lane
    for number in tl.range(0, count, num_stages=_STAGES, loop_unroll_factor=_STAGES):
        sums = tl.load(at + number * 8).to(tl.uint64, bitcast=True)
        added = lanes + sums
        lanes = (added ^ (added >> 47) ^ scrambling) * _PRIME_32
    if begin + size < total:
        tl.store(state, lanes.to(tl.int64, bitcast=True))
    else:
        # The stripes behind the last scrambled block: all whole ones but that which ends the chunk.
        word = (offset // 8 + count * 128) + stripe[:, None] * 8
        is_there = (stripe < (size - 1 - count * 1024) // 64)[:, None]
        value = _load(words_at + (word + lane[None, :]), is_there)
        swapped = _load(words_at + (word + (lane ^ 1)[None, :]), is_there)
        keys = _key(secret_at, stripe[:, None] + lane[None, :])
        lanes += tl.sum(tl.where(is_there, _added(value, swapped, keys), 0), 0)
        # The last 64 bytes, wherever they begin; some were in the stripe before already.
        byte = tl.arange(0, 8)
        tail = bytes_at + offset + size - 64
        value = tl.sum(
            tl.load(tail + (lane * 8)[:, None] + byte[None, :]).to(tl.uint64)
            << (byte * 8).to(tl.uint64)[None, :],
            1,
        )
        swapped = tl.sum(
            tl.load(tail + ((lane ^ 1) * 8)[:, None] + byte[None, :]).to(tl.uint64)
            << (byte * 8).to(tl.uint64)[None, :],
            1,
        )
        # The specification keys the last stripe by the secret from byte 121 on, 7 bytes before its last 64.
        lanes += _added(value, swapped, _unaligned_key(secret_at, 15 + lane, 1))
        # The merge takes the secret from byte 11 on.
        even, odd = tl.split(tl.reshape(lanes ^ _unaligned_key(secret_at, 1 + lane, 3), (4, 2)))
        checksum = total.to(tl.uint64) * _PRIME_64 + tl.sum((even * odd) ^ tl.umulhi(even, odd), 0)
        # XXH3's avalanche.
        checksum = (checksum ^ (checksum >> 37)) * _PRIME_MIX
        checksum = checksum ^ (checksum >> 32)
        tl.store(checksums_at + tl.program_id(0), checksum.to(tl.int64, bitcast=True))
