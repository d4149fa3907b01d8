"""A session's rows as a reader gets them, and what each transport of rows offers.

Knows neither the arena nor the wire: it holds what all routes share. Not thread-safe. Worst case: rows that
fail their checksum, or whose lease has ended, are never returned; a transport that breaks raises Unavailable.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import AppendHeader, ReadHeader, ReadSessionRequest


class RowPiece(NamedTuple):
    """Consecutive rows of one stream: `rows` [n, row_bytes], the first of them of token `token_begin`."""

    stream: Stream
    token_begin: int
    rows: Bytes


class SessionRows(ABC):
    """Rows of tokens `[begin, end)`. A context manager: leaving it ends the lease or the stream."""

    is_local: bool
    """Whether the rows are views of the arena, valid until close, instead of copies."""
    session: SessionInfo
    """The session as it is read."""
    streams: tuple[Stream, ...]
    """Streams that can be read, in layer order."""
    begin: int
    end: int

    @property
    def token_count(self) -> int:
        """How many tokens there are rows of."""
        return self.end - self.begin

    @abstractmethod
    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError(stream)."""

    @abstractmethod
    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """Return a stream's rows in token order as read-only arrays [n, row_bytes], copying nothing.

        Streamed rows are verified as they arrive, local rows when their stream is first asked for; a view
        shows what memory has later as well, `array` does not. Raises CorruptSegment (local), ChecksumMismatch
        (remote), InvalidArgument for a stream that is not read.
        """

    @abstractmethod
    def chunks(self) -> Iterator[RowPiece]:
        """Iterate over all rows, stream by stream in layer order, as they become available.

        A remote read keeps none of them and can be iterated once. Raises as `pieces` does.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise LeaseNotFound if local views no longer show the session's rows.

        A caller that copies out of `pieces` or `chunks` calls it after the copy; `array` does so itself.
        """

    @abstractmethod
    def close(self) -> None:
        """End the lease or the stream; local views must not be used any more."""

    def array(self, stream: Stream, *, out: Bytes | None = None) -> Bytes:
        """Copy a stream's rows into one array [T, row_bytes]: `out`, or a fresh one (4x slower to fill).

        A remote read receives them right into `out`, and has them no more: ask for a stream once then.
        Raises as `pieces` does, and LeaseNotFound when the lease ended before the copy did.
        """
        pieces = self.pieces(stream)
        shape = (self.token_count, self.row_bytes(stream))
        whole = np.empty(shape, np.uint8) if out is None else out
        self._check_out(whole, stream)
        begin = 0
        for rows in pieces:
            # Not by slice assignment of memoryviews, which would hold the GIL.
            np.copyto(whole[begin : begin + len(rows)], rows)
            begin += len(rows)
        self.check()
        return whole

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_out(self, out: Bytes, stream: Stream) -> None:
        shape = (self.token_count, self.row_bytes(stream))
        if out.shape != shape or out.dtype != np.uint8:
            raise InvalidArgument(field="out", problem=f"{out.dtype}{out.shape} is not uint8{shape}")

    def _check_stream(self, stream: Stream) -> None:
        if stream not in self.streams:
            raise InvalidArgument(field="streams", problem=f"{stream} is not among those that are read")


class Landing(Protocol):
    """Says where rows that arrive belong."""

    def __call__(self, stream: Stream, token_begin: int, size_bytes: int) -> Bytes | None:
        """Return the place for the rows, [n, row_bytes]; None: wherever they lie.

        Raises for rows out of order.
        """


class OpenRead(Protocol):
    """A read under way. Not thread-safe."""

    header: ReadHeader

    def next(self, landing: Landing) -> RowPiece | None:
        """Return the next rows, verified; None at the end.

        Raises ChecksumMismatch, Unavailable, the server's.
        """

    def close(self) -> None:
        """Stop the server's sending."""


class RowTransport(Protocol):
    """A way to a server. Thread-safe."""

    target: str

    def read(self, request: ReadSessionRequest, *, size_bytes: int) -> OpenRead:
        """Begin a read of about `size_bytes`. Raises what ReadSession raises."""

    def append(
        self, header: AppendHeader, rows: Mapping[Stream, Bytes], durability: Durability
    ) -> SessionInfo:
        """Append rows, uint8 [T, row_bytes] per stream of the layout, and commit them all.

        Returns the session. Raises what AppendSession raises.
        """
