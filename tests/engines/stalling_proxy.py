"""A proxy of TCP connections that stalls in the middle of a long answer, as networks do, until it goes on."""

import socket
import threading
from types import TracebackType
from typing import Self

CHUNK_BYTES = 4096


class StallingProxy:
    """Passes bytes between its clients and `target`, a `host:port`. A context manager.

    A thread for each direction of each connection; all end with their connection.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._server = host, int(port)
        self._lock = threading.Lock()
        self._left_bytes: int | None = None
        self._going = threading.Event()
        self._going.set()
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def target(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def is_stalled(self) -> bool:
        """Whether it passes no answer now."""
        return not self._going.is_set()

    def stall(self, *, after_bytes: int) -> None:
        """Pass the next `after_bytes` of answers, then none until `go_on`."""
        with self._lock:
            self._left_bytes = after_bytes

    def go_on(self) -> None:
        """Pass all answers again, those that were held first."""
        self._going.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.go_on()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pass, args=(source, sink), kwargs={"is_answer": is_answer}, daemon=True
                ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, *, is_answer: bool) -> None:
        with source, sink:
            try:
                while data := source.recv(CHUNK_BYTES):
                    if is_answer:
                        self._count(len(data))
                        self._going.wait()
                    sink.sendall(data)
                source.shutdown(socket.SHUT_RDWR)
                sink.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            if self._left_bytes is None:
                return
            self._left_bytes -= size_bytes
            if self._left_bytes <= 0:
                self._left_bytes = None
                self._going.clear()
