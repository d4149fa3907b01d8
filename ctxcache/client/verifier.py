"""Verifying leased rows against the checksums of their segments, for readers that want it each time.

Whole chunks are checked, whatever part of them is read, each once; or as they are copied, while the copy is at hand. Worst case: a chunk that does not
match raises CorruptSegment before any of its rows is returned. A segment that still grows has no checksums.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.slots import SlotLayout
from ctxcache.errors import CorruptSegment
from ctxcache.format.identity import SegmentIdentity, chunk_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import SegmentLocation
from ctxcache.v1.session_pb2 import Session


class _Run(NamedTuple):
    """Rows `[row_begin, row_end)` of a segment, the first of them of token `token_begin`."""

    token_begin: int
    row_begin: int
    row_end: int
    segment: SegmentLocation
    offset_bytes: int
    token_count: int
    """Rows that its checksums cover; -1 where it has none."""
    seed: int


class Verifier:
    """Verifies chunks of one lease. `check` raises when the lease has ended."""

    def __init__(
        self,
        arena: Bytes,
        layout: SlotLayout,
        session: Session,
        segments: Sequence[SegmentLocation],
        check: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._segments = [(one, identity_of(session, one).seed()) for one in segments if one.checksums]
        self._check = check
        self._verified: set[Stream] = set()
        self._verified_chunks: set[tuple[int, Stream]] = set()
        seeds = {one.segment_id: seed for one, seed in self._segments}
        self._runs = [
            _Run(
                rows.token_begin, rows.row_begin, rows.row_end, one, one.offset_bytes,
                one.token_count if one.checksums else -1, seeds.get(one.segment_id, 0),
            )
            for one in segments
            for rows in one.rows
        ]  # fmt: skip

    def verify(self, stream: Stream) -> None:
        """Verify a stream's chunks. Raises CorruptSegment, or what `check` raises when the lease is over."""
        if stream in self._verified:
            return
        for segment, seed in self._segments:
            self._verify(segment, seed, stream, self._rows(segment, stream))
        self._verified.add(stream)

    def copy(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy the rows of tokens [begin, end) into [end - begin, row_bytes], contiguous, and verify them.

        A chunk that is copied whole is verified in the copy, which the processor still has at hand. Raises as `verify`.
        """
        chunk, row_bytes = self._layout.chunks[stream], self._layout.row_bytes(stream)
        flat, arena = into.reshape(-1), self._arena
        first = bisect_right(self._runs, begin, key=_token_begin) - 1
        for run in self._runs[max(first, 0) :]:
            if run.token_begin >= end:
                break
            # What is before and behind the tokens that are asked for is cut off.
            row_begin = run.row_begin + max(begin - run.token_begin, 0)
            row_end = min(run.row_end, run.row_begin + end - run.token_begin)
            if row_begin >= row_end:
                continue
            is_whole = row_begin == 0 and row_end == run.token_count
            if not is_whole and run.token_count >= 0:
                self._verify_once(run.segment, run.seed, stream)
            place = run.offset_bytes + chunk.offset_bytes + row_begin * row_bytes
            size_bytes = (row_end - row_begin) * row_bytes
            at = (max(run.token_begin, begin) - begin) * row_bytes
            target = flat[at : at + size_bytes]
            np.copyto(target, arena[place : place + size_bytes])
            if is_whole:
                self._verify(run.segment, run.seed, stream, target.data)

    def _verify_once(self, segment: SegmentLocation, seed: int, stream: Stream) -> None:
        if (segment.segment_id, stream) not in self._verified_chunks:
            self._verify(segment, seed, stream, self._rows(segment, stream))
            self._verified_chunks.add((segment.segment_id, stream))

    def _verify(self, segment: SegmentLocation, seed: int, stream: Stream, rows: memoryview) -> None:
        if chunk_checksum(seed, stream, rows) != self._expected(segment, stream):
            # A slot that was handed on under us differs too; that is no damage to the session.
            self._check()
            problem = f"{stream} does not match its checksum"
            raise CorruptSegment(segment_id=segment.segment_id, problem=problem)

    def _expected(self, segment: SegmentLocation, stream: Stream) -> int:
        if len(segment.checksums) != len(self._layout.chunks):
            raise CorruptSegment(segment_id=segment.segment_id, problem="checksums do not fit its streams")
        return segment.checksums[self._layout.chunks[stream].index]

    def _rows(self, segment: SegmentLocation, stream: Stream) -> memoryview:
        chunk = self._layout.chunks[stream]
        begin = segment.offset_bytes + chunk.offset_bytes
        end = begin + segment.token_count * chunk.row_bytes
        if not 0 <= begin <= end <= self._arena.size:
            raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")
        return self._arena[begin:end].data


def identity_of(session: Session, segment: SegmentLocation) -> SegmentIdentity:
    """What a segment's checksums are bound to. Raises CorruptSegment."""
    try:
        session_uid = bytes.fromhex(segment.session_uid)
    except ValueError as error:
        raise CorruptSegment(segment_id=segment.segment_id, problem="has no session uid") from error
    return SegmentIdentity(
        tenant=session.tenant,
        session_uid=session_uid,
        generation=segment.generation,
        begin=segment.position_begin,
        token_count=segment.token_count,
        model_fingerprint=session.model_fingerprint,
    )


def _token_begin(run: _Run) -> int:
    return run.token_begin
