"""A ReadSession stream: rows as they arrive, verified, in order, and taken up once where it breaks.

Rows that are not what their checksums say are asked for once more, verified by the server before it sends
them: memory
may be at fault, and not the way.

Keeps nothing it has handed out. Not thread-safe. Worst case: rows that are damaged, out of order or
of another generation raise, and nothing of theirs is returned.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ctxcache.client.arena import Bytes
from ctxcache.client.convert import ranges_to_wire, streams_from_wire, token_range
from ctxcache.client.row_transport import OpenRead, RowTransport
from ctxcache.client.rows import RowPiece
from ctxcache.errors import CacheError, ChecksumMismatch, SessionNotFound, Unavailable
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import ReadSessionRequest


class ChunkStream:
    """Iterates once over the pieces of a read; `header` is there from the start.

    `row_sizes` are the bytes of one row of each stream that the session stores; `size_bytes` is about
    what the read will bring, for its deadline.
    """

    def __init__(
        self,
        transport: RowTransport,
        request: ReadSessionRequest,
        row_sizes: Mapping[Stream, int],
        *,
        size_bytes: int,
    ) -> None:
        self._transport, self._request, self._row_sizes = transport, request, row_sizes
        self._size_bytes = size_bytes
        self._read = self._open(request)
        self.header = self._read.header
        self.streams = tuple(streams_from_wire(self.header.streams))
        self.begin, self.end = self.header.range.begin, self.header.range.end
        # What has not arrived: the first of these from `_next_token` on, the others whole.
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
        except ChecksumMismatch:
            yield from self._resume(recheck=True)
        if self._missing:
            raise self._broken_contract(f"the read ended before {self._missing[0]}")

    def close(self) -> None:
        """Stop the server's sending; a read that is whole ends in order."""
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
            if_generation_match=self.header.session.generation,
            streams=ranges_to_wire(streams),
            range=token_range(begin, self.end),
        )

    def _open(self, request: ReadSessionRequest) -> OpenRead:
        return self._transport.read(request, size_bytes=self._size_bytes)

    def _drain(self) -> Iterator[RowPiece]:
        while (piece := self._read.next(self._land)) is not None:
            rows = piece.rows.reshape(-1, self._row_sizes[piece.stream])
            self._advance(piece.token_begin + len(rows))
            yield RowPiece(piece.stream, piece.token_begin, rows)

    def _land(self, stream: Stream, token_begin: int, size_bytes: int) -> Bytes | None:
        if not self._missing or stream != self._missing[0] or token_begin != self._next_token:
            raise self._broken_contract(f"{stream} at token {token_begin} is out of order")
        row_count, rest = divmod(size_bytes, self._row_sizes[stream])
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
