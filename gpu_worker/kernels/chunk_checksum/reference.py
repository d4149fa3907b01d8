"""The reference of `chunk_checksum`: XXH3-64 of chunks whose bytes come in pieces, on the host.

A chunk may be longer than the buffer that its rows land in: what its earlier pieces came to is kept until its
last one. Worst case: a chunk whose last piece never comes, which is forgotten with the sums.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor
from xxhash import xxh3_64

BLOCK_BYTES = 1024
"""Pieces end on a multiple of this within their chunk, but for the last one."""
SHORT_BYTES = 240
"""Chunks of so few bytes have rules of their own, which a device does not know."""
WORD_BYTES = 8
TAIL_BYTES = 64
"""The last bytes of a chunk are read once more, from its last piece."""


class ChunkPiece(NamedTuple):
    """Bytes `[begin, begin + size)` of a chunk of `total` bytes, which lie at `offset` of a buffer.

    `chunk` names the chunk; `offset` is a multiple of 8.
    """

    chunk: Hashable
    offset: int
    size: int
    begin: int
    total: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends with this piece."""
        return self.begin + self.size == self.total


def is_fit(begin: int, size: int, total: int) -> bool:
    """Whether a piece may be given to `ChunkSums`."""
    is_last = begin + size == total
    # The device scrambles after each block of 1,024 bytes, and keeps no part of one between two pieces.
    is_even = begin % BLOCK_BYTES == 0 and (is_last or size % BLOCK_BYTES == 0)
    # The last 64 bytes are read from the last piece alone:
    # a shorter one would reach into the piece before it.
    return total > SHORT_BYTES and is_even and size >= TAIL_BYTES


Sums = Callable[[], list[int]]
"""The checksums of the chunks that ended, in the order of their last pieces.

To be called when the device has passed what `add` issued.
"""


class ChunkSums:
    """The checksums of chunks, each piece of a chunk behind the one before it. Used by one thread."""

    def __init__(self) -> None:
        self._hashers: dict[Hashable, xxh3_64] = {}
        self._places = Places()

    def add(self, data: Tensor, pieces: Sequence[ChunkPiece]) -> Sums:
        """Take pieces that lie in `data` [B] uint8. Raises ValueError for a piece out of order or place."""
        self._places.take(data, pieces)
        raw = data.cpu().numpy()
        ended = []
        for piece in pieces:
            hasher = self._hashers.pop(piece.chunk, None) or xxh3_64()
            hasher.update(raw[piece.offset : piece.offset + piece.size].data)
            if piece.is_last:
                ended.append(hasher.intdigest())
            else:
                self._hashers[piece.chunk] = hasher
        return lambda: ended


class Places:
    """How far each chunk has come."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, int] = {}

    def take(self, data: Tensor, pieces: Sequence[ChunkPiece]) -> None:
        """Raise ValueError unless every piece lies within the data and goes on where its chunk stands."""
        if data.ndim != 1 or data.element_size() != 1 or not data.is_contiguous():
            raise ValueError("data are contiguous bytes")
        if len({piece.chunk for piece in pieces}) < len(pieces):
            # Chains of one launch run side by side.
            raise ValueError("two pieces of one chunk at a time")
        for piece in pieces:
            if not is_fit(piece.begin, piece.size, piece.total) or piece.begin + piece.size > piece.total:
                raise ValueError(f"{piece.size} bytes at {piece.begin} of {piece.total} are no piece")
            if piece.offset < 0 or piece.offset % WORD_BYTES or piece.offset + piece.size > len(data):
                raise ValueError(f"a piece is not within {len(data)} bytes, or not on a multiple of 8")
            # Pieces out of order would come to a checksum that looks like a damaged chunk's.
            if self._ends.get(piece.chunk, 0) != piece.begin:
                raise ValueError(f"a piece at {piece.begin} of a chunk that stands elsewhere")
            self._ends[piece.chunk] = piece.begin + piece.size
            if piece.is_last:
                del self._ends[piece.chunk]
