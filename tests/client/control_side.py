"""The far side of the control socket for the client's tests: one thread per connection, no checks."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxcache.v1 import arena_pb2
from ctxcache.wire.frames import FrameKind, FrameReader, encode_frame

Answer = Callable[[arena_pb2.AccessRequest], arena_pb2.AccessResponse]


class ControlSide:
    """Listens where the arena's facts say, and answers by `answer`.

    `welcomes` is what it says of the arena.
    """

    def __init__(self, facts: arena_pb2.Arena, answer: Answer) -> None:
        self.welcomes = arena_pb2.Arena()
        self.welcomes.CopyFrom(facts)
        self._answer = answer
        self._connections: list[socket.socket] = []
        self._path = Path(facts.control_socket)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(facts.control_socket)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Break every connection and stop listening."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()

    def break_connections(self) -> None:
        """Break every connection while its batches are still busy."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        frames = FrameReader()
        while True:
            try:
                data = connection.recv(1 << 16)
                frames.feed(data)
                while (frame := frames.next()) is not None:
                    self._take(connection, frame.kind, frame.message)
            except OSError:
                return
            if not data:
                return

    def _take(self, connection: socket.socket, kind: int, message: bytes) -> None:
        if kind == FrameKind.HELLO:
            welcome = arena_pb2.ControlWelcome(protocol_version=1, arena=self.welcomes)
            frame = encode_frame(FrameKind.HELLO, welcome.SerializeToString())
            with Path(self.welcomes.path).open("r+b") as arena:
                fds = [arena.fileno()] * (1 + self.welcomes.may_write)
                socket.send_fds(connection, [frame], fds)
        else:
            answer = self._answer(arena_pb2.AccessRequest.FromString(message))
            connection.sendall(encode_frame(FrameKind.ACCESS, answer.SerializeToString()))
