"""The client: one connection to a server, and the choice between the arena and the wire.

Knows no engine. Thread-safe; what `read` and `writer` return belongs to one thread at a time. Worst
case: a server that vanishes costs each call its deadline, and each call raises a CacheError.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from ctxcache.client.admin import AdminCalls
from ctxcache.client.attach import ArenaAttachment, BoundedMemo, LocalAccess, Way
from ctxcache.client.authorized import OwnTokenFile
from ctxcache.client.bulk_channel import BulkChannel
from ctxcache.client.bulk_rows import BulkRows
from ctxcache.client.convert import ranges_to_wire, token_range
from ctxcache.client.decode_batch import ROOM_TOKENS, DecodeBatch
from ctxcache.client.grpc_rows import GrpcRows
from ctxcache.client.hints import HintCalls
from ctxcache.client.leased_rows import lease_rows
from ctxcache.client.models import CallerModel, ModelCalls
from ctxcache.client.reserved_writer import ReservedWriter, reserve
from ctxcache.client.row_transport import RowTransport
from ctxcache.client.rows import SessionRows
from ctxcache.client.sessions import SessionCalls
from ctxcache.client.shapes import check_append
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.streamed_rows import BufferedWriter, StreamedRows, append_by_stream
from ctxcache.client.tls import ClientTls
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CapacityExceeded, InvalidArgument, Unavailable
from ctxcache.format.streams import Stream, StreamSpec
from ctxcache.v1.arena_pb2 import AcquireLease, Reserve
from ctxcache.v1.session_pb2 import (
    AppendHeader,
    ReadSessionRequest,
    TokenRange,
)

DEFAULT_TARGET = "127.0.0.1:7420"
DEFAULT_TIMEOUT_S = 30.0
Access = Literal["auto", "local", "local-socket", "local-grpc", "remote", "bulk", "grpc"]
Verify = Literal["always", "never"]
_WAYS: dict[Access, Way] = {"local-socket": "socket", "local-grpc": "grpc"}


class Client(ModelCalls, SessionCalls, HintCalls, AdminCalls):
    """Talks to the server at `target`, a gRPC target such as `host:port` or `unix:/path`.

    `timeout_s` bounds every wait; calls that move rows get more by their size. `access` says where
    rows travel: through shared memory only (`local`; `local-socket` and `local-grpc` also say what carries
    the leases), over sockets only (`remote`), or as it is possible. Over sockets means the server's bulk
    channel where it has one and it can be reached, and streams of gRPC otherwise; `bulk` and `grpc` allow
    only the one or the other. `verify`: rows under a lease are verified against what their writer said of
    them, copies
    as they are copied; `never` is for a caller that does so itself, and for measuring what it costs. Rows
    that come over
    a socket always are. `tls`: for a server whose TCP port has it.
    `token_file`: where the token is that says whose tenant's sessions this client works with; it is read
    again when it changes.
    `tenant`: of an operator, whose sessions the calls that move no rows are about.
    Where a session is asked for, its name does; a SessionInfo that an earlier call returned saves a call.
    Every call that moves rows takes the caller's own `model`; a session of another one is refused.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        access: Access = "auto",
        verify: Verify = "always",
        tls: ClientTls | None = None,
        token_file: str | Path | None = None,
        tenant: str = "",
    ) -> None:
        _check_one_of("access", access, get_args(Access))
        _check_one_of("verify", verify, get_args(Verify))
        super().__init__(
            Wire(target, timeout_s, tls, None if token_file is None else OwnTokenFile(token_file), tenant)
        )
        self._access = access
        self._bulk = BulkChannel(self._wire)
        self._transport = self._choose_transport(access)
        self._is_verified = verify == "always"
        self._local = LocalAccess(self._wire, _WAYS.get(access, "auto"))
        # By session uid, which never changes its layout or model.
        self._layouts: BoundedMemo[str, Mapping[Stream, StreamSpec]] = BoundedMemo()

    def append(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        rows: Mapping[Stream, npt.NDArray[np.generic]],
        *,
        durability: Durability = Durability.MEMORY,
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Append T tokens that `model` computed: for every stream of the layout a C-contiguous array of T rows.

        Its elements are the stream's, or uint8 [T, row_bytes]. Returns the session. All becomes visible or
        nothing
        does. Raises ModelFingerprintMismatch, InvalidArgument, IncompleteAppend, GenerationMismatch,
        WriteInProgress, WriteOffsetMismatch, CapacityExceeded.
        """
        snapshot = self._snapshot(session, model)
        specs = self._specs(snapshot, model)
        views = check_append(rows, specs)
        token_count = len(next(iter(views.values())))
        writer = self._reserve(snapshot, model, specs, token_count, if_generation_match)
        if writer is None:
            header = _append_header(snapshot, model, if_generation_match)
            return append_by_stream(self._transport, header, views, durability)
        with writer:
            writer.write_all(views, is_marked=durability is Durability.DISK)
            return writer.commit(durability=durability)

    def writer(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        token_count: int,
        *,
        if_generation_match: int | None = None,
    ) -> SessionWriter:
        """Open room for `token_count` tokens of `model` after the session's end, to be filled layer by layer.

        Use it as a context manager. Raises as `append` does.
        """
        snapshot = self._snapshot(session, model)
        specs = self._specs(snapshot, model)
        local = self._reserve(snapshot, model, specs, token_count, if_generation_match)
        if local is not None:
            return local
        header = _append_header(snapshot, model, if_generation_match)
        return BufferedWriter(self._transport, snapshot, header, token_count, specs)

    def decode_batch(
        self, sessions: Sequence[str | SessionInfo], model: CallerModel, *, room_tokens: int = ROOM_TOKENS
    ) -> DecodeBatch:
        """Open B sessions of `model`, all of one layout, for appending a token each per step, in place.

        Room is reserved for `room_tokens` steps at a time. What fails for one session is in the batch's
        `failures`. Use it as a context manager. Raises ModelFingerprintMismatch, InvalidArgument, Unavailable
        (not on
        the server's host).
        """
        snapshots = [self._snapshot(session, model) for session in sessions]
        attachment = self._attach()
        arena = None if attachment is None else attachment.arena.writable()
        if attachment is None or arena is None:
            raise Unavailable(target=self._wire.target, problem="its arena may not be written by this client")
        return DecodeBatch(attachment, arena, model, snapshots, room_tokens)

    def read(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        *,
        streams: Iterable[Stream] | None = None,
        begin: int = 0,
        end: int | None = None,
        if_generation_match: int | None = None,
        leave_on_ssd: bool = False,
    ) -> SessionRows:
        """Read rows of tokens `[begin, end)` for `model`, by default all of all streams. Use it as a context manager.

        `leave_on_ssd`: what lies only on SSD is not brought into the arena, but read from the files of the
        SSD tier, where
        this process can open them (`ssd_files`); the rows are FiledRows then. Raises
        ModelFingerprintMismatch,
        TokenRangeOutOfBounds, GenerationMismatch, CorruptSegment, CapacityExceeded (only with access `local`;
        otherwise rows that the arena cannot hold come by stream).
        """
        chosen = tuple(streams or ())
        if begin != 0 and end is None:
            session = self._snapshot(session, model)
            end = session.token_count
        wanted = None if end is None else token_range(begin, end)
        leased = self._lease(session, model, chosen, wanted, if_generation_match, leave_on_ssd=leave_on_ssd)
        if leased is not None:
            return leased
        snapshot = self._snapshot(session, model)
        request = ReadSessionRequest(
            name=snapshot.name,
            model_fingerprint=model.fingerprint,
            if_generation_match=if_generation_match,
            streams=ranges_to_wire(chosen),
            range=wanted,
        )
        sizes = {stream: spec.row_bytes for stream, spec in self._specs(snapshot, model).items()}
        token_count = snapshot.token_count if end is None else end
        return StreamedRows(self._transport, request, sizes, size_bytes=token_count * sum(sizes.values()))

    def ssd_files(self) -> SsdReader | None:
        """The files of the server's SSD tier as this process can read them; None where the server is elsewhere.

        Raises Unavailable, DeadlineExceeded.
        """
        attachment = self._attach()
        return None if attachment is None else attachment.arena.ssd_files()

    def close(self) -> None:
        """End every call, lease and reservation of this client."""
        self._bulk.close()
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

    def _choose_transport(self, access: Access) -> RowTransport:
        streams = GrpcRows(self._wire)
        if access == "grpc":
            return streams
        return BulkRows(self._wire, self._bulk, None if access == "bulk" else streams)

    def _snapshot(self, session: str | SessionInfo, model: CallerModel) -> SessionInfo:
        """The session as it is, or was. Raises ModelFingerprintMismatch for one of another model."""
        snapshot = self.get_session(session) if isinstance(session, str) else session
        model.check(snapshot.name, snapshot.model_fingerprint)
        return snapshot

    def _specs(self, snapshot: SessionInfo, model: CallerModel) -> Mapping[Stream, StreamSpec]:
        return self._layouts.get_or_make(snapshot.uid, lambda: model.specs(snapshot.streams()))

    def _attach(self) -> ArenaAttachment | None:
        attachment = None if self._access in ("remote", "bulk", "grpc") else self._local.attach()
        if attachment is None and self._is_only_local:
            raise Unavailable(target=self._wire.target, problem="its arena cannot be opened here")
        return attachment

    def _reserve(
        self,
        snapshot: SessionInfo,
        model: CallerModel,
        specs: Mapping[Stream, StreamSpec],
        token_count: int,
        if_generation_match: int | None,
    ) -> ReservedWriter | None:
        attachment = self._attach()
        arena = None if attachment is None else attachment.arena.writable()
        if attachment is None or arena is None:
            return None
        request = Reserve(
            session=snapshot.name,
            model_fingerprint=model.fingerprint,
            write_offset=snapshot.token_count,
            if_generation_match=if_generation_match,
            token_count=token_count,
        )
        return reserve(attachment, arena, snapshot, request, specs)

    def _lease(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        streams: Sequence[Stream],
        wanted: TokenRange | None,
        if_generation_match: int | None,
        *,
        leave_on_ssd: bool,
    ) -> SessionRows | None:
        """Lease rows; None when they have to come by stream."""
        attachment = self._attach()
        if attachment is None:
            return None
        if not isinstance(session, str):
            model.check(session.name, session.model_fingerprint)
        request = AcquireLease(
            session=session if isinstance(session, str) else session.name,
            model_fingerprint=model.fingerprint,
            if_generation_match=if_generation_match,
            range=wanted,
            leave_on_ssd=leave_on_ssd and attachment.arena.ssd_files().is_open,
        )
        try:
            return lease_rows(attachment, request, streams, is_verified=self._is_verified)
        except CapacityExceeded:
            if self._is_only_local:
                raise
            return None

    @property
    def _is_only_local(self) -> bool:
        return self._access.startswith("local")


def _check_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(field=field, problem=f"{value!r} is not one of {known}")


def _append_header(
    snapshot: SessionInfo, model: CallerModel, if_generation_match: int | None
) -> AppendHeader:
    return AppendHeader(
        name=snapshot.name,
        model_fingerprint=model.fingerprint,
        write_offset=snapshot.token_count,
        if_generation_match=if_generation_match,
    )
