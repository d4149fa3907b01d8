"""The descriptor socket: file descriptors that engines pass before they attach, kept until they are claimed.

A message is a ticket of 16 to 64 bytes with its descriptors beside it; the answer is one byte, 1 for taken. What
nobody claims is closed when its connection ends. Only processes of this user or of root are listened to.
Owned by the event loop. Worst case: a peer that sends nonsense, whose connection ends.
"""

import asyncio
import os
import socket
import struct
from array import array
from pathlib import Path

from ctxcache.errors import InvalidArgument

TICKET_BYTES = range(16, 65)
CONNECTION_LIMIT = 64
DESCRIPTOR_LIMIT = 256
"""Of one message, and of all that one connection has passed and nobody has claimed."""
TAKEN = b"\x01"
_CREDENTIALS = struct.Struct("3i")


class DescriptorSocket:
    """Listens at a path; `claim` hands out what came."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: set[asyncio.Task[None]] = set()
        self._passed: dict[bytes, list[int]] = {}

    def open(self) -> None:
        """Listen; the path is ours by a lock that is held. Raises OSError."""
        Path(self._path).unlink(missing_ok=True)
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            listener.bind(self._path)
            Path(self._path).chmod(0o600)
            listener.listen(CONNECTION_LIMIT)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    def claim(self, ticket: bytes, index: int, field: str) -> int:
        """A copy of a descriptor, the caller's to close. Raises InvalidArgument."""
        fds = self._passed.get(ticket, [])
        if not 0 <= index < len(fds):
            problem = f"descriptor {index} of that ticket was not passed, or its connection has ended"
            raise InvalidArgument(field=field, problem=problem)
        return os.dup(fds[index])

    async def close(self) -> None:
        """Listen no more, and close what nobody claimed."""
        tasks = [task for task in (self._accepting, *self._peers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            Path(self._path).unlink(missing_ok=True)  # noqa: ASYNC240  a name in a directory of ours

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            if len(self._peers) >= CONNECTION_LIMIT or not _is_trusted(connection):
                connection.close()
                continue
            peer = loop.create_task(self._serve(connection))
            self._peers.add(peer)
            peer.add_done_callback(self._peers.discard)

    async def _serve(self, connection: socket.socket) -> None:
        mine: dict[bytes, list[int]] = {}
        try:
            while (message := await _receive(connection)) is not None:
                ticket, fds = message
                count = sum(map(len, mine.values())) + len(fds)
                if (
                    len(ticket) not in TICKET_BYTES
                    or not fds
                    or count > DESCRIPTOR_LIMIT
                    or ticket in self._passed
                ):
                    _close(fds)
                    return
                mine[ticket] = self._passed[ticket] = fds
                await asyncio.get_running_loop().sock_sendall(connection, TAKEN)
        except OSError:
            return
        finally:
            for ticket, fds in mine.items():
                del self._passed[ticket]
                _close(fds)
            connection.close()


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """One message; None at the end. Descriptors of a message that was cut are closed."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    room = socket.CMSG_SPACE(DESCRIPTOR_LIMIT * array("i").itemsize)
    data, control, flags, _ = connection.recvmsg(TICKET_BYTES.stop, room, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        _close(fds.tolist())
        return None
    return data, fds.tolist()


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _is_trusted(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
