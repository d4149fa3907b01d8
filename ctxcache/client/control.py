"""The greeting on a server's control socket: the arena's descriptors come, and operations follow."""

import os
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.client.socket_access import SocketAccess
from ctxcache.client.wire import ANSWER_LIMIT_BYTES
from ctxcache.errors import DeadlineExceeded, InvalidArgument, Unavailable
from ctxcache.v1.arena_pb2 import (
    Arena,
    ControlHello,
    ControlWelcome,
)
from ctxcache.wire.frames import (
    PROTOCOL_VERSION,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
)
from ctxcache.wire.status import from_status

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
    # The descriptors come with the bytes of the welcome, and only there (SCM_RIGHTS). In order:
    #
    #     connect ──► whose process is it? ──► HELLO(version, token) ──► HELLO(arena) + 1 or 2 descriptors
    #                                                                └─► END(why not)
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
        # Descriptors that came belong to this process from then on, whatever the greeting turns out to be.
        received.callback(_close, fds)
        try:
            hello = ControlHello(protocol_version=PROTOCOL_VERSION, token=token, asks_to_write=True)
            frame = _first_frame(connection, hello, reader, fds, time.monotonic() + timeout_s)
            welcome = _welcomed(frame, fds, target)
        except TimeoutError as error:
            raise DeadlineExceeded(target=target, timeout_s=f"{timeout_s:g}") from error
        except (OSError, InvalidArgument, DecodeError) as error:
            raise Unavailable(target=target, problem=f"control socket: {error}") from error
        received.pop_all()
    stream = SocketAccess(connection, reader, target, timeout_s)
    stream.tenant = welcome.tenant
    return Control(welcome.arena, fds, stream)


def _welcomed(frame: Frame, fds: list[int], target: str) -> ControlWelcome:
    if frame.kind == FrameKind.END:
        raise from_status(status_pb2.Status.FromString(frame.message), target)
    welcome = ControlWelcome.FromString(frame.message)
    is_understood = frame.kind == FrameKind.HELLO and welcome.protocol_version == PROTOCOL_VERSION
    # Two descriptors where writing is allowed, one where it is not: another count is another protocol.
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
        # Room for four, though two are expected: a cut list of descriptors would pass for a shorter one.
        data, received, _, _ = socket.recv_fds(connection, _GREETING_READ_BYTES, 4)
        fds += received
        if not data:
            raise ConnectionResetError("it was closed")
        reader.feed(data)
    return frame


def _is_trusted(connection: socket.socket) -> bool:
    # By the kernel's word: anybody may have put a socket at that path.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return _PEER_CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
