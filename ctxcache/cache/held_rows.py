"""Held rows: the bytes of held pieces, and the checksums that these must have.

    in DRAM, and stays    read in place             verified by the reader
    in DRAM, may leave    copied to a `Bounce`      the copy is verified
    on SSD                read into a `Bounce`      verified as it is read

The caller holds each piece's segment. Knows no lease, no budget and no session. Worst case: rows of memory
that does not keep them are mended `TRIES` times, and then refused.
"""

import mmap
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.cache.scrubbing import TRIES, Mending
from ctxcache.cache.segments import SegmentIO
from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece
from ctxcache.errors import CorruptSegment, TierFailure
from ctxcache.format.checksums import Sums, rows_checksum
from ctxcache.format.layout import Slot
from ctxcache.format.streams import Stream


class Rows(NamedTuple):
    """Rows of one stream, valid as long as the lease; if `is_passing`, until the next rows are asked for.

    `checksum`: that of their writer. `segment`: that of rows in DRAM, which were not verified.
    """

    stream: Stream
    token_begin: int
    data: memoryview
    checksum: int
    segment: Segment | None = None

    @property
    def is_passing(self) -> bool:
        """Whether the rows are a copy in memory that is used again."""
        return self.segment is None


# Only a view, sums and numbers cross to another thread. No session and no segment is looked at there.
@dataclass(frozen=True, slots=True)
class Lent:
    """A piece whose bytes another thread may read while it is lent. They do not change meanwhile.

    `view` is its slot in DRAM, and `sums` are those of its segment's rows; None when it may leave DRAM.
    """

    piece: Piece
    view: memoryview | None
    sums: Sums | None

    def rows(self, stream: Stream) -> "Summed | None":
        """One stream's rows and their checksum; None when DRAM has other rows than it should."""
        if self.view is None or self.sums is None:
            raise RuntimeError("the piece is not kept in DRAM")
        return summed(self.view, self.sums, self.piece, stream)


class Summed(NamedTuple):
    """Rows, and the checksum that they must have."""

    data: memoryview
    checksum: int


def summed(view: memoryview, sums: Sums, piece: Piece, stream: Stream) -> Summed | None:
    """A piece's rows of one stream and their checksum; None when DRAM has other bytes than it should.

    For whole chunks the checksum is their writer's, and the chunks are not read.
    """
    layout = piece.segment.layout
    data = view[layout.rows(stream, piece.row_begin, piece.row_end)]
    whole = sums.values[layout.index[stream]]
    # The piece is a whole chunk: the stored sum is that of the reader's rows, and no byte is read.
    if (piece.row_begin, piece.row_end) == (0, sums.row_end):
        return Summed(data, whole)
    # A part has no stored sum. It gets one of its own, which is trusted because the whole chunk is right.
    checksum = rows_checksum(data)
    # The part is summed before the whole: a change between the two is found by one of them.
    is_right = rows_checksum(view[layout.rows(stream, 0, sums.row_end)]) == whole
    return Summed(data, checksum) if is_right else None


class Bounce:
    """A page-aligned buffer of one slot's size, made when first needed."""

    def __init__(self) -> None:
        self._view: memoryview | None = None

    def of(self, size_bytes: int) -> memoryview:
        """A view of `size_bytes` or more. It may be the one that an earlier call returned."""
        if self._view is None or len(self._view) < size_bytes:
            # Whole pages: direct reads need an aligned place.
            self._view = memoryview(mmap.mmap(-1, size_bytes))
        return self._view

    def forget(self) -> None:
        """Use other memory from now on."""
        self._view = None


class HeldRows:
    """Reads held pieces. A piece that turns out to be bad ends its sessions before it."""

    def __init__(self, ledger: Ledger, io: SegmentIO, mending: Mending) -> None:
        self._ledger, self._io, self._mending = ledger, io, mending

    def lent(self, piece: Piece, *, is_kept: bool) -> Lent:
        """A piece for another thread. `is_kept`: it does not leave DRAM while it is held."""
        segment = piece.segment
        if not is_kept or not segment.memory:
            return Lent(piece, None, None)
        return Lent(piece, self._io.view(segment), settled_sums(piece))

    async def in_place(self, piece: Piece, stream: Stream) -> Summed:
        """One stream's rows of a piece in DRAM, where they lie. Raises CorruptSegment, TierFailure."""
        view = self._io.view(piece.segment)
        # Memory that does not keep restored rows fails for good, and its reader gets that error.
        for _ in range(TRIES):
            rows = summed(view, settled_sums(piece), piece, stream)
            if rows is not None:
                return rows
            await self._mending.verify(piece.segment)
        raise CorruptSegment(segment_id=piece.segment.segment_id, problem="memory does not keep its rows")

    async def copied(self, piece: Piece, stream: Stream, bounce: Bounce) -> Summed:
        """A copy of one stream's rows of a piece that is not in DRAM, or may leave it; it lies in `bounce`.

        Raises CorruptSegment, TierFailure.
        """
        segment = piece.segment
        place = bounce.of(segment.layout.size_bytes)
        # The device may take longer than the lease lasts. A segment in DRAM stays there from here on.
        self._ledger.held(segment)
        try:
            if not segment.memory:
                return await self._chunk(piece, stream, bounce)
            for _ in range(TRIES):
                await self._mending.settle(segment, piece.row_end)
                data, checksum = await self.in_place(piece, stream)
                place[: len(data)] = data
                # Memory may change under the copy, so that the copy is verified.
                if rows_checksum(place[: len(data)]) == checksum:
                    return Summed(place[: len(data)], checksum)
                await self._mending.verify(segment)
            raise CorruptSegment(segment_id=segment.segment_id, problem="memory does not keep its rows")
        finally:
            self._ledger.released(segment)

    async def _chunk(self, piece: Piece, stream: Stream, bounce: Bounce) -> Summed:
        wanted = piece.row_begin, piece.row_end

        async def chunk(slot: Slot) -> tuple[memoryview, int]:
            place = bounce.of(piece.segment.layout.size_bytes)
            try:
                return await self._io.read_chunk(piece.segment, slot, stream, wanted, place)
            except TierFailure:
                # A device that gave no answer may still write there.
                bounce.forget()
                raise

        try:
            return Summed(*await self._mending.read(piece.segment, chunk))
        except CorruptSegment as error:
            await self._mending.quarantine_named(error)
            raise


def settled_sums(piece: Piece) -> Sums:
    """The checksums of a held piece's segment.

    Raises CorruptSegment where the segment now ends before the piece.
    """
    segment = piece.segment
    if piece.row_end > segment.row_count:
        raise CorruptSegment(segment_id=segment.segment_id, problem="its last rows were lost")
    return segment.settled
