"""Rows by the streams of SessionService, for a client without an arena: messages of up to 1 MiB, checksummed.

A read hands rows on as they arrive; an append is collected for one commit. Messages are made and read around
the rows: protobuf's own types would copy them twice. Rows that fail their checksums are asked for once more,
verified by the server before it sends them: memory may be at fault, and not the way. Not thread-safe. Worst
case of a read: a late layer is asked for first, and all earlier ones stay in memory. Worst case of an append:
the stream breaks and nothing of it is visible; appending again from the session's `token_count` is safe.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import (
    durability_to_wire,
    ranges_to_wire,
    stream_from_wire,
    streams_from_wire,
    token_range,
)
from ctxcache.client.messages import read_session_info, write_content
from ctxcache.client.rows import Landing, OpenRead, RowPiece, RowTransport, SessionRows
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import ReadMessage, Wire, trace_metadata
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, ChecksumMismatch, InvalidArgument, SessionNotFound, Unavailable
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.streams import Content, Stream, StreamSpec, contents_within
from ctxcache.format.wire_chunk import WireChunk, encode_chunk
from ctxcache.v1.session_pb2 import (
    AppendCommit,
    AppendHeader,
    AppendSessionRequest,
    ReadHeader,
    ReadSessionRequest,
    ReadSessionResponse,
)

COMING_LIMIT = 1 << 20
"""Most tokens that an append may announce."""


RowSizes = Callable[[SessionInfo], Mapping[Stream, int]]
"""Bytes of one row of each stream that a session stores."""


# Rows come stream by stream, each in token order, so that what is missing after a break is always this:
#
#     stream 0   ████████████████████   arrived
#     stream 1   █████████░░░░░░░░░░░   the first missing one, from `_next_token`
#     stream 2   ░░░░░░░░░░░░░░░░░░░░   missing whole
#
#     resumed by two reads: (stream 1 from `_next_token`) and (streams 2 … from `begin`)
#
# One break is mended; a second one is the caller's.
class ChunkStream:
    """Iterates once over the pieces of a read; `header` is there from the start.

    `sizes_of` says the bytes of one row of each stream that a session stores; `size_bytes` is about what the
    read will bring, for its deadline.
    """

    def __init__(
        self,
        transport: RowTransport,
        request: ReadSessionRequest,
        sizes_of: RowSizes,
        *,
        size_bytes: int,
    ) -> None:
        self._transport, self._request = transport, request
        self._size_bytes = size_bytes
        self._read = self._open(request)
        self.header = self._read.header
        self.row_sizes = sizes_of(read_session_info(self.header.session))
        self.streams = tuple(streams_from_wire(self.header.streams))
        self.begin, self.end = self.header.range.begin, self.header.range.end
        # The tokens that have not arrived: the first of these from `_next_token` on, the others whole.
        self._missing = deque(self.streams if self.begin < self.end else ())
        self._next_token = self.begin
        self._places: dict[Stream, Bytes] = {}

    def place(self, stream: Stream, out: Bytes) -> None:
        """Have the rows of a stream that has not begun to arrive put into `out`, [T, row_bytes]."""
        self._places[stream] = out

    def __iter__(self) -> Iterator[RowPiece]:
        try:
            yield from self._drain()
        except Unavailable:
            yield from self._resume(recheck=False)
        # The server verifies what it holds before it sends it again: the damage may be on its side.
        except ChecksumMismatch:
            yield from self._resume(recheck=True)
        if self._missing:
            raise self._broken_contract(f"the read ended before {self._missing[0]}")

    def close(self) -> None:
        """Stop the server's sending; a read that is whole ends in order."""
        # Draws the end of a read that is whole, so that a kept connection is between two requests and serves
        # again.
        if not self._missing:
            with suppress(CacheError):
                self._read.next(self._land)
        self._read.close()

    def _resume(self, *, recheck: bool) -> Iterator[RowPiece]:
        for request in self._missing_requests():
            request.recheck = recheck
            self._read.close()
            self._read = self._open(request)
            # The generation may be the same by chance; the uid never is.
            if self._read.header.session.uid != self.header.session.uid:
                raise SessionNotFound(session=self._request.name)
            yield from self._drain()

    def _missing_requests(self) -> list[ReadSessionRequest]:
        streams = list(self._missing)
        if not streams or self._next_token == self.begin:
            return [self._request_for(streams, self.begin)] if streams else []
        requests = [self._request_for(streams[:1], self._next_token)]
        return requests + ([self._request_for(streams[1:], self.begin)] if streams[1:] else [])

    def _request_for(self, streams: Sequence[Stream], begin: int) -> ReadSessionRequest:
        return ReadSessionRequest(
            name=self._request.name,
            model_fingerprint=self._request.model_fingerprint,
            # The same content or an error: rows of two generations in one answer would be no session's.
            if_generation_match=self.header.session.generation,
            streams=ranges_to_wire(streams),
            range=token_range(begin, self.end),
            is_quiet=self._request.is_quiet,
        )

    def _open(self, request: ReadSessionRequest) -> OpenRead:
        return self._transport.read(request, size_bytes=self._size_bytes)

    def _drain(self) -> Iterator[RowPiece]:
        while (piece := self._read.next(self._land)) is not None:
            rows = piece.rows.reshape(-1, self.row_sizes[piece.stream])
            self._advance(piece.token_begin + len(rows))
            yield RowPiece(piece.stream, piece.token_begin, rows)

    def _land(self, stream: Stream, token_begin: int, size_bytes: int) -> Bytes | None:
        # Checked before the rows are received into their place: behind this they overwrite a caller's memory.
        if not self._missing or stream != self._missing[0] or token_begin != self._next_token:
            raise self._broken_contract(f"{stream} at token {token_begin} is out of order")
        row_count, rest = divmod(size_bytes, self.row_sizes[stream])
        if rest or not 0 < row_count <= self.end - token_begin:
            raise self._broken_contract(f"{size_bytes} B do not fit {stream}")
        place = self._places.get(stream)
        first = token_begin - self.begin
        return None if place is None else place[first : first + row_count]

    def _advance(self, token_end: int) -> None:
        self._next_token = token_end
        if token_end == self.end:
            self._missing.popleft()
            self._next_token = self.begin

    def _broken_contract(self, problem: str) -> CacheError:
        return CacheError(f"{self._transport.target}: {problem}")


