"""The two rpcs of SessionService that move rows over the wire, for any client on any host.

Messages with rows are made and read here, around the rows: protobuf's own types would copy them twice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from ctxcache.cache import Cache
from ctxcache.cache.leases import Lease, ReadRequest, Rows
from ctxcache.cache.scrubbing import TRIES
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import ChecksumMismatch, CorruptSegment, InvalidArgument
from ctxcache.format.identity import joint_checksum, rows_checksum, wire_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import StreamRange
from ctxcache.format.wire_chunk import WireChunk, encode_chunk, scan_chunk
from ctxcache.runtime.clock import Clock
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
Mend: TypeAlias = Callable[[Segment], Awaitable[None]]
"""See Leases.mend."""
T = TypeVar("T")


class StreamRpcs(session_pb2_grpc.SessionServiceServicer):
    """AppendSession and ReadSession. See proto/ctxcache/v1/session.proto."""

    def __init__(self, cache: Cache) -> None:
        self._writing = cache.appends
        self._reading = cache.leases
        self._clock = cache.state.clock

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
        return session_pb2.AppendSessionResponse(session=convert.session_message(append.view, self._clock))

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
        await append.make_room(end)
        self._writing.place(append.reservation, stream, chunk.token_begin, chunk.data)
        # Last: the rows were added up before, so that what changed until now is found here, and by their sums later.
        if wire_checksum(chunk.data) != chunk.checksum:
            raise ChecksumMismatch(field="chunk.data")
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
        async with self._reading.stream(asked, streams) as (lease, _, rows):
            yield session_pb2.ReadSessionResponse(header=read_header(lease, streams, self._clock))
            async for parts in packed(rows, lease.view.layout, self._reading.mend):
                # A slow reader may outlive what is lent to it.
                self._reading.check(lease)
                yield await _chunk_message(parts, self._reading.mend)


def _decode_append(encoded: bytes) -> AppendMessage:
    return scan_chunk(encoded) or session_pb2.AppendSessionRequest.FromString(encoded)


def _as_wire_chunk(chunk: session_pb2.Chunk) -> WireChunk:
    stream = validate.stream(chunk.stream, "chunk.stream")
    return WireChunk(stream, chunk.token_begin, memoryview(chunk.data), chunk.checksum)


def read_request(
    request: session_pb2.ReadSessionRequest, tenant: str
) -> tuple[ReadRequest, Sequence[StreamRange]]:
    """What a reader asks for, validated, and of which streams. Raises InvalidArgument."""
    has_range = request.HasField("range")
    asked = ReadRequest(
        tenant,
        validate.session_id(request.name),
        validate.fingerprint(request.model_fingerprint),
        request.if_generation_match if request.HasField("if_generation_match") else None,
        request.range.begin if has_range else 0,
        request.range.end if has_range else None,
        is_summed=True,
        is_rechecked=request.recheck,
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


async def _chunk_message(parts: Sequence[Rows], mend: Mend) -> bytes:
    data = [part.data for part in parts]
    checksum = await _summed(lambda: joint_checksum(data), parts, mend)
    return encode_chunk(parts[0].stream, parts[0].token_begin, data, checksum)


async def _summed(make: Callable[[], T], known: Sequence[Rows], mend: Mend) -> T:
    """New checksums of rows, made before the old ones are verified: what changes at any time is found by one of them.

    Rows that are not what they must be are mended where they lie. Raises CorruptSegment, TierFailure.
    """
    for _ in range(TRIES):
        made = make()
        bad = next((rows for rows in known if rows_checksum(rows.data) != rows.checksum), None)
        if bad is None:
            return made
        if bad.segment is None:
            break
        await mend(bad.segment)
    raise CorruptSegment(segment_id="?", problem="memory does not keep its rows")


DECODERS = {"/ctxcache.v1.SessionService/AppendSession": _decode_append}
"""How the edge reads requests that carry rows."""
