"""The bulk channel: where it listens, who may connect, and the end of it.

A client asks by OpenBulk for a ticket, and with it opens a connection, which runs in a thread of its own
(`bulk_connection.py`). All else here is the event loop's.

Worst case: as many connections as there may be, or threads as there can be; more are closed at once, and
their clients use the streams of gRPC.
"""

import asyncio
import contextlib
import logging
import socket
from _thread import start_new_thread
from dataclasses import dataclass
from pathlib import Path

from ctxcache.cache import Cache
from ctxcache.errors import AddressUnusable
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.sockets import bound
from ctxcache.service import convert
from ctxcache.service.admission import Admission
from ctxcache.service.bulk_connection import TICKET_LIFETIME_NS, BulkConnection, Tickets, Transfers
from ctxcache.service.callers import Context, Identification, current
from ctxcache.service.tls import Tls, peer_properties
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import bulk_pb2, bulk_pb2_grpc
from ctxcache.wire.framed_socket import PIECE_TIMEOUT_S, FramedSocket

log = logging.getLogger(__name__)

BACKLOG = 64
ACCEPT_PAUSE_S = 1.0
"""After a connection that could not be taken: what was lacking is lacking still, and the connection still
waits."""
BEGIN_TIMEOUT_S = 2.0
"""How long a connection's thread may take to begin."""


@dataclass(frozen=True, slots=True)
class BulkPlaces:
    """Where to listen: a host and a port (0 takes a free one), a Unix socket's path, or neither."""

    host: str | None = None
    port: int = 0
    unix_path: str = ""


class BulkListener:
    """Listens and serves. Use `open`, then `drain`."""

    def __init__(
        self,
        cache: Cache,
        calls: Admission,
        identification: Identification,
        *,
        connection_limit: int,
        tls: Tls | None = None,
        whereabouts: Whereabouts = ALONE,
    ) -> None:
        self.tickets = Tickets(cache.state.clock, are_divided=cache.state.limits.are_divided)
        self.tcp_port = 0
        self.unix_path = ""
        self.addresses: tuple[str, ...] = ()
        connections = Admission(
            "bulk connections", connection_limit, is_divided=cache.state.limits.are_divided
        )
        self._transfers = Transfers(cache, calls, connections, self.tickets, identification, whereabouts)
        self._limit = connection_limit
        self._tls = tls
        self._listening: list[socket.socket] = []
        self._running: dict[asyncio.Future[None], _Accepted] = {}

    @property
    def connection_count(self) -> int:
        """Connections open now."""
        return len(self._running)

    def open(self, places: BulkPlaces) -> None:
        """Listen. Raises AddressUnusable; nothing listens then."""
        try:
            if places.host is not None:
                listening = self._listen_tcp(places.host, places.port)
                self.tcp_port = listening.getsockname()[1]
                self.addresses += (f"{places.host}:{self.tcp_port}",)
            if places.unix_path:
                self._listen_unix(places.unix_path)
                self.unix_path = places.unix_path
                self.addresses += (f"unix:{places.unix_path}",)
        except BaseException:
            self.close()
            raise
        for listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def drain(self, timeout_s: float) -> None:
        """Take no more, let requests under way finish until the time is over, end every connection."""
        self.close()
        # Those that answer nothing are shut at once; those that answer finish.
        for accepted in self._running.values():
            accepted.drain()
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        # At the deadline every socket is shut, which ends the reads and writes of their threads.
        for accepted in self._running.values():
            accepted.framed_shut()
        if self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Listen no more."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self.unix_path and self._listening:
            with contextlib.suppress(OSError):
                Path(self.unix_path).unlink()
        self._listening.clear()

    def _listen_tcp(self, host: str, port: int) -> socket.socket:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _unusable(f"{host}:{port}", error) from error
        # Noted before it is bound: whatever fails, `close` closes it.
        self._listening.append(listening)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            _listen(listening)
        except OSError as error:
            raise _unusable(f"{host}:{port}", error) from error
        return listening

    def _listen_unix(self, path: str) -> None:
        try:
            listening = bound(path)
            self._listening.append(listening)
            _listen(listening)
        except OSError as error:
            raise _unusable(f"unix:{path}", error) from error

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connected, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            # It has gone again.
            return
        except OSError as error:
            log.warning("bulk_accept_failed error=%s", error)
            # The connection is still in the queue of the kernel: asked again at once it would fail again, and
            # again.
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        # Full: a connection that has not said who it is makes way for one that may.
        if len(self._running) >= self._limit and not self._make_way():
            connected.close()
            return
        accepted, ended = _Accepted(connected, self._tls, self._transfers, loop), loop.create_future()
        try:
            # Not `Thread.start`, which waits for the thread: without memory it dies before it can say that it
            # runs.
            start_new_thread(_serve, (accepted, loop, ended))
        except (RuntimeError, MemoryError) as error:
            log.warning("bulk_accept_failed error=%s", error)
            connected.close()
            return
        self._running[ended] = accepted
        ended.add_done_callback(self._running.pop)
        # A thread that cannot begin says nothing.
        loop.call_later(BEGIN_TIMEOUT_S, _check_begun, accepted, ended)

    def _make_way(self) -> bool:
        """End the oldest connection whose peer has not said who it is; False where all have."""
        silent = next((accepted for accepted in self._running.values() if accepted.is_silent), None)
        if silent is None:
            return False
        silent.has_given_way = True
        silent.framed_shut()
        return True


