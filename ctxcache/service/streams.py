"""The two rpcs of SessionService that move rows over the wire, for any client on any host.

Messages with rows are made and read here, around the rows: protobuf's own types would copy them twice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeAlias

from ctxcache.cache import Cache
from ctxcache.cache.asked import Request
from ctxcache.cache.reading import Lease, Rows
from ctxcache.errors import ChecksumMismatch, InvalidArgument
from ctxcache.format.identity import joint_checksum, wire_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream
from ctxcache.format.wire_chunk import WireChunk, encode_chunk, scan_chunk
from ctxcache.service import convert, validate
from ctxcache.service.appending import Append, begin_append
from ctxcache.service.rpc import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.v1 import session_pb2, session_pb2_grpc

AppendMessage: TypeAlias = WireChunk | session_pb2.AppendSessionRequest
"""What arrives on an append: a chunk around its bytes, or any other message."""
ReadMessage: TypeAlias = bytes | session_pb2.ReadSessionResponse
"""What is sent to a reader: an encoded chunk, or the header."""
MESSAGE_BYTES = 1 << 20


class StreamRpcs(session_pb2_grpc.SessionServiceServicer):
    """AppendSession and ReadSession. See proto/ctxcache/v1/session.proto."""

    def __init__(self, cache: Cache) -> None:
        self._writing = cache.writing
        self._reading = cache.reading

    async def AppendSession(  # noqa: N802
        self, request_iterator: AsyncIterator[AppendMessage], context: Context
    ) -> session_pb2.AppendSessionResponse:
        """See the proto."""
        first = await anext(aiter(request_iterator), None)
        if not isinstance(first, session_pb2.AppendSessionRequest) or first.WhichOneof("message") != "header":
            raise InvalidArgument(field="header", problem="the first message must be the header")
        append = await begin_append(self._writing, first.header, tenant_of(context))
        try:
            async for request in request_iterator:
                await self._take(append, request)
        finally:
            append.release()
        append.check_finished()
        return session_pb2.AppendSessionResponse(session=convert.session_message(append.view))

    async def _take(self, append: Append, request: AppendMessage) -> None:
        if isinstance(request, WireChunk):
            await self._place(append, request)
            return
        match request.WhichOneof("message"):
            case "chunk":
                await self._place(append, _as_wire_chunk(request.chunk))
            case "commit":
                await append.commit(request.commit)
            case other:
                raise InvalidArgument(field="message", problem=f"{other or 'nothing'} is not expected here")

    async def _place(self, append: Append, chunk: WireChunk) -> None:
        stream = validate.stream(chunk.stream, "chunk.stream")
        end = append.check(stream, chunk.token_begin, len(chunk.data))
        if wire_checksum(chunk.data) != chunk.checksum:
            raise ChecksumMismatch(field="chunk.data")
        await append.make_room(end)
        self._writing.place(append.reservation, stream, chunk.token_begin, chunk.data)
        append.received[stream] = end

    def ReadSession(  # type: ignore[override]  # noqa: N802  # chunks are encoded already
        self, request: session_pb2.ReadSessionRequest, context: Context
    ) -> AsyncGenerator[ReadMessage]:
        """See the proto."""
        return self._messages(request, tenant_of(context))

    async def _messages(
        self, request: session_pb2.ReadSessionRequest, tenant: str
    ) -> AsyncGenerator[ReadMessage]:
        asked, streams = read_request(request, tenant)
        async with self._reading.stream(asked, streams) as (lease, chosen, rows):
            yield session_pb2.ReadSessionResponse(header=read_header(lease, chosen))
            async for first, parts in packed(rows, lease.view.layout):
                # A slow reader may outlive what is lent to it.
                self._reading.check(lease)
                yield _chunk_message(first, parts)


def _decode_append(encoded: bytes) -> AppendMessage:
    return scan_chunk(encoded) or session_pb2.AppendSessionRequest.FromString(encoded)


def _as_wire_chunk(chunk: session_pb2.Chunk) -> WireChunk:
    stream = validate.stream(chunk.stream, "chunk.stream")
    return WireChunk(stream, chunk.token_begin, memoryview(chunk.data), chunk.checksum)


def read_request(request: session_pb2.ReadSessionRequest, tenant: str) -> tuple[Request, list[Stream]]:
    """What a reader asks for, validated, and of which streams. Raises InvalidArgument."""
    has_range = request.HasField("range")
    asked = Request(
        tenant,
        validate.session_id(request.name),
        validate.fingerprint(request.model_fingerprint),
        request.if_generation_match if request.HasField("if_generation_match") else None,
        request.range.begin if has_range else 0,
        request.range.end if has_range else None,
    )
    return asked, validate.streams(request.streams, "streams")


def read_header(lease: Lease, streams: Sequence[Stream]) -> session_pb2.ReadHeader:
    """The first message of a read."""
    return session_pb2.ReadHeader(
        session=convert.session_message(lease.view),
        streams=[convert.stream_name(stream) for stream in streams],
        range=session_pb2.TokenRange(begin=lease.begin, end=lease.end),
    )


async def packed(
    rows: AsyncIterator[Rows], layout: SegmentLayout
) -> AsyncIterator[tuple[Rows, list[memoryview]]]:
    """Rows put together, or cut, into messages of about 1 MiB of one stream; at least a row each.

    Each message's first rows, and all its parts, as they lie.
    """
    parts: list[memoryview] = []
    first: Rows | None = None
    size_bytes = 0
    async for item in rows:
        for part in _cut(item, layout.row_bytes(item.stream)):
            if first and (part.stream is not first.stream or size_bytes + len(part.data) > MESSAGE_BYTES):
                yield first, parts
                parts, first, size_bytes = [], None, 0
            first = first or part
            parts.append(part.data)
            size_bytes += len(part.data)
    if first:
        yield first, parts


def _cut(rows: Rows, row_bytes: int) -> Sequence[Rows]:
    """Rows in messages' sizes. Those that pass are copied: the next ones come to lie where they are."""
    if len(rows.data) <= MESSAGE_BYTES and not rows.is_passing:
        return (rows,)
    data = memoryview(bytes(rows.data)) if rows.is_passing else rows.data
    row_count = max(MESSAGE_BYTES // row_bytes, 1)
    begins = range(0, len(data) // row_bytes, row_count)
    return [
        Rows(rows.stream, rows.token_begin + row, data[row * row_bytes : (row + row_count) * row_bytes])
        for row in begins
    ]


def _chunk_message(first: Rows, parts: list[memoryview]) -> bytes:
    return encode_chunk(first.stream, first.token_begin, parts, joint_checksum(parts))


DECODERS = {"/ctxcache.v1.SessionService/AppendSession": _decode_append}
"""How the edge reads requests that carry rows."""
