"""Rows by the streams of SessionService: messages of up to 1 MiB, each with its checksum.

Messages are made and read around the rows: protobuf's own types would copy them twice. Worst case:
an append breaks and nothing of it is visible; appending again from the session's `token_count` is safe.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import durability_to_wire, session_from_wire, stream_from_wire
from ctxcache.client.rows import Landing, RowPiece
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import ReadMessage, Wire, trace_metadata
from ctxcache.errors import CacheError, ChecksumMismatch
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.streams import Stream
from ctxcache.format.wire_chunk import WireChunk, encode_chunk
from ctxcache.v1.session_pb2 import (
    AppendCommit,
    AppendHeader,
    AppendSessionRequest,
    ReadHeader,
    ReadSessionRequest,
    ReadSessionResponse,
)

CHUNK_BYTES = 1 << 20


class _Call(Protocol):
    """What gRPC returns for a stream of answers."""

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
            return session_from_wire(answer.session)


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
        step = max(1, CHUNK_BYTES // view.shape[1])
        for begin in range(0, len(view), step):
            data = view[begin : begin + step].data.cast("B")
            yield encode_chunk(stream, header.write_offset + begin, [data], wire_checksum(data))
    token_count = header.write_offset + len(next(iter(rows.values())))
    commit = AppendCommit(token_count=token_count, durability=durability_to_wire(durability))
    yield AppendSessionRequest(commit=commit).SerializeToString()