class _Accepted:
    """A connection from its first byte on: TLS, where there is any, is its thread's to agree on."""

    def __init__(
        self,
        connected: socket.socket,
        tls: Tls | None,
        transfers: Transfers,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connected, self._tls, self._transfers, self._loop = connected, tls, transfers, loop
        self._connection: BulkConnection | None = None
        self._is_draining = False
        self.has_begun = self.has_given_way = False

    @property
    def is_silent(self) -> bool:
        """Whether its peer has not been let in yet, and was not told to go."""
        # Given way once: it is ending, and the next one has to find another.
        is_known = self._connection is not None and self._connection.is_known
        return not is_known and not self.has_given_way

    def serve(self) -> None:
        """Run to the end; raises nothing."""
        self.has_begun = True
        try:
            if self._tls is not None and self._connected.family != socket.AF_UNIX:
                # The handshake is the thread's too: a client that stalls in it holds up nobody else.
                self._connected.settimeout(PIECE_TIMEOUT_S)
                self._connected = self._tls.context.wrap_socket(self._connected, server_side=True)
            framed = FramedSocket(self._connected)
        except OSError as error:
            log.info("bulk_connection_ended problem=%s", error)
            self._connected.close()
            return
        properties = peer_properties(self._connected)
        self._connection = BulkConnection(framed, self._transfers, self._loop, properties)
        # The drain may have come during the handshake.
        self._connection.is_draining = self._is_draining
        self._connection.serve()

    def drain(self) -> None:
        """Let it end after the request that it answers; at once when it answers none."""
        self._is_draining = True
        if self._connection is not None:
            self._connection.is_draining = True
        if self._connection is None or not self._connection.is_busy:
            self.framed_shut()

    def framed_shut(self) -> None:
        """End it now."""
        with contextlib.suppress(OSError):
            # Past the TLS layer, which may be in use by the thread.
            socket.socket.shutdown(self._connected, socket.SHUT_RDWR)


def _serve(accepted: _Accepted, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """A connection's thread."""
    try:
        accepted.serve()
    finally:
        # From a thread: the loop's objects are the loop's.
        loop.call_soon_threadsafe(_end, ended)


def _check_begun(accepted: _Accepted, ended: asyncio.Future[None]) -> None:
    """End a connection whose thread found no memory to begin with: its client must not wait for it."""
    if not accepted.has_begun and not ended.done():
        log.warning("bulk_accept_failed error=%s", "its thread does not begin")
        accepted.framed_shut()
        _end(ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


class BulkService(bulk_pb2_grpc.BulkServiceServicer):
    """See proto/ctxcache/v1/bulk.proto."""

    def __init__(self, channel: BulkListener, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock

    async def OpenBulk(
        self,
        request: bulk_pb2.OpenBulkRequest,
        context: Context,
    ) -> bulk_pb2.BulkTicket:
        """See the proto."""
        if not self._channel.addresses:
            return bulk_pb2.BulkTicket()
        return bulk_pb2.BulkTicket(
            ticket=self._channel.tickets.issue(current()),
            tcp_port=self._channel.tcp_port,
            unix_path=self._channel.unix_path,
            expire_time=convert.timestamp(self._clock.wall_ns() + TICKET_LIFETIME_NS),
        )


def _listen(listening: socket.socket) -> None:
    listening.listen(BACKLOG)
    listening.setblocking(False)  # noqa: FBT003  # positional alone


def _unusable(address: str, error: OSError) -> AddressUnusable:
    return AddressUnusable(address=address, problem=error.strerror or str(error))
