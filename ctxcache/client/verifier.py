"""Verifying leased rows against the checksums of their segments, for readers that want it each time.

Whole chunks are checked, whatever part of them is read, each once. Worst case: a chunk that does not
match raises CorruptSegment before any of its rows is returned. A segment that still grows has no checksums.
"""

from collections.abc import Callable, Sequence

from ctxcache.client.arena import Bytes
from ctxcache.client.slots import SlotLayout
from ctxcache.errors import CorruptSegment
from ctxcache.format.identity import SegmentIdentity, chunk_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import SegmentLocation
from ctxcache.v1.session_pb2 import Session


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

    def verify(self, stream: Stream) -> None:
        """Verify a stream's chunks. Raises CorruptSegment, or what `check` raises when the lease is over."""
        if stream in self._verified:
            return
        for segment, seed in self._segments:
            if chunk_checksum(seed, stream, self._rows(segment, stream)) != self._expected(segment, stream):
                # A slot that was handed on under us differs too; that is no damage to the session.
                self._check()
                problem = f"{stream} does not match its checksum"
                raise CorruptSegment(segment_id=segment.segment_id, problem=problem)
        self._verified.add(stream)

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
