"""Host memory: POSIX shared memory by name, memfds, and the socket over which engines pass descriptors.

A mapping behind the end of a file kills the process that touches it. A memfd must therefore be sealed against
shrinking. Named memory cannot be sealed, and is looked at again before each use.

A message on the descriptor socket is a ticket of 16 to 64 bytes with its descriptors beside it. The
answer is one byte, 1 for taken. Descriptors that were not claimed are closed when their connection ends.
Only processes of this user or of root are listened to. The event loop owns the socket.

Worst case: an engine that shrinks named memory between that look and the use, which ends the worker; and
a peer that sends nonsense, whose connection ends.
"""

import asyncio
import fcntl
import logging
import mmap
import os
import re
import socket
import stat
import struct
from array import array
from collections.abc import Hashable
from pathlib import Path

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument

log = logging.getLogger(__name__)

_NAME = re.compile(r"/[^/\0]{1,250}")
_DIRECTORY = "/dev/shm"  # noqa: S108  where Linux keeps what shm_open opens


class HostMemory:
    """A mapped file. `data` is [size] uint8; the mapping ends when nothing shows it any more."""

    def __init__(self, fd: int, size_bytes: int, field: str) -> None:
        """Takes the descriptor over. Raises InvalidArgument for less memory than `size_bytes`."""
        self._fd, self._field, self.size_bytes = fd, field, size_bytes
        # Device and inode name the memory, whichever way it was passed: two engines with one file are found.
        status = os.fstat(fd)
        self.identity: Hashable = ("file", status.st_dev, status.st_ino)
        self.kin: Hashable = None
        self.begin_bytes = 0
        try:
            self.check()
            # The tensor holds the mapping: it ends with the last view, and not with the descriptor.
            self.data: Tensor = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        except OSError as error:
            os.close(fd)
            raise InvalidArgument(field=field, problem=f"cannot be mapped: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def check(self) -> None:
        """Raise InvalidArgument when the file has become too small."""
        there = os.fstat(self._fd).st_size
        if there < self.size_bytes:
            problem = f"{there:,} bytes are there, {self.size_bytes:,} were said"
            raise InvalidArgument(field=self._field, problem=problem)

    def close(self) -> None:
        """Close the file; tensors that still show its bytes keep them mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_named(name: str, size_bytes: int, field: str) -> HostMemory:
    """Map POSIX shared memory. Raises InvalidArgument."""
    if not _NAME.fullmatch(name) or name in ("/.", "/.."):
        raise InvalidArgument(field=field, problem=f"{name!r} is no name of shared memory")
    try:
        # NOFOLLOW and NONBLOCK: a link could lead out of the
        # directory, and opening a fifo would wait for its other end.
        fd = os.open(f"{_DIRECTORY}{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        problem = f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}"
        raise InvalidArgument(field=field, problem=problem) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidArgument(field=field, problem=f"{name} is no shared memory")
    return HostMemory(fd, size_bytes, field)


def open_descriptor(fd: int, size_bytes: int, field: str) -> HostMemory:
    """Map a memfd; takes the descriptor over. Raises InvalidArgument."""
    try:
        # Only memfds have seals; for other files the call fails.
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        is_sealed = 0
    if not is_sealed:
        os.close(fd)
        raise InvalidArgument(field=field, problem="is no memfd that is sealed against shrinking")
    return HostMemory(fd, size_bytes, field)


TICKET_BYTES = range(16, 65)
CONNECTION_LIMIT = 64
DESCRIPTOR_LIMIT = 256
"""Most descriptors of one message, and of one connection's unclaimed ones."""
ACCEPT_PAUSE_S = 0.1
TAKEN = b"\x01"
_CREDENTIALS = struct.Struct("3i")


class DescriptorSocket:
    """Listens at a path for descriptors; `claim` hands them out."""

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
            # The mode is set before anybody is listened to.
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
        # A copy: the connection that passed it may end while the memory is mapped.
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
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Descriptors or memory may be short for a moment; the connection waits in the backlog.
                log.warning("no descriptors are accepted for %g s: %s", ACCEPT_PAUSE_S, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            # The kernel says who connected (SO_PEERCRED): a
            # second guard beside the mode of the socket's file.
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
                    # A ticket that exists is another connection's:
                    # taking it over would hand out its descriptors.
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
    # asyncio has no `sock_recvmsg`: the loop is asked for readiness, and the message is read at once.
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
            # A control message may be cut in the middle of a number.
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
