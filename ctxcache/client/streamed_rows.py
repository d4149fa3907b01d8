"""Reading by stream: rows arrive in messages, are verified and kept until they are asked for.

Knows no arena. Worst case: asking for a late layer first keeps all earlier ones in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ctxcache.client.arena import Bytes
from ctxcache.client.chunk_stream import ChunkStream
from ctxcache.client.row_transport import RowTransport
from ctxcache.client.rows import Piece, SessionRows
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import ReadSessionRequest


class StreamedRows(SessionRows):
    """Rows that come over the wire in layer order. Raises what ReadSession raises."""

    is_local = False

    def __init__(
        self,
        transport: RowTransport,
        request: ReadSessionRequest,
        row_sizes: Mapping[Stream, int],
        *,
        size_bytes: int,
    ) -> None:
        self._source = ChunkStream(transport, request, row_sizes, size_bytes=size_bytes)
        self._arrivals = iter(self._source)
        self._row_sizes = row_sizes
        self.session = self._source.header.session
        self.streams = self._source.streams
        self.begin, self.end = self._source.begin, self._source.end
        self._kept: dict[Stream, list[Piece]] = {stream: [] for stream in self.streams}
        self._kept_counts = dict.fromkeys(self.streams, 0)
        self._is_handed_out = False
        self._placed: set[Stream] = set()

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""
        return self._row_sizes[stream]

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Wait until a stream's rows have arrived, keeping those before it, and return them."""
        self._check_stream(stream)
        self._check_not_placed([stream])
        self._wait_for(stream)
        return [piece.rows for piece in self._kept[stream]]

    def chunks(self) -> Iterator[Piece]:
        """Iterate over what is kept, then over what arrives; that is not kept, so only once."""
        self._check_not_handed_out()
        self._check_not_placed(self.streams)
        self._is_handed_out = True
        for stream in self.streams:
            yield from self._kept[stream]
        yield from self._arrivals

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """Receive a stream's rows right into `out` when none of them have arrived yet; else as SessionRows."""
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
            piece = next(self._arrivals)
            self._kept_counts[piece.stream] += len(piece.rows)
            # What lies in a buffer of the caller's is the caller's: nobody says that it stays as it is.
            if piece.stream not in self._placed:
                self._kept[piece.stream].append(piece)

    def _check_not_placed(self, streams: Iterable[Stream]) -> None:
        for stream in self._placed.intersection(streams):
            raise InvalidArgument(field="streams", problem=f"{stream} was received into the caller's buffer")

    def _check_not_handed_out(self) -> None:
        if self._is_handed_out:
            raise InvalidArgument(field="streams", problem="chunks() has handed these rows out")
