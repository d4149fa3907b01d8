"""Verifying leased rows against what their writers said of them.

Rows that are copied are verified in the copy, while it is at hand: what changes in the arena afterwards is of
no
matter. Views are verified where they lie, whole chunks, each stream once. Rows that differ are shown to the
server,
which verifies them itself and puts right what it can; then they are taken once more. Worst case: rows that
nobody has
any more, which raise CorruptSegment before any of them is returned.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.slots import Chunk, SlotLayout
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CorruptSegment
from ctxcache.format.identity import SegmentIdentity, rows_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import SegmentLocation


class _Run(NamedTuple):
    """Rows `[row_begin, row_end)` of a segment in the arena, the first of them of token `token_begin`."""

    token_begin: int
    row_begin: int
    row_end: int
    segment: SegmentLocation


class Verifier:
    """Verifies chunks of one lease. Used by several threads, `verify` by one.

    `check` raises when the lease has ended; `recheck` has the server verify what it holds, and raises what it
    finds.
    """

    def __init__(
        self,
        arena: Bytes,
        layout: SlotLayout,
        segments: Sequence[SegmentLocation],
        check: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        """Raises CorruptSegment where sums do not fit what they are of."""
        self._arena, self._layout = arena, layout
        self._check, self._recheck = check, recheck
        self._verified: set[Stream] = set()
        self._segments = [segment for segment in segments if not segment.HasField("path_index")]
        for segment in self._segments:
            _check_sums(segment, layout, arena.size)
        self._runs = [
            _Run(rows.token_begin, rows.row_begin, rows.row_end, segment)
            for segment in self._segments
            for rows in segment.rows
        ]

    def verify(self, stream: Stream) -> None:
        """Verify a stream's chunks where they lie. Raises CorruptSegment, what `check` and `recheck` raise."""
        if stream not in self._verified:
            chunk = self._layout.chunks[stream]
            for segment in self._segments:
                self._match(segment, stream, partial(self._rows, segment, chunk))
            self._verified.add(stream)

    def copy(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy the rows of tokens [begin, end) in the arena into [end - begin, row_bytes], contiguous, and verify them.

        Raises as `verify`.
        """
        chunk, flat = self._layout.chunks[stream], into.reshape(-1)
        first = bisect_right(self._runs, begin, key=_token_begin) - 1
        for run in self._runs[max(first, 0) :]:
            if run.token_begin >= end:
                break
            # What is before and behind the tokens that are asked for is cut off.
            row_begin = run.row_begin + max(begin - run.token_begin, 0)
            row_end = min(run.row_end, run.row_begin + end - run.token_begin)
            if row_begin < row_end:
                at = (max(run.token_begin, begin) - begin) * chunk.row_bytes
                target = flat[at : at + (row_end - row_begin) * chunk.row_bytes]
                self._copy(run.segment, stream, row_begin, row_end, target)

    def _copy(
        self, segment: SegmentLocation, stream: Stream, row_begin: int, row_end: int, target: Bytes
    ) -> None:
        chunk = self._layout.chunks[stream]
        rows = self._rows(segment, chunk)
        is_whole = (row_begin, row_end) == (0, segment.token_count)
        # A part has no sum of its own: the whole chunk is copied, and the part taken from what was verified.
        place = target if is_whole else np.empty(rows.size, np.uint8)

        def copied() -> Bytes:
            np.copyto(place, rows)
            return place

        self._match(segment, stream, copied)
        if not is_whole:
            np.copyto(target, place[row_begin * chunk.row_bytes : row_end * chunk.row_bytes])

    def _match(self, segment: SegmentLocation, stream: Stream, take: Callable[[], Bytes]) -> None:
        """Take a whole chunk's rows, and once more where they are not what they must be."""
        expected = segment.checksums[self._layout.chunks[stream].index]
        if rows_checksum(take().data) == expected:
            return
        # A slot that was handed on under us differs too; that is no damage to the session.
        self._check()
        self._recheck()
        if rows_checksum(take().data) != expected:
            self._check()
            problem = f"{stream} does not match its checksum"
            raise CorruptSegment(segment_id=segment.segment_id, problem=problem)

    def _rows(self, segment: SegmentLocation, chunk: Chunk) -> Bytes:
        begin = segment.offset_bytes + chunk.offset_bytes
        return self._arena[begin : begin + segment.token_count * chunk.row_bytes]


def _check_sums(segment: SegmentLocation, layout: SlotLayout, arena_bytes: int) -> None:
    """Raise CorruptSegment unless a segment's sums are of all rows that are used of it, and those in the arena."""
    row_end = max((rows.row_end for rows in segment.rows), default=0)
    if len(segment.checksums) != len(layout.chunks) or segment.token_count < row_end:
        raise CorruptSegment(segment_id=segment.segment_id, problem="its checksums are not those of its rows")
    end = segment.offset_bytes + layout.end_bytes(segment.token_count)
    if segment.offset_bytes < 0 or end > arena_bytes:
        raise CorruptSegment(segment_id=segment.segment_id, problem="lies outside the arena")


def identity_of(session: SessionInfo, segment: SegmentLocation) -> SegmentIdentity:
    """What a segment's header is bound to. Raises CorruptSegment."""
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