# The steps by which rows are handed out exclude one another, since they exist once:
#
#     pieces(s)        keeps what arrives up to the end of s
#     chunks()         hands out what is kept, then what arrives, keeping nothing        (once)
#     array(s, out=)   s arrives in the caller's memory, and is not kept                 (s once)
class StreamedRows(SessionRows):
    """Rows that come over the wire in layer order. Raises what ReadSession raises."""

    is_local = False

    def __init__(
        self,
        transport: RowTransport,
        request: ReadSessionRequest,
        sizes_of: RowSizes,
        *,
        size_bytes: int,
    ) -> None:
        self._source = ChunkStream(transport, request, sizes_of, size_bytes=size_bytes)
        self._arrivals = iter(self._source)
        self._told = self._source.header.session
        self.streams = self._source.streams
        self.begin, self.end = self._source.begin, self._source.end
        self._kept: dict[Stream, list[RowPiece]] = {stream: [] for stream in self.streams}
        self._kept_counts = dict.fromkeys(self.streams, 0)
        self._is_handed_out = False
        self._placed: set[Stream] = set()

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._source.row_sizes[stream]

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Wait until a stream's rows have arrived, keeping those before it, and return them."""
        self._check_stream(stream)
        self._check_not_placed([stream])
        self._wait_for(stream)
        return [piece.rows for piece in self._kept[stream]]

    def chunks(self) -> Iterator[RowPiece]:
        """Iterate over what is kept, then over what arrives; that is not kept, so only once."""
        self._check_not_handed_out()
        self._check_not_placed(self.streams)
        self._is_handed_out = True
        for stream in self.streams:
            yield from self._kept[stream]
        yield from self._arrivals

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """Receive a stream's rows right into `out` if none of them have arrived yet; else as SessionRows."""
        # A stream of which some rows are kept goes the general way: those rows are copied from what is kept.
        if out is None or not out.flags.c_contiguous or self._kept_counts.get(stream, 1):
            return super().array(stream, out=out)
        self._check_out(out, stream)
        self._check_not_handed_out()
        self._source.place(stream, out)
        self._placed.add(stream)
        self._wait_for(stream)
        return out

    def check(self) -> None:
        """Do nothing: these rows are copies."""

    def close(self) -> None:
        """End the stream; rows that arrived stay valid."""
        self._source.close()

    def _wait_for(self, stream: Stream) -> None:
        while self._kept_counts[stream] < self.token_count:
            self._check_not_handed_out()
            # Streams before the wanted one arrive first, whether anybody asks for them or not.
            piece = next(self._arrivals)
            self._kept_counts[piece.stream] += len(piece.rows)
            # Rows in a buffer of the caller's are the caller's: nobody says that it stays as it is.
            if piece.stream not in self._placed:
                self._kept[piece.stream].append(piece)

    def _check_not_placed(self, streams: Iterable[Stream]) -> None:
        for stream in self._placed.intersection(streams):
            raise InvalidArgument(field="streams", problem=f"{stream} was received into the caller's buffer")

    def _check_not_handed_out(self) -> None:
        if self._is_handed_out:
            raise InvalidArgument(field="streams", problem="chunks() has handed these rows out")


