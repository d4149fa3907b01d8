"""The routes of rows: through the arena where this process can map it, over a socket or gRPC otherwise.

Knows sessions as facts and rows as bytes. Thread-safe. Worst case: the server vanishes, and each call
raises Unavailable after its deadline.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from ctxcache.client.attach import ArenaAttachment, BoundedMemo, LocalAccess
from ctxcache.client.bulk_rows import BulkChannel, BulkRows
from ctxcache.client.convert import contents_to_wire
from ctxcache.client.leased_rows import lease_rows
from ctxcache.client.models import CallerModel
from ctxcache.client.rows import RowTransport, SessionRows
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.streamed_rows import GrpcRows
from ctxcache.client.types import SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.client.writer import ReservedWriter, reserve
from ctxcache.errors import CapacityExceeded, Unavailable
from ctxcache.format.streams import Content, Stream, StreamSpec
from ctxcache.v1.arena_pb2 import AcquireLease, Reserve

Access = Literal["auto", "local", "remote"]
Transport = Literal["auto", "socket", "grpc"]


class RowRoutes:
    """Chooses, for each append and read of one connection, how its rows travel. See `connect`."""

    def __init__(self, wire: Wire, access: Access, transport: Transport, *, is_verified: bool) -> None:
        self._wire = wire
        self._access = access
        self._is_verified = is_verified
        self._bulk = BulkChannel(wire)
        self.transport = self._choose_transport(transport)
        """Carries rows that do not travel through the arena."""
        self._local = LocalAccess(wire, transport)
        # By session uid, which never changes its layout or model.
        self._layouts: BoundedMemo[str, Mapping[Stream, StreamSpec]] = BoundedMemo()

    def specs(self, snapshot: SessionInfo, model: CallerModel) -> Mapping[Stream, StreamSpec]:
        """Row size and element type of each stream of the session's layout, in storage order."""
        return self._layouts.get_or_make(snapshot.uid, lambda: model.specs(snapshot.streams()))

    @property
    def is_verified(self) -> bool:
        """Whether rows in the arena are compared with their writer's checksums."""
        return self._is_verified

    def attach(self) -> ArenaAttachment | None:
        """Return the arena, mapped; None where rows have to travel otherwise. Raises Unavailable."""
        attachment = None if self._access == "remote" else self._local.attach()
        if attachment is None and self._access == "local":
            raise Unavailable(target=self._wire.target, problem="its arena cannot be opened here")
        return attachment

    def ssd_files(self) -> SsdReader | None:
        """See Client."""
        attachment = self.attach()
        return None if attachment is None else attachment.arena.ssd_files()

    def reserve(
        self,
        snapshot: SessionInfo,
        model: CallerModel,
        specs: Mapping[Stream, StreamSpec],
        token_count: int,
        if_generation_match: int | None,
        *,
        is_all_coming: bool,
        contents: Sequence[Content] = (),
    ) -> ReservedWriter | None:
        """Reserve room in the arena after the session's end; None where this process may not write there."""
        attachment = self.attach()
        arena = None if attachment is None else attachment.arena.writable()
        if attachment is None or arena is None:
            return None
        request = Reserve(
            session=snapshot.name,
            model_fingerprint=model.fingerprint,
            write_offset=snapshot.token_count,
            if_generation_match=if_generation_match,
            token_count=token_count,
            is_all_coming=is_all_coming,
            contents=contents_to_wire(contents) if contents else None,
        )
        return reserve(attachment, arena, snapshot, request, specs)

    def lease(self, request: AcquireLease, streams: Sequence[Stream]) -> SessionRows | None:
        """Lease rows in the arena; None when they have to come by the transport."""
        attachment = self.attach()
        if attachment is None:
            return None
        if request.leave_on_ssd:
            request.leave_on_ssd = attachment.arena.ssd_files().is_open
        try:
            return lease_rows(attachment, request, streams, is_verified=self._is_verified)
        except CapacityExceeded:
            if self._access == "local":
                raise
            return None

    def close(self) -> None:
        """End the bulk channel, every lease and every reservation."""
        self._bulk.close()
        self._local.close()

    def _choose_transport(self, transport: Transport) -> RowTransport:
        streams = GrpcRows(self._wire)
        if transport == "grpc":
            return streams
        return BulkRows(self._wire, self._bulk, None if transport == "socket" else streams)
