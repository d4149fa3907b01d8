"""Connections to a server's bulk channel: found by gRPC, opened with a ticket, kept for the next use.

Knows no session. Thread-safe. Worst case: the channel is announced and cannot be reached; that costs
one connection attempt, and for a while nobody asks again.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctxcache.client.wire import Wire
from ctxcache.errors import CacheError, TooManyRequests, Unavailable
from ctxcache.v1 import bulk_pb2
from ctxcache.wire.framed_socket import VERSION, FramedSocket, FrameError, SocketFrameKind
from ctxcache.wire.status import from_encoded_status

CONNECT_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 60.0
"""How long a channel that cannot be reached is left alone."""
IDLE_LIMIT = 8
"""Connections kept for the next use; with them, as many are open as threads are at work."""
IDLE_SHARE = 0.9
"""Of the server's idle timeout, how much of it a connection is kept: the rest is for what is on its way."""


class NoBulkChannel(Exception):
    """There is none, it cannot be reached, or it takes no more connections; gRPC may do."""


class Connection(FramedSocket):
    """A framed socket that has said hello."""

    idle_limit_s = math.inf
    """How long after a request began the next one may."""
    asked_s = -math.inf
    """When the last request began: the server may have been idle since."""
    is_kept = False
    """Whether it has served a request already."""


class BulkChannel:
    """Hands out connections that have said hello."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._in_use: set[Connection] = set()
        self._is_closed = False
        self._not_before = 0.0

    @property
    def target(self) -> str:
        """What errors name."""
        return self._wire.target

    def take(self, *, is_fresh: bool = False) -> Connection:
        """Return a connection for one request. Raises NoBulkChannel, and Unavailable when closed."""
        while not is_fresh and (idle := self._take_idle()) is not None:
            now_s = time.monotonic()
            # What can be received while nobody has asked for anything is the end.
            if now_s < idle.asked_s + idle.idle_limit_s and not idle.wait(0):
                idle.asked_s = now_s
                return idle
            self.drop(idle)
        if time.monotonic() < self._not_before:
            raise NoBulkChannel
        try:
            connected = self._connect()
        except (OSError, FrameError) as error:
            self._not_before = time.monotonic() + RETRY_INTERVAL_S
            raise NoBulkChannel(str(error)) from error
        connected.asked_s = time.monotonic()
        with self._lock:
            if not self._is_closed:
                self._in_use.add(connected)
                return connected
        connected.close()
        raise self._closed()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that is between two requests."""
        connection.is_kept = True
        with self._lock:
            self._in_use.discard(connection)
            if not self._is_closed and len(self._idle) < IDLE_LIMIT:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Close a connection in whatever state it is."""
        with self._lock:
            self._in_use.discard(connection)
        connection.shut()
        connection.close()

    def close(self) -> None:
        """End every connection; transfers under way raise Unavailable."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._in_use:
                connection.shut()
        for connection in idle:
            connection.close()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn a connection's end within the block into Unavailable."""
        try:
            yield
        except FrameError as error:
            problem = "the client is closed" if self._is_closed else str(error)
            raise Unavailable(target=self.target, problem=problem) from error

    def _closed(self) -> Unavailable:
        return Unavailable(target=self.target, problem="the client is closed")

    def _take_idle(self) -> Connection | None:
        with self._lock:
            if self._is_closed:
                raise self._closed()
            if not self._idle:
                return None
            connection = self._idle.pop()
            self._in_use.add(connection)
            return connection

    def _connect(self) -> Connection:
        ticket = self._ticket()
        framed = Connection(self._open(ticket))
        try:
            hello = bulk_pb2.BulkHello(ticket=ticket.ticket, version=VERSION)
            framed.send(SocketFrameKind.HELLO, hello.SerializeToString())
            answer = framed.receive() if framed.wait(self._wire.timeout_s) else None
        except BaseException:
            framed.close()
            raise
        if answer is None or answer.kind is not SocketFrameKind.WELCOME:
            framed.close()
            refusal = from_encoded_status(answer.message, self.target) if answer else "no answer"
            raise FrameError(f"the bulk channel: {refusal}")
        welcome = bulk_pb2.BulkWelcome.FromString(answer.message)
        if welcome.HasField("idle_timeout"):
            framed.idle_limit_s = IDLE_SHARE * welcome.idle_timeout.ToNanoseconds() / 10**9
        return framed

    def _ticket(self) -> bulk_pb2.BulkTicket:
        try:
            ticket = self._wire.call(self._wire.bulk.OpenBulk, bulk_pb2.OpenBulkRequest())
        except TooManyRequests as error:
            raise NoBulkChannel(str(error)) from error
        except CacheError as error:
            # A server of an earlier version knows no such service.
            if error.facts.get("code") != "UNIMPLEMENTED":
                raise
            ticket = bulk_pb2.BulkTicket()
        if not ticket.ticket:
            raise FrameError("the server has none")
        return ticket

    def _open(self, ticket: bulk_pb2.BulkTicket) -> socket.socket:
        if self._wire.target.startswith("unix:") and ticket.unix_path:
            return _connect_unix(ticket.unix_path)
        host = host_of(self._wire.target)
        if host is None or not ticket.tcp_port:
            raise FrameError(f"no way to it from {self._wire.target}")
        connected = socket.create_connection((host, ticket.tcp_port), CONNECT_TIMEOUT_S)
        return self._secured(connected, host)

    def _secured(self, connected: socket.socket, host: str) -> socket.socket:
        context = self._wire.tls_context
        if context is None:
            return connected
        try:
            return context.wrap_socket(connected, server_hostname=host)
        except OSError:
            connected.close()
            raise


def host_of(target: str) -> str | None:
    """The host in a gRPC target with a port; None for a target that names none."""
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        target = target.removeprefix(scheme)
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal() or not host or "/" in host or "," in host:
        return None
    return host.removeprefix("[").removesuffix("]")


def _connect_unix(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(CONNECT_TIMEOUT_S)
        connected.connect(path)
    except OSError:
        with contextlib.suppress(OSError):
            connected.close()
        raise
    return connected
