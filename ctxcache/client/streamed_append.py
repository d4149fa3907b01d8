"""Appending by stream: rows are collected or at hand, and go out with one commit.

Knows no arena. Worst case: the stream breaks and nothing of it is visible; appending again from the
session's `token_count` is safe.
"""

from collections.abc import Mapping

import numpy as np

from ctxcache.client.arena import Bytes
from ctxcache.client.row_transport import RowTransport
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.v1.session_pb2 import AppendHeader, Durability, Session

CHUNK_LIMIT_BYTES = 2 << 20


def append_by_stream(
    transport: RowTransport,
    header: AppendHeader,
    rows: Mapping[Stream, Bytes],
    durability: Durability.ValueType,
) -> Session:
    """Append rows, uint8 [T, row_bytes] per stream of the layout, and commit them all.

    Returns the session. Raises what AppendSession raises.
    """
    for stream, view in rows.items():
        if view.shape[1] > CHUNK_LIMIT_BYTES:
            problem = f"{stream}: a row of {view.shape[1]} B is too long for a stream"
            raise InvalidArgument(field="rows", problem=problem)
    return transport.append(header, rows, durability)


class BufferedWriter(SessionWriter):
    """Collects rows in this process and appends them on commit; holds no room on the server.

    Another writer may come first: the commit then raises WriteOffsetMismatch.
    """

    is_local = False

    def __init__(
        self,
        transport: RowTransport,
        session: Session,
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

    def _commit(self, row_count: int, durability: Durability.ValueType, *, keep_open: bool) -> Session:
        rows = {stream: buffer[self._committed_count : row_count] for stream, buffer in self._buffers.items()}
        session = append_by_stream(self._transport, self._header, rows, durability)
        self._header = AppendHeader(
            name=self._header.name,
            model_fingerprint=self._header.model_fingerprint,
            write_offset=session.token_count,
            if_generation_match=session.generation,
        )
        if not keep_open:
            self._release()
        return session

    def _release(self) -> None:
        self._buffers.clear()
