"""Reading: leases over the arena, and rows in layer order for readers elsewhere.

A lease holds its segments: neither eviction nor truncation nor deletion takes the bytes away
before it ends. What does not fit into DRAM can still be read as a stream, chunk by chunk.
"""

import mmap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ctxcache.cache.residency import Residency
from ctxcache.cache.segment_io import SegmentIO
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import State
from ctxcache.core.segment import Segment
from ctxcache.core.session import Piece, Session, SessionView
from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    DeadlineExceeded,
    InvalidArgument,
    LeaseNotFound,
    TooManyRequests,
)
from ctxcache.format.streams import Stream

LEASE_LIFETIME_NS = 300 * 10**9
LEASE_LIMIT = 1 << 16
"""Leases at a time, of all readers: each one takes memory for every segment it holds."""
NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Request:
    """What a reader asks for: tokens `[begin, end)`, `end` None for all, of a session of that model."""

    tenant: str
    session_id: str
    fingerprint: bytes
    generation: int | None
    begin: int = 0
    end: int | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """Pieces held for a reader, in token order, all in DRAM unless it is a stream's own.

    Its deadline begins when its rows are there; a stream's moves on with every piece it reads.
    """

    lease_id: int
    view: SessionView
    begin: int
    end: int
    pieces: tuple[Piece, ...]
    deadline_ns: int = NEVER_NS


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one stream; valid until the next ones are asked for."""

    stream: Stream
    token_begin: int
    data: memoryview


class Reading:
    """The use cases of a reader."""

    def __init__(self, state: State, residency: Residency, sessions: Sessions, io: SegmentIO) -> None:
        self._state = state
        self._residency = residency
        self._sessions = sessions
        self._io = io
        self._leases: dict[int, Lease] = {}
        self._last_id = 0

    @property
    def lease_count(self) -> int:
        """Leases held now."""
        return len(self._leases)

    def held(self) -> Iterator[Segment]:
        """Segments held by leases, once per hold."""
        return (piece.segment for lease in self._leases.values() for piece in lease.pieces)

    async def acquire(self, request: Request) -> Lease:
        """Bring tokens into DRAM and hold them there.

        Raises SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, TokenRangeOutOfBounds,
        CapacityExceeded, CorruptSegment, TierFailure.
        """
        lease = self._hold(request)
        try:
            self._check_room(lease)
            await self._promote(lease)
        except BaseException:
            self.release(lease.lease_id)
            raise
        self._renew(lease)
        return lease

    def is_held(self, lease_id: int) -> bool:
        """Whether a lease has not ended yet."""
        return lease_id in self._leases

    def release(self, lease_id: int) -> None:
        """End a lease. Raises LeaseNotFound."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise LeaseNotFound(lease_id=lease_id)
        for piece in lease.pieces:
            self._residency.release(piece.segment)

    def expire_due(self) -> None:
        """End leases past their deadline."""
        now_ns = self._state.clock.monotonic_ns()
        for lease in [held for held in self._leases.values() if held.deadline_ns <= now_ns]:
            self.release(lease.lease_id)

    @asynccontextmanager
    async def stream(
        self, request: Request, streams: Sequence[Stream]
    ) -> AsyncIterator[tuple[Lease, Sequence[Stream], AsyncIterator[Rows]]]:
        """Read streams one after the other, tokens ascending; an empty list means all.

        Raises as `acquire` does, InvalidArgument (a stream the session does not store), but never
        CapacityExceeded: what does not fit into DRAM is read past it. The rows raise
        DeadlineExceeded when nobody asked for the next ones for longer than a lease lasts.
        """
        lease = self._hold(request)
        try:
            chosen = _chosen(lease.view, streams)
            with suppress(CapacityExceeded):
                self._check_room(lease)
                await self._promote(lease)
            self._renew(lease)
            yield lease, chosen, self._rows(lease, chosen)
        finally:
            with suppress(LeaseNotFound):
                self.release(lease.lease_id)

    # -- parts -----------------------------------------------------------------------------------------

    def _hold(self, request: Request) -> Lease:
        session = self._state.session(request.tenant, request.session_id)
        session.check_fingerprint(request.fingerprint)
        session.check_generation(request.generation)
        end = session.token_count if request.end is None else request.end
        session.check_range(request.begin, end)
        if len(self._leases) >= LEASE_LIMIT:
            raise TooManyRequests(what="leases", limit=LEASE_LIMIT)
        self._state.touch(session)
        self._count(session, request.begin, end)
        pieces = tuple(session.pieces(request.begin, end))
        for piece in pieces:
            self._residency.hold(piece.segment)
        self._last_id += 1
        lease = Lease(self._last_id, session.view(), request.begin, end, pieces)
        self._leases[lease.lease_id] = lease
        return lease

    def _renew(self, lease: Lease) -> None:
        lease.deadline_ns = self._state.clock.monotonic_ns() + LEASE_LIFETIME_NS

    def _check_room(self, lease: Lease) -> None:
        """Raise CapacityExceeded before anything moves when the rows could never all be in DRAM."""
        unique = {p.segment.segment_id: p.segment for p in lease.pieces}
        needed_bytes = sum(segment.layout.size_bytes for segment in unique.values())
        dram = self._residency.dram
        if needed_bytes > dram.capacity_bytes:
            raise CapacityExceeded(
                tier="DRAM", needed_bytes=needed_bytes, free_bytes=dram.free_bytes,
                limit_bytes=dram.capacity_bytes,
            )  # fmt: skip

    def _count(self, session: Session, begin: int, end: int) -> None:
        self._state.counters.read_token_count += end - begin
        self._state.counters.dram_hit_token_count += sum(
            p.row_end - p.row_begin for p in session.pieces(begin, end) if p.segment.dram
        )

    async def _promote(self, lease: Lease) -> None:
        unique = {p.segment.segment_id: p.segment for p in lease.pieces}
        try:
            await self._residency.promote(list(unique.values()), lease.view.uid)
        except CorruptSegment as error:
            await self._bad(error)
            raise

    async def _bad(self, error: CorruptSegment) -> None:
        segment = self._state.segments.get(int(error.facts["segment_id"]))
        if segment is not None:
            await self._sessions.quarantine({segment})

    async def _rows(self, lease: Lease, streams: Sequence[Stream]) -> AsyncIterator[Rows]:
        bounce = _Bounce()
        for stream in streams:
            for piece in lease.pieces:
                if lease.lease_id not in self._leases:
                    raise DeadlineExceeded(target="reader", timeout_s=LEASE_LIFETIME_NS // 10**9)
                self._renew(lease)
                yield Rows(stream, piece.token_begin, await self._piece(piece, stream, bounce))

    async def _piece(self, piece: Piece, stream: Stream, bounce: "_Bounce") -> memoryview:
        segment = piece.segment
        rows = segment.layout.rows(stream, piece.row_begin, piece.row_end)
        if segment.dram:
            return self._io.view(segment)[rows]
        # The device may take longer than the lease lasts.
        self._residency.hold(segment)
        try:
            chunk = await self._io.read_chunk(segment, stream, bounce.of(segment.layout.size_bytes))
        except CorruptSegment as error:
            await self._bad(error)
            raise
        finally:
            self._residency.release(segment)
        row_bytes = segment.layout.row_bytes(stream)
        return chunk[piece.row_begin * row_bytes : piece.row_end * row_bytes]


class _Bounce:
    """A page-aligned buffer of one slot's size, made when first needed."""

    def __init__(self) -> None:
        self._view: memoryview | None = None

    def of(self, size_bytes: int) -> memoryview:
        if self._view is None or len(self._view) < size_bytes:
            self._view = memoryview(mmap.mmap(-1, size_bytes))
        return self._view


def _chosen(view: SessionView, streams: Sequence[Stream]) -> Sequence[Stream]:
    stored = [spec.stream for spec in view.layout.specs]
    for stream in streams:
        if stream not in stored:
            raise InvalidArgument(field="streams", problem=f"{view.name} does not store {stream}")
    return sorted(set(streams)) if streams else stored
