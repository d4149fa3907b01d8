"""Checksums on the device: the same as the library that the store checks with, for every size and seed."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import DEVICE

from ctxcache.format.checksums import bound_checksum, chunk_checksum
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.kernels.chunk_checksum import fused, reference

SIZES = (
    0,
    1,
    3,
    16,
    17,
    128,
    129,
    240,
    241,
    300,
    1023,
    1024,
    1025,
    1087,
    1088,
    1089,
    2048,
    2049,
    4096,
    5000,
    9001,
)


def _numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor([reference.signed(value) for value in values], dtype=torch.int64, device=DEVICE)


def _bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE)


@pytest.mark.parametrize("first", [0, 1])
def test_every_size_beside_every_other(first: int) -> None:
    """Chunks of every way that the algorithm treats sizes, in one launch, each with a seed of its own.

    Seeds take turns, and begin with another one in the second launch.
    """
    turns = itertools.islice(itertools.cycle([0, 2**64 - 1, 1, 2**63]), first, None)
    data = _bytes(50_000)
    offsets, sizes = _numbers([i * 1016 for i in range(len(SIZES))]), _numbers(list(SIZES))
    seeds = _numbers([seed for seed, _ in zip(turns, SIZES, strict=False)])
    expected = reference.chunk_checksum(data, offsets, sizes, seeds)
    assert torch.equal(fused.chunk_checksum(data, offsets, sizes, seeds), expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 6000), st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_any_chunk(size: int, seed: int, word: int) -> None:
    """Any size, seed and place."""
    data = _bytes(8 * word + size, seed % 2**32)
    operands = data, _numbers([8 * word]), _numbers([size]), _numbers([seed])
    assert torch.equal(fused.chunk_checksum(*operands), reference.chunk_checksum(*operands))


def test_a_stored_chunks_checksum() -> None:
    """The kernel's checksum, once bound, is the one that the store writes into a segment's header."""
    data, stream = _bytes(64 * 96), Stream(3, StateKind.HIDDEN)
    expected = chunk_checksum(0x1234_5678_9ABC_DEF0, stream, data.cpu().numpy().data)
    found = fused.chunk_checksum(data, _numbers([0]), _numbers([len(data)]), _numbers([0]))
    (checksum,) = map(reference.unsigned, found.tolist())
    assert bound_checksum(0x1234_5678_9ABC_DEF0, stream, checksum) == expected


@pytest.mark.parametrize("place", [0, 1023, 1024, 4999])
def test_a_flipped_bit_is_seen(place: int) -> None:
    """In the first block, at its end, at the next one's begin, in the last stripe."""
    data = _bytes(5000)
    operands = _numbers([0]), _numbers([5000]), _numbers([5])
    before = fused.chunk_checksum(data, *operands)
    data[place] ^= 1
    assert not torch.equal(fused.chunk_checksum(data, *operands), before)


def test_chunks_outside_the_data_are_refused() -> None:
    """With a sentence."""
    data, seeds = _bytes(1000), _numbers([0])
    for offset, size in ((0, 1001), (-8, 100), (4, 100), (0, -1)):
        with pytest.raises(ValueError, match="a chunk is not within 1000 bytes"):
            fused.chunk_checksum(data, _numbers([offset]), _numbers([size]), seeds)
    with pytest.raises(ValueError, match="1 offsets, 2 sizes"):
        fused.chunk_checksum(data, _numbers([0]), _numbers([1, 2]), seeds)
