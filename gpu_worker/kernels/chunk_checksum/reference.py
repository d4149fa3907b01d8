"""The reference of `chunk_checksum`: XXH3-64 of each chunk with its own seed, on the host."""

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

_SIGN = 1 << 63


def chunk_checksum(data: Tensor, offsets: Tensor, sizes: Tensor, seeds: Tensor) -> Tensor:
    """The checksums [N] of `sizes` [N] bytes at `offsets` [N] of `data` [B] uint8, seeded with `seeds` [N].

    All but the data are int64; seeds and checksums are unsigned numbers in signed clothes, as torch has them.
    Offsets are multiples of 8. Raises ValueError for a chunk that is not within the data.
    """
    check(data, offsets, sizes, seeds)
    raw = data.cpu().numpy()
    digests = [
        xxh3_64_intdigest(raw[offset : offset + size].data, seed=unsigned(seed))
        for offset, size, seed in zip(offsets.tolist(), sizes.tolist(), seeds.tolist(), strict=True)
    ]
    return torch.tensor([signed(digest) for digest in digests], dtype=torch.int64, device=data.device)


def signed(number: int) -> int:
    """An unsigned 64-bit number in signed clothes."""
    return number - 2 * _SIGN if number >= _SIGN else number


def unsigned(number: int) -> int:
    """The number that `signed` was given."""
    return number % (2 * _SIGN)


def check(data: Tensor, offsets: Tensor, sizes: Tensor, seeds: Tensor) -> None:
    """Raise ValueError unless every chunk lies within the data, on a multiple of 8."""
    if data.dtype is not torch.uint8 or data.ndim != 1 or not data.is_contiguous():
        raise ValueError("data are contiguous bytes")
    if not len(offsets) == len(sizes) == len(seeds):
        raise ValueError(f"{len(offsets)} offsets, {len(sizes)} sizes, {len(seeds)} seeds")
    if len(offsets) and bool(
        ((offsets < 0) | (sizes < 0) | (offsets + sizes > len(data)) | (offsets % 8 != 0)).any()
    ):
        raise ValueError(f"a chunk is not within {len(data)} bytes, or not on a multiple of 8")
