"""The client: one connection to a server, and the choice between the arena and the wire.

Knows no engine. Thread-safe; what `read` and `writer` return belongs to one thread at a time. Worst
case: a server that vanishes costs each call its deadline, and each call raises a CacheError.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from ctxcache.client.admin import AdminCalls
from ctxcache.client.attach import Attachment, LocalAccess
from ctxcache.client.convert import model_from_wire, row_sizes, stream_from_wire, stream_to_wire, token_range
from ctxcache.client.leased_rows import LeasedRows, lease_rows
from ctxcache.client.models import ModelCalls
from ctxcache.client.reserved_writer import ReservedWriter, reserve
from ctxcache.client.rows import SessionRows
from ctxcache.client.sessions import SessionCalls
from ctxcache.client.shapes import check_append
from ctxcache.client.streamed_append import BufferedWriter, append_by_stream
from ctxcache.client.streamed_rows import StreamedRows
from ctxcache.client.wire import Wire
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CapacityExceeded, InvalidArgument, Unavailable
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import Reserve
from ctxcache.v1.session_pb2 import (
    DURABILITY_MEMORY,
    AppendHeader,
    Durability,
    ReadSessionRequest,
    Session,
)

DEFAULT_TARGET = "127.0.0.1:7420"
DEFAULT_TIMEOUT_S = 30.0
Access = Literal["auto", "local", "remote"]


class Client(ModelCalls, SessionCalls, AdminCalls):
    """Talks to the server at `target`, a gRPC target such as `host:port` or `unix:/path`.

    `timeout_s` bounds every wait; calls that move rows get more by their size. `access` says where
    rows travel: through shared memory only (`local`), by stream only (`remote`), or as it is possible.
    Where a session is asked for, its name does; a Session that an earlier call returned saves a call.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        access: Access = "auto",
    ) -> None:
        if access not in get_args(Access):
            raise InvalidArgument(field="access", problem=f"{access!r} is not one of {get_args(Access)}")
        super().__init__(Wire(target, timeout_s))
        self._access = access
        self._local = LocalAccess(self._wire)
        # Fingerprint to model. Models never change; as many as this process uses.
        self._models: dict[bytes, ModelSpec] = {}

    def append(
        self,
        session: str | Session,
        rows: Mapping[Stream, npt.NDArray[np.generic]],
        *,
        durability: Durability.ValueType = DURABILITY_MEMORY,
        if_generation_match: int | None = None,
    ) -> Session:
        """Append T tokens: for every stream of the layout, [T, row_bytes] or any C-contiguous array of T rows.

        Returns the session. All becomes visible or nothing does. Raises InvalidArgument,
        IncompleteAppend, GenerationMismatch, WriteInProgress, WriteOffsetMismatch, CapacityExceeded.
        """
        snapshot = self._snapshot(session)
        views = check_append(rows, self._row_sizes(snapshot))
        token_count = len(next(iter(views.values())))
        writer = self._reserve(snapshot, token_count, if_generation_match)
        if writer is None:
            header = _append_header(snapshot, if_generation_match)
            return append_by_stream(self._wire, header, views, durability)
        with writer:
            for stream, view in views.items():
                writer.write(stream, 0, view)
            return writer.commit(durability=durability)

    def writer(
        self, session: str | Session, token_count: int, *, if_generation_match: int | None = None
    ) -> SessionWriter:
        """Open room for `token_count` tokens after the session's end, to be filled layer by layer.

        Use it as a context manager. Raises as `append` does.
        """
        snapshot = self._snapshot(session)
        local = self._reserve(snapshot, token_count, if_generation_match)
        if local is not None:
            return local
        header = _append_header(snapshot, if_generation_match)
        return BufferedWriter(self._wire, snapshot, header, token_count, self._row_sizes(snapshot))

    def read(
        self,
        session: str | Session,
        *,
        streams: Iterable[Stream] | None = None,
        begin: int = 0,
        end: int | None = None,
        if_generation_match: int | None = None,
    ) -> SessionRows:
        """Read rows of tokens `[begin, end)`, by default all of all streams. Use it as a context manager.

        Raises TokenRangeOutOfBounds, GenerationMismatch, CorruptSegment, CapacityExceeded (only with
        access `local`; otherwise rows that the arena cannot hold come by stream).
        """
        snapshot = self._snapshot(session)
        wanted = None
        if begin != 0 or end is not None:
            wanted = token_range(begin, snapshot.token_count if end is None else end)
        request = ReadSessionRequest(
            name=snapshot.name,
            model_fingerprint=snapshot.model_fingerprint,
            if_generation_match=if_generation_match,
            streams=map(stream_to_wire, streams or ()),
            range=wanted,
        )
        leased = self._lease(request)
        return self._stream(snapshot, request) if leased is None else leased

    def close(self) -> None:
        """End every call, lease and reservation of this client."""
        self._wire.close()
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _snapshot(self, session: str | Session) -> Session:
        return self.get_session(session) if isinstance(session, str) else session

    def _row_sizes(self, snapshot: Session) -> dict[Stream, int]:
        fingerprint = snapshot.model_fingerprint
        if fingerprint not in self._models:
            self._models[fingerprint] = model_from_wire(self.get_model(snapshot.model))
        return row_sizes(self._models[fingerprint], map(stream_from_wire, snapshot.layout))

    def _attach(self) -> Attachment | None:
        attachment = None if self._access == "remote" else self._local.attach()
        if attachment is None and self._access == "local":
            raise Unavailable(target=self._wire.target, problem="its arena cannot be opened here")
        return attachment

    def _reserve(
        self, snapshot: Session, token_count: int, if_generation_match: int | None
    ) -> ReservedWriter | None:
        attachment = self._attach()
        arena = None if attachment is None else attachment.arena.writable()
        if attachment is None or arena is None:
            return None
        request = Reserve(
            session=snapshot.name,
            model_fingerprint=snapshot.model_fingerprint,
            write_offset=snapshot.token_count,
            if_generation_match=if_generation_match,
            token_count=token_count,
        )
        return reserve(attachment, arena, snapshot, request, self._row_sizes(snapshot))

    def _lease(self, request: ReadSessionRequest) -> LeasedRows | None:
        attachment = self._attach()
        if attachment is None:
            return None
        try:
            return lease_rows(attachment, request)
        except CapacityExceeded:
            if self._access == "local":
                raise
            return None

    def _stream(self, snapshot: Session, request: ReadSessionRequest) -> StreamedRows:
        sizes = self._row_sizes(snapshot)
        token_count = request.range.end if request.HasField("range") else snapshot.token_count
        return StreamedRows(self._wire, request, sizes, size_bytes=token_count * sum(sizes.values()))


def _append_header(snapshot: Session, if_generation_match: int | None) -> AppendHeader:
    return AppendHeader(
        name=snapshot.name,
        model_fingerprint=snapshot.model_fingerprint,
        write_offset=snapshot.token_count,
        if_generation_match=if_generation_match,
    )
