"""The control socket: local clients' operations without gRPC, one connection each.

The same messages, limits, errors and ends as ArenaService.Access; docs/clients.md has the framing.
A request that needs not wait is answered within the read that brought it: a turn of the event loop
costs a lease more than a tenth of its CPU. Any other one is carried out in a task.

    connected ──HELLO──► greeted ──ACCESS…──► greeted ──END──► over
        └── no HELLO in time, an error, a drain without anything held ──► told why by END, over

Worst case: a client sends without reading; it is not read any more until its answers have gone.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable
from contextlib import ExitStack

from ctxcache.cache import Cache
from ctxcache.errors import AddressUnusable, CacheError, Draining, InvalidArgument
from ctxcache.runtime.sockets import bound
from ctxcache.service.admission import Admission
from ctxcache.service.callers import Caller, Identification
from ctxcache.service.edge import known_error
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.local_client import LOOK_INTERVAL_S, LocalClient, parsed
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import arena_pb2
from ctxcache.wire.frames import (
    HEAD_BYTES,
    MESSAGE_LIMIT_BYTES,
    PROTOCOL_VERSION,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    is_alone,
)
from ctxcache.wire.status import to_status

log = logging.getLogger(__name__)

# A frame is a head and a protobuf message, see `wire/frames.py`. What goes over the socket:
#
#     client                          server
#     HELLO version, token      ──►
#                               ◄──   HELLO arena, limits     + the arena's descriptors, by SCM_RIGHTS
#     ACCESS request 1          ──►
#     ACCESS request 2          ──►   read, and answered in the order of coming
#                               ◄──   ACCESS answer 1
#     END                       ──►   nothing is abandoned; without an END everything is
HELLO_TIMEOUT_S = 10.0
ANSWER_LIMIT_BYTES = 16 << 20
"""See LocalClient."""
UNSENT_LIMIT_BYTES = 1 << 18
"""Answers that a client leaves unread beyond this stop its operations; one batch's may come on top."""
UNREAD_LIMIT_BYTES = MESSAGE_LIMIT_BYTES + (1 << 16)
"""Requests waiting behind a batch beyond this stay in the socket: room for one of the largest."""
_PEER_CREDENTIALS = struct.Struct("3i")


class ControlSocket:
    """Listens for local clients. Owned by the event loop."""

    def __init__(
        self,
        cache: Cache,
        arena: arena_pb2.Arena,
        read_fd: int,
        write_fd: int | None,
        admission: Admission,
        turns: Turns,
        identification: Identification,
        whereabouts: Whereabouts = ALONE,
    ) -> None:
        """`write_fd`: None where the arena is sealed. `turns`: in which work is done that takes long."""
        self.cache, self.whereabouts = cache, whereabouts
        self.identification = identification
        self.turns = turns
        self.admission = admission
        self.read_fd, self.write_fd = read_fd, write_fd
        self._welcome = arena_pb2.ControlWelcome(
            protocol_version=PROTOCOL_VERSION, arena=arena, message_limit_bytes=MESSAGE_LIMIT_BYTES
        )
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self.path = ""
        """Where it listens."""
        self._drain: asyncio.Task[None] | None = None

    def welcome(self, tenant: str, *, may_write: bool) -> bytes:
        """The answer to a hello."""
        self._welcome.arena.may_write, self._welcome.tenant = may_write, tenant
        return self._welcome.SerializeToString()

    async def start(self, path: str) -> None:
        """Listen at `path`, for this user and those that rules name; a socket without a listener is replaced.

        Raises AddressUnusable.
        """
        # The socket's mode lets in no other user unless a rule names one. Then the mode lets in all, and the
        # kernel's word says who comes.
        others = self.identification.uids - {0, os.geteuid()}
        try:
            # Others are looked at by their credentials.
            listener = bound(path, mode=0o666 if others else 0o600)
        except OSError as error:
            raise AddressUnusable(address=f"unix:{path}", problem=error.strerror or str(error)) from error
        self.path = path
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)
        self._drain = loop.create_task(self._end_idle())

    async def stop(self, timeout_s: float) -> None:
        """Take no more; let connections that hold something end, and cut them off at the deadline."""
        if self._server is None or self._drain is None:
            return
        # Listening ends first, then the name goes: nobody finds a socket that nobody listens at.
        self._server.close()
        # Whatever keeps it: what memory has is flushed behind this.
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108  # pathlib is taken for blocking
        left = {connection.ended for connection in self.connections}
        if left:
            await asyncio.wait(left, timeout=timeout_s)
        # A connection that holds something at the deadline is cut off, and counts as abandoned.
        for connection in list(self.connections):
            connection.cut_off()
        if left:
            await asyncio.wait(left)
        self._drain.cancel()

    async def cut_off(self, client: int) -> bool:
        """End a client's connection, and all that it holds; False where it is none of ours."""
        for connection in list(self.connections):
            if connection.client == client:
                connection.cut_off()
                await asyncio.shield(connection.ended)
                return True
        return False

    async def _end_idle(self) -> None:
        while True:
            await self.admission.drained()
            while self.admission.is_draining:
                # Looked at again and again: a client that is silent holds what it holds until it ends by
                # itself.
                for connection in list(self.connections):
                    connection.go_on()
                await asyncio.sleep(LOOK_INTERVAL_S)