CHUNK_LIMIT_BYTES = 2 << 20


def append_by_stream(
    transport: RowTransport,
    header: AppendHeader,
    rows: Mapping[Stream, Bytes],
    durability: Durability,
) -> SessionInfo:
    """Append rows, uint8 [T, row_bytes] per stream of the layout, and commit them all.

    Returns the session. Raises what AppendSession raises.
    """
    for stream, view in rows.items():
        if view.shape[1] > CHUNK_LIMIT_BYTES:
            problem = f"{stream}: a row of {view.shape[1]} B is too long for a stream"
            raise InvalidArgument(field="rows", problem=problem)
    # The server makes room for all of it at once, long segments where they fit.
    header.coming_token_count = min(len(next(iter(rows.values()))), COMING_LIMIT)
    return transport.append(header, rows, durability)


class BufferedWriter(SessionWriter):
    """Collects rows in this process and appends them on commit; holds no room on the server.

    Another writer may come first: the commit then raises WriteOffsetMismatch.
    """

    is_local = False

    def __init__(
        self,
        transport: RowTransport,
        session: SessionInfo,
        header: AppendHeader,
        token_count: int,
        specs: Mapping[Stream, StreamSpec],
    ) -> None:
        super().__init__(session, token_count, specs)
        self._transport, self._header = transport, header
        self._buffers = {
            stream: np.empty((token_count, spec.row_bytes), np.uint8) for stream, spec in specs.items()
        }

    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        np.copyto(self._buffers[stream][row_begin : row_begin + len(rows)], rows)

    def _commit(self, row_count: int, durability: Durability, *, keep_open: bool) -> SessionInfo:
        rows = {stream: buffer[self._committed_count : row_count] for stream, buffer in self._buffers.items()}
        session = append_by_stream(self._transport, self._header, rows, durability)
        contents = contents_within(
            (Content(one.begin, one.end, one.digest) for one in self._header.contents),
            session.token_count,
            self.write_offset + self.token_count,
        )
        # The next append of the same writer begins where this one ended, and must find the session as it left
        # it.
        self._header = AppendHeader(
            name=self._header.name,
            model_fingerprint=self._header.model_fingerprint,
            write_offset=session.token_count,
            if_generation_match=session.generation,
            contents=[write_content(part) for part in contents],
        )
        if not keep_open:
            self._release()
        return session

    def _release(self) -> None:
        self._buffers.clear()


CHUNK_BYTES = 1 << 20


