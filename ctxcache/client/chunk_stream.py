"""A ReadSession stream: rows as they arrive, verified, in order, and mended once if it breaks.

Keeps nothing it has handed out. Not thread-safe. Worst case: rows that are damaged, out of order or
of another generation raise, and nothing of theirs is returned.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from ctxcache.client.convert import stream_from_wire, stream_to_wire, token_range
from ctxcache.client.rows import Piece
from ctxcache.client.wire import Wire
from ctxcache.errors import CacheError, ChecksumMismatch, SessionNotFound, Unavailable
from ctxcache.format.identity import wire_checksum
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import Chunk, ReadHeader, ReadSessionRequest, ReadSessionResponse


class _Call(Protocol):
    """What gRPC returns for a stream of answers."""

    def __next__(self) -> ReadSessionResponse: ...
    def __iter__(self) -> Iterator[ReadSessionResponse]: ...
    def cancel(self) -> bool: ...


class ChunkStream:
    """Iterates once over the pieces of a read; `header` is there from the start.

    `row_sizes` are the bytes of one row of each stream that the session stores; `size_bytes` is about
    what the read will bring, for its deadline.
    """

    def __init__(
        self, wire: Wire, request: ReadSessionRequest, row_sizes: Mapping[Stream, int], *, size_bytes: int
    ) -> None:
        self._wire, self._request, self._row_sizes = wire, request, row_sizes
        self._timeout_s = wire.bulk_timeout_s(size_bytes)
        self._call, self.header = self._open(request)
        self.streams = tuple(map(stream_from_wire, self.header.streams))
        self.begin, self.end = self.header.range.begin, self.header.range.end
        # What has not arrived: the first of these from `_next_token` on, the others whole.
        self._missing = deque(self.streams if self.begin < self.end else ())
        self._next_token = self.begin

    def __iter__(self) -> Iterator[Piece]:
        try:
            yield from self._drain()
        except Unavailable:
            yield from self._resume()
        if self._missing:
            raise self._broken_contract(f"the read ended before {self._missing[0]}")

    def close(self) -> None:
        """Stop the server's sending."""
        self._call.cancel()

    def _resume(self) -> Iterator[Piece]:
        for request in self._missing_requests():
            self._call, header = self._open(request)
            # The generation may be the same by chance; the uid never is.
            if header.session.uid != self.header.session.uid:
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
            if_generation_match=self.header.session.generation,
            streams=map(stream_to_wire, streams),
            range=token_range(begin, self.end),
        )

    def _open(self, request: ReadSessionRequest) -> tuple[_Call, ReadHeader]:
        with self._wire.errors():
            call = self._wire.sessions.ReadSession(request, timeout=self._timeout_s)
            first = next(call, None)
        if first is None or not first.HasField("header"):
            raise self._broken_contract("the read does not start with a header")
        return call, first.header

    def _drain(self) -> Iterator[Piece]:
        while True:
            with self._wire.errors():
                message = next(self._call, None)
            if message is None:
                return
            yield self._take(message.chunk)

    def _take(self, chunk: Chunk) -> Piece:
        # Read once: each access to a bytes field makes a copy.
        data = chunk.data
        stream = self._expected(chunk)
        if wire_checksum(data) != chunk.checksum:
            raise ChecksumMismatch(field=f"{stream} at token {chunk.token_begin}")
        row_count, rest = divmod(len(data), self._row_sizes[stream])
        if rest or not 0 < row_count <= self.end - chunk.token_begin:
            raise self._broken_contract(f"{len(data)} B do not fit {stream}")
        self._advance(chunk.token_begin + row_count)
        return Piece(stream, chunk.token_begin, np.frombuffer(data, np.uint8).reshape(row_count, -1))

    def _expected(self, chunk: Chunk) -> Stream:
        stream = stream_from_wire(chunk.stream)
        if not self._missing or stream != self._missing[0] or chunk.token_begin != self._next_token:
            raise self._broken_contract(f"{stream} at token {chunk.token_begin} is out of order")
        return stream

    def _advance(self, token_end: int) -> None:
        self._next_token = token_end
        if token_end == self.end:
            self._missing.popleft()
            self._next_token = self.begin

    def _broken_contract(self, problem: str) -> CacheError:
        return CacheError(f"{self._wire.target}: {problem}")
