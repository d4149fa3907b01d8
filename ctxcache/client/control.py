"""Operations over the control socket: a plain socket, and no thread between the caller and the server.

The thread that waits for an answer reads for all others: one lock guards the state, `_sending` keeps frames
whole. Unread answers are bounded. Worst case: the server dies; a thread that reads or waits learns it at
once, a thread that only looks at views with its next `check`.
"""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.client.access import AccessStream, again, as_break, releases
from ctxcache.client.wire import ANSWER_LIMIT_BYTES, trace_parent
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Arena,
    ControlHello,
    ControlWelcome,
    Operation,
)
from ctxcache.wire.frames import PROTOCOL_VERSION, Frame, FrameKind, FrameReader, encode_frame
from ctxcache.wire.status import from_status

UNREAD_LIMIT = 64
"""Answers that nobody waits for, at a time: then one is waited for, which brings those before it."""
_READ_BYTES = 1 << 16
_FOREVER_S = 3600.0
_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class SocketAccess(AccessStream):
    """Operations over a greeted control socket; `reader` holds bytes that came behind the greeting."""

    def __init__(self, connection: socket.socket, reader: FrameReader, target: str, timeout_s: float) -> None:
        super().__init__(target, timeout_s)
        connection.settimeout(0)
        self._socket = connection
        self._reader = reader
        self._sending = threading.Lock()
        self._last_id = 0
        self._changed = threading.Condition()
        self._is_reading = False
        self._awaited: set[int] = set()
        self._overdue: set[int] = set()
        """Requests whose callers gave up: what their late answers hold is given back."""
        self._answers: dict[int, AccessResponse] = {}
        self._unread_count = 0
        self._drainer: threading.Thread | None = None
        self._failure: CacheError | None = None
        self._polls = threading.local()

    @property
    def is_broken(self) -> bool:
        """See AccessStream."""
        if self._failure is None and self._has_event(_GONE, 0):
            self._break(Unavailable(target=self.target, problem="the server closed the control socket"))
        return self._failure is not None

    @property
    def is_in_doubt(self) -> bool:
        """See AccessStream. The server lets go of nothing while the socket is open, whatever is heard."""
        return self._failure is not None

    def still_holds(self) -> bool:
        """See AccessStream."""
        return not self.is_broken

    def exchange(self, batch: list[Operation]) -> AccessResponse:
        """See AccessStream."""
        deadline_s = time.monotonic() + self.timeout_s
        request_id = self._submit(batch, deadline_s, is_awaited=True)
        try:
            return self._wait(request_id, deadline_s)
        except BaseException:
            self._abandon(request_id)
            raise

    def send(self, operations: Iterable[Operation]) -> None:
        """See AccessStream."""
        batch = list(operations)
        if not batch or self._failure is not None:
            return
        try:
            if self._unread_count >= UNREAD_LIMIT:
                self.exchange(batch)
            else:
                self._submit(batch, time.monotonic() + self.timeout_s, is_awaited=False)
        except CacheError:
            # Broken: what was to be given back is gone with the connection.
            return

    def close(self) -> None:
        """See AccessStream."""
        self._break(Unavailable(target=self.target, problem="the client is closed"))

    # -- sending -------------------------------------------------------------------------------

    def _submit(self, batch: list[Operation], deadline_s: float, *, is_awaited: bool) -> int:
        if not self._sending.acquire(timeout=max(deadline_s - time.monotonic(), 0)):
            raise self._too_late()
        try:
            if self._failure is not None:
                raise again(self._failure)
            self._last_id += 1
            request = AccessRequest(request_id=self._last_id, operations=batch, trace_parent=trace_parent())
            with self._changed:
                if is_awaited:
                    self._awaited.add(self._last_id)
                else:
                    self._unread_count += 1
            try:
                self._send_all(encode_frame(FrameKind.ACCESS, request.SerializeToString()), deadline_s)
            except BaseException:
                # Any error, a signal's too: half a frame may be out.
                self._break(Unavailable(target=self.target, problem="a request was interrupted"))
                raise
            return self._last_id
        finally:
            self._sending.release()

    def _send_all(self, data: bytes, deadline_s: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._has_event(select.POLLOUT, deadline_s - time.monotonic()):
                    # Half a frame may be out: nothing can follow it.
                    self._break(Unavailable(target=self.target, problem="the server takes no requests"))
                    raise self._too_late() from None
            except OSError as error:
                self._break(self._gone(error))
                raise again(self._gone(error)) from error

    # -- receiving -----------------------------------------------------------------------------

    def _wait(self, request_id: int, deadline_s: float) -> AccessResponse:
        while True:
            with self._changed:
                if request_id in self._answers:
                    return self._answers.pop(request_id)
                if self._failure is not None:
                    raise again(self._failure)
                is_reader = not self._is_reading
                if is_reader:
                    self._is_reading = True
                elif not self._changed.wait(max(deadline_s - time.monotonic(), 0)):
                    raise self._too_late()
            if is_reader:
                self._read(deadline_s)

    def _read(self, deadline_s: float) -> None:
        """Take what comes next, as the only one who does. Raises DeadlineExceeded."""
        late = None
        try:
            while (frame := self._reader.next()) is None:
                self._wait_for_bytes(deadline_s)
                self._receive()
            late = self._take(frame)
        except (OSError, InvalidArgument, DecodeError) as error:
            self._break(self._gone(error))
        finally:
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()
        if late is not None:
            self._give_back(late)

    def _wait_for_bytes(self, deadline_s: float) -> None:
        if not self._has_event(select.POLLIN, deadline_s - time.monotonic()):
            raise self._too_late()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
            self._reader.feed(data)
        except BaseException as error:
            # Any error, a signal's too: bytes may be lost, and nothing could be read behind them.
            self._break(self._gone(error))
            raise
        if not data:
            raise ConnectionResetError("the server closed the control socket")

    def _take(self, frame: Frame) -> AccessResponse | None:
        """Hand an answer to whom it is for; returns one that came too late."""
        if frame.kind != FrameKind.ACCESS:
            self._break(_why_ended(frame, self.target))
            return None
        response = AccessResponse.FromString(frame.message)
        with self._changed:
            is_overdue = response.request_id in self._overdue
            if response.request_id in self._awaited:
                self._awaited.discard(response.request_id)
                self._answers[response.request_id] = response
            elif is_overdue:
                self._overdue.discard(response.request_id)
            else:
                self._unread_count -= 1
        return response if is_overdue else None

    def _give_back(self, response: AccessResponse) -> None:
        """Release what nobody waited for. Waits for no answer: whoever is here may be needed to read them."""
        batch = list(releases(response))
        if batch:
            with suppress(CacheError):
                self._submit(batch, time.monotonic() + self.timeout_s, is_awaited=False)

    def _abandon(self, request_id: int) -> None:
        """See that what a late answer holds is given back, by a thread that waits for it."""
        with self._changed:
            answer = self._answers.pop(request_id, None)
            if answer is None and request_id in self._awaited and self._failure is None:
                self._awaited.discard(request_id)
                self._overdue.add(request_id)
                if self._drainer is None:
                    self._drainer = threading.Thread(target=self._drain, name="ctxcache-late", daemon=True)
                    self._drainer.start()
        if answer is not None:
            self._give_back(answer)

    def _drain(self) -> None:
        while True:
            with self._changed:
                if not self._overdue or self._failure is not None:
                    self._drainer = None
                    return
                is_reader = not self._is_reading
                if is_reader:
                    self._is_reading = True
                else:
                    self._changed.wait(_FOREVER_S)
            if is_reader:
                try:
                    self._read(time.monotonic() + _FOREVER_S)
                except DeadlineExceeded:
                    continue

    # -- ends ----------------------------------------------------------------------------------

    def _break(self, failure: CacheError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = as_break(failure, self.target)
            self._changed.notify_all()
        # Wakes whoever reads; closed with the last reference, so that no descriptor is used again under it.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _has_event(self, events: int, timeout_s: float) -> bool:
        # One for each thread and sort of event: making one costs as much as asking it.
        polls = vars(self._polls)
        poll = polls.get(str(events))
        if poll is None:
            poll = polls[str(events)] = select.poll()
            poll.register(self._socket, events)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def _gone(self, error: BaseException) -> Unavailable:
        return Unavailable(target=self.target, problem=f"control socket: {error}")

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(target=self.target, timeout_s=f"{self.timeout_s:g}")


def _why_ended(frame: Frame, target: str) -> CacheError:
    status = status_pb2.Status.FromString(frame.message) if frame.kind == FrameKind.END else None
    if status is None or not status.code:
        return Unavailable(target=target, problem="the server ended the control socket")
    return from_status(status, target)


_PEER_CREDENTIALS = struct.Struct("3i")
_GREETING_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Control:
    """A greeted control socket: the arena, its descriptors (the caller closes them), and the operations.

    `fds`: one for reading, and where this process may write one for that.
    """

    arena: Arena
    fds: list[int]
    stream: SocketAccess


def connect_control(path: str, target: str, timeout_s: float, token: str = "") -> Control | None:
    """Connect and greet; None where no socket of a trusted server is.

    `token`: as whom, empty for this process' user. Raises what the server refuses with (TooManyRequests,
    Draining,
    Unauthenticated, PermissionDenied), DeadlineExceeded, Unavailable.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        if not _is_trusted(connection):
            connection.close()
            return None
        return _greet(connection, target, timeout_s, token)
    except BaseException:
        connection.close()
        raise


def _greet(connection: socket.socket, target: str, timeout_s: float, token: str) -> Control:
    with ExitStack() as received:
        reader = FrameReader(ANSWER_LIMIT_BYTES)
        fds: list[int] = []
        received.callback(_close, fds)
        try:
            hello = ControlHello(protocol_version=PROTOCOL_VERSION, token=token, asks_to_write=True)
            frame = _first_frame(connection, hello, reader, fds, time.monotonic() + timeout_s)
            arena = _welcomed(frame, fds, target).arena
        except TimeoutError as error:
            raise DeadlineExceeded(target=target, timeout_s=f"{timeout_s:g}") from error
        except (OSError, InvalidArgument, DecodeError) as error:
            raise Unavailable(target=target, problem=f"control socket: {error}") from error
        received.pop_all()
    return Control(arena, fds, SocketAccess(connection, reader, target, timeout_s))


def _welcomed(frame: Frame, fds: list[int], target: str) -> ControlWelcome:
    if frame.kind == FrameKind.END:
        raise from_status(status_pb2.Status.FromString(frame.message), target)
    welcome = ControlWelcome.FromString(frame.message)
    is_understood = frame.kind == FrameKind.HELLO and welcome.protocol_version == PROTOCOL_VERSION
    if not is_understood or len(fds) != 1 + welcome.arena.may_write:
        raise Unavailable(target=target, problem="its control socket answers with another greeting")
    return welcome


def _first_frame(
    connection: socket.socket, hello: ControlHello, reader: FrameReader, fds: list[int], deadline_s: float
) -> Frame:
    # Refused before the hello: why is there to be read all the same.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(encode_frame(FrameKind.HELLO, hello.SerializeToString()))
    while (frame := reader.next()) is None:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        data, received, _, _ = socket.recv_fds(connection, _GREETING_READ_BYTES, 4)
        fds += received
        if not data:
            raise ConnectionResetError("it was closed")
        reader.feed(data)
    return frame


def _is_trusted(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return _PEER_CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
