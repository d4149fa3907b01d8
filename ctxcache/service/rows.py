"""Rows over a wire, whichever transport carries them: an append under way, and a read's messages.

gRPC streams (`sessions.py`) and the bulk channel (`bulk_connection.py`) both use these. Used by one task or
thread at a time. Worst case: an append that is given up shows nothing of what its last commit did not cover.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from ctxcache.cache.appends import Appends
from ctxcache.cache.held_rows import Rows
from ctxcache.cache.leases import Lease, ReadRequest
from ctxcache.cache.reservations import Reservation
from ctxcache.cache.scrubbing import TRIES
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import SessionView
from ctxcache.errors import (
    CacheError,
    CorruptSegment,
    IncompleteAppend,
    InvalidArgument,
    ReservationNotFound,
    SessionNotFound,
    WriteOffsetMismatch,
)
from ctxcache.format.checksums import joint_checksum, rows_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream, StreamRange
from ctxcache.format.wire_chunk import encode_chunk
from ctxcache.runtime.clock import Clock
from ctxcache.service import convert, validate
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import session_pb2

CHUNK_BYTES_LIMIT = 2 << 20
"""Largest chunk of rows that a writer may send."""
COMING_LIMIT = 1 << 20
"""Most tokens that a writer may announce."""
MESSAGE_BYTES = 1 << 20
"""About how many bytes of rows one message to a reader has."""
Mend: TypeAlias = Callable[[Segment], Awaitable[None]]
"""See Leases.mend."""
T = TypeVar("T")


# -- appends ---------------------------------------------------------------------------------------


async def begin_append(
    writing: Appends,
    header: session_pb2.AppendHeader,
    tenant: str,
    whereabouts: Whereabouts = ALONE,
    *,
    is_guest: bool = False,
) -> "Append":
    """Open the reservation that an append's header asks for. `is_guest`: of a session without a name.

    Raises as `Appends.reserve` does, InvalidArgument, SessionMoved.
    """
    name = validate.guest_id if is_guest else validate.session_id
    session_id = name(header.name, "header.name")
    await whereabouts.come(tenant, session_id)
    generation = header.if_generation_match if header.HasField("if_generation_match") else None
    reservation = await writing.reserve(
        tenant,
        session_id,
        fingerprint=validate.fingerprint(header.model_fingerprint, "header.model_fingerprint"),
        write_offset=header.write_offset,
        generation=generation,
        token_count=0,
        coming_count=validate.within(header.coming_token_count, 0, COMING_LIMIT, "header.coming_token_count"),
        contents=validate.contents(header.contents, header.write_offset, "header.contents")
        if header.contents
        else (),
    )
    return Append(writing, reservation, whereabouts)


class Append:
    """The state of an append: `received` is one past the last token of each stream."""

    def __init__(self, writing: Appends, reservation: Reservation, whereabouts: Whereabouts) -> None:
        self._writing, self._whereabouts = writing, whereabouts
        self.reservation = reservation
        self.layout = reservation.session.layout
        # Every stream must have its rows up to a commit, whatever order the chunks of different streams come
        # in:
        #
        #     received    tokens 0..300   layer 0: 0..300   layer 1: 0..256
        #     commit 300  ──► IncompleteAppend: layer 1 has 256
        self.received = {spec.stream: reservation.committed for spec in self.layout.specs}
        self.view: SessionView = reservation.session.view()

    def check(self, stream: Stream, token_begin: int, size_bytes: int) -> int:
        """One past the last token of a chunk. Raises what is wrong with it, its bytes aside."""
        if stream not in self.received:
            raise InvalidArgument(field="chunk.stream", problem=f"the session does not store {stream}")
        row_bytes = self.layout.row_bytes(stream)
        # Bounded before the room for it is made.
        validate.within(size_bytes, 1, CHUNK_BYTES_LIMIT, "chunk.data")
        if size_bytes % row_bytes:
            raise InvalidArgument(field="chunk.data", problem=f"is not a multiple of {row_bytes} bytes")
        if token_begin != self.received[stream]:
            name = self.reservation.session.name
            raise WriteOffsetMismatch(
                session=f"{name} {stream}", token_count=self.received[stream], write_offset=token_begin
            )
        return token_begin + size_bytes // row_bytes

    async def make_room(self, token_end: int) -> None:
        """Let the reservation live on, and reach that token. Raises as `Appends.extend` does."""
        try:
            # Renewed with each chunk: an append may take longer than a reservation lasts.
            self._writing.renew(self.reservation)
            await self._writing.extend(self.reservation, max(token_end - self.reservation.end, 0))
        except ReservationNotFound as error:
            raise self._cut_off() from error

    async def commit(self, request: session_pb2.AppendCommit) -> None:
        """Make tokens visible. Raises IncompleteAppend, InvalidArgument and as `Appends.commit` does."""
        validate.within(request.token_count, self.reservation.committed, 2**62, "commit.token_count")
        self._check_received(request.token_count)
        is_durable, is_shared = validate.durability(
            request.durability, self._whereabouts, "commit.durability"
        )
        try:
            self._writing.renew(self.reservation)
            self.view = await self._writing.commit(
                self.reservation, request.token_count, is_durable=is_durable, keep_open=True
            )
        except ReservationNotFound as error:
            raise self._cut_off() from error
        if is_shared:
            session = self.reservation.session
            await self._whereabouts.share(session.tenant, session.name.removeprefix("sessions/"))

    def check_finished(self) -> None:
        """Raise IncompleteAppend when rows came after the last commit."""
        committed = self.reservation.committed
        for stream, end in self.received.items():
            if end > committed:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=committed)

    def release(self) -> None:
        """Give back what was not committed."""
        self._writing.release(self.reservation)

    def _check_received(self, token_count: int) -> None:
        for stream, end in self.received.items():
            if end < token_count:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=token_count)

    def _cut_off(self) -> CacheError:
        """Why the reservation ended under the writer: what it has to know to go on."""
        # The writer's own view of its session is outdated: it is told what the session is now. Messages are
        # of one stream: a reader places them by stream and token.
        session = self.reservation.session
        if session.is_gone:
            return SessionNotFound(session=session.name)
        return WriteOffsetMismatch(
            session=session.name, token_count=session.token_count, write_offset=self.reservation.committed
        )


# -- reads -----------------------------------------------------------------------------------------


def read_request(
    request: session_pb2.ReadSessionRequest, tenant: str, *, is_guest: bool = False
) -> tuple[ReadRequest, Sequence[StreamRange]]:
    """The request of a reader, validated, and its streams. `is_guest`: of a session without a name.

    Raises InvalidArgument.
    """
    has_range = request.HasField("range")
    asked = ReadRequest(
        tenant,
        validate.guest_id(request.name) if is_guest else validate.session_id(request.name),
        validate.fingerprint(request.model_fingerprint),
        request.if_generation_match if request.HasField("if_generation_match") else None,
        request.range.begin if has_range else 0,
        request.range.end if has_range else None,
        is_summed=True,
        is_rechecked=request.recheck,
        is_quiet=request.is_quiet,
    )
    return asked, validate.stream_ranges(request.streams, "streams")


def read_header(lease: Lease, streams: Sequence[StreamRange], clock: Clock) -> session_pb2.ReadHeader:
    """The first message of a read."""
    return session_pb2.ReadHeader(
        session=convert.session_message(lease.view, clock),
        streams=map(convert.stream_range, streams or lease.view.layout.outline.ranges),
        range=session_pb2.TokenRange(begin=lease.begin, end=lease.end),
    )


async def packed(rows: AsyncIterator[Rows], layout: SegmentLayout, mend: Mend) -> AsyncIterator[list[Rows]]:
    """Rows put together, or cut, into messages of about 1 MiB of one stream; at least a row each."""
    parts: list[Rows] = []
    size_bytes = 0
    async for item in rows:
        for part in await _cut(item, layout.row_bytes(item.stream), mend):
            if parts and (part.stream is not parts[0].stream or size_bytes + len(part.data) > MESSAGE_BYTES):
                yield parts
                parts, size_bytes = [], 0
            parts.append(part)
            size_bytes += len(part.data)
    if parts:
        yield parts


async def _cut(rows: Rows, row_bytes: int, mend: Mend) -> Sequence[Rows]:
    """Rows in messages' sizes. Those that pass are copied: the next ones come to lie where they are."""
    # The buffer is used again for the next rows: what is gathered here has to be copied.
    if rows.is_passing:
        rows = rows._replace(data=memoryview(bytes(rows.data)))
    if len(rows.data) <= MESSAGE_BYTES:
        return (rows,)
    row_count = max(MESSAGE_BYTES // row_bytes, 1)
    begins = range(0, len(rows.data) // row_bytes, row_count)
    datas = [rows.data[row * row_bytes : (row + row_count) * row_bytes] for row in begins]
    checksums = await _summed(lambda: list(map(rows_checksum, datas)), [rows], mend)
    return [
        rows._replace(token_begin=rows.token_begin + row, data=data, checksum=checksum)
        for row, data, checksum in zip(begins, datas, checksums, strict=True)
    ]


async def chunk_message(parts: Sequence[Rows], mend: Mend) -> bytes:
    """Encode rows of one stream as one message, with their joint checksum.

    Raises CorruptSegment, TierFailure.
    """
    data = [part.data for part in parts]
    checksum = await _summed(lambda: joint_checksum(data), parts, mend)
    return encode_chunk(parts[0].stream, parts[0].token_begin, data, checksum)


async def _summed(make: Callable[[], T], known: Sequence[Rows], mend: Mend) -> T:
    """New checksums of rows, made before the old ones are verified: one of them finds any change.

    Rows that are not what they must be are mended where they lie. Raises CorruptSegment, TierFailure.
    """
    # New sums first. If the rows change in between, either the old sum fails or the new one is wrong for the
    # reader.
    for _ in range(TRIES):
        made = make()
        bad = next((rows for rows in known if rows_checksum(rows.data) != rows.checksum), None)
        if bad is None:
            return made
        # A copy cannot be mended: it is read again by the reader.
        if bad.segment is None:
            break
        await mend(bad.segment)
    raise CorruptSegment(segment_id="?", problem="memory does not keep its rows")
