"""The routes of rows: through the arena where this process can map it, over a socket or gRPC otherwise.

Knows sessions as facts and rows as bytes. Thread-safe. Worst case: the server vanishes, and each call
raises Unavailable after its deadline.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from ctxcache.client.access import PROBE, AccessStream, ArenaAttachment, BoundedMemo
from ctxcache.client.arena import MappedArena, map_arena, map_descriptors
from ctxcache.client.bulk_rows import BulkChannel, BulkRows
from ctxcache.client.control import Control, connect_control
from ctxcache.client.grpc_access import GrpcAccess
from ctxcache.client.messages import write_content
from ctxcache.client.rows import RowTransport, SessionRows, lease_rows
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.streamed_rows import GrpcRows
from ctxcache.client.types import CallerModel, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.client.writer import ReservedWriter, reserve
from ctxcache.errors import CapacityExceeded, DeadlineExceeded, Unavailable
from ctxcache.format.streams import Content, Stream, StreamSpec
from ctxcache.v1 import arena_pb2
from ctxcache.v1.arena_pb2 import AcquireLease, Reserve

Access = Literal["auto", "local", "remote"]
Transport = Literal["auto", "socket", "grpc"]


_ATTEMPTS = 2
"""Connections before the caller hears that the server changes meanwhile."""


# How a process gets to the arena. What is found is kept until the way breaks:
#
#     GetArena ──► control socket? ── greeted, same arena ──► its descriptors, mapped          socket
#                       │ none, or of another server
#                       ▼
#                  path of the arena ── mapped, same id ──► Access stream, and the id once more ──► gRPC
#                       │ not on this host
#                       ▼
#                  None, for good: rows travel by the bulk channel, or by streams of gRPC
#
# A mapping outlives the way: the same arena under a new way is not mapped and populated again.
class LocalAccess:
    """Attaches on first use, and again after a break. Thread-safe.

    `way` is what carries operations: the control socket, a gRPC stream, or the first of them that can be had.
    """

    def __init__(self, wire: Wire, way: Transport) -> None:
        self._wire = wire
        self._way = way
        self._lock = threading.RLock()
        """Over all that follows, never while one connects."""
        self._changed = threading.Condition(self._lock)
        self.is_connecting = False
        """Laid down by a plain store, which no signal interrupts: nobody waits for a thread that is gone."""
        self._attachment: ArenaAttachment | None = None
        self._is_remote = False

    def attach(self) -> ArenaAttachment | None:
        """Return the arena and a way that lives; None when the server is not on this host.

        Raises Unavailable, DeadlineExceeded, TooManyRequests, Draining.
        """
        is_ours = False
        try:
            with self._lock:
                if self.is_connecting:
                    self._wait_connected()
                if self._is_remote:
                    # For good: a client is made for one target, and that target's host does not change.
                    return None
                if self._attachment is not None and self._attachment.stream.is_worth_a_try:
                    return self._attachment
                is_ours = self.is_connecting = True
            self._attachment = self._connect()
            self._is_remote = self._attachment is None
            return self._attachment
        finally:
            if is_ours:
                self.is_connecting = False
                with self._lock:
                    self._changed.notify_all()

    def attached(self) -> ArenaAttachment | None:
        """The arena and a way that lives, where both are there already; waits for nothing."""
        attachment = self._attachment
        return attachment if attachment is not None and attachment.stream.is_worth_a_try else None

    def close(self) -> None:
        """End the way and everything held on it."""
        with self._lock, suppress(DeadlineExceeded):
            self._wait_connected()
        with self._lock:
            if self._attachment is not None:
                self._attachment.stream.close()
                self._attachment = None

    def _wait_connected(self) -> None:
        """Wait, under the lock, while a thread connects. Raises DeadlineExceeded."""
        timeout_s = self._wire.timeout_s
        if not self._changed.wait_for(lambda: not self.is_connecting, timeout_s):
            raise DeadlineExceeded(target=self._wire.target, timeout_s=f"{timeout_s:g}")

    def _connect(self) -> ArenaAttachment | None:
        for _ in range(_ATTEMPTS):
            arena = self._get_arena()
            if self._way != "grpc" and (found := self._by_socket(arena)) is not None:
                return found
            mapped = None if self._way == "socket" else self._known(arena) or map_arena(arena)
            if mapped is None:
                return None
            if (stream := self._open(mapped)) is not None:
                return ArenaAttachment(mapped, stream)
        raise Unavailable(target=self._wire.target, problem="the server changes while we connect")

    def _by_socket(self, arena: arena_pb2.Arena) -> ArenaAttachment | None:
        if not arena.control_socket:
            return None
        token = "" if self._wire.token is None else self._wire.token.read()
        control = connect_control(arena.control_socket, self._wire.target, self._wire.timeout_s, token)
        if control is None:
            return None
        try:
            mapped = self._map(control, arena)
        except BaseException:
            control.stream.close()
            raise
        finally:
            for fd in control.fds:
                # The mapping has descriptors, or a mapping, of its own by now.
                os.close(fd)
        if mapped is None:
            control.stream.close()
            return None
        return ArenaAttachment(mapped, control.stream)

    def _map(self, control: Control, arena: arena_pb2.Arena) -> MappedArena | None:
        # On another host's word the path may lead to a server of this one; or ours was replaced just now.
        told = control.arena
        # Two identities of one server that was replaced between the two questions are fine, if the newer one
        # answers.
        if told.arena_id != arena.arena_id and told.arena_id != self._get_arena().arena_id:
            return None
        return self._known(told) or map_descriptors(told, control.fds)

    def _open(self, arena: MappedArena) -> AccessStream | None:
        stream = GrpcAccess(self._wire)
        try:
            stream.call([PROBE])
            # The server may be replaced between two calls. The same id before and after the stream's
            # first answer says that the stream speaks of the arena that is mapped.
            is_same = self._get_arena().arena_id == arena.arena_id
        # Closed before it is raised: a stream that stays open keeps a thread and the server's connection.
        except BaseException:
            stream.close()
            raise
        if is_same:
            return stream
        stream.close()
        return None

    def _get_arena(self) -> arena_pb2.Arena:
        return self._wire.call(self._wire.arena.GetArena, arena_pb2.GetArenaRequest())

    def _known(self, arena: arena_pb2.Arena) -> MappedArena | None:
        known = self._attachment
        return known.arena if known is not None and known.arena.arena_id == arena.arena_id else None


class RowRoutes:
    """Chooses, for each append and read of one connection, how its rows travel. See `connect`."""

    def __init__(self, wire: Wire, access: Access, transport: Transport, *, is_verified: bool) -> None:
        self._wire = wire
        self._access = access
        self.is_verified = is_verified
        """Whether rows in the arena are compared with their writer's checksums."""
        self.bulk = BulkChannel(wire)
        self.transport = self._choose_transport(transport)
        """Carries rows that do not travel through the arena."""
        self.local = LocalAccess(wire, transport)
        # By session uid, which never changes its layout or model.
        self.layouts: BoundedMemo[str, Mapping[Stream, StreamSpec]] = BoundedMemo()

    def specs(self, snapshot: SessionInfo, model: CallerModel) -> Mapping[Stream, StreamSpec]:
        """Row size and element type of each stream of the session's layout, in storage order."""
        return self.layouts.get_or_make(snapshot.uid, lambda: model.specs(snapshot.streams()))

    def attach(self) -> ArenaAttachment | None:
        """Return the arena, mapped; None where rows have to travel otherwise. Raises Unavailable."""
        attachment = None if self._access == "remote" else self.local.attach()
        if attachment is None and self._access == "local":
            raise Unavailable(target=self._wire.target, problem="its arena cannot be opened here")
        return attachment

    def attached(self) -> ArenaAttachment | None:
        """As `attach`, where that has nothing to wait for; None otherwise."""
        return None if self._access == "remote" else self.local.attached()

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
            contents=[write_content(part) for part in contents] if contents else None,
        )
        return reserve(attachment, arena, snapshot, request, specs)

    def opens_ssd_files(self) -> bool:
        """Whether this process can read rows out of the files of the SSD tier."""
        attachment = self.attach()
        return attachment is not None and attachment.arena.ssd_files().is_open

    def lease(self, request: AcquireLease, streams: Sequence[Stream]) -> SessionRows | None:
        """Lease rows in the arena; None when they have to come by the transport."""
        attachment = self.attach()
        if attachment is None:
            return None
        if request.leave_on_ssd:
            request.leave_on_ssd = attachment.arena.ssd_files().is_open
        request.streams_else = self._access != "local"
        try:
            return lease_rows(attachment, request, streams, is_verified=self.is_verified)
        # A read that the arena has no room for comes by stream, segment by segment, with no room held for all
        # of it.
        except CapacityExceeded:
            if self._access == "local":
                raise
            return None

    def close(self) -> None:
        """End the bulk channel, every lease and every reservation."""
        self.bulk.close()
        self.local.close()

    def _choose_transport(self, transport: Transport) -> RowTransport:
        streams = GrpcRows(self._wire)
        # `socket` has nothing to fall back to: whoever asked for it wants to hear that there is none.
        if transport == "grpc":
            return streams
        return BulkRows(self._wire, self.bulk, None if transport == "socket" else streams)
