"""How rows travel when they do not lie in shared memory: what every way of carrying them offers.

Knows no wire. Worst case: a way that breaks raises Unavailable, and what had arrived stays valid.
"""

from collections.abc import Mapping
from typing import Protocol

from ctxcache.client.arena import Bytes
from ctxcache.client.rows import RowPiece
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import AppendHeader, ReadHeader, ReadSessionRequest


class Landing(Protocol):
    """Says where rows that arrive belong."""

    def __call__(self, stream: Stream, token_begin: int, size_bytes: int) -> Bytes | None:
        """Return the place for the rows, [n, row_bytes]; None: wherever they lie. Raises for rows out of order."""


class OpenRead(Protocol):
    """A read under way. Not thread-safe."""

    header: ReadHeader

    def next(self, landing: Landing) -> RowPiece | None:
        """Return the next rows, verified; None at the end. Raises ChecksumMismatch, Unavailable, the server's."""

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