class _Call(Protocol):
    """A call with a stream of answers, as gRPC returns it."""

    def __next__(self) -> ReadMessage: ...
    def cancel(self) -> bool: ...


class GrpcRows:
    """See RowTransport."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.target = wire.target

    def read(self, request: ReadSessionRequest, *, size_bytes: int) -> "GrpcRead":
        """See RowTransport."""
        with self._wire.errors():
            call = self._wire.read_session(
                request, timeout=self._wire.bulk_timeout_s(size_bytes), metadata=trace_metadata()
            )
            return GrpcRead(self._wire, call)

    def append(
        self, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
    ) -> SessionInfo:
        """See RowTransport."""
        size_bytes = sum(view.nbytes for view in rows.values())
        with self._wire.errors():
            messages = _messages(header, rows, durability)
            timeout_s = self._wire.bulk_timeout_s(size_bytes)
            answer = self._wire.append_session(messages, timeout=timeout_s, metadata=trace_metadata())
            return read_session_info(answer.session)


class GrpcRead:
    """See OpenRead."""

    def __init__(self, wire: Wire, call: _Call) -> None:
        self._wire, self._call = wire, call
        self._lock = threading.Lock()
        wire.open_streams.add(self)
        try:
            self.header = self._receive_header()
        except BaseException:
            self.close()
            raise

    def next(self, landing: Landing) -> RowPiece | None:
        """See OpenRead."""
        message = self._receive()
        if message is None:
            self._wire.open_streams.discard(self)
            return None
        chunk = message if isinstance(message, WireChunk) else _as_wire_chunk(message)
        place = landing(chunk.stream, chunk.token_begin, len(chunk.data))
        if wire_checksum(chunk.data) != chunk.checksum:
            raise ChecksumMismatch(field=f"{chunk.stream} at token {chunk.token_begin}")
        rows = np.frombuffer(chunk.data, np.uint8)
        if place is not None:
            np.copyto(place.reshape(-1), rows)
        return RowPiece(chunk.stream, chunk.token_begin, rows if place is None else place)

    def close(self) -> None:
        """See OpenRead. From any thread."""
        # First cancelled, without the lock: a thread that waits in `_receive` holds it until the call has
        # ended.
        self._call.cancel()
        with self._lock:
            draw_end(self._call)
        self._wire.open_streams.discard(self)

    def _receive_header(self) -> ReadHeader:
        first = self._receive()
        if first is None or isinstance(first, WireChunk) or not first.HasField("header"):
            raise CacheError(f"{self._wire.target}: the read does not start with a header")
        return first.header

    def _receive(self) -> ReadMessage | None:
        with self._lock, self._wire.errors():
            return next(self._call, None)


# A grpc call whose parts are private
def draw_end(call: Any) -> None:
    """Take what is left of a call that was cancelled, or has ended."""
    # With SingleThreadedUnaryStream nobody draws the end of a call that was cancelled, and until that
    # is drawn the connection stays, at both ends, whatever becomes of the channel.
    while call._state.due:  # noqa: SLF001
        call._consume_next_event()  # noqa: SLF001


def _as_wire_chunk(message: ReadSessionResponse) -> WireChunk:
    chunk = message.chunk
    return WireChunk(
        stream_from_wire(chunk.stream), chunk.token_begin, memoryview(chunk.data), chunk.checksum
    )


def _messages(header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability) -> Iterator[bytes]:
    yield AppendSessionRequest(header=header).SerializeToString()
    for stream, view in rows.items():
        # At least one row, however long: a row is never split between messages.
        step = max(1, CHUNK_BYTES // view.shape[1])
        for begin in range(0, len(view), step):
            data = view[begin : begin + step].data.cast("B")
            yield encode_chunk(stream, header.write_offset + begin, [data], wire_checksum(data))
    token_count = header.write_offset + len(next(iter(rows.values())))
    commit = AppendCommit(token_count=token_count, durability=durability_to_wire(durability))
    yield AppendSessionRequest(commit=commit).SerializeToString()
