"""The two rpcs of SessionService that move rows over the wire, for any client on any host."""

from collections.abc import AsyncIterator, Sequence

from ctxcache.cache import Cache
from ctxcache.cache.reading import Lease, Request, Rows
from ctxcache.cache.writing import Reservation
from ctxcache.core.session import SessionView
from ctxcache.errors import (
    CacheError,
    ChecksumMismatch,
    IncompleteAppend,
    InvalidArgument,
    ReservationNotFound,
    SessionNotFound,
    WriteOffsetMismatch,
)
from ctxcache.format.identity import wire_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream
from ctxcache.service import convert, validate
from ctxcache.service.edge import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.v1 import session_pb2, session_pb2_grpc

MESSAGE_BYTES = 1 << 20
CHUNK_BYTES_LIMIT = 2 << 20


class StreamRpcs(session_pb2_grpc.SessionServiceServicer):
    """AppendSession and ReadSession. See proto/ctxcache/v1/session.proto."""

    def __init__(self, cache: Cache) -> None:
        self._writing = cache.writing
        self._reading = cache.reading

    async def AppendSession(  # noqa: N802
        self, request_iterator: AsyncIterator[session_pb2.AppendSessionRequest], context: Context
    ) -> session_pb2.AppendSessionResponse:
        """See the proto."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "header":
            raise InvalidArgument(field="header", problem="the first message must be the header")
        reservation = await self._reserve(first.header, tenant_of(context))
        append = _Append(reservation)
        try:
            async for request in request_iterator:
                self._writing.renew(reservation)
                await self._take(append, request)
        except ReservationNotFound as error:
            raise append.cut_off() from error
        finally:
            self._writing.release(reservation)
        append.check_finished()
        return session_pb2.AppendSessionResponse(session=convert.session_message(append.view))

    async def _reserve(self, header: session_pb2.AppendHeader, tenant: str) -> Reservation:
        generation = header.if_generation_match if header.HasField("if_generation_match") else None
        return await self._writing.reserve(
            tenant,
            validate.session_id(header.name, "header.name"),
            fingerprint=validate.fingerprint(header.model_fingerprint, "header.model_fingerprint"),
            write_offset=header.write_offset,
            generation=generation,
            token_count=0,
        )

    async def _take(self, append: "_Append", request: session_pb2.AppendSessionRequest) -> None:
        match request.WhichOneof("message"):
            case "chunk":
                stream, end = append.check(request.chunk)
                await self._writing.extend(append.reservation, max(end - append.reservation.end, 0))
                data = memoryview(request.chunk.data)
                self._writing.place(append.reservation, stream, request.chunk.token_begin, data)
                append.received[stream] = end
            case "commit":
                append.check_commit(request.commit.token_count)
                is_durable = validate.is_durable(request.commit.durability, "commit.durability")
                append.view = await self._writing.commit(
                    append.reservation, request.commit.token_count, is_durable=is_durable, keep_open=True
                )
            case other:
                raise InvalidArgument(field="message", problem=f"{other or 'nothing'} is not expected here")

    async def ReadSession(  # noqa: N802
        self, request: session_pb2.ReadSessionRequest, context: Context
    ) -> AsyncIterator[session_pb2.ReadSessionResponse]:
        """See the proto."""
        has_range = request.HasField("range")
        asked = Request(
            tenant_of(context),
            validate.session_id(request.name),
            validate.fingerprint(request.model_fingerprint),
            request.if_generation_match if request.HasField("if_generation_match") else None,
            request.range.begin if has_range else 0,
            request.range.end if has_range else None,
        )
        streams = validate.streams(request.streams, "streams")
        async with self._reading.stream(asked, streams) as (lease, chosen, rows):
            yield session_pb2.ReadSessionResponse(header=_read_header(lease, chosen))
            async for chunk in _packed(rows, lease.view.layout):
                yield session_pb2.ReadSessionResponse(chunk=chunk)


class _Append:
    """What has come of an append: `received` is one past the last token of each stream."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.layout = reservation.session.layout
        self.received = {spec.stream: reservation.committed for spec in self.layout.specs}
        self.view: SessionView = reservation.session.view()

    def check(self, chunk: session_pb2.Chunk) -> tuple[Stream, int]:
        """The chunk's stream, and one past its last token. Raises what is wrong with it."""
        stream = validate.stream(chunk.stream, "chunk.stream")
        if stream not in self.received:
            raise InvalidArgument(field="chunk.stream", problem=f"the session does not store {stream}")
        row_bytes = self.layout.row_bytes(stream)
        validate.within(len(chunk.data), 1, CHUNK_BYTES_LIMIT, "chunk.data")
        if len(chunk.data) % row_bytes:
            raise InvalidArgument(field="chunk.data", problem=f"is not a multiple of {row_bytes} bytes")
        if wire_checksum(chunk.data) != chunk.checksum:
            raise ChecksumMismatch(field="chunk.data")
        if chunk.token_begin != self.received[stream]:
            name = self.reservation.session.name
            raise WriteOffsetMismatch(
                session=f"{name} {stream}", token_count=self.received[stream], write_offset=chunk.token_begin
            )
        return stream, chunk.token_begin + len(chunk.data) // row_bytes

    def check_commit(self, token_count: int) -> None:
        """Raise IncompleteAppend unless every stream has its rows up to there, and InvalidArgument."""
        validate.within(token_count, self.reservation.committed, 2**62, "commit.token_count")
        for stream, end in self.received.items():
            if end < token_count:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=token_count)

    def cut_off(self) -> CacheError:
        """Why the reservation ended under the stream: what the writer has to know to go on."""
        session = self.reservation.session
        if session.is_gone:
            return SessionNotFound(session=session.name)
        return WriteOffsetMismatch(
            session=session.name, token_count=session.token_count, write_offset=self.reservation.committed
        )

    def check_finished(self) -> None:
        """Raise IncompleteAppend when rows came after the last commit."""
        committed = self.reservation.committed
        for stream, end in self.received.items():
            if end > committed:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=committed)