class _Connection(asyncio.Protocol):
    """One client. Frames are dealt with in order, one at a time."""

    def __init__(self, control: ControlSocket) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone and nothing is held for it any more."""
        self._control = control
        self._caller: Caller | None = None
        self._client: LocalClient | None = None
        self._frames = FrameReader()
        self._admitted = ExitStack()
        self._transport: asyncio.Transport | None = None
        self._batch: asyncio.Task[None] | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._is_over = self.is_stalled = self._is_paused = False

    # -- the loop's calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # a socket's is one
        self._transport = transport
        # A client that does not read its answers must not fill the store's memory.
        transport.set_write_buffer_limits(high=UNSENT_LIMIT_BYTES)
        self._control.connections.add(self)
        try:
            # A process that may not come at all is told so at once, whatever its token would say.
            caller = self._control.identification.of_process(_peer_uid(transport), "")
            self._admitted.enter_context(self._control.admission.enter(caller.tenant))
        except CacheError as error:
            self._end(error)
        else:
            loop = asyncio.get_running_loop()
            self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self._end, _bad("hello", "is missing"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        # The usual case first: one request, whole, alone in its read.
        if not self._take_alone(data):
            self.go_on(data)

    def eof_received(self) -> bool:
        """See asyncio.Protocol.

        An end without an END is a client that died: whatever it asked for is cancelled.
        """
        return self._frames.is_last(FrameKind.END)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_stalled = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_stalled = False
        self.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        del error
        self._is_over = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        # While a batch is carried out it holds the client. The batch lets go at its own end.
        if self._batch is None:
            self._let_go()
        else:
            # Not at once: a task that is cancelled before its first step takes no step at all.
            asyncio.get_running_loop().call_soon(self._batch.cancel)

    @property
    def client(self) -> int:
        """Its number; 0 before it has one."""
        return 0 if self._client is None else self._client.client

    @property
    def is_at_work(self) -> bool:
        """Whether a batch of its is being carried out, or waits for something."""
        return self._batch is not None

    @property
    def held_bytes(self) -> int:
        """What it has sent and was not dealt with, and answers that it has not taken."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._frames.held_bytes + unsent

    # -- ends ----------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: CacheError | None) -> None:
        """Say why, and close; without an error the client has finished in order."""
        if self._is_over or self._transport is None:
            return
        # Over before anything is written: what follows must not answer as well.
        self._is_over = True
        if self._client is not None:
            # With an END of the client's own nothing is left writing. After an error nobody can say so.
            self._client.end(is_abandoned=error is not None)
        status = b"" if error is None else to_status(error).SerializeToString()
        self._transport.write(encode_frame(FrameKind.END, status))
        # `close` and not `abort`: what was written goes out first.
        self._transport.close()

    def _let_go(self) -> None:
        if self._client is not None:
            self._client.end(is_abandoned=True)
        self._admitted.close()
        self._control.connections.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)

    # -- frames --------------------------------------------------------------------------------

    def go_on(self, data: bytes = b"") -> None:
        """Deal with what has come and `data`, up to where something is waited for or others have their turn.

        In a drain, end the connection if its client holds nothing.
        """
        frames, part, is_ready = self._frames, None, self._is_ready()
        if data:
            frames.feed(data)
        try:
            # One frame after the other, as long as nothing is waited for. A client cannot have two requests
            # under way: the second may depend on the first.
            while is_ready and frames.held_bytes and (frame := frames.next()) is not None:
                self._take(frame)
                if frames.held_bytes:
                    # A client that sends without a pause gives the loop away after each slice.
                    part = part or LoopSlice(self._control.turns)
                    if part.is_over and self._is_ready():
                        self._finish_later(part.rest())
                    is_ready = self._is_ready()
            if self._control.admission.is_draining and self._is_ready():
                self._check_empty()
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            self._end(known_error(error))
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        # Not read any more, so that the kernel's buffer fills and the client waits: nothing is dropped.
        if self.is_stalled or frames.held_bytes > UNREAD_LIMIT_BYTES:
            self._is_paused = True
            transport.pause_reading()
        elif self._is_paused:
            self._is_paused = False
            transport.resume_reading()

    def _take_alone(self, data: bytes) -> bool:
        """Deal with a request that came whole and by itself, as most do. False: nothing is done.

        The other steps of `go_on` have nothing to do then.
        """
        client, caller = self._client, self._caller
        # The answer of `go_on` in one step: greeted, nothing waiting, nothing under way.
        if client is None or caller is None or self._frames.held_bytes or not self._is_ready():
            return False
        # A revoked caller and a drain need more than an answer.
        if caller.is_revoked or self._control.admission.is_draining or not is_alone(data, FrameKind.ACCESS):
            return False
        try:
            self._answer(client.answer_at_once(data[HEAD_BYTES:]))
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            self._end(known_error(error))
        # The answer did not fit into the socket.
        if self.is_stalled:
            self.go_on()
        return True

    def _is_ready(self) -> bool:
        return not (self._is_over or self.is_stalled or self._batch is not None)

    def _check_empty(self) -> None:
        if self._client is None:
            raise Draining
        self._client.check_empty()

    def _take(self, frame: Frame) -> None:
        client, caller = self._client, self._caller
        if client is None or caller is None:
            if frame.kind != FrameKind.HELLO:
                raise _bad("frame", f"of kind {frame.kind} cannot come here")
            self._greet(parsed(arena_pb2.ControlHello.FromString, frame.message))
        elif frame.kind == FrameKind.ACCESS:
            if caller.is_revoked:
                caller.check()
            self._answer(client.answer_at_once(frame.message))
        elif frame.kind == FrameKind.END:
            self._end(None)
        else:
            raise _bad("frame", f"of kind {frame.kind} cannot come here")

    def _greet(self, hello: arena_pb2.ControlHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise _bad("protocol_version", f"{hello.protocol_version} is not {PROTOCOL_VERSION}")
        assert self._transport is not None  # noqa: S101  # frames come after it was made
        # Anew with its token: the process may act for a tenant of its own.
        self._caller = self._control.identification.of_process(_peer_uid(self._transport), hello.token)
        # An arena's descriptor shows everybody's rows.
        self._caller.check_shared_memory()
        # The process was counted as its user's, which several tenants may share.
        self._admitted.close()
        self._admitted.enter_context(self._control.admission.enter(self._caller.tenant))
        may_write = self._caller.grant.writes_in_place and self._control.write_fd is not None
        self._client = LocalClient(
            self._control.cache,
            self._caller.tenant,
            self._control.turns,
            self._control.admission,
            may_write=may_write,
            whereabouts=self._control.whereabouts,
            answer_limit_bytes=ANSWER_LIMIT_BYTES,
            batch_limit_bytes=ANSWER_LIMIT_BYTES,
        )
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        # By itself and first: a descriptor comes with the byte that it was sent with.
        # asyncio's transport cannot send descriptors.
        raw = socket.socket(fileno=self._transport.get_extra_info("socket").fileno())
        try:
            message = encode_frame(
                FrameKind.HELLO, self._control.welcome(self._caller.tenant, may_write=may_write)
            )
            fds = [self._control.read_fd]
            if may_write and hello.asks_to_write and self._control.write_fd is not None:
                fds.append(self._control.write_fd)
            socket.send_fds(raw, [message], fds)
        except OSError as error:
            raise _bad("hello", f"cannot be answered: {error.strerror}") from error
        finally:
            # The descriptor belongs to the transport: closed here it would be closed twice.
            raw.detach()

    def _finish_later(self, work: Awaitable[bytes | None]) -> None:
        """Let a task wait for the work, answer where there is an answer, and go on then."""
        self._batch = asyncio.get_running_loop().create_task(self._finish(work))

    async def _finish(self, work: Awaitable[bytes | None]) -> None:
        try:
            response = await work
        # Cancelled: the connection is lost, and nothing is answered.
        except asyncio.CancelledError:
            self._batch = None
            self._let_go()
            raise
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            self._batch = None
            known = known_error(error)
            # In this order: a connection that is over ends by itself, and is not told why.
            if self._is_over:
                self._let_go()
            self._end(known)
            return
        self._batch = None
        if self._is_over:
            # The client is gone since the last step: what was acquired for it is given back.
            self._let_go()
            return
        if response is not None:
            self._answer(response)
        self.go_on()

    def _answer(self, answer: bytes | arena_pb2.AccessRequest) -> None:
        """Send an answer; a request, which may have to wait, is carried out and answered later."""
        assert self._transport is not None  # noqa: S101  # frames come after it was made
        if isinstance(answer, bytes):
            self._transport.write(encode_frame(FrameKind.ACCESS, answer))
        # Carried out in a task: only this client waits for it.
        elif self._client is not None:
            self._finish_later(self._client.carry_out(answer))


def _bad(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(field=field, problem=problem)


def _peer_uid(transport: asyncio.Transport) -> int:
    # Asked of the kernel, which noted it when the connection was made.
    raw = transport.get_extra_info("socket")
    credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])
