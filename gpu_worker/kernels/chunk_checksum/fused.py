"""`chunk_checksum` in Triton: one program per chunk, as many chunks at a time as the device has room for.

Source: the XXH3 specification (xxHash, doc/xxhash_spec.md), for inputs above 240 bytes. A block of 1024
bytes adds 16 stripes to 8 lanes and then scrambles them; what the stripes add does not depend on the lanes,
so BLOCKS blocks are loaded and multiplied at once and only the scrambles follow one another. Chunks of 240
bytes or fewer, which have rules of their own, are left to the host. Worst case: few large chunks, which
leave most of the device idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.chunk_checksum import reference

SHORT_BYTES = 240
BLOCKS = 4
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


def chunk_checksum(data: Tensor, offsets: Tensor, sizes: Tensor, seeds: Tensor) -> Tensor:
    """See the reference."""
    reference.check(data, offsets, sizes, seeds)
    checksums = torch.empty_like(sizes)
    is_short = sizes <= SHORT_BYTES
    if bool(is_short.any()):
        checksums[is_short] = reference.chunk_checksum(
            data, offsets[is_short], sizes[is_short], seeds[is_short]
        )
    long = torch.nonzero(~is_short).flatten()
    if len(long):
        words = data[: len(data) // 8 * 8].view(torch.int64)
        _xxh3[(len(long),)](
            words, data, long, offsets, sizes, seeds, _words(data.device),
            checksums, BLOCKS=BLOCKS,
        )  # fmt: skip
    return checksums


def _words(device: torch.device) -> Tensor:
    """The secret's 24 words, then the 8 of the lanes."""
    words = [int.from_bytes(_SECRET[i : i + 8], "little") for i in range(0, len(_SECRET), 8)]
    return torch.tensor(
        [reference.signed(word) for word in (*words, *_LANES)], dtype=torch.int64, device=device
    )


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _key(secret_at, word, seed):
    """Words of the secret as the seed makes them: even ones plus it, odd ones minus it."""
    raw = tl.load(secret_at + word).to(tl.uint64, bitcast=True)
    return tl.where(word % 2 == 0, raw + seed, raw - seed)


@triton.jit
def _unaligned_key(secret_at, word, seed, BYTES: tl.constexpr):
    """Words that begin BYTES behind a word's begin."""
    return (_key(secret_at, word, seed) >> (8 * BYTES)) | (
        _key(secret_at, word + 1, seed) << (64 - 8 * BYTES)
    )


@triton.jit
def _added(value, swapped, key):
    """The sum that a lane's word and its neighbour's add to the lane."""
    key = key ^ value
    return swapped + (key & 0xFFFFFFFF) * (key >> 32)


@triton.jit
def _xxh3(
    words_at,
    bytes_at,
    chunks_at,
    offsets_at,
    sizes_at,
    seeds_at,
    secret_at,
    checksums_at,
    BLOCKS: tl.constexpr,
):
    chunk = tl.load(chunks_at + tl.program_id(0))
    begin, size = tl.load(offsets_at + chunk), tl.load(sizes_at + chunk)
    seed = tl.load(seeds_at + chunk).to(tl.uint64, bitcast=True)
    lane, stripe, block = tl.arange(0, 8), tl.arange(0, 16), tl.arange(0, BLOCKS)
    keys = _key(secret_at, stripe[:, None] + lane[None, :], seed)
    scrambling = _key(secret_at, 16 + lane, seed)
    lanes = tl.load(secret_at + 24 + lane).to(tl.uint64, bitcast=True)
    # The last block is never scrambled, not even a whole one.
    block_count = (size - 1) // 1024
    word = begin // 8 + stripe[:, None] * 8
    for number in range(0, block_count, BLOCKS):
        is_there = (number + block < block_count)[:, None, None]
        # A lane gets its neighbour's word as it is, and its own word as a product.
        place = word[None, :, :] + (number + block).to(tl.int64)[:, None, None] * 128
        value = _load(words_at + (place + lane[None, None, :]), is_there)
        swapped = _load(words_at + (place + (lane ^ 1)[None, None, :]), is_there)
        sums = tl.sum(_added(value, swapped, keys[None, :, :]), 1)
        # Scrambles follow one another; blocks that are not there change no lane.
        for j in tl.static_range(BLOCKS):
            added = lanes + tl.sum(tl.where((block == j)[:, None], sums, 0), 0)
            scrambled = (added ^ (added >> 47) ^ scrambling) * _PRIME_32
            lanes = tl.where(number + j < block_count, scrambled, lanes)
    is_there = (stripe < (size - 1 - block_count * 1024) // 64)[:, None]
    place = word + block_count * 128
    value = _load(words_at + (place + lane[None, :]), is_there)
    swapped = _load(words_at + (place + (lane ^ 1)[None, :]), is_there)
    lanes += tl.sum(tl.where(is_there, _added(value, swapped, keys), 0), 0)
    # The last 64 bytes, wherever they begin; some were in the stripe before already.
    byte = tl.arange(0, 8)
    tail = bytes_at + begin + size - 64
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
    lanes += _added(value, swapped, _unaligned_key(secret_at, 15 + lane, seed, 1))
    # The merge takes the secret from byte 11 on.
    even, odd = tl.split(tl.reshape(lanes ^ _unaligned_key(secret_at, 1 + lane, seed, 3), (4, 2)))
    total = size.to(tl.uint64) * _PRIME_64 + tl.sum((even * odd) ^ tl.umulhi(even, odd), 0)
    # XXH3's avalanche.
    total = (total ^ (total >> 37)) * _PRIME_MIX
    total = total ^ (total >> 32)
    tl.store(checksums_at + chunk, total.to(tl.int64, bitcast=True))