def _read_header(lease: Lease, streams: Sequence[Stream]) -> session_pb2.ReadHeader:
    return session_pb2.ReadHeader(
        session=convert.session_message(lease.view),
        streams=[convert.stream_name(stream) for stream in streams],
        range=session_pb2.TokenRange(begin=lease.begin, end=lease.end),
    )


async def _packed(rows: AsyncIterator[Rows], layout: SegmentLayout) -> AsyncIterator[session_pb2.Chunk]:
    """Rows put together, or cut, into messages of about 1 MiB of one stream; at least a row each."""
    parts: list[memoryview] = []
    first: Rows | None = None
    size_bytes = 0
    async for item in rows:
        for part in _copied(item, layout.row_bytes(item.stream)):
            if first and (part.stream != first.stream or size_bytes + len(part.data) > MESSAGE_BYTES):
                yield _chunk(first, parts)
                parts, first, size_bytes = [], None, 0
            first = first or part
            parts.append(part.data)
            size_bytes += len(part.data)
    if first:
        yield _chunk(first, parts)


def _copied(rows: Rows, row_bytes: int) -> list[Rows]:
    """Rows in messages' sizes, copied before anything is sent: a slow reader may outlive what is lent to it."""
    data = memoryview(bytes(rows.data))
    row_count = max(MESSAGE_BYTES // row_bytes, 1)
    begins = range(0, len(data) // row_bytes, row_count)
    return [
        Rows(rows.stream, rows.token_begin + row, data[row * row_bytes : (row + row_count) * row_bytes])
        for row in begins
    ]


def _chunk(first: Rows, parts: list[memoryview]) -> session_pb2.Chunk:
    data = b"".join(parts)
    return session_pb2.Chunk(
        stream=convert.stream_name(first.stream),
        token_begin=first.token_begin,
        data=data,
        checksum=wire_checksum(data),
    )
