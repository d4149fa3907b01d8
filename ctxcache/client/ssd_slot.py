"""A segment's slot in a file: what its header must say, and its chunks, verified.

A reader beside the server trusts nothing that it reads: a slot whose lease has ended may be another segment's
by now. The
header is compared with what the lease said of it, and binds the chunks' checksums. Thread-safe. Worst case:
bytes that are
others' or damaged, which raise before they are returned.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ctxcache.client.slots import SlotLayout
from ctxcache.client.ssd_files import SsdReader, aligned
from ctxcache.errors import CorruptSegment
from ctxcache.format.header import SegmentHeader, decode_header, header_checksum
from ctxcache.format.identity import SegmentIdentity
from ctxcache.format.layout import HEADER_FIXED_BYTES, HEADER_STREAM_BYTES, SegmentLayout, align
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import SegmentLocation


class StoredChunk(NamedTuple):
    """A stream's rows in a file, as one piece: `size_bytes` of them at `offset_bytes`, and their bound checksum.

    `seed` is that of the segment's identity, to which it is bound.
    """

    path_index: int
    offset_bytes: int
    size_bytes: int
    seed: int
    checksum: int


class SsdSlot:
    """One segment that was left on SSD."""

    def __init__(
        self,
        files: SsdReader,
        layout: SlotLayout,
        identity: SegmentIdentity,
        location: SegmentLocation,
        check: Callable[[], None],
    ) -> None:
        """`check` raises when the lease has ended. Raises TierFailure for a place that no file has."""
        self._files, self._layout, self._location, self._check = files, layout, location, check
        self.token_count = location.token_count
        """Rows that its checksums cover."""
        self._identity = identity
        self._header_bytes = align(HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(layout.chunks))
        self._seed = identity.seed()
        self._checksums: Sequence[int] = ()
        size_bytes = max(self._header_bytes, layout.end_bytes(self.token_count))
        files.check_place(location.path_index, location.offset_bytes, align(size_bytes))

    def chunk(self, stream: Stream) -> StoredChunk:
        """Where a stream's rows lie and what they must be. Raises CorruptSegment, TierFailure, KeyError, what `check` raises."""
        if not self._checksums:
            self._checksums = self._read_header()
        chunk = self._layout.chunks[stream]
        return StoredChunk(
            self._location.path_index,
            self._location.offset_bytes + chunk.offset_bytes,
            self.token_count * chunk.row_bytes,
            self._seed,
            self._checksums[chunk.index],
        )

    def differs(self, stream: Stream) -> CorruptSegment:
        """What to raise for rows that are not those of the checksum. Raises what `check` raises: that is no damage."""
        return self._bad(f"{stream} does not match its checksum")

    def _bad(self, problem: str) -> CorruptSegment:
        # A slot that was handed on under us differs too.
        self._check()
        return CorruptSegment(segment_id=self._location.segment_id, problem=problem)

    def _read_header(self) -> Sequence[int]:
        data = aligned(self._header_bytes)
        self._files.read(self._location.path_index, self._location.offset_bytes, data)
        try:
            header = decode_header(data)
        except CorruptSegment as error:
            raise self._bad(str(error.facts["problem"])) from error
        if header_checksum(bytes(data)) != self._location.header_checksum:
            raise self._bad("its header is not the one recorded")
        if header.segment_id != self._location.segment_id or header.identity != self._identity:
            raise self._bad("its header names another segment")
        if not self._is_laid_out(header):
            raise self._bad("its header has another layout")
        return header.checksums

    def _is_laid_out(self, header: SegmentHeader) -> bool:
        layout: SegmentLayout = header.layout
        found = [
            (spec.stream, offset, spec.row_bytes)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ]
        known = [(stream, one.offset_bytes, one.row_bytes) for stream, one in self._layout.chunks.items()]
        return found == known and self.token_count <= layout.segment_tokens
