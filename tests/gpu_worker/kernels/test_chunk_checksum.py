"""Checksums on the device: the same as the library that the store checks with, however a chunk is cut."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import DEVICE
from xxhash import xxh3_64_intdigest

from ctxcache.format.checksums import bound_checksum, chunk_checksum
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.kernels.chunk_checksum import fused, reference
from gpu_worker.kernels.chunk_checksum.reference import BLOCK_BYTES, ChunkPiece, is_fit

SIZES = (241, 300, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 4096, 5000, 9001, 12288)


class FusedSums(fused.ChunkSums):
    """The kernel's, whose work has passed on the device before anybody asks for the sums."""

    def __init__(self) -> None:
        """On the tests' device."""
        super().__init__(torch.device(DEVICE))

    def add(self, data: torch.Tensor, pieces: Sequence[ChunkPiece]) -> reference.Sums:
        """See ChunkSums: the caller's is to wait, which a restore does by an event."""
        found = super().add(data, pieces)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return found


WAYS: dict[str, Callable[[], reference.ChunkSums | FusedSums]] = {
    "reference": reference.ChunkSums,
    "fused": FusedSums,
}


def _bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE)


def _expected(data: torch.Tensor) -> int:
    return xxh3_64_intdigest(data.cpu().numpy().data)


@pytest.mark.parametrize("way", WAYS)
def test_every_size_beside_every_other(way: str) -> None:
    """Whole chunks of every way that the algorithm treats sizes, at once."""
    data = _bytes(60_000)
    pieces = [ChunkPiece(i, i * 3016, size, 0, size) for i, size in enumerate(SIZES)]
    expected = [_expected(data[piece.offset : piece.offset + piece.size]) for piece in pieces]

    assert WAYS[way]().add(data, pieces)() == expected


@settings(max_examples=12, deadline=None)
@given(st.integers(241, 9000), st.lists(st.integers(1, 4), max_size=4), st.integers(0, 100))
def test_any_chunk_cut_anywhere(size: int, blocks: list[int], word: int) -> None:
    """Pieces come one behind the other, each where the one before it lay, and another chunk between them."""
    chunk, other = _bytes(size, size), _bytes(3000, 1)
    sums, begin, found = FusedSums(), 0, list[int]()
    for count in [*blocks, 1 << 20]:
        rest = size - begin
        taken = count * BLOCK_BYTES if count * BLOCK_BYTES + reference.TAIL_BYTES <= rest else rest
        if not taken:
            break
        data = torch.zeros(8 * word + taken + 4096, dtype=torch.uint8, device=DEVICE)
        data[8 * word : 8 * word + taken] = chunk[begin : begin + taken]
        between = 8 * word + -(-taken // 8) * 8
        data[between : between + 3000] = other
        pieces = [
            ChunkPiece("chunk", 8 * word, taken, begin, size),
            ChunkPiece("other", between, 3000, 0, 3000),
        ]
        answer = sums.add(data, pieces)()
        begin += taken
        assert answer.pop() == _expected(other)
        assert len(answer) == (begin == size)
        found += answer

    assert found == [_expected(chunk)]


def test_many_chunks_may_be_unfinished() -> None:
    """More than there is room for at first: the lanes that wait are kept."""
    count = fused.FIRST_STATES + 3
    chunks = [_bytes(2 * BLOCK_BYTES, seed) for seed in range(count)]
    sums = FusedSums()
    found: list[int] = []
    for begin in (0, BLOCK_BYTES):
        data = torch.cat([chunk[begin : begin + BLOCK_BYTES] for chunk in chunks])
        pieces = [
            ChunkPiece(number, number * BLOCK_BYTES, BLOCK_BYTES, begin, 2 * BLOCK_BYTES)
            for number in range(count)
        ]
        found = sums.add(data, pieces)()

    assert found == [_expected(chunk) for chunk in chunks]


def test_a_stored_chunks_checksum() -> None:
    """The kernel's checksum, once bound, is the one that the store writes into a segment's header."""
    data, stream = _bytes(64 * 96), Stream(3, StateKind.HIDDEN)
    expected = chunk_checksum(0x1234_5678_9ABC_DEF0, stream, data.cpu().numpy().data)

    (found,) = WAYS["fused"]().add(data, [ChunkPiece(0, 0, len(data), 0, len(data))])()

    assert bound_checksum(0x1234_5678_9ABC_DEF0, stream, found) == expected


@pytest.mark.parametrize("place", [0, 1023, 1024, 4999])
def test_a_flipped_bit_is_seen(place: int) -> None:
    """In the first block, at its end, at the next one's begin, in the last stripe."""
    data, piece = _bytes(5000), [ChunkPiece(0, 0, 5000, 0, 5000)]
    before = WAYS["fused"]().add(data, piece)()
    data[place] ^= 1

    assert WAYS["fused"]().add(data, piece)() != before


@pytest.mark.parametrize("way", WAYS)
def test_pieces_that_are_none_are_refused(way: str) -> None:
    """With a sentence: outside the data, out of order, twice at a time, or cut inside a block."""
    data, sums = _bytes(4096), WAYS[way]()
    for offset, size in ((0, 4104), (-8, 300), (4, 300)):
        with pytest.raises(ValueError, match="a piece is not within 4096 bytes"):
            sums.add(data, [ChunkPiece(0, offset, size, 0, size)])
    with pytest.raises(ValueError, match="stands elsewhere"):
        sums.add(data, [ChunkPiece(0, 0, 1024, 1024, 4096)])
    with pytest.raises(ValueError, match="two pieces of one chunk"):
        sums.add(data, [ChunkPiece(0, 0, 1024, 0, 2048), ChunkPiece(0, 1024, 1024, 1024, 2048)])
    for begin, size, total in ((0, 1000, 2000), (100, 1900, 2000), (0, 240, 240), (1024, 63, 1087)):
        assert not is_fit(begin, size, total)
        with pytest.raises(ValueError, match="are no piece"):
            sums.add(data, [ChunkPiece(0, 0, size, begin, total)])
